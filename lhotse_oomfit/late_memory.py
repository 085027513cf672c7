"""Memory that appears only after a calibration, where no trial could see it: found in training's first steps.

A callback that copies the parameters when training starts, an average that is made at its first update: batch sizes
can't allow for what nobody knows of. An allocator's total doesn't tell it from a batch and outputs that are alive for
the moment, so tensors are compared, those that the garbage collector knows. What is alive after two steps and still is
after four, wasn't there when sizes were found, and is no part of the training that trials had (parameters, gradients,
buffers, what forward passes keep in the modules, optimizers), stays. A plain loop may take several steps on one batch,
which is then alive at both; what stayed is looked at again there, after many steps. What only C++ holds isn't seen.
"""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lhotse_oomfit.memory import live_tensors
from lhotse_oomfit.profile import format_bytes, parse_bytes
from lhotse_oomfit.snapshot import unwrapped_optimizers
from lhotse_oomfit.training import Training, resident_tensors

__all__ = ["LateMemory", "watch_steps"]

logger = logging.getLogger(__name__)

_FIRST_LOOK, _SECOND_LOOK, _LAST_LOOK = 2, 4, 32
"""Steps of training after which to look: copies are made by the first or second; a batch that was read ahead at the
first look is gone at the second, and at the last one even a batch that takes a critic's or a chunk's step many times
over. The last is for what stayed until the second, where nobody tells when a batch begins."""
_TOLERATED_SHARE, _TOLERATED_BYTES = 0.01, 4 * 1024**2
"""Of the budget, and at least: less is noise beside what the sizes leave free."""

_Reference: TypeAlias = "weakref.ref[torch.UntypedStorage]"


class LateMemory:
    """Looks a few times at what training keeps alive, and warns once if it is more than was there at calibration.

    It changes nothing and copies nothing. Make it when the calibration is over.

    :param training: what was calibrated; no longer needed after the last look.
    :param budget_bytes: the budget of its batch sizes.
    :param reserve: what was kept out of that budget for this very purpose.
    """

    def __init__(self, training: Training, *, budget_bytes: int, reserve: str | int | None = None) -> None:
        self._training = replace(training, extras=(), holders=())  # late copies may well be in there
        self._tolerated_bytes = max(int(_TOLERATED_SHARE * budget_bytes), _TOLERATED_BYTES)
        self._reserve_bytes = 0 if reserve is None else parse_bytes(reserve)
        self._trained = {id(parameter): parameter for parameter in _trained(training.module)}
        self._told_of_frozen = False
        self._parameters = list(training.module.parameters())  # a module added later is late
        self._buffers = {id(module): module for module in training.module.modules()}
        self._before = {key: ref for key, ref, _ in _alive(training.device)}
        self._appeared: list[tuple[_Reference, tuple[int, ...]]] | None = None
        self._set_up: list[_Reference] = []
        self._is_waiting = False
        self.is_done = False

    def after(self, num_steps: int, batch: Any = (), *, within_batch: bool = False) -> None:
        """Look, if it is time to.

        :param num_steps: how many steps of an optimizer training has made since it was calibrated; a call before the
            first tells what hooks keep in the modules from what forward passes do.
        :param batch: what is alive at this moment and about to go.
        :param within_batch: whether this may be the same batch as in the last call.
        """
        if num_steps == 0:
            self._set_up = [weakref.ref(storage) for storage in _storages(self._in_attributes())]
        if self.is_done or num_steps < (_FIRST_LOOK if self._appeared is None else _SECOND_LOOK):
            return
        if self._is_waiting and num_steps < _LAST_LOOK:
            return
        set_up = {storage._cdata for storage in (ref() for ref in self._set_up) if storage is not None}
        expected = {storage._cdata for storage in _storages(self._in_attributes())} - set_up
        expected |= {storage._cdata for storage in _storages([*self._known(), *tree_leaves(batch)])}
        if self._appeared is None:
            self._appeared = [
                (ref, shape)
                for key, ref, shape in _alive(self._training.device)
                if key not in expected and (key not in self._before or self._before[key]() is None)
            ]
            return
        if self._exceeds(_stayed(self._appeared, expected)):
            gc.collect()  # it may be garbage
            stayed = _stayed(self._appeared, expected)
            self._is_waiting = self._exceeds(stayed) and within_batch and num_steps < _LAST_LOOK
            if self._is_waiting:
                return
            if self._exceeds(stayed):
                late_bytes = sum(nbytes for nbytes, _ in stayed)
                logger.warning(
                    "rank %s: %s of memory appeared after calibration and stays (tensors: %s, the largest of shape "
                    '%s), which the batch sizes do not allow for; set reserve="%s", or make it before calibrating',
                    _rank(),
                    format_bytes(late_bytes),
                    len(stayed),
                    max(stayed)[1],
                    _as_option(late_bytes),
                )
        self.is_done = True
        self._before, self._appeared, self._set_up = {}, [], []

    def _exceeds(self, stayed: list[tuple[int, tuple[int, ...]]]) -> bool:
        return sum(nbytes for nbytes, _ in stayed) - self._reserve_bytes > self._tolerated_bytes

    def check_frozen(self) -> None:
        """Warn once of parameters that need gradients now and did not when sizes were measured."""
        if self._told_of_frozen:
            return
        thawed = [parameter for parameter in _trained(self._training.module) if id(parameter) not in self._trained]
        least_bytes = sum(parameter.nbytes for parameter in thawed)
        least_bytes += math.ceil(least_bytes * _state_per_byte(self._training.optimizers))
        if not thawed or least_bytes <= self._reserve_bytes:
            return
        self._told_of_frozen = True
        logger.warning(
            "rank %s: %s parameters that were frozen when batch sizes were measured are trained now; their gradients "
            'and optimizer state take at least %s, and activations that are kept for them more; set reserve="%s" or '
            "above, or calibrate with them unfrozen",
            _rank(),
            len(thawed),
            format_bytes(least_bytes),
            _as_option(least_bytes),
        )

    def _known(self) -> Iterator[torch.Tensor]:
        """What trials had too, whatever it has become since."""
        for parameter in self._parameters:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        for module in self._buffers.values():
            yield from module.buffers(recurse=False)
        yield from resident_tensors(replace(self._training, module=torch.nn.Module()))

    def _in_attributes(self) -> Iterator[torch.Tensor]:
        """What modules keep in plain attributes, such as positional encodings that grow: trials' passes made it too."""
        for module in self._buffers.values():
            values = [value for name, value in vars(module).items() if name != "_parameters"]
            yield from live_tensors(torch.nn.Module(), extras=(v for v in values if not isinstance(v, torch.nn.Module)))


