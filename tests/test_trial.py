from __future__ import annotations

import gc
import itertools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import SpeechModel, Step, batch_of
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lhotse_oomfit.errors import CalibrationError
from lhotse_oomfit.memory import Budget, Usage, backend_for, live_tensors
from lhotse_oomfit.trial import TrialRunner, Verdict, judge

CUDA_SUFFIX = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)

OOM_MESSAGES = {
    "cuda": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB",
    "accelerator": "CUDA error: out of memory" + CUDA_SUFFIX,
    "hip": "HIP out of memory. Tried to allocate 20.00 MiB",
    "hip_error": "HIP error: out of memory",
    "xpu": "XPU out of memory. Tried to allocate 20.00 MiB",
    "mps": "MPS backend out of memory (MPS allocated: 1.00 GB, other allocations: 2.00 GB, max allowed: 9.07 GB)",
    "driver": "CUDA driver error: out of memory",
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cudnn": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cudnn_9": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cufft": "cuFFT error: CUFFT_ALLOC_FAILED",
    "cusolver": "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "triton": "Triton Error [CUDA]: out of memory",
    "numba": "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
}
EVIDENCE_MESSAGES = {
    "cufft": "cuFFT error: CUFFT_INTERNAL_ERROR",
    "cudnn": "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "algorithm": "Unable to find a valid cuDNN algorithm to run convolution",
    "handle": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
}
CEILING_MESSAGES = {
    "32_bit": "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false.",
    "int32": "input tensor is too large to be indexed with int32",
}
HOST_MESSAGES = {
    "allocator": "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
    "to allocate 80000000000000 bytes. Error code 12 (Cannot allocate memory)",
    "bad_alloc": "std::bad_alloc",
}
OTHER_MESSAGES = {
    "illegal_access": "CUDA error: an illegal memory access was encountered" + CUDA_SUFFIX,
    "assert": "CUDA error: device-side assert triggered" + CUDA_SUFFIX,
    "triton": "out of resource: shared memory, Required: 262144, Hardware limit: 232448. Reducing block sizes or "
    "`num_stages` may help.",
    "batch_norm": "Expected more than 1 value per channel when training, got input size torch.Size([1, 24])",
    "nccl": "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2395, unhandled cuda error, "
    "NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 "
    "'out of memory'",
    "shape": "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
    "empty": "",
}


def named(messages: dict[str, str]) -> Any:
    return pytest.mark.parametrize("message", messages.values(), ids=messages.keys())


@named(OOM_MESSAGES)
def test_out_of_memory_is_told_by(message: str) -> None:
    assert judge(RuntimeError(message)) is Verdict.OOM


def test_torchs_own_error_is_out_of_memory_whatever_it_says() -> None:
    assert judge(torch.OutOfMemoryError()) is Verdict.OOM
    assert judge(torch.OutOfMemoryError("one", "two")) is Verdict.OOM
    assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="came with torch 2.8")
def test_an_accelerators_error_is_out_of_memory_by_its_text_only() -> None:
    assert judge(torch.AcceleratorError("CUDA error: out of memory" + CUDA_SUFFIX)) is Verdict.OOM
    assert judge(torch.AcceleratorError("CUDA error: invalid argument" + CUDA_SUFFIX)) is Verdict.NOT_MEMORY


@named(EVIDENCE_MESSAGES)
def test_only_with_evidence_it_is_out_of_memory(message: str) -> None:
    assert judge(RuntimeError(message)) is Verdict.NOT_MEMORY
    assert judge(RuntimeError(message), evidence=True) is Verdict.OOM


@named(CEILING_MESSAGES)
def test_an_index_limit_is_a_ceiling(message: str) -> None:
    assert judge(RuntimeError(message)) is Verdict.CEILING


def test_a_launch_grid_over_its_limit_is_a_ceiling_only_with_evidence() -> None:
    error = RuntimeError("CUDA error: invalid configuration argument" + CUDA_SUFFIX)
    assert judge(error) is Verdict.NOT_MEMORY
    assert judge(error, evidence=True) is Verdict.CEILING


@named(HOST_MESSAGES)
def test_the_hosts_memory_is_told_apart(message: str) -> None:
    assert judge(RuntimeError(message)) is Verdict.HOST_OOM


def test_pythons_memory_error_is_the_hosts() -> None:
    assert judge(MemoryError()) is Verdict.HOST_OOM


