"""Errors of a real card: what they mean, and that a trial that ran out of memory gives everything back."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lhotse_oomfit.memory import MemoryBackend, backend_for
from lhotse_oomfit.snapshot import leave_no_trace
from lhotse_oomfit.trial import TrialRunner

MIB = 1024**2
ROOT = Path(__file__).parents[2]
WIDTH = 512


@pytest.fixture
def card() -> MemoryBackend:
    backend = backend_for("cuda")
    backend.release()
    return backend


class Blocks(nn.Module):
    """Residual blocks, each checkpointed if asked."""

    def __init__(self, *, checkpointing: str | None = None, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(num_blocks)
        )
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpointing is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return x


class GreedyBackward(torch.autograd.Function):
    """Asks for a GiB in the backward pass, which runs in a thread of autograd's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if len(grad) > 1000:
            torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
        return grad * ctx.saved_tensors[0]


class GreedyOptimizer(torch.optim.SGD):
    """Asks for a GiB in its step when told to."""

    greedy = False

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.greedy:
            torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")


class Step:
    def __init__(self, model: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        self.model, self.forward = model, model if forward is None else forward
        self.optimizer = GreedyOptimizer(model.parameters(), lr=1e-3, momentum=0.9)

    def forward_backward(self, batch: torch.Tensor) -> None:
        self.forward(batch).square().mean().backward()

    def optimizer_step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


def held_bytes(card: MemoryBackend) -> tuple[int, int]:
    """What is allocated and reserved, without cuBLAS's workspaces and the cache."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    card.release()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def batch_maker(bucket: int, size: int) -> torch.Tensor:
    """``size`` rows of ones; bucket 9 asks for far more than that."""
    rows = torch.ones(size, WIDTH, device="cuda")
    return (rows if bucket != 9 else rows.expand(2048, -1, -1).contiguous()).requires_grad_()


MODELS: dict[str, Callable[[], Step]] = {
    "forward": lambda: Step(Blocks().cuda()),
    "backward": lambda: with_greedy_backward(Blocks().cuda()),
    "checkpointed": lambda: Step(Blocks(checkpointing="non_reentrant", num_blocks=1).cuda()),
    "checkpointed_reentrant": lambda: Step(Blocks(checkpointing="reentrant", num_blocks=1).cuda()),
    "optimizer": lambda: Step(Blocks().cuda()),
    "batch": lambda: Step(Blocks().cuda()),
}


def with_greedy_backward(model: nn.Module) -> Step:
    return Step(model, lambda x: GreedyBackward.apply(model(x)))


@pytest.mark.parametrize("place", MODELS)
def test_out_of_memory_anywhere_in_a_step_gives_back_every_byte(card: MemoryBackend, place: str) -> None:
    step = MODELS[place]()
    runner = TrialRunner(step=step, memory=card, make_batch=batch_maker)
    assert runner.run(0, 64, with_optimizer=True).status == "fits"
    bucket, size = {"forward": (0, 100_000), "backward": (0, 1500), "batch": (9, 200)}.get(place, (0, 1))
    limit_bytes = torch.cuda.memory_reserved() + 512 * MIB
    if place == "optimizer":
        step.optimizer.greedy = True
    elif place.startswith("checkpointed"):
        # The forward pass keeps only the block's input; its inside is computed again in the backward pass.
        size = 40_000
        without, whole = forward_only(card, step).run(0, size), runner.run(0, size)
        assert without.status == whole.status == "fits"
        assert whole.usage.allocated_bytes > without.usage.allocated_bytes + 200 * MIB
        limit_bytes = without.usage.reserved_bytes + 64 * MIB
    before = held_bytes(card)
    with card.cap(limit_bytes):
        trial = runner.run(bucket, size, with_optimizer=True)
        assert trial.status == "oom", trial
        assert trial.usage.num_ooms == 1
        assert "CUDA out of memory" in str(trial.error)
        assert held_bytes(card) == before
        step.optimizer.greedy = False
        assert runner.run(0, 1).status == "fits"
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert held_bytes(card) == before


def forward_only(card: MemoryBackend, step: Step) -> TrialRunner:
    """Runs only forward passes, as far as they keep what a backward pass would need."""

    class Forward:
        def forward_backward(self, batch: torch.Tensor) -> None:
            step.forward(batch).square().mean()

        def optimizer_step(self) -> None: ...

        def zero_grad(self) -> None: ...

    return TrialRunner(step=Forward(), memory=card, make_batch=batch_maker)


def test_optimizer_state_that_does_not_fit_is_given_back_with_the_snapshot(card: MemoryBackend) -> None:
    model = nn.ModuleList(nn.Linear(4096, 4096, device="cuda") for _ in range(4))  # 64 MiB each
    optimizer = torch.optim.AdamW(model.parameters())

    class Wake:
        def forward_backward(self, batch: Any) -> None:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)

        def optimizer_step(self) -> None:
            optimizer.step()

        def zero_grad(self) -> None:
            optimizer.zero_grad(set_to_none=True)

    runner = TrialRunner(step=Wake(), memory=card, make_batch=lambda bucket, size: None)
    before = held_bytes(card)
    with leave_no_trace(model, [optimizer]), card.cap(torch.cuda.memory_reserved() + 450 * MIB):
        assert runner.run(0, 1).status == "fits"  # the gradients alone
        assert runner.run(0, 1, with_optimizer=True).status == "oom"
        assert len(optimizer.state) > 0  # of some parameters
    assert len(optimizer.state) == 0
    assert held_bytes(card) == before


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch's own code
def test_out_of_memory_inside_a_compiled_module_gives_back_every_byte(card: MemoryBackend) -> None:
    torch._dynamo.reset()
    model = Blocks(num_blocks=1).cuda()
    step = Step(model, torch.compile(model))
    runner = TrialRunner(step=step, memory=card, make_batch=batch_maker)
    for size in (64, 96):  # the second makes the graph one for all sizes
        assert runner.run(0, size, with_optimizer=True).status == "fits"
    before = held_bytes(card)
    with card.cap(torch.cuda.memory_reserved() + 128 * MIB):
        trial = runner.run(0, 100_000)
    assert trial.status == "oom"
    assert "CUDA out of memory" in str(trial.error)
    assert held_bytes(card) == before
    assert runner.run(0, 64).status == "fits"
    assert held_bytes(card) == before
    torch._dynamo.reset()


def test_a_workspace_that_finds_no_room_is_out_of_memory(card: MemoryBackend) -> None:
    """cuBLAS takes a workspace from the allocator at its first product; so do cuDNN's plans."""
    a = torch.ones(WIDTH, WIDTH, device="cuda")
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)

    class Product:
        def forward_backward(self, batch: Any) -> None:
            torch.mm(a, a, out=out)

        def optimizer_step(self) -> None: ...

        def zero_grad(self) -> None: ...

    runner = TrialRunner(step=Product(), memory=card, make_batch=lambda bucket, size: None)
    before = held_bytes(card)
    with card.cap(torch.cuda.memory_reserved()):
        assert runner.run(0, 1).status == "oom"
    assert held_bytes(card) == before
    assert runner.run(0, 1).status == "fits"


