"""`calibrate`: finds, loads, shares and applies the batch sizes of a sampler's buckets, inside the training job."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lhotse_oomfit import __version__
from lhotse_oomfit.calibration import Measurement, measure_sizes, refuse_unfit, wake_optimizers
from lhotse_oomfit.errors import CalibrationError, InvalidArgumentError
from lhotse_oomfit.fingerprint import Fingerprint
from lhotse_oomfit.memory import MemoryBackend, backend_for
from lhotse_oomfit.profile import Profile, format_bytes, parse, parse_bytes, utc_now
from lhotse_oomfit.progress import show_progress
from lhotse_oomfit.ranks import alone, current_ranks
from lhotse_oomfit.report import render_table
from lhotse_oomfit.sampler import CalibratedBucketingSampler
from lhotse_oomfit.shapes import WorstCases, shape_label
from lhotse_oomfit.snapshot import leave_no_trace
from lhotse_oomfit.store import ProfileStore
from lhotse_oomfit.training import (
    LossStep,
    MakeBatch,
    Training,
    gradient_bytes,
    parts_of,
    resident_tensors,
    unwrap_dataset,
    unwrap_model,
)
from lhotse_oomfit.traits import dataset_fields, environment_fields, model_fields, optimizer_fields
from lhotse_oomfit.trial import TrialRunner

if TYPE_CHECKING:
    pass

__all__ = ["CalibrationOptions", "MakeBatch", "Training", "calibrate", "calibrate_training"]

logger = logging.getLogger(__name__)

_DEFAULT_ALLOCATOR_SHARE = 0.88
"""Share of the budget used on the default allocator: sizes found on a fresh allocator run out of memory in shuffled
training there (58 times in 70 steps on an H200), 12% smaller ones don't."""
_MAX_SIZE = 65_536
"""Without ``max_batch_size``, no size is tried above this one."""


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """How to calibrate; each of these is a keyword argument of :func:`calibrate` as well.

    :param memory_fraction: share of the device's memory that a training step may take, over 0 and at most 1.
    :param memory_limit: bytes or a string such as ``"600MiB"``: what the device counts as having. Needed on a CPU.
    :param reserve: bytes or a string: kept out of the budget for memory that appears only later, such as an EMA copy
        of the parameters made at its first step.
    :param cache: where the profile is kept: None for the user's cache directory (or ``$OOMFIT_CACHE_DIR``), a path
        ending in ``.yaml`` for that file, another path for that directory, False to keep nothing.
    :param recalibrate: ``"auto"`` measures when no profile matches; ``"always"`` measures; the environment variable
        ``OOMFIT_RECALIBRATE`` overrides it.
    :param max_batch_size: no bucket gets a larger size.
    :param num_sample_cuts: how many cuts are read ahead to choose a template and to see how many tokens occur.
    :param num_soak_steps: steps of the closing soak on a CUDA card; None for two per bucket.
    :param heartbeat_timeout: seconds of silence after which another rank counts as dead.
    :param calibration_timeout: seconds that ranks wait for the measuring one in all.
    :param progress: whether to show a progress bar; None to show one at a terminal.
    :raises InvalidArgumentError: for a value out of its range.
    """

    memory_fraction: float = 0.9
    memory_limit: str | int | None = None
    reserve: str | int | None = None
    cache: str | os.PathLike[str] | Literal[False] | None = None
    recalibrate: Literal["auto", "always"] = "auto"
    max_batch_size: int | None = None
    num_sample_cuts: int = 1000
    num_soak_steps: int | None = None
    heartbeat_timeout: float = 60.0
    calibration_timeout: float = 7200.0
    progress: bool | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.memory_fraction <= 1.0:
            raise InvalidArgumentError(
                f"memory_fraction must lie above 0 and at most at 1, it is {self.memory_fraction!r}; pass for instance "
                f"0.9"
            )
        _check_choice("recalibrate", self.recalibrate)
        for name in ("max_batch_size", "num_sample_cuts"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidArgumentError(f"{name} must be a whole number of at least 1, it is {value!r}")
        if self.num_soak_steps is not None and self.num_soak_steps < 0:
            raise InvalidArgumentError(f"num_soak_steps must be at least 0, it is {self.num_soak_steps!r}")
        for name in ("heartbeat_timeout", "calibration_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(f"{name} must be seconds above 0, it is {getattr(self, name)!r}")


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
        `calibration_timeout`, `progress`: see :class:`CalibrationOptions`.
    :return: the profile, the same on every rank.
    :raises InvalidArgumentError: for an argument that can't be honoured.
    :raises BucketDoesNotFitError: if not even one example of some bucket fits.
    :raises WorstCaseError: if no worst-case batch could be made.
    :raises UnsupportedStrategyError: for a model that can't be calibrated this way.
    :raises RankFailedError: if another rank failed meanwhile.
    """
    inner, wrapped = unwrap_dataset(dataset, sampler)
    module = unwrap_model(model)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    if not isinstance(accumulate_grad_batches, int) or accumulate_grad_batches < 1:
        raise InvalidArgumentError(
            f"accumulate_grad_batches must be a whole number of at least 1, it is {accumulate_grad_batches!r}"
        )
    settings = {"strategy": type(model).__name__ if module is not model else "single", "precision": precision or "-"}
    training = Training(
        module=module,
        step=LossStep(module, optimizers, training_step, scaler, accumulate_grad_batches),
        collate=(lambda cuts: collate_fn(inner[cuts])) if collate_fn is not None else inner.__getitem__,
        dataset=inner,
        optimizers=optimizers,
        schedulers=[]
        if scheduler is None
        else list(scheduler)
        if isinstance(scheduler, (list, tuple))
        else [scheduler],
        scalers=_listed(scaler),
        extras=[*extras, wrapped] if wrapped is not None else list(extras),
        make_batch=make_batch,
        accumulate_grad_batches=accumulate_grad_batches,
        settings=settings,
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


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def calibrate_training(sampler: CalibratedBucketingSampler, training: Training, options: CalibrationOptions) -> Profile:
    """:func:`calibrate` for a training that is described by a :class:`Training`; arguments and errors are the same."""
    if not isinstance(sampler, CalibratedBucketingSampler):
        raise InvalidArgumentError(
            f"sampler must be a CalibratedBucketingSampler, it is {type(sampler).__name__}: replace Lhotse's "
            f"DynamicBucketingSampler by it and pass bucket_batch_size='auto'"
        )
    if not sampler.is_auto:
        raise InvalidArgumentError(
            "sampler has fixed batch sizes, there is nothing to calibrate; make it with bucket_batch_size='auto'"
        )
    ranks = current_ranks(
        heartbeat_timeout_s=options.heartbeat_timeout, calibration_timeout_s=options.calibration_timeout
    )
    memory = backend_for(
        training.device, memory_limit=options.memory_limit, resident=lambda: resident_tensors(training)
    )
    allocator = memory.prepare()
    budget_bytes = ranks.minimum(_budget(memory, allocator, options))
    if budget_bytes <= 0:
        raise CalibrationError(
            f"no memory is left to calibrate with: {format_bytes(max(0, memory.budget(1.0).free_bytes))} of "
            f"{training.device} are free for this process; end what else runs on it, or lower the reserve"
        )
    job = _Job(
        sampler=sampler,
        training=training,
        options=options,
        memory=memory,
        allocator=allocator,
        budget_bytes=budget_bytes,
        world_size=ranks.world_size,
    )
    profile = parse(ranks.first(lambda: job.run().encode()))
    sampler.apply(profile)
    return profile


class _Job:
    """The measuring rank's part: look the profile up, or measure and store it."""

    def __init__(
        self,
        *,
        sampler: CalibratedBucketingSampler,
        training: Training,
        options: CalibrationOptions,
        memory: MemoryBackend,
        allocator: str,
        budget_bytes: int,
        world_size: int,
    ) -> None:
        self.sampler = sampler
        self.training = training
        self.options = options
        self.memory = memory
        self.allocator = allocator
        self.budget_bytes = budget_bytes
        self.world_size = world_size
        self.store = ProfileStore(options.cache)

    def run(self) -> Profile:
        training = self.training
        # Batches are made before the trials begin, too: the dataset's own generators must not notice.
        with alone(), leave_no_trace(torch.nn.Module(), extras=parts_of(training.dataset), parameters=False):
            cuts = self.sampler.sample_cuts(self.options.num_sample_cuts)
            worst_case = WorstCases(self.sampler, training, cuts)
            fingerprint = self._fingerprint(worst_case)
            profile = self._load(fingerprint)
            if profile is not None:
                return profile
            profile = self._measure(worst_case, fingerprint)
        path = self.store.save(profile)
        _announce(profile, path)
        return profile

    def _load(self, fingerprint: Fingerprint) -> Profile | None:
        recalibrate = os.environ.get("OOMFIT_RECALIBRATE") or self.options.recalibrate
        _check_choice("OOMFIT_RECALIBRATE", recalibrate)
        if recalibrate == "always":
            logger.info("calibrating: asked to (recalibrate='always')")
            return None
        lookup = self.store.load(fingerprint)
        if lookup.profile is None:
            logger.info("calibrating: %s", lookup.reason)
            return None
        if lookup.profile.budget_bytes > self.budget_bytes * 1.02:
            logger.info(
                "calibrating: %s was measured with a budget of %s, now it is %s",
                lookup.path,
                format_bytes(lookup.profile.budget_bytes),
                format_bytes(self.budget_bytes),
            )
            return None
        logger.info("batch sizes of %s buckets loaded from %s: 0 trial steps", len(lookup.profile.buckets), lookup.path)
        return lookup.profile

    def _measure(self, worst_case: WorstCases, fingerprint: Fingerprint) -> Profile:
        training, memory, options = self.training, self.memory, self.options
        wake = not all(optimizer.state for optimizer in training.optimizers)
        keep_gradients = training.accumulate_grad_batches > 1
        labels = [shape_label(shape) for shape in worst_case.shapes]
        with leave_no_trace(
            training.module,
            training.optimizers,
            training.schedulers,
            training.scalers,
            [*training.extras, *parts_of(training.dataset)],
            parameters=wake,
        ):
            training.module.train()
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
            runner = TrialRunner(
                step=training.step, memory=memory, make_batch=worst_case.make, keep_gradients=keep_gradients
            )
            num_soak_steps = options.num_soak_steps
            if num_soak_steps is None:
                num_soak_steps = 2 * len(labels)
            with show_progress(labels, options.progress) as on_trial:
                measurement = measure_sizes(
                    worst_case.shapes,
                    runner=runner,
                    memory=memory,
                    budget_bytes=self.budget_bytes,
                    gradient_bytes=gradient_bytes(training.module),
                    headroom_bytes=memory.budget(1.0).bytes - self.budget_bytes,
                    max_size=options.max_batch_size or _MAX_SIZE,
                    num_soak_steps=num_soak_steps if memory.name == "cuda" else 0,
                    on_trial=on_trial,
                )
        memory.release()
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
            **model_fields(training.module),
            **optimizer_fields(list(training.optimizers)),
            **environment_fields(),
            "allocator": self.allocator,
            **dataset_fields(training.dataset),
            **worst_case.batch_fields(),
            "lhotse-oomfit": __version__.rpartition(".")[0],
        }
        return Fingerprint(fields=fields)


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


def _check_choice(name: str, value: str) -> None:
    if value not in ("auto", "always"):
        raise InvalidArgumentError(f"{name} must be 'auto' or 'always', it is {value!r}")


def _announce(profile: Profile, path: Path | None) -> None:
    logger.info("calibrated %s buckets\n%s", len(profile.buckets), render_table(profile, width=100))
    logger.info("profile kept at %s" if path else "the profile is not kept%s", path or "")