@pytest.mark.parametrize("evidence", [False, True])
@named(OTHER_MESSAGES)
def test_never_about_memory(message: str, evidence: bool) -> None:
    assert judge(RuntimeError(message), evidence=evidence) is Verdict.NOT_MEMORY


def chained(outer: Exception, inner: Exception, *, cause: bool) -> Exception:
    """``outer``, as raised while ``inner`` was being handled."""
    outer.__context__ = inner
    if cause:
        outer.__cause__ = inner
    return outer


@pytest.mark.parametrize("cause", [True, False], ids=["cause", "context"])
def test_an_error_that_wraps_out_of_memory_is_out_of_memory(cause: bool) -> None:
    wrapped = chained(ValueError("the step failed"), torch.OutOfMemoryError("CUDA out of memory."), cause=cause)
    assert judge(wrapped) is Verdict.OOM
    twice = chained(KeyError("x"), wrapped, cause=not cause)
    assert judge(twice) is Verdict.OOM


def test_the_outermost_error_that_tells_decides() -> None:
    oom = torch.OutOfMemoryError("CUDA out of memory.")
    batch_norm = ValueError(OTHER_MESSAGES["batch_norm"])
    assert judge(chained(batch_norm, oom, cause=False)) is Verdict.NOT_MEMORY
    assert judge(chained(RuntimeError(CEILING_MESSAGES["int32"]), oom, cause=False)) is Verdict.CEILING


@pytest.mark.parametrize("name", ["illegal_access", "assert", "nccl"])
def test_what_breaks_the_process_decides_wherever_it_stands(name: str) -> None:
    broken = RuntimeError(OTHER_MESSAGES[name])
    assert judge(chained(torch.OutOfMemoryError("x"), broken, cause=True)) is Verdict.NOT_MEMORY
    assert judge(chained(broken, torch.OutOfMemoryError("x"), cause=False)) is Verdict.NOT_MEMORY


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_the_members_of_a_group_are_read() -> None:
    group = ExceptionGroup("both", [ValueError("x"), torch.OutOfMemoryError("y")])  # noqa: F821
    assert judge(group) is Verdict.OOM
    nested = ExceptionGroup("outer", [ExceptionGroup("inner", [group])])  # noqa: F821
    assert judge(chained(ValueError("the step failed"), nested, cause=True)) is Verdict.OOM
    broken = ExceptionGroup("both", [torch.OutOfMemoryError("y"), RuntimeError(OTHER_MESSAGES["assert"])])  # noqa: F821
    assert judge(broken) is Verdict.NOT_MEMORY


def test_circular_contexts_end() -> None:
    a, b = ValueError("a"), ValueError("b")
    a.__context__, b.__context__ = b, a
    assert judge(a) is Verdict.NOT_MEMORY


def test_what_was_being_handled_before_the_step_tells_nothing() -> None:
    earlier = torch.OutOfMemoryError("the user's own, earlier")
    bug = chained(ValueError("a bug"), earlier, cause=False)
    assert judge(bug) is Verdict.OOM
    assert judge(bug, outside=earlier) is Verdict.NOT_MEMORY


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interruption_is_never_about_memory(kind: type[BaseException]) -> None:
    interruption = kind()
    interruption.__context__ = torch.OutOfMemoryError("x")
    assert judge(interruption) is Verdict.NOT_MEMORY


# --- running trials ---------------------------------------------------------------------------------------------------


class CallableStep:
    """A step whose forward is any function of the batch."""

    def __init__(self, forward_backward: Callable[[Any], None]) -> None:
        self.forward_backward = forward_backward
        self.calls: list[str] = []

    def optimizer_step(self) -> None:
        self.calls.append("optimizer_step")

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")


class FakeCard:
    """A device that reports what it is told to; ``seconds`` go by until each reading."""

    name = "cuda"
    device = torch.device("cuda", 0)

    def __init__(self, **usage: Any) -> None:
        defaults: dict[str, Any] = {
            "allocated_bytes": 50, "reserved_bytes": 60, "num_retries": 0, "num_ooms": 0, "seconds": 0.1,
        }  # fmt: skip
        self.usage = Usage(**(defaults | usage))
        self.num_released = 0

    def budget(self, fraction: float, *, reserve_bytes: int | None = None) -> Budget:
        return Budget(total_bytes=100, free_bytes=100, reserve_bytes=reserve_bytes or 0, fraction=fraction)

    @contextmanager
    def measure(self) -> Iterator[Callable[[], Usage]]:
        readings = itertools.count(1)
        yield lambda: replace(self.usage, seconds=next(readings) * self.usage.seconds)

    def release(self) -> None:
        self.num_released += 1


