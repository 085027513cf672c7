"""What the sampler's constructor accepts, and what it says to the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from operator import index
from typing import Any

from lhotse import CutSet
from lhotse.dataset.sampling.base import TimeConstraint
from lhotse.dataset.sampling.dynamic_bucketing import estimate_duration_buckets

from lhotse_oomfit.bins import Bins, checked_length, estimate_bins
from lhotse_oomfit.errors import EmptySourceError, InvalidArgumentError, InvalidBinsError, ProfileMismatchError
from lhotse_oomfit.profile import Profile

__all__ = [
    "bins_for_limits",
    "bins_for_sizes",
    "check_limits",
    "check_profile_bins",
    "check_seed",
    "check_sizes",
    "first_cuts",
    "is_auto",
    "refuse_read_once",
    "whole_number",
]

Limits = Mapping[str, Any]  # max_duration, max_cuts, constraint, quadratic_duration


def is_auto(bucket_batch_size: Any) -> bool:
    """Whether sizes are to be measured."""
    return isinstance(bucket_batch_size, str) and bucket_batch_size == "auto"


def _index(value: Any) -> int | None:
    """The whole number that ``value`` is, of whatever type (numpy's and torch's too); ``None`` if it is none."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def whole_number(name: str, value: Any, *, at_least: int | None = 1) -> int:
    """``value`` as an ``int``.

    :raises InvalidArgumentError: when it is a text, a truth value, a fraction, or below ``at_least``.
    """
    number = _index(value)
    if number is None or (at_least is not None and number < at_least):
        bound = "" if at_least is None else f" of at least {at_least}"
        raise InvalidArgumentError(f"{name} must be a whole number{bound}, it is {value!r}")
    return number


def check_seed(seed: Any) -> Any:
    """A whole number as an ``int``, or one of Lhotse's two words."""
    if isinstance(seed, str) and seed in ("randomized", "trng"):
        return seed
    number = _index(seed)
    if number is None:
        raise InvalidArgumentError(f"seed must be a whole number, 'randomized' or 'trng', it is {seed!r}")
    return number


def _number_above_0(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not number > 0.0:
        raise InvalidArgumentError(f"{name} must be a number above 0, it is {value!r}")
    return number


def check_sizes(sizes: Any, num_buckets: int | None) -> list[int]:
    """One size of at least 1 per bucket, from any sequence of whole numbers; ``None`` for any number of buckets."""
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable) or getattr(sizes, "ndim", 1) == 0:
        raise InvalidArgumentError(
            f"bucket_batch_size must be 'auto', one size per bucket, or a profile, it is {sizes!r}"
        )
    values: list[int] = []
    for size in sizes:
        number = _index(size)
        if number is None or number < 1:
            raise InvalidArgumentError(f"bucket_batch_size must hold whole numbers of at least 1, it holds {size!r}")
        values.append(number)
    if not values:
        raise InvalidArgumentError("bucket_batch_size must hold one size per bucket, it is empty")
    if num_buckets is not None and len(values) != num_buckets:
        raise InvalidArgumentError(
            f"bucket_batch_size must hold one size per bucket, it holds {len(values)} for {num_buckets} duration_bins"
        )
    return values


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


def check_limits(bucket_batch_size: Any, limits: Limits) -> dict[str, Any]:
    """One way to limit the size of batches, no more and no less; the limits as plain numbers."""
    given = [name for name, value in limits.items() if value is not None]
    if bucket_batch_size is not None:
        if given:
            raise InvalidArgumentError(
                f"bucket_batch_size must be the only limit on batches, {' and '.join(given)} came with it; leave one "
                f"of them out"
            )
        return dict(limits)
    if limits["constraint"] is not None and (limits["max_duration"] is not None or limits["max_cuts"] is not None):
        raise InvalidArgumentError("constraint must not come with max_duration or max_cuts; leave one of them out")
    if limits["constraint"] is None and limits["max_duration"] is None and limits["max_cuts"] is None:
        raise InvalidArgumentError(
            "the size of batches must be limited: pass bucket_batch_size ('auto', one size per bucket, or a profile), "
            "max_duration, max_cuts, or constraint"
        )
    checked = dict(limits)
    for name in ("max_duration", "quadratic_duration"):
        if limits[name] is not None:
            checked[name] = _number_above_0(name, limits[name])
    if limits["max_cuts"] is not None:
        checked["max_cuts"] = whole_number("max_cuts", limits["max_cuts"])
    return checked


def refuse_read_once(source: Any, purpose: str) -> None:
    """Reading ahead of an iterator would take its cuts away from training.

    :raises InvalidArgumentError: for an iterator, and for a CutSet of one.
    """
    innermost = source
    while isinstance(innermost, CutSet):
        innermost = innermost.data
    if isinstance(innermost, Iterator) and iter(innermost) is innermost:
        raise InvalidArgumentError(
            f"the source of cuts must be one that can be iterated again, since {purpose} reads ahead, it is "
            f"{type(innermost).__name__!r}, an iterator, whose cuts would be lost to training; pass a CutSet, or an "
            f"object whose __iter__ starts anew"
        )


def first_cuts(source: Any, num: int) -> Iterator[Any]:
    """The first ``num`` cuts, to estimate bins from; ``source`` is left alone until the first is asked for."""
    refuse_read_once(source, "the estimation of duration_bins")
    yield from islice(source, num)


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
        num = len(bucket_batch_size) if isinstance(bucket_batch_size, list) else num_buckets or 0
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
        if not isinstance(duration_bins, (str, bytes)) and isinstance(duration_bins, Sized) and len(duration_bins) == 0:
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
    for cut in sample:
        length = constraint.measure_length(cut)
        if limits["constraint"] is None or isinstance(length, (int, float)):  # a custom one may measure several numbers
            checked_length(cut, length, finite=True)
    return [float(edge) for edge in estimate_duration_buckets(sample, num_buckets, constraint)]
