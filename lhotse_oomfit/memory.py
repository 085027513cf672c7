"""Device memory behind one protocol: how much there is, and how much a region of code used at its peak.

Two backends. :class:`CudaMemory` reads the caching allocator's statistics. :class:`CpuMemory` gives a CPU a byte
limit: a dispatch mode follows the real storages of every tensor that an operator touches and raises
:class:`torch.OutOfMemoryError` in the middle of forward, backward or the optimizer's step once they exceed the limit,
so that everything above this module runs, and is tested, without a card.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lhotse_oomfit.allocator import prefer_expandable_segments
from lhotse_oomfit.errors import CalibrationError, InvalidArgumentError
from lhotse_oomfit.profile import parse_bytes
from lhotse_oomfit.storages import StorageTracker, watch_resizes

__all__ = [
    "Budget",
    "CpuMemory",
    "CudaMemory",
    "MemoryBackend",
    "Usage",
    "backend_for",
    "live_tensors",
]

Resident = Callable[[], Iterable[torch.Tensor]]

_OUTSIDE_ALLOCATOR_BYTES = 512 * 1024**2
"""Kept free for what a CUDA process takes outside torch's allocator once it trains: kernels that load at their first
launch, cuDNN's and cuFFT's plans. The operators of a Conformer, an LSTM and their losses took 180 MiB beyond the bare
context (H200, torch 2.11, CUDA 13.0). It counts only where the card's free memory, not the fraction, is the limit."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What one measured region used.

    ``allocated_bytes`` is the peak of live tensors, those alive at the start included, so it compares with
    :attr:`Budget.bytes`; ``reserved_bytes`` the peak of what the allocator held (on CPU the same). ``num_retries`` are
    allocations that only succeeded after the allocator gave its cache back, ``num_ooms`` those that failed;
    ``seconds`` the region's duration.
    """

    allocated_bytes: int
    reserved_bytes: int
    num_retries: int
    num_ooms: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How many bytes training may use: the fraction of the device or what is free, less a reserve.

    ``free_bytes`` is what this process could hold in all: the device's free memory and what the process already has.
    """

    total_bytes: int
    free_bytes: int
    reserve_bytes: int
    fraction: float

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise InvalidArgumentError(
                f"memory_fraction must lie above 0 and at most at 1, it is {self.fraction!r}; pass for instance 0.9"
            )
        if self.reserve_bytes < 0:
            raise InvalidArgumentError(
                f"reserve must not be negative, it is {self.reserve_bytes} bytes; pass 0 to keep nothing in reserve"
            )

    @property
    def bytes(self) -> int:
        """The budget; zero or less where the reserve leaves nothing."""
        return min(int(self.fraction * self.total_bytes), self.free_bytes) - self.reserve_bytes


class MemoryBackend(Protocol):
    """The memory of one device, as seen by one process."""

    @property
    def name(self) -> str:
        """``"cuda"`` or ``"cpu"``."""

    @property
    def device(self) -> torch.device:
        """The device whose memory it is."""

    def budget(self, fraction: float, *, reserve_bytes: int | None = None) -> Budget:
        """The bytes that training may use; ``reserve_bytes=None`` takes the backend's own reserve.

        :raises InvalidArgumentError: for a fraction outside (0, 1] or a negative reserve.
        """

    def measure(self) -> AbstractContextManager[Callable[[], Usage]]:
        """Measure a region. Yields a callable that gives the usage so far, or, after the block, of the whole block.

        :raises CalibrationError: when a region of this backend is being measured already.
        """

    def release(self) -> None:
        """Free what only garbage keeps alive, and give cached memory back to the device."""

    def prepare(self) -> str:
        """Bring the allocator into the best state for batches of many shapes; returns what it is now."""

    def fields(self) -> dict[str, str]:
        """What a fingerprint must hold of the device."""

    def cap(self, limit_bytes: int) -> AbstractContextManager[None]:
        """Let allocations beyond ``limit_bytes`` fail while inside; a lower limit stays, the former one comes back."""


