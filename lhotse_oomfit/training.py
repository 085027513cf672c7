"""What a calibration must know of the user's training, however the training loop is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lhotse import CutSet
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lhotse_oomfit.errors import InvalidArgumentError, UnsupportedStrategyError
from lhotse_oomfit.memory import live_tensors
from lhotse_oomfit.snapshot import unwrapped_optimizers
from lhotse_oomfit.strategies import local_bytes, unwrap_model
from lhotse_oomfit.trial import TrainingStep

__all__ = [
    "LossStep",
    "MakeBatch",
    "Training",
    "check_backward",
    "check_loss",
    "forget_trials",
    "gradient_bytes",
    "hold_gradients",
    "loop_training",
    "must_wake",
    "parts_of",
    "ran_backward",
    "resident_tensors",
    "unwrap_dataset",
    "without_steps",
]

MakeBatch = Callable[..., Any]
"""``make_batch(batch_size=..., input_len=..., output_len=...)`` returns a batch as the DataLoader would yield it."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything about the user's training that a calibration needs, however the training loop is written.

    :param module: the model, not wrapped in DistributedDataParallel.
    :param step: runs one step of it.
    :param model: the model as training calls it; None where that is `module` itself.
    :param step_together: runs one step of `model`, which all ranks must run at once; None where that is `step`.
    :param collate: turns a CutSet into the batch that `step` takes.
    :param dataset: described in the fingerprint; its own state is kept.
    :param optimizers, schedulers, scalers, extras: whose state the trials must leave as it is.
    :param holders: what else keeps tensors through a step and isn't touched by one, such as a trainer's callbacks.
    :param make_batch: makes worst-case batches instead of `collate`.
    :param accumulate_grad_batches: above 1, gradients are alive while a forward pass runs.
    :param forward_gradients: whether `step` runs its forward pass with the last step's gradients still alive.
    :param settings: what else decides memory, for the fingerprint: precision, strategy, ...
    :param functions: the user's functions that decide what a step does, by name, for the fingerprint.
    """

    module: torch.nn.Module
    step: TrainingStep
    collate: Callable[[CutSet], Any]
    dataset: Any
    optimizers: Sequence[torch.optim.Optimizer]
    model: torch.nn.Module | None = None
    step_together: TrainingStep | None = None
    schedulers: Sequence[Any] = ()
    scalers: Sequence[Any] = ()
    extras: Sequence[Any] = ()
    holders: Sequence[Any] = ()
    make_batch: MakeBatch | None = None
    accumulate_grad_batches: int = 1
    forward_gradients: bool = False
    functions: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        devices = {parameter.device for parameter in self.module.parameters()}
        if len(devices) != 1:
            raise UnsupportedStrategyError(
                f"the model's parameters must be on one device to be calibrated, they are on "
                f"{sorted(str(device) for device in devices) or 'none'}"
            )
        return devices.pop()


class LossStep:
    """A step of a plain PyTorch loop: the user's forward pass, backward, every optimizer's step.

    A `training_step` that returns None ran its backward passes itself, several as a rule.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        training_step: Callable[[Any, Any], torch.Tensor | None],
        scaler: Any,
        accumulate_grad_batches: int,
    ) -> None:
        self._module = module
        self._optimizers = optimizers
        self._training_step = training_step
        self._scaler = scaler
        self._accumulate_grad_batches = accumulate_grad_batches
        self._runs_backward = False
        self._has_returned = False

    def forward_backward(self, batch: Any) -> None:
        if self._runs_backward:
            hold_gradients(self._module)
        with ExitStack() as stack:
            stack.enter_context(without_steps(self._module, "training_step"))
            found = None if self._has_returned else stack.enter_context(ran_backward(self._module))
            loss = self._training_step(self._module, batch)
        if loss is None and found is not None:
            check_backward(found, "training_step")
        self._has_returned = True
        if loss is None:
            if not self._runs_backward:
                # Only now is it known that one model's gradients are alive in the other's passes.
                self._runs_backward = True
                self.forward_backward(batch)
            return
        check_loss(loss, "training_step")
        if self._accumulate_grad_batches > 1:
            loss = loss / self._accumulate_grad_batches
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()

    def optimizer_step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        self._module.zero_grad(set_to_none=True)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)


