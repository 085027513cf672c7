"""One training step at one batch size, and the only place that decides whether an error means out of memory."""

from __future__ import annotations

import gc
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, Protocol

import torch

from lhotse_oomfit.memory import MemoryBackend, Usage

__all__ = ["TrainingStep", "Trial", "TrialRunner", "Verdict", "judge"]

logger = logging.getLogger(__name__)

_ERROR_CHARACTERS = 300
_FROZEN_AT_STARTUP = 10_000
"""Python 3.12 freezes a few hundred objects of its own; a program that freezes what torch loads freezes 100,000s."""


class Verdict(Enum):
    """What an error says about the size that was tried."""

    OOM = "out of memory"
    CEILING = "too large for a kernel"
    HOST_OOM = "out of host memory"
    NOT_MEMORY = "not about memory"


_BROKEN = re.compile(
    r"illegal memory access|device-side assert triggered|misaligned address|unspecified launch failure"
)
"""The process can't be trusted after these, whatever else was raised on the way."""

_SINGLE = re.compile(r"Expected more than 1 value per channel")
"""BatchNorm over pooled features needs two examples."""

_NCCL_OOM = re.compile(r"Cuda failure.*out of memory|NCCL.*out of memory", re.DOTALL)
"""NCCL ran out of memory itself: its communicator is lost, so trials can't go on in this process."""

_NEVER = re.compile(
    r"out of resource: shared memory"  # Triton: a kernel's tile, not the batch
    r"|Expected more than 1 value per channel"  # BatchNorm at a batch of one
)

_OOM = re.compile(
    r"\b(?:CUDA|HIP|XPU|MPS backend|CPU) out of memory"
    r"|(?:CUDA|HIP|CUDA driver|HIP driver) error: out of memory"
    r"|CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED"
    r"|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    r"|(?:CU|HIP)FFT_ALLOC_FAILED"
    r"|Triton Error \[(?:CUDA|HIP)\]: out of memory"  # a compiled kernel that finds no room to be loaded
    r"|CUDA_ERROR_OUT_OF_MEMORY|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"
)

_OOM_WITH_EVIDENCE = re.compile(
    r"CUFFT_INTERNAL_ERROR|CUDNN_STATUS_NOT_SUPPORTED|Unable to find a valid cuDNN algorithm"
    r"|CU(?:BLAS|DNN)_STATUS_NOT_INITIALIZED"
)
"""Libraries say these when they find no room for a plan, a workspace or a handle, and for other reasons."""

_CEILING = re.compile(r"canUse32BitIndexMath|too large to be indexed with int32|INT_MAX")

_CEILING_WITH_EVIDENCE = re.compile(r"invalid configuration argument")
"""A launch grid over its limit, as some attention kernels have at 65,536 sequences times heads; or a bug."""

_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|std::bad_alloc"
    r"|CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED|Cannot allocate memory"
)


def judge(exc: BaseException, *, evidence: bool = False, outside: BaseException | None = None) -> Verdict:
    """Say what an error means. Causes, contexts and the members of groups are read too, the outermost first.

    :param evidence: whether something else speaks for memory: a smaller batch passed, or little memory was free.
        Some libraries' errors count only then.
    :param outside: an exception that was being handled already when the step began, which tells nothing about it.
    """
    if not isinstance(exc, Exception):
        return Verdict.NOT_MEMORY  # KeyboardInterrupt and the like
    chain = list(_chain(exc, outside))
    if any(_BROKEN.search(text) or _NCCL_OOM.search(text) for text in map(str, chain)):
        return Verdict.NOT_MEMORY
    for link in chain:
        verdict = _verdict(link, evidence)
        if verdict is not None:
            return verdict
    return Verdict.NOT_MEMORY


