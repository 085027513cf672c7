"""The choice of sizes by throughput against simulated step times: a floor, then affine in the batch size."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lhotse_oomfit.peak_model import BucketShape
from lhotse_oomfit.throughput import StepTimes, choose_sizes, fit_step_times, typical_seconds

LINE = [BucketShape(input_len=1.0 * (k + 1), output_len=12 * (k + 1)) for k in range(30)]
GRID = [BucketShape(input_len=3.0 * (k + 1), output_len=3 * rate * (k + 1)) for k in range(10) for rate in (4, 8, 16)]


class Clock:
    """Simulated step times, with noise and slow first steps of a shape."""

    def __init__(self, shapes, *, floor, constant, per_t=1e-4, per_t2=1e-6, noise=0.0, warm_up=0.0):
        self.shapes, self.floor, self.constant = shapes, floor, constant
        self.per_t, self.per_t2, self.noise, self.warm_up = per_t, per_t2, noise, warm_up
        self.random, self.ran = Random(0), []

    def true_seconds(self, bucket, size):
        t = self.shapes[bucket].input_len
        return max(self.floor, self.constant + size * (self.per_t * t + self.per_t2 * t * t))

    def seconds(self, bucket, size):
        slow = 1.0 + self.warm_up * self.random.random() * ((bucket, size) not in self.ran)
        self.ran.append((bucket, size))
        return self.true_seconds(bucket, size) * slow * (1.0 + self.noise * self.random.uniform(-1.0, 1.0))

    def rate(self, bucket, size):
        return size / self.true_seconds(bucket, size)


def full_sizes(shapes):
    return [int(9000 / (shape.input_len * (1.0 + shape.input_len / 100 + shape.output_len / 1000))) for shape in shapes]


def drive(plan, run):
    """The sizes that a plan returns and how many steps it asks for."""
    num_steps = 0
    try:
        request = next(plan)
        while True:
            num_steps += 1
            request = plan.send(run(*request))
    except StopIteration as end:
        return end.value, num_steps


def choose(clock, sizes, *, share=0.02):
    times = {(k, size): [clock.seconds(k, size)] for k, size in enumerate(sizes)}
    return drive(choose_sizes(clock.shapes, sizes, times, share=share), clock.seconds)


@pytest.mark.parametrize("shapes", [LINE, GRID], ids=["1d", "2d"])
@pytest.mark.parametrize(("floor", "constant"), [(0.0, 0.02), (0.1, 0.02), (0.3, 0.05), (0.05, 0.2)])
def test_the_smallest_sizes_that_lose_at_most_the_share_are_found(shapes, floor, constant):
    clock, sizes = Clock(shapes, floor=floor, constant=constant, warm_up=1.0), full_sizes(shapes)
    chosen, num_steps = choose(clock, sizes)
    assert num_steps <= 3 * len(shapes) + 12
    for k, size in enumerate(chosen):
        assert size <= sizes[k]
        assert clock.rate(k, size) >= 0.98 * clock.rate(k, sizes[k])
    assert sum(chosen) < 0.98 * sum(sizes)


@settings(max_examples=25, deadline=None)
@given(
    floor=st.floats(0.0, 1.0),
    constant=st.floats(0.0, 0.5),
    per_t2=st.floats(0.0, 1e-5),
    share=st.floats(0.0, 0.2),
    noise=st.sampled_from([0.0, 0.05]),
    shapes=st.sampled_from([LINE, GRID]),
)
def test_no_bucket_loses_more_than_the_share_and_the_noise_and_sizes_stay_monotone(
    floor, constant, per_t2, share, noise, shapes
):
    clock = Clock(shapes, floor=floor, constant=constant, per_t2=per_t2, noise=noise, warm_up=1.0)
    sizes = full_sizes(shapes)
    sizes = [min(sizes[j] for j, other in enumerate(shapes) if shape.dominates(other)) for shape in shapes]
    chosen, _ = choose(clock, sizes, share=share)
    for k, size in enumerate(chosen):
        assert 1 <= size <= sizes[k]
        # Either of two rates may be off by the noise.
        assert clock.rate(k, size) >= (1.0 - share) * (1.0 - 2.2 * noise) * clock.rate(k, sizes[k]) * (1 - 1e-9)
        for j, other in enumerate(shapes):
            assert not shapes[k].dominates(other) or size <= chosen[j]


@settings(max_examples=60, deadline=None)
@given(floor=st.floats(0.0, 0.3), constant=st.floats(0.001, 0.3), per_t2=st.floats(0.0, 1e-5))
def test_times_without_noise_are_fitted_within_a_tenth_at_full_size(floor, constant, per_t2):
    clock, sizes = Clock(LINE, floor=floor, constant=constant, per_t2=per_t2), full_sizes(LINE)
    seen = [(k, size // part, clock.true_seconds(k, size // part)) for k, size in enumerate(sizes) for part in (1, 2)]
    model = fit_step_times(LINE, seen)
    for k, size in enumerate(sizes):
        assert model.seconds(k, size) == pytest.approx(clock.true_seconds(k, size), rel=0.1)


def test_a_few_slow_first_steps_hardly_move_the_fit():
    clock, sizes = Clock(LINE, floor=0.05, constant=0.1), full_sizes(LINE)
    seen = [(k, size // part, clock.true_seconds(k, size // part)) for k, size in enumerate(sizes) for part in (1, 3)]
    seen = [(k, size, 3.0 * s if i % 6 == 0 else s) for i, (k, size, s) in enumerate(seen)]
    model = fit_step_times(LINE, seen)
    for k, size in enumerate(sizes):
        assert model.seconds(k, size) == pytest.approx(clock.true_seconds(k, size), rel=0.1)


@given(
    floor=st.floats(0.0, 1.0), constant=st.floats(0.0, 1.0), example=st.floats(1e-6, 0.1),
    largest=st.integers(1, 3000), share=st.floats(0.0, 0.5),
)  # fmt: skip
def test_the_smallest_size_is_the_smallest(floor, constant, example, largest, share):
    model = StepTimes(floor_s=floor, constant_s=constant, example_s=(example,))
    size = model.smallest_size(0, largest=largest, share=share)
    wanted = (1.0 - share) * largest / model.seconds(0, largest)
    assert size / model.seconds(0, size) >= wanted * (1 - 1e-6)
    assert size == 1 or (size - 1) / model.seconds(0, size - 1) < wanted * (1 + 1e-6)


def test_a_size_that_fails_is_not_chosen():
    clock, sizes = Clock(LINE, floor=0.3, constant=0.1), full_sizes(LINE)
    plan = choose_sizes(LINE, sizes, {(k, size): [0.5, 0.5] for k, size in enumerate(sizes)}, share=0.5)
    assert drive(plan, lambda k, size: clock.seconds(k, size) if size == sizes[k] else None)[0] == tuple(sizes)


def test_without_a_time_sizes_stay():
    plan = choose_sizes(LINE[:1], [7], {}, share=0.1)
    assert next(plan) == (0, 7)
    assert plan.send(None) == (0, 3)
    with pytest.raises(StopIteration) as end:
        plan.send(None)
    assert end.value.value == (7,)


def test_the_first_of_several_times_does_not_count():
    assert typical_seconds([5.0]) == 5.0
    assert typical_seconds([5.0, 2.0]) == 2.0
    assert typical_seconds([5.0, 2.0, 1.0, 3.0]) == 2.0
