"""A drop-in for Lhotse's ``DynamicBucketingSampler`` with a calibrated batch size per bucket.

The sampler applies sizes and holds the position in the epoch; it never measures memory.
"""

from __future__ import annotations

import logging
import math
import os
import random
import secrets
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any, Literal

import numpy as np
import torch
from lhotse import CutSet
from lhotse.cut import Cut
from lhotse.dataset.dataloading import resolve_seed
from lhotse.dataset.sampling.base import SamplingConstraint, attach_dataloading_info
from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler, estimate_duration_buckets
from torch import distributed

from lhotse_oomfit.bins import Bins, Rejection, estimate_bins, has_text, missing_tokens, output_length
from lhotse_oomfit.buckets import Batch, Buckets, ConstraintBuckets, FixedBuckets, LimitBuckets
from lhotse_oomfit.buffer import BucketBuffer
from lhotse_oomfit.errors import (
    EmptySourceError,
    InvalidArgumentError,
    InvalidBinsError,
    NotCalibratedError,
    ProfileMismatchError,
    ResumeError,
)
from lhotse_oomfit.profile import Profile
from lhotse_oomfit.readahead import Chunk, DirectReader, Reader, SortFn, ThreadReader, sort_into_chunk

__all__ = ["CalibratedBucketingSampler"]

logger = logging.getLogger(__name__)

_STATE_KEY = "oomfit"
_STATE_VERSION = 1
_FILTERED = "filter"
_NO_BUCKET = "no bucket of the constraint"
_START_SHARE = 10  # a concurrent buffer hands out batches when a tenth of it is filled
_GROWTH = 5  # by default a buffer may grow to this many times buffer_size
_BUCKET_SEED = 1234
_REMEDIES = {
    Rejection.TOO_LONG.value: "add a longer edge to duration_bins",
    Rejection.TOO_MANY_TOKENS.value: "add token edges to duration_bins, or pass strict_2d=False",
    Rejection.TOO_DENSE.value: "raise max_tps",
    Rejection.TOO_SPARSE.value: "lower min_tps",
    Rejection.NO_TOKENS.value: "give the cuts supervisions, or use 1D bins without min_tps and max_tps",
    _NO_BUCKET: "look at the constraint's select_bucket",
}


