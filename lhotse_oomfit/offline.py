"""A training that a function of the user's makes, brought to the point where it can be calibrated, outside its job.

The function returns what :func:`lhotse_oomfit.calibrate` takes, or a Lightning module with its data; nothing is
trained. What the job's other ranks cost is added: DistributedDataParallel's reducer keeps one copy of all gradients.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.fit import CalibrationOptions, Training, loop_training
from lhotse_oomfit.strategies import ReducerBuckets

__all__ = ["Use", "describe", "is_lightning", "use_training"]

T = TypeVar("T")
Use = Callable[[Any, Training, CalibrationOptions], T]
"""What is done with a sampler, a training and options, once they are there."""

_LOOP = inspect.signature(loop_training).parameters
_LIGHTNING = {
    "module": inspect.Parameter.empty,
    "data": inspect.Parameter.empty,
    "trainer": None,
    "training_step": None,
    "make_batch": None,
}
_WRONG = (
    "must return what lhotse_oomfit.calibrate takes (a mapping or an object with sampler, dataset, model, optimizer, "
    "training_step), or a LightningModule with its data: (module, datamodule or DataLoader), or a mapping with module, "
    "data and trainer, the Trainer's arguments"
)


def is_lightning(made: Any) -> bool:
    """Whether a training is a Lightning module with its data."""
    return isinstance(made, tuple) or "module" in (made if isinstance(made, Mapping) else vars(made))


def use_training(made: Any, use: Use[T], options: CalibrationOptions, *, ddp: bool = False) -> T:
    """Call ``use(sampler, training, options)`` with what the user's function made.

    :param made: what the function returned.
    :param ddp: whether the training is one rank's of a job with DistributedDataParallel.
    :raises InvalidArgumentError: if `made` is nothing of the kind, or lacks something.
    """
    if made is None or (not isinstance(made, (tuple, Mapping)) and not hasattr(made, "__dict__")):
        raise InvalidArgumentError(f"make_training {_WRONG}; it returned {made!r:.80}")
    if is_lightning(made):
        return _use_lightning(_lightning_parts(made), use, options, ddp)
    arguments = _arguments(made, {name: parameter.default for name, parameter in _LOOP.items()})
    training = loop_training(**arguments)
    if ddp and training.settings["strategy"] == "single":
        training = replace(
            _with_buckets(training), settings={**training.settings, "strategy": "DistributedDataParallel"}
        )
    return use(arguments["sampler"], training, options)


def _arguments(made: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a mapping or an object has for the known names."""
    if isinstance(made, Mapping):
        unknown = [str(name) for name in made if name not in known]
        if unknown:
            raise InvalidArgumentError(
                f"make_training returned {', '.join(map(repr, unknown))}, which means nothing here; it may return "
                f"{', '.join(known)}"
            )
        found = dict(made)
    else:
        found = {name: getattr(made, name) for name in known if hasattr(made, name)}
    missing = [name for name, default in known.items() if default is inspect.Parameter.empty and name not in found]
    if missing:
        raise InvalidArgumentError(f"make_training {_WRONG}; {', '.join(missing)} isn't there")
    return found


def _lightning_parts(made: Any) -> dict[str, Any]:
    if isinstance(made, tuple):
        if len(made) != 2:
            raise InvalidArgumentError(f"make_training {_WRONG}; it returned a tuple of {len(made)}")
        made = {"module": made[0], "data": made[1]}
    parts = {**{name: default for name, default in _LIGHTNING.items() if default is None}}
    parts.update(_arguments(made, _LIGHTNING))
    if not isinstance(parts["trainer"], (Mapping, type(None))):
        raise InvalidArgumentError(
            f"trainer must be a mapping of the Trainer's arguments, so that one process can stand for the job, it is "
            f"a {type(parts['trainer']).__name__}"
        )
    return parts


def _with_buckets(training: Training) -> Training:
    return replace(training, extras=[*training.extras, ReducerBuckets(training.module)])


class _Done(Exception):
    """Ends a fit at the point where its first batch would be drawn."""


def _use_lightning(parts: Mapping[str, Any], use: Use[T], options: CalibrationOptions, ddp: bool) -> T:
    """Let a trainer of one process set everything up; where the callback would calibrate, `use` is called."""
    from lhotse_oomfit import lightning

    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)  # what it says is about a training that doesn't happen
    callback_module: Any = lightning
    pl = callback_module.pl
    results: list[T] = []

    def stop(trainer: Any, pl_module: Any) -> None:
        raise _Done

    def instead(sampler: Any, training: Training) -> Any:
        results.append(use(sampler, training, options))
        raise _Done

    finder = callback_module.BucketBatchSizeFinder(training_step=parts["training_step"], make_batch=parts["make_batch"])
    finder.options = options
    finder._find = instead
    given = {"max_epochs": 1, **(parts["trainer"] or {})}
    others = [c for c in given.pop("callbacks", None) or [] if not isinstance(c, type(finder))]
    fixed = {
        "devices": 1,
        "num_nodes": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    if ddp and not str(given.get("strategy", "")).startswith("ddp"):
        given["strategy"] = "ddp"
    elif not ddp and str(given.get("strategy", "")).startswith("ddp"):
        given["strategy"] = "auto"
    others = [c for c in others if not isinstance(c, pl.callbacks.Checkpoint)]
    trainer = pl.Trainer(
        **{**given, **fixed}, callbacks=[*others, finder, pl.callbacks.LambdaCallback(on_train_start=stop)]
    )
    data = {"datamodule" if isinstance(parts["data"], pl.LightningDataModule) else "train_dataloaders": parts["data"]}
    with contextlib.suppress(_Done):
        trainer.fit(parts["module"], **data)
    if not results:
        raise InvalidArgumentError(
            "the training data has no CalibratedBucketingSampler with bucket_batch_size='auto': there is nothing to "
            "calibrate"
        )
    return results[0]


def describe(made: Any) -> tuple[Any, Mapping[str, Any] | None]:
    """The sampler of what the user's function made, and the Trainer's arguments where it gave some.

    A datamodule is set up and asked for its training DataLoader; nothing is measured.

    :raises InvalidArgumentError: if there is no CalibratedBucketingSampler in it.
    """
    if made is None or (not isinstance(made, (tuple, Mapping)) and not hasattr(made, "__dict__")):
        raise InvalidArgumentError(f"make_training {_WRONG}; it returned {made!r:.80}")
    if not is_lightning(made):
        return _arguments(made, {name: parameter.default for name, parameter in _LOOP.items()})["sampler"], None
    from lhotse_oomfit.lightning import find_sampler

    parts = _lightning_parts(made)
    data = parts["data"]
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    sampler = find_sampler(data)
    if sampler is None:
        raise InvalidArgumentError("the training DataLoader has no CalibratedBucketingSampler")
    return sampler, parts["trainer"]
