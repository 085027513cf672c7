from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SpeechModel, Step, batch_of

from lhotse_oomfit.errors import CalibrationError
from lhotse_oomfit.memory import CudaMemory, MemoryBackend, backend_for
from lhotse_oomfit.trial import TrialRunner

MIB = 1024**2
ROOT = Path(__file__).parents[2]


@pytest.fixture
def card() -> MemoryBackend:
    backend = backend_for("cuda", memory_limit=None)
    backend.release()
    return backend


def zeros(mib: int) -> torch.Tensor:
    return torch.zeros(mib * MIB, dtype=torch.uint8, device="cuda")


def test_the_peak_is_that_of_the_region_with_what_was_there_before(card: MemoryBackend) -> None:
    kept = zeros(64)
    zeros(512)  # an earlier, higher peak
    resident_bytes = torch.cuda.memory_allocated()
    with card.measure() as usage:
        inside = zeros(128)
        assert usage().allocated_bytes == resident_bytes + 128 * MIB
        del inside
        zeros(96)
    assert usage().allocated_bytes == resident_bytes + 128 * MIB
    assert usage().reserved_bytes >= usage().allocated_bytes
    assert (usage().num_ooms, usage().num_retries) == (0, 0)
    del kept


def test_seconds_are_the_cards(card: MemoryBackend) -> None:
    with card.measure() as usage:
        torch.cuda._sleep(int(2e8))  # about a tenth of a second, which the host doesn't wait for
    assert usage().seconds > 0.02
    assert usage() == usage()


def test_seconds_of_a_trial_leave_out_the_time_that_building_its_batch_takes(card: MemoryBackend) -> None:
    class Sleeping:
        def forward_backward(self, batch: torch.Tensor) -> None:
            torch.cuda._sleep(int(1e8))

        def optimizer_step(self) -> None: ...

        def zero_grad(self) -> None: ...

    def make_batch(bucket: int, size: int) -> torch.Tensor:
        torch.cuda._sleep(int(4e9))  # about two seconds
        return zeros(size)

    runner = TrialRunner(step=Sleeping(), memory=card, make_batch=make_batch)
    assert 0.02 < runner.run(0, 4).usage.seconds < 0.6


def test_a_failed_allocation_counts_as_out_of_memory_and_a_late_one_as_a_retry(card: MemoryBackend) -> None:
    limit_bytes = torch.cuda.memory_reserved() + 256 * MIB
    with card.cap(limit_bytes):
        with pytest.raises(torch.OutOfMemoryError), card.measure() as usage:
            zeros(512)
        assert usage().num_ooms == 1
        zeros(200)  # stays in the cache, as blocks of a size that the next one can't use
        with card.measure() as usage:
            zeros(230)
        assert (usage().num_ooms, usage().num_retries) in ((0, 1), (0, 0))  # expandable segments grow instead
    with card.measure() as usage:
        zeros(512)
    assert usage().num_ooms == 0


