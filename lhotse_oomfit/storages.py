"""The bytes of every CPU storage that is alive: what the CPU's memory limit is checked against.

Method: ``torch.distributed._tools.mem_tracker.MemTracker`` also follows storages through weak references from a
dispatch mode; this one keeps a single number, which makes it cheap enough for every trial, and enforces a limit.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lhotse_oomfit.profile import format_bytes

__all__ = ["StorageTracker", "watch_resizes"]

_MAY_HOLD_TENSORS = (torch.Tensor, list, tuple)


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """A live storage. When it dies, the reference queues itself; nothing else happens in the dying thread."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of every CPU storage that an operator reads or writes, each storage once.

    A storage is counted from the first operator that touches it until it dies. Views share a storage, so they cost
    nothing; storages that grow (``out=``, ``resize_``) are measured again. What a kernel allocates and frees inside
    itself isn't seen. A dying storage only appends to a deque, which any thread may do at any point (autograd's
    threads, the garbage collector in the middle of an update); the counts change in :meth:`_settle`, under a lock.
    """

    def __init__(self, limit_bytes: Callable[[], int]) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes
        self._live: dict[int, _StorageRef] = {}
        self._dead: deque[_StorageRef] = deque()
        self._lock = threading.RLock()
        self._current_bytes = 0
        self.peak_bytes = 0
        self.num_ooms = 0

    @property
    def current_bytes(self) -> int:
        """Bytes of the tracked storages that are alive."""
        with self._lock:
            self._settle()
            return self._current_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # let the subclass run first: its inner operators come back here
        result = func(*args, **kwargs) if kwargs else func(*args)
        with self._lock:
            if self._dead:
                self._settle()
            before_bytes = self._current_bytes
            self._visit(result)
            for value in args:
                if isinstance(value, _MAY_HOLD_TENSORS):
                    self._visit(value)
            if kwargs:
                for value in kwargs.values():
                    if isinstance(value, _MAY_HOLD_TENSORS):
                        self._visit(value)
            if self._current_bytes > before_bytes:
                self._check(func, self._current_bytes - before_bytes)
        return result

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these tensors, without ever raising: what is resident was there before the region began."""
        with self._lock:
            for tensor in tensors:
                self._settle()
                self._visit(tensor)
            self.peak_bytes = max(self.peak_bytes, self._current_bytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Measure a storage that was resized without an operator, if it is a tracked one."""
        with self._lock:
            self._settle()
            if storage._cdata in self._live:
                before_bytes = self._current_bytes
                self._visit_storage(storage)
                if self._current_bytes > before_bytes:
                    self._check("UntypedStorage.resize_", self._current_bytes - before_bytes)

    def close(self) -> None:
        """Forget every storage."""
        with self._lock:
            self._settle()
            self._live.clear()
            self._dead.clear()

    def _settle(self) -> None:
        dead, live = self._dead, self._live
        while dead:
            ref = dead.popleft()
            self._current_bytes -= ref.nbytes
            if live.get(ref.key) is ref:
                del live[ref.key]

    def _visit(self, value: Any) -> None:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            try:
                storage = value.untyped_storage()
            except NotImplementedError:
                for part in _parts(value):
                    self._visit(part)
            else:
                self._visit_storage(storage)
        elif kind is list or kind is tuple:
            for item in value:
                self._visit(item)
        elif isinstance(value, torch.Tensor):
            if is_traceable_wrapper_subclass(value):
                for name in value.__tensor_flatten__()[0]:
                    self._visit(getattr(value, name))
            else:
                self._visit_storage(value.untyped_storage())
        elif isinstance(value, list | tuple):
            for item in value:
                self._visit(item)

    def _visit_storage(self, storage: torch.UntypedStorage) -> None:
        # A key can't be a dead storage's: that one queued itself before its address was free, and was settled since.
        ref = self._live.get(storage._cdata)
        if ref is not None:
            size = storage.nbytes()
            if size != ref.nbytes:
                self._current_bytes += size - ref.nbytes
                ref.nbytes = size
        elif storage.device.type == "cpu":
            ref = _StorageRef(storage, self._dead.append)
            ref.key, ref.nbytes = storage._cdata, storage.nbytes()
            self._live[ref.key] = ref
            self._current_bytes += ref.nbytes

    def _check(self, func: object, new_bytes: int) -> None:
        limit_bytes = self._limit_bytes()
        if self._current_bytes > limit_bytes:
            self.num_ooms += 1
            in_use_bytes = self._current_bytes - new_bytes
            raise torch.OutOfMemoryError(
                f"CPU out of memory: {func} needs {format_bytes(new_bytes)} more, {format_bytes(in_use_bytes)} "
                f"of a limit of {format_bytes(limit_bytes)} are in use"
            )
        if self._current_bytes > self.peak_bytes:
            self.peak_bytes = self._current_bytes


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that a tensor without a storage of its own consists of."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


@contextmanager
def watch_resizes(tracker: StorageTracker) -> Iterator[None]:
    """Report ``storage.resize_`` to the tracker: it is no operator, so a dispatch mode can't see it."""
    storage_class: Any = torch.UntypedStorage
    own = vars(storage_class).get("resize_")
    original = storage_class.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        tracker.resized(storage)
        return result

    storage_class.resize_ = resize_
    try:
        yield
    finally:
        if own is None:
            del storage_class.resize_
        else:
            storage_class.resize_ = own