class CalibratedBucketingSampler(DynamicBucketingSampler):
    """Lhotse's ``DynamicBucketingSampler``, with a fixed batch size per bucket, deterministic and quick.

    Every argument of Lhotse's sampler is accepted. With ``bucket_batch_size``, batches of bucket ``k`` hold
    ``sizes[k]`` examples, N bins make N buckets, and what lies beyond the last bin is skipped, counted and reported.
    Without it, Lhotse's own limits (``max_duration``, ``max_cuts``, ``quadratic_duration``, ``constraint``) make the
    batches, N bins make N + 1 buckets, and nothing is skipped.

    Which examples a batch holds depends on the source, the seeds and the sizes alone, with ``concurrent=True`` too:
    ranks stay in step, and :meth:`load_state_dict` continues exactly.

    Example::

        >>> sampler = CalibratedBucketingSampler(cuts, bucket_batch_size="auto", duration_bins=[5.0, 10.0, 20.0])
        >>> profile = calibrate(sampler, dataset, model=model, optimizer=optimizer, training_step=step)
        >>> for batch in DataLoader(dataset, sampler=sampler, batch_size=None): ...

    :param cuts: one or more sources of cuts; with several, batches are tuples of CutSets.
    :param bucket_batch_size: ``"auto"`` (sizes come later, through :meth:`apply`), one size per bucket, or a profile.
    :param duration_bins: closed upper edges: lengths, or (length, tokens) pairs. Estimated from the first
        ``num_cuts_for_bins_estimate`` cuts when not given, and taken from the profile when that is given.
    :param strict_2d: with 2D bins, look only at the sub-buckets of the first length edge that fits.
    :param min_tps: fewest output tokens per unit of length; one number, or (with ``bucket_batch_size``) one per bin.
    :param max_tps: most output tokens per unit of length, likewise.
    :param tokenizer: counts the tokens of supervisions that have text but no ``tokens``.
    :param measure_length: length of a cut in the unit of the bins; its duration by default.
    :param max_buffer_size: how far the buffer may grow where the batch sizes need it; five times ``buffer_size`` by
        default.
    :param on_resume: what :meth:`load_state_dict` does with a state that can't be continued here (another number of
        ranks, workers, other bins): ``"error"``, or ``"new_epoch"``, which starts the next epoch.
    :raises InvalidArgumentError: for arguments that contradict each other or have wrong values.
    :raises InvalidBinsError: for bins that don't describe buckets.
    :raises ProfileMismatchError: for a profile that was measured for other bins.
    """

    # What lives only while iterating; never pickled. These are the values that a copy starts with.
    _buffer: BucketBuffer | None = None
    _buffer_pid: int = 0
    _LIVE = ("_buffer", "_buffer_pid", "cuts_iter", "rng")
    rng: random.Random | None = None
    constraint: SamplingConstraint | None
    _just_restored_state: bool

    def __init__(
        self,
        *cuts: Iterable[Any],
        bucket_batch_size: Literal["auto"] | Sequence[int] | Profile | None = None,
        duration_bins: Sequence[Any] | None = None,
        strict_2d: bool = True,
        min_tps: float | Sequence[float] | None = None,
        max_tps: float | Sequence[float] | None = None,
        tokenizer: Callable[[str], Sequence[Any]] | None = None,
        measure_length: Callable[[Any], float] | None = None,
        max_buffer_size: int | None = None,
        on_resume: Literal["error", "new_epoch"] = "error",
        max_duration: float | None = None,
        max_cuts: int | None = None,
        constraint: SamplingConstraint | None = None,
        num_buckets: int | None = 10,
        shuffle: bool = False,
        drop_last: bool = False,
        consistent_ids: bool = True,
        num_cuts_for_bins_estimate: int = 10000,
        buffer_size: int = 20000,
        quadratic_duration: float | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        seed: int | Literal["randomized", "trng"] = 0,
        sync_buckets: bool = True,
        concurrent: bool = False,
        strict: Any = None,
        shuffle_buffer_size: int | None = None,
    ) -> None:
        if not cuts:
            raise InvalidArgumentError("CalibratedBucketingSampler must be given at least one source of cuts")
        if on_resume not in ("error", "new_epoch"):
            raise InvalidArgumentError(f"on_resume must be 'error' or 'new_epoch', it is {on_resume!r}")
        if buffer_size < 1:
            raise InvalidArgumentError(f"buffer_size must be at least 1, it is {buffer_size}")
        if max_buffer_size is not None and max_buffer_size < buffer_size:
            raise InvalidArgumentError(
                f"max_buffer_size must be at least buffer_size, {buffer_size}, it is {max_buffer_size}"
            )
        if not isinstance(seed, int) and seed not in ("randomized", "trng"):
            raise InvalidArgumentError(f"seed must be a whole number, 'randomized' or 'trng', it is {seed!r}")
        if (rank or 0) < 0 or (world_size is not None and (world_size < 1 or (rank or 0) >= world_size)):
            raise InvalidArgumentError(f"rank must be one of world_size ranks, it is {rank} of {world_size}")
        limits = {
            "max_duration": max_duration,
            "max_cuts": max_cuts,
            "constraint": constraint,
            "quadratic_duration": quadratic_duration,
        }
        self._tokenizer = tokenizer
        self._length = measure_length
        self._on_resume = on_resume
        self._max_buffer_size = max_buffer_size
        self._profile: Profile | None = None
        self._sizes: list[int] | None = None
        self._tps = (None if min_tps is None else min_tps, None if max_tps is None else max_tps)
        self.bins: Bins | None = None
        self.is_auto = _is_auto(bucket_batch_size)
        """Whether ``bucket_batch_size`` was ``"auto"``: a calibration may set the sizes, and set them again."""
        if bucket_batch_size is None:
            edges = self._lhotse_bins(cuts, duration_bins, num_buckets, num_cuts_for_bins_estimate, strict_2d, limits)
        else:
            given = [name for name, value in limits.items() if value is not None]
            if given:
                raise InvalidArgumentError(
                    f"bucket_batch_size must be the only limit on batches, {' and '.join(given)} came with it; leave "
                    f"one of them out"
                )
            self.bins = self._own_bins(
                cuts, bucket_batch_size, duration_bins, num_buckets, num_cuts_for_bins_estimate, strict_2d
            )
            edges = self.bins.as_lists()
        with warnings.catch_warnings():
            # An eagerly read CutSet is as good as a lazy one here.
            warnings.filterwarnings("ignore", message="You are using DynamicBucketingSampler with an eagerly read")
            super().__init__(
                *cuts,
                max_duration=max_duration,
                # Lhotse insists on a limit; replaced below.
                max_cuts=1 if bucket_batch_size is not None else max_cuts,
                constraint=constraint,
                num_buckets=num_buckets,
                shuffle=shuffle,
                drop_last=drop_last,
                consistent_ids=consistent_ids,
                duration_bins=edges,
                num_cuts_for_bins_estimate=num_cuts_for_bins_estimate,
                buffer_size=buffer_size,
                quadratic_duration=quadratic_duration,
                world_size=world_size,
                rank=rank,
                seed=seed,
                sync_buckets=sync_buckets,
                concurrent=concurrent,
                strict=strict,
                shuffle_buffer_size=shuffle_buffer_size,
            )
        self.max_cuts = max_cuts
        self.num_buckets = len(edges) + (self.bins is None)
        # The epoch as the main process sets it; workers, persistent ones included, read it from shared memory.
        self._shared_epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._seen_epoch = 0
        self._trng_seed = secrets.randbits(48)
        self._epoch_seed: int | None = None  # a seed that isn't a number, resolved for the epoch being sampled
        self._position = 0  # steps drawn in this epoch
        self._schedule: list[tuple[int, list[int]]] = []  # sizes, and the step from which they hold
        self._in_force: list[int] = []  # the sizes that the buffer works with
        self._loaded: dict[str, Any] | None = None  # a state that is still to be replayed
        if bucket_batch_size is not None and not _is_auto(bucket_batch_size):
            self.apply(bucket_batch_size)  # type: ignore[arg-type]

    # Bins

    def _own_bins(
        self,
        cuts: Sequence[Iterable[Any]],
        bucket_batch_size: Any,
        duration_bins: Sequence[Any] | None,
        num_buckets: int | None,
        num_cuts: int,
        strict_2d: bool,
    ) -> Bins:
        min_tps, max_tps = self._tps
        if isinstance(bucket_batch_size, Profile) and duration_bins is None:
            if min_tps is None and max_tps is None:
                return bucket_batch_size.bins
            duration_bins = bucket_batch_size.bins.edges
        if duration_bins is None:
            num = num_buckets or 0
            if isinstance(bucket_batch_size, (list, tuple, np.ndarray)):
                num = len(bucket_batch_size)
            if num < 1:
                raise InvalidArgumentError(
                    f"num_buckets must be at least 1 when there are no duration_bins, it is {num_buckets!r}"
                )
            estimated = estimate_bins(islice(cuts[0], num_cuts), num, measure_length=self.measure_length)
            duration_bins = estimated.edges
        return Bins.from_edges(duration_bins, strict_2d=strict_2d, min_tps=min_tps, max_tps=max_tps)

    def _lhotse_bins(
        self,
        cuts: Sequence[Iterable[Any]],
        duration_bins: Sequence[Any] | None,
        num_buckets: int | None,
        num_cuts: int,
        strict_2d: bool,
        limits: dict[str, Any],
    ) -> list[Any]:
        from lhotse.dataset.sampling.base import TimeConstraint

        constraint = limits["constraint"]
        if constraint is not None and (limits["max_duration"] is not None or limits["max_cuts"] is not None):
            raise InvalidArgumentError("constraint must not come with max_duration or max_cuts; leave one of them out")
        if constraint is None and limits["max_duration"] is None and limits["max_cuts"] is None:
            raise InvalidArgumentError(
                "the size of batches must be limited: pass bucket_batch_size ('auto', one size per bucket, or a "
                "profile), max_duration, max_cuts, or constraint"
            )
        for name in ("max_duration", "max_cuts", "quadratic_duration"):
            if limits[name] is not None and not limits[name] > 0:
                raise InvalidArgumentError(f"{name} must be above 0, it is {limits[name]!r}")
        if self._length is not None:
            raise InvalidArgumentError("measure_length must come with bucket_batch_size; without it, durations count")
        if not strict_2d:
            raise InvalidArgumentError("strict_2d=False must come with bucket_batch_size")
        for name, limit in zip(("min_tps", "max_tps"), self._tps, strict=True):
            if limit is not None and isinstance(limit, Iterable):
                raise InvalidArgumentError(f"{name} must be one number without bucket_batch_size, it is {limit!r}")
        if self._tokenizer is not None and self._tps == (None, None):
            raise InvalidArgumentError("tokenizer must come with bucket_batch_size, min_tps or max_tps")
        if duration_bins is not None:
            if len(duration_bins) == 0:
                return []
            bins = Bins.from_edges(duration_bins)
            if bins.is_2d and constraint is None:
                raise InvalidBinsError("2D duration_bins must come with bucket_batch_size, or a constraint for them")
            return bins.as_lists()
        sample = list(islice(cuts[0], num_cuts))
        if not sample:
            raise EmptySourceError("duration_bins must be estimated from at least one cut, the source has none")
        if num_buckets is None or not 2 <= num_buckets <= len(sample):
            raise InvalidArgumentError(
                f"num_buckets must be from 2 to the number of cuts seen, {len(sample)}, it is {num_buckets}; "
                f"or pass duration_bins"
            )
        if constraint is None:
            constraint = TimeConstraint(**{name: value for name, value in limits.items() if name != "constraint"})
        return [float(edge) for edge in estimate_duration_buckets(sample, num_buckets, constraint)]

    # Sizes

    @property
    def needs_calibration(self) -> bool:
        """Whether sizes are to be measured (``"auto"``) and none have been applied yet."""
        return self.bins is not None and self._sizes is None

    @property
    def profile(self) -> Profile | None:
        """The profile that was applied last; ``None`` when sizes came as plain numbers, or not at all."""
        return self._profile

    @property
    def bucket_batch_size(self) -> list[int] | None:
        """The sizes that hold now, one per bucket; ``None`` before calibration and without ``bucket_batch_size``."""
        return None if self._sizes is None else list(self._sizes)

    def apply(self, profile_or_sizes: Profile | Sequence[int], *, at_batch: int | None = None) -> None:
        """Use these sizes from the next batch on.

        The change is recorded, so that a resumed run makes it at the same batch.

        :param profile_or_sizes: one size per bucket, or a profile for the same bins.
        :param at_batch: in the middle of an epoch, the batch of this rank (and worker), counted from 0, from which
            the sizes hold. All ranks must name the same one: one that none of them has drawn, prefetched ones
            included. By default it is the next that this sampler draws.
        :raises ProfileMismatchError: when the profile was measured for other bins.
        :raises InvalidArgumentError: when there isn't one size of at least 1 per bucket, or ``at_batch`` was drawn.
        :raises BufferTooSmallError: from the next batch on, when the buffer can't hold such batches.
        """
        if self.bins is None:
            raise InvalidArgumentError(
                "sizes must be applied to a sampler with bucket_batch_size, this one batches by Lhotse's limits"
            )
        if isinstance(profile_or_sizes, Profile):
            _check_profile_bins(profile_or_sizes.bins, self.bins)
            sizes = list(profile_or_sizes.bucket_batch_size)
            profile: Profile | None = profile_or_sizes
        else:
            sizes = _check_sizes(profile_or_sizes, len(self.bins))
            profile = None
        start = self._position if at_batch is None else at_batch
        if start < self._position or (at_batch and not self._schedule):
            raise InvalidArgumentError(
                f"at_batch must be a batch of the epoch being sampled that isn't drawn yet, {self._position} or above, "
                f"it is {at_batch}" + ("" if self._schedule else ", and no epoch has begun")
            )
        self._sizes = sizes
        self._profile = profile
        if self._schedule:
            self._schedule = [entry for entry in self._schedule if entry[0] < start] + [(start, sizes)]

    # What calibration asks for

    def measure_length(self, cut: Any) -> float:
        """The length of ``cut`` in the unit of the bins."""
        return float(cut.duration if self._length is None else self._length(cut))

    def measure_tokens(self, cut: Any) -> int | None:
        """The output tokens of ``cut``, see :func:`lhotse_oomfit.bins.output_length`."""
        return output_length(cut, self._tokenizer)

    def sample_cuts(self, num: int) -> list[Cut]:
        """The first ``num`` cuts that pass the filter and belong to a bucket (of the first source, when several).

        The position in the epoch stays as it is.

        :raises EmptySourceError: when there is none.
        """
        found: list[Cut] = []
        for item in zip(*self.cuts, strict=False):
            if all(self._filter_fn(cut) for cut in item) and not isinstance(self._classify(item[0]), str):
                found.append(item[0])
                if len(found) == num:
                    break
        if not found:
            raise EmptySourceError(
                "the sampler must have at least one cut that passes its filter and belongs to a bucket, there is none; "
                "look at the source, the filter, duration_bins and max_tps"
            )
        return found

    def transform(self, cuts: CutSet) -> CutSet:
        """``cuts`` after the functions given to ``map()``, as a batch goes through them."""
        for fn in self._transforms:
            cuts = fn(cuts)
        return cuts

    def _classify(self, cut: Any) -> int | str:
        return self._classifier()(cut)

    def _classifier(self) -> Callable[[Any], int | str]:
        """A function from a cut to its bucket, or the reason why it has none. It doesn't refer to the sampler."""
        bins, tokenizer, measure = self.bins, self._tokenizer, self._length or attrgetter("duration")
        min_tps, max_tps = self._tps
        density: Bins | None = None
        if bins is None and (min_tps is not None or max_tps is not None):
            density = Bins.from_edges([1e300], min_tps=min_tps, max_tps=max_tps)
        with_tokens = bins if bins is not None and bins.needs_tokens else density

        def select(rule: Bins, cut: Any) -> int | Rejection:
            tokens = output_length(cut, tokenizer) if rule is with_tokens else None
            if tokens is None and rule is with_tokens and has_text(cut):
                raise missing_tokens(cut)
            try:
                return rule.select(measure(cut), tokens)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"cut {cut.id!r}: {error}") from None

        if bins is not None:

            def classify(cut: Any) -> int | str:
                found = select(bins, cut)
                return found.value if isinstance(found, Rejection) else found

            return classify

        constraint, edges = self.constraint, self.duration_bins
        num_buckets = len(edges) + 1

        def classify_for_lhotse(cut: Any) -> int | str:
            if density is not None:
                found = select(density, cut)
                if isinstance(found, Rejection):
                    return found.value
            if constraint is None:
                return bisect_left(edges, cut.duration)
            k: int | None = constraint.select_bucket(buckets=edges, example=cut)
            return _NO_BUCKET if k is None or not 0 <= k < num_buckets else k

        return classify_for_lhotse

    def _sort_fn(self) -> SortFn:
        """Turns examples that were read into a chunk: filters, measures once, looks up the bucket."""
        several = len(self.cuts) > 1
        keep = None if type(self._filter_fn).__name__ == "_filter_nothing" else self._filter_fn
        quadratic, by_limits = self.quadratic_duration, self.bins is None and self.constraint is None
        plain = self.bins is not None and not self.bins.needs_tokens
        plain = plain or (by_limits and self._tps == (None, None))
        edges = self.bins.edges if self.bins is not None else self.duration_bins
        num_buckets = self.num_buckets
        measure = self._length or attrgetter("duration")
        classify = self._classifier()

        def effective(cut: Any) -> float:
            duration: float = cut.duration
            return duration if quadratic is None else duration + duration * duration / quadratic

        def sort(items: list[Any]) -> Chunk:
            num_read = len(items)
            if keep is not None:
                items = [i for i in items if (all(map(keep, i)) if several else keep(i))]
            firsts = list(map(itemgetter(0), items)) if several else items
            if plain:
                lengths = list(map(measure, firsts))
                if not math.fsum(lengths) >= 0.0:
                    for cut in firsts:
                        classify(cut)  # names the one that isn't a number
                found = [bisect_left(edges, length) for length in lengths]
                chunk = Chunk(items, found, None)
                if found and max(found) >= num_buckets:
                    fits = [k < num_buckets for k in found]
                    chunk.items = [item for item, ok in zip(items, fits, strict=True) if ok]
                    chunk.buckets = [k for k in found if k < num_buckets]
                    chunk.rejected[Rejection.TOO_LONG.value] = len(items) - len(chunk.items)
                if by_limits:
                    chunk.lengths = lengths if quadratic is None else [d + d * d / quadratic for d in lengths]
            else:
                chunk = sort_into_chunk(items, (lambda item: classify(item[0])) if several else classify, None)
                if by_limits:
                    chunk.lengths = [effective(item[0] if several else item) for item in chunk.items]
            if len(items) < num_read:
                chunk.rejected[_FILTERED] = num_read - len(items)
            return chunk

        return sort

    # Iterating

    def __iter__(self) -> CalibratedBucketingSampler:
        self._follow_main_process()
        if self._just_restored_state:
            if not self._is_live():
                self._rebuild()
            return self
        self._forget()
        self._open()
        return self

    def _forget(self) -> None:
        """Give up the position in the epoch."""
        self._loaded = None
        self._position = 0
        self._epoch_seed = None
        self._schedule = []

    @property
    def num_batches_drawn(self) -> int:
        """How many batches of this epoch this rank has drawn, or will skip when a loaded state is continued."""
        if self._loaded is not None:
            positions = self._loaded["positions"]
            return sum(positions.values() if isinstance(positions, dict) else positions)
        return self._position

    def _is_live(self) -> bool:
        return self._buffer is not None and self._buffer_pid == os.getpid()

    def _follow_main_process(self) -> bool:
        """In a worker, take over an epoch that the main process has set since; whether there was one."""
        if torch.utils.data.get_worker_info() is None:
            return False
        epoch = int(self._shared_epoch)
        if epoch == self._seen_epoch:
            return False
        self._seen_epoch = epoch
        changed = bool(epoch != self.epoch)
        super().set_epoch(epoch)
        return changed

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; worker processes take it over with their next ``iter()``, persistent ones too."""
        if epoch != self.epoch and self._loaded is not None:
            self._forget()
        super().set_epoch(epoch)
        if torch.utils.data.get_worker_info() is None:
            self._shared_epoch.fill_(epoch)
            self._seen_epoch = epoch

    def _open(self) -> None:
        """Start the epoch from its first batch."""
        if self.needs_calibration:
            raise NotCalibratedError(
                "bucket_batch_size='auto' must be calibrated before the sampler is iterated: call "
                "lhotse_oomfit.calibrate(sampler, dataset, ...) first, add "
                "lhotse_oomfit.lightning.BucketBatchSizeFinder() to the Trainer's callbacks, or pass bucket_batch_size "
                "as a list of sizes or a profile"
            )
        self._close()
        self.diagnostics.reset_current_epoch()
        if self.bins is not None and not self._schedule:
            self._schedule = [(0, list(self._sizes or ()))]
        worker = torch.utils.data.get_worker_info()
        seed = self._resolve_seed()
        self.rng = random.Random(seed + self.epoch)
        if self.sync_buckets:
            entropy = [_BUCKET_SEED, self.epoch, 0 if worker is None else worker.id + 1]
        else:
            entropy = [_BUCKET_SEED, self.epoch, 0 if worker is None else worker.id + 1, seed & (2**64 - 1)]
        source: Iterator[Any] = zip(*self.cuts, strict=False) if len(self.cuts) > 1 else iter(self.cuts[0])
        sort = self._sort_fn()
        max_capacity = self._max_buffer_size or self.buffer_size * _GROWTH
        start = max(1, self.buffer_size // _START_SHARE) if self.concurrent else self.buffer_size
        reader: Reader
        reader = ThreadReader(source, sort, capacity=max(256, start)) if self.concurrent else DirectReader(source, sort)
        self._buffer = BucketBuffer(
            reader,
            self._make_buckets(self.rng if self.shuffle else None),
            capacity=self.buffer_size,
            max_capacity=max(max_capacity, self.buffer_size),
            start=start,
            world_size=self.world_size,
            same_bucket=self.sync_buckets,
            drop_last=self.drop_last,
            bucket_rng=np.random.default_rng(entropy),
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
        if self._buffer is not None and self._buffer_pid == os.getpid():
            self._buffer.reader.close()
        self._buffer = None

    def _resolve_seed(self) -> int:
        worker = torch.utils.data.get_worker_info()
        if isinstance(self.seed, int):
            return self.seed
        if self._epoch_seed is None:
            if worker is not None:
                if self.seed == "trng":
                    mixed = np.random.SeedSequence([self._trng_seed, _process_rank(), worker.id])
                    self._epoch_seed = int(mixed.generate_state(1)[0])
                else:
                    self._epoch_seed = resolve_seed(self.seed)
            elif self.world_size > 1:
                self._epoch_seed = self._shared_seed()
            else:
                self._epoch_seed = resolve_seed(self.seed)
        return self._epoch_seed

    def _shared_seed(self) -> int:
        """One seed for all ranks, drawn by the first."""
        if not (distributed.is_available() and distributed.is_initialized()):
            raise InvalidArgumentError(
                f"seed must be a whole number on {self.world_size} ranks of a map-style dataset, it is {self.seed!r}: "
                f"the ranks must draw alike, and torch.distributed isn't initialised to agree on a seed; initialise it "
                f"before iterating, or pass a number"
            )
        if distributed.get_world_size() < self.world_size:
            raise InvalidArgumentError(
                f"seed must be a whole number when the sampler has more ranks ({self.world_size}) than "
                f"torch.distributed ({distributed.get_world_size()}), it is {self.seed!r}"
            )
        drawn: list[Any] = [resolve_seed(self.seed)]
        distributed.broadcast_object_list(drawn, src=0)
        return int(drawn[0])

    def __next__(self) -> Any:
        if not self._is_live():
            self._rebuild()
        elif self._follow_main_process():
            self.allow_iter_to_reset_state()
            iter(self)
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
        return self._to_cuts(self._own_share(step))

    def _advance(self) -> list[Batch] | None:
        buffer = self._buffer
        if buffer is None:
            raise StopIteration
        if len(self._schedule) > 1:
            due = [sizes for start, sizes in self._schedule if start <= self._position][-1]
            if due is not self._in_force:
                buffer.set_sizes(due)
                self._in_force = due
        step = buffer.next_step()
        if buffer.rejected or buffer.num_dropped:
            stats = self.diagnostics.current_epoch_stats
            stats.discarded_cuts = (sum(buffer.rejected.values()) + buffer.num_dropped) * len(self.cuts)
        if step is None:
            self._report_skipped()
            return None
        self._position += 1
        return step

    def _own_share(self, step: list[Batch]) -> Batch:
        if self.rank < len(step):
            return step[self.rank]
        # Fewer examples than ranks: this rank repeats one of them, marked as such, since it can't skip the step.
        batch = step[self.rank % len(step)]
        number = self.rank // len(step) - 1
        item = batch[0]
        if isinstance(item, tuple):
            return [tuple(cut.with_id(f"{cut.id}_dup{number}") for cut in item)]
        return [item.with_id(f"{item.id}_dup{number}")]

    def _to_cuts(self, batch: Batch) -> Any:
        if len(self.cuts) == 1:
            return CutSet.from_cuts(batch)
        if self.consistent_ids:
            for cuts in batch:
                if any(cut.id != cuts[0].id for cut in cuts):
                    raise InvalidArgumentError(
                        f"the sources must hold cuts of the same IDs in the same order, they hold "
                        f"{', '.join(repr(cut.id) for cut in cuts)} at the same place; sort them alike, or pass "
                        f"consistent_ids=False"
                    )
        return tuple(CutSet.from_cuts(cuts) for cuts in zip(*batch, strict=True))

    def _note_kept(self, batch: Any) -> None:
        stats = self.diagnostics.current_epoch_stats
        stats.kept_cuts += len(batch[0] if isinstance(batch, tuple) else batch)
        stats.kept_batches += 1

    # What was skipped

    @property
    def num_skipped(self) -> dict[str, int]:
        """How many cuts of this epoch were left out so far, by reason; those that ``filter()`` left out apart."""
        if self._buffer is None:
            return {}
        return {reason: num for reason, num in self._buffer.rejected.items() if reason != _FILTERED}

    def _report_skipped(self) -> None:
        worker = torch.utils.data.get_worker_info()
        if self._reported or self.rank > 0 or (worker is not None and worker.id > 0):
            return
        self._reported = True
        skipped = self.num_skipped
        if skipped:
            stats = self.diagnostics.current_epoch_stats
            logger.warning(
                "epoch %d: %d of %d cuts were skipped: %s",
                self.epoch,
                sum(skipped.values()),
                stats.total_cuts,
                "; ".join(f"{num} {reason} ({_REMEDIES[reason]})" for reason, num in sorted(skipped.items())),
            )

    def get_report(self) -> str:
        """Lhotse's report, and how many cuts of this epoch were skipped, by reason."""
        report: str = super().get_report()
        skipped = ", ".join(f"{num} {reason}" for reason, num in sorted(self.num_skipped.items()))
        return f"{report}\n|  epoch {self.epoch} skipped {skipped} |" if skipped else report

    # Resuming

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state after the batches it has handed out; see :meth:`state_dict_at` for prefetched ones."""
        constraint, self.constraint = self.constraint, None  # Lhotse refuses custom ones, which make no difference here
        try:
            state: dict[str, Any] = super().state_dict()
        finally:
            self.constraint = constraint
        if self._loaded is not None:
            state[_STATE_KEY] = dict(self._loaded)
            return state
        worker = torch.utils.data.get_worker_info()
        num_workers = 0 if worker is None else worker.num_workers
        state[_STATE_KEY] = {
            "version": _STATE_VERSION,
            "positions": [self._position] if worker is None else {worker.id: self._position},
            "num_workers": num_workers,
            "num_ranks": _num_ranks(),
            "seed": self._epoch_seed,
            "trng_seed": self._trng_seed if self.seed == "trng" else None,
            "rank": _process_rank(),
            "schedule": [[start, list(sizes)] for start, sizes in self._schedule],
            "bins": self._bins_state(),
            "concurrent": self.concurrent,
            "sync_buckets": self.sync_buckets,
            "max_buffer_size": self._max_buffer_size,
        }
        return state

    def _bins_state(self) -> list[Any]:
        if self.bins is None:
            return list(self.duration_bins)
        b = self.bins
        return [b.as_lists(), b.strict_2d, list(b.min_tps or ()), list(b.max_tps or ())]

    def state_dict_at(self, num_batches: int, *, num_workers: int = 0) -> dict[str, Any]:
        """The state as it was when this rank had *consumed* ``num_batches`` batches of the epoch.

        A loader with workers is ahead of training: the batches that it prefetched would be lost in a resumed run
        if the state were that of :meth:`state_dict`. Call this in the main process, on the sampler that the loader
        was made with, and give the result to :meth:`load_state_dict` of a new sampler before its loader is iterated.

        Map-style (the sampler is iterated by the loader, in the main process): leave ``num_workers`` at 0, whatever
        the loader has. Iterable-style (each worker iterates a copy of the sampler): pass the loader's
        ``num_workers``; worker ``w`` has handed out every ``num_workers``-th batch, from the ``w``-th on. That holds
        until some worker has ended its epoch, after which the remaining workers take more turns: a state of those
        last batches may repeat a few.

        :param num_batches: batches of this epoch that training has finished.
        :param num_workers: of an iterable-style loader.
        :raises InvalidArgumentError: for a negative number, or more map-style batches than were drawn.
        """
        if num_batches < 0 or num_workers < 0:
            raise InvalidArgumentError(
                f"num_batches and num_workers must be at least 0, they are {num_batches} and {num_workers}"
            )
        if num_workers == 0 and self._loaded is None and num_batches > self._position:
            raise InvalidArgumentError(
                f"num_batches must be at most the {self._position} batches that were drawn, it is {num_batches}; for "
                f"an iterable-style loader, pass its num_workers"
            )
        state = self.state_dict()
        ours = state[_STATE_KEY]
        ours["num_workers"] = num_workers
        ours["positions"] = (
            [num_batches]
            if num_workers == 0
            else [(num_batches + num_workers - 1 - w) // num_workers for w in range(num_workers)]
        )
        if num_workers and not ours["schedule"] and self.bins is not None:
            ours["schedule"] = [[0, list(self._sizes or ())]]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the state was taken. Emptied of its keys, as in Lhotse, ``state_dict`` can't be used again.

        The batches before it are drawn again with the sizes they had, which costs reading the source once more, at
        the next ``iter()`` (in the worker processes, where they iterate the sampler). Sizes of this sampler that
        differ from the state's last ones hold from there on.

        :raises ResumeError: when the state can't be continued here: another number of ranks or workers, other bins,
            another seed, or a state that Lhotse's own sampler saved; with ``on_resume="new_epoch"`` the next epoch
            starts instead.
        """
        ours: dict[str, Any] = state_dict.pop(_STATE_KEY, None) or {}
        problem = self._why_not(ours, state_dict)
        if problem is not None:
            self._refuse(problem, int(state_dict.get("epoch") or 0))
            state_dict.clear()
            return
        self._close()
        for name in ("concurrent", "sync_buckets"):
            if getattr(self, name) != ours[name]:
                logger.warning("%s is set to %s, as in the saved state", name, ours[name])
                setattr(self, name, ours[name])
        self._max_buffer_size = ours["max_buffer_size"]
        self._trng_seed = ours["trng_seed"] or self._trng_seed
        super().load_state_dict(state_dict)
        self._loaded = ours
        self._position = 0
        self._schedule = [(start, list(sizes)) for start, sizes in ours["schedule"]]
        self._epoch_seed = ours["seed"]
        self._shared_epoch.fill_(self.epoch)
        self._seen_epoch = self.epoch

    def _why_not(self, ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
        if not ours:
            return "the state was saved by Lhotse's own sampler, which draws other batches"
        if ours["version"] != _STATE_VERSION:
            return f"the state has format {ours['version']}, this version of lhotse-oomfit reads {_STATE_VERSION}"
        if theirs["world_size"] != self.world_size:
            return f"the state was saved with world_size={theirs['world_size']}, this sampler has {self.world_size}"
        if ours["num_ranks"] != _num_ranks():
            return f"the state was saved on {ours['num_ranks']} ranks, this job has {_num_ranks()}"
        if theirs["seed"] != self.seed:
            return f"the state was saved with seed={theirs['seed']!r}, this sampler has {self.seed!r}"
        if ours["bins"] != self._bins_state():
            return f"the state was saved with the bins {ours['bins']}, this sampler has {self._bins_state()}"
        return None

    def _refuse(self, problem: str, epoch: int) -> None:
        if self._on_resume == "error":
            raise ResumeError(
                f"the sampler's state must come from the same set-up: {problem}; restore that, or pass "
                f"on_resume='new_epoch' to start the next epoch"
            )
        logger.warning("not resumed in the middle of epoch %d: %s; epoch %d starts", epoch, problem, epoch + 1)
        self._close()
        self._forget()
        self.set_epoch(epoch + 1)

    def _fast_forward(self) -> None:
        """Lhotse calls this at the end of ``load_state_dict``; here replay waits for ``iter()`` or ``next()``."""

    def _rebuild(self) -> None:
        """Draw the batches of this epoch up to the position again."""
        loaded, position = self._loaded, self._position
        if loaded is not None:
            worker = torch.utils.data.get_worker_info()
            num_workers = 0 if worker is None else worker.num_workers
            if loaded["num_workers"] != num_workers:
                just_restored, self._just_restored_state = self._just_restored_state, False
                self._refuse(
                    f"the state was saved with {_in_workers(loaded['num_workers'])}, now it is "
                    f"{_in_workers(num_workers)}",
                    self.epoch,
                )
                self._just_restored_state = just_restored
                position = 0
            else:
                position = loaded["positions"][0 if worker is None else worker.id]
                if self.seed == "trng" and worker is not None and loaded["rank"] != _process_rank():
                    logger.warning(
                        "resume is not exact: seed='trng' was drawn by rank %d, this is rank %d; use a whole number",
                        loaded["rank"],
                        _process_rank(),
                    )
                last = self._schedule[-1] if self._schedule else None
                if last is not None and self._sizes is not None and last[1] != self._sizes:
                    start = max(position, last[0])
                    self._schedule = [e for e in self._schedule if e[0] < start] + [(start, list(self._sizes))]
        restored = self._just_restored_state
        self._open()
        self._loaded = None
        self._position = 0
        while self._position < position:
            step = self._advance()
            if step is None:
                break
            self._note_kept(self._own_share(step))
        self._just_restored_state = restored

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

    def __del__(self) -> None:
        buffer = self.__dict__.get("_buffer")
        if buffer is not None and self.__dict__.get("_buffer_pid") == os.getpid():
            shared = getattr(buffer.reader, "_shared", None)
            if shared is not None:
                shared.stop()


def _is_auto(bucket_batch_size: Any) -> bool:
    return isinstance(bucket_batch_size, str) and bucket_batch_size == "auto"


def _check_sizes(sizes: Any, num_buckets: int) -> list[int]:
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable):
        raise InvalidArgumentError(
            f"bucket_batch_size must be 'auto', one size per bucket, or a profile, it is {sizes!r}"
        )
    values = list(sizes)
    for size in values:
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise InvalidArgumentError(f"bucket_batch_size must hold whole numbers of at least 1, it holds {size!r}")
    if len(values) != num_buckets:
        raise InvalidArgumentError(
            f"bucket_batch_size must hold one size per bucket, it holds {len(values)} for {num_buckets} duration_bins"
        )
    return [int(size) for size in values]


def _check_profile_bins(measured: Bins, now: Bins) -> None:
    if measured.edges != now.edges:
        raise ProfileMismatchError(
            f"the profile was measured for the bins {measured.as_lists()}, this sampler has {now.as_lists()}; "
            f"recalibrate, or use the profile's bins"
        )
    for k in range(len(now)):
        if measured.max_output_len(k) != now.max_output_len(k):
            raise ProfileMismatchError(
                f"the profile was measured with at most {measured.max_output_len(k)} tokens in bucket {k}, this "
                f"sampler admits {now.max_output_len(k)}; recalibrate, or use the profile's max_tps"
            )


def _process_rank() -> int:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _num_ranks() -> int:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _in_workers(num_workers: int) -> str:
    return f"sampled in {num_workers} worker processes" if num_workers else "sampled in the main process"
