"""Which sizes to try, in integers and bytes only: predict, then verify.

A caller asks for a :class:`Probe`, runs it, tells the peak, and repeats until nothing is left to ask::

    search = Search(shapes, budget_bytes=..., resident_bytes=...)
    while (probe := search.ask()) is not None:
        search.tell(probe, peak_bytes=run(probe.bucket, probe.size))
    search.sizes

Two regularities of training steps make it cheap. Within a bucket the peak is affine in the batch size, beyond a knee
at about 4% of the largest size. Across buckets the bytes per example are a polynomial with non-negative coefficients
in ``(1, T, U, T·U, T²)``, T the input and U the output length: convolutions and feed-forward layers grow with T or U,
the joiner of a transducer and cross-attention with T·U, self-attention with T². So a few cheap probes at about a
tenth of the expected size fit the polynomial (non-negative least squares in relative error: an unconstrained fit goes
negative and predicts absurd sizes), and one step per bucket at the predicted size verifies it.

Where a real out-of-memory error must not happen, a ``cautious`` search asks for no size that could exceed what the
memory holds: within a bucket the peak over the size never rises, which bounds larger sizes by smaller ones, and across
buckets no polynomial that agrees with what was measured may exceed it. In ``mode="fast"`` a fifth of the buckets are
measured, and the same bounds give the sizes of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lhotse_oomfit.ceilings import Ceilings, middle
from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.memory_estimates import MemoryEstimates
from lhotse_oomfit.peak_model import BucketShape, lighter_than, monotone
from lhotse_oomfit.probe_order import anchors, corners, heaviest_first, spread_out

__all__ = ["BucketShape", "Probe", "Search"]

_ANCHOR_SHARE, _ANCHOR_SHARE_HEAVIEST = 0.12, 0.3
"""Share of the room that an anchor aims at, and that the heaviest bucket's does: above the knee, far from full. Aiming
is by a bound from above, so that even the last is safe."""
_FIRST_SIZE = 2
"""Size of the very first probe: a batch of one fails in batch norms over pooled features for want of variance."""
_MAX_GROWTH = 5
"""No probe is more than this many times larger, in total input length, than the largest batch that ran."""
_CEILING_SHARE = 0.6
"""A step that fails where the model, once it knows steps near full, expects less of the budget, met another limit."""
_FAST_SHARE, _FAST_INSIDE = 0.2, 5
"""Share of the buckets that a fast search measures, and how many at least besides the corners."""
_FAST_DEVIATION = 0.05
"""Where measured buckets deviate from the model by more, a fast search measures as many again."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One training step to run: a batch of `size` worst-case examples of `bucket`."""

    bucket: int
    size: int
    purpose: Literal["anchor", "verify"]


@dataclass(kw_only=True)
class _Bucket:
    """Between which sizes the search goes on in one bucket: the largest that fits and the smallest that doesn't."""

    fits: int = 0
    fails: int
    has_failed: bool = False  # without telling its peak
    num_ooms: int = 0