def test_a_cap_gives_way_to_the_former_one(card: MemoryBackend) -> None:
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        with card.cap(total_bytes // 4):
            if hasattr(torch.cuda.memory, "get_per_process_memory_fraction"):
                assert torch.cuda.memory.get_per_process_memory_fraction() == pytest.approx(0.25, rel=1e-6)
        if hasattr(torch.cuda.memory, "get_per_process_memory_fraction"):
            assert torch.cuda.memory.get_per_process_memory_fraction() == pytest.approx(0.5)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_measurement_inside_another_is_refused(card: MemoryBackend) -> None:
    with card.measure(), pytest.raises(CalibrationError, match="must not run inside another one"), card.measure():
        pass


def test_memory_that_this_process_holds_counts_as_free_for_it(card: MemoryBackend) -> None:
    before = card.budget(1.0).free_bytes
    kept = zeros(1024)
    assert card.budget(1.0).free_bytes == pytest.approx(before, abs=64 * MIB)
    assert card.budget(1.0).bytes <= before - 256 * MIB  # the reserve for what lies outside the allocator
    assert card.budget(0.3).bytes == int(0.3 * card.budget(0.3).total_bytes)
    del kept


def test_a_cap_on_the_allocator_leaves_room_beside_it_without_a_reserve(card: MemoryBackend) -> None:
    quarter_bytes = card.budget(1.0).total_bytes // 4
    with card.cap(quarter_bytes):
        for fraction in (0.25, 1.0):
            assert card.budget(fraction).reserve_bytes == 0
            assert card.budget(fraction).bytes == pytest.approx(quarter_bytes, abs=1024)


def test_the_card_tells_what_it_is(card: MemoryBackend) -> None:
    fields = card.fields()
    assert fields["device"] == torch.cuda.get_device_name()
    assert int(fields["device_memory"]) == torch.cuda.get_device_properties(0).total_memory
    assert fields["compute_capability"].count(".") == 1
    assert card.name == "cuda"
    assert card.device == torch.device("cuda", torch.cuda.current_device())


PREPARE = """
    import logging, torch
    from lhotse_oomfit.memory import backend_for
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    model = torch.nn.Linear(2000, 2000, device="cuda")
    print(backend_for("cuda", memory_limit=None).prepare())
    print(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
    kept = [torch.zeros(n * 2**20, dtype=torch.uint8, device="cuda") for n in (30, 50, 70)]
    model(torch.zeros(3, 2000, device="cuda")).sum().backward()
    print(any(s["is_expandable"] for s in torch.cuda.memory_snapshot()))
"""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (None, ["expandable_segments", "True", "True"]),
        ("expandable_segments:True", ["expandable_segments", "True", "True"]),
        ("max_split_size_mb:512", ["default", "False", "False"]),
        ("backend:cudaMallocAsync", None),
    ],
)
def test_expandable_segments_are_switched_on_unless_the_user_set_something(
    settings: str | None, expected: list[str] | None
) -> None:
    env = {k: v for k, v in os.environ.items() if "ALLOC_CONF" not in k} | {"PYTHONPATH": str(ROOT)}
    if settings is not None:
        env["PYTORCH_CUDA_ALLOC_CONF"] = settings
    program = textwrap.dedent(PREPARE)
    if expected is None:  # the statistics of that backend differ
        program, expected = program.rpartition("print(torch")[0].partition("    print(torch")[0], ["cudaMallocAsync"]
        program = "\n".join(line for line in program.splitlines() if "_snapshot" not in line)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == expected
    if settings is None:
        assert "switched on the CUDA allocator's expandable segments" in done.stderr
    if settings == "max_split_size_mb:512":
        assert "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512 is kept as it is" in done.stderr


def runner_on(card: MemoryBackend, **kwargs: Any) -> tuple[TrialRunner, SpeechModel]:
    torch.manual_seed(0)
    model = SpeechModel().cuda()
    step = Step(model, torch.optim.AdamW(model.parameters()))
    runner = TrialRunner(
        step=step, memory=card, make_batch=lambda bucket, size: batch_of(size, 200, device="cuda"), **kwargs
    )
    return runner, model


def allocated_without_workspaces() -> int:
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def test_after_running_out_of_memory_everything_is_free_again(card: MemoryBackend) -> None:
    runner, model = runner_on(card)
    assert runner.run(0, 8, with_optimizer=True).status == "fits"
    baseline_bytes = allocated_without_workspaces()
    with card.cap(torch.cuda.memory_reserved() + 400 * MIB):
        trial = runner.run(0, 20_000)
        assert trial.status == "oom"
        assert trial.usage.num_ooms == 1
        assert "CUDA out of memory" in str(trial.error)
        assert allocated_without_workspaces() == baseline_bytes
        assert all(p.grad is None for p in model.parameters())
        assert runner.run(0, 8).status == "fits"
    assert allocated_without_workspaces() == baseline_bytes


def test_the_same_trial_twice_has_the_same_peak(card: MemoryBackend) -> None:
    runner, _ = runner_on(card)
    runner.run(0, 64)
    first, second = runner.run(0, 64), runner.run(0, 64)
    assert first.usage.allocated_bytes == second.usage.allocated_bytes
    assert first.usage.reserved_bytes == pytest.approx(second.usage.reserved_bytes, abs=32 * MIB)


def test_more_elements_than_an_index_can_count_is_a_ceiling(card: MemoryBackend) -> None:
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < 40 * 1024 * MIB:
        pytest.skip("needs 40 GiB")

    class Depthwise:
        def forward_backward(self, x: torch.Tensor) -> None:
            with torch.backends.cudnn.flags(enabled=False):  # torch's own kernel counts in 32 bits
                torch.nn.functional.conv2d(x, torch.ones(2, 1, 3, 3, device="cuda", dtype=x.dtype), groups=2)

        def optimizer_step(self) -> None: ...

        def zero_grad(self) -> None: ...

    runner = TrialRunner(
        step=Depthwise(),
        memory=card,
        make_batch=lambda bucket, size: torch.zeros(size, 2, 1024, 512, dtype=torch.float16, device="cuda"),
    )
    assert runner.run(0, 2).status == "fits"
    trial = runner.run(0, 2100)
    assert trial.status == "ceiling", trial.error


def test_a_backend_of_another_card_leaves_the_current_device_alone() -> None:
    index = torch.cuda.device_count() - 1
    backend = CudaMemory(torch.device("cuda", index))
    with backend.measure():
        pass
    backend.release()
    assert torch.cuda.current_device() == 0
