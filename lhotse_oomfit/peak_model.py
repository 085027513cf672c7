"""How the peak of a step grows with batch size and lengths: a polynomial with coefficients that aren't negative.

What a step uses beyond the resident bytes is ``constant + size · (features · coefficients)``. Convolutions and
feed-forward layers grow with the input length T or the output length U, the joiner of a transducer and cross-attention
with T·U, self-attention with T². An unconstrained fit goes negative and predicts absurd sizes; a constrained one is
also what makes bounds possible: whatever was measured leaves only so much room for what wasn't.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, nnls

__all__ = ["BucketShape", "PeakModel", "chord_at", "lighter_than", "monotone"]

logger = logging.getLogger(__name__)

_ANCHOR_WEIGHT = 0.2
"""Weight in the fit of an observation that isn't near full, against one that is."""
_SMALLEST_SPREAD = 0.003
"""Below this relative deviation from a polynomial, rounding alone makes observations contradict each other."""

_WIDEST_SPREAD = 0.5
"""Observations that deviate from any polynomial by more than this share bound nothing."""


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


def lighter_than(shapes: Sequence[BucketShape]) -> list[list[int]]:
    """For each shape the indexes of those that it dominates, itself among them."""
    return [[j for j, other in enumerate(shapes) if shape.dominates(other)] for shape in shapes]


def monotone(sizes: Sequence[int], lighter: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The sizes, none larger than one whose examples all fit in its own bucket; 0 says that nothing fits, and no more.

    :param lighter: of :func:`lighter_than`.
    """
    return tuple(
        min([size, *(sizes[j] for j in others if sizes[j] > 0)]) for size, others in zip(sizes, lighter, strict=True)
    )


class PeakModel:
    """Fits the polynomial to what was observed, and bounds what others are compatible with it.

    :param shapes: the worst case of each bucket.
    """

    def __init__(self, shapes: Sequence[BucketShape]) -> None:
        self._features = np.array([shape.features() for shape in shapes])
        self._buckets = np.zeros(0, dtype=int)
        self._sizes = self._used = np.zeros(0)
        self._near_full = np.zeros(0, dtype=bool)
        self.constant_bytes = 0.0
        self.slopes: NDArray[np.float64] | None = None
        """Bytes per example of each bucket; None before the first fit."""

    @property
    def num_near_full(self) -> int:
        """How many observations are near full."""
        return int(self._near_full.sum())

    def fit(
        self,
        observations: Sequence[tuple[int, int, int]],
        *,
        resident_bytes: int,
        knee_bytes: float,
        near_full_bytes: float,
        most_constant: float,
    ) -> None:
        """Non-negative least squares in error relative to the peak.

        :param observations: bucket, size and peak of each step.
        :param resident_bytes: what the peaks include that no step takes.
        :param knee_bytes: steps that use less beyond it don't count, where there are others.
        :param near_full_bytes: steps that use more count most.
        :param most_constant: the constant part isn't larger, until two steps were near full.
        """
        buckets, sizes, peaks = (np.array(column) for column in zip(*observations, strict=True))
        used = np.maximum(peaks - resident_bytes, 1).astype(float)
        self._buckets, self._sizes, self._used = buckets, sizes.astype(float), used
        self._near_full = used > near_full_bytes
        keep = used >= knee_bytes
        if not keep.any():
            keep = ~keep
        weights = (np.where(self._near_full, 1.0, _ANCHOR_WEIGHT) / peaks)[keep]
        used = used[keep]
        design = np.concatenate((np.ones((len(sizes), 1)), self._features[buckets] * sizes[:, None]), axis=1)[keep]
        scale = np.maximum(design.max(axis=0), 1e-12)
        solution, _ = nnls(design / scale * weights[:, None], used * weights)
        coefficients = solution / scale
        if self.num_near_full < 2 and coefficients[0] > most_constant:
            rest = np.maximum(used - most_constant, 1.0)
            solution, _ = nnls(design[:, 1:] / scale[1:] * weights[:, None], rest * weights)
            coefficients = np.concatenate(([most_constant], solution / scale[1:]))
        self.constant_bytes = float(coefficients[0])
        self.slopes = self._features @ coefficients[1:]
        logger.debug("memory model: constant %.0f bytes, coefficients %s", coefficients[0], coefficients[1:])

    def bounded_size(self, bucket: int, *, room: float, spread: float) -> float:
        """The largest size of `bucket` that uses at most `room` by every polynomial that agrees with what was observed.

        The worst such polynomial is a linear-fractional program, solved as a linear one (Charnes and Cooper, 1962,
        doi:10.1002/nav.3800090303).

        :param room: bytes beyond the resident ones.
        :param spread: relative deviation of any bucket from the polynomial; it is widened where observations contradict
            each other.
        :return: the size; 0 where nothing can be said.
        """
        sizes = self._features[self._buckets] * self._sizes[:, None]
        scale = np.maximum(sizes.max(axis=0), 1e-12)
        rows = np.concatenate((np.ones((len(sizes), 1)), sizes / scale), axis=1) * room / self._used[:, None]
        aim = self._features[bucket] / scale
        reference = 1.0 / max(float(aim.max()), 1e-12)
        # Unknowns: the constant and the coefficients times `scale`, in shares of the room, all divided by what
        # `reference` examples take, and one over that. Steps that aren't near full only bound from above: another part
        # of the step may have been larger than what examples take.
        objective = np.concatenate(([-1.0], np.zeros(len(aim)), [1.0]))
        normal = np.concatenate(([0.0], aim * reference, [0.0]))[None, :]
        spread = max(spread, _SMALLEST_SPREAD)
        while spread <= _WIDEST_SPREAD:
            above = np.concatenate((rows, np.full((len(rows), 1), -1.0 / (1.0 - spread))), axis=1)
            below = np.concatenate((-rows, np.full((len(rows), 1), 1.0 / (1.0 + spread))), axis=1)[self._near_full]
            limits = np.concatenate((above, below))
            found = linprog(objective, A_ub=limits, b_ub=np.zeros(len(limits)), A_eq=normal, b_eq=[1.0])
            if found.status == 0:
                return max(float(found.fun), 0.0) * reference / (1.0 + spread)
            if found.status == 3:  # unbounded: the constant part alone could fill the room
                return 0.0
            spread *= 1.5
        return 0.0


def chord_at(length: float, known: Sequence[tuple[float, float]]) -> float:
    """A bound on the bytes per example at `length`: polynomials with coefficients that aren't negative are convex, so
    between two measured lengths they lie below the chord.

    :param known: lengths and the bytes per example there.
    :return: the bound; 0 where `length` doesn't lie between two of them.
    """
    left = max((point for point in known if point[0] < length), default=None)
    right = min((point for point in known if point[0] > length), default=None)
    if left is None or right is None:
        return 0.0
    (t0, s0), (t1, s1) = left, right
    return s0 + (s1 - s0) * (length - t0) / (t1 - t0)
