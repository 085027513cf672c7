"""What the sampler's constructor accepts, and what it says to the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from lhotse.dataset.sampling.base import TimeConstraint
from lhotse.dataset.sampling.dynamic_bucketing import estimate_duration_buckets

from lhotse_oomfit.bins import Bins, estimate_bins
from lhotse_oomfit.errors import EmptySourceError, InvalidArgumentError, InvalidBinsError, ProfileMismatchError
from lhotse_oomfit.profile import Profile

__all__ = ["bins_for_limits", "bins_for_sizes", "check_limits", "check_profile_bins", "check_sizes", "is_auto"]

Limits = Mapping[str, Any]  # max_duration, max_cuts, constraint, quadratic_duration


def is_auto(bucket_batch_size: Any) -> bool:
    """Whether sizes are to be measured."""
    return isinstance(bucket_batch_size, str) and bucket_batch_size == "auto"


def check_sizes(sizes: Any, num_buckets: int) -> list[int]:
    """One size of at least 1 per bucket, from any sequence of whole numbers."""
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


def check_profile_bins(measured: Bins, now: Bins) -> None:
    """The profile's bins must hold the same examples as the sampler's."""
    if measured.edges != now.edges:
        raise ProfileMismatchError(
            f"the profile was measured for the bins {measured.as_lists()}, this sampler has {now.as_lists()}; "
            f"recalibrate, or use the profile's bins"
        )
    for k in range(len(now)):
        if measured.max_output_len(k) != now.max_output_len(k):
            raise ProfileMismatchError(
                f"the profile was measured with {_at_most(measured, k)} in bucket {k}, this sampler admits "
                f"{_at_most(now, k)}; recalibrate, or use the profile's max_tps"
            )


def _at_most(bins: Bins, k: int) -> str:
    tokens = bins.max_output_len(k)
    return "any number of tokens" if tokens is None else f"at most {tokens} tokens"


def check_limits(bucket_batch_size: Any, limits: Limits) -> None:
    """One way to limit the size of batches, no more and no less."""
    given = [name for name, value in limits.items() if value is not None]
    if bucket_batch_size is not None:
        if given:
            raise InvalidArgumentError(
                f"bucket_batch_size must be the only limit on batches, {' and '.join(given)} came with it; leave one "
                f"of them out"
            )
        return
    if limits["constraint"] is not None and (limits["max_duration"] is not None or limits["max_cuts"] is not None):
        raise InvalidArgumentError("constraint must not come with max_duration or max_cuts; leave one of them out")
    if limits["constraint"] is None and limits["max_duration"] is None and limits["max_cuts"] is None:
        raise InvalidArgumentError(
            "the size of batches must be limited: pass bucket_batch_size ('auto', one size per bucket, or a profile), "
            "max_duration, max_cuts, or constraint"
        )
    for name in ("max_duration", "max_cuts", "quadratic_duration"):
        if limits[name] is not None and not limits[name] > 0:
            raise InvalidArgumentError(f"{name} must be above 0, it is {limits[name]!r}")


def bins_for_sizes(
    cuts: Iterable[Any],
    bucket_batch_size: Any,
    duration_bins: Sequence[Any] | None,
    *,
    num_buckets: int | None,
    measure_length: Callable[[Any], float],
    strict_2d: bool,
    min_tps: Any,
    max_tps: Any,
) -> Bins:
    """The bins of a sampler with a size per bucket: given, the profile's, or estimated from ``cuts``."""
    if isinstance(bucket_batch_size, Profile) and duration_bins is None:
        if min_tps is None and max_tps is None:
            return bucket_batch_size.bins
        duration_bins = bucket_batch_size.bins.edges
    if duration_bins is None:
        num = num_buckets or 0
        if not isinstance(bucket_batch_size, str) and isinstance(bucket_batch_size, Iterable):
            num = len(list(bucket_batch_size))
        if num < 1:
            raise InvalidArgumentError(
                f"num_buckets must be at least 1 when there are no duration_bins, it is {num_buckets!r}"
            )
        duration_bins = estimate_bins(cuts, num, measure_length=measure_length).edges
    return Bins.from_edges(duration_bins, strict_2d=strict_2d, min_tps=min_tps, max_tps=max_tps)


def bins_for_limits(
    cuts: Iterable[Any], limits: Limits, duration_bins: Sequence[Any] | None, *, num_buckets: int | None
) -> list[Any]:
    """The bins of a sampler with Lhotse's limits: given, or estimated by Lhotse from ``cuts``."""
    constraint = limits["constraint"]
    if duration_bins is not None:
        if len(duration_bins) == 0:
            return []
        bins = Bins.from_edges(duration_bins)
        if bins.is_2d and constraint is None:
            raise InvalidBinsError("2D duration_bins must come with bucket_batch_size, or a constraint for them")
        return bins.as_lists()
    sample = list(cuts)
    if not sample:
        raise EmptySourceError("duration_bins must be estimated from at least one cut, the source has none")
    if num_buckets is None or not 2 <= num_buckets <= len(sample):
        raise InvalidArgumentError(
            f"num_buckets must be from 2 to the number of cuts seen, {len(sample)}, it is {num_buckets}; or pass "
            f"duration_bins"
        )
    if constraint is None:
        constraint = TimeConstraint(**{name: limit for name, limit in limits.items() if name != "constraint"})
    return [float(edge) for edge in estimate_duration_buckets(islice(sample, None), num_buckets, constraint)]