def _verdict(exc: BaseException, evidence: bool) -> Verdict | None:
    """The verdict of one error by itself; None where it doesn't tell."""
    text = str(exc)
    if _NEVER.search(text):
        return Verdict.NOT_MEMORY
    if isinstance(exc, torch.OutOfMemoryError) or _OOM.search(text):
        return Verdict.OOM
    if _CEILING.search(text):
        return Verdict.CEILING
    if isinstance(exc, MemoryError) or _HOST.search(text):
        return Verdict.HOST_OOM
    if evidence and _OOM_WITH_EVIDENCE.search(text):
        return Verdict.OOM
    if evidence and _CEILING_WITH_EVIDENCE.search(text):
        return Verdict.CEILING
    return None


def _chain(exc: BaseException, outside: BaseException | None) -> Iterator[BaseException]:
    pending, seen = [exc], {id(outside)} if outside is not None else set()
    while pending:
        link = pending.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        pending += [other for other in (link.__cause__, link.__context__) if other is not None]
        pending += getattr(link, "exceptions", ())


class TrainingStep(Protocol):
    """One step of the user's training, in the parts that a trial needs."""

    def forward_backward(self, batch: Any) -> None:
        """The loss of one batch and its gradients."""

    def optimizer_step(self) -> None:
        """One step of every optimizer."""

    def zero_grad(self) -> None:
        """Set every gradient to None."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of one training step with ``size`` examples of ``bucket``.

    ``status`` is ``"fits"``; ``"oom"``; or ``"ceiling"`` when another limit than the device's memory was met (a
    kernel's index range, the host's memory), which ``error`` then tells. ``usage`` is that of the whole trial, but its
    seconds are those of the step alone: in training, others build the batches meanwhile.
    """

    bucket: int
    size: int
    status: Literal["fits", "oom", "ceiling"]
    usage: Usage
    error: str | None