class Search:
    """Finds the largest size of each bucket whose peak stays inside the budget.

    Sizes never grow with length: a bucket whose shape dominates another's never gets a larger size. No size is
    returned that is larger than one that ran, but predicted ones in fast mode.

    Observations of an earlier search, told in their order before the first :meth:`ask`, put this one where that was.

    :param shapes: the worst case of each bucket.
    :param budget_bytes: the peak that must not be exceeded.
    :param resident_bytes: what is allocated before a step begins; peaks include it.
    :param gradient_bytes: what the gradients of all parameters take. A tiny batch peaks at the end of the backward
        pass, when they all exist; its peak says little about the batch size.
    :param headroom_bytes: what a step may exceed the budget by without failing. With room enough, predictions aim at
        the budget itself and not below it.
    :param max_size: no size above this one.
    :param tolerance: a size is good enough if at most this share below what the measurements promise.
    :param cautious: ask only for sizes that surely stay within the budget and the headroom, beyond the two examples
        that the search begins with. It takes about two steps per bucket without headroom.
    :param mode: ``"verify"`` runs every bucket at its size; ``"fast"`` runs about a fifth of them, spread over all
        lengths, and predicts the others with a margin.
    :raises InvalidArgumentError: without buckets, if nothing is left of the budget, or for another mode.
    """

    def __init__(
        self,
        shapes: Sequence[BucketShape],
        *,
        budget_bytes: int,
        resident_bytes: int,
        gradient_bytes: int = 0,
        headroom_bytes: int = 0,
        max_size: int = 1 << 20,
        tolerance: float = 0.025,
        cautious: bool = False,
        mode: Literal["verify", "fast"] = "verify",
    ) -> None:
        if not shapes:
            raise InvalidArgumentError("shapes must name at least one bucket, got none")
        if max_size < 1:
            raise InvalidArgumentError(f"max_size must be at least 1, got {max_size}")
        if mode not in ("verify", "fast"):
            raise InvalidArgumentError(f"mode must be 'verify' or 'fast', it is {mode!r}")
        if budget_bytes <= resident_bytes:
            raise InvalidArgumentError(
                f"budget_bytes must exceed the {resident_bytes} bytes that are allocated before a step begins, "
                f"got {budget_bytes}"
            )
        self.shapes = tuple(shapes)
        self.budget_bytes = budget_bytes
        self.resident_bytes = resident_bytes
        self.gradient_bytes = gradient_bytes
        self.headroom_bytes = headroom_bytes
        self.cautious, self.mode = cautious, mode
        self.max_size = max_size
        self.tolerance = tolerance
        self.num_probes = 0
        self._buckets = [_Bucket(fails=max_size + 1) for _ in shapes]
        self._estimates = MemoryEstimates(
            shapes,
            budget_bytes=budget_bytes,
            resident_bytes=resident_bytes,
            gradient_bytes=gradient_bytes,
            headroom_bytes=headroom_bytes,
        )
        self._ceilings = Ceilings(shapes)
        self._heaviest_first = heaviest_first(shapes)
        self._lighter = lighter_than(shapes)
        self._anchors = anchors(shapes)
        # The anchors first: between verified extremes the model interpolates.
        self._verify_order = list(dict.fromkeys([*self._anchors, *self._heaviest_first]))
        self._num_verified = len(shapes)  # so many of that order are run
        if cautious or mode == "fast":
            self._verify_order = spread_out(shapes)
        if cautious:
            self._anchors = self._anchors[:1]
        if mode == "fast":
            few = math.ceil(_FAST_SHARE * len(shapes))
            self._num_verified = min(max(few, len(corners(shapes)) + _FAST_INSIDE), len(shapes))

    def ask(self) -> Probe | None:
        """The next step to run, or None when every bucket is settled."""
        if not self._estimates.is_fitted:
            return self._first_probe()
        for k in self._anchors:
            size = self._anchor_size(k)
            if size is not None:
                return Probe(bucket=k, size=size, purpose="anchor")
        for k in self._verify_order[: self._num_verified]:
            size = self._verify_size(k)
            if size is not None:
                return Probe(bucket=k, size=size, purpose="verify")
        return None

    def tell(
        self, probe: Probe, *, peak_bytes: int | None, charged_bytes: int | None = None, ceiling: bool = False
    ) -> None:
        """Record what a probe used.

        :param probe: what was run.
        :param peak_bytes: peak of allocated bytes, resident ones included; None if the step ran out of memory or
            hit another ceiling before its peak could be known.
        :param charged_bytes: the bytes to hold against the budget, where they are more than `peak_bytes`
            (an allocator reserves more than it hands out).
        :param ceiling: whether a step without a peak met another limit than memory; far from full, it is taken to.
        """
        if peak_bytes is None:
            self._enter_failure(probe, ceiling)
        else:
            self._enter(probe, peak_bytes, max(peak_bytes, charged_bytes or 0))
        while self._num_verified < len(self.shapes) and self.ask() is None and not self._is_model_good():
            more = math.ceil(_FAST_SHARE * len(self.shapes))
            self._num_verified = min(self._num_verified + more, len(self.shapes))

    def _enter_failure(self, probe: Probe, ceiling: bool) -> None:
        self.num_probes += 1
        bucket = self._buckets[probe.bucket]
        bucket.fails = min(bucket.fails, probe.size)
        bucket.has_failed = True
        if self._estimates.num_near_full:
            ceiling |= self.predict_bytes(probe.bucket, probe.size) < _CEILING_SHARE * self.budget_bytes
        if not ceiling:
            bucket.num_ooms += 1
        elif probe.size > 1:
            self._ceilings.failed(probe.bucket, probe.size)
            self._num_verified = len(self.shapes)  # the model can't predict what isn't memory

    def _enter(self, probe: Probe, peak_bytes: int, charged_bytes: int) -> None:
        self.num_probes += 1
        bucket = self._buckets[probe.bucket]
        self._ceilings.passed(probe.bucket, probe.size)
        self._estimates.enter(probe.bucket, probe.size, peak_bytes=peak_bytes, charged_bytes=charged_bytes)
        if charged_bytes <= self.budget_bytes:
            bucket.fits = max(bucket.fits, probe.size)
            return
        bucket.fails = min(bucket.fails, probe.size)
        vouched = self._estimates.interpolated_size(probe.bucket, probe.size, charged_bytes=charged_bytes)
        bucket.fits = max(bucket.fits, vouched)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The largest verified (or predicted) size of each bucket, made monotone; 0 where not even one example fits."""
        found = [self._predicted_size(k) if self.is_predicted(k) else b.fits for k, b in enumerate(self._buckets)]
        return monotone(found, self._lighter)

    def is_predicted(self, bucket: int) -> bool:
        """Whether the size of `bucket` is only predicted: no step of it runs, by what is known now."""
        return bucket in self._verify_order[self._num_verified :]

    def largest_fit(self, bucket: int) -> int:
        """The largest size of `bucket` that ran inside the budget so far; 0 while none did."""
        return self._buckets[bucket].fits

    def predict_bytes(self, bucket: int, size: int) -> float:
        """The peak that the model expects of a step with `size` examples of `bucket`."""
        return self._estimates.predict_bytes(bucket, size)

    def is_settled(self, bucket: int) -> bool:
        """Whether `bucket` needs no further probe, as far as is known now."""
        if not self._estimates.is_fitted:
            return self._buckets[bucket].fails == 1
        if self.is_predicted(bucket):
            return self.ask() is None
        return all(self._anchor_size(k) is None for k in self._anchors) and self._verify_size(bucket) is None

    def lower(self, bucket: int, size: int) -> None:
        """Take back a size: from now on `size` and all above it count as failed (a soak found an offender)."""
        state = self._buckets[bucket]
        state.fails = min(state.fails, size)
        state.fits = min(state.fits, size - 1)

    # What to try next

    def _first_probe(self) -> Probe | None:
        """The heaviest bucket at a tiny size; the next heaviest where not even one example of it gave a peak."""
        for k in self._heaviest_first:
            bucket = self._buckets[k]
            if bucket.fails > bucket.fits + 1:
                return Probe(bucket=k, size=min(_FIRST_SIZE, bucket.fails - 1), purpose="anchor")
        return None

    def _anchor_size(self, k: int) -> int | None:
        """The size at which bucket `k` should still be probed to anchor the fit; None if it needs no more."""
        bucket, peaks = self._buckets[k], self._estimates.peaks[k]
        if bucket.has_failed:
            return None
        largest_seen = max(peaks, default=0)
        if largest_seen and peaks[largest_seen] - self.resident_bytes >= self._estimates.knee_bytes():
            return None
        share = _ANCHOR_SHARE_HEAVIEST if k == self._heaviest_first[0] else _ANCHOR_SHARE
        slope = self._estimates.slope_at_most(k)
        size = max(1, round(self._estimates.anchor_bytes(share) / slope))
        if largest_seen:  # below the knee all the same: the bound was loose, so be bolder
            size = max(size, 2 * largest_seen)
        size = min(size, math.floor(0.95 * self._estimates.full_room / slope), bucket.fails - 1, self.max_size)
        if self.cautious:
            size = self._estimates.safe_size(k, at_most=size)
        return size if size > largest_seen else None

    def _largest_equivalent(self, k: int) -> float:
        """The size of bucket `k` with as much total input as the largest batch seen in any bucket."""
        length = max(self.shapes[k].input_len, 1e-9)
        seen = (
            max(peaks) * self.shapes[j].input_len / length for j, peaks in enumerate(self._estimates.peaks) if peaks
        )
        return max(seen, default=1.0)

    def _verify_size(self, k: int) -> int | None:
        """The size at which bucket `k` should be verified next; None if it is settled."""
        bucket = self._buckets[k]
        if bucket.fails - bucket.fits <= 1:
            return None
        passes, fails = self._ceilings.between(k, bucket.fits, bucket.fails)
        promised = self._estimates.promised_size(k, at_most_proportional=self.cautious)
        promised = min(promised, float(_MAX_GROWTH * max(self._largest_equivalent(k), 1.0)), float(self.max_size))
        if bucket.fits and not self._estimates.num_near_full and self._estimates.is_hidden_by_gradients(k):
            # Gradients hide what the examples take. What is safe for sure would creep up on the size, or stop short.
            promised = max(promised, self._bold_growth(k) * bucket.fits)
        holds = promised
        if promised >= fails or (bucket.num_ooms and not self._estimates.is_measured(k)):
            # The model is off here: trust it for a direction only.
            between = middle(passes, fails)
            if passes > bucket.fits and between - passes <= self.tolerance * passes:
                between = passes
            promised = min(promised, between)
        if self.cautious:
            promised = self._estimates.safe_size(k, at_most=math.floor(promised))
        size = min(max(math.floor(promised), 1), fails - 1)
        if bucket.fits and size - bucket.fits <= self.tolerance * bucket.fits:
            return fails if self._is_only_ruled_out(k, fails, holds) else None
        return size

    def _is_only_ruled_out(self, k: int, fails: int, promised: float) -> bool:
        """Whether memory promises `fails` examples, and only other buckets' ceilings speak against running them."""
        bucket = self._buckets[k]
        if fails >= min(bucket.fails, promised) or bucket.fails - bucket.fits <= 2 * self.tolerance * bucket.fits + 1:
            return False
        return not self.cautious or self._estimates.safe_size(k, at_most=fails) == fails

    def _bold_growth(self, k: int) -> float:
        """How much larger the next size may be where gradients hide what examples take: more while little showed."""
        peaks = self._estimates.peaks[k]
        sizes = sorted(peaks)[-2:]
        return 4.0 if peaks[sizes[-1]] - peaks[sizes[0]] < 0.05 * self._estimates.full_room else 1.5

    # In fast mode

    def _predicted_size(self, k: int) -> int:
        """The size of a bucket that isn't run."""
        return min(self._estimates.predicted_size(k), self._buckets[k].fails - 1)

    def _is_model_good(self) -> bool:
        rest = self._verify_order[self._num_verified :]
        return self._estimates.deviation() <= _FAST_DEVIATION and all(self._predicted_size(k) > 0 for k in rest)
