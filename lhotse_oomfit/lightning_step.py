"""One step of a Lightning training as a trial runs it, and what of a trainer can't be tried."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lhotse_oomfit.errors import UnsupportedStrategyError
from lhotse_oomfit.training import (
    check_backward,
    check_loss,
    forget_trials,
    hold_gradients,
    ran_backward,
    without_steps,
)

try:
    import lightning.pytorch as pl
    from lightning.pytorch import strategies as pl_strategies
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
except ImportError:  # the other name of the same package
    import pytorch_lightning as pl
    from pytorch_lightning import strategies as pl_strategies
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature

__all__ = ["LightningStep", "TrainingStepFunction", "check_trainer", "largest_accumulation", "pl", "silenced"]

logger = logging.getLogger(__name__)

TrainingStepFunction = Callable[[Any, Any], Any]
"""``training_step(module, batch)`` returns the loss, or None after it ran its backward passes itself."""

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
_REFUSED = ("DeepSpeed", "XLA")
"""In the names of what is derived from one of those, and runs steps in another way."""


class LightningStep:
    """What Lightning's loop does with one batch: transfer, ``training_step``, backward.

    :param training_step: stands in for the module's own, see :class:`~lhotse_oomfit.lightning.BucketBatchSizeFinder`.
    :param together: whether all ranks run the step at once, through the strategy's wrapper as in training; without it,
        one rank runs it on the module inside.
    """

    def __init__(
        self,
        trainer: Any,
        scaler: Any,
        training_step: TrainingStepFunction | None = None,
        *,
        together: bool = False,
    ) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        self._scaler = scaler
        self._training_step = training_step
        self._together = together
        self._has_returned = False
        self._holds_gradients = largest_accumulation(trainer) == 1  # else they are there all the time
        self._takes_batch_idx = is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2)

    def forward_backward(self, batch: Any) -> None:
        trainer, module = self._trainer, self._module
        if self._holds_gradients:
            hold_gradients(module)
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        if self._training_step is not None:
            loss = self._run_given(self._training_step, batch)
            if loss is None:
                return
        else:
            arguments = (batch, 0) if self._takes_batch_idx else (batch,)
            if self._together:
                output = trainer.strategy.training_step(*arguments)
            else:
                with trainer.precision_plugin.train_step_context():
                    output = module.training_step(*arguments)
            loss = output.get("loss") if isinstance(output, dict) else output
            check_loss(loss, f"{type(module).__name__}.training_step")
        if self._holds_gradients:
            self.zero_grad()
        loss = loss / trainer.accumulate_grad_batches
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        module.backward(loss)

    def _run_given(self, training_step: TrainingStepFunction, batch: Any) -> Any:
        """The loss that the given function returns; None if it ran backward."""
        strategy, module = self._trainer.strategy, self._module
        with ExitStack() as stack:
            stack.enter_context(without_steps(module, "training_step"))
            found = None if self._has_returned else stack.enter_context(ran_backward(module))
            if self._together:
                with _in_place_of_own(module, training_step):
                    loss = strategy.training_step(batch)
            else:
                with self._trainer.precision_plugin.train_step_context(), _without_sync(strategy.model):
                    loss = training_step(module, batch)
        if loss is not None:
            check_loss(loss, "training_step")
        elif found is not None:
            check_backward(found, "training_step")
        self._has_returned = True
        return loss

    def optimizer_step(self) -> None:
        for optimizer in self._trainer.strategy.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        self._module.zero_grad(set_to_none=True)
        for optimizer in self._trainer.strategy.optimizers:
            optimizer.zero_grad(set_to_none=True)


@contextmanager
def _in_place_of_own(module: Any, training_step: TrainingStepFunction) -> Iterator[None]:
    """Let the strategy, which calls the module's ``training_step`` inside its wrapper, call the given one."""
    module.__dict__["training_step"] = lambda batch: training_step(module, batch)
    try:
        yield
    finally:
        del module.__dict__["training_step"]


def largest_accumulation(trainer: Any) -> int:
    """The most batches that gradients are accumulated over, in this epoch or a later one."""
    planned = [
        value
        for callback in trainer.callbacks
        if isinstance(callback, pl.callbacks.GradientAccumulationScheduler)
        for value in callback.scheduling.values()
    ]
    return int(max([trainer.accumulate_grad_batches, *planned]))


@contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    """Let ``manual_backward`` not wait for the other ranks, which run no trial."""
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    synced = model.require_forward_param_sync
    try:
        with model.no_sync():
            yield
    finally:
        model.require_forward_param_sync = synced
        forget_trials(model)


def check_trainer(trainer: Any, *, own_step: bool, reserved: bool) -> None:
    """Refuse what can't be tried by single steps, and warn of what will change.

    :param own_step: whether the user gave a step to run in place of the module's.
    :param reserved: whether memory is kept for what appears later.
    :raises UnsupportedStrategyError: naming what it is, and what to do instead.
    """
    strategy = trainer.strategy
    known = tuple(getattr(pl_strategies, name) for name in _STRATEGIES if hasattr(pl_strategies, name))
    names = [kind.__name__ for kind in type(strategy).__mro__]
    if not isinstance(strategy, known) or any(word in name for name in names for word in _REFUSED):
        raise UnsupportedStrategyError(
            f"strategy {type(strategy).__name__} can't be calibrated: only steps of one device, DDP, FSDP and FSDP2 "
            f"(ModelParallelStrategy) can be tried; use one of these, or set bucket_batch_size to a list of sizes"
        )
    module = trainer.lightning_module
    frozen = sum(not parameter.requires_grad for parameter in module.parameters())
    unfreezing = any(isinstance(callback, pl.callbacks.BaseFinetuning) for callback in trainer.callbacks)
    if frozen and unfreezing and not reserved:
        logger.warning(
            "%s parameters are frozen now, and a finetuning callback may unfreeze them later, when training will need "
            "more memory than is measured now; set reserve= to what their gradients, optimizer state and activations "
            "will take, or calibrate with them unfrozen",
            frozen,
        )
    if own_step:
        return
    if not module.automatic_optimization:
        raise UnsupportedStrategyError(
            f"{type(module).__name__} uses manual optimization, whose steps can't be tried, as they change the "
            f"parameters; pass training_step= to BucketBatchSizeFinder, a function of the module and a batch that does "
            f"the same without optimizer.step(), or set bucket_batch_size to a list of sizes"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise UnsupportedStrategyError(
            f"{type(module).__name__}.training_step takes a dataloader_iter instead of a batch, so that no single "
            f"batch can be tried; set bucket_batch_size to a list of sizes"
        )


@contextmanager
def silenced(trainer: Any, module: Any) -> Iterator[None]:
    """Let ``self.log`` and the loggers swallow what the trials log: outside the loop the former raises."""
    modules = [child for child in module.modules() if isinstance(child, pl.LightningModule)]
    loggers = trainer.loggers

    def log(*args: Any, **kwargs: Any) -> None:
        """Log nothing."""

    for child in modules:
        child.__dict__["log"] = log
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        with torch.enable_grad():
            yield
    finally:
        trainer.loggers = loggers
        for child in modules:
            del child.__dict__["log"]
