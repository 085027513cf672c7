"""What a process may use of a card, and both kinds of segments, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_asr import TinyDataset, TinyModel, tiny_optimizer, tiny_sampler

from lhotse_oomfit import calibrate
from lhotse_oomfit.errors import CalibrationError
from lhotse_oomfit.memory import backend_for

MIB = 1024**2
FOLDERS = [Path(__file__).parents[2], Path(__file__).parents[1], Path(__file__).parent]

CALIBRATION = """
    import json, logging, sys
    import torch
    from lhotse_oomfit.memory import backend_for
    from test_cuda_calibrate import find, start, tiny_sampler, train_shuffled

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    card = backend_for("cuda")
    with card.cap(torch.cuda.memory_reserved() + 256 * 2**20):
        torch.empty(200 * 2**20, dtype=torch.uint8, device="cuda")
        with card.measure() as usage:
            torch.empty(230 * 2**20, dtype=torch.uint8, device="cuda")
    retried = [usage().num_retries, usage().num_ooms]
    card.release()
    model, optimizer, scheduler = start(int(sys.argv[1]))
    profile = find(model, optimizer, scheduler, tiny_sampler())
    whole_bytes = int(profile.budget_bytes / (0.88 if profile.allocator == "default" else 1.0))
    trained = train_shuffled(profile, model, optimizer, whole_bytes, 80)
    print(json.dumps({
        "allocator": profile.allocator,
        "fingerprint": profile.fingerprint.fields["allocator"],
        "retried": retried,
        "ooms": profile.num_ooms,
        "soak": profile.num_soak_steps,
        "budget": profile.budget_bytes,
        "trained": trained,
    }))
"""


def calibrated(settings: str | None, *, num_layers: int) -> tuple[dict[str, Any], str]:
    """What a process with these settings of the allocator found for a model of so many layers, and its log."""
    env = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    env["PYTHONPATH"] = os.pathsep.join([*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")])
    if settings is not None:
        env["PYTORCH_CUDA_ALLOC_CONF"] = settings
    command = [sys.executable, "-c", textwrap.dedent(CALIBRATION), str(num_layers)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("num_layers", [1, 6])
def test_on_the_default_allocator_sizes_are_smaller_and_hold_and_one_line_says_what_it_costs(num_layers: int) -> None:
    found, log = calibrated("expandable_segments:False", num_layers=num_layers)
    assert found["allocator"] == found["fingerprint"] == "default"
    assert found["budget"] == pytest.approx(0.8 * 8 * 1024 * MIB * 0.88, rel=0.01)
    assert log.count("so 12% of the memory budget are kept free against fragmentation") == 1
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True gets them back" in log
    assert found["retried"] == [1, 0]  # the cached 200 MiB had to go before 230 MiB were there
    assert found["soak"] > 0
    # A single layer has few tensors, each a twelfth of the budget: how much these fragment, the soak must find out.
    assert found["ooms"] == 0 or num_layers == 1
    assert found["trained"]["ooms"] == 0


def test_without_settings_expandable_segments_are_switched_on_and_sizes_fill_the_budget() -> None:
    found, log = calibrated(None, num_layers=1)
    assert found["allocator"] == found["fingerprint"] == "expandable_segments"
    assert "switched on the CUDA allocator's expandable segments" in log
    assert "12%" not in log
    assert found["budget"] == pytest.approx(0.8 * 8 * 1024 * MIB, rel=0.01)
    assert (found["soak"] > 0, found["ooms"], found["trained"]["ooms"]) == (True, 0, 0)


NEIGHBOUR = """
    import sys, torch
    kept = torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_what_another_process_holds_is_not_free_for_this_one() -> None:
    card = backend_for("cuda")
    card.release()
    alone = card.budget(1.0)
    assert alone.bytes <= alone.free_bytes < alone.total_bytes
    program = textwrap.dedent(NEIGHBOUR)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as neighbour:
        try:
            assert neighbour.stdout is not None
            assert neighbour.stdout.readline() == "ready\n"
            beside = card.budget(1.0)
            assert beside.free_bytes <= alone.free_bytes - 3 * 1024 * MIB
            assert beside.bytes <= alone.bytes - 3 * 1024 * MIB
            assert card.budget(0.3).bytes == int(0.3 * alone.total_bytes)  # the fraction is the tighter limit there
        finally:
            neighbour.communicate("\n", timeout=60)
    assert card.budget(1.0).free_bytes > beside.free_bytes + 3 * 1024 * MIB


def test_an_optimizer_whose_own_step_exceeds_the_budget_is_refused_with_the_reason() -> None:
    model = TinyModel()
    model.large = torch.nn.Linear(8192, 16384)  # 512 MiB, four times that in an optimizer step
    model.cuda()
    optimizer, scheduler = tiny_optimizer(model)
    held = torch.cuda.memory_allocated()
    with pytest.raises(
        CalibrationError, match=r"one step of the optimizer, without any batch, takes .* of a budget of"
    ):
        calibrate(
            tiny_sampler(),
            TinyDataset(),
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            training_step=lambda model, batch: model.loss({k: v.cuda() for k, v in batch.items()}),
            memory_limit="3GiB",
            memory_fraction=0.6,
            cache=False,
            progress=False,
        )
    assert len(optimizer.state) == 0
    assert torch.cuda.memory_allocated() == held
