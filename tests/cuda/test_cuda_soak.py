"""The soak on a card: what only shows in a row of full-size steps shrinks, and the last pass is clean."""

from __future__ import annotations

import logging
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from lhotse_oomfit.calibration import measure_sizes
from lhotse_oomfit.memory import backend_for
from lhotse_oomfit.search import BucketShape
from lhotse_oomfit.trial import Trial, TrialRunner

MIB = 1024**2
BUDGET_BYTES = 1024 * MIB
PER_EXAMPLE_BYTES = (3 * MIB, 4 * MIB, 7 * MIB)


class Jumping:
    """A step whose need per example is known; in the longest bucket it jumps by a share once the hard cap is there."""

    def __init__(self, jump: float) -> None:
        self.jump = jump
        self.num_steps_under_cap = 0

    def forward_backward(self, batch: tuple[int, int]) -> None:
        bucket, size = batch
        need_bytes = size * PER_EXAMPLE_BYTES[bucket]
        if torch.cuda.memory.get_per_process_memory_fraction() < 1.0:
            self.num_steps_under_cap += 1
            if bucket == 2:
                need_bytes = int(need_bytes * (1 + self.jump))
        torch.empty(need_bytes, dtype=torch.uint8, device="cuda")

    def optimizer_step(self) -> None: ...

    def zero_grad(self) -> None: ...


def soaked(jump: float) -> dict[str, Any]:
    """The outcome of a calibration in this process, which must have done nothing before: leftovers fragment."""
    card = backend_for("cuda")
    card.prepare()
    step = Jumping(jump)
    trials: list[Trial] = []
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lhotse_oomfit").addHandler(handler)
    logging.getLogger("lhotse_oomfit").setLevel(logging.INFO)
    found = measure_sizes(
        [BucketShape(input_len=length) for length in (3.0, 4.0, 7.0)],
        runner=TrialRunner(step=step, memory=card, make_batch=lambda bucket, size: (bucket, size)),
        memory=card,
        budget_bytes=torch.cuda.memory_reserved() + BUDGET_BYTES,
        resident_bytes=torch.cuda.memory_allocated(),
        gradient_bytes=0,
        headroom_bytes=4096 * MIB,
        max_size=100_000,
        num_soak_steps=60,
        on_trial=lambda trial, bucket: trials.append(trial),
    )
    assert torch.cuda.memory.get_per_process_memory_fraction() == 1.0
    assert len(trials) - found.num_trials == found.num_soak_steps == step.num_steps_under_cap
    return {
        "sizes": [bucket.size for bucket in found.buckets],
        "num_ooms": found.num_ooms,
        "soak": trials[found.num_trials :],
        "log": "\n".join(lines),
    }


@pytest.mark.parametrize(("jump", "num_ooms"), [(0.0, 0), (0.08, 1)])
def test_an_offender_shrinks_until_a_pass_is_clean(jump: float, num_ooms: int) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        found = other.submit(soaked, jump).result(timeout=120)
    sizes, soak = found["sizes"], found["soak"]
    longest = BUDGET_BYTES / PER_EXAMPLE_BYTES[2]
    assert longest / (1 + jump) * 0.93 < sizes[2] <= longest / (1 + jump)
    assert sizes[0] == pytest.approx(BUDGET_BYTES / PER_EXAMPLE_BYTES[0], rel=0.05)
    assert found["num_ooms"] >= num_ooms
    if jump:
        assert "bucket 2: size" in found["log"]
        assert "in the soak; going on with" in found["log"]
    else:
        assert found["num_ooms"] == 0
        assert "soak" not in found["log"]
        assert len(soak) == 6  # two passes
    assert len(soak) < 60
    assert sorted(trial.bucket for trial in soak[-3:]) == [0, 1, 2]
    assert all(trial.status == "fits" and not trial.usage.num_retries for trial in soak[-3:])
    assert [trial.size for trial in sorted(soak[-3:], key=lambda trial: trial.bucket)] == sizes
