"""Drives the trials of a calibration: creates optimizer state once, searches, soaks; knows neither ranks nor files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lhotse_oomfit.errors import BucketDoesNotFitError, CalibrationError, UnsupportedStrategyError
from lhotse_oomfit.memory import MemoryBackend
from lhotse_oomfit.profile import BucketProfile, format_bytes
from lhotse_oomfit.search import BucketShape, Probe, Search
from lhotse_oomfit.soak import soak
from lhotse_oomfit.throughput import choose_sizes, typical_seconds
from lhotse_oomfit.trial import TrainingStep, Trial, TrialRunner, Verdict, judge

__all__ = ["MeasuredBucket", "Measurement", "measure_sizes", "refuse_unfit", "wake_optimizers"]

logger = logging.getLogger(__name__)

_MANY_SHAPES = 3.0
"""How many times more an allocator with expandable segments reserves beyond what it hands out, once it has seen batches
of many shapes, than in a step that begins without a cache. On an H200 the latter is 0.9% (a CTC model, 30 buckets) and
1.4% (an AED, 30 too); with less than 2.0% and 4.2% to spare the allocator gives back its cache every few steps, which
costs 5% of the throughput and more."""
_MANY_SHAPES_MOST = 0.05
"""The most that is added for it, as a share of the peak: where a step alone has far more than it hands out, because its
tensors are large beside the budget, other shapes find room in that. What they still miss, the soak finds."""
_HELD_BACK = 0.85
"""A cautious search that ends below this share of the budget, with peaks of gradients, was held back by them."""
_MOSTLY_GRADIENTS = 2.0
"""Up to so many times the gradients' bytes, a step consists mostly of them."""
_RETRIED = 1.005
"""A trial in which the allocator retried with nothing left in its cache counts as this many budgets at least."""


