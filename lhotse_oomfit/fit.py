"""`calibrate`: finds, loads, shares and applies the batch sizes of a sampler's buckets, inside the training job."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from lhotse_oomfit import __version__
from lhotse_oomfit.arguments import check_profile_bins
from lhotse_oomfit.bytecode import callable_digest
from lhotse_oomfit.calibration import Measurement, measure_sizes, refuse_unfit, wake_optimizers
from lhotse_oomfit.errors import CalibrationError, InvalidArgumentError
from lhotse_oomfit.fingerprint import Fingerprint
from lhotse_oomfit.memory import MemoryBackend, backend_for
from lhotse_oomfit.options import CalibrationOptions, check_recalibrate
from lhotse_oomfit.profile import Profile, format_bytes, parse, parse_bytes, utc_now
from lhotse_oomfit.progress import show_progress
from lhotse_oomfit.ranks import Ranks, SingleRank, alone, current_ranks
from lhotse_oomfit.report import render_table
from lhotse_oomfit.sampler import CalibratedBucketingSampler
from lhotse_oomfit.shapes import WorstCases, shape_label
from lhotse_oomfit.snapshot import leave_no_trace
from lhotse_oomfit.store import ProfileStore
from lhotse_oomfit.training import (
    MakeBatch,
    Training,
    gradient_bytes,
    loop_training,
    parts_of,
    refuse_own_groups,
    resident_tensors,
)
from lhotse_oomfit.traits import dataset_fields, environment_fields, model_fields, optimizer_fields
from lhotse_oomfit.trial import TrialRunner
from lhotse_oomfit.verification import Check, check_tightest

__all__ = [
    "CalibrationOptions",
    "Check",
    "MakeBatch",
    "Training",
    "calibrate",
    "calibrate_training",
    "loop_training",
    "verify_training",
]

logger = logging.getLogger(__name__)

_DEFAULT_ALLOCATOR_SHARE = 0.88
"""Share of the budget used on the default allocator: sizes found on a fresh allocator run out of memory in shuffled
training there (58 times in 70 steps on an H200), 12% smaller ones don't."""
_NUM_CHECKED = 2
"""Buckets that are run again where a profile is verified: the tightest, and one more in case it was a special one."""
_MAX_SIZE = 65_536
"""Without ``max_batch_size``, no size is tried above this one."""


def calibrate(
    sampler: CalibratedBucketingSampler,
    dataset: Any,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    training_step: Callable[[Any, Any], torch.Tensor],
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
) -> Profile:
    """Find the largest batch size of each of `sampler`'s buckets that trains without running out of memory.

    Call it on every rank, after the model is on its device and the optimizer exists (and a checkpoint is loaded), and
    before the DataLoader is iterated. Rank 0 measures, the others wait; every rank gets the profile, and `sampler` has
    it applied. A profile in the cache that was measured for the same thing is loaded instead. Nothing about the
    training changes: parameters, buffers, gradients, optimizer state and random generators are left as they were.

    :param sampler: made with ``bucket_batch_size="auto"``.
    :param dataset: the map-style dataset that turns a CutSet into a batch, or Lhotse's ``IterableDatasetWrapper``.
    :param model: the model, wrapped in DistributedDataParallel or not.
    :param optimizer: the optimizer, or a sequence of them.
    :param training_step: ``training_step(model, batch) -> loss``, with the model unwrapped and the batch as the
        DataLoader yields it: it moves the batch to the device, runs the forward pass (under autocast, if training
        does) and returns the loss, a scalar. Backward is done here.
    :param make_batch: ``make_batch(batch_size=..., input_len=..., output_len=...)`` makes the worst-case batch, where
        the dataset can't collate one; lengths are those of the bucket (seconds and tokens; ``output_len`` may be None).
    :param accumulate_grad_batches: above 1, gradients stay alive over forward passes, which costs memory.
    :param scheduler: a learning-rate scheduler, or several, whose state is to be kept.
    :param scaler: the GradScaler that training uses, if any.
    :param extras: further objects whose state a step changes: an EMA of the parameters, metrics.
    :param precision: what else the profile depends on, such as ``"bf16"``; part of the fingerprint.
    :param collate_fn: the DataLoader's ``collate_fn``, if it has one.
    :param options: `reserve`, `max_batch_size`, `num_sample_cuts`, `num_soak_steps`, `heartbeat_timeout`,
        `calibration_timeout`, `progress`, `verify_on_load`, `world_size`: see :class:`CalibrationOptions`.
    :return: the profile, the same on every rank.
    :raises InvalidArgumentError: for an argument that can't be honoured.
    :raises BucketDoesNotFitError: if not even one example of some bucket fits.
    :raises WorstCaseError: if no worst-case batch could be made.
    :raises UnsupportedStrategyError: for a model that can't be calibrated this way.
    :raises RankFailedError: if another rank failed meanwhile.
    """
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
    return calibrate_training(
        sampler,
        training,
        CalibrationOptions(
            memory_fraction=memory_fraction,
            memory_limit=memory_limit,
            cache=cache,
            recalibrate=recalibrate,
            **options,
        ),
    )


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
    if ranks.world_size > 1:
        refuse_own_groups(training.module, training.optimizers)
    job = _Job(sampler=sampler, training=training, options=options, ranks=ranks)
    profile = parse(ranks.first(lambda: job.run(known).encode()))
    sampler.apply(profile)
    return profile


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
    return _Job(sampler=sampler, training=training, options=options, ranks=SingleRank()).verify(profile, num_buckets)