def runner_for(forward_backward: Callable[[Any], None], memory: Any = None, **kwargs: Any) -> TrialRunner:
    memory = FakeCard() if memory is None else memory
    kwargs.setdefault("make_batch", lambda bucket, size: size)
    return TrialRunner(step=CallableStep(forward_backward), memory=memory, **kwargs)


def raising(message: str, kind: type[Exception] = RuntimeError, above: int = 0) -> Callable[[int], None]:
    def forward_backward(size: int) -> None:
        if size > above:
            raise kind(message)

    return forward_backward


def speech(limit: str = "8MiB", **kwargs: Any) -> tuple[TrialRunner, SpeechModel, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = SpeechModel()
    optimizer = torch.optim.AdamW(model.parameters())
    memory = backend_for("cpu", memory_limit=limit, resident=lambda: live_tensors(model, [optimizer]))
    step = Step(model, optimizer)
    runner = TrialRunner(step=step, memory=memory, make_batch=lambda bucket, size: batch_of(size), **kwargs)
    return runner, model, optimizer, memory


def test_a_step_that_fits_tells_its_peak_and_leaves_no_gradient() -> None:
    runner, model, optimizer, _ = speech()
    trial = runner.run(3, 4)
    assert (trial.bucket, trial.size, trial.status, trial.error) == (3, 4, "fits", None)
    assert trial.usage.allocated_bytes > sum(p.nbytes for p in model.parameters())
    assert trial.usage.num_ooms == 0
    assert all(p.grad is None for p in model.parameters())
    assert len(optimizer.state) == 0


def test_the_same_trial_twice_has_the_same_peak() -> None:
    runner, *_ = speech()
    assert runner.run(0, 4).usage.allocated_bytes == runner.run(0, 4).usage.allocated_bytes


def test_the_optimizer_takes_its_step_only_when_asked() -> None:
    runner, _, optimizer, _ = speech()
    without = runner.run(0, 4)
    assert len(optimizer.state) == 0
    runner.run(0, 4, with_optimizer=True)
    assert len(optimizer.state) > 0
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    assert runner.run(0, 4).usage.allocated_bytes == without.usage.allocated_bytes + state


def test_a_step_that_does_not_fit_is_a_result_and_everything_is_freed() -> None:
    runner, model, *_ = speech()
    alive = weakref.WeakSet[torch.Tensor]()
    model.register_forward_pre_hook(lambda module, args: alive.add(args[0]))
    model.inp.register_forward_hook(lambda module, args, out: alive.add(out))
    fits = runner.run(0, 4)
    trial = runner.run(0, 4000)
    assert trial.status == "oom"
    assert trial.error is not None
    assert trial.error.startswith("out of memory: OutOfMemoryError: CPU out of memory: aten.")
    assert trial.usage.num_ooms == 1
    assert all(p.grad is None for p in model.parameters())
    assert len(alive) == 0
    assert _get_current_dispatch_mode_stack() == []
    assert runner.run(0, 4).usage.allocated_bytes == fits.usage.allocated_bytes


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_running_out_in_any_phase_leaves_gradients_none(phase: str) -> None:
    runner, model, optimizer, memory = speech()
    peaks = {
        "forward": runner.run(0, 32).usage.allocated_bytes // 2,
        "backward": runner.run(0, 32).usage.allocated_bytes - 1,
    }
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    resident = sum(t.nbytes for t in live_tensors(model, [optimizer]))
    model.zero_grad()
    peaks["optimizer"] = max(runner.run(0, 1).usage.allocated_bytes, resident + 2000)
    with memory.cap(peaks[phase]):
        trial = runner.run(0, 1 if phase == "optimizer" else 32, with_optimizer=True)
    assert trial.status == "oom"
    assert all(p.grad is None for p in model.parameters())


def test_no_frame_of_a_failed_step_stays_alive_even_if_the_exception_does() -> None:
    class Activations:
        pass

    held: list[BaseException] = []
    alive = weakref.WeakSet[Activations]()

    def forward_backward(batch: Any) -> None:
        activations = Activations()
        alive.add(activations)
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except torch.OutOfMemoryError as exc:
            held.append(exc)
            raise

    gc.disable()
    try:
        assert runner_for(forward_backward).run(0, 1).status == "oom"
        assert len(alive) == 0
    finally:
        gc.enable()
    assert held


def test_gradients_stay_when_they_are_to_be_kept() -> None:
    runner, model, _, _ = speech(keep_gradients=True)
    first = runner.run(0, 4)
    grads = [p.grad for p in model.parameters()]
    assert all(grad is not None for grad in grads)
    second = runner.run(0, 4)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert second.usage.allocated_bytes > first.usage.allocated_bytes


def test_the_batch_is_built_inside_the_trial() -> None:
    def make_batch(bucket: int, size: int) -> torch.Tensor:
        return torch.zeros(size, 1000)

    memory = backend_for("cpu", memory_limit="1MiB")
    runner = runner_for(lambda batch: None, memory, make_batch=make_batch)
    assert runner.run(0, 100).usage.allocated_bytes == 400_000
    trial = runner.run(0, 1000)
    assert trial.status == "oom"
    assert "aten.zeros.default needs 3.81 MiB more" in str(trial.error)


def test_a_long_message_is_cut() -> None:
    trial = runner_for(raising("CUDA out of memory. " + "x" * 1000 + "\nmore", torch.OutOfMemoryError)).run(0, 1)
    assert trial.error is not None
    assert trial.error.startswith("out of memory: OutOfMemoryError: CUDA out of memory. xxx")
    assert trial.error.endswith("x…")
    assert len(trial.error) < 350


def test_a_real_bug_is_raised_as_it_is_with_a_note() -> None:
    bug = ValueError("a bug")

    def forward_backward(batch: Any) -> None:
        raise bug

    with pytest.raises(ValueError, match="a bug") as caught:
        runner_for(forward_backward).run(3, 17)
    assert caught.value is bug
    assert str(bug) == "a bug"
    if sys.version_info >= (3, 11):
        assert bug.__notes__ == ["raised by a trial step with 17 examples of bucket 3"]


def test_before_python_3_11_the_bucket_and_size_of_a_bug_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 14))
    with pytest.raises(ValueError, match="a bug") as caught:
        runner_for(raising("a bug\nand more", ValueError)).run(3, 17)
    assert caplog.messages == ["raised by a trial step with 17 examples of bucket 3: a bug"]
    assert not hasattr(caught.value, "__notes__")


