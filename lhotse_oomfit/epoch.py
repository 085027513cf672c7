"""An epoch of batches: how it begins, where it is, how it is continued.

The part of the sampler that draws. What it draws from, and with which sizes, its subclass says.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import chain
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lhotse import CutSet
from lhotse.dataset.dataloading import resolve_seed
from lhotse.dataset.sampling.base import SamplingConstraint, attach_dataloading_info
from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler
from torch import distributed

from lhotse_oomfit.agreement import Agreement
from lhotse_oomfit.bins import Bins
from lhotse_oomfit.buckets import Batch, Buckets, ConstraintBuckets, FixedBuckets, LimitBuckets
from lhotse_oomfit.buffer import BucketBuffer
from lhotse_oomfit.bytecode import callable_digest
from lhotse_oomfit.digest import short_sha
from lhotse_oomfit.errors import InvalidArgumentError, NotCalibratedError, ResumeError
from lhotse_oomfit.position import OPTIONS, STATE_KEY, Position, Schedule, num_processes, process_rank
from lhotse_oomfit.readahead import DirectReader, Reader, ThreadReader
from lhotse_oomfit.selection import Selection
from lhotse_oomfit.source import counters, counting_unknown, endless, inexact_because, restore_counters, sequential
from lhotse_oomfit.turns import own_number, play

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EpochSampler"]

logger = logging.getLogger(__name__)

_START_SHARE = 10  # a concurrent buffer hands out batches when a tenth of it is filled
_GROWTH = 5  # by default a buffer may grow to this many times buffer_size
_BUCKET_SEED = 1234
_ANEW = 2
_OPTIONS = {name: f"_{name}" if name == "max_buffer_size" else name for name in OPTIONS}  # by name, the attribute
_FROM_STATE = (
    *_OPTIONS.values(),
    *(
        "duration_bins",
        "buffer_size",
        "shuffle",
        "drop_last",
        "consistent_ids",
        "max_duration",
        "max_cuts",
        "quadratic_duration",
    ),
)


class EpochSampler(DynamicBucketingSampler):
    """Draws the batches of an epoch from a bucket buffer and can go back to any of them.

    Subclasses call :meth:`_init_epoch` at the end of their constructor, after Lhotse's.
    """

    # What lives only while iterating is never pickled; a copy starts with these values.
    _LIVE = ("_buffer", "_buffer_pid", "cuts_iter", "rng", "agreement")
    _buffer: BucketBuffer | None = None
    _buffer_pid = 0
    rng: random.Random | None = None
    constraint: SamplingConstraint | None
    _just_restored_state: bool
    bins: Bins | None
    num_buckets: int
    _sizes: list[int] | None = None
    is_auto: bool
    duration_bins: list[Any]
    _bins_are_estimated: bool
    _max_buffer_size: int | None
    _on_resume: str
    agreement: Agreement | None = None
    """Compares the sizes over ranks when the main process starts an epoch; calibration makes it, copies have none."""

    def _init_epoch(self) -> None:
        # The epoch and the sizes of the main process; workers, persistent ones included, read them in shared memory.
        self._shared = torch.zeros(1 + len(self.bins or ()), dtype=torch.int64).share_memory_()
        self._seen = self._shared.tolist()
        self._worker_seed = secrets.randbits(48)  # stands for "trng" in worker processes
        self._common_seed: int | None = None  # stands for "trng" and "randomized" on several ranks
        self._epoch_seed: int | None = None  # what a seed that isn't a number stood for in this epoch
        self._drawn = 0  # batches of this epoch
        self._schedule: Schedule = []
        self._in_force: list[int] = []  # the sizes that the buffer works with
        self._num_changes = 0  # how often sizes were applied or a state loaded
        self._replayed = ""  # the sizes of the loaded state, and where they hold
        self._counters: list[int] = []  # of the source, when the epoch began
        self._loaded: Position | None = None  # still to be replayed
        self._continued = torch.zeros(1, dtype=torch.uint8).share_memory_()  # by worker: whether it replayed _loaded
        # The sizes with which worker processes began their epoch, and whether they did.
        # After them, how often they had iterated the parts of the source before.
        self._num_counters = len(counters(self.cuts))
        self._started = torch.zeros(2 + len(self.bins or ()) + self._num_counters, dtype=torch.int64).share_memory_()
        self._is_anew = False  # in a worker, the epoch was started anew instead of continued
        self._num_lost = 0  # batches of a loaded state that workers didn't continue
        self._over = False  # the epoch that was being iterated has ended, and iter() wasn't called since
        self._reported = False  # what was skipped in this epoch

    @property
    def max_buffer_size(self) -> int:
        """How far the buffer may grow, in examples."""
        size: int = self.buffer_size
        return max(self._max_buffer_size or size * _GROWTH, size)

    @property
    def needs_calibration(self) -> bool:
        """Whether sizes are to be measured (``"auto"``) and none have been applied yet."""
        return self.bins is not None and self._sizes is None

    def _selection(self) -> Selection:
        """What decides which bucket a cut belongs to."""
        raise NotImplementedError

    def _report_skipped(self, *, so_far: bool = False) -> None:
        """Say at the end of an epoch, or on its way, what belonged to no bucket."""

    def _report_nothing(self, num_read: int) -> None:
        """Say that nothing of what was read belonged to a bucket."""

    def _on_rejections(self, num_rejected: int, num_read: int) -> None:
        if num_rejected == num_read:
            self._report_nothing(num_read)
        elif endless(self.cuts):
            self._report_skipped(so_far=True)

    def transform(self, cuts: CutSet) -> CutSet:
        """``cuts`` after the functions given to ``map()``, as a batch goes through them."""
        try:
            for fn in self._transforms:
                cuts = fn(cuts)
        except StopIteration as stop:
            # Passed on as it is, it would end the epoch in silence.
            raise RuntimeError("a function given to map() raised StopIteration") from stop
        return cuts

    # Iterating

    def __iter__(self) -> Self:
        """Start the epoch, or continue a state that was just loaded.

        :raises NotCalibratedError: when sizes are still to be measured.
        :raises BufferTooSmallError: when the buffer can't hold such batches.
        """
        self._follow_main_process()
        if self.agreement is not None and torch.utils.data.get_worker_info() is None:
            # The epoch may be begun more than once, and by some ranks only: to look at its first batch.
            self.agreement.check(
                f"{self.epoch}/{self._num_changes}", f"when epoch {self.epoch} starts", self.shared_by_ranks()
            )
        self._over = False
        if self._just_restored_state and not self._was_continued():
            if not self._is_live():
                self._rebuild()
        else:
            own = own_number()
            if own is not None:
                play(own)
            self._forget()
            self._open()
        return self

    def shared_by_ranks(self) -> dict[str, str]:
        """What must be the same on all ranks for them to draw batches in step, by name; empty without sizes."""
        if self.bins is None or self._sizes is None:
            return {}
        return {
            "bucket_batch_size": str(self._sizes),
            "bins": str(self._describe_bins()),
            "loaded schedule of sizes": self._replayed,
        }

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; worker processes take it over with their next ``iter()``, persistent ones too.

        Lhotse's ``IterableDatasetWrapper`` calls ``iter()`` for every epoch that its predecessor has finished; if
        training leaves epochs before their end, give it ``reset_on_iter=True``.
        """
        if epoch != self.epoch:
            self.allow_iter_to_reset_state()
            # A loader that has exhausted the old epoch may ask once more: that must not begin the new one.
            self._over = self._over or (self._buffer is not None and self._reported)
            self._close()
            self._forget()
            self._started.zero_()
            self._num_lost = 0
        super().set_epoch(epoch)
        self._tell_workers()

    def _tell_workers(self) -> None:
        if torch.utils.data.get_worker_info() is None:
            told = [self.epoch, *(self._sizes or [0] * len(self.bins or ()))]
            self._shared.copy_(torch.tensor(told))
            self._seen = told

    def _follow_main_process(self) -> None:
        """In a worker, take over the epoch and the sizes that the main process has set since."""
        if torch.utils.data.get_worker_info() is None:
            return
        told = self._shared.tolist()
        if told[1:] != self._seen[1:]:
            self._sizes = told[1:]
        if told[0] != self._seen[0]:
            self.set_epoch(told[0])
        self._seen = told

    def _was_continued(self) -> bool:
        """Whether the loaded state was continued by an earlier process of this worker's number.

        Workers that don't persist are forked anew for every epoch, each time with the state that the main process
        still has.
        """
        own = own_number()
        if self._loaded is None or own is None or own >= len(self._continued):
            return False
        was = bool(self._continued[own])
        self._continued[own] = 1
        return was

    def _is_live(self) -> bool:
        return self._buffer is not None and self._buffer_pid == os.getpid()

    def _forget(self) -> None:
        """Give up the position in the epoch."""
        self._loaded = None
        self._drawn = 0
        self._epoch_seed = None
        self._schedule = []
        self._counters = []

    def _open(self) -> None:
        """Start the epoch from its first batch, with the schedule, seed and counters that are there."""
        if self.needs_calibration:
            raise NotCalibratedError(
                "bucket_batch_size='auto' must be calibrated before the sampler is iterated: call "
                "lhotse_oomfit.calibrate(sampler, dataset, ...) first, add "
                "lhotse_oomfit.lightning.BucketBatchSizeFinder() to the Trainer's callbacks, or pass bucket_batch_size "
                "as a list of sizes or a profile. A sampler for validation isn't calibrated: give it a list of sizes, "
                "or the training sampler's profile"
            )
        self._close()
        self.diagnostics.reset_current_epoch()
        if self.bins is not None and not self._schedule:
            self._schedule = [(0, list(self._sizes or ()))]
        restore_counters(self.cuts, self._counters)
        self._counters = counters(self.cuts)
        worker = torch.utils.data.get_worker_info()
        if worker is not None and len(self._counters) == self._num_counters:
            sizes = self._sizes or [0] * len(self.bins or ())
            how = _ANEW if self._is_anew else 1
            self._started.copy_(torch.tensor([how, self.epoch, *sizes, *self._counters]))
        seed = self._resolve_seed()
        self.rng = random.Random(seed + self.epoch)
        # Ranks whose streams differ choose buckets alike when this generator is seeded alike.
        entropy = [_BUCKET_SEED, self.epoch, 0 if worker is None else worker.id + 1]
        if not self.sync_buckets:
            entropy.append(seed & (2**64 - 1))
        start = max(1, self.buffer_size // _START_SHARE) if self.concurrent else self.buffer_size
        source: Iterator[Any] = zip(*self.cuts, strict=False) if len(self.cuts) > 1 else iter(self.cuts[0])
        sort = self._selection().sort
        reader: Reader
        reader = ThreadReader(source, sort, capacity=max(256, start)) if self.concurrent else DirectReader(source, sort)
        self._buffer = BucketBuffer(
            reader,
            self._make_buckets(self.rng if self.shuffle else None),
            capacity=self.buffer_size,
            max_capacity=self.max_buffer_size,
            start=start,
            world_size=self.world_size,
            same_bucket=self.sync_buckets,
            drop_last=self.drop_last,
            bucket_rng=np.random.default_rng(entropy),
            on_rejections=_weakly(self._on_rejections),
        )
        self._buffer_pid = os.getpid()
        self._reported = False

    def _make_buckets(self, rng: random.Random | None) -> Buckets:
        if self.bins is not None:
            self._in_force = self._schedule[0][1]
            return FixedBuckets(self._in_force, rng)
        if self.constraint is not None:
            return ConstraintBuckets(self.num_buckets, rng, self.constraint)
        return LimitBuckets(self.num_buckets, rng, max_duration=self.max_duration, max_cuts=self.max_cuts)

    def _close(self) -> None:
        if self._buffer is not None and self._is_live():
            self._buffer.reader.close()
        self._buffer = None

    def _resolve_seed(self) -> int:
        """The epoch's seed; the same on all ranks that share one stream of batches."""
        if isinstance(self.seed, int):
            return self.seed
        if self._epoch_seed is None:
            worker = torch.utils.data.get_worker_info()
            if worker is not None and self.seed == "trng":
                mixed = np.random.SeedSequence([self._worker_seed, process_rank(), worker.id])
                self._epoch_seed = int(mixed.generate_state(1)[0])
            elif worker is None and self.world_size > 1:
                if self._common_seed is None:
                    self._common_seed = self._agree_on_seed()
                self._epoch_seed = self._common_seed
            else:
                self._epoch_seed = resolve_seed(self.seed)
        return self._epoch_seed

    def _agree_on_seed(self) -> int:
        """One seed for all ranks, drawn by the first."""
        if not (distributed.is_available() and distributed.is_initialized()):
            raise InvalidArgumentError(
                f"seed must be a whole number on {self.world_size} ranks of a map-style dataset, it is {self.seed!r}: "
                f"the ranks must draw alike, and torch.distributed isn't initialised to agree on a seed; initialise it "
                f"before iterating, or pass a number"
            )
        if distributed.get_world_size() != self.world_size:
            raise InvalidArgumentError(
                f"seed must be a whole number when the sampler's world_size, {self.world_size}, isn't that of "
                f"torch.distributed, {distributed.get_world_size()}; it is {self.seed!r}"
            )
        drawn: list[Any] = [resolve_seed(self.seed)]
        distributed.broadcast_object_list(drawn, src=0)
        return int(drawn[0])

    def __next__(self) -> Any:
        """The next batch of this rank: a CutSet, or a tuple of them with several sources."""
        if self._over:
            raise StopIteration
        if not self._is_live():
            self._rebuild()
        self.allow_iter_to_reset_state()
        batch = self._next_batch()
        self._note_kept(batch)
        batch = self.transform(batch)
        attach_dataloading_info(batch, rank=self.rank, world_size=self.world_size)
        return batch

    def _next_batch(self) -> Any:
        step = self._advance()
        if step is None:
            raise StopIteration
        if self.consistent_ids and len(self.cuts) > 1:
            # On all of them alike: a rank that goes on alone would wait for the others for ever.
            _check_ids(step)
        return self._to_cuts(self._own_share(step))

    def _advance(self) -> list[Batch] | None:
        """Draw the next step, with the sizes that hold for it."""
        buffer = self._buffer
        if buffer is None:
            return None
        if self._schedule and self._schedule[-1][1] is not self._in_force:
            due = [sizes for start, sizes in self._schedule if start <= self._drawn][-1]
            if due is not self._in_force:
                buffer.set_sizes(due)
                self._in_force = due
        step = buffer.next_step()
        if buffer.rejected or buffer.num_dropped:
            stats = self.diagnostics.current_epoch_stats
            # Shared out, as batches are, so that all ranks together have counted every cut once.
            discarded = sum(buffer.rejected.values()) + buffer.num_dropped
            stats.discarded_cuts = (discarded + self.world_size - 1 - self.rank) // self.world_size
        if step is not None:
            self._drawn += 1
        elif not self._reported:
            self._reported = True
            self._report_skipped()
            if self._drawn == 0 and buffer.num_dropped and process_rank() == 0 and self.rank == 0:
                logger.warning(
                    "epoch %d has no batch: drop_last=True leaves out all of its %d cuts, which don't fill one batch "
                    "for each rank; pass drop_last=False, or use fewer buckets or smaller batches",
                    self.epoch,
                    buffer.num_dropped,
                )
        return step

    def _own_share(self, step: list[Batch]) -> Batch:
        if self.rank < len(step):
            return step[self.rank]
        # Fewer examples than ranks: this rank repeats one of them, marked as such, since it can't skip the step.
        item, number = step[self.rank % len(step)][0], self.rank // len(step) - 1
        if isinstance(item, tuple):
            return [tuple(cut.with_id(f"{cut.id}_dup{number}") for cut in item)]
        return [item.with_id(f"{item.id}_dup{number}")]

    def _to_cuts(self, batch: Batch) -> Any:
        if len(self.cuts) == 1:
            return CutSet.from_cuts(batch)
        return tuple(CutSet.from_cuts(cuts) for cuts in zip(*batch, strict=True))

    def _note_kept(self, batch: Any) -> None:
        stats = self.diagnostics.current_epoch_stats
        stats.kept_cuts += len(batch[0] if isinstance(batch, tuple) else batch)
        stats.kept_batches += 1

    # Resuming

    @property
    def num_batches_drawn(self) -> int:
        """How many batches of this epoch were drawn here, or lie before a loaded state that isn't continued yet.

        Of an iterable-style loader, whose workers draw, that is the number that the loaded state stands for.
        """
        return self._drawn if self._loaded is None else self._loaded.num_batches

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches that this sampler has drawn; see :meth:`state_dict_at` for prefetched ones."""
        constraint, self.constraint = self.constraint, None  # Lhotse refuses custom ones, which make no difference here
        try:
            state: dict[str, Any] = super().state_dict()
        finally:
            self.constraint = constraint
        state[STATE_KEY] = (self._here() if self._loaded is None else self._loaded).encode()
        return state

    def state_dict_at(self, num_batches: int, *, num_workers: int = 0) -> dict[str, Any]:
        """The state as it was when this rank had *consumed* ``num_batches`` batches of the epoch.

        A loader with workers is ahead of training: the batches that it prefetched would be lost in a resumed run
        if the state were that of :meth:`state_dict`. Call this in the main process, on the sampler that the loader
        was made with, and give the result to :meth:`load_state_dict` of a new sampler before its loader is iterated.
        After a resume, go on counting from :attr:`num_batches_drawn`, as it is right after :meth:`load_state_dict`
        (also where workers then refuse the state and, with ``on_resume="new_epoch"``, start the epoch anew).

        Map-style (the loader iterates the sampler in the main process): leave ``num_workers`` at 0, whatever the
        loader has. Iterable-style (each worker iterates a copy of the sampler): pass the loader's ``num_workers``;
        workers have handed out batches in turn. After a resume they play each other's parts where the next turn isn't
        that of worker 0 (:mod:`lhotse_oomfit.turns`), so batches come in the same order. That holds until some worker
        has ended its epoch, after which the others take more turns, so a state taken that late may repeat batches.

        :param num_batches: batches of this epoch that training has finished.
        :param num_workers: of an iterable-style loader.
        :raises InvalidArgumentError: for a negative number, or more map-style batches than were drawn.
        """
        if num_batches < 0 or num_workers < 0:
            raise InvalidArgumentError(
                f"num_batches and num_workers must be at least 0, they are {num_batches} and {num_workers}"
            )
        if num_workers == 0 and num_batches > self.num_batches_drawn:
            raise InvalidArgumentError(
                f"num_batches must be at most the {self.num_batches_drawn} batches that were drawn, it is "
                f"{num_batches}; for an iterable-style loader, pass its num_workers"
            )
        state = self.state_dict()
        # Workers take over what was applied since only with their next iter().
        started, epoch, *rest = self._started.tolist()
        in_workers = num_workers > 0 and bool(started)
        if in_workers and started == _ANEW and self._loaded is not None:
            self._num_lost = self._loaded.num_batches
            self._forget()
            state = self.state_dict()
        num_batches = max(0, num_batches - self._num_lost)
        sizes = rest[: len(self.bins or ())] if in_workers and self._sizes is not None else self._sizes
        here = self._here() if self._loaded is None else self._loaded.with_sizes(sizes)
        here = here.at(num_batches, num_workers)
        if in_workers:
            here = replace(here, counters=rest[len(self.bins or ()) :])
            if epoch != self.epoch:
                logger.warning(
                    "the state's epoch is %d, but the workers are in epoch %d: call set_epoch() in the main process, "
                    "instead of auto_increment_epoch=True",
                    self.epoch,
                    epoch,
                )
        if self.bins is not None and not here.schedule:
            here = replace(here, schedule=[([0], list(sizes or ()))])
        state[STATE_KEY] = here.encode()
        return state

    def _here(self) -> Position:
        worker = torch.utils.data.get_worker_info()
        return Position(
            drawn={0 if worker is None else worker.id: self._drawn},
            num_workers=0 if worker is None else worker.num_workers,
            num_processes=num_processes(),
            rank=process_rank(),
            seed=self._epoch_seed,
            worker_seed=self._worker_seed if self.seed == "trng" else 0,
            schedule=[([start], sizes) for start, sizes in self._schedule],
            bins=self._describe_bins(),
            options={
                "concurrent": self.concurrent,
                "sync_buckets": self.sync_buckets,
                "max_buffer_size": self._max_buffer_size,
            },
            counters=self._counters or counters(self.cuts),
            rules=self._rules(),
        )

    def _describe_bins(self) -> list[Any]:
        b = self.bins
        if b is None:
            return list(self.duration_bins)
        return [b.as_lists(), b.strict_2d, list(b.min_tps or ()), list(b.max_tps or ())]

    def _rules(self) -> dict[str, str]:
        """Digests of what decides which cuts belong where, apart from the bins."""
        selection = self._selection()
        density = selection.density
        rules: dict[str, Any] = {
            "filter()": selection.keep,
            "measure_length": selection.measure,
            "tokenizer": selection.tokenizer,
        }
        return {
            **{name: "" if rule is None else callable_digest(rule) for name, rule in rules.items()},
            "constraint": "" if self.constraint is None else _constraint_digest(self.constraint),
            "min_tps or max_tps": "" if density is None else repr((density.min_tps, density.max_tps)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the state was taken. As in Lhotse, ``state_dict`` is emptied.

        The batches before it are drawn again with the sizes they had, at the next ``iter()`` (in the worker processes
        where those iterate the sampler), which costs reading the source up to there. If this sampler has other sizes
        than the state's last ones, they hold from there on.

        :raises ResumeError: when the state can't be continued here: another number of ranks or workers, other bins,
            another seed, a state that is damaged or that Lhotse's own sampler saved; ``state_dict`` is left as it
            was. With ``on_resume="new_epoch"`` the epoch starts anew instead.
        """
        self._num_changes += 1
        self._replayed = ""
        before = {name: getattr(self, name) for name in _FROM_STATE}
        kept = self.__dict__ | {"_diagnostics": deepcopy(self.diagnostics)}
        try:
            loaded = Position.parse(state_dict)
            if (
                self._bins_are_estimated and not self.is_auto
            ):  # measured sizes belong to the bins they were measured for
                self._take_bins(loaded.bins)
            loaded.check(self._here())
            for name in ("world_size", "seed"):
                if state_dict.get(name) != getattr(self, name):
                    raise ResumeError(
                        f"the state was saved with {name}={state_dict.get(name)!r}, this sampler has "
                        f"{getattr(self, name)!r}"
                    )
            _load_lhotse_state(super().load_state_dict, state_dict)
        except ResumeError as problem:
            self.__dict__.update(kept)
            self._refuse(problem, _epoch_of(state_dict, self.epoch))
            state_dict.clear()
            return
        state_dict.clear()
        self._close()
        for name, attribute in _OPTIONS.items():
            setattr(self, attribute, loaded.options[name])
        for name, old in before.items():
            if getattr(self, name) != old:
                logger.warning("%s becomes %s, as in the loaded state", name.lstrip("_"), getattr(self, name))
        self._loaded = loaded
        self._replayed = loaded.replay(in_step=self.world_size > 1)
        self._continued = torch.zeros(max(1, loaded.num_workers), dtype=torch.uint8).share_memory_()
        self._started.zero_()
        self._num_lost = 0
        self._over = False
        self._drawn = 0
        self._schedule = []
        self._epoch_seed = self._common_seed = loaded.seed
        self._worker_seed = loaded.worker_seed or self._worker_seed
        self._counters = list(loaded.counters)
        self._tell_workers()

    def _take_bins(self, described: list[Any]) -> None:
        """Work with the bins of a state, if they could have been estimated here from other cuts."""
        own = self.bins
        try:
            if own is None:
                if len(described) == len(self.duration_bins):
                    self.duration_bins = Bins.from_edges(described).as_lists() if described else []
                return
            edges, strict_2d, min_tps, max_tps = described
            taken = Bins.from_edges(edges, strict_2d=strict_2d, min_tps=min_tps or None, max_tps=max_tps or None)
        except (TypeError, ValueError):
            return  # they are refused
        if len(taken) == len(own) and replace(taken, edges=own.edges) == own:
            self.bins, self.duration_bins = taken, taken.as_lists()

    def _fast_forward(self) -> None:
        """Lhotse calls this at the end of ``load_state_dict``; here, replay waits for ``iter()`` or ``next()``."""

    def _refuse(self, problem: ResumeError, epoch: int) -> None:
        if self._on_resume == "error":
            raise ResumeError(
                f"the sampler's state must come from the same set-up: {problem}; restore that, or pass "
                f"on_resume='new_epoch' to start the epoch anew"
            ) from problem
        # Not the next one: the trainer counts this epoch as the one that it is in, and will ask for the next.
        logger.warning("not resumed in the middle of epoch %d: %s; the epoch starts anew", epoch, problem)
        self._close()
        self._forget()
        self._over = False
        self.allow_iter_to_reset_state()
        self.set_epoch(epoch)

    def _rebuild(self) -> None:
        """Draw the batches of this epoch up to the position again: after a load, in a copy, in a forked process."""
        target, restored = self._drawn, self._just_restored_state
        worker = torch.utils.data.get_worker_info()
        num_workers = 0 if worker is None else worker.num_workers
        if self._loaded is not None and self._loaded.num_batches == 0 and self._loaded.num_workers != num_workers:
            target = 0  # nothing depends on who sampled
        elif self._loaded is not None:
            try:
                self._loaded.check_workers(num_workers)
                number = self._loaded.part_of(own_number() or 0)
                if not play(number):
                    number = own_number() or 0
                    logger.warning("the workers' turns begin anew: batches come in another order")
                target = self._loaded.drawn[number]
                self._schedule = self._loaded.with_sizes(self._sizes).schedule_of(number)
                self._warn_if_inexact(self._loaded)
            except ResumeError as problem:
                self._refuse(problem, self.epoch)
                target, restored, self._is_anew = 0, False, True
        if target:
            again = ", which reads its archives from their start" if sequential(self.cuts) else ""
            logger.info("drawing %d batches of epoch %d again%s", target, self.epoch, again)
        self._open()
        self._loaded = None
        self._drawn = 0
        while self._drawn < target:
            step = self._advance()
            if step is None:
                logger.warning(
                    "the source ended after %d of %d batches that were drawn before: it holds fewer cuts than when the "
                    "state was saved",
                    self._drawn,
                    target,
                )
                break
            self._note_kept(self._own_share(step))
        self._just_restored_state = restored

    def _warn_if_inexact(self, loaded: Position) -> None:
        reason = inexact_because(self.cuts)
        if self.seed == "trng" and loaded.num_workers > 0 and loaded.rank != process_rank():
            reason = f"seed='trng' was drawn by rank {loaded.rank}, and this is rank {process_rank()}"
        if reason is not None and loaded.num_batches > 0:
            logger.warning("resume is not exact: %s; use whole numbers as seeds", reason)
        counting = None if self.epoch == 0 else counting_unknown(self.cuts)
        if counting is not None and loaded.num_batches > 0:
            logger.warning(
                "resume may not be exact: %s, which isn't part of the state; shuffle by the sampler's epoch, or not "
                "in the source",
                counting,
            )
        others = loaded.other_rules(self._rules())
        if others and loaded.num_batches > 0:
            logger.warning(
                "resume is not exact: %s differs from when the state was saved, so that cuts may repeat or be missing "
                "in this epoch",
                " and ".join(others),
            )

    def filter(self, predicate: Callable[[Any], bool]) -> Self:
        """Leave out cuts for which ``predicate`` is false, from the next ``iter()`` on."""
        if self._is_live() and not self._reported:
            logger.warning("filter() takes effect with the next iter(), not in the epoch that is being sampled")
        super().filter(predicate)
        return self

    # Copies

    def __getstate__(self) -> Any:
        live = {name: self.__dict__.pop(name) for name in self._LIVE if name in self.__dict__}
        try:
            state = super().__getstate__()
            return dict(state) if isinstance(state, dict) else state
        finally:
            self.__dict__.update(live)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        for shared in (self._shared, self._continued, self._started):
            shared.share_memory_()  # a plain copy isn't


def _load_lhotse_state(load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
    """Load Lhotse's part of a state, which is left as it is.

    :raises ResumeError: when something in it is missing or isn't what it should be.
    """
    state = deepcopy({key: value for key, value in state_dict.items() if key != STATE_KEY})
    try:
        diagnostics = state["diagnostics"]
        # JSON knows no other keys than strings.
        diagnostics["stats_per_epoch"] = {int(key): value for key, value in diagnostics["stats_per_epoch"].items()}
        for name in ("epoch", "buffer_size", "shuffle", "drop_last"):
            index(state[name])
        load(state)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise ResumeError(f"the state is damaged ({type(error).__name__}: {error})") from error


def _constraint_digest(constraint: Any) -> str:
    """Of what it was made with, not of the batch that it has seen last."""
    fresh = constraint.copy()
    fresh.reset()
    fields = sorted((name, repr(value)) for name, value in vars(fresh).items() if _is_plain(value))
    return short_sha([type(fresh).__qualname__, fields])


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _epoch_of(state_dict: Any, default: int) -> int:
    epoch = state_dict.get("epoch") if isinstance(state_dict, Mapping) else None
    return epoch if isinstance(epoch, int) else default


def _weakly(method: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """``method`` as long as its object lives: without a cycle, the reading thread ends with the sampler at once."""
    weak = weakref.WeakMethod(method)

    def call(num_rejected: int, num_read: int) -> None:
        alive = weak()
        if alive is not None:
            alive(num_rejected, num_read)

    return call


def _check_ids(step: list[Batch]) -> None:
    for cuts in chain.from_iterable(step):
        if any(cut.id != cuts[0].id for cut in cuts):
            raise InvalidArgumentError(
                f"the sources must hold cuts of the same IDs in the same order, they hold "
                f"{', '.join(repr(cut.id) for cut in cuts)} at the same place; sort them alike, or pass "
                f"consistent_ids=False"
            )
