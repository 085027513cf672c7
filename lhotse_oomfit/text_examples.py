"""Worst-case batches of Lhotse's text examples, which have no duration to stretch: tokens and texts are repeated."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from lhotse import CutSet
from lhotse.cut.text import TextExample, TextPairExample

from lhotse_oomfit.errors import WorstCaseError
from lhotse_oomfit.undisturbed import untracked

__all__ = ["TextBatches", "are_texts"]

_DENSE_QUANTILE = 0.95
_MOST_TOKENS = 1 << 24


def are_texts(examples: Sequence[Any]) -> bool:
    """Whether all of them are Lhotse's text examples, or pairs of such."""
    return bool(examples) and all(isinstance(example, (TextExample, TextPairExample)) for example in examples)


class TextBatches:
    """Makes worst-case batches of the longest of some real text examples.

    :param collate: what the DataLoader applies to a sampled batch. All batches are collated for real.
    :param examples: a sample; of pairs, targets grow with sources, as they do in the denser ones of the sample.
    :param measure_length: length of an example in the unit of the bins.
    """

    def __init__(
        self, *, collate: Callable[[CutSet], Any], examples: Sequence[Any], measure_length: Callable[[Any], float]
    ) -> None:
        self._collate = collate
        self._measure_length = measure_length
        self._longest = max(examples, key=measure_length)
        pairs = [example for example in examples if isinstance(example, TextPairExample)]
        ratios = [_count(pair.target) / max(_count(pair.source), 1) for pair in pairs]
        self._ratio = float(np.quantile(ratios, _DENSE_QUANTILE)) if ratios else 0.0

    def batch(self, *, input_len: float, output_len: int | None, size: int) -> Any:
        """Return a batch of `size` examples at the upper edge of a bucket; the last of several is one token shorter.

        :raises WorstCaseError: for a bucket with an edge in output tokens, or a measure that tokens don't decide.
        """
        if output_len is not None:
            raise WorstCaseError(
                "the output tokens of text examples can't be brought to a bucket's edge; pass make_batch, or bins of "
                "one length"
            )
        num = self._largest_number(input_len)
        full, shorter = self._resized(num), self._resized(max(num - 1, 1))
        examples = [self._copy(full) for _ in range(size - 1)] + [self._copy(full if size == 1 else shorter)]
        with untracked():
            return self._collate(CutSet(examples))

    def _resized(self, num: int) -> Any:
        """The longest example with another number of tokens, or of characters where it has no tokens."""
        example = self._longest
        if isinstance(example, TextPairExample):
            num_of_target = max(1, math.ceil(self._ratio * num - 1e-6))
            return dataclasses.replace(
                example, source=_resized(example.source, num), target=_resized(example.target, num_of_target)
            )
        return _resized(example, num)

    @staticmethod
    def _copy(example: Any) -> Any:
        """A dataset may write into what it is given."""
        if isinstance(example, TextPairExample):
            return dataclasses.replace(
                example, source=dataclasses.replace(example.source), target=dataclasses.replace(example.target)
            )
        return dataclasses.replace(example)

    def _largest_number(self, input_len: float) -> int:
        """The most tokens whose example is no longer than `input_len`."""

        def exceeds(num: int) -> bool:
            return self._measure_length(self._resized(num)) > input_len

        low, high = 1, 2
        while not exceeds(high):
            low, high = high, 2 * high
            if high > _MOST_TOKENS:
                raise WorstCaseError(
                    f"the length of a text example must grow with its tokens to reach {input_len:g}, but {low} of them "
                    f"measure {self._measure_length(self._resized(low)):g}; pass make_batch"
                )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if exceeds(middle) else (middle, high)
        return low


def _count(text: TextExample) -> int:
    return len(text.text if text.tokens is None else text.tokens)


def _resized(text: TextExample, num: int) -> TextExample:
    own = max(_count(text), 1)
    num_characters = num if text.tokens is None else math.ceil(len(text.text) * num / own)
    characters = "".join(itertools.islice(itertools.cycle(text.text or "a"), num_characters))
    return dataclasses.replace(text, text=characters, tokens=_repeated(text.tokens, num))


def _repeated(tokens: Any, num: int) -> Any:
    if tokens is None:
        return None
    if len(tokens) == 0:
        raise WorstCaseError("the longest text example of the sample has no tokens to repeat; pass make_batch")
    indices = np.arange(num) % len(tokens)
    if isinstance(tokens, np.ndarray):
        return tokens[indices]
    if isinstance(tokens, torch.Tensor):
        return tokens[torch.from_numpy(indices)]
    return [tokens[index] for index in indices]