def test_a_bug_while_the_batch_is_built_is_raised_too() -> None:
    def make_batch(bucket: int, size: int) -> Any:
        raise KeyError("audio")

    with pytest.raises(KeyError, match="audio"):
        runner_for(lambda batch: None, make_batch=make_batch).run(0, 1)


def test_a_device_that_broke_before_memory_ran_out_is_raised_with_the_note() -> None:
    class Broken(FakeCard):
        @contextmanager
        def measure(self) -> Iterator[Callable[[], Usage]]:
            answers = [self.usage]

            def usage() -> Usage:
                if not answers:
                    raise RuntimeError(OTHER_MESSAGES["illegal_access"])
                return answers.pop()

            yield usage

    with pytest.raises(RuntimeError, match="illegal memory access") as caught:
        runner_for(raising("CUDA out of memory.", torch.OutOfMemoryError), Broken()).run(3, 17)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["raised by a trial step with 17 examples of bucket 3"]


def test_nccl_out_of_memory_ends_the_calibration_and_says_why() -> None:
    with pytest.raises(RuntimeError, match="Cuda failure") as caught:
        runner_for(raising(OTHER_MESSAGES["nccl"])).run(0, 1)
    if sys.version_info >= (3, 11):
        assert "NCCL ran out of memory itself" in caught.value.__notes__[1]
        assert "lower memory_fraction" in caught.value.__notes__[1]


