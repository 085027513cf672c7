"""A trial leaves no trace: everything that a training step can change, kept and put back.

:meth:`Snapshot.take` walks the model, optimizers, schedulers, scalers and whatever else it is given, and keeps what
each object holds: which objects (a buffer may be replaced by a larger one during a step, with a plain attribute
beside it), and the values of tensors, arrays, containers and generators. :meth:`Snapshot.restore` puts the same objects
back with the same values, to the last bit, and touches nothing that is unchanged already.
"""

from __future__ import annotations

import logging
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lhotse_oomfit.errors import CalibrationError, InvalidArgumentError
from lhotse_oomfit.keepers import (
    GENERATORS_AND_ARRAYS,
    is_freed,
    keep_attributes,
    keep_bytearray,
    keep_dict,
    keep_gradient,
    keep_list,
    keep_set_or_deque,
    keep_state,
    keep_values,
)

__all__ = ["Snapshot", "leave_no_trace", "unwrapped_optimizers"]

logger = logging.getLogger(__name__)

_STATEFUL = (torch.nn.Module, Optimizer, LRScheduler, ReduceLROnPlateau, torch.amp.GradScaler)
"""Opened wherever they are found."""

_CLOSED = frozenset({
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "logging", "threading", "_thread", "multiprocessing",
    "concurrent", "asyncio", "queue", "weakref", "io", "_io", "subprocess", "socket",
})  # fmt: skip
"""Packages whose objects are never opened when they are only found in an attribute: a module that refers to its
trainer doesn't own it, and nobody owns a lock."""

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, types.ModuleType, torch.dtype, torch.device, torch.Size,
)  # fmt: skip


class Snapshot:
    """What a model and all that trains it held at one moment, see :meth:`take`."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}  # holds the objects, so that no id is used twice
        # Types to pass over, without and with objects being opened: a long list holds many of a few types.
        self._inert: tuple[set[type], set[type]] = (set(), set())
        self._restorers: list[Callable[[], object]] = []
        self._unkept: list[_Unkept] = []
        self._keeps_parameters = True
        self._globals = _GlobalState()

    @classmethod
    def take(
        cls,
        model: torch.nn.Module,
        optimizers: Iterable[Any] = (),
        schedulers: Iterable[Any] = (),
        scalers: Iterable[Any] = (),
        extras: Iterable[Any] = (),
        *,
        parameters: bool = True,
        optimizer_state: bool = True,
    ) -> Snapshot:
        """Keep the state of all these objects, and of the generators of Python, numpy, torch and every CUDA device.

        :param model: every submodule's parameters, buffers, gradients, hooks and plain attributes are kept.
        :param optimizers: torch optimizers, or wrappers of them, whose own attributes are kept too.
        :param schedulers: learning-rate schedulers.
        :param scalers: gradient scalers.
        :param extras: any other objects whose attributes, and the containers among them, are to be kept.
        :param parameters: whether the values of parameters that need gradients may change. With False neither they nor
            the optimizer's state are copied, which is most of the cost; copies are made in host memory.
        :param optimizer_state: whether an optimizer step will be taken. With False the values of its state are not
            copied; those of parameters still are, which a step may clamp or renormalise by itself.
        :raises InvalidArgumentError: for a model with lazy parameters that are not initialised yet.
        """
        lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
        if lazy:
            raise InvalidArgumentError(
                f"the model's parameters must all be initialised before trial steps, {', '.join(lazy)} "
                f"{'is' if len(lazy) == 1 else 'are'} lazy; run one forward pass first"
            )
        snapshot = cls()
        optimizers = list(optimizers)
        snapshot._keeps_parameters = parameters
        if not parameters:
            # Others than these a forward pass may change (an EMA teacher).
            snapshot._leave_out_values(parameter for parameter in model.parameters() if parameter.requires_grad)
        if not parameters or not optimizer_state:
            snapshot._leave_out_values(_state_of(optimizers))
        for root in (model, *optimizers, *schedulers, *scalers):
            snapshot._keep_object(root, opens=True)
        for extra in extras:
            snapshot._keep_root(extra)
        return snapshot

    def restore(self) -> None:
        """Put everything back; may be called more than once.

        :raises CalibrationError: when a tensor changed whose values were not to be kept; all else is restored then.
        """
        with ExitStack() as stack:  # calls the last first, and each even if another fails
            stack.callback(self._globals.restore)
            for restore in reversed(self._restorers):
                stack.callback(restore)
        changed = [unkept.shape for unkept in self._unkept if unkept.changed()]
        if changed and self._keeps_parameters:
            raise CalibrationError(
                f"the optimizer's state must not change in a trial, {len(changed)} of its tensors did (the first has "
                f"the shape {changed[0]}); leave every optimizer.step() out of training_step"
            )
        if changed:
            raise CalibrationError(
                f"the parameters must not change in a trial without an optimizer step, {len(changed)} did "
                f"(the first has the shape {changed[0]}); take the snapshot with parameters=True"
            )

    def _leave_out_values(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if self._is_new(tensor):
                self._unkept.append(_Unkept(tensor))
                self._keep_tensor(tensor, values=False)

    def _is_new(self, value: object) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def _keep_root(self, value: Any) -> None:
        if _has_attributes(value) and not isinstance(value, torch.Tensor):
            self._keep_object(value, opens=False)
        self._keep(value, opens=False)

    def _keep_object(self, value: Any, *, opens: bool) -> None:
        """Keep an object's attributes; with ``opens`` those of plain objects among them too."""
        if self._is_new(value):
            attributes = value.__dict__
            self._restorers.append(keep_attributes(attributes))
            for name, attribute in list(attributes.items()):
                wrapped = name in ("optimizer", "_optimizer") and _has_attributes(attribute)
                (self._keep_object if wrapped else self._keep)(attribute, opens=opens)
            if isinstance(value, torch.jit.ScriptModule):
                self._keep_script_module(value)

    def _keep_script_module(self, module: torch.jit.ScriptModule) -> None:
        """A scripted module keeps its state in C++, out of its ``__dict__``."""
        for tensor in (*module.parameters(), *module.buffers()):
            self._keep(tensor, opens=False)
        for submodule in module.modules():
            self._restorers.append(partial(_set_training, submodule, submodule.training))

    def _keep(self, value: Any, *, opens: bool) -> None:
        inert = self._inert[opens]
        if type(value) in inert:
            return
        if isinstance(value, _STATEFUL):
            self._keep_object(value, opens=True)
        elif isinstance(value, torch.Tensor):
            if self._is_new(value):
                self._keep_tensor(value, values=True)
        elif isinstance(value, dict | list | set | deque | bytearray | tuple | frozenset):
            if self._is_new(value):
                self._keep_container(value)
        elif isinstance(value, GENERATORS_AND_ARRAYS):
            if self._is_new(value):
                self._restorers.append(keep_state(value))
        elif not opens or not _has_attributes(value) or type(value).__module__.partition(".")[0] in _CLOSED:
            inert.add(type(value))
        else:
            self._keep_object(value, opens=False)

    def _keep_container(self, container: Any) -> None:
        if isinstance(container, dict):
            self._restorers.append(keep_dict(container))
            items: Iterable[Any] = [item for pair in container.items() for item in pair]
        else:
            items = () if isinstance(container, bytearray) else list(container)
            if isinstance(container, list):
                self._restorers.append(keep_list(container))
            elif isinstance(container, set | deque):
                self._restorers.append(keep_set_or_deque(container))
            elif isinstance(container, bytearray):
                self._restorers.append(keep_bytearray(container))
        for item in items:
            self._keep(item, opens=False)

    def _keep_tensor(self, tensor: torch.Tensor, *, values: bool) -> None:
        self._restorers.append(keep_values(tensor, values=values))
        if tensor.is_leaf:
            if tensor.grad is not None:
                self._keep(tensor.grad, opens=False)
            self._restorers.append(keep_gradient(tensor))
        if tensor.__dict__:
            self._restorers.append(keep_attributes(tensor.__dict__))


