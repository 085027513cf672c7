"""A drop-in for Lhotse's ``DynamicBucketingSampler`` with a calibrated batch size per bucket.

The sampler applies sizes, from a profile or a list, and answers what calibration asks for; it never measures memory.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from lhotse.cut import Cut
from lhotse.dataset.sampling.base import SamplingConstraint

from lhotse_oomfit.arguments import (
    bins_for_limits,
    bins_for_sizes,
    check_limits,
    check_profile_bins,
    check_seed,
    check_sizes,
    first_cuts,
    is_auto,
    refuse_read_once,
    whole_number,
)
from lhotse_oomfit.bins import Bins, Rejection, checked_length, output_length
from lhotse_oomfit.errors import EmptySourceError, InvalidArgumentError
from lhotse_oomfit.position import process_rank
from lhotse_oomfit.profile import Profile
from lhotse_oomfit.resume import ResumableSampler
from lhotse_oomfit.selection import FILTERED, NO_BUCKET, Selection, density_limits
from lhotse_oomfit.source import undisturbed

__all__ = ["CalibratedBucketingSampler"]

logger = logging.getLogger(__name__)

_REMEDIES = {
    Rejection.TOO_LONG.value: "add a longer edge to duration_bins",
    Rejection.TOO_MANY_TOKENS.value: "add token edges to duration_bins, or pass strict_2d=False",
    Rejection.TOO_DENSE.value: "raise max_tps",
    Rejection.TOO_SPARSE.value: "lower min_tps",
    Rejection.NO_TOKENS.value: "give the cuts supervisions, or use 1D bins without min_tps and max_tps",
    FILTERED: "look at the filter",
    NO_BUCKET: "look at the constraint's select_bucket",
}


_MOST_IN_VAIN = 100_000  # cuts in a row that belong to no bucket, before a sample of cuts is given up


class CalibratedBucketingSampler(ResumableSampler):
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
        ranks, workers, other bins): ``"error"``, or ``"new_epoch"``, which starts the epoch anew.
    :raises InvalidArgumentError: for arguments that contradict each other or have wrong values.
    :raises InvalidBinsError: for bins that don't describe buckets.
    :raises ProfileMismatchError: for a profile that was measured for other bins.
    """

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
        limits = check_limits(
            bucket_batch_size,
            {
                "max_duration": max_duration,
                "max_cuts": max_cuts,
                "constraint": constraint,
                "quadratic_duration": quadratic_duration,
            },
        )
        self.is_auto = is_auto(bucket_batch_size)
        """Whether sizes are measured rather than given."""
        if not (bucket_batch_size is None or self.is_auto or isinstance(bucket_batch_size, Profile)):
            bucket_batch_size = check_sizes(bucket_batch_size, None)
        if on_resume not in ("error", "new_epoch"):
            raise InvalidArgumentError(f"on_resume must be 'error' or 'new_epoch', it is {on_resume!r}")
        buffer_size = whole_number("buffer_size", buffer_size)
        max_buffer_size = None if max_buffer_size is None else whole_number("max_buffer_size", max_buffer_size)
        if max_buffer_size is not None and max_buffer_size < buffer_size:
            raise InvalidArgumentError(
                f"max_buffer_size must be at least buffer_size, {buffer_size}, it is {max_buffer_size}"
            )
        if shuffle_buffer_size is not None:
            shuffle_buffer_size = whole_number("shuffle_buffer_size", shuffle_buffer_size, at_least=0)
        num_buckets = None if num_buckets is None else whole_number("num_buckets", num_buckets, at_least=None)
        num_cuts_for_bins_estimate = whole_number("num_cuts_for_bins_estimate", num_cuts_for_bins_estimate)
        seed = check_seed(seed)
        world_size = None if world_size is None else whole_number("world_size", world_size)
        rank = None if rank is None else whole_number("rank", rank, at_least=0)
        if (world_size is not None and world_size < 1) or not 0 <= (rank or 0) < (world_size or (rank or 0) + 1):
            raise InvalidArgumentError(f"rank must be one of world_size ranks, it is {rank} of {world_size}")
        self._tokenizer = tokenizer
        self._length = measure_length
        self._on_resume = on_resume
        self._max_buffer_size = max_buffer_size
        self._profile: Profile | None = None
        self._density: Bins | None = None
        self._bins_are_estimated = duration_bins is None and not isinstance(bucket_batch_size, Profile)
        self.bins: Bins | None = None
        with undisturbed(cuts):
            sample = first_cuts(cuts[0], num_cuts_for_bins_estimate)
            if bucket_batch_size is not None:
                self.bins = bins_for_sizes(
                    sample,
                    bucket_batch_size,
                    duration_bins,
                    num_buckets=num_buckets,
                    measure_length=self.measure_length,
                    strict_2d=strict_2d,
                    min_tps=min_tps,
                    max_tps=max_tps,
                )
                edges = self.bins.as_lists()
            else:
                self._check_own_options(strict_2d, min_tps, max_tps)
                self._density = density_limits(min_tps, max_tps)  # type: ignore[arg-type]
                edges = bins_for_limits(sample, limits, duration_bins, num_buckets=num_buckets)
        with warnings.catch_warnings():
            # An eagerly read CutSet is as good as a lazy one here.
            warnings.filterwarnings("ignore", message="You are using DynamicBucketingSampler with an eagerly read")
            super().__init__(
                *cuts,
                max_duration=limits["max_duration"],
                # Lhotse insists on a limit; replaced below.
                max_cuts=1 if bucket_batch_size is not None else limits["max_cuts"],
                constraint=constraint,
                num_buckets=num_buckets,
                shuffle=shuffle,
                drop_last=drop_last,
                consistent_ids=consistent_ids,
                duration_bins=edges,
                num_cuts_for_bins_estimate=num_cuts_for_bins_estimate,
                buffer_size=buffer_size,
                quadratic_duration=limits["quadratic_duration"],
                world_size=world_size,
                rank=rank,
                seed=seed,
                sync_buckets=sync_buckets,
                concurrent=concurrent,
                strict=strict,
                shuffle_buffer_size=shuffle_buffer_size,
            )
        self.max_cuts = limits["max_cuts"]
        self.num_buckets = len(edges) + (self.bins is None)
        self._init_epoch()
        if bucket_batch_size is not None and not self.is_auto:
            self.apply(bucket_batch_size)  # type: ignore[arg-type]

    def _check_own_options(self, strict_2d: bool, min_tps: Any, max_tps: Any) -> None:
        """Options that mean nothing to Lhotse's limits are refused rather than ignored."""
        if self._length is not None:
            raise InvalidArgumentError("measure_length must come with bucket_batch_size; without it, durations count")
        if not strict_2d:
            raise InvalidArgumentError("strict_2d=False must come with bucket_batch_size")
        for name, limit in (("min_tps", min_tps), ("max_tps", max_tps)):
            if limit is not None and isinstance(limit, Iterable):
                raise InvalidArgumentError(f"{name} must be one number without bucket_batch_size, it is {limit!r}")
        if self._tokenizer is not None and min_tps is None and max_tps is None:
            raise InvalidArgumentError("tokenizer must come with bucket_batch_size, min_tps or max_tps")

    # Sizes

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

        The change is recorded, so that a resumed run makes it at the same batch. Where worker processes iterate copies
        of the sampler (iterable-style), they take the sizes over with their next ``iter()``: change them between
        epochs, before the loader is iterated again.

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
            check_profile_bins(profile_or_sizes.bins, self.bins)
            sizes = list(profile_or_sizes.bucket_batch_size)
            profile: Profile | None = profile_or_sizes
        else:
            sizes = check_sizes(profile_or_sizes, len(self.bins))
            profile = None
        at_batch = None if at_batch is None else whole_number("at_batch", at_batch, at_least=None)
        drawn = self._drawn if self._loaded is None else max(self._loaded.drawn.values())
        if at_batch is not None and (at_batch < drawn or self._loaded is not None or not self._schedule):
            raise InvalidArgumentError(
                f"at_batch must be a batch of the epoch being sampled that isn't drawn yet, {drawn} or above, it is "
                f"{at_batch}" + ("" if self._schedule and self._loaded is None else ", and no epoch has begun")
            )
        self._sizes = sizes
        self._profile = profile
        self._num_changes += 1
        self._workers.tell(self.epoch, sizes)
        if self._schedule and self._loaded is None:
            start = drawn if at_batch is None else at_batch
            self._schedule = [entry for entry in self._schedule if entry[0] < start] + [(start, sizes)]

    # What calibration asks for

    @property
    def functions(self) -> dict[str, Any]:
        """The user's functions that decide what a batch holds: the measures, and what was given to ``map()``."""
        own = {"tokenizer": self._tokenizer, "measure_length": self._length}
        return {**own, **{f"map {index}": fn for index, fn in enumerate(self._transforms)}}

    def measure_length(self, cut: Any) -> float:
        """The length of ``cut`` in the unit of the bins.

        :raises InvalidArgumentError: when it isn't a number of at least 0.
        """
        return checked_length(cut, cut.duration if self._length is None else self._length(cut))

    def measure_tokens(self, cut: Any) -> int | None:
        """The output tokens of ``cut``, see :func:`lhotse_oomfit.bins.output_length`."""
        return output_length(cut, self._tokenizer)

    def sample_cuts(self, num: int) -> list[Cut]:
        """The first ``num`` cuts that pass the filter and belong to a bucket (of the first source, when several).

        The position in the epoch stays as it is.

        :raises EmptySourceError: when there is none, or none among the first 100,000.
        :raises InvalidArgumentError: for a source that can be read only once, which would lose these cuts.
        """
        for source in self.cuts:
            refuse_read_once(source, "calibration")
        selection = self._selection()
        found: list[Cut] = []
        in_vain = 0  # in a row: the source needn't end
        with undisturbed(self.cuts):
            for item in zip(*self.cuts, strict=False):
                if all(self._filter_fn(cut) for cut in item) and not isinstance(selection.classify(item[0]), str):
                    found.append(item[0])
                    in_vain = 0
                    if len(found) == num:
                        break
                else:
                    in_vain += 1
                    if in_vain == _MOST_IN_VAIN:
                        break
        if not found:
            among = f"there is none among the first {in_vain}" if in_vain == _MOST_IN_VAIN else "there is none"
            raise EmptySourceError(
                f"the sampler must have at least one cut that passes its filter and belongs to a bucket, {among}; "
                f"look at the source, the filter, duration_bins and max_tps"
            )
        return found

    def _selection(self) -> Selection:
        passes_all = type(self._filter_fn).__name__ == "_filter_nothing"
        return Selection(
            edges=self.duration_bins if self.bins is None else self.bins.edges,
            bins=self.bins,
            density=self._density,
            constraint=self.constraint,
            measure=self._length,
            tokenizer=self._tokenizer,
            keep=None if passes_all else self._filter_fn,
            quadratic_duration=self.quadratic_duration,
            with_lengths=self.bins is None and self.constraint is None,
            several=len(self.cuts) > 1,
        )

    # What was skipped

    @property
    def num_skipped(self) -> dict[str, int]:
        """How many cuts of this epoch belonged to no bucket so far, by reason. ``filter()`` isn't counted here."""
        if self._buffer is None:
            return {}
        return {reason: num for reason, num in sorted(self._buffer.rejected.items()) if reason != FILTERED}

    def _report_skipped(self, *, so_far: bool = False) -> None:
        worker = torch.utils.data.get_worker_info()
        if process_rank() > 0 or self.rank > 0 or (worker is not None and worker.id > 0):
            return
        skipped = self.num_skipped
        if skipped:
            logger.warning(
                "epoch %d: %d cuts were skipped%s%s: %s",
                self.epoch,
                sum(skipped.values()),
                " so far" if so_far else "",
                "" if worker is None else f" in worker {worker.id} of {worker.num_workers}",
                _with_remedies(skipped),
            )

    def _report_nothing(self, num_read: int) -> None:
        if self.rank == 0 and self._buffer is not None:
            logger.warning(
                "epoch %d: none of the %d cuts read so far belongs to a bucket: %s",
                self.epoch,
                num_read,
                _with_remedies(self._buffer.rejected),
            )

    def get_report(self) -> str:
        """Lhotse's report, and how many cuts of this epoch were skipped, by reason, those of ``drop_last`` included."""
        report: str = super().get_report()
        parts = [f"{num} {reason}" for reason, num in self.num_skipped.items()]
        if self._buffer is not None and self._buffer.num_dropped:
            parts.append(f"{self._buffer.num_dropped} left over (drop_last=False keeps them)")
        skipped = ", ".join(parts)
        return f"{report}\n|  epoch {self.epoch:d} skipped | {skipped} |" if skipped else report


def _with_remedies(rejected: Mapping[str, int]) -> str:
    return "; ".join(f"{num} {reason} ({_REMEDIES[reason]})" for reason, num in sorted(rejected.items()))
