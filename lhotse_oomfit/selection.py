"""From cuts that were read to cuts in buckets: filter, measure once, look up.

A selection is made when an epoch starts and holds all that it needs, so that a thread can use it without keeping
the sampler alive.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any, Protocol

from lhotse_oomfit.bins import Bins, Rejection, checked_length, has_text, missing_tokens, output_length
from lhotse_oomfit.readahead import Chunk

__all__ = ["FILTERED", "NO_BUCKET", "Selection"]

FILTERED = "left out by filter()"
NO_BUCKET = "no bucket of the constraint"


class Selecting(Protocol):
    """What is needed of Lhotse's ``SamplingConstraint``."""

    def select_bucket(self, buckets: Any, example: Any = None) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Decides which bucket an example belongs to, if any.

    :param edges: one fewer than there are buckets in Lhotse's modes, one per bucket with ``bins``.
    :param bins: with fixed sizes; what fits none of them is left out.
    :param density: without ``bins``: what ``min_tps`` and ``max_tps`` leave out.
    :param constraint: Lhotse's custom constraint, which selects buckets itself.
    :param quadratic_duration: of Lhotse's duration limit.
    :param with_lengths: whether chunks carry (effective) durations.
    :param several: whether examples are tuples of cuts; their first one is measured.
    """

    edges: Sequence[Any]
    bins: Bins | None = None
    density: Bins | None = None
    constraint: Selecting | None = None
    measure: Callable[[Any], float] | None = None
    tokenizer: Callable[[str], Sequence[Any]] | None = None
    keep: Callable[[Any], bool] | None = None
    quadratic_duration: float | None = None
    with_lengths: bool = False
    several: bool = False

    @cached_property
    def with_tokens(self) -> bool:
        """Whether the number of tokens has a say."""
        rule = self.density if self.bins is None else self.bins
        return rule is not None and rule.needs_tokens

    def classify(self, cut: Any) -> int | str:
        """The bucket of ``cut``, or a string: the reason why it has none.

        :raises MissingTokensError: when tokens decide and the cut has text that nothing can count.
        :raises InvalidArgumentError: when the cut's length isn't a number of at least 0, or not finite where Lhotse's
            limits add it up.
        """
        rule = self.density if self.bins is None else self.bins
        if rule is not None:
            tokens = None
            if self.with_tokens:
                tokens = output_length(cut, self.tokenizer)
                if tokens is None and has_text(cut):
                    raise missing_tokens(cut)
            length = cut.duration if self.measure is None else self.measure(cut)
            found = rule.select(checked_length(cut, length, finite=self.bins is None), tokens)
            if isinstance(found, Rejection):
                return found.value
            if self.bins is not None:
                return found
        if self.constraint is None:
            return bisect_left(self.edges, checked_length(cut, cut.duration, finite=True))
        duration = getattr(cut, "duration", None)
        if isinstance(duration, (int, float)):  # a constraint may measure something else, of examples without any
            checked_length(cut, duration, finite=True)
        k = self.constraint.select_bucket(buckets=self.edges, example=cut)
        return NO_BUCKET if k is None or not 0 <= k <= len(self.edges) else k

    def sort(self, items: list[Any]) -> Chunk:
        """The items that pass the filter and belong to a bucket, and how many don't."""
        num_read = len(items)
        if self.keep is not None:
            keep = self.keep
            items = [item for item in items if (all(map(keep, item)) if self.several else keep(item))]
        firsts = list(map(itemgetter(0), items)) if self.several else items
        by_length_alone = self.density is None and self.constraint is None
        if by_length_alone and not self.with_tokens:
            chunk = self._sort_by_length(items, firsts)
        else:
            chunk = self._sort_one_by_one(items, firsts)
        if len(items) < num_read:
            chunk.rejected[FILTERED] = num_read - len(items)
        return chunk

    def _sort_by_length(self, items: list[Any], firsts: list[Any]) -> Chunk:
        # The common case, without a call per cut: it decides how soon the first batch is there.
        edges = self.edges
        lengths = list(map(self.measure or attrgetter("duration"), firsts))
        if lengths and not self._are_sound(lengths):
            for cut in firsts:
                self.classify(cut)  # names the one whose length isn't a number
        found = [bisect_left(edges, length) for length in lengths]
        chunk = Chunk(items, found, None)
        if self.bins is not None and found and max(found) == len(edges):
            beyond = len(edges)
            chunk.items = [item for item, k in zip(items, found, strict=True) if k < beyond]
            chunk.buckets = [k for k in found if k < beyond]
            chunk.rejected[Rejection.TOO_LONG.value] = len(items) - len(chunk.items)
        if self.with_lengths:
            chunk.lengths = lengths if self.quadratic_duration is None else list(map(self._effective, lengths))
        return chunk

    def _are_sound(self, lengths: list[Any]) -> bool:
        try:
            total = sum(lengths)
            return bool(min(lengths) >= 0.0 and total >= 0.0 and (total < math.inf or self.bins is not None))
        except (TypeError, ValueError, RuntimeError):
            return False

    def _sort_one_by_one(self, items: list[Any], firsts: list[Any]) -> Chunk:
        chunk = Chunk([], [], [] if self.with_lengths else None)
        for item, first in zip(items, firsts, strict=True):
            k = self.classify(first)
            if isinstance(k, str):
                chunk.rejected[k] = chunk.rejected.get(k, 0) + 1
                continue
            chunk.items.append(item)
            chunk.buckets.append(k)
            if chunk.lengths is not None:
                chunk.lengths.append(self._effective(first.duration))
        return chunk

    def _effective(self, duration: float) -> float:
        # Lhotse's quadratic term: lhotse/dataset/sampling/base.py, TimeConstraint.
        if self.quadratic_duration is None:
            return duration
        return duration + duration * duration / self.quadratic_duration


def density_limits(min_tps: float | None, max_tps: float | None) -> Bins | None:
    """Bins that refuse by density alone."""
    if min_tps is None and max_tps is None:
        return None
    return Bins.from_edges([math.nextafter(math.inf, 0.0)], min_tps=min_tps, max_tps=max_tps)
