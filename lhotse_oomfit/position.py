"""The position in an epoch: what a sampler saves, and when it can be continued."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import distributed

from lhotse_oomfit.errors import ResumeError

__all__ = ["Position", "Schedule", "in_workers", "num_processes", "process_rank"]

_VERSION = 1

Schedule = list[tuple[int, list[int]]]  # sizes, and the batch of the epoch from which they hold


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a sampler is in its epoch, and what decides which batches come next.

    :param drawn: batches of this epoch, by the number of the worker that sampled them; 0 is also the main process.
    :param num_workers: 0 when the main process sampled.
    :param num_processes: how many processes trained.
    :param rank: which of them this is.
    :param seed: what a seed of ``"trng"`` or ``"randomized"`` stood for in this epoch; ``None`` for a number.
    :param worker_seed: what worker processes derive theirs from when the seed is ``"trng"``.
    :param schedule: sizes, and the batch from which they hold, for each worker or one for all.
    :param bins: a description of the bins, in plain types.
    :param options: further arguments of the sampler that decide which batches come next.
    :param counters: how often the parts of the source had been iterated when the epoch began.
    """

    drawn: Mapping[int, int]
    num_workers: int
    num_processes: int
    rank: int
    seed: int | None
    worker_seed: int
    schedule: list[tuple[list[int], list[int]]]
    bins: list[Any]
    options: Mapping[str, Any]
    counters: list[int]

    def encode(self) -> dict[str, Any]:
        """Plain types, which ``torch.save`` and JSON both know."""
        fields = asdict(self)
        fields["drawn"] = [[worker, num] for worker, num in sorted(self.drawn.items())]
        fields["schedule"] = [[list(starts), list(sizes)] for starts, sizes in self.schedule]
        fields["options"] = dict(self.options)
        return {"version": _VERSION, **fields}

    @classmethod
    def parse(cls, state: Mapping[str, Any] | None) -> Position:
        """The position that :meth:`encode` wrote.

        :raises ResumeError: when it wrote something else; the message is a reason, without a subject.
        """
        if state is None:
            raise ResumeError("the state was saved by Lhotse's own sampler, which draws other batches")
        if state.get("version") != _VERSION:
            raise ResumeError(f"the state has format {state.get('version')}, this version reads {_VERSION}")
        fields = {name: value for name, value in state.items() if name != "version"}
        fields["drawn"] = {int(worker): int(num) for worker, num in fields["drawn"]}
        fields["schedule"] = [(list(starts), list(sizes)) for starts, sizes in fields["schedule"]]
        return cls(**fields)

    def at(self, num_batches: int, num_workers: int) -> Position:
        """The position after the loader has handed out ``num_batches``, one from each worker in turn."""
        turns = max(1, num_workers)
        drawn = {worker: (num_batches + turns - 1 - worker) // turns for worker in range(turns)}
        return replace(self, drawn=drawn, num_workers=num_workers)

    def part_of(self, worker: int) -> int:
        """Whose part worker number ``worker`` plays, for the loader's turns to go on where they stopped."""
        if self.num_workers == 0 or len(self.drawn) < self.num_workers:
            return worker  # a state that a worker saved for itself
        return (worker + self.num_batches) % self.num_workers

    def schedule_of(self, worker: int) -> Schedule:
        """The schedule as worker number ``worker`` goes by it."""
        return [(starts[worker if len(starts) > 1 else 0], sizes) for starts, sizes in self.schedule]

    def with_sizes(self, sizes: list[int] | None) -> Position:
        """The same position with ``sizes`` from the next batch of each worker on, where they differ from the last."""
        if sizes is None or not self.schedule or self.schedule[-1][1] == sizes:
            return self
        starts = [max(num, self.schedule_of(worker)[-1][0]) for worker, num in sorted(self.drawn.items())]
        return replace(self, schedule=[*self.schedule, (starts, list(sizes))])

    @property
    def num_batches(self) -> int:
        """Batches of this epoch, of all workers."""
        return sum(self.drawn.values())

    def check(self, here: Position) -> None:
        """Refuse what can't be continued at ``here``, the position of a fresh sampler.

        :raises ResumeError: the message is a reason, without a subject.
        """
        if self.num_processes != here.num_processes:
            raise ResumeError(f"the state was saved on {self.num_processes} ranks, this job has {here.num_processes}")
        if self.bins != here.bins:
            raise ResumeError(f"the state was saved with the bins {self.bins}, this sampler has {here.bins}")

    def check_workers(self, num_workers: int) -> None:
        """Refuse another number of workers than the one that sampled.

        :raises ResumeError: the message is a reason, without a subject.
        """
        if self.num_workers != num_workers:
            raise ResumeError(f"the state was {in_workers(self.num_workers)}, now it is {in_workers(num_workers)}")


def in_workers(num_workers: int) -> str:
    """Who samples, in words."""
    return f"sampled in {num_workers} worker processes" if num_workers else "sampled in the main process"


def process_rank() -> int:
    """This process's rank in training, whatever the sampler's is."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def num_processes() -> int:
    """How many processes train."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
