"""The soak: what only shows in a row of full-size steps under a hard cap shrinks, and the last pass is clean."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lhotse_oomfit.calibration import Measurement, measure_sizes
from lhotse_oomfit.memory import CpuMemory, Usage
from lhotse_oomfit.search import BucketShape
from lhotse_oomfit.trial import Trial, TrialRunner

MIB = 1024**2
LIMIT_BYTES, BUDGET_BYTES = 5000 * MIB, 1000 * MIB
PER_EXAMPLE_BYTES = (3 * MIB, 4 * MIB, 7 * MIB)


class Jumping:
    """A step whose need per example is known; in some buckets it jumps by a share once the hard cap is there."""

    def __init__(self, memory: CpuMemory, jumps: tuple[float, ...]) -> None:
        self.memory, self.jumps = memory, jumps

    def forward_backward(self, batch: tuple[int, int]) -> None:
        bucket, size = batch
        need = size * PER_EXAMPLE_BYTES[bucket]
        if self.memory.budget(1.0).free_bytes < LIMIT_BYTES:
            need *= 1 + self.jumps[bucket]
        torch.empty(int(need), dtype=torch.uint8)

    def optimizer_step(self) -> None: ...

    def zero_grad(self) -> None: ...


class Retrying(CpuMemory):
    """Reports an allocator's retry in the first so many measurements under a cap."""

    def __init__(self, num_retries: int) -> None:
        super().__init__(limit_bytes=LIMIT_BYTES)
        self.num_left = num_retries

    @contextmanager
    def measure(self) -> Iterator[Callable[[], Usage]]:
        retried = 0
        if self.num_left and self.budget(1.0).free_bytes < LIMIT_BYTES:
            self.num_left -= 1
            retried = 1
        with super().measure() as usage:
            yield lambda: replace(usage(), num_retries=retried)


def soaked(
    memory: CpuMemory, jumps: tuple[float, ...] = (0.0, 0.0, 0.0), num_soak_steps: int = 90
) -> tuple[Measurement, list[Trial]]:
    """The outcome, and the trials of the soak."""
    trials: list[Trial] = []
    found = measure_sizes(
        [BucketShape(input_len=length) for length in (3.0, 4.0, 7.0)],
        runner=TrialRunner(step=Jumping(memory, jumps), memory=memory, make_batch=lambda bucket, size: (bucket, size)),
        memory=memory,
        budget_bytes=BUDGET_BYTES,
        resident_bytes=0,
        gradient_bytes=0,
        headroom_bytes=LIMIT_BYTES - BUDGET_BYTES,
        max_size=100_000,
        num_soak_steps=num_soak_steps,
        on_trial=lambda trial, bucket: trials.append(trial),
    )
    assert found.num_trials + found.num_soak_steps == len(trials)
    return found, trials[found.num_trials :]


def sizes(found: Measurement) -> list[int]:
    return [bucket.size for bucket in found.buckets]


@cache
def sizes_alone() -> list[int]:
    """What the search finds, without a soak."""
    return sizes(soaked(CpuMemory(limit_bytes=LIMIT_BYTES), num_soak_steps=0)[0])


def test_without_offenders_the_soak_takes_two_passes_in_shuffled_order(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found, soak = soaked(CpuMemory(limit_bytes=LIMIT_BYTES))
    assert (found.num_ooms, found.num_retries, found.num_soak_steps) == (0, 0, 6)
    assert sorted(trial.bucket for trial in soak[:3]) == sorted(trial.bucket for trial in soak[3:]) == [0, 1, 2]
    assert [trial.size for trial in sorted(soak[:3], key=lambda trial: trial.bucket)] == sizes(found)
    assert "soak" not in caplog.text


@settings(deadline=None, max_examples=6)
@given(jumps=st.tuples(*[st.sampled_from([0.0, 0.0, 0.02, 0.08, 0.15])] * 3))
def test_offenders_shrink_until_a_pass_over_all_buckets_is_clean(jumps: Any) -> None:
    found, soak = soaked(CpuMemory(limit_bytes=LIMIT_BYTES), jumps)
    last = sorted(soak[-3:], key=lambda trial: trial.bucket)
    assert [trial.bucket for trial in last] == [0, 1, 2]
    assert [trial.size for trial in last] == sizes(found)
    assert all(trial.status == "fits" for trial in last)
    assert found.num_ooms == sum(trial.status == "oom" for trial in soak)
    for k, (before, size) in enumerate(zip(sizes_alone(), sizes(found), strict=True)):
        room = BUDGET_BYTES / PER_EXAMPLE_BYTES[k] / (1 + jumps[k])
        assert size <= room
        assert size >= min(before, 0.95 * room)


def test_an_offender_is_told_with_its_size_before_and_after(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found, _ = soaked(CpuMemory(limit_bytes=LIMIT_BYTES), (0.0, 0.0, 0.04))
    before, after = sizes_alone()[2], found.buckets[2].size
    assert after < before
    assert f"bucket 2: size {before} ran out of memory in the soak; going on with {after}" in caplog.messages


def test_a_retry_of_the_allocator_is_an_offence_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found, soak = soaked(Retrying(2))
    assert (found.num_ooms, found.num_retries) == (0, 2)
    assert "made the allocator retry in the soak; going on with" in caplog.text
    offenders = {trial.bucket for trial in soak if trial.usage.num_retries}
    for k in range(3):
        assert (sizes(found)[k] < sizes_alone()[k]) == (k in offenders)
    assert not any(trial.usage.num_retries for trial in soak[-3:])


def test_a_soak_that_never_comes_clean_ends_with_its_steps() -> None:
    found, soak = soaked(Retrying(1000), num_soak_steps=20)
    assert len(soak) == found.num_soak_steps == 20
    assert all(size > 0 for size in sizes(found))
