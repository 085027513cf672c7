"""Limits that aren't memory, such as a kernel's 32-bit indices: learnt in one bucket, they tell of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lhotse_oomfit.peak_model import BucketShape

__all__ = ["Ceilings", "middle"]

_BLUR = 1.03
"""Sizes are whole and lengths are rounded to frames: by so much may a batch that ran exceed one that failed."""
_STEP = 0.95
"""Where a size fails that should have passed, the next one is this share of it."""


class Ceilings:
    """Which sizes are beyond another limit than memory.

    Such a limit is one of the size times a monomial of the lengths (1, T, U, T·U or T²: sequences, frames, tokens, a
    joiner's or an attention's entries). Which one shows by what ran and what failed: each that contradicts is dropped.

    :param shapes: the worst case of each bucket.
    """

    def __init__(self, shapes: Sequence[BucketShape]) -> None:
        self._amounts = np.array([shape.features() for shape in shapes])
        self._passed = np.zeros(self._amounts.shape[1])
        self._failed = np.full(self._amounts.shape[1], np.inf)
        self.num_met = 0
        """How many steps failed."""

    def passed(self, bucket: int, size: int) -> None:
        """A step with `size` examples of `bucket` ran."""
        self._passed = np.maximum(self._passed, size * self._amounts[bucket])

    def failed(self, bucket: int, size: int) -> None:
        """A step with `size` examples of `bucket` failed, though not for want of memory."""
        self.num_met += 1
        self._failed = np.minimum(self._failed, size * self._amounts[bucket])

    def between(self, bucket: int, fits: int, fails: int) -> tuple[int, int]:
        """Sizes of `bucket` of which the one should run and the other shouldn't, as far as other buckets tell.

        :param fits: a size that ran, or 0.
        :param fails: a size that failed, or is too large.
        :return: no less than `fits`, and no more than `fails`: just these where no monomial agrees with what is known.
        """
        amounts = self._amounts[bucket]
        agrees = (self._failed > 0) & (self._passed <= _BLUR * self._failed) & (amounts > 0)
        if self.num_met == 0 or not agrees.any():
            return fits, fails
        low = float((np.minimum(self._passed, self._failed)[agrees] / amounts[agrees]).max())
        high = float((np.maximum(self._passed, self._failed)[agrees] / amounts[agrees]).max())
        most = max(math.ceil(_STEP * fails) - 1, fits)
        return max(fits, min(math.floor(low), most)), min(fails, max(math.ceil(high), fits + 1))


def middle(low: int, high: int) -> float:
    """Where to look next between a size that runs and one that doesn't."""
    low = max(low, 1)
    return math.sqrt(low * high) if high > 2 * low else (low + high) / 2
