from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lhotse_oomfit.buckets import Buckets, FixedBuckets, LimitBuckets
from lhotse_oomfit.buffer import BucketBuffer
from lhotse_oomfit.errors import BufferTooSmallError, InvalidArgumentError
from lhotse_oomfit.readahead import Chunk, DirectReader, ThreadReader

Item = tuple[int, int]  # a number and a bucket


def items(buckets: list[int]) -> list[Item]:
    return list(enumerate(buckets))


def sort(read: list[Item]) -> Chunk:
    kept = [item for item in read if item[1] >= 0]
    chunk = Chunk(kept, [k for _, k in kept], [float(k + 1) for _, k in kept])
    if len(kept) < len(read):
        chunk.rejected["negative"] = len(read) - len(kept)
    return chunk


def make_buffer(source: Any, buckets: Buckets, *, concurrent: bool = False, **options: Any) -> BucketBuffer:
    options = {"capacity": 100, "max_capacity": 10_000, "start": 100, "bucket_seed": 0} | options
    source = iter(source)
    reader = ThreadReader(source, sort, capacity=32) if concurrent else DirectReader(source, sort)
    return BucketBuffer(reader, buckets, bucket_rng=np.random.default_rng(options.pop("bucket_seed")), **options)


def steps(buffer: BucketBuffer) -> list[list[list[Item]]]:
    found = []
    while (step := buffer.next_step()) is not None:
        found.append(step)
    return found


# The laws

corpora = st.lists(st.integers(0, 5), max_size=300)
size_lists = st.lists(st.integers(1, 12), min_size=6, max_size=6)