def backend_for(
    device: torch.device | str,
    *,
    memory_limit: str | int | None = None,
    resident: Resident | Iterable[torch.Tensor] = (),
) -> MemoryBackend:
    """The backend for ``device``.

    :param memory_limit: bytes, or a text such as ``"600MiB"``. Needed on a CPU; on a card it stands for the card's
        size where it is smaller.
    :param resident: the tensors that live through a measured region (or a callable that lists them, which is asked at
        the start of each): parameters, gradients, optimizer state. Needed on a CPU only; a card's allocator knows.
    :raises InvalidArgumentError: for a CPU without a limit, a limit that isn't a positive size, another kind of device.
    """
    device = torch.device(device)
    limit_bytes = None if memory_limit is None else _limit_bytes(memory_limit)
    if device.type == "cuda":
        return CudaMemory(device, limit_bytes=limit_bytes)
    if device.type != "cpu":
        raise InvalidArgumentError(
            f"the device must be a CUDA card or the CPU for its memory to be measured, it is {str(device)!r}; "
            "pass batch sizes as a list instead"
        )
    if limit_bytes is None:
        raise InvalidArgumentError(
            "memory_limit must be given on a CPU, whose memory has no size of its own to fill, and it is None; "
            'pass for instance memory_limit="600MiB"'
        )
    return CpuMemory(limit_bytes=limit_bytes, resident=resident)


def live_tensors(
    model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), extras: Iterable[Any] = ()
) -> Iterator[torch.Tensor]:
    """Every tensor that training keeps alive between steps: parameters, gradients, buffers, optimizer state, extras.

    ``extras`` may hold tensors, modules and lists, tuples or dicts of tensors.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor
        if tensor.grad is not None:
            yield tensor.grad
    for optimizer in optimizers:
        for state in list(optimizer.state.values()):
            yield from _tensors_in(state)
    for extra in extras:
        if isinstance(extra, torch.nn.Module):
            yield from live_tensors(extra)
        else:
            yield from _tensors_in(extra)


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in list(value.values()):
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _limit_bytes(memory_limit: str | int) -> int:
    limit = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
    if isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0:
        raise InvalidArgumentError(
            "memory_limit must be a positive number of bytes or a text such as '600MiB', "
            f"it is {memory_limit!r}; pass the memory that training may fill"
        )
    return limit


class CpuMemory:
    """A CPU whose memory has a limit of the caller's choice, see :func:`backend_for`."""

    name = "cpu"

    def __init__(self, *, limit_bytes: int, resident: Resident | Iterable[torch.Tensor] = ()) -> None:
        self.device = torch.device("cpu")
        self._total_bytes = limit_bytes
        self._limit_bytes = limit_bytes
        if callable(resident):
            self._resident: Resident = resident
        else:
            tensors = tuple(resident)
            self._resident = lambda: tensors
        self._measuring = False

    def budget(self, fraction: float, *, reserve_bytes: int | None = None) -> Budget:
        """The fraction of the limit, less the reserve (none, unless given)."""
        return Budget(
            total_bytes=self._total_bytes,
            free_bytes=self._limit_bytes,
            reserve_bytes=0 if reserve_bytes is None else reserve_bytes,
            fraction=fraction,
        )

    @contextmanager
    def measure(self) -> Iterator[Callable[[], Usage]]:
        """Follow the storages of this thread's operators; raises :class:`torch.OutOfMemoryError` beyond the limit."""
        if self._measuring or any(isinstance(mode, StorageTracker) for mode in _get_current_dispatch_mode_stack()):
            raise CalibrationError("a memory measurement must not run inside another one; leave the first one before")
        tracker = StorageTracker(lambda: self._limit_bytes)
        start_s = time.perf_counter()
        end_s: float | None = None

        def usage() -> Usage:
            return Usage(
                allocated_bytes=tracker.peak_bytes,
                reserved_bytes=tracker.peak_bytes,
                num_retries=0,
                num_ooms=tracker.num_ooms,
                seconds=(time.perf_counter() if end_s is None else end_s) - start_s,
            )

        self._measuring = True
        try:
            tracker.add(self._resident())
            with watch_resizes(tracker), tracker:
                start_s = time.perf_counter()
                yield usage
        finally:
            end_s = time.perf_counter()
            self._measuring = False
            tracker.close()

    def release(self) -> None:
        """Collect garbage."""
        gc.collect()

    def prepare(self) -> str:
        """Nothing to do; ``"cpu-tracker"``."""
        return "cpu-tracker"

    def fields(self) -> dict[str, str]:
        """The device and its limit."""
        return {"device": "cpu", "device_memory": str(self._total_bytes)}

    @contextmanager
    def cap(self, limit_bytes: int) -> Iterator[None]:
        """Lower the limit, for a measurement that already runs too."""
        former = self._limit_bytes
        self._limit_bytes = min(limit_bytes, former)
        try:
            yield
        finally:
            self._limit_bytes = former