FULL_CARD = """
    import torch
    from lhotse_oomfit.memory import backend_for
    from lhotse_oomfit.trial import TrialRunner

    card = backend_for("cuda")
    card.prepare()
    a = torch.ones(512, 512, device="cuda")
    out = torch.zeros_like(a)

    class Product:
        def forward_backward(self, size):
            if size > 1:
                torch.mm(a, a, out=out)
        def optimizer_step(self): ...
        def zero_grad(self): ...

    runner = TrialRunner(step=Product(), memory=card, make_batch=lambda bucket, size: size)
    print(runner.run(0, 1).status)
    kept = [torch.empty(torch.cuda.mem_get_info()[0] - 600 * 2**20, dtype=torch.uint8, device="cuda")]
    for mib in (128, 32, 8, 2):
        while True:
            try:
                kept.append(torch.empty(mib * 2**20, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break

    trial = runner.run(0, 2)
    print(trial.status, trial.error)
    kept.clear()
    card.release()
    print(runner.run(0, 2).status, out[0, 0].item())
"""


def in_a_process(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )


def test_a_handle_of_cublas_on_a_full_card_is_out_of_memory_and_works_afterwards() -> None:
    out, err = in_a_process(FULL_CARD).communicate(timeout=120)
    lines = out.splitlines()
    assert len(lines) == 3, err
    assert lines[0] == "fits"
    assert lines[1].startswith("oom "), lines
    assert lines[2] == "fits 512.0"


BROKEN = """
    import os, sys, torch
    from lhotse_oomfit.memory import backend_for
    from lhotse_oomfit.snapshot import leave_no_trace
    from lhotse_oomfit.trial import TrialRunner

    class Step:
        def forward_backward(self, batch):
            FAULT
        def optimizer_step(self): ...
        def zero_grad(self): ...

    model = torch.nn.BatchNorm1d(3).cuda()
    runner = TrialRunner(step=Step(), memory=backend_for("cuda"), make_batch=lambda bucket, size: None)
    try:
        with leave_no_trace(model):
            runner.run(3, 17)
    except RuntimeError as error:
        print(str(error).partition("\\n")[0])
        print(getattr(error, "__notes__", ["raised by a trial step with 17 examples of bucket 3"]))
    sys.stdout.flush()
    os._exit(0)  # the context is lost, and with it an orderly end
"""
ASSERT = 'torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]'
WILD_POINTER = (
    'torch.tensor([], device="cuda").set_(torch._C._construct_storage_from_data_pointer('
    'int(4096), torch.device("cuda", 0), int(4096))).sum()'
)
FAULTS = {
    "assert": (f"{ASSERT}.sum().item()", "device-side assert triggered"),
    "assert_found_late": (f"self.kept = {ASSERT}", "device-side assert triggered"),
    "illegal_access": (f"{WILD_POINTER}.item()", "illegal memory access"),
    "illegal_access_beside_an_oom": (
        f'self.kept = {WILD_POINTER}; torch.empty(2**50, device="cuda")', "illegal memory access"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def broken() -> Iterator[dict[str, subprocess.Popen[str]]]:
    processes = {name: in_a_process(BROKEN.replace("FAULT", fault)) for name, (fault, _) in FAULTS.items()}
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_context_is_raised_as_it_is_with_bucket_and_size(broken: Any, fault: str) -> None:
    out, err = broken[fault].communicate(timeout=120)
    lines = out.splitlines()
    assert len(lines) == 2, err
    assert FAULTS[fault][1] in lines[0]
    assert lines[1] == "['raised by a trial step with 17 examples of bucket 3']"
