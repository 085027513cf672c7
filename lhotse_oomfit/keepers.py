"""One object's state, kept: each function here returns another one that puts the state back into the same object.

They restore in place, and write nothing where nothing changed. What belongs to a training, and in what order it comes
back, is decided in :mod:`lhotse_oomfit.snapshot`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

__all__ = [
    "GENERATORS_AND_ARRAYS",
    "is_freed",
    "keep_attributes",
    "keep_bytearray",
    "keep_dict",
    "keep_gradient",
    "keep_list",
    "keep_set_or_deque",
    "keep_state",
    "keep_values",
]


def _same_items(now: dict[Any, Any], kept: dict[Any, Any]) -> bool:
    # By identity: keys and values may be tensors, whose == gives a tensor.
    return len(now) == len(kept) and all(
        a is c and b is d for (a, b), (c, d) in zip(now.items(), kept.items(), strict=True)
    )


def keep_attributes(attributes: dict[str, Any]) -> Callable[[], None]:
    """An object's ``__dict__``: which names it has, and which objects they mean. Their order isn't kept."""
    kept = dict(attributes)

    def restore() -> None:
        for name in [name for name in attributes if name not in kept]:
            del attributes[name]
        for name, value in kept.items():
            if name not in attributes or attributes[name] is not value:
                attributes[name] = value

    return restore


def keep_dict(container: dict[Any, Any]) -> Callable[[], None]:
    """A dict's keys, values and order: a ``state_dict`` lists buffers in the order of such a one."""
    kept = dict(container)

    def restore() -> None:
        if not _same_items(container, kept):
            container.clear()
            container.update(kept)

    return restore


def keep_list(container: list[Any]) -> Callable[[], None]:
    """A list's items."""
    kept = list(container)

    def restore() -> None:
        if len(container) != len(kept) or any(a is not b for a, b in zip(container, kept, strict=True)):
            container[:] = kept

    return restore


def keep_set_or_deque(container: Any) -> Callable[[], None]:
    """A set's or a deque's items."""
    kept = list(container)

    def restore() -> None:
        if len(container) != len(kept) or any(a is not b for a, b in zip(container, kept, strict=True)):
            container.clear()
            for item in kept:
                (container.add if isinstance(container, set) else container.append)(item)

    return restore


def keep_bytearray(container: bytearray) -> Callable[[], None]:
    """A bytearray's bytes."""
    kept = bytes(container)

    def restore() -> None:
        if container != kept:
            container[:] = kept

    return restore


GENERATORS_AND_ARRAYS = (
    np.ndarray, torch.Generator, random.Random, np.random.RandomState, np.random.Generator
)  # fmt: skip


def keep_state(value: Any) -> Callable[[], object]:
    """The values of an array, or where a generator stands. Arrays mapped from files are left as they are."""
    if isinstance(value, np.ndarray):
        if isinstance(value, np.memmap) or not value.flags.writeable:  # a file may be far larger than memory
            return _nothing
        return partial(np.copyto, value, value.copy())
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.SystemRandom):
        return _nothing
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    return partial(setattr, value.bit_generator, "state", value.bit_generator.state)


def _nothing() -> None:
    pass


def keep_gradient(tensor: torch.Tensor) -> Callable[[], None]:
    """Which tensor a leaf's gradient is, and whether it wants one."""
    grad, requires_grad = tensor.grad, tensor.requires_grad

    def restore() -> None:
        if tensor.grad is not grad:
            tensor.grad = grad
        if tensor.requires_grad != requires_grad and tensor.is_leaf:
            tensor.requires_grad_(requires_grad)

    return restore


def keep_values(tensor: torch.Tensor, *, values: bool) -> Callable[[], None]:
    """A tensor's values, copied to host memory, and its shape, should a step resize it."""
    shape, device = tensor.shape, tensor.device
    if not values or device.type == "meta" or is_freed(tensor):
        return _nothing
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        whole = tensor.detach().clone()

        def restore_whole() -> None:
            with torch.no_grad():
                tensor.copy_(whole)

        return restore_whole
    kept = _dense(tensor).to("cpu", copy=True)

    def restore() -> None:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            data = tensor.data
            if data.shape == shape and not is_freed(data):
                _dense(data).copy_(kept)
            else:
                tensor.data = kept.to(device, copy=True).expand(shape)

    return restore


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without the dimensions that ``expand`` repeats, which can't be written to."""
    data = tensor.detach()
    if not any(stride == 0 and size > 1 for size, stride in zip(data.shape, data.stride(), strict=True)):
        return data
    size = [1 if stride == 0 else size for size, stride in zip(data.shape, data.stride(), strict=True)]
    return data.as_strided(size, data.stride(), data.storage_offset())


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether the storage was resized away, as sharded training does with parameters that aren't needed now."""
    return tensor.layout is torch.strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
