"""The soak: what only shows in a row of full-size steps under a hard cap shrinks, and the last pass is clean."""

from __future__ import annotations

import itertools
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
    memory: CpuMemory,
    jumps: tuple[float, ...] = (0.0, 0.0, 0.0),
    num_soak_steps: int = 90,
    step: Jumping | None = None,
    fragmenting_bytes: int = 0,
) -> tuple[Measurement, list[Trial]]:
    """The outcome, and the trials of the soak."""
    trials: list[Trial] = []
    found = measure_sizes(
        [BucketShape(input_len=length) for length in (3.0, 4.0, 7.0)],
        runner=TrialRunner(
            step=step or Jumping(memory, jumps), memory=memory, make_batch=lambda bucket, size: (bucket, size)
        ),
        memory=memory,
        budget_bytes=BUDGET_BYTES,
        resident_bytes=0,
        gradient_bytes=0,
        headroom_bytes=LIMIT_BYTES - BUDGET_BYTES,
        max_size=100_000,
        num_soak_steps=num_soak_steps,
        fragmenting_bytes=fragmenting_bytes,
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


def test_a_soak_that_never_comes_clean_ends_with_its_steps_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    found, soak = soaked(Retrying(1000), num_soak_steps=20)
    assert len(soak) == found.num_soak_steps == 20
    assert all(size > 0 for size in sizes(found))
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "the soak ended before 3 of 3 buckets had a clean step at their size (0, 1, 2), which may fail in training: "
        "its 20 steps ran out, or not even one example is clean; raise num_soak_steps or lower memory_fraction"
    ]


def test_steps_for_less_than_one_pass_are_told(caplog: pytest.LogCaptureFixture) -> None:
    _, soak = soaked(CpuMemory(limit_bytes=LIMIT_BYTES), num_soak_steps=2)
    (left,) = {0, 1, 2} - {trial.bucket for trial in soak}
    assert f"the soak ended before 1 of 3 buckets had a clean step at their size ({left})" in caplog.text


def test_steps_for_one_clean_pass_are_told_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    soaked(CpuMemory(limit_bytes=LIMIT_BYTES), num_soak_steps=3)
    assert not caplog.records


def test_a_repeated_offender_shrinks_in_growing_steps() -> None:
    _, soak = soaked(CpuMemory(limit_bytes=LIMIT_BYTES), (0.5, 0.0, 0.0))
    tried = [trial.size for trial in soak if trial.bucket == 0]
    ratios = [after / before for before, after in itertools.pairwise(tried)]
    assert ratios[:5] == pytest.approx([0.97, 0.952, 0.923, 0.88, 0.88], abs=0.008)
    assert soak[-1].status == "fits"


class Fragmenting(Jumping):
    """Under the hard cap, needs this much more after a step of another bucket in the same order."""

    def __init__(self, memory: CpuMemory, pair: tuple[int, int], more: float) -> None:
        super().__init__(memory, (0.0, 0.0, 0.0))
        self.pair, self.more = pair, more
        self.before = -1

    def forward_backward(self, batch: tuple[int, int]) -> None:
        pair, self.before = (self.before, batch[0]), batch[0]
        self.jumps = tuple(self.more if pair == self.pair and k == batch[0] else 0.0 for k in range(3))
        super().forward_backward(batch)


def test_an_allocator_that_fragments_is_soaked_for_longer() -> None:
    found, _ = soaked(CpuMemory(limit_bytes=LIMIT_BYTES), fragmenting_bytes=100 * MIB)
    assert (found.num_ooms, found.num_soak_steps) == (0, 24)


@pytest.mark.parametrize("pair", list(itertools.permutations(range(3), 2)), ids=str)
def test_where_the_order_of_shapes_runs_out_of_memory_all_sizes_shrink_until_two_passes_are_clean(
    pair: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    memory = CpuMemory(limit_bytes=LIMIT_BYTES)
    with caplog.at_level(logging.INFO):
        found, soak = soaked(memory, step=Fragmenting(memory, pair, 0.2), fragmenting_bytes=100 * MIB)
    assert found.num_ooms >= 1
    assert "ran out of memory in the soak; going on with" in caplog.text
    assert ", and with less in all others too" in caplog.text
    assert all(size < alone for size, alone in zip(sizes(found), sizes_alone(), strict=True))
    last = max(n for n, trial in enumerate(soak) if trial.status == "oom")
    assert len(soak) - 1 - last >= 6  # two whole passes


def test_another_limit_than_memory_is_told_as_such(caplog: pytest.LogCaptureFixture) -> None:
    class Indexing(Jumping):
        def forward_backward(self, batch: tuple[int, int]) -> None:
            if batch[1] > 250 and self.memory.budget(1.0).free_bytes < LIMIT_BYTES:
                raise RuntimeError("Expected canUse32BitIndexMath(input) to be true, but got false.")
            super().forward_backward(batch)

    memory = CpuMemory(limit_bytes=LIMIT_BYTES)
    with caplog.at_level(logging.INFO):
        found, _ = soaked(memory, step=Indexing(memory, (0.0, 0.0, 0.0)))
    assert found.buckets[0].size <= 250 < sizes_alone()[0]
    assert found.num_ooms == 0
    assert f"bucket 0: size {sizes_alone()[0]} met another limit than memory in the soak; going on with" in caplog.text
