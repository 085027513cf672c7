"""Buckets of examples, and the rule by which they become batches.

Three rules share one interface: a fixed size per bucket, Lhotse's limits on a batch's total duration and number of
cuts, and any of Lhotse's ``SamplingConstraint`` objects. Readiness is kept up to date as examples come and go, so
asking for it costs a few vector operations whatever the number of buckets and examples; picking a batch costs its
size. An example is a cut, or a tuple of cuts whose first one counts.
"""

from __future__ import annotations

import logging
import random
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lhotse_oomfit.readahead import Chunk

__all__ = ["Buckets", "ConstraintBuckets", "FixedBuckets", "LimitBuckets"]

logger = logging.getLogger(__name__)

Batch = list[Any]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Constraint(Protocol):
    """What is needed of Lhotse's ``SamplingConstraint``."""

    def add(self, example: Any) -> None: ...
    def close_to_exceeding(self) -> bool: ...
    def reset(self) -> None: ...
    def copy(self) -> Constraint: ...


class Buckets:
    """Examples by bucket: first come, first served, or picked at random when a generator is given.

    :param num_buckets: how many buckets.
    :param rng: picks examples; ``None`` keeps the order of arrival.
    """

    def __init__(self, num_buckets: int, rng: random.Random | None) -> None:
        self.rng = rng
        # A list loses a random element in constant time by a swap with its last; a deque its first one.
        make = deque if rng is None else list
        self._items: list[Any] = [make() for _ in range(num_buckets)]
        # Written one by one, which is quick in an array, and read as a vector, which is quick in numpy.
        self._count = array("q", [0]) * num_buckets
        self.counts: IntArray = np.frombuffer(self._count, dtype=np.int64)
        """Examples in each bucket."""
        self.inverse_sizes: FloatArray = np.ones(num_buckets)
        """One over the size of a bucket's batches: known, or the mean of those that were drawn."""
        self._num_drawn = np.zeros(num_buckets)
        self._num_batches = np.zeros(num_buckets)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, chunk: Chunk) -> None:
        """Put the chunk's examples into their buckets."""
        items, count = self._items, self._count
        for item, k in zip(chunk.items, chunk.buckets, strict=True):
            items[k].append(item)
            count[k] += 1

    def put_back(self, k: int, batch: Batch) -> None:
        """Return examples that were drawn from bucket ``k``."""
        self.add(Chunk(batch, [k] * len(batch), None))

    def ready(self, num_batches: int = 1) -> BoolArray:
        """Which buckets hold ``num_batches`` full batches (rules without a size look for one)."""
        raise NotImplementedError

    def draw(self, k: int) -> Batch:
        """Take one batch out of bucket ``k``: a full one if the bucket is ready, else all that is left."""
        raise NotImplementedError

    def _pick(self, k: int, num: int) -> Batch:
        bucket = self._items[k]
        self._count[k] -= num
        if self.rng is None:
            return [bucket.popleft() for _ in range(num)]
        # The picked ones gather at the end of the list, by swaps.
        uniform = self.rng.random
        stop = len(bucket)
        for _ in range(num):
            picked = int(uniform() * stop)
            stop -= 1
            bucket[picked], bucket[stop] = bucket[stop], bucket[picked]
        batch: Batch = bucket[stop:]
        del bucket[stop:]
        return batch

    def _note_size(self, k: int, size: int) -> None:
        self._num_drawn[k] += size
        self._num_batches[k] += 1
        self.inverse_sizes[k] = self._num_batches[k] / self._num_drawn[k]