def test_an_interruption_is_passed_on() -> None:
    def forward_backward(batch: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner_for(forward_backward).run(0, 1)


def test_a_bug_is_not_taken_for_memory_because_the_caller_was_handling_an_out_of_memory_error() -> None:
    try:
        raise torch.OutOfMemoryError("earlier")
    except torch.OutOfMemoryError:
        with pytest.raises(ValueError, match="a bug"):
            runner_for(raising("a bug", ValueError)).run(0, 1)


def test_an_index_limit_makes_a_ceiling() -> None:
    trial = runner_for(raising(CEILING_MESSAGES["int32"])).run(0, 1)
    assert trial.status == "ceiling"
    assert trial.error == f"too large for a kernel: RuntimeError: {CEILING_MESSAGES['int32']}"


def test_the_hosts_memory_makes_a_ceiling_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    trial = runner_for(raising("std::bad_alloc")).run(2, 9)
    assert trial.status == "ceiling"
    assert trial.error == "out of host memory: RuntimeError: std::bad_alloc"
    assert "bucket 2, size 9: the host, not the device, ran out of memory: std::bad_alloc" in caplog.text


def test_on_a_cpu_the_hosts_memory_is_the_devices() -> None:
    memory = backend_for("cpu", memory_limit="1MiB")
    assert runner_for(raising("x", MemoryError), memory).run(0, 1).status == "oom"


def test_a_smaller_size_that_passed_is_evidence_for_memory() -> None:
    runner = runner_for(raising(EVIDENCE_MESSAGES["cufft"], above=8))
    with pytest.raises(RuntimeError, match="CUFFT_INTERNAL_ERROR"):
        runner.run(0, 16)
    assert runner.run(0, 8).status == "fits"
    with pytest.raises(RuntimeError, match="CUFFT_INTERNAL_ERROR"):
        runner.run(1, 16)
    assert runner.run(0, 16).status == "oom"


@pytest.mark.parametrize("usage", [{"num_retries": 1}, {"num_ooms": 1}, {"reserved_bytes": 95}], ids=str)
def test_a_full_device_is_evidence_for_memory(usage: dict[str, int]) -> None:
    assert runner_for(raising(EVIDENCE_MESSAGES["algorithm"]), FakeCard(**usage)).run(0, 1).status == "oom"


def test_an_out_of_memory_error_that_the_step_swallowed_still_counts() -> None:
    def forward_backward(batch: Any) -> None:
        try:
            torch.zeros(1000, 1000)
        except torch.OutOfMemoryError:
            return

    trial = runner_for(forward_backward, backend_for("cpu", memory_limit="1MiB")).run(0, 1)
    assert trial.status == "oom"
    assert trial.error == "1 failed allocation, which the training step caught itself"


class Node:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def leaving_a_cycle() -> tuple[Callable[[Any], None], weakref.WeakSet[Node]]:
    """A step that leaves a cycle behind, and those of them that are alive."""
    alive = weakref.WeakSet[Node]()
    return (lambda batch: alive.add(Node())), alive


def test_cycles_that_a_step_leaves_behind_are_collected() -> None:
    forward_backward, alive = leaving_a_cycle()
    gc.disable()
    try:
        runner_for(forward_backward, backend_for("cpu", memory_limit="1MiB")).run(0, 1)
        assert len(alive) == 0
    finally:
        gc.enable()
    assert gc.get_freeze_count() < 10_000


def test_cycles_are_collected_after_each_step_although_the_cache_stays() -> None:
    forward_backward, alive = leaving_a_cycle()
    card = FakeCard()
    runner = runner_for(forward_backward, card)
    for _ in range(5):
        runner.run(0, 1, release=False)
        assert len(alive) == 0
    assert card.num_released == 0


def test_seconds_are_those_of_the_step_without_building_the_batch() -> None:
    clock = [0.0]

    class Clock(FakeCard):
        @contextmanager
        def measure(self) -> Iterator[Callable[[], Usage]]:
            yield lambda: replace(self.usage, seconds=clock[0])

    def make_batch(bucket: int, size: int) -> int:
        clock[0] += 8.0
        return size

    def forward_backward(size: int) -> None:
        clock[0] += 2.0
        if size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    runner = runner_for(forward_backward, Clock(), make_batch=make_batch)
    assert runner.run(0, 1).usage.seconds == 2.0
    assert runner.run(0, 2).status == "oom"


def test_objects_that_the_user_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        num_frozen = gc.get_freeze_count()
        runner_for(raising("x", torch.OutOfMemoryError, above=5)).run(0, 6)
        assert gc.get_freeze_count() > num_frozen // 2
    finally:
        gc.unfreeze()


def test_memory_is_released_after_every_trial() -> None:
    card = FakeCard()
    runner = runner_for(raising("CUDA out of memory.", torch.OutOfMemoryError, above=5), card)
    runner.run(0, 5)
    runner.run(0, 6)
    assert card.num_released == 2


def test_a_trial_inside_a_measurement_is_refused() -> None:
    runner, _, _, memory = speech()
    with memory.measure(), pytest.raises(CalibrationError, match="must not run inside another one"):
        runner.run(0, 1)
    assert runner.run(0, 1).status == "fits"


def test_each_trial_is_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="lhotse_oomfit.trial"):
        runner_for(lambda batch: None).run(1, 2)
    assert caplog.messages == ["bucket 1, size 2: fits, peak 50 bytes, 0.100 s"]
