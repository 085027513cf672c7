"""Finds the sizes of several samplers of whose batches every training step holds one each.

They share the memory of the step. Each gets an equal part of the room, which is the budget less what is resident and
less what a step with few examples of all takes. It is measured with few examples of the others' longest buckets in the
same step. A step's peak is the largest of several affine functions of all the sizes (one for each moment of the step),
so what fits in each part fits together, up to the gradients that hide behind a small batch; a closing pass runs
combinations of full batches, the tightest among them, and shrinks sizes where one exceeds the budget.
"""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from lhotse_oomfit.bytecode import callable_digest
from lhotse_oomfit.calibration import MeasuredBucket, Measurement, refuse_unfit
from lhotse_oomfit.digest import short_sha
from lhotse_oomfit.errors import BucketDoesNotFitError, UnsupportedStrategyError
from lhotse_oomfit.fingerprint import Fingerprint
from lhotse_oomfit.job import Job
from lhotse_oomfit.joint import Choice, JointBatches, Member
from lhotse_oomfit.options import CalibrationOptions
from lhotse_oomfit.peak_model import BucketShape, lighter_than, monotone
from lhotse_oomfit.profile import Profile, format_bytes, parse
from lhotse_oomfit.ranks import Ranks, current_ranks
from lhotse_oomfit.sampler import CalibratedBucketingSampler
from lhotse_oomfit.shapes import WorstCases, shape_label
from lhotse_oomfit.snapshot import leave_no_trace
from lhotse_oomfit.solitude import alone
from lhotse_oomfit.training import gradient_bytes, parts_of
from lhotse_oomfit.trial import TrialRunner
from lhotse_oomfit.verification import Check

__all__ = ["Found", "JointJob", "ranks_of"]

logger = logging.getLogger(__name__)

_NUM_FEW = 2
"""Examples of each other sampler beside the one that is measured; batch norms over pooled features refuse one."""
_SHRINK = 0.97
"""Where full batches exceed the budget together, every size loses at least this share."""
_NUM_COMBINATIONS = 8
"""Combinations of buckets that the closing pass runs; all of them where there are no more."""

Found = list[tuple[CalibratedBucketingSampler, Profile]]


def ranks_of(options: CalibrationOptions) -> Ranks:
    return current_ranks(
        heartbeat_timeout_s=options.heartbeat_timeout, calibration_timeout_s=options.calibration_timeout
    )


@dataclass(frozen=True, kw_only=True)
class _Base:
    """What is taken whatever the sizes.

    :param resident_bytes: before a step begins.
    :param few_bytes: the peak of a step with few examples of each sampler.
    :param given_bytes: what full batches of the samplers with given sizes add to that.
    """

    resident_bytes: int
    few_bytes: int
    given_bytes: int


@dataclass(frozen=True, kw_only=True)
class _Beside:
    """The buckets of one sampler in a step with few examples of the others; shapes that are equal only once."""

    batches: JointBatches
    i: int
    shapes: list[BucketShape]

    def make(self, bucket: int, size: int) -> Any:
        return self.batches.varied(self.i, self.batches.shapes(self.i).index(self.shapes[bucket]), size)


class _Part(Job):
    """The calibration of one of several samplers; who shares the step with it is part of its fingerprint."""

    def describe(self, cases: WorstCases, beside: str) -> Fingerprint:
        """What its profile is for, `beside` these."""
        self.training = replace(self.training, settings={**self.training.settings, "beside": beside})
        return self._fingerprint(cases)

    def stored(self, fingerprint: Fingerprint, known: Profile | None) -> Any:
        """A profile that may be used; None without one."""
        return self._candidate(fingerprint, known)

    def confirm(self, candidate: Any, checks: Sequence[Check], fingerprint: Fingerprint) -> Profile | None:
        """The stored profile, if the checks hold."""
        return self._accepted(candidate, checks, fingerprint)

    def measure(self, beside: _Beside, budget_bytes: int) -> Measurement:
        """Measure within another budget than the whole one."""
        whole, self.budget_bytes = self.budget_bytes, budget_bytes
        try:
            return self._measure(beside)
        finally:
            self.budget_bytes = whole

    def steps(self, make: Callable[[int, int], Any]) -> Any:
        """Runs steps as training does."""
        return self._trials(make)

    def finish(self, measurement: Measurement, cases: WorstCases, fingerprint: Fingerprint) -> Profile:
        """The profile, stored and announced."""
        return self._finished(measurement, cases, fingerprint)


