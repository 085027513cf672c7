"""Characters as tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class CharTokenizer:
    """Token 0 is CTC's blank, the characters of ``alphabet`` follow.

    Calling it encodes, which is the form that samplers take to count tokens. A character outside the alphabet (in
    held-out text, say) is left out.
    """

    def __init__(self, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise ValueError(f"alphabet must hold different characters, at least one, got {alphabet!r}")
        self.alphabet = alphabet
        self._ids = {char: index for index, char in enumerate(alphabet, start=1)}

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> CharTokenizer:
        """An alphabet of every character in ``texts``, sorted."""
        return cls("".join(sorted(set().union(*texts))))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the blank included."""
        return len(self.alphabet) + 1

    def __call__(self, text: str) -> list[int]:
        return [self._ids[char] for char in text if char in self._ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``; blanks are left out."""
        return "".join(self.alphabet[token - 1] for token in tokens if token > 0)
