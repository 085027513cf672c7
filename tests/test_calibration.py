"""What drives the trials, against simulated memory and step times."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest
from simulated_card import AED, CTC, GB, Card, grid, noise_for, one_d, two_d

from lhotse_oomfit.calibration import Measurement, measure_sizes
from lhotse_oomfit.memory import Usage
from lhotse_oomfit.peak_model import BucketShape
from lhotse_oomfit.trial import Trial


class Device:
    """A card whose steps take simulated memory and time; stands in for a runner and its memory."""

    def __init__(self, card: Card, *, floor_s: float = 0.05, warm_up: float = 0.0) -> None:
        self.card, self.floor_s, self.warm_up = card, floor_s, warm_up
        self.limit_bytes = int((1.0 + card.headroom) * card.budget)
        self.steps: list[Trial] = []
        self.soaked: list[Trial] = []
        self._cap_bytes: int | None = None
        self._random = Random(0)

    def release(self) -> None: ...

    @contextmanager
    def cap(self, limit_bytes: int) -> Iterator[None]:
        self._cap_bytes = limit_bytes
        yield
        self._cap_bytes = None

    def true_seconds(self, bucket: int, size: int) -> float:
        length = self.card.shapes[bucket].input_len
        return max(self.floor_s, 0.02 + size * (1e-4 * length + 1e-6 * length**2))

    def run(self, bucket: int, size: int, *, release: bool = True) -> Trial:
        peak = self.card.peak(bucket, size)
        is_new = (bucket, size) not in {(trial.bucket, trial.size) for trial in self.steps}
        seconds = self.true_seconds(bucket, size) * (1.0 + self.warm_up * is_new * self._random.random())
        usage = Usage(allocated_bytes=peak, reserved_bytes=peak, num_retries=0, num_ooms=0, seconds=seconds)
        fits = peak <= (self.limit_bytes if self._cap_bytes is None else self._cap_bytes)
        trial = Trial(bucket=bucket, size=size, status="fits" if fits else "oom", usage=usage, error=None)
        self.steps.append(trial)
        if self._cap_bytes is not None:
            self.soaked.append(trial)
        return trial


def measure(device: Device, **options) -> Measurement:
    card = device.card
    return measure_sizes(
        card.shapes,
        runner=device,
        memory=device,
        budget_bytes=card.budget,
        resident_bytes=card.resident,
        gradient_bytes=card.gradients,
        headroom_bytes=device.limit_bytes - card.budget,
        max_size=1 << 20,
        **options,
    )


def sizes_of(measurement: Measurement) -> list[int]:
    return [bucket.size for bucket in measurement.buckets]


@pytest.mark.parametrize("shapes", [one_d(30), two_d(10)], ids=["1d", "2d"])
def test_after_a_soak_every_bucket_has_the_time_of_its_final_size(shapes):
    card = Card(shapes=shapes, coefficients=AED, headroom=0.1, noise=noise_for(shapes))
    device = Device(card, warm_up=1.0)
    found = measure(device, num_soak_steps=8 * len(shapes))
    assert found.num_soak_steps == len(device.soaked) == 2 * len(shapes)
    assert found.num_trials + found.num_soak_steps == len(device.steps)
    for k, bucket in enumerate(found.buckets):
        assert bucket.step_s == pytest.approx(device.true_seconds(k, bucket.size))
        assert bucket.peak_bytes == card.peak(k, bucket.size)
        assert bucket.verified


def test_an_offender_of_the_soak_has_the_peak_and_time_of_its_smaller_size(caplog: pytest.LogCaptureFixture):
    card = Card(shapes=one_d(8), coefficients=CTC, headroom=0.1)
    device = Device(card)

    @contextmanager
    def tighter(limit_bytes: int) -> Iterator[None]:
        device._cap_bytes = int(0.985 * limit_bytes)
        yield

    device.cap = tighter  # type: ignore[method-assign]  # as if steps in a row took more
    with caplog.at_level(logging.INFO):
        found = measure(device, num_soak_steps=100)
    assert found.num_ooms > 0
    assert "in the soak; going on with" in caplog.text
    for k, bucket in enumerate(found.buckets):
        assert bucket.peak_bytes == card.peak(k, bucket.size) <= 0.985 * card.budget
        assert bucket.step_s == pytest.approx(device.true_seconds(k, bucket.size))


def test_without_a_soak_a_size_that_no_step_had_has_no_time():
    shapes = one_d(30)
    found = measure(Device(Card(shapes=shapes, coefficients=AED, headroom=0.1, noise=noise_for(shapes))))
    assert found.num_soak_steps == 0
    assert any(bucket.step_s is None for bucket in found.buckets)
    assert sum(bucket.step_s is not None for bucket in found.buckets) > 15
    assert all(bucket.peak_bytes for bucket in found.buckets)


@pytest.mark.parametrize(("shapes", "most_steps"), [(one_d(30), 15), (grid(), 40)], ids=["30-buckets", "150-buckets"])
def test_fast_mode_marks_what_it_predicted_and_soaks_a_fifth(shapes, most_steps):
    card = Card(shapes=shapes, coefficients=AED, headroom=0.1)
    device = Device(card)
    found = measure(device, mode="fast", num_soak_steps=8 * len(shapes))
    assert found.num_trials <= most_steps
    assert found.num_soak_steps == len(shapes) / 5
    assert found.num_ooms == 0
    ran = {(trial.bucket, trial.size) for trial in device.steps}
    for k, bucket in enumerate(found.buckets):
        assert card.peak(k, bucket.size) <= card.budget
        assert bucket.peak_bytes == pytest.approx(card.peak(k, bucket.size), rel=0.02)
        if not bucket.verified:
            assert (k, bucket.size) not in ran
            assert bucket.step_s is None
        assert bucket.settled
    assert len(shapes) / 2 < sum(not bucket.verified for bucket in found.buckets)
    rows = found.bucket_profiles(shapes, [None] * len(shapes))
    assert [row.verified for row in rows] == [bucket.verified for bucket in found.buckets]


@pytest.mark.parametrize("share", [0.9, 0.7])
@pytest.mark.parametrize("mode", ["verify", "fast"])
def test_where_steps_in_a_row_take_more_all_buckets_are_soaked_until_they_hold(mode, share, caplog):
    card = Card(shapes=one_d(30), coefficients=CTC, headroom=0.1)
    device = Device(card)

    @contextmanager
    def tighter(limit_bytes: int) -> Iterator[None]:
        device._cap_bytes = int(share * limit_bytes)
        yield

    device.cap = tighter  # type: ignore[method-assign]  # as if steps in a row took more
    found = measure(device, mode=mode, num_soak_steps=8 * 30)
    assert found.num_soak_steps < 8 * 30
    assert not caplog.records
    for k, size in enumerate(sizes_of(found)):
        assert 0.8 * share * card.budget < card.peak(k, size) <= share * card.budget


@pytest.mark.parametrize("mode", ["verify", "fast"])
@pytest.mark.parametrize("shapes", [one_d(12), two_d(4)], ids=["1d", "2d"])
def test_for_throughput_sizes_are_smaller_and_hardly_slower(shapes, mode):
    card = Card(shapes=shapes, coefficients=CTC, headroom=0.1)
    largest = sizes_of(measure(Device(card)))
    device = Device(card, floor_s=0.3, warm_up=1.0)
    found = measure(device, objective="throughput", throughput_share=0.05, mode=mode, num_soak_steps=500)
    sizes = sizes_of(found)
    assert sum(sizes) < 0.9 * sum(largest)
    for k, size in enumerate(sizes):
        rate = size / device.true_seconds(k, size)
        assert size <= largest[k]
        assert rate >= 0.93 * largest[k] / device.true_seconds(k, largest[k])
        assert all(size <= sizes[j] for j, other in enumerate(shapes) if shapes[k].dominates(other))
    assert all(trial.size == sizes[trial.bucket] for trial in device.soaked)
    if mode == "verify":
        assert all(bucket.step_s == pytest.approx(device.true_seconds(k, bucket.size))
                   for k, bucket in enumerate(found.buckets))  # fmt: skip


def test_a_share_of_nothing_keeps_the_largest_sizes():
    card = Card(shapes=one_d(6), coefficients=CTC, headroom=0.1)
    largest = sizes_of(measure(Device(card)))
    assert sizes_of(measure(Device(card), objective="throughput", throughput_share=0.0)) == largest


def test_cautious_trials_stay_within_the_memory_and_its_headroom():
    shapes = one_d(20)
    card = Card(shapes=shapes, coefficients=AED, headroom=0.0, noise=noise_for(shapes))
    device = Device(card)
    found = measure(device, cautious=True)
    assert found.num_ooms == 0
    assert all(size >= 0.93 * card.largest(k) for k, size in enumerate(sizes_of(found)))


class CachingDevice(Device):
    """A device under a hard limit whose allocator keeps what it once held: a part of that is of no use to other shapes,
    and is given back by a retry once there is no room."""

    def __init__(self, card: Card, *, useless: float, overhead: float = 1.008, limit_share: float = 1.0) -> None:
        super().__init__(card)
        self.useless, self.overhead = useless, overhead
        self.hard_bytes = int(limit_share * card.budget)
        self.caps: list[int] = []
        self._held_bytes = 0

    def release(self) -> None:
        self._held_bytes = 0

    @contextmanager
    def cap(self, limit_bytes: int) -> Iterator[None]:
        self.caps.append(limit_bytes)
        with super().cap(self.hard_bytes):
            yield

    def run(self, bucket: int, size: int, *, release: bool = True) -> Trial:
        self.limit_bytes = self.hard_bytes
        trial = super().run(bucket, size, release=release)
        reserved, beside = int(trial.usage.allocated_bytes * self.overhead), int(self.useless * self._held_bytes)
        retried = reserved + beside > self.hard_bytes
        reserved = min(reserved if retried else reserved + beside, self.hard_bytes)
        self._held_bytes = 0 if release or trial.status != "fits" else reserved
        usage = replace(trial.usage, reserved_bytes=reserved, num_retries=int(retried))
        self.steps[-1] = trial = replace(trial, usage=usage)
        return trial


@pytest.mark.parametrize("shapes", [one_d(30), two_d(10)], ids=["1d", "2d"])
@pytest.mark.parametrize("useless", [0.01, 0.1])
def test_a_cache_in_the_way_does_not_lower_the_sizes(shapes, useless):
    card = Card(shapes=shapes, coefficients=AED)
    device = CachingDevice(card, useless=useless)
    found = measure(device)
    assert (found.num_retries > 0) == (useless > 0.02)  # there is room for a cache of the usual size
    assert found.num_ooms == 0
    assert found.num_trials <= 1.4 * len(shapes)
    for k, size in enumerate(sizes_of(found)):
        assert size >= 0.92 * card.largest(k) - 1
        assert card.peak(k, size) <= card.budget / 1.02


def test_an_allocator_that_needs_much_more_than_it_hands_out_still_leaves_most_of_the_budget():
    """Tensors that are large beside the budget: a step alone has 10% too much, many shapes little more than that."""
    card = Card(shapes=one_d(10), coefficients=AED)
    found = measure(CachingDevice(card, useless=0.01, overhead=1.10))
    assert found.num_ooms == 0
    for k, size in enumerate(sizes_of(found)):
        assert card.peak(k, size) <= card.budget / 1.14
        assert size >= 0.83 * card.largest(k) - 1


def test_an_allocator_that_fragments_is_measured_by_what_it_allocates_and_may_retry_in_the_soak():
    card = Card(shapes=one_d(30), coefficients=AED)
    fragmenting_bytes = int(0.13 * card.budget)
    device = CachingDevice(card, useless=0.3, overhead=1.06, limit_share=1.13)
    found = measure(device, fragmenting_bytes=fragmenting_bytes, num_soak_steps=8 * 30)
    assert device.caps == [card.budget + fragmenting_bytes]
    assert found.num_soak_steps == 60
    assert found.num_ooms == 0
    assert found.num_retries > 0
    for k, size in enumerate(sizes_of(found)):
        assert 0.96 * card.largest(k) - 1 <= size <= card.largest(k)


def test_a_cautious_search_that_gradients_hold_back_says_so(caplog):
    shapes = [BucketShape(input_len=float(t)) for t in (10, 20, 30)]
    card = Card(shapes=shapes, coefficients=(0.0, 1e6, 0.0, 0.0, 0.0), gradients=9 * GB, budget=20 * GB)
    found = measure(Device(card), cautious=True)
    assert max(sizes_of(found)) < 10
    assert "gradients fill most of a step with" in caplog.text
    caplog.clear()
    card = Card(shapes=shapes, coefficients=(0.0, 1e6, 0.0, 0.0, 0.0), budget=20 * GB)
    measure(Device(card), cautious=True)
    assert not caplog.records