def loop_training(
    sampler: Any,
    dataset: Any,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    training_step: Callable[[Any, Any], torch.Tensor | None],
    make_batch: MakeBatch | None = None,
    accumulate_grad_batches: int = 1,
    scheduler: Any = None,
    scaler: Any = None,
    extras: Sequence[Any] = (),
    precision: str = "",
    collate_fn: Callable[[Any], Any] | None = None,
) -> Training:
    """A plain PyTorch loop as a :class:`Training`; see :func:`lhotse_oomfit.calibrate` for the parameters.

    :raises InvalidArgumentError: for an argument that can't be honoured.
    :raises UnsupportedStrategyError: for a model that can't be calibrated.
    """
    inner, wrapped = unwrap_dataset(dataset, sampler)
    module = unwrap_model(model)
    for name, value in (("training_step", training_step), ("make_batch", make_batch), ("collate_fn", collate_fn)):
        if not callable(value) and (value is not None or name == "training_step"):
            raise InvalidArgumentError(f"{name} must be a function, it is {value!r}")
    if not isinstance(precision, str):
        raise InvalidArgumentError(f'precision must be text such as "bf16", it is {precision!r}')
    if scaler is not None and not hasattr(scaler, "scale"):
        raise InvalidArgumentError(f"scaler must be a GradScaler, it is {scaler!r}")
    for name, values in (("scheduler", _listed(scheduler)), ("extras", extras)):
        if (
            isinstance(values, str)
            or not isinstance(values, Sequence)
            or any(not hasattr(v, "__dict__") for v in values)
        ):
            raise InvalidArgumentError(f"{name} must hold objects with a state, it is {values!r}")
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    if not optimizers or any(not hasattr(each, name) for each in optimizers for name in ("step", "param_groups")):
        raise InvalidArgumentError(f"optimizer must be an optimizer, or several in a list, it is {optimizer!r:.200}")
    if not isinstance(accumulate_grad_batches, int) or accumulate_grad_batches < 1:
        raise InvalidArgumentError(
            f"accumulate_grad_batches must be a whole number of at least 1, it is {accumulate_grad_batches!r}"
        )
    return Training(
        module=module,
        step=LossStep(module, optimizers, training_step, scaler, accumulate_grad_batches),
        model=model,
        step_together=LossStep(model, optimizers, training_step, scaler, accumulate_grad_batches),
        collate=(lambda cuts: collate_fn(inner[cuts])) if collate_fn is not None else inner.__getitem__,
        dataset=inner,
        optimizers=optimizers,
        schedulers=_listed(scheduler),
        scalers=_listed(scaler),
        extras=[*extras, wrapped] if wrapped is not None else list(extras),
        make_batch=make_batch,
        accumulate_grad_batches=accumulate_grad_batches,
        functions={"training_step": training_step, "collate_fn": collate_fn, "make_batch": make_batch},
        settings={"strategy": type(model).__name__ if module is not model else "single", "precision": precision or "-"},
    )


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def unwrap_dataset(dataset: Any, sampler: Any) -> tuple[Any, Any]:
    """The map-style dataset inside Lhotse's IterableDatasetWrapper, and that wrapper; or `dataset` and None.

    :raises InvalidArgumentError: if the wrapper holds another sampler, or the dataset can't be indexed by cuts.
    """
    wrapped: Any = None
    if isinstance(dataset, torch.utils.data.IterableDataset) and hasattr(dataset, "sampler"):
        wrapped = dataset
        if wrapped.sampler is not sampler:
            raise InvalidArgumentError(
                "dataset wraps another sampler than the one to calibrate; pass the sampler that the "
                "IterableDatasetWrapper was made with"
            )
        dataset = wrapped.dataset
    if not hasattr(dataset, "__getitem__"):
        raise InvalidArgumentError(
            f"dataset must turn a CutSet into a batch by dataset[cuts], {type(dataset).__name__} has no __getitem__; "
            f"pass the dataset that the DataLoader gets, not the DataLoader"
        )
    return dataset, wrapped


def check_loss(loss: Any, name: str) -> None:
    """Refuse what has no backward pass.

    :raises InvalidArgumentError: naming what was returned.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            what = "a scalar tensor without a gradient"
        raise InvalidArgumentError(f"{name} must return the loss, a scalar tensor with a gradient, it returned {what}")


@contextmanager
def ran_backward(module: torch.nn.Module) -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether any parameter was given a gradient inside, whatever became of it since.

    A step that ends with ``zero_grad()`` leaves none. Nothing is left on the parameters afterwards.
    """
    seen = False

    def note(parameter: torch.Tensor) -> None:
        nonlocal seen
        seen = True

    def found() -> bool:
        # A sharded parameter's gradient may be put there by other means than autograd's.
        return seen or any(p.grad is not None and bool(p.grad.any()) for p in module.parameters())

    watched = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter.is_leaf]
    hooked = [parameter for parameter in watched if parameter._post_accumulate_grad_hooks is None]
    handles = [parameter.register_post_accumulate_grad_hook(note) for parameter in watched]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for parameter in hooked:
            setattr(parameter, "_post_accumulate_grad_hooks", None)  # noqa: B010  an empty dict stays else