@dataclass(frozen=True, kw_only=True)
class MeasuredBucket:
    """What is known of one bucket so far: the largest size that fits, its peak and step time, the trials it took.

    ``size`` is 0 while nothing fits; ``verified`` says whether a step ran at this size or a slightly larger one, else
    it is only predicted; ``settled`` says whether the search is done with it.
    """

    size: int = 0
    peak_bytes: int | None = None
    step_s: float | None = None
    num_trials: int = 0
    num_ooms: int = 0
    verified: bool = True
    settled: bool = False


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The outcome of a search over all buckets, in the order of their shapes."""

    buckets: tuple[MeasuredBucket, ...]
    num_trials: int
    num_soak_steps: int
    num_ooms: int
    num_retries: int
    search_s: float

    def bucket_profiles(self, shapes: Sequence[BucketShape], output_lens: Sequence[int | None]) -> list[BucketProfile]:
        """The rows of a profile; every bucket must have a size."""
        return [
            BucketProfile(
                size=bucket.size,
                input_len=shape.input_len,
                output_len=output_len,
                verified=bucket.verified,
                peak_bytes=bucket.peak_bytes,
                step_s=bucket.step_s,
                num_trials=bucket.num_trials,
                num_ooms=bucket.num_ooms,
            )
            for bucket, shape, output_len in zip(self.buckets, shapes, output_lens, strict=True)
        ]


def wake_optimizers(step: TrainingStep, memory: MemoryBackend, parameters: Iterable[torch.nn.Parameter]) -> int:
    """Take one optimizer step on gradients of zero, so that lazily created state exists before anything is measured.

    :param step: whose ``optimizer_step`` is called once; gradients are None again afterwards.
    :param parameters: the parameters that training gives gradients to.
    :return: peak bytes of the step, everything resident included.
    :raises CalibrationError: if the state doesn't fit.
    :raises UnsupportedStrategyError: for an optimizer whose step needs a closure.
    """
    error: str | None = None
    try:
        with memory.measure() as usage:
            for parameter in parameters:
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            step.optimizer_step()
    except TypeError as exc:
        if "closure" not in str(exc):
            raise
        raise UnsupportedStrategyError(
            "the optimizer's step needs a closure (as LBFGS does), which evaluates the model several times a step: "
            "its memory can't be measured by single trials; set bucket_batch_size to a list of sizes"
        ) from exc
    except RuntimeError as exc:
        if judge(exc) is not Verdict.OOM:
            raise
        error = str(exc).partition("\n")[0]
    step.zero_grad()
    memory.release()
    if error is not None:
        raise CalibrationError(
            f"one step of the optimizer, without any batch, runs out of memory ({error}); use a smaller model, an "
            f"optimizer with less state, or more memory"
        )
    return usage().allocated_bytes


def measure_sizes(
    shapes: Sequence[BucketShape],
    *,
    runner: TrialRunner,
    memory: MemoryBackend,
    budget_bytes: int,
    resident_bytes: int,
    gradient_bytes: int,
    forward_gradients: bool = False,
    headroom_bytes: int = 0,
    max_size: int,
    num_soak_steps: int = 0,
    mode: Literal["verify", "fast"] = "verify",
    objective: Literal["memory", "throughput"] = "memory",
    throughput_share: float = 0.02,
    fragmenting_bytes: int = 0,
    cautious: bool = False,
    earlier: Sequence[Trial] = (),
    on_trial: Callable[[Trial, MeasuredBucket], None] | None = None,
) -> Measurement:
    """Find the largest size of every bucket whose training step stays inside the budget.

    :param shapes: the worst case of each bucket.
    :param runner: runs the trials, by index into `shapes`.
    :param memory: what `runner` measures with.
    :param budget_bytes: the peak not to be exceeded, of reserved memory where the allocator reserves.
    :param resident_bytes: what is allocated before a step begins.
    :param gradient_bytes: what all gradients take.
    :param forward_gradients: whether they are alive in the forward pass, without being there before the step begins.
    :param headroom_bytes: how far a trial may exceed the budget without running out of memory.
    :param max_size: no size above this one.
    :param num_soak_steps: after the search, at most so many steps at full size in shuffled order under a hard cap at
        the budget, without emptying the allocator's cache in between, as training runs. Offenders shrink, until a pass
        over all buckets (the second at the earliest) has none. In fast mode the first pass has a fifth of the buckets,
        and is the last if it has none. A warning says if the steps run out before.
    :param mode: ``"verify"`` runs a step at every bucket's size, ``"fast"`` for about a fifth of them, and predicts the
        others.
    :param objective: ``"memory"`` for the largest sizes, ``"throughput"`` for the smallest that train nearly as fast,
        which takes two to four steps more per bucket. Ranks that measure together must see the same seconds.
    :param throughput_share: how much of the largest size's examples per second may be lost to a smaller size.
    :param fragmenting_bytes: what the allocator may reserve beyond the budget because it fragments. Then
        peaks are held against the budget by what was allocated, the soak's cap is both together, and retries are no
        offence.
    :param cautious: approach sizes from below, since a step that runs out of memory would end the job.
    :param earlier: trials of an earlier job, which needn't be run again.
    :param on_trial: called after each trial with it and what is then known of its bucket.
    :raises CalibrationError: if what is resident before a step begins leaves no room in the budget.
    """
    started = time.monotonic()
    resident_bytes += gradient_bytes if forward_gradients else 0
    if resident_bytes >= budget_bytes:
        raise CalibrationError(
            f"model, optimizer state and gradients take {format_bytes(resident_bytes)}, which leaves nothing of the "
            f"budget of {format_bytes(budget_bytes)} for a batch; raise memory_fraction (or memory_limit), free what "
            f"else is on the device, or use a smaller model"
        )
    search = Search(
        shapes,
        budget_bytes=budget_bytes,
        resident_bytes=resident_bytes,
        gradient_bytes=gradient_bytes,
        headroom_bytes=headroom_bytes,
        max_size=max_size,
        cautious=cautious,
        mode=mode,
    )
    book = _Book(search, len(shapes))
    for trial in earlier:
        book.remember(trial)
        _tell(search, Probe(bucket=trial.bucket, size=trial.size, purpose="verify"), trial)
    fragments = fragmenting_bytes > 0
    _search(search, runner, memory, book, on_trial, fragments=fragments)
    if objective == "throughput" and all(search.sizes):
        _choose(search, runner, memory, throughput_share, book, on_trial)
    num_trials = book.num_trials
    if cautious:
        _warn_if_held_back(search, book)
    if num_soak_steps and all(search.sizes):
        cap_bytes = budget_bytes + fragmenting_bytes
        _soak(search, runner, memory, cap_bytes, num_soak_steps, book, on_trial, fragments=fragments)
    return Measurement(
        buckets=tuple(book.bucket(k, size) for k, size in enumerate(search.sizes)),
        num_trials=num_trials,
        num_soak_steps=book.num_trials - num_trials,
        num_ooms=book.num_ooms,
        num_retries=book.num_retries,
        search_s=time.monotonic() - started,
    )


def _warn_if_held_back(search: Search, book: _Book) -> None:
    """Say so where gradients, which fill small batches, kept a cautious search from larger sizes."""
    for k, size in enumerate(search.sizes):
        peak_bytes = book.bucket(k, size).peak_bytes
        if 0 < size < search.max_size and peak_bytes is not None and peak_bytes < _HELD_BACK * search.budget_bytes:
            if _MOSTLY_GRADIENTS * search.gradient_bytes < peak_bytes - search.resident_bytes:
                continue  # activations, of which one more example has many
            logger.warning(
                "gradients fill most of a step with %d examples of bucket %d and hide what examples take, so that no "
                "larger size is surely safe in lock-step, although this one takes %.0f%% of the budget only; give "
                "bucket_batch_size a list of sizes, or the step more memory",
                size,
                k,
                100 * peak_bytes / search.budget_bytes,
            )
            return


def _search(
    search: Search,
    runner: TrialRunner,
    memory: MemoryBackend,
    book: _Book,
    on_trial: Callable[[Trial, MeasuredBucket], None] | None,
    *,
    fragments: bool,
) -> None:
    """Run what the search asks for until it is settled.

    Giving the allocator's cache back takes longer than most trials, so it is kept while it is no hindrance. What a
    trial makes the allocator reserve can only be read where it began without a cache; the ratio to what was allocated
    there stands for the trials that follow, or what many shapes take if that is more. An allocator that fragments
    reserves any amount, and fails where blocks of other shapes are left: there each trial begins without a cache, and
    what it allocates counts.
    """
    starts_clean = False
    overhead: float | None = None
    while (probe := search.ask()) is not None:
        if overhead is None and probe.purpose == "verify" and not starts_clean:
            memory.release()
            starts_clean = True
        trial = runner.run(probe.bucket, probe.size, release=fragments)
        book.enter(trial)
        if trial.status != "fits":
            search.tell(probe, peak_bytes=None, ceiling=trial.status == "ceiling")
            starts_clean = True  # the runner frees everything after a failure
        elif fragments:
            search.tell(probe, peak_bytes=trial.usage.allocated_bytes)
        else:
            peak_bytes, reserved_bytes = trial.usage.allocated_bytes, trial.usage.reserved_bytes
            if starts_clean and peak_bytes > search.budget_bytes // 2:
                own = reserved_bytes / peak_bytes - 1.0
                overhead = max(overhead or 1.0, 1.0 + own + min((_MANY_SHAPES - 1.0) * own, _MANY_SHAPES_MOST))
            charged_bytes = round(peak_bytes * (overhead or 1.0))
            if starts_clean:
                charged_bytes = max(charged_bytes, reserved_bytes)
            if trial.usage.num_retries and starts_clean:
                # Nothing was left to give back, and still there was no room at once: slightly too much.
                charged_bytes = max(charged_bytes, round(_RETRIED * search.budget_bytes))
            search.tell(probe, peak_bytes=peak_bytes, charged_bytes=charged_bytes)
            # A retry beside a cache says that the cache was in the way, and nothing about this size.
            starts_clean = reserved_bytes > search.budget_bytes
            if starts_clean:
                memory.release()
        if on_trial is not None:
            on_trial(trial, book.bucket(probe.bucket, search.largest_fit(probe.bucket)))
    memory.release()


def _tell(search: Search, probe: Probe, trial: Trial) -> None:
    """Tell the search of an earlier trial as it stands."""
    if trial.status == "fits":
        peak_bytes, reserved_bytes = trial.usage.allocated_bytes, trial.usage.reserved_bytes
        search.tell(probe, peak_bytes=peak_bytes, charged_bytes=max(peak_bytes, reserved_bytes))
    else:
        search.tell(probe, peak_bytes=None, ceiling=trial.status == "ceiling")


def _choose(
    search: Search,
    runner: TrialRunner,
    memory: MemoryBackend,
    share: float,
    book: _Book,
    on_trial: Callable[[Trial, MeasuredBucket], None] | None,
) -> None:
    """Lower the sizes to the smallest that train nearly as fast."""
    plan = choose_sizes(search.shapes, search.sizes, book.times(), share=share)
    seconds: float | None = None
    while True:
        try:
            k, size = plan.send(seconds)
        except StopIteration as end:
            chosen: tuple[int, ...] = end.value
            break
        trial = runner.run(k, size, release=False)
        book.enter(trial)
        if trial.status == "fits":
            seconds = trial.usage.seconds
        else:
            seconds = None
            search.lower(k, size)
        if on_trial is not None:
            on_trial(trial, book.bucket(k, search.sizes[k]))
    for k, size in enumerate(chosen):
        search.lower(k, size + 1)
    memory.release()


def _soak(
    search: Search,
    runner: TrialRunner,
    memory: MemoryBackend,
    cap_bytes: int,
    num_steps: int,
    book: _Book,
    on_trial: Callable[[Trial, MeasuredBucket], None] | None,
    *,
    fragments: bool,
) -> None:
    """Run the soak by the book."""

    def run(k: int, size: int) -> Trial:
        trial = runner.run(k, size, release=False)
        book.enter(trial, soak=True)
        return trial

    def tell(trial: Trial) -> None:
        if on_trial is not None:
            on_trial(trial, book.bucket(trial.bucket, search.sizes[trial.bucket]))

    soak(search, run, memory, cap_bytes=cap_bytes, num_steps=num_steps, fragments=fragments, on_trial=tell)


class _Book:
    """What each trial said, by bucket."""

    def __init__(self, search: Search, num_buckets: int) -> None:
        self._search = search
        self._trials: list[list[Trial]] = [[] for _ in range(num_buckets)]
        self._earlier: list[list[Trial]] = [[] for _ in range(num_buckets)]
        self._soaked: list[list[Trial]] = [[] for _ in range(num_buckets)]
        self.num_trials = 0
        self.num_retries = 0

    @property
    def num_ooms(self) -> int:
        """Trials and soak steps that ran out of memory."""
        trials = [trial for trials in (*self._trials, *self._soaked) for trial in trials]
        return sum(trial.status == "oom" for trial in trials)

    def enter(self, trial: Trial, *, soak: bool = False) -> None:
        """Record a trial, or a soak step, which isn't one of the bucket's trials."""
        self.num_trials += 1
        self.num_retries += trial.usage.num_retries
        (self._soaked if soak else self._trials)[trial.bucket].append(trial)

    def remember(self, trial: Trial) -> None:
        """Record a trial of an earlier job: its peak counts, the trial doesn't."""
        self._earlier[trial.bucket].append(trial)

    def times(self) -> dict[tuple[int, int], list[float]]:
        """Seconds of the steps that fit, in their order, by bucket and size."""
        times: dict[tuple[int, int], list[float]] = {}
        for trials in (*self._trials, *self._soaked):
            for trial in trials:
                if trial.status == "fits" and trial.usage.seconds > 0:
                    times.setdefault((trial.bucket, trial.size), []).append(trial.usage.seconds)
        return times

    def bucket(self, k: int, size: int) -> MeasuredBucket:
        """What is known of bucket `k` at `size`; the peak is the model's where no step ran at exactly this size."""
        trials = self._trials[k]
        known = MeasuredBucket(
            size=size,
            num_trials=len(trials),
            num_ooms=sum(trial.status == "oom" for trial in trials),
            verified=not self._search.is_predicted(k),
            settled=self._search.is_settled(k),
        )
        measured = [trial for trial in (*trials, *self._earlier[k], *self._soaked[k]) if trial.status == "fits"]
        if not known.size:
            smallest = min(measured, key=lambda trial: trial.size, default=None)
            return replace(known, peak_bytes=smallest.usage.allocated_bytes) if smallest else known
        exact = [trial for trial in measured if trial.size == known.size]
        if not exact:
            return replace(known, peak_bytes=round(self._search.predict_bytes(k, known.size)))
        seconds = [trial.usage.seconds for trial in exact if trial.usage.seconds > 0]
        return replace(
            known,
            peak_bytes=exact[0].usage.allocated_bytes,
            step_s=typical_seconds(seconds) if seconds else None,
            verified=True,
        )