class CudaMemory:
    """A CUDA card, by the statistics of torch's caching allocator."""

    name = "cuda"

    def __init__(self, device: torch.device, *, limit_bytes: int | None = None) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._properties = torch.cuda.get_device_properties(self.device)
        card_bytes = int(self._properties.total_memory)
        self._total_bytes = card_bytes if limit_bytes is None else min(card_bytes, limit_bytes)
        self._card_bytes = card_bytes
        self._measuring = False

    def budget(self, fraction: float, *, reserve_bytes: int | None = None) -> Budget:
        """The fraction of the card or what this process can get, less the reserve.

        Without ``reserve_bytes``, as much is kept as leaves 512 MiB of the card's free memory outside the allocator:
        nothing where the fraction, or a cap that was set on the allocator, leaves that much.
        """
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        free_bytes = min(free_bytes + torch.cuda.memory_reserved(self.device), self._total_bytes)
        allowed_bytes = int(self._allowed_fraction() * self._card_bytes)
        if reserve_bytes is None:
            slack_bytes = max(0, free_bytes - min(int(fraction * self._total_bytes), allowed_bytes))
            reserve_bytes = max(0, _OUTSIDE_ALLOCATOR_BYTES - slack_bytes)
        free_bytes = min(free_bytes, allowed_bytes)
        return Budget(
            total_bytes=self._total_bytes, free_bytes=free_bytes, reserve_bytes=reserve_bytes, fraction=fraction
        )

    @contextmanager
    def measure(self) -> Iterator[Callable[[], Usage]]:
        """Reset the peak statistics, and read them after a synchronisation."""
        if self._measuring:
            raise CalibrationError("a memory measurement must not run inside another one; leave the first one before")
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_stats(self.device)
        with torch.cuda.device(self.device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
        final: Usage | None = None

        def usage() -> Usage:
            if final is not None:
                return final
            with torch.cuda.device(self.device):
                end.record()
            torch.cuda.synchronize(self.device)
            stats = torch.cuda.memory_stats(self.device)
            return Usage(
                allocated_bytes=stats["allocated_bytes.all.peak"],
                reserved_bytes=stats["reserved_bytes.all.peak"],
                num_retries=stats["num_alloc_retries"] - before["num_alloc_retries"],
                num_ooms=stats["num_ooms"] - before["num_ooms"],
                seconds=start.elapsed_time(end) / 1000.0,
            )

        self._measuring = True
        failed = True
        try:
            yield usage
            failed = False
        finally:
            self._measuring = False
            try:
                final = usage()
            except RuntimeError:
                # A dead context (an illegal access, say) fails here too, and again for whoever asks for the usage; the
                # region's own error tells more.
                if not failed:
                    raise

    def release(self) -> None:
        """Collect garbage and empty the allocator's cache."""
        gc.collect()
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def prepare(self) -> str:
        """Switch on expandable segments, see :func:`~lhotse_oomfit.allocator.prefer_expandable_segments`."""
        return prefer_expandable_segments(self.device)

    def fields(self) -> dict[str, str]:
        """The card's name, memory in bytes and compute capability."""
        return {
            "device": self._properties.name,
            "device_memory": str(self._total_bytes),
            "compute_capability": f"{self._properties.major}.{self._properties.minor}",
        }

    @contextmanager
    def cap(self, limit_bytes: int) -> Iterator[None]:
        """Cap the allocator's reservation, never above a cap that is there already.

        torch before 2.7 can't tell a former cap: it is left without one.
        """
        former = self._allowed_fraction()
        torch.cuda.set_per_process_memory_fraction(min(former, max(0, limit_bytes) / self._card_bytes), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(former, self.device)

    def _allowed_fraction(self) -> float:
        """The share of the card that the allocator may reserve; all of it where this torch can't tell."""
        getter = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
        return 1.0 if getter is None else float(getter(self.device))