class JointJob:
    """The calibration of samplers of whose batches every step holds one each, on every rank; the first one measures."""

    def __init__(
        self,
        members: Sequence[Member],
        batches: Callable[[int], JointBatches],
        way: str,
        options: CalibrationOptions,
    ) -> None:
        """:param batches: for a number of examples of the others."""
        self._members = members
        self._batches = batches
        self._way = way
        self._ranks = ranks_of(options)
        self._autos = [i for i, member in enumerate(members) if member.sampler.is_auto]
        self._num_few = 1 if options.max_batch_size == 1 else _NUM_FEW
        datasets = list({id(member.training.dataset): member.training.dataset for member in members}.values())
        self._kept = [part for dataset in datasets for part in parts_of(dataset)]
        self._parts = {
            i: _Part(
                sampler=members[i].sampler,
                training=replace(members[i].training, extras=[*members[i].training.extras, *self._kept]),
                options=options,
                ranks=self._ranks,
            )
            for i in self._autos
        }
        self._first = self._parts[self._autos[0]]
        self._budget_bytes: int = min(part.budget_bytes for part in self._parts.values())
        if self._first.mode == "lockstep" and self._ranks.world_size > 1:
            raise UnsupportedStrategyError(
                "samplers whose batches meet in one step can't be calibrated where all ranks must run every trial "
                "together (FSDP, tensor parallel, a static graph, ranks='lockstep'): give them lists of sizes, or "
                "let them take turns (RoundRobinSampler)"
            )
        if self._first.mode != "rank0" and self._ranks.world_size > 1:
            logger.info("rank 0 measures all buckets, as samplers whose batches meet in one step are")

    def run(self, known: Sequence[Profile]) -> Found:
        """The samplers and their profiles, the same on every rank."""
        text = self._ranks.first(lambda: json.dumps([profile.encode() for profile in self._run_here(known)]))
        profiles = [parse(each) for each in json.loads(text)]
        return [(self._members[i].sampler, profile) for i, profile in zip(self._autos, profiles, strict=True)]

    def _run_here(self, known: Sequence[Profile]) -> list[Profile]:
        with ExitStack() as stack:
            stack.enter_context(alone())
            stack.enter_context(leave_no_trace(torch.nn.Module(), extras=self._kept, parameters=False))
            batches = self._batches(self._num_few)
            fingerprints = {i: self._parts[i].describe(batches.cases[i], self._beside(batches, i)) for i in self._autos}
            profiles = self._loaded(batches, fingerprints, known)
            return profiles or self._measured(batches, fingerprints)

    def _beside(self, batches: JointBatches, i: int) -> str:
        """What else is in a step: for each other sampler its shapes, its sizes where they are given, its batches."""
        told = []
        for j, member in enumerate(self._members):
            if j != i:
                case, sampler = batches.cases[j], member.sampler
                sizes = "measured" if sampler.is_auto else ", ".join(map(str, sampler.bucket_batch_size or ()))
                functions = [callable_digest(f) for f in sampler.functions.values() if f is not None]
                digest = short_sha([sorted(case.batch_fields().items()), functions])
                told.append(f"{', '.join(map(shape_label, case.shapes))} ({sizes}, sha {digest})")
        return f"{self._way}, number {i}: {'; '.join(told)}"

    # Loading

    def _loaded(
        self, batches: JointBatches, fingerprints: dict[int, Fingerprint], known: Sequence[Profile]
    ) -> list[Profile] | None:
        """Profiles for all of them, or None: sizes that were found together are used together."""
        found = {}
        for position, i in enumerate(self._autos):
            candidate = self._parts[i].stored(fingerprints[i], known[position] if known else None)
            if candidate is None:
                return None
            found[i] = candidate
        checks: list[Check] = []
        if any(candidate.checked for candidate in found.values()):
            sizes = {i: candidate.profile.bucket_batch_size for i, candidate in found.items()}
            peaks = {i: [bucket.peak_bytes for bucket in found[i].profile.buckets] for i in self._autos}
            combination = self._tightest(batches, peaks)
            with self._steps(batches) as run:
                checks = [run(combination, sizes)]
        profiles = [self._parts[i].confirm(found[i], checks, fingerprints[i]) for i in self._autos]
        return None if None in profiles else [profile for profile in profiles if profile is not None]

    # Measuring

    def _measured(self, batches: JointBatches, fingerprints: dict[int, Fingerprint]) -> list[Profile]:
        base = self._base(batches)
        if base is None and self._num_few > 1:
            self._num_few = 1
            batches = self._batches(1)
            base = self._base(batches)
        if base is None:
            raise BucketDoesNotFitError(
                f"a step with one example of each sampler's longest bucket (and a full batch of those with given "
                f"sizes) exceeds the budget of {format_bytes(self._budget_bytes)}; lower their last duration bins, "
                f"raise memory_fraction or memory_limit, or use less memory per example (activation checkpointing, "
                f"lower precision)"
            )
        budget_bytes = self._part_bytes(base)
        logger.info(
            "%d samplers share each step: each is measured within %s of %s",
            len(self._members),
            format_bytes(budget_bytes),
            format_bytes(self._budget_bytes),
        )
        measurements: dict[int, Measurement] = {}
        for i in self._autos:
            shapes = batches.shapes(i)
            unique = list(dict.fromkeys(shapes))
            measured = self._parts[i].measure(_Beside(batches=batches, i=i, shapes=unique), budget_bytes)
            measured = replace(measured, buckets=tuple(measured.buckets[unique.index(shape)] for shape in shapes))
            refuse_unfit(measured, list(map(shape_label, shapes)), shapes, budget_bytes=budget_bytes, unit="s")
            measurements[i] = measured
        peaks = {i: [bucket.peak_bytes for bucket in measurement.buckets] for i, measurement in measurements.items()}
        sizes, num_steps = self._closing_pass(batches, measurements, peaks, base.resident_bytes)
        profiles = []
        for i in self._autos:
            others = [max((peak or 0) for peak in peaks[j]) - base.few_bytes for j in self._autos if j != i]
            buckets = [
                _resized(bucket, size, base.resident_bytes, base.given_bytes + sum(others))
                for bucket, size in zip(measurements[i].buckets, sizes[i], strict=True)
            ]
            steps = measurements[i].num_trials + (num_steps if i == self._autos[0] else 0)
            whole = replace(measurements[i], buckets=tuple(buckets), num_trials=steps)
            profiles.append(self._parts[i].finish(whole, batches.cases[i], fingerprints[i]))
        return profiles

    def _base(self, batches: JointBatches) -> _Base | None:
        """What steps with few examples take; None if they don't fit."""
        memory, training = self._first.memory, self._first.training
        choices = list(batches.few)
        peaks = []
        with self._first.steps(lambda bucket, size: batches.together(choices)) as runner:
            with memory.measure() as usage:
                pass
            resident_bytes = usage().allocated_bytes
            if training.forward_gradients:
                resident_bytes += gradient_bytes(training.module)
            for given in ({}, batches.given) if batches.given else ({},):
                choices = [given.get(i, few) for i, few in enumerate(batches.few)]
                trial = runner.run(0, self._num_few)
                if trial.status != "fits" or trial.usage.allocated_bytes > self._budget_bytes:
                    return None
                peaks.append(trial.usage.allocated_bytes)
        return _Base(resident_bytes=resident_bytes, few_bytes=peaks[0], given_bytes=max(peaks[-1] - peaks[0], 0))

    def _part_bytes(self, base: _Base) -> int:
        """The budget within which each sampler is measured beside few examples of the others.

        What few examples of all take is granted to each, but for the gradients: in a small batch they may be the
        peak, which full batches leave behind.
        """
        training = self._first.training
        hidden_bytes = 0 if training.forward_gradients else gradient_bytes(training.module)
        granted_bytes = max(base.few_bytes - base.resident_bytes - hidden_bytes, 0)
        room_bytes = self._budget_bytes - base.given_bytes - base.resident_bytes - granted_bytes
        part_bytes = base.resident_bytes + granted_bytes + room_bytes // len(self._autos)
        return max(part_bytes, base.few_bytes)

    # Full batches together

    def _closing_pass(
        self,
        batches: JointBatches,
        measurements: dict[int, Measurement],
        peaks: dict[int, list[int | None]],
        resident_bytes: int,
    ) -> tuple[dict[int, list[int]], int]:
        """Run full batches of several combinations of buckets; shrink all sizes where one exceeds the budget.

        :return: the sizes that held, and how many steps that took.
        """
        sizes = {i: [bucket.size for bucket in measurement.buckets] for i, measurement in measurements.items()}
        num_steps = 0
        with self._steps(batches) as run:
            for combination in self._combinations(batches, peaks):
                check = run(combination, sizes)
                num_steps += 1
                while not check.holds:
                    share = (self._budget_bytes - resident_bytes) / max(check.peak_bytes - resident_bytes, 1)
                    share = min(share, _SHRINK)
                    if all(sizes[i][combination[i]] == 1 for i in self._autos):
                        raise BucketDoesNotFitError(f"one example of each sampler in a step is too much: {check}")
                    for i in self._autos:
                        sizes[i] = _shrunk(sizes[i], batches.shapes(i), combination[i], share)
                    logger.info("full batches together: %s; all sizes shrink by %.0f%%", check, 100 * (1 - share))
                    check = run(combination, sizes)
                    num_steps += 1
        return sizes, num_steps

    def _tightest(self, batches: JointBatches, peaks: dict[int, list[int | None]]) -> tuple[int, ...]:
        """Of each sampler the bucket with the largest peak, the longest among equals."""
        chosen = []
        for i, case in enumerate(batches.cases):
            shapes = case.shapes
            if i in batches.given:
                k = batches.given[i][0]
            else:
                rows = [(peak or 0, shape.input_len) for peak, shape in zip(peaks[i], shapes, strict=True)]
                k = rows.index(max(rows))
            chosen.append(k)
        return tuple(chosen)

    def _combinations(self, batches: JointBatches, peaks: dict[int, list[int | None]]) -> list[tuple[int, ...]]:
        """Of each sampler a bucket: the tightest ones, the longest ones, some at random."""
        counts = [len(case.shapes) for case in batches.cases]
        chosen = [self._tightest(batches, peaks), tuple(k for k, _ in batches.few)]
        rng = random.Random(0)
        while len(set(chosen)) < min(math.prod(counts), _NUM_COMBINATIONS):
            chosen.append(tuple(rng.randrange(count) for count in counts))
        return list(dict.fromkeys(chosen))

    @contextmanager
    def _steps(self, batches: JointBatches) -> Iterator[Callable[[tuple[int, ...], dict[int, list[int]]], Check]]:
        """Yields a function that runs a step with full batches of a combination of buckets, under a hard cap."""
        choices: list[Choice] = []
        memory = self._first.memory
        runner: TrialRunner

        def run(combination: tuple[int, ...], sizes: dict[int, list[int]]) -> Check:
            given = {i: member.sampler.bucket_batch_size or [] for i, member in enumerate(self._members)}
            choices[:] = [(k, (sizes.get(i) or given[i])[k]) for i, k in enumerate(combination)]
            total = sum(size for _, size in choices)
            with memory.cap(self._budget_bytes):
                trial = runner.run(0, total)
            peak_bytes = trial.usage.allocated_bytes
            reason = None
            if trial.status != "fits":
                reason = trial.error or trial.status
            elif peak_bytes > self._budget_bytes:
                reason = f"its peak, {format_bytes(peak_bytes)}, exceeds the budget"
            shapes = [case.shapes[k] for case, k in zip(batches.cases, combination, strict=True)]
            return Check(
                bucket=combination[self._autos[0]],
                label=" and ".join(f"{size} of {shape_label(s)}" for (_, size), s in zip(choices, shapes, strict=True)),
                size=total,
                stored_peak_bytes=None,
                peak_bytes=peak_bytes,
                step_s=trial.usage.seconds,
                reason=reason,
            )

        with self._first.steps(lambda bucket, size: batches.together(choices)) as runner:
            yield run


def _shrunk(sizes: list[int], shapes: Sequence[BucketShape], bucket: int, share: float) -> list[int]:
    """All sizes times `share`, that of `bucket` by at least one example; they never grow with length."""
    smaller = [max(math.ceil(size * share), 1) for size in sizes]
    smaller[bucket] = max(min(int(sizes[bucket] * share), sizes[bucket] - 1), 1)
    return list(monotone(smaller, lighter_than(shapes)))


def _resized(bucket: MeasuredBucket, size: int, resident_bytes: int, beside_bytes: int) -> MeasuredBucket:
    """The bucket at the size that held; its peak is that of a step with full batches of the others, as predicted."""
    peak_bytes = bucket.peak_bytes
    if peak_bytes is not None:
        own_bytes = (peak_bytes - resident_bytes) * size / max(bucket.size, 1)
        peak_bytes = round(resident_bytes + own_bytes + beside_bytes)
    return replace(bucket, size=size, peak_bytes=peak_bytes, step_s=None)