def check_backward(found: Callable[[], bool], name: str) -> None:
    """Refuse a step that returned None without having run a backward pass.

    :param found: of :func:`ran_backward`.
    :raises InvalidArgumentError: if no parameter was given a gradient.
    """
    if not found():
        raise InvalidArgumentError(
            f"{name} must return the loss, or None after running backward itself; it returned None and no parameter "
            f"has a gradient"
        )


def hold_gradients(module: torch.nn.Module) -> None:
    """Let every gradient exist, of zeros where there is none, as after a step of training."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@contextmanager
def without_steps(module: torch.nn.Module, name: str) -> Iterator[None]:
    """Make any optimizer's step an error while the user's `name` runs, since parameters must not change in a trial.

    What was frozen inside for one of several optimizers trains again afterwards, out of memory or not.

    :raises InvalidArgumentError: at such a step.
    """

    def refuse(optimizer: torch.optim.Optimizer, *args: Any) -> None:
        raise InvalidArgumentError(
            f"{name} must leave optimizer.step() out, so that trial steps don't change the parameters; it called "
            f"{type(optimizer).__name__}.step(). Leave out gradient scaling's step and update too, and keep the rest: "
            f"zero_grad, forward and backward passes"
        )

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
        for parameter in trained:
            parameter.requires_grad_(True)


def forget_trials(model: Any) -> None:
    """Let DistributedDataParallel not take parameters for used because a trial used them.

    With ``find_unused_parameters`` its reducer notes what got gradients, in backward passes that aren't reduced too. A
    next step that left some of it out, a layer dropped at random or the other model of two, would be an error.
    """
    if isinstance(model, DistributedDataParallel) and model.find_unused_parameters:
        reset = getattr(model.reducer, "_reset_state", None)
        if reset is not None:
            reset()


def must_wake(optimizers: Sequence[Any]) -> bool:
    """Whether a first step will make some optimizer allocate: state that isn't there yet, or, since nobody can tell,
    a copy of the parameters that an optimizer around another one makes."""
    return any(
        len(list(unwrapped_optimizers(optimizer))) > 1
        or any(
            p.requires_grad and p not in optimizer.state for group in optimizer.param_groups for p in group["params"]
        )
        for optimizer in optimizers
    )


def resident_tensors(training: Training) -> Iterator[torch.Tensor]:
    """What lives through a step, for memory backends that can't ask an allocator: parameters, gradients, buffers,
    optimizer state, and what optimizers, extras and holders keep in plain attributes (an EMA, say); each once."""
    layers = [layer for optimizer in training.optimizers for layer in unwrapped_optimizers(optimizer)]
    kept: list[Any] = []
    for item in (*layers, *training.extras, *training.holders):
        kept += [item] if isinstance(item, torch.nn.Module) else getattr(item, "__dict__", {}).values()
    yield from {id(tensor): tensor for tensor in live_tensors(training.module, extras=kept)}.values()


def parts_of(dataset: Any, depth: int = 4) -> list[Any]:
    """A dataset and the objects it is made of (input strategies, transforms): augmentations draw from generators that
    they keep, and count what they did."""
    found: list[Any] = []
    level = [dataset]
    for _ in range(depth):
        following: list[Any] = []
        for item in level:
            if not hasattr(item, "__dict__") or isinstance(item, (type, torch.nn.Module, torch.Tensor, CutSet)):
                continue
            if callable(item) and hasattr(item, "__code__"):
                continue
            if any(item is other for other in found):
                continue
            found.append(item)
            for value in vars(item).values():
                following += value if isinstance(value, (list, tuple)) and len(value) <= 64 else [value]
        level = following
    return found


def gradient_bytes(module: torch.nn.Module) -> int:
    """What the gradients of all parameters take together, on this rank."""
    return local_bytes(parameter for parameter in module.parameters() if parameter.requires_grad)