def refuse_unfit(
    measurement: Measurement, labels: Sequence[str], shapes: Sequence[BucketShape], *, budget_bytes: int, unit: str
) -> None:
    """Raise if some bucket can't hold even one example, naming all of them.

    :raises BucketDoesNotFitError: with the bucket, its lengths, the peak where it is known, and what to do.
    """
    unfit = [k for k, bucket in enumerate(measurement.buckets) if bucket.size == 0]
    if not unfit:
        return
    lines = []
    for k in unfit:
        shape, peak = shapes[k], measurement.buckets[k].peak_bytes
        tokens = f", output length {shape.output_len}" if shape.output_len else ""
        used = f"peak {format_bytes(peak)}" if peak is not None else "it ran out of memory"
        lines.append(f"bucket {k} ({labels[k]}: input length {shape.input_len:g} {unit}{tokens}): {used}")
    fitting = ", ".join(f"{labels[k]}: {bucket.size}" for k, bucket in enumerate(measurement.buckets) if bucket.size)
    raise BucketDoesNotFitError(
        f"a batch of one example exceeds the budget of {format_bytes(budget_bytes)} in {len(unfit)} of "
        f"{len(measurement.buckets)} buckets: {'; '.join(lines)}. Lower the last duration bin (longer cuts are then "
        f"left out), raise memory_fraction or memory_limit, or use less memory per example (activation checkpointing, "
        f"lower precision). The other buckets fit: {fitting or 'none'}"
    )
