"""`calibrate`: finds, loads, shares and applies the batch sizes of a sampler's buckets, inside the training job."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from lhotse.dataset.sampling.round_robin import RoundRobinSampler
from lhotse.dataset.sampling.zip import ZipSampler

from lhotse_oomfit.agreement import new_agreement
from lhotse_oomfit.arguments import check_profile_bins
from lhotse_oomfit.composite import Member, calibrate_apart, calibrate_members, is_composite
from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.job import Job
from lhotse_oomfit.late_memory import LateMemory, watch_steps
from lhotse_oomfit.options import CalibrationOptions, check_option_names
from lhotse_oomfit.profile import Profile
from lhotse_oomfit.ranks import SingleRank, current_ranks
from lhotse_oomfit.sampler import CalibratedBucketingSampler
from lhotse_oomfit.training import MakeBatch, Training, loop_training
from lhotse_oomfit.verification import Check

__all__ = [
    "CalibrationOptions",
    "Check",
    "MakeBatch",
    "Member",
    "Training",
    "calibrate",
    "calibrate_several",
    "calibrate_together",
    "calibrate_training",
    "loop_training",
    "verify_training",
]

_OPTIONS = [field.name for field in dataclasses.fields(CalibrationOptions)]
_OF_TRAINING = [name for name in inspect.signature(loop_training).parameters if name not in ("sampler", "dataset")]


@overload
def calibrate(
    sampler: CalibratedBucketingSampler,
    dataset: Any,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    training_step: Callable[[Any, Any], torch.Tensor | None],
    **options: Any,
) -> Profile: ...


@overload
def calibrate(
    sampler: RoundRobinSampler | ZipSampler,
    dataset: Any,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    training_step: Callable[[Any, Any], torch.Tensor | None],
    **options: Any,
) -> list[Profile]: ...


def calibrate(
    sampler: CalibratedBucketingSampler | RoundRobinSampler | ZipSampler,
    dataset: Any,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    training_step: Callable[[Any, Any], torch.Tensor | None],
    memory_fraction: float = 0.9,
    memory_limit: str | int | None = None,
    cache: str | os.PathLike[str] | Literal[False] | None = None,
    recalibrate: Literal["auto", "always"] = "auto",
    make_batch: MakeBatch | None = None,
    accumulate_grad_batches: int = 1,
    scheduler: Any = None,
    scaler: Any = None,
    extras: Sequence[Any] = (),
    precision: str = "",
    collate_fn: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Profile | list[Profile]:
    """Find the largest batch size of each of `sampler`'s buckets that trains without running out of memory.

    Call it on every rank, after the model is on its device and the optimizer exists (and a checkpoint is loaded), and
    before the DataLoader is iterated. Rank 0 measures, the others wait; every rank gets the profile, and `sampler` has
    it applied. A profile in the cache that was measured for the same thing is loaded instead. Nothing about the
    training changes: parameters, buffers, gradients, optimizer state and random generators are left as they were.

    :param sampler: made with ``bucket_batch_size="auto"``; or Lhotse's RoundRobinSampler or ZipSampler of such
        samplers. With round robin each is calibrated by itself. With zip, whose steps hold one batch of each, they
        share the budget in equal parts; samplers with given sizes may be among them, and what they take is set aside.
    :param dataset: the map-style dataset that turns a CutSet into a batch, or Lhotse's ``IterableDatasetWrapper``.
    :param model: the model, wrapped in DistributedDataParallel or not.
    :param optimizer: the optimizer, or a sequence of them.
    :param training_step: ``training_step(model, batch) -> loss``, with the model unwrapped and the batch as the
        DataLoader yields it: it moves the batch to the device, runs the forward pass (under autocast, if training
        does) and returns the loss, a scalar. Backward is done here. It may also return None after running its backward
        passes itself (several, with several optimizers), with ``optimizer.step()`` left out.
    :param make_batch: ``make_batch(batch_size=..., input_len=..., output_len=...)`` makes the worst-case batch, where
        the dataset can't collate one; lengths are those of the bucket (seconds and tokens; ``output_len`` may be None).
    :param accumulate_grad_batches: above 1, gradients stay alive over forward passes, which costs memory.
    :param scheduler: a learning-rate scheduler, or several, whose state is to be kept.
    :param scaler: the GradScaler that training uses, if any.
    :param extras: further objects whose state a step changes: an EMA of the parameters, metrics.
    :param precision: what else the profile depends on, such as ``"bf16"``; part of the fingerprint.
    :param collate_fn: the DataLoader's ``collate_fn``, if it has one.
    :param options: `reserve`, `verify_on_load`, `max_batch_size`, `num_sample_cuts`, `num_soak_steps`, `mode`,
        `objective`, `throughput_share`, `ranks`, `heartbeat_timeout`, `calibration_timeout`, `progress`, `world_size`:
        see :class:`CalibrationOptions`.
    :return: the profile, the same on every rank; of several samplers a list, in their order.
    :raises InvalidArgumentError: for an argument that can't be honoured.
    :raises BucketDoesNotFitError: if not even one example of some bucket fits.
    :raises WorstCaseError: if no worst-case batch could be made.
    :raises UnsupportedStrategyError: for a model that can't be calibrated this way.
    :raises RankFailedError: if another rank failed meanwhile.
    """
    check_option_names(options, [*_OPTIONS, *_OF_TRAINING])
    training = loop_training(
        sampler,
        dataset,
        model=model,
        optimizer=optimizer,
        training_step=training_step,
        make_batch=make_batch,
        accumulate_grad_batches=accumulate_grad_batches,
        scheduler=scheduler,
        scaler=scaler,
        extras=extras,
        precision=precision,
        collate_fn=collate_fn,
    )
    chosen = CalibrationOptions(
        memory_fraction=memory_fraction,
        memory_limit=memory_limit,
        cache=cache,
        recalibrate=recalibrate,
        **options,
    )
    if is_composite(sampler):
        profiles = calibrate_several(sampler, training, chosen)
        _watch(training, chosen, profiles)
        return profiles
    profile = calibrate_training(sampler, training, chosen)
    _watch(training, chosen, [profile])
    return profile


def _watch(training: Training, options: CalibrationOptions, profiles: Sequence[Profile]) -> None:
    """Look in the first steps of the training whether memory appears that the calibration couldn't see."""
    budget_bytes = min(profile.budget_bytes for profile in profiles)
    watch_steps(LateMemory(training, budget_bytes=budget_bytes, reserve=options.reserve), training.optimizers)