class FixedBuckets(Buckets):
    """A batch of bucket ``k`` holds ``sizes[k]`` examples."""

    def __init__(self, sizes: Sequence[int], rng: random.Random | None) -> None:
        super().__init__(len(sizes), rng)
        self.set_sizes(sizes)

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Form batches of other sizes from now on."""
        self._sizes = list(sizes)
        self.sizes: IntArray = np.array(self._sizes, dtype=np.int64)
        self.inverse_sizes = 1.0 / self.sizes
        self._wanted: dict[int, IntArray] = {}

    def ready(self, num_batches: int = 1) -> BoolArray:
        wanted = self._wanted.get(num_batches)
        if wanted is None:
            wanted = self._wanted[num_batches] = self.sizes * num_batches
        return self.counts >= wanted

    def draw(self, k: int) -> Batch:
        return self._pick(k, min(self._sizes[k], self._count[k]))

    def draw_many(self, k: int, num_batches: int) -> list[Batch]:
        """Take ``num_batches`` full batches out of bucket ``k`` at once."""
        size = self._sizes[k]
        picked = self._pick(k, size * num_batches)
        if num_batches == 1:
            return [picked]
        return [picked[start : start + size] for start in range(0, size * num_batches, size)]


class LimitBuckets(Buckets):
    """Lhotse's ``TimeConstraint``: the longest example times their number stays within ``max_duration``.

    A batch is full when one more example as long as its longest would exceed ``max_duration``, or when it holds
    ``max_cuts``. That depends on the number of examples and on the longest one only, so a bucket is ready when the
    two of all its examples say so. Lengths are durations, with Lhotse's quadratic term where asked for.
    """

    def __init__(
        self, num_buckets: int, rng: random.Random | None, *, max_duration: float | None, max_cuts: int | None
    ) -> None:
        super().__init__(num_buckets, rng)
        self.max_duration = float("inf") if max_duration is None else max_duration
        self.max_cuts = max_cuts
        make = deque if rng is None else list
        self._lengths: list[Any] = [make() for _ in range(num_buckets)]
        self._warned = False
        self._longest = array("d", [0.0]) * num_buckets
        self.longest: FloatArray = np.frombuffer(self._longest, dtype=np.float64)

    def add(self, chunk: Chunk) -> None:
        super().add(chunk)
        longest = self._longest
        for k, length in zip(chunk.buckets, chunk.lengths or (), strict=True):
            self._lengths[k].append(length)
            if length > longest[k]:
                longest[k] = length

    def put_back(self, k: int, batch: Batch) -> None:
        raise NotImplementedError("limits don't change in the middle of an epoch")

    def ready(self, num_batches: int = 1) -> BoolArray:
        full: BoolArray = (self.counts + 1) * self.longest > self.max_duration
        full &= self.counts > 0
        if self.max_cuts is not None:
            full |= self.counts >= self.max_cuts
        return full

    def draw(self, k: int) -> Batch:
        items, lengths = self._items[k], self._lengths[k]
        most = len(items) if self.max_cuts is None else min(self.max_cuts, len(items))
        batch: Batch = []
        longest = 0.0
        lost_longest = False
        while len(batch) < most:
            if self.rng is None:
                item, length = items.popleft(), lengths.popleft()
            else:
                picked = int(self.rng.random() * len(items))
                items[picked], items[-1] = items[-1], items[picked]
                lengths[picked], lengths[-1] = lengths[-1], lengths[picked]
                item, length = items.pop(), lengths.pop()
            batch.append(item)
            longest = max(longest, length)
            lost_longest = lost_longest or length >= self._longest[k]
            if (len(batch) + 1) * longest > self.max_duration:
                break
        self._count[k] -= len(batch)
        if longest > self.max_duration and len(batch) == 1 and not self._warned:
            self._warned = True
            logger.warning(
                "a single cut, %.1f s long with its quadratic term, exceeds max_duration, %.1f s; it is a batch of its "
                "own, and so are others like it",
                longest,
                self.max_duration,
            )
        if lost_longest:
            # Looking through a bucket costs its size, and is due about once per (its size / batch size) batches.
            self._longest[k] = max(lengths, default=0.0)
        self._note_size(k, len(batch))
        return batch


class ConstraintBuckets(Buckets):
    """Batches as one of Lhotse's ``SamplingConstraint`` objects has them.

    A copy of the constraint per bucket is fed with arriving examples until it is close to exceeding, so each batch
    costs its own size again.
    """

    def __init__(self, num_buckets: int, rng: random.Random | None, constraint: Constraint) -> None:
        super().__init__(num_buckets, rng)
        self._constraint = constraint
        self._probes = [self._fresh() for _ in range(num_buckets)]
        self._ready: BoolArray = np.zeros(num_buckets, dtype=np.bool_)

    def _fresh(self) -> Constraint:
        constraint = self._constraint.copy()
        constraint.reset()
        return constraint

    def add(self, chunk: Chunk) -> None:
        super().add(chunk)
        for item, k in zip(chunk.items, chunk.buckets, strict=True):
            if not self._ready[k]:
                self._probe(k, item)

    def _probe(self, k: int, item: Any) -> None:
        self._probes[k].add(item[0] if isinstance(item, tuple) else item)
        self._ready[k] = self._probes[k].close_to_exceeding()

    def ready(self, num_batches: int = 1) -> BoolArray:
        return self._ready

    def draw(self, k: int) -> Batch:
        constraint = self._fresh()
        batch: Batch = []
        while self._count[k] and not (batch and constraint.close_to_exceeding()):
            (item,) = self._pick(k, 1)
            batch.append(item)
            constraint.add(item[0] if isinstance(item, tuple) else item)
        self._probes[k] = self._fresh()
        self._ready[k] = False
        for item in self._items[k]:
            self._probe(k, item)
            if self._ready[k]:
                break
        self._note_size(k, len(batch))
        return batch
