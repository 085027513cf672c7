"""What the sampled texts are written in, and texts of any length in the same characters.

A tokenizer may know the characters of its data and no others, so a text made up for measuring uses none that the
sample doesn't have: no space in Chinese, no lower case where all is capitals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lhotse_oomfit.errors import WorstCaseError

__all__ = ["Script", "cycle_text", "fit_text", "learn_script"]

_MAX_CHARS_PER_TOKEN = 200  # a tokenizer that swallows more than this can't be driven by text
_FILL_STEPS = 64
_LOOK_BACK = 24
_FILL_LETTERS = 16  # of the sample, besides those of the text itself


@dataclass(frozen=True, kw_only=True)
class Script:
    """The characters of texts.

    :param separator: the commonest white space; empty where there is none, so words aren't told apart by it.
    :param letters: all other characters, the commonest first.
    """

    separator: str
    letters: tuple[str, ...]


def learn_script(texts: Iterable[str | None]) -> Script:
    """Learn the characters of ``texts``; what is None is passed over."""
    counted: Counter[str] = Counter()
    for text in texts:
        counted.update(text or "")
    ordered = sorted(counted, key=lambda char: (-counted[char], char))
    return Script(
        separator=next((char for char in ordered if char.isspace()), ""),
        letters=tuple(char for char in ordered if not char.isspace()),
    )


def cycle_text(text: str, num_chars: int, separator: str) -> str:
    """Repeat ``text``, or cut it off, at ``num_chars`` characters."""
    if not text or num_chars == len(text):
        return text
    unit = text + separator
    return (unit * (num_chars // len(unit) + 1))[:num_chars]


def fit_text(text: str, num_tokens: int, count: Callable[[str], int], script: Script, cut_id: str) -> str:
    """Repeat ``text`` until ``count`` says ``num_tokens``: by doubling, bisecting, filling up character by character.

    :return: a text with the nearest number above, where no text has just that many.
    :raises WorstCaseError: if the count doesn't follow the text.
    """
    try:
        return _fit(text, num_tokens, count, script, cut_id)
    except WorstCaseError:
        if script.separator:
            raise
    # Texts of one word each, counted in words: nothing but a space makes more of them.
    return _fit(text, num_tokens, count, Script(separator=" ", letters=script.letters), cut_id)


def _fit(text: str, num_tokens: int, count: Callable[[str], int], script: Script, cut_id: str) -> str:
    seed = text.strip() or (script.letters[0] if script.letters else "a")
    unit = seed + script.separator

    def stream(num_chars: int) -> str:
        return (unit * (num_chars // len(unit) + 1))[:num_chars]

    low, high, limit = 0, max(1, len(seed)), _MAX_CHARS_PER_TOKEN * (num_tokens + 10)
    while count(stream(high)) < num_tokens:
        low, high = high, 2 * high
        if high > limit:
            most = count(stream(low))
            if most <= count(stream(1)):
                raise WorstCaseError(
                    f"the number of output tokens of cut {cut_id!r} doesn't follow the length of its text: "
                    f"{low} characters still give {most}, where {num_tokens} are needed; pass make_batch"
                )
            return _fit(text, most, count, script, cut_id)  # the measure stops counting there
    if count(stream(low)) > num_tokens:  # what isn't text (a prompt) already exceeds it
        return stream(low)
    while high - low > 1:
        middle = (low + high) // 2
        if count(stream(middle)) <= num_tokens:
            low = middle
        else:
            high = middle
    for num_chars in (high, low):
        if count(stream(num_chars)) == num_tokens:
            return stream(num_chars)
    own = set(seed)
    letters = [*sorted(own), *[char for char in script.letters if char not in own][:_FILL_LETTERS]]
    for back in range(min(low, _LOOK_BACK)):
        filled = _fill(stream(low - back), num_tokens, count, letters)
        if filled is not None:
            return filled
    return stream(high)


def _fill(text: str, num_tokens: int, count: Callable[[str], int], letters: list[str]) -> str | None:
    """Add single characters that add single tokens until the count is exact; None if it can't be."""
    tokens = count(text)
    for _ in range(_FILL_STEPS):
        if tokens == num_tokens:
            return text
        for char in letters:
            if tokens < count(text + char) <= num_tokens:
                text += char
                tokens = count(text)
                break
        else:
            return None
    return None
