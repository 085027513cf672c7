from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lhotse_oomfit.peak_model import BucketShape, PeakModel, chord_at

ROOM = 1e10
SHAPES = [BucketShape(input_len=length, output_len=int(10 * length)) for length in (1.0, 4.0, 9.0, 16.0, 30.0)]

models = st.tuples(
    st.floats(0.0, 2e8),
    st.floats(0.0, 2e5),
    st.floats(1e6, 5e6),
    st.floats(0.0, 3e5),
    st.floats(0.0, 5e3),
    st.floats(0.0, 1e5),
)


def used(model: tuple[float, ...], bucket: int, size: float) -> float:
    return model[0] + size * float(np.dot(model[1:], SHAPES[bucket].features()))


def largest(model: tuple[float, ...], bucket: int, room: float = ROOM) -> float:
    return (room - model[0]) / float(np.dot(model[1:], SHAPES[bucket].features()))


def fitted(model: tuple[float, ...], buckets: tuple[int, ...], noise: dict[int, float] | None = None) -> PeakModel:
    peaks = PeakModel(SHAPES)
    steps = [(k, max(int(share * largest(model, k)), 1)) for k in buckets for share in (0.1, 0.95)]
    peaks.fit(
        [(k, size, int(used(model, k, size) * (noise or {}).get(k, 1.0))) for k, size in steps],
        resident_bytes=0,
        knee_bytes=0.04 * ROOM,
        near_full_bytes=0.5 * ROOM,
        most_constant=ROOM,
    )
    return peaks


@settings(max_examples=100, deadline=None)
@given(model=models)
def test_a_model_that_was_measured_everywhere_is_found(model):
    peaks = fitted(model, (0, 1, 2, 3, 4))
    assert peaks.slopes is not None
    for k in range(len(SHAPES)):
        size = 0.95 * largest(model, k)
        assert peaks.constant_bytes + size * peaks.slopes[k] == pytest.approx(used(model, k, size), rel=2e-3)


@settings(max_examples=150, deadline=None)
@given(model=models, data=st.data())
def test_a_bounded_size_fits_whatever_the_model_and_the_noise(model, data):
    noise = {k: data.draw(st.floats(0.97, 1.03)) for k in range(len(SHAPES))}
    buckets = tuple(sorted(data.draw(st.sets(st.integers(0, 4), min_size=1))))
    peaks = fitted(model, buckets, noise)
    for k in range(len(SHAPES)):
        size = peaks.bounded_size(k, room=ROOM, spread=0.03)
        assert used(model, k, size) * noise[k] <= ROOM * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(model=models)
def test_a_bound_is_tight_between_measured_lengths(model):
    peaks = fitted(model, (0, 1, 3, 4))
    assert peaks.bounded_size(2, room=ROOM, spread=0.0) >= 0.85 * largest(model, 2)


def test_observations_that_contradict_each_other_still_bound():
    peaks = PeakModel(SHAPES)
    observed = [(4, 10, int(0.9 * ROOM)), (4, 11, int(0.7 * ROOM))]
    peaks.fit(observed, resident_bytes=0, knee_bytes=0.0, near_full_bytes=0.5 * ROOM, most_constant=ROOM)
    assert 8 < peaks.bounded_size(4, room=ROOM, spread=0.0) < 11.2


def test_nothing_is_promised_where_the_constant_part_alone_may_fill_the_room():
    peaks = PeakModel(SHAPES)
    peaks.fit([(4, 1, int(ROOM))], resident_bytes=0, knee_bytes=0.0, near_full_bytes=0.5 * ROOM, most_constant=ROOM)
    assert peaks.bounded_size(0, room=ROOM, spread=0.03) == 0.0


@given(coefficients=st.tuples(*[st.floats(0.0, 1e3)] * 3), lengths=st.sets(st.integers(1, 60), min_size=3, max_size=3))
def test_a_convex_polynomial_lies_below_its_chord(coefficients, lengths):
    a, b, c = coefficients
    points = [(float(length), a + b * length + c * length**2) for length in sorted(lengths)]
    assert chord_at(points[1][0], [points[2], points[0]]) >= points[1][1] * (1 - 1e-9)
    assert chord_at(points[2][0], points[:2]) == 0.0


def test_a_shape_dominates_those_that_it_could_hold():
    assert all(b.dominates(a) and not a.dominates(b) for a, b in pairwise(SHAPES))
    long, dense = BucketShape(input_len=9.0, output_len=1), BucketShape(input_len=1.0, output_len=9)
    assert not long.dominates(dense)
    assert not dense.dominates(long)