@contextmanager
def leave_no_trace(
    model: torch.nn.Module,
    optimizers: Iterable[Any] = (),
    schedulers: Iterable[Any] = (),
    scalers: Iterable[Any] = (),
    extras: Iterable[Any] = (),
    *,
    parameters: bool = True,
    optimizer_state: bool = True,
) -> Iterator[Snapshot]:
    """Take a snapshot, and restore it on the way out, an exception's way too. Arguments as in :meth:`Snapshot.take`.

    :raises CalibrationError: as :meth:`Snapshot.restore`, but never in place of an exception that is on its way.
    """
    snapshot = Snapshot.take(
        model, optimizers, schedulers, scalers, extras, parameters=parameters, optimizer_state=optimizer_state
    )
    try:
        yield snapshot
    except BaseException:
        try:
            snapshot.restore()
        except RuntimeError as error:  # a device that no longer answers
            logger.warning("what the trials changed could not all be restored: %s", error)
        raise
    snapshot.restore()


class _Unkept:
    """A tensor without a copy of its values; tells whether they changed, by their sum in float64."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = self._read_version()
        self._sum = self._read_sum()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tensor.shape)

    def changed(self) -> bool:
        # The version alone may count a mere move of the values, as cuDNN's RNNs do to make their weights contiguous.
        if self._version == self._read_version():
            return False
        return not torch.allclose(self._sum, self._read_sum(), rtol=1e-12, atol=0.0, equal_nan=True)

    def _read_version(self) -> int:
        return 0 if self._tensor.is_inference() else self._tensor._version

    def _read_sum(self) -> torch.Tensor:
        data = self._tensor.detach()
        if data.device.type == "meta" or data.layout is not torch.strided or is_freed(data) or data.is_complex():
            return torch.zeros((), dtype=torch.float64)
        return data.sum(dtype=torch.float64)


class _GlobalState:
    """The process's generators, and torch's switches that a step might leave turned."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._grad_enabled = torch.is_grad_enabled()
        cudnn = torch.backends.cudnn
        self._cudnn = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic)

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        if torch.is_grad_enabled() != self._grad_enabled:
            torch.set_grad_enabled(self._grad_enabled)
        cudnn: Any = torch.backends.cudnn
        if (cudnn.enabled, cudnn.benchmark, cudnn.deterministic) != self._cudnn:
            cudnn.enabled, cudnn.benchmark, cudnn.deterministic = self._cudnn


def unwrapped_optimizers(optimizer: Any) -> Iterator[Any]:
    """The optimizer and those it wraps, outermost first."""
    seen: set[int] = set()
    while optimizer is not None and id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield optimizer
        attributes = getattr(optimizer, "__dict__", {})
        optimizer = attributes.get("optimizer", attributes.get("_optimizer"))


def _state_of(optimizers: Iterable[Any]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        for inner in unwrapped_optimizers(optimizer):
            state = inner.__dict__.get("state") if isinstance(inner, Optimizer) else None
            for entry in (state or {}).values():
                yield from (value for value in entry.values() if isinstance(value, torch.Tensor))


def _has_attributes(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, _ATOMS)


def _set_training(module: torch.nn.Module, training: bool) -> None:
    if module.training != training:
        module.training = training
