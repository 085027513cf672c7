"""What the main process and the workers that iterate copies of a sampler tell each other, in shared memory.

The main process sets the epoch and the sizes; workers, persistent ones included, take them over with their next
``iter()``, and leave word of how they began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lhotse_oomfit.turns import own_number

__all__ = ["EpochStart", "WorkerState"]

_BEGUN, _BEGUN_ANEW = 1, 2


@dataclass(frozen=True, kw_only=True)
class EpochStart:
    """How workers began the epoch that they are in.

    :param anew: whether they refused the loaded state and started the epoch anew.
    :param epoch: its number.
    :param sizes: one per bucket, zeros where there were none.
    :param counters: how often the parts of the source had been iterated before.
    """

    anew: bool
    epoch: int
    sizes: list[int]
    counters: list[int]


class WorkerState:
    """Shared by a sampler and its copies in worker processes.

    :param num_sizes: how many sizes there are, one per bucket.
    :param num_counters: how many parts of the source count their iterations.
    """

    def __init__(self, num_sizes: int, num_counters: int) -> None:
        self.num_lost = 0
        """Batches of a loaded state that workers didn't continue."""
        self._num_sizes = num_sizes
        self._num_counters = num_counters
        self._told = torch.zeros(1 + num_sizes, dtype=torch.int64).share_memory_()  # the epoch and the sizes
        self._seen: list[int] = self._told.tolist()
        # Whether workers began their epoch and how, which one, the sizes, the counters.
        self._start = torch.zeros(2 + num_sizes + num_counters, dtype=torch.int64).share_memory_()
        self._continued = torch.zeros(1, dtype=torch.uint8).share_memory_()  # by worker: whether it replayed the state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for shared in (self._told, self._start, self._continued):
            shared.share_memory_()  # a plain copy isn't

    # From the main process

    def tell(self, epoch: int, sizes: Sequence[int] | None) -> None:
        """In the main process, set what workers take over with their next ``iter()``; nothing in a worker."""
        if torch.utils.data.get_worker_info() is None:
            self._seen = [epoch, *(sizes or [0] * self._num_sizes)]
            self._told.copy_(torch.tensor(self._seen))

    def news(self) -> tuple[int | None, list[int] | None]:
        """In a worker, the epoch and the sizes that the main process has set since; None for what it hasn't."""
        if torch.utils.data.get_worker_info() is None:
            return None, None
        seen, self._seen = self._seen, self._told.tolist()
        epoch, *sizes = self._seen
        return (None if epoch == seen[0] else epoch), (None if sizes == seen[1:] else sizes)

    def forget(self) -> None:
        """The epoch, or the position in it, is another one: workers haven't begun it."""
        self._start.zero_()
        self.num_lost = 0

    def expect(self, num_workers: int) -> None:
        """A state was loaded that so many workers are to continue."""
        self._continued = torch.zeros(max(1, num_workers), dtype=torch.uint8).share_memory_()
        self.forget()

    # From the workers

    def note_start(self, epoch: int, sizes: Sequence[int] | None, counters: Sequence[int], *, anew: bool) -> None:
        """In a worker, say how it began its epoch; nothing in the main process."""
        if torch.utils.data.get_worker_info() is not None and len(counters) == self._num_counters:
            how = _BEGUN_ANEW if anew else _BEGUN
            self._start.copy_(torch.tensor([how, epoch, *(sizes or [0] * self._num_sizes), *counters]))

    def start(self) -> EpochStart | None:
        """How workers began the epoch that they are in; None if none did."""
        how, epoch, *rest = self._start.tolist()
        if not how:
            return None
        sizes, counters = rest[: self._num_sizes], rest[self._num_sizes :]
        return EpochStart(anew=how == _BEGUN_ANEW, epoch=epoch, sizes=sizes, counters=counters)

    def was_continued(self) -> bool:
        """Whether an earlier process of this worker's number continued the loaded state; from now on, one has.

        Workers that don't persist are forked anew for every epoch, each time with the state that the main process
        still has.
        """
        own = own_number()
        if own is None or own >= len(self._continued):
            return False
        was = bool(self._continued[own])
        self._continued[own] = 1
        return was
