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
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.optimize import nnls

from lhotse_oomfit.errors import InvalidArgumentError

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
_FEW_BUCKETS = 10
"""Up to so many buckets the middle one isn't probed apart: correcting a prediction costs no more than preventing it."""
_ANCHOR_WEIGHT = 0.2
"""Weight in the fit of an observation below half the room, against one above it."""


@dataclass(frozen=True, kw_only=True)
class BucketShape:
    """The worst case of a bucket: input length (any unit, seconds as a rule) and output length (tokens, or 0)."""

    input_len: float
    output_len: int = 0

    def features(self) -> tuple[float, float, float, float, float]:
        """The monomials ``(1, T, U, T·U, T²)`` of the bytes per example."""
        t, u = self.input_len, float(self.output_len)
        return (1.0, t, u, t * u, t * t)

    def dominates(self, other: BucketShape) -> bool:
        """Whether every example that fits in `other` also fits in this shape."""
        return self.input_len >= other.input_len and self.output_len >= other.output_len


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
    num_blind_failures: int = 0
    peaks: dict[int, int] = field(default_factory=dict)


class Search:
    """Finds the largest size of each bucket whose peak stays inside the budget.

    Sizes never grow with length: a bucket whose shape dominates another's never gets a larger size. No size is
    returned that is larger than one that ran.

    :param shapes: the worst case of each bucket.
    :param budget_bytes: the peak that must not be exceeded.
    :param resident_bytes: what is allocated before a step begins; peaks include it.
    :param gradient_bytes: what the gradients of all parameters take. A tiny batch peaks at the end of the backward
        pass, when they all exist; its peak says little about the batch size.
    :param headroom_bytes: what a step may exceed the budget by without failing. With room enough, predictions aim at
        the budget itself and not below it.
    :param max_size: no size above this one.
    :param tolerance: a size is good enough if at most this share below what the measurements promise.
    :raises InvalidArgumentError: without buckets, or if nothing is left of the budget.
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
    ) -> None:
        if not shapes:
            raise InvalidArgumentError("shapes must name at least one bucket, got none")
        if max_size < 1:
            raise InvalidArgumentError(f"max_size must be at least 1, got {max_size}")
        if budget_bytes <= resident_bytes:
            raise InvalidArgumentError(
                f"budget_bytes must exceed the {resident_bytes} bytes that are allocated before a step begins, "
                f"got {budget_bytes}"
            )
        self.shapes = tuple(shapes)
        self.budget_bytes = budget_bytes
        self.resident_bytes = resident_bytes
        self.gradient_bytes = gradient_bytes
        self._is_2d = len({shape.input_len for shape in shapes}) < len(shapes)
        # How far a step may go over the budget at no more cost than that of a wasted one.
        self._tolerable = 1.0 + min(0.8 * headroom_bytes / budget_bytes, 0.25)
        self._has_headroom = headroom_bytes > 2 * _INTERPOLATED * budget_bytes
        self.max_size = max_size
        self.tolerance = tolerance
        self.num_probes = 0
        self._buckets = [_Bucket(fails=max_size + 1) for _ in shapes]
        self._features = np.array([shape.features() for shape in shapes])
        self._heaviest_first = sorted(range(len(shapes)), key=lambda k: (-self._weight(k), k))
        self._anchors = self._choose_anchors()
        # The anchors first: between verified extremes the model interpolates.
        self._verify_order = list(dict.fromkeys([*self._anchors, *self._heaviest_first]))
        self._overhead = 1.0  # charged over peak bytes, as seen near the budget
        self._error = _UNCERTAINTY_START  # relative error of the latest predictions, older ones fading
        self._num_near_full = 0  # observations that used _near_full_bytes() or more
        self._constant_bytes = 0.0
        self._slopes: np.ndarray | None = None

    @property
    def first_probe(self) -> Probe:
        """The probe to begin with: the heaviest bucket at a tiny size."""
        return Probe(bucket=self._heaviest_first[0], size=min(_FIRST_SIZE, self.max_size), purpose="anchor")

    def ask(self) -> Probe | None:
        """The next step to run, or None when every bucket is settled."""
        if self._slopes is None:
            heaviest = self._buckets[self._heaviest_first[0]]
            if heaviest.fails == heaviest.fits + 1:
                # Not even one example of the heaviest bucket gave a peak: learn from the next heaviest.
                return self._first_of_the_others()
            first = self.first_probe
            return Probe(bucket=first.bucket, size=min(first.size, heaviest.fails - 1), purpose="anchor")
        for k in self._anchors:
            size = self._anchor_size(k)
            if size is not None:
                return Probe(bucket=k, size=size, purpose="anchor")
        for k in self._verify_order:
            size = self._verify_size(k)
            if size is not None:
                return Probe(bucket=k, size=size, purpose="verify")
        return None

    def tell(self, probe: Probe, *, peak_bytes: int | None, charged_bytes: int | None = None) -> None:
        """Record what a probe used.

        :param probe: what was run.
        :param peak_bytes: peak of allocated bytes, resident ones included; None if the step ran out of memory or
            hit another ceiling before its peak could be known.
        :param charged_bytes: the bytes to hold against the budget, where they are more than `peak_bytes`
            (an allocator reserves more than it hands out).
        """
        self.num_probes += 1
        bucket = self._buckets[probe.bucket]
        if peak_bytes is None:
            bucket.fails = min(bucket.fails, probe.size)
            bucket.num_blind_failures += 1
            return
        charged_bytes = max(peak_bytes, charged_bytes or 0)
        if probe.purpose == "verify" and self._slopes is not None and self._own_slope(probe.bucket) is None:
            error = abs(self.predict_bytes(probe.bucket, probe.size) / peak_bytes - 1.0)
            if self._num_near_full:  # before, it says how far the anchors were off, not how far the model is now
                self._error = max(self._error / 2, min(error, _UNCERTAINTY_MAX))
        if charged_bytes > self.budget_bytes // 2:
            self._overhead = max(self._overhead, charged_bytes / peak_bytes)
        bucket.peaks[probe.size] = peak_bytes
        self._fit()
        if charged_bytes <= self.budget_bytes:
            bucket.fits = max(bucket.fits, probe.size)
            return
        bucket.fails = min(bucket.fails, probe.size)
        is_affine = self._knee_bytes() < (self.budget_bytes - self.resident_bytes) / 2
        if is_affine and self._num_near_full > 1 and charged_bytes <= self.budget_bytes * (1.0 + _INTERPOLATED):
            slope = max(peak_bytes - self.resident_bytes - self._constant_bytes, 1.0) / probe.size
            bucket.fits = max(bucket.fits, min(math.floor(self._room(_UNCERTAINTY_MIN) / slope), probe.size - 1))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The largest verified size of each bucket, made monotone; 0 where not even one example fits."""
        found = [bucket.fits for bucket in self._buckets]
        lighter = [
            [found[j] for j, other in enumerate(self.shapes) if found[j] > 0 and shape.dominates(other)]
            for shape in self.shapes
        ]
        return tuple(min([size, *sizes]) for size, sizes in zip(found, lighter, strict=True))

    def largest_fit(self, bucket: int) -> int:
        """The largest size of `bucket` that ran inside the budget so far; 0 while none did."""
        return self._buckets[bucket].fits

    def predict_bytes(self, bucket: int, size: int) -> float:
        """The peak that the model expects of a step with `size` examples of `bucket`."""
        return self.resident_bytes + self._constant_bytes + self._slope(bucket) * size

    def is_settled(self, bucket: int) -> bool:
        """Whether `bucket` needs no further probe, as far as is known now."""
        if self._slopes is None:
            return self._buckets[bucket].fails == 1
        return all(self._anchor_size(k) is None for k in self._anchors) and self._verify_size(bucket) is None

    def lower(self, bucket: int, size: int) -> None:
        """Take back a size: from now on `size` and all above it count as failed (a soak found an offender)."""
        state = self._buckets[bucket]
        state.fails = min(state.fails, size)
        state.fits = min(state.fits, size - 1)

    # What to try next

    def _weight(self, k: int) -> float:
        t, u = self.shapes[k].input_len, self.shapes[k].output_len
        return (1.0 + t) * (1.0 + u / 1000.0)

    def _choose_anchors(self) -> list[int]:
        """The heaviest and lightest buckets, one in the middle, and in 2D the other two corners: enough to tell the
        five monomials apart, and few."""
        order = self._heaviest_first
        anchors = [order[0], order[-1]]
        if len(order) > _FEW_BUCKETS:
            middle = (self.shapes[order[0]].input_len + self.shapes[order[-1]].input_len) / 2
            anchors.append(min(order, key=lambda k: abs(self.shapes[k].input_len - middle)))
        if self._is_2d:
            longest = max(shape.input_len for shape in self.shapes)
            shortest = min(shape.input_len for shape in self.shapes)
            for length, pick in ((longest, min), (shortest, max)):
                row = [k for k in order if self.shapes[k].input_len == length]
                anchors.append(pick(row, key=lambda k: self.shapes[k].output_len))
        return list(dict.fromkeys(anchors))

    def _first_of_the_others(self) -> Probe | None:
        for k in self._heaviest_first:
            bucket = self._buckets[k]
            if bucket.fails > bucket.fits + 1:
                return Probe(bucket=k, size=min(_FIRST_SIZE, bucket.fails - 1), purpose="anchor")
        return None

    def _anchor_size(self, k: int) -> int | None:
        """The size at which bucket `k` should still be probed to anchor the fit; None if it needs no more."""
        bucket = self._buckets[k]
        if bucket.num_blind_failures:
            return None
        largest_seen = max(bucket.peaks, default=0)
        if largest_seen and bucket.peaks[largest_seen] - self.resident_bytes >= self._knee_bytes():
            return None
        room = float(self.budget_bytes - self.resident_bytes)
        share = _ANCHOR_SHARE_HEAVIEST if k == self._heaviest_first[0] else _ANCHOR_SHARE
        target = max(share * room, min(1.5 * _KNEE_GRADIENTS * self.gradient_bytes, _ANCHOR_SHARE_GRADIENTS * room))
        size = max(1, round(target / self._slope_at_most(k)))
        if largest_seen:  # below the knee all the same: the bound was loose, so be bolder
            size = max(size, 2 * largest_seen)
        size = min(size, math.floor(0.95 * room / self._slope_at_most(k)), bucket.fails - 1, self.max_size)
        return size if size > largest_seen else None

    def _knee_bytes(self) -> float:
        """What a step must use beyond the resident bytes for its peak to say something about the batch size."""
        room = float(self.budget_bytes - self.resident_bytes)
        return max(_KNEE * room, min(_KNEE_GRADIENTS * self.gradient_bytes, 0.75 * _ANCHOR_SHARE_GRADIENTS * room))

    def _near_full_bytes(self) -> float:
        """From here on a step's peak is surely one of activations, and close enough to the budget to rely on."""
        room = float(self.budget_bytes - self.resident_bytes)
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
            slope = min(max(peak - self.resident_bytes, 1) / size for size, peak in bucket.peaks.items())
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
        slope, chord = self._slope(k), self._chord(k)
        if slope < _CHORD_TRUST * chord:
            slope = chord / self._tolerable
        promised = self._room(self._uncertainty(k)) / slope
        promised = min(promised, float(_MAX_GROWTH * max(self._largest_equivalent(k), 1.0)), float(self.max_size))
        if bucket.fits and not self._num_near_full and self._used(k) < _KNEE_GRADIENTS * self.gradient_bytes:
            # Gradients hide what the examples take. What is safe for sure would creep up on the size, or stop short.
            promised = max(promised, self._bold_growth(k) * bucket.fits)
        if promised >= bucket.fails or (bucket.num_blind_failures and self._own_slope(k) is None):
            # The model is off here: trust it for a direction only.
            low, high = max(bucket.fits, 1), bucket.fails
            promised = min(promised, math.sqrt(low * high) if high > 2 * low else (low + high) / 2)
        size = min(max(math.floor(promised), 1), bucket.fails - 1)
        if bucket.fits and size - bucket.fits <= self.tolerance * bucket.fits:
            return None
        return size

    # The model

    def _room(self, uncertainty: float = 0.0) -> float:
        """Bytes left for examples: the budget, less what is resident, constant, overhead or uncertain."""
        usable = self.budget_bytes / self._overhead / (1.0 + uncertainty)
        return max(usable - self.resident_bytes - self._constant_bytes, 1.0)

    def _uncertainty(self, k: int) -> float:
        """Relative error to grant to the prediction for bucket `k`."""
        if self._own_slope(k) is not None or (self._has_headroom and self._num_near_full):
            return _UNCERTAINTY_MIN
        return min(max(self._error, _UNCERTAINTY_MIN), _UNCERTAINTY_MAX)

    def _chord(self, k: int) -> float:
        """A bound on the bytes per example of bucket `k` while few buckets are measured; 0 later, and in 2D.

        Polynomials with non-negative coefficients are convex: between two measured lengths they lie below the chord.
        With so few points the fit may take linear growth for quadratic, and so lie far too low in the middle.
        """
        if self._used(k) > 0.25 * (self.budget_bytes - self.resident_bytes) or self._is_2d:
            return 0.0
        length = self.shapes[k].input_len
        known = sorted(
            (shape.input_len, slope) for j, shape in enumerate(self.shapes) if (slope := self._own_slope(j)) is not None
        )
        left = [point for point in known if point[0] < length]
        right = [point for point in known if point[0] > length]
        if not left or not right or len(known) > 3:
            return 0.0
        (t0, s0), (t1, s1) = left[-1], right[0]
        return s0 + (s1 - s0) * (length - t0) / (t1 - t0)

    def _bold_growth(self, k: int) -> float:
        """How much larger the next size may be where gradients hide what examples take: more while little showed."""
        sizes = sorted(self._buckets[k].peaks)[-2:]
        grown = self._buckets[k].peaks[sizes[-1]] - self._buckets[k].peaks[sizes[0]]
        return 4.0 if grown < 0.05 * (self.budget_bytes - self.resident_bytes) else 1.5

    def _used(self, k: int) -> float:
        """What the largest step of bucket `k` used beyond the resident and constant bytes; 0 if none ran."""
        peaks = self._buckets[k].peaks
        return peaks[max(peaks)] - self.resident_bytes - self._constant_bytes if peaks else 0.0

    def _own_slope(self, k: int) -> float | None:
        """Bytes per example by the bucket's own largest measurement, if that was near full."""
        used = self._used(k)
        return max(used / max(self._buckets[k].peaks), 1.0) if used > self._near_full_bytes() else None

    def _slope(self, k: int) -> float:
        """Bytes per example of bucket `k`: its own if measured, else by the model."""
        own = self._own_slope(k)
        if own is not None:
            return own
        return max(float(self._slopes[k]), 1.0) if self._slopes is not None else 1.0

    def _fit(self) -> None:
        """Non-negative least squares of ``peak - resident = constant + size · (features · coefficients)``, in error
        relative to the peak, over the observations beyond the knee; those near the budget count most."""
        rows = [(k, size, peak) for k, bucket in enumerate(self._buckets) for size, peak in bucket.peaks.items()]
        used = np.array([max(peak - self.resident_bytes, 1) for _, _, peak in rows], dtype=float)
        beyond = used >= self._knee_bytes()
        keep = beyond if beyond.any() else np.ones_like(beyond)
        near_full = used > self._near_full_bytes()
        self._num_near_full = int(near_full.sum())
        weights = np.where(near_full, 1.0, _ANCHOR_WEIGHT) / np.array([peak for _, _, peak in rows])
        design = np.array([np.concatenate(([1.0], size * self._features[k])) for k, size, _ in rows])
        design, used, weights = design[keep], used[keep], weights[keep]
        scale = np.maximum(design.max(axis=0), 1e-12)
        solution, _ = nnls(design / scale * weights[:, None], used * weights)
        coefficients = solution / scale
        most = _CONSTANT_GRADIENTS * self.gradient_bytes
        if self._num_near_full < 2 and coefficients[0] > most:
            solution, _ = nnls(design[:, 1:] / scale[1:] * weights[:, None], np.maximum(used - most, 1.0) * weights)
            coefficients = np.concatenate(([most], solution / scale[1:]))
        self._constant_bytes = float(coefficients[0])
        self._slopes = self._features @ coefficients[1:]
        logger.debug("memory model: constant %.0f bytes, coefficients %s", coefficients[0], coefficients[1:])