class _Job:
    """The measuring rank's part: look the profile up, or measure and store it."""

    def __init__(
        self,
        *,
        sampler: CalibratedBucketingSampler,
        training: Training,
        options: CalibrationOptions,
        ranks: Ranks,
    ) -> None:
        self.sampler = sampler
        self.training = training
        self.options = options
        self.memory: MemoryBackend
        said = ranks.gather(self._prepare)
        if len({bins for _, bins in map(json.loads, said)}) > 1:
            raise InvalidArgumentError(
                "the ranks' samplers have different duration_bins, as estimates from each rank's own part of the data "
                "are; pass duration_bins, the same on every rank"
            )
        self.budget_bytes = min(budget for budget, _ in map(json.loads, said))
        if self.budget_bytes <= 0:
            raise CalibrationError(
                f"no memory is left to calibrate with: {format_bytes(max(0, self.memory.budget(1.0).free_bytes))} of "
                f"{training.device} are free for this process; end what else runs on it, or lower the reserve"
            )
        self.world_size = options.world_size or ranks.world_size
        self.store = ProfileStore(options.cache)

    def _prepare(self) -> str:
        """What this rank has to say before any measures: its budget, and its bins to compare."""
        _check_sampler(self.sampler)
        self.memory = backend_for(
            self.training.device,
            memory_limit=self.options.memory_limit,
            resident=lambda: resident_tensors(self.training),
        )
        self.allocator = self.memory.prepare()
        budget_bytes = _budget(self.memory, self.allocator, self.options)
        bins = self.sampler.bins
        return json.dumps([budget_bytes, repr(bins.as_lists()) if bins is not None else ""])

    def run(self, known: Profile | None = None) -> Profile:
        with self._reading() as worst_case:
            fingerprint = self._fingerprint(worst_case)
            if known is not None and known.fingerprint == fingerprint and known.bins == self.sampler.bins:
                logger.info("batch sizes of %s buckets are known already: 0 trial steps", len(known.buckets))
                return known
            profile = self._load(worst_case, fingerprint)
            if profile is not None:
                return profile
            profile = self._measure(worst_case, fingerprint)
        path = self.store.save(profile)
        _announce(profile, path)
        return profile

    def verify(self, profile: Profile, num_buckets: int) -> list[Check]:
        with self._reading() as worst_case:
            differences = profile.fingerprint.differences(self._fingerprint(worst_case))
            if differences:
                logger.warning(
                    "the profile was measured for something else, its sizes are tried all the same: %s",
                    "; ".join(differences),
                )
            return self._check(worst_case, profile, num_buckets)

    @contextmanager
    def _reading(self) -> Iterator[WorstCases]:
        """Worst-case batches, from cuts read ahead. The dataset's own generators don't notice."""
        dataset = self.training.dataset
        with alone(), leave_no_trace(torch.nn.Module(), extras=parts_of(dataset), parameters=False):
            yield WorstCases(self.sampler, self.training, self.sampler.sample_cuts(self.options.num_sample_cuts))

    def _load(self, worst_case: WorstCases, fingerprint: Fingerprint) -> Profile | None:
        recalibrate = os.environ.get("OOMFIT_RECALIBRATE") or self.options.recalibrate
        check_recalibrate("OOMFIT_RECALIBRATE", recalibrate)
        if recalibrate == "always":
            logger.info("calibrating: asked to (recalibrate='always')")
            return None
        lookup = self.store.load(fingerprint)
        profile = lookup.profile or lookup.near
        if profile is None:
            logger.info("calibrating: %s", lookup.reason)
            return None
        if profile.budget_bytes > self.budget_bytes * 1.02:
            logger.info(
                "calibrating: %s was measured with a budget of %s, now it is %s",
                lookup.path,
                format_bytes(profile.budget_bytes),
                format_bytes(self.budget_bytes),
            )
            return None
        checks: list[Check] = []
        if lookup.profile is None or self.options.verify_on_load:
            checks = self._check(worst_case, profile, _NUM_CHECKED)
            failed = [str(check) for check in checks if not check.holds]
            if failed:
                logger.info("calibrating: the stored profile no longer holds: %s", "; ".join(failed))
                return None
        if lookup.profile is None:
            logger.info("%s, and holds here too", lookup.reason)
            profile = replace(profile, fingerprint=fingerprint, versions=_versions())
            self.store.save(profile)
        logger.info(
            "batch sizes of %s buckets loaded from %s: %s trial steps", len(profile.buckets), lookup.path, len(checks)
        )
        return profile

    def _check(self, worst_case: WorstCases, profile: Profile, num_buckets: int) -> list[Check]:
        labels = [shape_label(shape) for shape in worst_case.shapes]
        with self._trials(worst_case) as runner:
            return check_tightest(profile, runner, self.memory, labels=labels, num_buckets=num_buckets)

    @contextmanager
    def _trials(self, worst_case: WorstCases) -> Iterator[TrialRunner]:
        """Runs training steps as training will run them: optimizer state is there, gradients too where they live on.
        Afterwards everything is as before."""
        training, memory = self.training, self.memory
        wake = not all(
            parameter in optimizer.state
            for optimizer in training.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        )
        keep_gradients = training.accumulate_grad_batches > 1
        with leave_no_trace(
            training.module,
            training.optimizers,
            training.schedulers,
            training.scalers,
            [*training.extras, *parts_of(training.dataset)],
            parameters=wake,
        ):
            if not training.module.training:
                training.module.train()  # parts that are kept in eval mode within a training model stay so
            training.step.zero_grad()
            if wake:
                peak_bytes = wake_optimizers(training.step, memory, training.module.parameters())
                if peak_bytes > self.budget_bytes:
                    raise CalibrationError(
                        f"one step of the optimizer, without any batch, takes {format_bytes(peak_bytes)} of a budget "
                        f"of {format_bytes(self.budget_bytes)}; raise memory_fraction or memory_limit"
                    )
            if keep_gradients:
                for parameter in training.module.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
            yield TrialRunner(
                step=training.step, memory=memory, make_batch=worst_case.make, keep_gradients=keep_gradients
            )
        memory.release()

    def _measure(self, worst_case: WorstCases, fingerprint: Fingerprint) -> Profile:
        memory, options = self.memory, self.options
        labels = [shape_label(shape) for shape in worst_case.shapes]
        num_soak_steps = options.num_soak_steps
        if num_soak_steps is None:
            num_soak_steps = 8 * len(labels)
        with self._trials(worst_case) as runner, show_progress(labels, options.progress) as on_trial:
            measurement = measure_sizes(
                worst_case.shapes,
                runner=runner,
                memory=memory,
                budget_bytes=self.budget_bytes,
                gradient_bytes=gradient_bytes(self.training.module),
                forward_gradients=self.training.forward_gradients,
                headroom_bytes=memory.budget(1.0).bytes - self.budget_bytes,
                max_size=options.max_batch_size or _MAX_SIZE,
                num_soak_steps=num_soak_steps if memory.name == "cuda" else 0,
                on_trial=on_trial,
            )
        refuse_unfit(measurement, labels, worst_case.shapes, budget_bytes=self.budget_bytes, unit="s")
        return self._profile(measurement, worst_case, fingerprint)

    def _profile(self, measurement: Measurement, worst_case: WorstCases, fingerprint: Fingerprint) -> Profile:
        bins = self.sampler.bins
        if bins is None:
            raise InvalidArgumentError("sampler has no bins; pass duration_bins, or let it estimate them")
        return Profile(
            bins=bins,
            buckets=tuple(measurement.bucket_profiles(worst_case.shapes, worst_case.output_lens)),
            budget_bytes=self.budget_bytes,
            fingerprint=fingerprint,
            num_trials=measurement.num_trials,
            num_soak_steps=measurement.num_soak_steps,
            num_ooms=measurement.num_ooms,
            num_retries=measurement.num_retries,
            search_s=round(measurement.search_s, 3),
            memory_fraction=self.options.memory_fraction,
            allocator=self.allocator,
            created=utc_now(),
            versions=_versions(),
        )

    def _fingerprint(self, worst_case: WorstCases) -> Fingerprint:
        training, options = self.training, self.options
        shapes = ", ".join(shape_label(shape) for shape in worst_case.shapes)
        fields = {
            **self.memory.fields(),
            "memory_fraction": f"{options.memory_fraction:g}",
            "reserve": str(options.reserve or "-"),
            "max_batch_size": str(options.max_batch_size or "-"),
            "buckets": shapes,
            "accumulated gradients": str(training.accumulate_grad_batches > 1),
            "ranks": "several" if self.world_size > 1 else "one",
            **training.settings,
            **{
                f"code.{name}": callable_digest(function)
                for name, function in {**training.functions, **self.sampler.functions}.items()
                if function is not None
            },
            **model_fields(training.module),
            **optimizer_fields(list(training.optimizers)),
            **environment_fields(),
            "allocator": self.allocator,
            **dataset_fields(training.dataset),
            **worst_case.batch_fields(),
            "lhotse-oomfit": __version__.rpartition(".")[0],
        }
        return Fingerprint(fields=fields)