@settings(deadline=None)
@given(
    corpus=corpora,
    sizes=size_lists,
    world_size=st.integers(1, 5),
    capacity=st.integers(1, 200),
    start=st.integers(1, 200),
    shuffle=st.booleans(),
    same_bucket=st.booleans(),
    concurrent=st.booleans(),
)
def test_every_example_comes_once_in_a_batch_of_its_bucket_within_its_size(
    corpus: list[int],
    sizes: list[int],
    world_size: int,
    capacity: int,
    start: int,
    shuffle: bool,
    same_bucket: bool,
    concurrent: bool,
) -> None:
    buffer = make_buffer(
        items(corpus),
        FixedBuckets(sizes, random.Random(0) if shuffle else None),
        concurrent=concurrent,
        capacity=capacity,
        start=min(start, capacity),
        world_size=world_size,
        same_bucket=same_bucket,
    )
    found = steps(buffer)
    batches = [batch for step in found for batch in step]
    assert sorted(item for batch in batches for item in batch) == items(corpus)
    for batch in batches:
        (k,) = {k for _, k in batch}
        assert 1 <= len(batch) <= sizes[k]
    assert all(len(step) == world_size for step in found[:-1])
    if found and len(found[-1]) < world_size:
        # Only where equal numbers of non-empty batches are impossible.
        needed = sum(-(-corpus.count(k) // sizes[k]) for k in range(6))
        assert -(-needed // world_size) * world_size > len(corpus) or not same_bucket


@settings(deadline=None)
@given(corpus=corpora, sizes=size_lists, world_size=st.integers(1, 5), same_bucket=st.booleans())
def test_with_drop_last_every_batch_is_full_and_every_rank_has_one(
    corpus: list[int], sizes: list[int], world_size: int, same_bucket: bool
) -> None:
    buffer = make_buffer(
        items(corpus),
        FixedBuckets(sizes, random.Random(0)),
        world_size=world_size,
        same_bucket=same_bucket,
        drop_last=True,
    )
    found = steps(buffer)
    num = 0
    for step in found:
        assert len(step) == world_size
        for batch in step:
            (k,) = {k for _, k in batch}
            assert len(batch) == sizes[k]
            num += len(batch)
    assert buffer.num_dropped == len(corpus) - num
    # No more than what makes less than a step of full batches is dropped.
    left = Counter(corpus) - Counter(k for step in found for batch in step for _, k in batch)
    assert sum(num // sizes[k] for k, num in left.items()) < world_size


@settings(deadline=None)
@given(
    corpus=corpora,
    max_duration=st.floats(6.0, 60.0),
    max_cuts=st.none() | st.integers(1, 9),
    world_size=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_under_lhotses_limits_every_example_comes_once_and_no_batch_exceeds_them(
    corpus: list[int], max_duration: float, max_cuts: int | None, world_size: int, shuffle: bool
) -> None:
    buckets = LimitBuckets(6, random.Random(0) if shuffle else None, max_duration=max_duration, max_cuts=max_cuts)
    found = steps(make_buffer(items(corpus), buckets, world_size=world_size))
    batches = [batch for step in found for batch in step]
    assert sorted(item for batch in batches for item in batch) == items(corpus)
    for batch in batches:
        assert len(batch) * max(k + 1 for _, k in batch) <= max_duration
        assert max_cuts is None or len(batch) <= max_cuts
    assert all(len(step) == world_size for step in found[:-1])


@settings(deadline=None, max_examples=40)
@given(corpus=corpora, sizes=size_lists, delays=st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_the_speed_of_the_source_has_no_say_in_what_batches_hold(
    corpus: list[int], sizes: list[int], delays: list[int]
) -> None:
    def slowly() -> Iterator[Item]:
        for i, item in enumerate(items(corpus)):
            if delays[i % len(delays)] > 280:
                time.sleep(0.0005)
            yield item

    def run(source: Any) -> list[list[list[Item]]]:
        return steps(make_buffer(source, FixedBuckets(sizes, random.Random(0)), concurrent=True, start=10))

    assert run(items(corpus)) == run(slowly())


def test_sizes_can_change_between_any_two_steps() -> None:
    corpus = [i % 3 for i in range(200)]
    for change in range(0, 60, 7):
        buffer = make_buffer(items(corpus), FixedBuckets([4, 3, 2], random.Random(0)), capacity=30, world_size=2)
        found = [step for _ in range(change) if (step := buffer.next_step()) is not None]
        buffer.set_sizes([2, 1, 1])
        later = steps(buffer)
        assert sorted(item for step in found + later for batch in step for item in batch) == items(corpus)
        assert all(len(batch) <= [2, 1, 1][batch[0][1]] for step in later for batch in step)
        assert all(len(step) == 2 for step in found + later)


# Choosing buckets


def lognormal(seed: int, num: int) -> list[Item]:
    rng = random.Random(seed)
    return items([min(19, int(rng.lognormvariate(2.0, 0.6))) for _ in range(num)])


def test_an_epoch_is_as_long_winded_at_its_end_as_at_its_start() -> None:
    sizes = [max(1, 80 // (k + 1)) for k in range(20)]
    buffer = make_buffer(
        lognormal(0, 30_000), FixedBuckets(sizes, random.Random(0)), capacity=5000, max_capacity=5000, start=5000
    )
    batches = [batch for (batch,) in steps(buffer)]

    def mean(low: float, high: float) -> float:
        part = [k for batch in batches[int(low * len(batches)) : int(high * len(batches))] for _, k in batch]
        return sum(part) / len(part)

    whole = mean(0.0, 1.0)
    for low, high in ((0.0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 1.0)):
        assert mean(low, high) == pytest.approx(whole, rel=0.15)


def test_a_batch_is_full_as_long_as_the_source_goes_on() -> None:
    sizes = [max(1, 80 // (k + 1)) for k in range(20)]
    buffer = make_buffer(lognormal(0, 10_000), FixedBuckets(sizes, random.Random(0)), capacity=1000, start=100)
    partial = [len(b) < sizes[b[0][1]] for (b,) in steps(buffer)]
    assert not any(partial[: len(partial) // 2])
    assert sum(partial) <= 20


def test_ranks_with_streams_of_their_own_choose_the_same_bucket_most_of_the_time() -> None:
    sizes = [25] * 20
    streams = [
        steps(make_buffer(lognormal(rank, 20_000), FixedBuckets(sizes, random.Random(rank)), capacity=5000, start=5000))
        for rank in range(4)
    ]
    rounds = list(zip(*streams, strict=False))
    same = [len({step[0][0][1] for step in round_}) == 1 for round_ in rounds[: int(0.75 * len(rounds))]]
    assert sum(same) > 0.85 * len(same)


def test_ranks_that_share_a_stream_always_get_the_same_bucket_before_the_leftovers() -> None:
    buffer = make_buffer(
        lognormal(0, 20_000), FixedBuckets([20] * 20, random.Random(0)), capacity=5000, start=5000, world_size=8
    )
    found = steps(buffer)
    mixed = [len({batch[0][1] for batch in step}) > 1 for step in found]
    assert sum(mixed) <= 0.05 * len(mixed)


# The size of the buffer


def test_a_buffer_grows_to_hold_a_batch_of_every_bucket_for_every_rank() -> None:
    buffer = make_buffer([], FixedBuckets([30, 20], None), capacity=10, start=10, world_size=3)
    assert buffer.capacity == 150


def test_a_buffer_that_may_not_grow_so_far_says_which_number_to_change() -> None:
    with pytest.raises(
        BufferTooSmallError,
        match=r"must hold one full batch of every bucket on 3 ranks, 150 examples, and may hold 149; "
        r"raise max_buffer_size to at least 150, or lower the batch sizes",
    ):
        make_buffer([], FixedBuckets([30, 20], None), capacity=10, max_capacity=149, world_size=3)


def test_a_full_buffer_without_a_full_batch_is_an_error_rather_than_a_silent_end() -> None:
    buckets = LimitBuckets(1, None, max_duration=1000.0, max_cuts=None)
    buffer = make_buffer(items([0] * 500), buckets, capacity=50, max_capacity=100, start=50)
    with pytest.raises(BufferTooSmallError, match="none of 1 buckets holds a full batch although the buffer is full"):
        buffer.next_step()


def test_only_fixed_sizes_can_change() -> None:
    buffer = make_buffer([], LimitBuckets(1, None, max_duration=1.0, max_cuts=None))
    with pytest.raises(TypeError, match="only buckets with fixed sizes can change them"):
        buffer.set_sizes([1])


def test_what_belongs_to_no_bucket_is_counted() -> None:
    buffer = make_buffer(items([0, -1, 0, -1, -1]), FixedBuckets([1], None))
    assert len(steps(buffer)) == 2
    assert buffer.rejected == {"negative": 3}


def test_rejections_are_told_when_ten_times_the_buffer_was_read_and_ten_times_that() -> None:
    told: list[tuple[int, int]] = []
    corpus = items([0] + [-1] * 4999 + [0])
    buffer = make_buffer(
        corpus, FixedBuckets([1], None), capacity=4, start=4, on_rejections=lambda *nums: told.append(nums)
    )
    steps(buffer)
    assert [read - rejected for rejected, read in told] == [1, 1, 1]
    assert [read // 40 for _, read in told] == [1, 10, 100]


def test_at_most_a_quarter_more_is_taken_in_than_drawn() -> None:
    read = []

    def source() -> Iterator[Item]:
        for item in items([0] * 1000):
            read.append(item)
            yield item

    buffer = make_buffer(source(), FixedBuckets([8], None), capacity=200, start=20)
    buffer.next_step()
    assert len(read) == 20
    buffer.next_step()
    assert len(read) == 30
    for _ in range(90):
        buffer.next_step()
    assert len(read) == 91 * 8 + 200


# Reading ahead


class SourceError(Exception):
    pass


def failing(after: int) -> Iterator[Item]:
    yield from items([0] * after)
    raise SourceError("the disk is gone")


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_sources_exception_arrives_as_itself_with_its_traceback_and_again(concurrent: bool) -> None:
    buffer = make_buffer(failing(100), FixedBuckets([4], None), concurrent=concurrent, capacity=16, start=16)
    with pytest.raises(SourceError, match="the disk is gone") as caught:
        steps(buffer)
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    with pytest.raises(SourceError):
        buffer.next_step()


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_filter_that_raises_stop_iteration_does_not_end_the_epoch_in_silence(concurrent: bool) -> None:
    def stop(_: list[Item]) -> Chunk:
        raise StopIteration

    source = iter(items([0] * 10))
    reader = ThreadReader(source, stop, capacity=4) if concurrent else DirectReader(source, stop)
    with pytest.raises(RuntimeError, match="a filter or a measure raised StopIteration"):
        reader.read(4)


def endless() -> Iterator[Item]:
    while True:
        yield (0, 0)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "oomfit-readahead"]


def wait_for_no_threads() -> None:
    for thread in threads():
        thread.join(10.0)
    assert threads() == []


def test_the_thread_starts_with_the_first_read_and_ends_with_close() -> None:
    reader = ThreadReader(endless(), sort, capacity=64)
    assert threads() == []
    reader.read(1)
    assert [thread.daemon for thread in threads()] == [True]
    reader.close()
    wait_for_no_threads()


def test_the_thread_ends_when_its_reader_is_garbage() -> None:
    reader = ThreadReader(endless(), sort, capacity=64)
    reader.read(1)
    alive = weakref.ref(reader)
    del reader
    gc.collect()
    assert alive() is None
    wait_for_no_threads()


def test_the_thread_ends_with_the_source() -> None:
    reader = ThreadReader(iter(items([0] * 5)), sort, capacity=64)
    chunk = reader.read(1)
    assert chunk is not None
    assert chunk.items == items([0] * 5)
    assert reader.read(1) is None
    wait_for_no_threads()


def test_the_thread_reads_no_further_ahead_than_it_may() -> None:
    num_read = 0

    def source() -> Iterator[Item]:
        nonlocal num_read
        for item in endless():
            num_read += 1
            yield item

    reader = ThreadReader(source(), sort, capacity=64)
    reader.read(1)
    for _ in range(100):
        time.sleep(0.002)
        if num_read >= 64 + 16:
            break
    time.sleep(0.01)
    assert num_read <= 64 + 32
    reader.close()


def test_a_capacity_is_positive() -> None:
    with pytest.raises(InvalidArgumentError, match="capacity must be at least 1, it is 0"):
        ThreadReader(iter([]), sort, capacity=0)


def test_an_interpreter_exits_while_the_thread_is_reading() -> None:
    program = """
from lhotse_oomfit.readahead import Chunk, ThreadReader
def endless():
    while True:
        yield 0
reader = ThreadReader(endless(), lambda read: Chunk(read, read, None), capacity=10**9)
for _ in range(10):
    reader.read(1)
print("done")
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "done\n", "")
