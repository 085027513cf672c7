"""Reading examples from a source, now or ahead of time, always in the same order.

A reader hands out examples in the source's order, and nothing about what it hands out depends on timing: reading
ahead in a thread changes when an example is read, never which one comes next.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter, sleep
from typing import Any, Protocol

from lhotse_oomfit.errors import InvalidArgumentError

__all__ = ["Chunk", "DirectReader", "Reader", "ThreadReader", "sort_into_chunk"]

logger = logging.getLogger(__name__)

_CHUNK = 16  # examples between two looks at the clock and at the stop flag
_BUSY_S = 0.0005  # the thread works this long, or through this many examples, and then sleeps for _YIELD_S, so that
_BUSY_EXAMPLES = 64  # the training thread gets the interpreter lock
_YIELD_S = 0.001
_JOIN_S = 1.0


@dataclass(slots=True)
class Chunk:
    """Consecutive examples of a source that belong to some bucket, and a count of those that don't."""

    items: list[Any]
    buckets: list[int]
    lengths: list[float] | None
    """One per item where the rule that forms batches needs it."""
    rejected: dict[str, int] = field(default_factory=dict)
    """How many examples between these were left out, by reason."""


SortFn = Callable[[list[Any]], Chunk]


def sort_into_chunk(
    items: list[Any], classify: Callable[[Any], int | str], length: Callable[[Any], float] | None
) -> Chunk:
    """Ask ``classify`` for each item's bucket; a string is a reason to leave the item out."""
    kept: list[Any] = []
    buckets: list[int] = []
    rejected: dict[str, int] = {}
    for item in items:
        bucket = classify(item)
        if isinstance(bucket, str):
            rejected[bucket] = rejected.get(bucket, 0) + 1
        else:
            kept.append(item)
            buckets.append(bucket)
    return Chunk(kept, buckets, None if length is None else [length(item) for item in kept], rejected)


class Reader(Protocol):
    """Hands out the examples of a source in order."""

    def read(self, num: int) -> Chunk | None:
        """The next examples of the source, about ``num`` of them; ``None`` when it has ended.

        A chunk may be empty, when none of the examples read belongs to a bucket.

        :raises BaseException: whatever the source, the filter or the measuring raised, as itself.
        """

    def close(self) -> None:
        """Stop reading. Returns at once, or when the example being read is there."""


class DirectReader:
    """Reads when asked."""

    def __init__(self, source: Iterator[Any], sort: SortFn) -> None:
        self._source = source
        self._sort = sort
        self._failure: BaseException | None = None

    def read(self, num: int) -> Chunk | None:
        if self._failure is not None:
            raise self._failure
        try:
            items = list(islice(self._source, num))
            return _guarded(self._sort, items) if items else None
        except BaseException as failure:
            self._failure = failure
            raise

    def close(self) -> None:
        self._source = iter(())


def _guarded(sort: SortFn, items: list[Any]) -> Chunk:
    try:
        return sort(items)
    except StopIteration as stop:
        # Passed on as it is, it would end the epoch in silence.
        raise RuntimeError("a filter or a measure raised StopIteration") from stop


class _Shared:
    """What the thread and its reader have in common. It holds no reference to either."""

    def __init__(self, source: Iterator[Any], sort: SortFn, capacity: int) -> None:
        self.source = source
        self.sort = sort
        self.num_chunks = max(1, -(-capacity // _CHUNK))
        self.condition = threading.Condition()
        self.chunks: deque[Chunk] = deque()
        self.waiting = False
        self.stopped = False
        self.ended = False
        self.failure: BaseException | None = None

    def stop(self) -> None:
        with self.condition:
            self.stopped = True
            self.condition.notify_all()


def _fill(shared: _Shared) -> None:
    try:
        since, busy_examples = perf_counter(), 0
        while not shared.stopped:
            items = list(islice(shared.source, _CHUNK))
            if not items:
                break
            chunk = _guarded(shared.sort, items)
            with shared.condition:
                shared.chunks.append(chunk)
                hurry = shared.waiting
                if hurry:
                    shared.condition.notify_all()
                while len(shared.chunks) >= shared.num_chunks and not shared.stopped:
                    shared.condition.wait()
                    since, busy_examples = perf_counter(), 0
            busy_examples += len(items)
            if not hurry and (busy_examples >= _BUSY_EXAMPLES or perf_counter() - since >= _BUSY_S):
                sleep(_YIELD_S)
                since, busy_examples = perf_counter(), 0
    except BaseException as failure:  # noqa: BLE001  handed to the thread that reads, which raises it
        shared.failure = failure
    finally:
        with shared.condition:
            shared.ended = True
            shared.source = iter(())
            shared.condition.notify_all()


class ThreadReader:
    """Reads ahead in a daemon thread, up to ``capacity`` examples, and gives way to the training thread.

    While nobody waits for it, the thread sleeps for a millisecond after every 64 examples or half a millisecond of
    work. It ends when the source ends or fails, on :meth:`close`, when the reader is garbage, and with the
    interpreter. It starts with the first :meth:`read`, so that worker processes forked before that don't inherit it.
    """

    def __init__(self, source: Iterator[Any], sort: SortFn, *, capacity: int) -> None:
        if capacity < 1:
            raise InvalidArgumentError(f"capacity must be at least 1, it is {capacity}")
        self._shared = _Shared(source, sort, capacity)
        self._thread: threading.Thread | None = None
        self._finalizer = weakref.finalize(self, self._shared.stop)

    def read(self, num: int) -> Chunk | None:
        shared = self._shared
        if self._thread is None:
            self._thread = threading.Thread(target=_fill, args=(shared,), name="oomfit-readahead", daemon=True)
            self._thread.start()
        with shared.condition:
            while not shared.chunks:
                if shared.failure is not None:
                    raise shared.failure
                if shared.ended or shared.stopped:
                    return None
                shared.waiting = True
                shared.condition.notify_all()
                shared.condition.wait()
            shared.waiting = False
            chunk = shared.chunks.popleft()
            if len(shared.chunks) == shared.num_chunks // 2:
                shared.condition.notify_all()  # half empty: wake a thread that found no room
        return chunk

    def close(self) -> None:
        self._shared.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
            if thread.is_alive():
                logger.debug("the source is slow: its reading thread ends when the example being read is there")
