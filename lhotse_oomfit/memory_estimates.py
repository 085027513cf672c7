"""What the steps seen so far say of all others: bytes per example, sizes, and how far to trust them.

A bucket that was run near full is judged by its own peaks, any other by the fitted polynomial; margins and bounds stand
for what neither can know. Nothing here decides what to run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lhotse_oomfit.peak_model import BucketShape, PeakModel, chord_at
from lhotse_oomfit.probe_order import is_2d

__all__ = ["MemoryEstimates"]

_KNEE = 0.04
"""Share of the room below which the peak isn't affine yet (measured on Conformer CTC and AED models)."""
_KNEE_GRADIENTS = 3.0
"""Below this many times the gradients' bytes, what a step uses may be gradients rather than activations."""
_ANCHOR_SHARE_GRADIENTS = 0.8
"""Share of the room that an anchor aims at, at the most, where gradients are large."""
_CONSTANT_GRADIENTS = 0.25
"""Until two steps near the budget were seen, the constant part is taken to be at most this share of the gradients: what
looks constant in small batches is mostly the end of the backward pass, and would be missed where it matters."""
_UNCERTAINTY_START, _UNCERTAINTY_MIN, _UNCERTAINTY_MAX = 0.01, 0.003, 0.015
"""Relative error granted to a prediction: at first, at the least and at the most; in between, what was observed."""
_INTERPOLATED = 0.03
"""A step that ran, but exceeded the budget by at most this share, vouches for the slightly smaller size that its peak
promises: within so little of a measured point the peak is affine to a fraction of a percent."""
_CHORD_TRUST = 0.8
"""While few buckets are measured, a prediction below this share of the chord between its neighbours is not believed."""
_SPREAD, _SPREAD_FACTOR = 0.03, 1.25
"""Relative deviation of a bucket from the polynomial that safe sizes reckon with: at least, and as a multiple of the
largest one seen."""
_UNKNOWN_OVERHEAD = 0.88
"""Share of the memory that safe sizes fill before it is known what the allocator holds beyond the peak."""
_PREDICTED_AT_WORST = 1.04
"""What a predicted size may take of the room at most, by any model that agrees with what was measured."""
_PREDICTED_MARGIN, _PREDICTED_FACTOR = 0.01, 1.25
"""Relative margin of a predicted size: at least, and as a multiple of the largest deviation among the measured ones."""