class TrialRunner:
    """Runs training steps and frees what they used, whether they fit or not."""

    def __init__(
        self,
        *,
        step: TrainingStep,
        memory: MemoryBackend,
        make_batch: Callable[[int, int], Any],
        keep_gradients: bool = False,
    ) -> None:
        """:param make_batch: the batch of ``(bucket, size)``; it is built inside the trial.
        :param keep_gradients: leave gradients where they are, as accumulation over several batches does.
        """
        self._step = step
        self._memory = memory
        self._make_batch = make_batch
        self._keep_gradients = keep_gradients
        self._smallest_fit: dict[int, int] = {}

    def run(self, bucket: int, size: int, *, with_optimizer: bool = False, release: bool = True) -> Trial:
        """Run forward and backward (and the optimizer's step) on one batch.

        With ``release=False`` a step that fits leaves the allocator's cache as it is, as training does.
        An error that isn't about memory is raised as it is, with a note that names the bucket and the size
        (logged before Python 3.11, which has no notes). On return no gradient is left, unless they are to be kept, no
        garbage that the step made, and memory is free.
        """
        with _older_objects_set_aside() as put_back:
            trial = self._attempt(bucket, size, with_optimizer)
            # The exception, and with it every frame of the step, is gone only now: clean up here, not where it was
            # caught.
            if not self._keep_gradients:
                self._step.zero_grad()
            if trial.status != "fits":
                put_back()  # whoever holds on to a failed step may be older
                release = True
            if release:
                self._memory.release()
            else:
                gc.collect()  # nothing looks for it later: from here on, it is among the older objects
        if trial.status == "fits":
            self._smallest_fit[bucket] = min(size, self._smallest_fit.get(bucket, size))
        logger.debug(
            "bucket %s, size %s: %s, peak %s bytes, %.3f s",
            bucket,
            size,
            trial.status,
            trial.usage.allocated_bytes,
            trial.usage.seconds,
        )
        return trial

    def _attempt(self, bucket: int, size: int, with_optimizer: bool) -> Trial:
        outside = sys.exc_info()[1]
        usage: Callable[[], Usage] | None = None
        status: Literal["fits", "oom", "ceiling"] = "fits"
        error: str | None = None
        build_s = 0.0
        try:
            with self._memory.measure() as usage:
                build_s = self._run_step(bucket, size, with_optimizer, usage)
        except Exception as exc:
            verdict = judge(exc, outside=outside)
            if size == 1 and _SINGLE.search(str(exc)):
                verdict = Verdict.CEILING  # the smallest size there is can't be trained, whatever the memory
            if verdict is Verdict.NOT_MEMORY and self._has_evidence(bucket, size, usage):
                verdict = judge(exc, evidence=True, outside=outside)
            if verdict is Verdict.HOST_OOM and self._memory.device.type == "cpu":
                verdict = Verdict.OOM
            if verdict is Verdict.NOT_MEMORY or usage is None:
                _add_note(exc, f"raised by a trial step with {size} examples of bucket {bucket}")
                if any(_NCCL_OOM.search(str(link)) for link in _chain(exc, outside)):
                    _add_note(
                        exc,
                        "NCCL ran out of memory itself, so its communicator is lost and this process can't go on; "
                        "lower memory_fraction or pass reserve= to leave it room",
                    )
                raise
            status = "oom" if verdict is Verdict.OOM else "ceiling"
            error = f"{verdict.value}: {type(exc).__name__}: {_first_line(exc)}"
            if verdict is Verdict.HOST_OOM:
                logger.warning("bucket %s, size %s: the host, not the device, ran out of memory: %s", bucket, size, exc)
            _clear_frames(exc, outside)
        try:
            measured = usage()
        except RuntimeError as exc:  # the step broke the device, and ran out of memory before that came to light
            _add_note(exc, f"raised by a trial step with {size} examples of bucket {bucket}")
            raise
        measured = replace(measured, seconds=measured.seconds - build_s)
        if status == "fits" and measured.num_ooms:
            plural = "s" if measured.num_ooms > 1 else ""
            status = "oom"
            error = f"{measured.num_ooms} failed allocation{plural}, which the training step caught itself"
        return Trial(bucket=bucket, size=size, status=status, usage=measured, error=error)

    def _run_step(self, bucket: int, size: int, with_optimizer: bool, usage: Callable[[], Usage]) -> float:
        """Returns how many seconds went by until the batch was there."""
        batch = self._make_batch(bucket, size)
        build_s = usage().seconds
        self._step.forward_backward(batch)
        if with_optimizer:
            self._step.optimizer_step()
        return build_s

    def _has_evidence(self, bucket: int, size: int, usage: Callable[[], Usage] | None) -> bool:
        """A smaller batch passed, allocations failed or only passed at a second attempt, or nine tenths were in use."""
        if self._smallest_fit.get(bucket, size) < size:
            return True
        if usage is None:
            return False
        try:
            used = usage()
            return used.num_ooms + used.num_retries > 0 or (
                used.reserved_bytes > 0.9 * self._memory.budget(1.0).free_bytes
            )
        except RuntimeError:  # the device no longer answers
            return False


@contextmanager
def _older_objects_set_aside() -> Iterator[Callable[[], None]]:
    """Let garbage collections look only at objects that are made in here; yields a function that ends that early.

    A whole process is slow to look through (a tenth of a second and more with torch loaded), and what a trial must
    clear is what the trial made. A process that froze objects itself is left as it is.
    """
    frozen = gc.get_freeze_count() <= _FROZEN_AT_STARTUP
    if frozen:
        gc.freeze()

    def put_back() -> None:
        nonlocal frozen
        if frozen:
            frozen = False
            gc.unfreeze()

    try:
        yield put_back
    finally:
        put_back()


def _first_line(exc: BaseException) -> str:
    """The start of an error's text; a card's out-of-memory error is one line of a thousand characters."""
    line = str(exc).strip().partition("\n")[0]
    return line if len(line) <= _ERROR_CHARACTERS else line[: _ERROR_CHARACTERS - 1] + "…"


def _add_note(exc: BaseException, note: str) -> None:
    if sys.version_info >= (3, 11):
        exc.add_note(note)
    else:
        logger.error("%s: %s", note, _first_line(exc))


def _clear_frames(exc: BaseException, outside: BaseException | None) -> None:
    """Let go of the tensors in the frames of an exception that someone may still hold."""
    for link in _chain(exc, outside):
        traceback.clear_frames(link.__traceback__)
