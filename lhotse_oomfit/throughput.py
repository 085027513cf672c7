"""How long steps take, and from which batch size on a larger one hardly trains faster.

A step takes ``max(floor, constant + size · (features · coefficients))`` seconds: while batches are small the time to
launch the kernels, which is about the same for all, and then what the optimizer takes and what each example adds, a
polynomial of its lengths as for memory (:mod:`~lhotse_oomfit.peak_model`). So the rate, input per second, rises with
the size and flattens; the memory of sizes beyond buys little.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from lhotse_oomfit.peak_model import BucketShape
from lhotse_oomfit.probe_order import anchors, heaviest_first

__all__ = ["StepTimes", "choose_sizes", "fit_step_times", "typical_seconds"]

_NUM_TIMED = 3
"""Buckets that are timed at half their size and at all of it, to tell what a step takes from what examples add."""
_NUM_RUNS = 2
"""Runs of a size before its time is believed."""
_CONFIRMED_WEIGHT = 8
"""Weight of such a time in the fit, against one of a first step."""
_AIM = 0.75
"""Sizes are proposed for this part of the share, lest every other one misses it by the noise of timing."""
_NUM_FLOORS = 24
"""Candidates for the floor, quantiles of the observed times."""
_NUM_ROUNDS = 5
"""Rounds of reweighting: each finds less of the slow outliers, and a few suffice."""
_SLOW = 0.1
"""Steps slower than the fit by more than this share count less: a first step of its shape loads kernels and lets
libraries choose algorithms, and nothing makes a step faster than it is."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Step times of all buckets.

    :param floor_s: no step takes less.
    :param constant_s: what a step takes besides its examples.
    :param example_s: what an example of each bucket adds.
    """

    floor_s: float
    constant_s: float
    example_s: tuple[float, ...]

    def seconds(self, bucket: int, size: int) -> float:
        """What a step with `size` examples of `bucket` takes."""
        return max(self.floor_s, self.constant_s + self.example_s[bucket] * size)

    def smallest_size(self, bucket: int, *, largest: int, share: float) -> int:
        """The smallest size whose rate, examples per second, is at most `share` below that of `largest`."""
        rate = (1.0 - share) * largest / max(self.seconds(bucket, largest), 1e-12)
        # size / floor_s and size / (constant_s + example_s · size) must both reach it.
        size = rate * self.floor_s
        gained = 1.0 - rate * self.example_s[bucket]
        size = max(size, rate * self.constant_s / gained if gained > 0 else largest)
        return min(max(math.ceil(size * (1.0 - 1e-9)), 1), largest)


def fit_step_times(shapes: Sequence[BucketShape], observations: Sequence[tuple[int, int, float]]) -> StepTimes:
    """Fit by non-negative least squares in relative error.

    :param shapes: the worst case of each bucket.
    :param observations: bucket, size and seconds of each step; at least one.
    """
    buckets, sizes, seconds = (np.array(column) for column in zip(*observations, strict=True))
    features = np.array([shape.features() for shape in shapes])
    design = np.concatenate((np.ones((len(sizes), 1)), features[buckets] * sizes[:, None]), axis=1)
    design /= seconds[:, None]
    scale = np.maximum(design.max(axis=0), 1e-300)
    fits = [(*_fit(design / scale, floor / seconds), floor) for floor in _floors(seconds)]
    _, solution, floor = min(fits, key=lambda fit: fit[0])
    coefficients = solution / scale
    return StepTimes(
        floor_s=float(floor),
        constant_s=float(coefficients[0]),
        example_s=tuple((features @ coefficients[1:]).tolist()),
    )


def _floors(seconds: NDArray[np.float64]) -> list[float]:
    return [0.0, *np.unique(np.quantile(seconds, np.linspace(0.0, 0.8, _NUM_FLOORS)))]


def _fit(design: NDArray[np.float64], floor: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """The coefficients by which ``max(floor, design @ coefficients)`` is closest to one, and how far it is from it."""
    weights = np.ones(len(design))
    above = floor < 1.0  # steps at the floor say nothing of the examples
    solution = np.zeros(design.shape[1])
    deviation = floor - 1.0
    for _ in range(_NUM_ROUNDS):
        if above.any():
            solution, _ = nnls(design[above] * weights[above, None], weights[above])
        deviation = np.maximum(floor, design @ solution) - 1.0
        weights = np.where(deviation < -_SLOW, _SLOW / np.maximum(-deviation, _SLOW), 1.0)
        above = (design @ solution > floor) | (floor < 0.9)
    return float((np.minimum(np.abs(deviation), _SLOW) ** 2).sum()), solution


def typical_seconds(seconds: Sequence[float]) -> float:
    """The time to expect of a step that was timed several times, in this order: the faster of two, the median of more,
    without the first, which does what is done once for a new shape."""
    return min(seconds) if len(seconds) < 3 else statistics.median(seconds[1:])


def choose_sizes(
    shapes: Sequence[BucketShape],
    sizes: Sequence[int],
    times: Mapping[tuple[int, int], Sequence[float]],
    *,
    share: float,
) -> Generator[tuple[int, int], float | None, tuple[int, ...]]:
    """Find the smallest sizes that train nearly as fast as the largest: proposed by a fit, and confirmed.

    Yields the bucket and size of each step to run and takes its seconds, or None if it failed. A bucket keeps its size
    if steps at the proposed one turn out slower than the share allows. No size is smaller than that of a bucket whose
    shape dominates, so that sizes still don't grow with length.

    :param shapes: the worst case of each bucket.
    :param sizes: the largest size of each, which don't grow with length.
    :param times: seconds of the steps that ran, in their order, by bucket and size.
    :param share: how much of the largest size's rate, examples per second, may be lost.
    :return: the sizes.
    """
    seen = {key: list(seconds) for key, seconds in times.items() if seconds}

    def run(bucket: int, size: int) -> Generator[tuple[int, int], float | None, float | None]:
        known = seen.setdefault((bucket, size), [])
        while len(known) < _NUM_RUNS:
            seconds = yield bucket, size
            if seconds is None:
                return None
            known.append(seconds)
        return typical_seconds(known)

    for k in anchors(shapes)[:_NUM_TIMED]:
        for size in dict.fromkeys((sizes[k], max(sizes[k] // 2, 1))):
            yield from run(k, size)
    chosen = list(sizes)
    order = heaviest_first(shapes)
    for position, k in enumerate(order):
        observations = [
            (*key, typical_seconds(known))
            for key, known in seen.items()
            for _ in range(_CONFIRMED_WEIGHT if len(known) >= _NUM_RUNS else len(known))
        ]
        if not observations:
            break
        model = fit_step_times(shapes, observations)
        longer = [chosen[j] for j in order[:position] if shapes[j].dominates(shapes[k])]
        size = max([model.smallest_size(k, largest=sizes[k], share=_AIM * share), *longer])
        if size >= sizes[k]:
            continue
        seconds = yield from run(k, size)
        full_s = yield from run(k, sizes[k])
        if seconds is not None and (full_s is None or size / seconds >= (1.0 - share) * sizes[k] / full_s):
            chosen[k] = size
    return tuple(chosen)
