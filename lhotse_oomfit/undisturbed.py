"""A way to call a dataset that leaves its random numbers, and its own attributes, as they were.

Collating worst-case batches draws from generators that training will draw from: Python's, numpy's and torch's global
ones, and those that transforms keep in attributes. Some are made on first use (Lhotse's ``PerturbSpeed``). So both the
states of all generators within reach and the attributes of all objects within reach are put back.
"""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from lhotse.cut import Cut, CutSet
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Generators", "reseed", "undisturbed", "untracked"]

_MAX_OBJECTS = 20_000  # a dataset with more parts than this holds data, not transforms
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    types.ModuleType,
    torch.Tensor,
    np.ndarray,
    Cut,
    CutSet,
    random.SystemRandom,  # has no state
)
_FOREIGN = frozenset(
    {"threading", "_thread", "concurrent", "queue", "multiprocessing", "asyncio", "logging", "io", "_io", "h5py"}
    | {"lightning", "pytorch_lightning", "rich", "tqdm", "sentencepiece"}
)  # machinery with state of its own, which may run in other threads; no place for a dataset's random numbers


_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)


def reseed(seed: int) -> None:
    """Seed Python's, numpy's and torch's global CPU generators; CUDA's are left alone, nothing is queued for later."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def untracked() -> AbstractContextManager[Any]:
    """Hide operators from dispatch modes: a batch is collated in a worker process, outside any measurement.

    A tracker of storages meets the batch when the training step first touches it.
    """
    return _disable_current_modes()


class Generators:
    """The global generators, and those that some objects reach: an object's own are seeded like the global ones.

    Without that, what a transform draws would depend on the process, and on what was drawn before.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._own: list[Any] = []

    def find(self) -> bool:
        """Look for generators again, since some are made on first use; whether there are others than before."""
        known = {id(generator) for generator in self._own}
        self._own = [value for value in _reachable(self._roots) if isinstance(value, _GENERATORS)]
        return any(id(generator) not in known for generator in self._own)

    def reseed(self, seed: int) -> None:
        """Seed all of them."""
        reseed(seed)
        for index, generator in enumerate(self._own):
            _seed(generator, 101 * seed + index + 1)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)


@contextmanager
def undisturbed(*roots: Any) -> Iterator[None]:
    """Put back, on exit, all global generators and whatever ``roots`` reach by attributes and containers."""
    restore: list[Callable[[], object]] = [_keep_global_generators()]
    restore.extend(_keep(value) for value in _reachable(roots))
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


def _keep_global_generators() -> Callable[[], None]:
    python, numpy_state, cpu = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def put_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)

    return put_back


def _keep(value: Any) -> Callable[[], object]:
    """Return a function that puts ``value`` back as it is now."""
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, (list, deque)):
        return functools.partial(_refill_sequence, value, list(value))
    if isinstance(value, (dict, set)):
        return functools.partial(_refill, value, value.copy())
    return functools.partial(_refill, vars(value), dict(vars(value)))


def _refill_sequence(container: Any, saved: list[Any]) -> None:
    if len(container) != len(saved) or any(a is not b for a, b in zip(container, saved, strict=True)):
        container.clear()
        container.extend(saved)


def _refill(container: Any, saved: Any) -> None:
    unchanged = len(container) == len(saved) and (
        all(container.get(key, saved) is value for key, value in saved.items())
        if isinstance(saved, dict)
        else container == saved
    )
    if not unchanged:
        container.clear()
        container.update(saved)


def _reachable(roots: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the mutable objects within reach, generators included; data and foreign machinery are passed by."""
    seen: set[int] = set()
    waiting = deque(roots)
    keep_alive = []
    while waiting and len(seen) < _MAX_OBJECTS:
        value = waiting.popleft()
        if id(value) in seen or isinstance(value, _LEAVES) or _is_trained(value):
            continue
        seen.add(id(value))
        keep_alive.append(value)
        if isinstance(value, _GENERATORS):
            yield value
        elif isinstance(value, (list, deque, set)):
            if len(value) < _MAX_OBJECTS:
                yield value
                waiting.extend(value)
        elif isinstance(value, (tuple, frozenset)):
            waiting.extend(value)
        elif type(value) is dict:
            if len(value) < _MAX_OBJECTS:
                yield value
                waiting.extend(value.values())
        elif isinstance(value, types.MethodType):
            waiting.extend((value.__self__, value.__func__))
        elif isinstance(value, functools.partial):
            waiting.extend((value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType):
            waiting.extend(cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
        elif hasattr(value, "__dict__") and type(value).__module__.split(".")[0] not in _FOREIGN:
            yield value
            waiting.extend(vars(value).values())


def _is_trained(value: Any) -> bool:
    """Models and optimizers are within reach of many collation functions, and too large to walk through every time."""
    if isinstance(value, torch.nn.Module):
        return any(parameter.requires_grad for parameter in value.parameters())
    return isinstance(value, torch.optim.Optimizer)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading is the test
    except ValueError:
        return False
    return True