def calibrate_training(
    sampler: CalibratedBucketingSampler,
    training: Training,
    options: CalibrationOptions,
    *,
    known: Profile | None = None,
) -> Profile:
    """:func:`calibrate` for a training that is described by a :class:`Training`; arguments and errors are the same.

    :param known: a profile that this process has already; it is taken if it was measured for the same thing.
    """
    ranks = current_ranks(
        heartbeat_timeout_s=options.heartbeat_timeout, calibration_timeout_s=options.calibration_timeout
    )
    profile = Job(sampler=sampler, training=training, options=options, ranks=ranks).run(known)
    return _applied([(sampler, profile)])[0]


def calibrate_several(
    sampler: RoundRobinSampler | ZipSampler,
    training: Training,
    options: CalibrationOptions,
    *,
    known: Sequence[Profile] = (),
) -> list[Profile]:
    """:func:`calibrate_training` for each of several samplers in one; `known` holds a profile for each, or nothing.

    :return: a profile for each sampler to be calibrated, in order.
    """
    return _applied(calibrate_members(sampler, training, options, known=known))


def calibrate_together(
    members: Sequence[Member],
    assemble: Callable[[list[Any]], Any],
    options: CalibrationOptions,
    *,
    known: Sequence[Profile] = (),
) -> list[Profile]:
    """:func:`calibrate_training` for samplers of which each step gets a batch, collated by datasets of their own.

    :param members: the samplers, each with the training that collates its batches.
    :param assemble: makes of one batch of each, in their order, what a step gets.
    :return: a profile for each sampler to be calibrated, in order.
    """
    return _applied(calibrate_apart(members, assemble, options, known=known))


def _applied(found: Sequence[tuple[CalibratedBucketingSampler, Profile]]) -> list[Profile]:
    for sampler, profile in found:
        sampler.apply(profile)
        sampler.agreement = new_agreement()
    return [profile for _, profile in found]


def verify_training(
    sampler: CalibratedBucketingSampler,
    training: Training,
    options: CalibrationOptions,
    profile: Profile,
    *,
    num_buckets: int = 2,
) -> list[Check]:
    """Run the tightest buckets of a profile again, one step each, in this process alone; nothing else changes.

    :param sampler: with the profile's bins; its sizes don't matter.
    :param num_buckets: how many buckets, those with the highest share of the budget first.
    :raises ProfileMismatchError: if the sampler has other bins than the profile.
    """
    if sampler.bins is None:
        raise InvalidArgumentError("sampler has no bins; make it with bucket_batch_size='auto' and the profile's bins")
    check_profile_bins(profile.bins, sampler.bins)
    return Job(sampler=sampler, training=training, options=options, ranks=SingleRank()).verify(profile, num_buckets)
