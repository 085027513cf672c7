"""Which buckets to run first: the extremes, between which a model interpolates, then always where least is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lhotse_oomfit.peak_model import BucketShape

__all__ = ["anchors", "corners", "heaviest_first", "is_2d", "spread_out"]

_FEW_BUCKETS = 10
"""Up to so many buckets the middle one isn't probed apart: correcting a prediction costs no more than preventing it."""


def is_2d(shapes: Sequence[BucketShape]) -> bool:
    """Whether several buckets share an input length."""
    return len({shape.input_len for shape in shapes}) < len(shapes)


def heaviest_first(shapes: Sequence[BucketShape]) -> list[int]:
    """All buckets, those with the longest inputs and outputs first."""

    def weight(k: int) -> float:
        return (1.0 + shapes[k].input_len) * (1.0 + shapes[k].output_len / 1000.0)

    return sorted(range(len(shapes)), key=lambda k: (-weight(k), k))


def corners(shapes: Sequence[BucketShape]) -> list[int]:
    """The heaviest and lightest buckets, and in 2D the other two corners."""
    order = heaviest_first(shapes)
    found = [order[0], order[-1]]
    if is_2d(shapes):
        longest = max(shape.input_len for shape in shapes)
        shortest = min(shape.input_len for shape in shapes)
        for length, pick in ((longest, min), (shortest, max)):
            row = [k for k in order if shapes[k].input_len == length]
            found.append(pick(row, key=lambda k: shapes[k].output_len))
    return list(dict.fromkeys(found))


def anchors(shapes: Sequence[BucketShape]) -> list[int]:
    """The corners and one in the middle: enough to tell the five monomials of the model apart, and few."""
    order, found = heaviest_first(shapes), corners(shapes)
    if len(order) <= _FEW_BUCKETS:
        return found
    middle = (shapes[order[0]].input_len + shapes[order[-1]].input_len) / 2
    nearest = min(order, key=lambda k: abs(shapes[k].input_len - middle))
    return list(dict.fromkeys([*found[:2], nearest, *found[2:]]))


def spread_out(shapes: Sequence[BucketShape]) -> list[int]:
    """The corners, then always the bucket whose lengths are farthest from those of all before it."""
    lengths = np.array([(shape.input_len, shape.output_len) for shape in shapes], dtype=float)
    positions = lengths / np.maximum(lengths.max(axis=0), 1e-9)
    order = corners(shapes)
    distances = np.full(len(shapes), np.inf)
    for k in order:
        distances = np.minimum(distances, ((positions - positions[k]) ** 2).sum(axis=1))
    while len(order) < len(shapes):
        distances[order] = -1.0
        order.append(int(distances.argmax()))
        distances = np.minimum(distances, ((positions - positions[order[-1]]) ** 2).sum(axis=1))
    return order
