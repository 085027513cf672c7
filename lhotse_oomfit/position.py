"""The position in an epoch: what a sampler saves, and when it can be continued."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import distributed

from lhotse_oomfit.errors import ResumeError

__all__ = ["OPTIONS", "STATE_KEY", "Position", "Schedule", "in_workers", "num_processes", "process_rank"]

_VERSION = 1
STATE_KEY = "oomfit"
"""Where a sampler's state holds its position."""
OPTIONS = ("concurrent", "sync_buckets", "max_buffer_size")

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
    :param rules: digests of the user's functions and limits that decide which cuts belong where, by name.
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
    rules: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        """Plain types, which ``torch.save`` and JSON both know."""
        fields = asdict(self)
        fields["drawn"] = [[worker, num] for worker, num in sorted(self.drawn.items())]
        fields["schedule"] = [[list(starts), list(sizes)] for starts, sizes in self.schedule]
        fields["options"] = dict(self.options)
        fields["rules"] = dict(self.rules)
        return {"version": _VERSION, **fields}

    @classmethod
    def parse(cls, state_dict: Any) -> Position:
        """The position that :meth:`encode` wrote, in a sampler's whole state.

        :raises ResumeError: when it wrote something else; the message is a reason, without a subject.
        """
        if not isinstance(state_dict, Mapping):
            raise ResumeError(f"the state must be a dict, it is {type(state_dict).__name__}")
        if not state_dict:
            raise ResumeError("the state is empty: it was loaded before, which empties it, or never saved")
        state = state_dict.get(STATE_KEY)
        if state is None:
            raise ResumeError("the state was saved by Lhotse's own sampler, which draws other batches")
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != _VERSION:
            raise ResumeError(f"the state has format {version}, this version reads {_VERSION}")
        try:
            fields = {name: value for name, value in state.items() if name != "version"}
            fields["drawn"] = {int(worker): int(num) for worker, num in fields["drawn"]}
            fields["schedule"] = [(_numbers(starts), _numbers(sizes)) for starts, sizes in fields["schedule"]]
            fields["counters"] = _numbers(fields["counters"])
            for name in ("num_workers", "num_processes", "rank", "worker_seed"):
                fields[name] = int(fields[name])
            fields["options"] = {name: fields["options"][name] for name in OPTIONS}
            fields["rules"] = dict(fields.get("rules", {}))
            position = cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ResumeError(f"the state is damaged ({type(error).__name__}: {error})") from error
        missing = set(range(max(1, position.num_workers))) - set(position.drawn) if len(position.drawn) != 1 else set()
        if missing or not position.drawn or min(position.drawn.values()) < 0:
            raise ResumeError(f"the state is damaged (batches by worker are {dict(position.drawn)})")
        return position

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
        """The schedule as worker number ``worker`` goes by it: what was decided last holds."""
        schedule: Schedule = []
        for starts, sizes in self.schedule:
            start = starts[worker if len(starts) > 1 else 0]
            schedule = [entry for entry in schedule if entry[0] < start] + [(start, sizes)]
        return schedule

    def with_sizes(self, sizes: list[int] | None) -> Position:
        """The same position with ``sizes`` from the next batch of each worker on, where they differ from the last.

        They replace changes that were still to come.
        """
        if sizes is None or not self.schedule or self.schedule[-1][1] == sizes:
            return self
        starts = [num for _, num in sorted(self.drawn.items())]
        return replace(self, schedule=[*self.schedule, (starts, list(sizes))])

    def replay(self, *, in_step: bool) -> str:
        """The sizes of the batches that are drawn again, in words.

        :param in_step: whether all ranks draw from one stream, so that changes lie at the same batch on each.
        """
        if not self.schedule:
            return ""
        if in_step:
            return f"{[(starts, sizes) for starts, sizes in self.schedule]} for {self.num_batches} batches"
        return str([sizes for _, sizes in self.schedule])

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

    def other_rules(self, here: Mapping[str, str]) -> list[str]:
        """The names of the rules that aren't what they were."""
        return [name for name, digest in self.rules.items() if here.get(name, digest) != digest]

    def check_workers(self, num_workers: int) -> None:
        """Refuse another number of workers than the one that sampled.

        :raises ResumeError: the message is a reason, without a subject.
        """
        if self.num_workers != num_workers:
            raise ResumeError(f"the state was {in_workers(self.num_workers)}, now it is {in_workers(num_workers)}")


def _numbers(values: Any) -> list[int]:
    return [int(value) for value in values]


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
