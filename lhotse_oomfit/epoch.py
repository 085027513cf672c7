"""An epoch of batches: how it begins and how each is drawn.

What they are drawn from and with which sizes, and how an epoch goes on in its middle, subclasses say.
"""

from __future__ import annotations

import logging
import os
import random
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lhotse import CutSet
from lhotse.dataset.sampling.base import SamplingConstraint, attach_dataloading_info
from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler

from lhotse_oomfit.agreement import Agreement
from lhotse_oomfit.batch_rules import describe_bins
from lhotse_oomfit.bins import Bins
from lhotse_oomfit.buckets import Batch, Buckets, ConstraintBuckets, FixedBuckets, LimitBuckets
from lhotse_oomfit.buffer import BucketBuffer
from lhotse_oomfit.epoch_seed import EpochSeed
from lhotse_oomfit.errors import NotCalibratedError
from lhotse_oomfit.position import Schedule, process_rank
from lhotse_oomfit.rank_share import as_cuts, check_ids, share_of
from lhotse_oomfit.readahead import DirectReader, Reader, ThreadReader
from lhotse_oomfit.selection import Selection
from lhotse_oomfit.source import counters, endless, restore_counters
from lhotse_oomfit.turns import own_number, play
from lhotse_oomfit.worker_state import WorkerState

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EpochSampler"]

logger = logging.getLogger(__name__)

_START_SHARE = 10  # a concurrent buffer hands out batches when a tenth of it is filled
_GROWTH = 5  # by default a buffer may grow to this many times buffer_size
_BUCKET_SEED = 1234


class EpochSampler(DynamicBucketingSampler):
    """Draws the batches of an epoch from a bucket buffer.

    Subclasses call :meth:`_init_epoch` at the end of their constructor, after Lhotse's.
    """

    # What lives only while iterating is never pickled; a copy starts with these values.
    _LIVE = ("_buffer", "_buffer_pid", "cuts_iter", "rng", "agreement")
    _buffer: BucketBuffer | None = None
    """What is drawn from; None before an epoch begins, and in a copy."""
    _buffer_pid = 0
    rng: random.Random | None = None
    constraint: SamplingConstraint | None
    _just_restored_state: bool
    bins: Bins | None
    num_buckets: int
    is_auto: bool
    duration_bins: list[Any]
    agreement: Agreement | None = None
    """Compares the sizes over ranks when the main process starts an epoch; calibration makes it, copies have none."""
    _max_buffer_size: int | None
    """How far the buffer may grow, where the user said so."""
    _sizes: list[int] | None = None
    """The sizes that hold now, one per bucket; None before calibration, and where Lhotse's limits make the batches."""
    _num_changes: int
    """How often sizes were applied or a state loaded."""
    _replayed: str
    """The sizes of the loaded state, and where they hold, in words."""
    _workers: WorkerState
    """What the main process and its workers tell each other."""
    _epoch_seed: EpochSeed
    """What the seed stands for in this epoch."""
    _drawn: int
    """Batches of this epoch that were drawn."""
    _schedule: Schedule
    """The sizes of this epoch, and the batches from which they hold; empty before it begins."""
    _counters: list[int]
    """How often the parts of the source had been iterated when the epoch began."""
    _is_anew: bool
    """In a worker, whether the epoch was started anew instead of continued."""
    _over: bool
    """Whether the epoch that was being iterated has ended, and ``iter()`` wasn't called since."""

    def _init_epoch(self) -> None:
        self._workers = WorkerState(len(self.bins or ()), len(counters(self.cuts)))
        self._epoch_seed = EpochSeed()
        self._drawn = 0
        self._schedule = []
        self._in_force: list[int] = []  # the sizes that the buffer works with
        self._num_changes = 0
        self._replayed = ""
        self._counters = []
        self._is_anew = False
        self._over = False
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

    def _rebuild(self) -> None:
        """Draw the batches of this epoch up to the position again, where this process hasn't."""
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

    # Beginning

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
        if self._goes_on():
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
            "bins": str(describe_bins(self.bins, self.duration_bins)),
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
            self._workers.forget()
        super().set_epoch(epoch)
        self._workers.tell(epoch, self._sizes)

    def _follow_main_process(self) -> None:
        """In a worker, take over the epoch and the sizes that the main process has set since."""
        epoch, sizes = self._workers.news()
        if sizes is not None:
            self._sizes = sizes
        if epoch is not None:
            self.set_epoch(epoch)

    def _goes_on(self) -> bool:
        """Whether ``iter()`` goes on at the position that was just restored, instead of starting the epoch."""
        return self._just_restored_state

    def _forget(self) -> None:
        """Give up the position in the epoch."""
        self._drawn = 0
        self._epoch_seed.forget()
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
        self._workers.note_start(self.epoch, self._sizes, self._counters, anew=self._is_anew)
        worker = torch.utils.data.get_worker_info()
        seed = self._epoch_seed.resolve(self.seed, self.world_size)
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

    def _is_live(self) -> bool:
        return self._buffer is not None and self._buffer_pid == os.getpid()

    def _close(self) -> None:
        if self._buffer is not None and self._is_live():
            self._buffer.reader.close()
        self._buffer = None

    # Drawing

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
            check_ids(step)
        return as_cuts(share_of(self.rank, step), len(self.cuts))

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

    def _note_kept(self, batch: Any) -> None:
        stats = self.diagnostics.current_epoch_stats
        stats.kept_cuts += len(batch[0] if isinstance(batch, tuple) else batch)
        stats.kept_batches += 1

    def filter(self, predicate: Callable[[Any], bool]) -> Self:
        """Leave out cuts for which ``predicate`` is false, from the next ``iter()`` on."""
        if self._is_live() and not self._reported:
            logger.warning("filter() takes effect with the next iter(), not in the epoch that is being sampled")
        super().filter(predicate)
        return self

    def __getstate__(self) -> Any:
        live = {name: self.__dict__.pop(name) for name in self._LIVE if name in self.__dict__}
        try:
            state = super().__getstate__()
            return dict(state) if isinstance(state, dict) else state
        finally:
            self.__dict__.update(live)


def _weakly(method: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """``method`` as long as its object lives: without a cycle, the reading thread ends with the sampler at once."""
    weak = weakref.WeakMethod(method)

    def call(num_rejected: int, num_read: int) -> None:
        alive = weak()
        if alive is not None:
            alive(num_rejected, num_read)

    return call
