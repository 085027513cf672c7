"""The bucket buffer: takes examples in, chooses buckets, hands out one batch per rank.

Everything here depends on counts of examples and on seeded generators, never on time: a buffer made again with the
same source, seeds and sizes hands out the same batches, whether or not its reader reads ahead.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from lhotse_oomfit.buckets import Batch, BoolArray, Buckets, FixedBuckets, FloatArray
from lhotse_oomfit.errors import BufferTooSmallError
from lhotse_oomfit.readahead import Chunk, Reader

__all__ = ["BucketBuffer"]

logger = logging.getLogger(__name__)

_TELL = 10  # times as many examples as the buffer holds, or as when it was told last
Step = list[tuple[int, Batch]]  # a bucket and its examples, for each rank


class BucketBuffer:
    """Holds examples by bucket and draws, step by step, one batch for each rank.

    :param reader: where examples come from.
    :param buckets: empty buckets with the rule that forms batches.
    :param capacity: how many examples to hold; grows up to ``max_capacity`` where the batch sizes need it.
    :param start: how many examples to take in before the first batch; later, up to 1.25 for each one drawn.
    :param world_size: how many batches make a step.
    :param same_bucket: draw all batches of a step from one bucket where possible.
    :param drop_last: leave out batches that the end of the source leaves incomplete.
    :param bucket_rng: chooses buckets; seeded alike on ranks that have streams of their own, it keeps them in step.
    :param on_rejections: told how many examples were rejected and how many were read, once these are ten times
        ``capacity``, and again each time there are ten times as many. A source needn't end, nor hold what is admitted.
    :raises BufferTooSmallError: when ``max_capacity`` can't hold a step's full batches of every bucket.
    """

    def __init__(
        self,
        reader: Reader,
        buckets: Buckets,
        *,
        capacity: int,
        max_capacity: int,
        start: int,
        bucket_rng: np.random.Generator,
        world_size: int = 1,
        same_bucket: bool = True,
        drop_last: bool = False,
        on_rejections: Callable[[int, int], None] | None = None,
    ) -> None:
        self.reader = reader
        self.buckets = buckets
        self.capacity = capacity
        self.max_capacity = max_capacity
        self.world_size = world_size
        self.same_bucket = same_bucket
        self.drop_last = drop_last
        self.rejected: Counter[str] = Counter()
        """How many examples belonged to no bucket, by reason."""
        self.num_dropped = 0
        """How many examples ``drop_last`` left out at the end."""
        self._start = start
        self._wanted = (capacity, start)  # as asked for, whatever the sizes
        self._bucket_rng = bucket_rng
        self._rest: Chunk | None = None
        self._on_rejections = on_rejections
        self._num_read = 0
        self._tell_at = _TELL * capacity
        self._due: int | None = None  # examples to take in before the next step; None before the first
        self._size = 0
        self._ended = False
        self._drawn: FloatArray = np.zeros(len(buckets))
        self._leftovers: deque[Step] | None = None
        self._fit_capacity()

    def _fit_capacity(self) -> None:
        if not isinstance(self.buckets, FixedBuckets):
            return
        if self._due is None:
            # Nothing was taken in yet: as if these sizes had been there from the beginning.
            self.capacity, self._start = self._wanted
        # With this many examples some bucket is bound to hold a full batch for every rank.
        needed = int(self.buckets.sizes.sum()) * self.world_size
        if needed > self.max_capacity:
            ranks = f" on {self.world_size} ranks" if self.world_size > 1 else ""
            raise BufferTooSmallError(
                f"the bucket buffer must hold one full batch of every bucket{ranks}, {needed} examples, and may hold "
                f"{self.max_capacity}; raise max_buffer_size to at least {needed}, or lower the batch sizes"
            )
        if needed > self.capacity:
            logger.info("buffer_size grows from %d to %d, to hold a batch of every bucket", self.capacity, needed)
            self.capacity = needed
        self._start = min(self.capacity, max(self._start, needed))

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """From the next step on, form batches of these sizes.

        :raises BufferTooSmallError: when ``max_capacity`` is too small for them.
        """
        if not isinstance(self.buckets, FixedBuckets):
            raise TypeError("only buckets with fixed sizes can change them")
        self.buckets.set_sizes(sizes)
        self._fit_capacity()
        if self._leftovers is not None:
            for step in self._leftovers:
                for k, batch in step:
                    self.buckets.put_back(k, batch)
                    self._size += len(batch)
            self._leftovers = None

    def next_step(self) -> list[Batch] | None:
        """A batch for each rank; ``None`` when there is nothing left.

        Only when fewer examples are left than there are ranks does a step hold fewer batches than ranks.

        :raises BufferTooSmallError: when a full buffer holds no full batch (limits other than fixed sizes).
        """
        self._take_in(self._start if self._due is None else self._due)
        self._due = 0
        step = self._draw_step() if self._leftovers is None else None
        if step is None:
            if self._leftovers is None:
                self._leftovers = self._plan_leftovers([])
            if not self._leftovers:
                return None
            step = self._leftovers.popleft()
        num = sum(len(batch) for _, batch in step)
        if not self._ended:
            self._due = min(num + num // 4, self.capacity - self._size)
        return [batch for _, batch in step]

    # Taking in

    def _take_in(self, num: int) -> None:
        while num > 0 and not self._ended:
            chunk, self._rest = self._rest, None
            if chunk is None:
                chunk = self.reader.read(num)
                if chunk is None:
                    self._ended = True
                    break
                self._count(chunk)
            if len(chunk.items) > num:
                chunk, self._rest = _split(chunk, num)
            self.buckets.add(chunk)
            self._size += len(chunk.items)
            num -= len(chunk.items)

    def _count(self, chunk: Chunk) -> None:
        self.rejected.update(chunk.rejected)
        self._num_read += len(chunk.items) + sum(chunk.rejected.values())
        if self._num_read >= self._tell_at and self.rejected and self._on_rejections is not None:
            self._tell_at = _TELL * self._num_read
            self._on_rejections(sum(self.rejected.values()), self._num_read)

    def _take_in_more(self) -> None:
        """No bucket is ready although the source goes on: only more examples can help."""
        if self._size >= self.max_capacity:
            raise BufferTooSmallError(
                f"none of {len(self.buckets)} buckets holds a full batch although the buffer is full with "
                f"{self._size} examples; raise max_buffer_size, or lower max_duration or max_cuts"
            )
        self._take_in(min(max(16, self.capacity // 50), self.max_capacity - self._size))
        self.capacity = max(self.capacity, self._size)

    # Choosing

    def _choose(self, noise: FloatArray, ready: BoolArray) -> int | None:
        """A ready bucket, with probability proportional to its share of the data over its batch size.

        An exponential race (the largest of weights over independent exponentials): with the same noise, ranks whose
        weights differ a little nearly always choose the same bucket, three times as often as by inverting a
        cumulative distribution. The share is that of all examples taken in, which hardly differs between ranks, drawn
        towards the share in the buffer by its fourth root, which leads a bucket back to its level. After the end of
        the source it is the share in the buffer, so that all buckets run dry together.
        """
        counts = self.buckets.counts
        if self._ended:
            weights: FloatArray = counts.astype(np.float64)
        else:
            taken_in = counts + self._drawn
            weights = np.sqrt(np.sqrt(counts * taken_in) * taken_in)
        weights *= self.buckets.inverse_sizes
        weights *= ready
        weights /= noise
        chosen = int(weights.argmax())
        return chosen if weights[chosen] > 0.0 else None

    def _draw_step(self) -> Step | None:
        """One full batch for each rank; ``None`` when the source has ended and full batches have run out."""
        fixed = self.buckets if self.same_bucket and isinstance(self.buckets, FixedBuckets) else None
        noise = self._bucket_rng.standard_exponential(len(self.buckets))
        step: Step = []
        chosen: int | None = None
        while len(step) < self.world_size:
            ready = self.buckets.ready(self.world_size if fixed is not None else 1)
            if chosen is None or not (self.same_bucket and ready[chosen]):
                if step and not self.same_bucket:
                    noise = self._bucket_rng.standard_exponential(len(self.buckets))
                chosen = self._choose(noise, ready)
            if chosen is None:
                if self._ended:
                    self._leftovers = self._plan_leftovers(step)
                    return None
                self._take_in_more()
                continue
            if fixed is not None:
                if self._ended and self._must_plan(fixed, chosen):
                    return None
                return self._draw_together(fixed, chosen)
            batch = self.buckets.draw(chosen)
            self._note_drawn(chosen, len(batch))
            step.append((chosen, batch))
        return step

    def _draw_together(self, fixed: FixedBuckets, k: int) -> Step:
        batches = fixed.draw_many(k, self.world_size)
        self._note_drawn(k, sum(map(len, batches)))
        return [(k, batch) for batch in batches]

    def _note_drawn(self, k: int, num: int) -> None:
        self._size -= num
        self._drawn[k] += num

    # The end of the source

    def _must_plan(self, fixed: FixedBuckets, k: int) -> bool:
        """Whether one more full step from bucket ``k`` would leave too few examples to end on equal terms."""
        if self.world_size == 1 or self.drop_last:
            return False
        counts, sizes = fixed.counts.copy(), fixed.sizes
        can_end_now = self._can_end(-(-counts // sizes).sum(), counts.sum())
        counts[k] -= sizes[k] * self.world_size
        return can_end_now and not self._can_end(-(-counts // sizes).sum(), counts.sum())

    def _can_end(self, num_batches: int, num_examples: int) -> bool:
        return -(-num_batches // self.world_size) * self.world_size <= num_examples

    def _plan_leftovers(self, drawn: Step) -> deque[Step]:
        """All that is left, as steps of one batch for each rank, none above its bucket's size.

        A bucket that can give every rank half a batch does so in a step of its own. What remains is put together
        into batches; the largest are halved until every rank gets equally many; neighbouring buckets share a step.
        """
        noise = self._bucket_rng.standard_exponential(len(self.buckets))
        if self.drop_last:
            return self._plan_full_batches(drawn, noise)
        own: list[Step] = []
        pool: Step = list(drawn)
        fixed = self.buckets if isinstance(self.buckets, FixedBuckets) else None
        for k in np.flatnonzero(self.buckets.counts).tolist():
            if fixed is not None and self.same_bucket and self.world_size > 1:
                full_step = int(fixed.sizes[k]) * self.world_size
                while fixed.counts[k] >= full_step:
                    own.append(self._draw_together(fixed, k))
                num = int(fixed.counts[k])
                if 2 * num >= full_step and num >= self.world_size:
                    own.append([(k, part) for part in _parts(self._drain(k), self.world_size)])
                    continue
            while self.buckets.counts[k]:
                pool.append((k, self._draw_one(k)))
        while fixed is not None and pool and own and not self._can_end(len(pool), sum(len(b) for _, b in pool)):
            # Too few examples for equally many batches: put a step's examples back into as few as can be.
            step = own.pop()
            k, size = step[0][0], int(fixed.sizes[step[0][0]])
            together = [item for _, batch in step for item in batch]
            pool += [(k, together[i : i + size]) for i in range(0, len(together), size)]
        _halve_largest(pool, -len(pool) % self.world_size)
        pool.sort(key=lambda entry: entry[0])
        steps = own + [pool[i : i + self.world_size] for i in range(0, len(pool), self.world_size)]
        short = [step for step in steps if len(step) < self.world_size]
        whole = [step for step in steps if len(step) == self.world_size]
        whole.sort(key=lambda step: noise[step[0][0]])
        return deque(whole + short)

    def _plan_full_batches(self, drawn: Step, noise: FloatArray) -> deque[Step]:
        pool: Step = list(drawn)
        while (ready := self.buckets.ready()).any():
            k = int(ready.argmax())
            pool.append((k, self._draw_one(k)))
        pool.sort(key=lambda entry: entry[0])
        full = len(pool) - len(pool) % self.world_size
        self.num_dropped += sum(len(batch) for _, batch in pool[full:]) + int(self.buckets.counts.sum())
        steps = [pool[i : i + self.world_size] for i in range(0, full, self.world_size)]
        steps.sort(key=lambda step: noise[step[0][0]])
        return deque(steps)

    def _draw_one(self, k: int) -> Batch:
        batch = self.buckets.draw(k)
        self._note_drawn(k, len(batch))
        return batch

    def _drain(self, k: int) -> Batch:
        batch: Batch = []
        while self.buckets.counts[k]:
            batch += self._draw_one(k)
        return batch


def _split(chunk: Chunk, num: int) -> tuple[Chunk, Chunk]:
    lengths = chunk.lengths
    return (
        Chunk(chunk.items[:num], chunk.buckets[:num], None if lengths is None else lengths[:num]),
        Chunk(chunk.items[num:], chunk.buckets[num:], None if lengths is None else lengths[num:]),
    )


def _halve_largest(pool: Step, num: int) -> None:
    """Halve the largest batch, ``num`` times or as long as one holds more than one example."""
    largest = [(-len(batch), i) for i, (_, batch) in enumerate(pool)]
    heapify(largest)
    for _ in range(num if largest else 0):
        size, i = heappop(largest)
        if size == -1:
            break
        k, batch = pool[i]
        first, second = _parts(batch, 2)
        pool[i] = (k, first)
        pool.append((k, second))
        heappush(largest, (-len(first), i))
        heappush(largest, (-len(second), len(pool) - 1))


def _parts(batch: Batch, num: int) -> list[Batch]:
    """``batch`` in ``num`` parts of nearly equal sizes."""
    edges = [len(batch) * i // num for i in range(num + 1)]
    return [batch[low:high] for low, high in pairwise(edges)]