class MemoryEstimates:
    """Learns from the peak of each step, and answers for all buckets and sizes.

    :param shapes: the worst case of each bucket.
    :param budget_bytes: the peak that must not be exceeded.
    :param resident_bytes: what is allocated before a step begins; peaks include it.
    :param gradient_bytes: what the gradients of all parameters take.
    :param headroom_bytes: what a step may exceed the budget by without failing.
    """

    def __init__(
        self,
        shapes: Sequence[BucketShape],
        *,
        budget_bytes: int,
        resident_bytes: int,
        gradient_bytes: int,
        headroom_bytes: int,
    ) -> None:
        self.full_room = float(budget_bytes - resident_bytes)
        """Bytes of the budget beyond the resident ones."""
        self.peaks: list[dict[int, int]] = [{} for _ in shapes]
        """Of each bucket, the peak bytes of every step that told them, by size."""
        self._shapes = shapes
        self._budget_bytes = budget_bytes
        self._resident_bytes = resident_bytes
        self._gradient_bytes = gradient_bytes
        self._headroom_bytes = headroom_bytes
        self._is_2d = is_2d(shapes)
        # How far a step may go over the budget at no more cost than that of a wasted one.
        self._tolerable = 1.0 + min(0.8 * headroom_bytes / budget_bytes, 0.25)
        self._has_headroom = headroom_bytes > 2 * _INTERPOLATED * budget_bytes
        self._overhead, self._is_overhead_known = 1.0, False  # charged over peak bytes, as seen near the budget
        self._error = _UNCERTAINTY_START  # relative error of the latest predictions, older ones fading
        self._model = PeakModel(shapes)
        self._predicted: dict[int, int] = {}  # by the present model

    def enter(self, bucket: int, size: int, *, peak_bytes: int, charged_bytes: int) -> None:
        """Learn from a step that ran.

        :param charged_bytes: the bytes to hold against the budget, `peak_bytes` or more.
        """
        is_near_full = peak_bytes - self._resident_bytes > self._near_full_bytes()
        # Before the first of these, errors say how far the anchors were off, not how far the model is now.
        if is_near_full and self._model.num_near_full and not self.is_measured(bucket):
            error = abs(self.predict_bytes(bucket, size) / peak_bytes - 1.0)
            self._error = max(self._error / 2, min(error, _UNCERTAINTY_MAX))
        if charged_bytes > self._budget_bytes // 2:
            self._overhead = max(self._overhead, charged_bytes / peak_bytes)
            self._is_overhead_known = True
        self.peaks[bucket][size] = peak_bytes
        self._predicted.clear()
        self._model.fit(
            [(k, size, peak) for k, peaks in enumerate(self.peaks) for size, peak in peaks.items()],
            resident_bytes=self._resident_bytes,
            knee_bytes=self.knee_bytes(),
            near_full_bytes=self._near_full_bytes(),
            most_constant=_CONSTANT_GRADIENTS * self._gradient_bytes,
        )

    # What is known

    @property
    def is_fitted(self) -> bool:
        """Whether any step told its peak yet."""
        return self._model.slopes is not None

    @property
    def num_near_full(self) -> int:
        """How many steps were near full: close enough to the budget to rely on."""
        return self._model.num_near_full

    def is_measured(self, bucket: int) -> bool:
        """Whether `bucket` is judged by its own largest step, which was near full."""
        return self._own_slope(bucket) is not None

    def is_hidden_by_gradients(self, bucket: int) -> bool:
        """Whether all that the largest step of `bucket` used may be gradients rather than activations."""
        return self._used(bucket) < _KNEE_GRADIENTS * self._gradient_bytes

    def deviation(self) -> float:
        """The largest relative deviation from the model among buckets that were measured near full."""
        slopes = self._model.slopes
        if slopes is None:
            return 0.0
        return max((abs(slopes[k] / own - 1.0) for k, own in self._own_slopes()), default=0.0)

    # How much a step should use

    def knee_bytes(self) -> float:
        """What a step must use beyond the resident bytes for its peak to say something about the batch size."""
        most = 0.75 * _ANCHOR_SHARE_GRADIENTS * self.full_room
        return max(_KNEE * self.full_room, min(_KNEE_GRADIENTS * self._gradient_bytes, most))

    def anchor_bytes(self, share: float) -> float:
        """What an anchor should use beyond the resident bytes: `share` of the room, more where gradients are large."""
        most = _ANCHOR_SHARE_GRADIENTS * self.full_room
        return max(share * self.full_room, min(1.5 * _KNEE_GRADIENTS * self._gradient_bytes, most))

    def _near_full_bytes(self) -> float:
        """From here on a step's peak is surely one of activations, and close enough to the budget to rely on."""
        return max(0.5 * self.full_room, min(_KNEE_GRADIENTS * self._gradient_bytes, 0.9 * self.full_room))

    # Bytes

    def predict_bytes(self, bucket: int, size: int) -> float:
        """The peak that the model expects of a step with `size` examples of `bucket`."""
        return self._resident_bytes + self._model.constant_bytes + self._slope(bucket) * size

    def slope_at_most(self, bucket: int) -> float:
        """A bound from above on the bytes per example of `bucket`: all that a step used, its constant part included,
        over its size; from another bucket, scaled by the longer of its lengths' ratios.

        Linear scaling overestimates lighter buckets, whose quadratic terms shrink faster; a fit on the few first
        points could have attributed everything to T² and would underestimate them.
        """
        if self.peaks[bucket]:
            return self._largest_slope(bucket)
        bounds = []
        for j, peaks in enumerate(self.peaks):
            if not peaks:
                continue
            ours, theirs = self._shapes[bucket], self._shapes[j]
            ratio = ours.input_len / theirs.input_len if theirs.input_len else 1.0
            if theirs.output_len:
                ratio = max(ratio, ours.output_len / theirs.output_len)
            bounds.append(self._largest_slope(j) * (ratio if ratio < 1 else ratio * ratio))
        return min(bounds)

    # Sizes

    def promised_size(self, bucket: int, *, at_most_proportional: bool) -> float:
        """The size of `bucket` that fills the budget, by the best that is known.

        :param at_most_proportional: believe no more bytes per example than the bucket's own steps used, even small
            ones: for a search without anchors, whose model may know no better.
        """
        slope, chord = self._slope(bucket), self._chord(bucket)
        if at_most_proportional:
            slope = min(slope, self._largest_slope(bucket))
        if slope < _CHORD_TRUST * chord:
            slope = chord / self._tolerable
        return self._room(self._uncertainty(bucket)) / slope

    def safe_size(self, bucket: int, *, at_most: int) -> int:
        """`at_most`, or the largest size that stays within the budget and the headroom whatever the model says."""
        limit = (self._budget_bytes + self._headroom_bytes) / self._overhead
        room = (limit if self._is_overhead_known else _UNKNOWN_OVERHEAD * limit) - self._resident_bytes
        own = math.floor(room / self._largest_slope(bucket) / (1.0 + _UNCERTAINTY_MIN))
        if own >= at_most or self.is_measured(bucket):
            return min(own, at_most)
        spread = max(_SPREAD, _SPREAD_FACTOR * self.deviation())
        return min(max(own, math.floor(self._model.bounded_size(bucket, room=room, spread=spread))), at_most)

    def predicted_size(self, bucket: int) -> int:
        """The size of a bucket that isn't run: by the model, with a margin, and by all models that may be true; 0
        before any step told its peak."""
        if not self.is_fitted:
            return 0
        if bucket not in self._predicted:
            deviation = self.deviation()
            room = self._budget_bytes / self._overhead - self._resident_bytes
            promised = self._room(max(_PREDICTED_MARGIN, _PREDICTED_FACTOR * deviation)) / self._slope(bucket)
            # The fit may have bent to a measured bucket that deviates, where few tell the monomials apart.
            bounds = (
                self._model.bounded_size(bucket, room=room, spread=deviation),
                self._model.bounded_size(bucket, room=_PREDICTED_AT_WORST * room, spread=_SPREAD),
            )
            self._predicted[bucket] = math.floor(min(promised, *bounds))
        return self._predicted[bucket]

    def interpolated_size(self, bucket: int, size: int, *, charged_bytes: int) -> int:
        """The size below `size` that a step of so many examples vouches for, which exceeded the budget only slightly;
        0 if it vouches for none."""
        is_affine = self.knee_bytes() < self.full_room / 2
        if not is_affine or self.num_near_full < 2 or charged_bytes > self._budget_bytes * (1.0 + _INTERPOLATED):
            return 0
        used = self.peaks[bucket][size] - self._resident_bytes - self._model.constant_bytes
        return min(math.floor(self._room(_UNCERTAINTY_MIN) / (max(used, 1.0) / size)), size - 1)

    def _room(self, uncertainty: float) -> float:
        """Bytes left for examples: the budget, less what is resident, constant, overhead or uncertain."""
        usable = self._budget_bytes / self._overhead / (1.0 + uncertainty)
        return max(usable - self._resident_bytes - self._model.constant_bytes, 1.0)

    def _uncertainty(self, k: int) -> float:
        """Relative error to grant to the prediction for bucket `k`."""
        if self.is_measured(k) or (self._has_headroom and self.num_near_full):
            return _UNCERTAINTY_MIN
        return min(max(self._error, _UNCERTAINTY_MIN), _UNCERTAINTY_MAX)

    # Bytes per example

    def _slope(self, k: int) -> float:
        """Bytes per example of bucket `k`: its own if measured, else by the model."""
        own = self._own_slope(k)
        if own is not None:
            return own
        return max(float(self._model.slopes[k]), 1.0) if self._model.slopes is not None else 1.0

    def _own_slope(self, k: int) -> float | None:
        """Bytes per example by the bucket's own largest measurement, if that was near full."""
        used = self._used(k)
        return max(used / max(self.peaks[k]), 1.0) if used > self._near_full_bytes() else None

    def _own_slopes(self) -> list[tuple[int, float]]:
        """The buckets that were measured near full, with the bytes per example of each."""
        return [(k, own) for k in range(len(self._shapes)) if (own := self._own_slope(k)) is not None]

    def _used(self, k: int) -> float:
        """What the largest step of bucket `k` used beyond the resident and constant bytes; 0 if none ran."""
        peaks = self.peaks[k]
        return peaks[max(peaks)] - self._resident_bytes - self._model.constant_bytes if peaks else 0.0

    def _largest_slope(self, k: int) -> float:
        """What each further example of bucket `k` takes at most: the peak over the size never rises, being the largest
        of several affine functions with constants that aren't negative. Infinite while nothing ran."""
        steps = self.peaks[k].items()
        return min((max(peak - self._resident_bytes, 1) / size for size, peak in steps), default=math.inf)

    def _chord(self, k: int) -> float:
        """A bound on the bytes per example of bucket `k` while few buckets are measured; 0 later, and in 2D.

        With so few points the fit may take linear growth for quadratic, and so lie far too low in the middle.
        """
        if self._used(k) > 0.25 * self.full_room or self._is_2d:
            return 0.0
        own = self._own_slopes()
        if len(own) > 3:
            return 0.0
        return chord_at(self._shapes[k].input_len, [(self._shapes[j].input_len, slope) for j, slope in own])
