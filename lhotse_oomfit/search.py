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

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lhotse_oomfit.ceilings import Ceilings, middle
from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.peak_model import BucketShape, PeakModel, chord_at, lighter_than, monotone
from lhotse_oomfit.probe_order import anchors, corners, heaviest_first, is_2d, spread_out

__all__ = ["BucketShape", "Probe", "Search"]

logger = logging.getLogger(__name__)

_KNEE = 0.04
"""Share of the room below which the peak isn't affine yet (measured on Conformer CTC and AED models)."""
_KNEE_GRADIENTS = 3.0
"""Below this many times the gradients' bytes, what a step uses may be gradients rather than activations."""
_ANCHOR_SHARE, _ANCHOR_SHARE_HEAVIEST, _ANCHOR_SHARE_GRADIENTS = 0.12, 0.3, 0.8
"""Share of the room that an anchor aims at, that the heaviest bucket's does, and the most where gradients are large:
above the knee, far from full. Aiming is by a bound from above, so that even the last is safe."""
_CONSTANT_GRADIENTS = 0.25
"""Until two steps near the budget were seen, the constant part is taken to be at most this share of the gradients: what
looks constant in small batches is mostly the end of the backward pass, and would be missed where it matters."""
_FIRST_SIZE = 2
"""Size of the very first probe: a batch of one fails in batch norms over pooled features for want of variance."""
_MAX_GROWTH = 5
"""No probe is more than this many times larger, in total input length, than the largest batch that ran."""
_UNCERTAINTY_START, _UNCERTAINTY_MIN, _UNCERTAINTY_MAX = 0.01, 0.003, 0.015
"""Relative error granted to a prediction: at first, at the least and at the most; in between, what was observed."""
_INTERPOLATED = 0.03
"""A step that ran, but exceeded the budget by at most this share, vouches for the slightly smaller size that its peak
promises: within so little of a measured point the peak is affine to a fraction of a percent."""
_CHORD_TRUST = 0.8
"""While few buckets are measured, a prediction below this share of the chord between its neighbours is not believed."""
_SPREAD, _SPREAD_FACTOR = 0.03, 1.25
"""Relative deviation of a bucket from the polynomial that a cautious search reckons with: at least, and as a multiple
of the largest one seen."""
_UNKNOWN_OVERHEAD = 0.88
"""Share of the memory that a cautious search fills before it knows what the allocator holds beyond the peak."""
_PREDICTED_AT_WORST = 1.04
"""What a predicted size may take of the room at most, by any model that agrees with what was measured."""
_PREDICTED_MARGIN, _PREDICTED_FACTOR = 0.01, 1.25
"""Relative margin of a predicted size: at least, and as a multiple of the largest deviation among the measured ones."""
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
    """What is known of one bucket: the largest size that fits, the smallest that doesn't, every peak seen."""

    fits: int = 0
    fails: int
    has_failed: bool = False  # without telling its peak
    num_ooms: int = 0
    peaks: dict[int, int] = field(default_factory=dict)


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
        self._full_room = float(budget_bytes - resident_bytes)
        self.headroom_bytes = headroom_bytes
        self.cautious, self.mode = cautious, mode
        self._is_2d = is_2d(shapes)
        # How far a step may go over the budget at no more cost than that of a wasted one.
        self._tolerable = 1.0 + min(0.8 * headroom_bytes / budget_bytes, 0.25)
        self._has_headroom = headroom_bytes > 2 * _INTERPOLATED * budget_bytes
        self.max_size = max_size
        self.tolerance = tolerance
        self.num_probes = 0
        self._buckets = [_Bucket(fails=max_size + 1) for _ in shapes]
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
        self._overhead, self._is_overhead_known = 1.0, False  # charged over peak bytes, as seen near the budget
        self._error = _UNCERTAINTY_START  # relative error of the latest predictions, older ones fading
        self._model = PeakModel(shapes)
        self._predicted: dict[int, int] = {}  # by the present model

    def ask(self) -> Probe | None:
        """The next step to run, or None when every bucket is settled."""
        if self._model.slopes is None:
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
        if self._model.num_near_full:
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
        is_near_full = peak_bytes - self.resident_bytes > self._near_full_bytes()
        # Before the first of these, errors say how far the anchors were off, not how far the model is now.
        if is_near_full and self._model.num_near_full and self._own_slope(probe.bucket) is None:
            error = abs(self.predict_bytes(probe.bucket, probe.size) / peak_bytes - 1.0)
            self._error = max(self._error / 2, min(error, _UNCERTAINTY_MAX))
        if charged_bytes > self.budget_bytes // 2:
            self._overhead = max(self._overhead, charged_bytes / peak_bytes)
            self._is_overhead_known = True
        bucket.peaks[probe.size] = peak_bytes
        self._fit()
        if charged_bytes <= self.budget_bytes:
            bucket.fits = max(bucket.fits, probe.size)
            return
        bucket.fails = min(bucket.fails, probe.size)
        is_affine = self._knee_bytes() < self._full_room / 2
        if is_affine and self._model.num_near_full > 1 and charged_bytes <= self.budget_bytes * (1.0 + _INTERPOLATED):
            slope = max(peak_bytes - self.resident_bytes - self._model.constant_bytes, 1.0) / probe.size
            bucket.fits = max(bucket.fits, min(math.floor(self._room(_UNCERTAINTY_MIN) / slope), probe.size - 1))

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
        return self.resident_bytes + self._model.constant_bytes + self._slope(bucket) * size

    def is_settled(self, bucket: int) -> bool:
        """Whether `bucket` needs no further probe, as far as is known now."""
        if self._model.slopes is None:
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
        bucket = self._buckets[k]
        if bucket.has_failed:
            return None
        largest_seen = max(bucket.peaks, default=0)
        if largest_seen and bucket.peaks[largest_seen] - self.resident_bytes >= self._knee_bytes():
            return None
        room = self._full_room
        share = _ANCHOR_SHARE_HEAVIEST if k == self._heaviest_first[0] else _ANCHOR_SHARE
        target = max(share * room, min(1.5 * _KNEE_GRADIENTS * self.gradient_bytes, _ANCHOR_SHARE_GRADIENTS * room))
        size = max(1, round(target / self._slope_at_most(k)))
        if largest_seen:  # below the knee all the same: the bound was loose, so be bolder
            size = max(size, 2 * largest_seen)
        size = min(size, math.floor(0.95 * room / self._slope_at_most(k)), bucket.fails - 1, self.max_size)
        if self.cautious:
            size = self._made_safe(k, size)
        return size if size > largest_seen else None

    def _knee_bytes(self) -> float:
        """What a step must use beyond the resident bytes for its peak to say something about the batch size."""
        room = self._full_room
        return max(_KNEE * room, min(_KNEE_GRADIENTS * self.gradient_bytes, 0.75 * _ANCHOR_SHARE_GRADIENTS * room))

    def _near_full_bytes(self) -> float:
        """From here on a step's peak is surely one of activations, and close enough to the budget to rely on."""
        room = self._full_room
        return max(0.5 * room, min(_KNEE_GRADIENTS * self.gradient_bytes, 0.9 * room))

    def _slope_at_most(self, k: int) -> float:
        """A bound from above on the bytes per example of bucket `k`: all that a step used, its constant part
        included, over its size; from another bucket, scaled by the longer of its lengths' ratios.

        Linear scaling overestimates lighter buckets, whose quadratic terms shrink faster; a fit on the few first
        points could have attributed everything to T² and would underestimate them.
        """
        bounds = []
        for j, bucket in enumerate(self._buckets):
            if not bucket.peaks:
                continue
            slope = self._largest_slope(j)
            if j == k:
                return slope
            ours, theirs = self.shapes[k], self.shapes[j]
            ratio = ours.input_len / theirs.input_len if theirs.input_len else 1.0
            if theirs.output_len:
                ratio = max(ratio, ours.output_len / theirs.output_len)
            bounds.append(slope * (ratio if ratio < 1 else ratio * ratio))
        return min(bounds)

    def _largest_equivalent(self, k: int) -> float:
        """The size of bucket `k` with as much total input as the largest batch seen in any bucket."""
        length = max(self.shapes[k].input_len, 1e-9)
        seen = (max(b.peaks) * self.shapes[j].input_len / length for j, b in enumerate(self._buckets) if b.peaks)
        return max(seen, default=1.0)

    def _verify_size(self, k: int) -> int | None:
        """The size at which bucket `k` should be verified next; None if it is settled."""
        bucket = self._buckets[k]
        if bucket.fails - bucket.fits <= 1:
            return None
        passes, fails = self._ceilings.between(k, bucket.fits, bucket.fails)
        slope, chord = self._slope(k), self._chord(k)
        if self.cautious and bucket.peaks:  # no anchors: the model may know no better than what this bucket showed
            slope = min(slope, self._largest_slope(k))
        if slope < _CHORD_TRUST * chord:
            slope = chord / self._tolerable
        promised = self._room(self._uncertainty(k)) / slope
        promised = min(promised, float(_MAX_GROWTH * max(self._largest_equivalent(k), 1.0)), float(self.max_size))
        if bucket.fits and not self._model.num_near_full and self._used(k) < _KNEE_GRADIENTS * self.gradient_bytes:
            # Gradients hide what the examples take. What is safe for sure would creep up on the size, or stop short.
            promised = max(promised, self._bold_growth(k) * bucket.fits)
        holds = promised
        if promised >= fails or (bucket.num_ooms and self._own_slope(k) is None):
            # The model is off here: trust it for a direction only.
            between = middle(passes, fails)
            if passes > bucket.fits and between - passes <= self.tolerance * passes:
                between = passes
            promised = min(promised, between)
        if self.cautious:
            promised = self._made_safe(k, math.floor(promised))
        size = min(max(math.floor(promised), 1), fails - 1)
        if bucket.fits and size - bucket.fits <= self.tolerance * bucket.fits:
            return fails if self._is_only_ruled_out(k, fails, holds) else None
        return size

    def _is_only_ruled_out(self, k: int, fails: int, promised: float) -> bool:
        """Whether memory promises `fails` examples, and only other buckets' ceilings speak against running them."""
        bucket = self._buckets[k]
        if fails >= min(bucket.fails, promised) or bucket.fails - bucket.fits <= 2 * self.tolerance * bucket.fits + 1:
            return False
        return not self.cautious or self._made_safe(k, fails) == fails

    # The model

    def _room(self, uncertainty: float = 0.0) -> float:
        """Bytes left for examples: the budget, less what is resident, constant, overhead or uncertain."""
        usable = self.budget_bytes / self._overhead / (1.0 + uncertainty)
        return max(usable - self.resident_bytes - self._model.constant_bytes, 1.0)

    def _largest_slope(self, k: int) -> float:
        """What each further example of bucket `k` takes at most: the peak over the size never rises, being the largest
        of several affine functions with constants that aren't negative. Infinite while nothing ran."""
        peaks = self._buckets[k].peaks
        return min((max(peak - self.resident_bytes, 1) / size for size, peak in peaks.items()), default=math.inf)

    def _made_safe(self, k: int, size: int) -> int:
        """`size`, or the largest that stays within the budget and the headroom whatever the model says."""
        limit = (self.budget_bytes + self.headroom_bytes) / self._overhead
        room = (limit if self._is_overhead_known else _UNKNOWN_OVERHEAD * limit) - self.resident_bytes
        own = math.floor(room / self._largest_slope(k) / (1.0 + _UNCERTAINTY_MIN))
        if own >= size or self._own_slope(k) is not None:
            return min(own, size)
        spread = max(_SPREAD, _SPREAD_FACTOR * self._deviation())
        return min(max(own, math.floor(self._model.bounded_size(k, room=room, spread=spread))), size)

    def _predicted_size(self, k: int) -> int:
        """The size of a bucket that isn't run: by the model, with a margin, and by all models that may be true."""
        if self._model.slopes is None:
            return 0
        if k not in self._predicted:
            deviation = self._deviation()
            room = self.budget_bytes / self._overhead - self.resident_bytes
            promised = self._room(max(_PREDICTED_MARGIN, _PREDICTED_FACTOR * deviation)) / self._slope(k)
            # The fit may have bent to a measured bucket that deviates, where few tell the monomials apart.
            bounds = (
                self._model.bounded_size(k, room=room, spread=deviation),
                self._model.bounded_size(k, room=_PREDICTED_AT_WORST * room, spread=_SPREAD),
            )
            self._predicted[k] = math.floor(min(promised, *bounds, self.max_size))
        return min(self._predicted[k], self._buckets[k].fails - 1)

    def _deviation(self) -> float:
        """The largest relative deviation from the model among buckets that were measured near full."""
        slopes = self._model.slopes
        own = {k: slope for k in range(len(self.shapes)) if (slope := self._own_slope(k)) is not None}
        return 0.0 if slopes is None else max((abs(slopes[k] / own[k] - 1.0) for k in own), default=0.0)

    def _is_model_good(self) -> bool:
        rest = self._verify_order[self._num_verified :]
        return self._deviation() <= _FAST_DEVIATION and all(self._predicted_size(k) > 0 for k in rest)

    def _uncertainty(self, k: int) -> float:
        """Relative error to grant to the prediction for bucket `k`."""
        if self._own_slope(k) is not None or (self._has_headroom and self._model.num_near_full):
            return _UNCERTAINTY_MIN
        return min(max(self._error, _UNCERTAINTY_MIN), _UNCERTAINTY_MAX)

    def _chord(self, k: int) -> float:
        """A bound on the bytes per example of bucket `k` while few buckets are measured; 0 later, and in 2D.

        With so few points the fit may take linear growth for quadratic, and so lie far too low in the middle.
        """
        if self._used(k) > 0.25 * self._full_room or self._is_2d:
            return 0.0
        own = {j: slope for j in range(len(self.shapes)) if (slope := self._own_slope(j)) is not None}
        if len(own) > 3:
            return 0.0
        return chord_at(self.shapes[k].input_len, [(self.shapes[j].input_len, slope) for j, slope in own.items()])

    def _bold_growth(self, k: int) -> float:
        """How much larger the next size may be where gradients hide what examples take: more while little showed."""
        sizes = sorted(self._buckets[k].peaks)[-2:]
        grown = self._buckets[k].peaks[sizes[-1]] - self._buckets[k].peaks[sizes[0]]
        return 4.0 if grown < 0.05 * self._full_room else 1.5

    def _used(self, k: int) -> float:
        """What the largest step of bucket `k` used beyond the resident and constant bytes; 0 if none ran."""
        peaks = self._buckets[k].peaks
        return peaks[max(peaks)] - self.resident_bytes - self._model.constant_bytes if peaks else 0.0

    def _own_slope(self, k: int) -> float | None:
        """Bytes per example by the bucket's own largest measurement, if that was near full."""
        used = self._used(k)
        return max(used / max(self._buckets[k].peaks), 1.0) if used > self._near_full_bytes() else None

    def _slope(self, k: int) -> float:
        """Bytes per example of bucket `k`: its own if measured, else by the model."""
        own = self._own_slope(k)
        if own is not None:
            return own
        return max(float(self._model.slopes[k]), 1.0) if self._model.slopes is not None else 1.0

    def _fit(self) -> None:
        self._predicted.clear()
        self._model.fit(
            [(k, size, peak) for k, bucket in enumerate(self._buckets) for size, peak in bucket.peaks.items()],
            resident_bytes=self.resident_bytes,
            knee_bytes=self._knee_bytes(),
            near_full_bytes=self._near_full_bytes(),
            most_constant=_CONSTANT_GRADIENTS * self.gradient_bytes,
        )