def _check_sampler(sampler: CalibratedBucketingSampler) -> None:
    if not isinstance(sampler, CalibratedBucketingSampler):
        raise InvalidArgumentError(
            f"sampler must be a CalibratedBucketingSampler, it is {type(sampler).__name__}: replace Lhotse's "
            f"DynamicBucketingSampler by it and pass bucket_batch_size='auto'"
        )
    if not sampler.is_auto:
        raise InvalidArgumentError(
            "sampler has fixed batch sizes, there is nothing to calibrate; make it with bucket_batch_size='auto'"
        )


def _budget(memory: MemoryBackend, allocator: str, options: CalibrationOptions) -> int:

    budget = memory.budget(options.memory_fraction)
    budget_bytes = budget.bytes
    if options.reserve is not None:
        budget_bytes -= parse_bytes(options.reserve)
    if allocator == "default" and memory.name == "cuda":
        logger.warning(
            "expandable segments are off, so %.0f%% of the memory budget are kept free against fragmentation; "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True gets them back",
            100 * (1 - _DEFAULT_ALLOCATOR_SHARE),
        )
        budget_bytes = int(budget_bytes * _DEFAULT_ALLOCATOR_SHARE)
    return budget_bytes


def _versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3])), "lhotse-oomfit": __version__}
    for name in ("torch", "lhotse", "lightning", "pytorch-lightning", "nemo-toolkit"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _announce(profile: Profile, path: Path | None) -> None:
    logger.info("calibrated %s buckets\n%s", len(profile.buckets), render_table(profile, width=100))
    logger.info("profile kept at %s" if path else "the profile is not kept%s", path or "")