class _Watch:
    """A hook of an optimizer that calls :meth:`LateMemory.after` until that is done, and then does and holds nothing.

    It can't go: an optimizer walks through its hooks while it calls them, and fails when one of them is taken out.
    """

    def __init__(self, late: LateMemory) -> None:
        self._late: LateMemory | None = late
        self._num_steps = 0

    def __call__(self, *args: Any) -> None:
        if self._late is None or torch.compiler.is_compiling():
            return  # there is nothing to see in a step that is being traced, and nothing in it may change
        self._num_steps += 1
        self._late.after(self._num_steps, within_batch=True)
        if self._late.is_done:
            self._late = None


def watch_steps(late: LateMemory, optimizers: Iterable[Any]) -> None:
    """Let `late` look after the first steps of a plain loop, by a hook of the first optimizer that is one of torch's.

    The hook is in no pickle and no ``state_dict``, and does nothing after the fourth step, or after the last look if
    something stayed until then. A compiled ``step`` isn't watched.
    """
    for optimizer in optimizers:
        for layer in unwrapped_optimizers(optimizer):
            if isinstance(layer, torch.optim.Optimizer) and "_optimizer_step_post_hooks" in vars(layer):
                layer.register_step_post_hook(_Watch(late))
                return


def _stayed(
    appeared: Iterable[tuple[_Reference, tuple[int, ...]]], expected: set[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Bytes and shapes of what is still alive, apart from what is expected to be."""
    storages = ((ref(), shape) for ref, shape in appeared)
    return [(s.nbytes(), shape) for s, shape in storages if s is not None and s._cdata not in expected]


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    with torch._C.DisableTorchFunctionSubclass():
        for value in values:
            if not issubclass(type(value), torch.Tensor):
                continue
            if is_traceable_wrapper_subclass(value):
                yield from _storages(getattr(value, name) for name in value.__tensor_flatten__()[0])
                continue
            try:
                yield value.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse ones; their parts are seen
                continue


def _alive(device: torch.device) -> Iterator[tuple[int, _Reference, tuple[int, ...]]]:
    """The storages on a device of all tensors that the garbage collector knows: key, reference, a tensor's shape."""
    seen: set[int] = set()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    for tensor in tensors:
        for storage in _storages([tensor]):
            if storage.device == device and storage._cdata not in seen:
                seen.add(storage._cdata)
                yield storage._cdata, weakref.ref(storage), tuple(tensor.shape)


def _state_per_byte(optimizers: Iterable[Any]) -> float:
    """Bytes of optimizer state per byte of the parameters that have some."""
    of_state, of_parameters = 0, 0
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, torch.Tensor):
                of_parameters += parameter.nbytes
                of_state += sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    return of_state / of_parameters if of_parameters else 0.0


def _as_option(num_bytes: int) -> str:
    """Rounded up, as ``reserve`` takes it."""
    gib = num_bytes / 1024**3
    return f"{math.ceil(10 * gib) / 10:g}GiB" if gib >= 1 else f"{math.ceil(num_bytes / 1024**2)}MiB"


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
