"""One calibration from start to end, on every rank: look the profile up, or measure, store and share it.

How many ranks measure is the mode. One rank alone while the others wait (``rank0``); each rank some of the buckets
(``shard``) or all of them (``each``), by itself; or all ranks every trial together (``lockstep``), which is taken
wherever one rank can't run a step alone.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from lhotse_oomfit.budget import budget_bytes, fragmenting_bytes
from lhotse_oomfit.calibration import Measurement, measure_sizes, refuse_unfit
from lhotse_oomfit.errors import CalibrationError, InvalidArgumentError, LockStepMemoryError, RankFailedError
from lhotse_oomfit.fingerprint import Fingerprint
from lhotse_oomfit.identity import fingerprint_of, versions
from lhotse_oomfit.journal import Journal, Observation
from lhotse_oomfit.lockstep import Crew, crew_of
from lhotse_oomfit.memory import MemoryBackend, backend_for
from lhotse_oomfit.options import CalibrationOptions, check_recalibrate
from lhotse_oomfit.profile import Profile, format_bytes, parse, utc_now
from lhotse_oomfit.progress import show_progress
from lhotse_oomfit.ranks import Failure, Ranks, StoreRanks
from lhotse_oomfit.rehearsal import observation_of, rehearsal, resident_bytes, trial_of
from lhotse_oomfit.report import render_table
from lhotse_oomfit.sampler import CalibratedBucketingSampler
from lhotse_oomfit.shapes import Cases, WorstCases, shape_label
from lhotse_oomfit.snapshot import leave_no_trace
from lhotse_oomfit.solitude import alone
from lhotse_oomfit.store import ProfileStore
from lhotse_oomfit.strategies import ReducerBuckets, lockstep_reason, refuse_strategy
from lhotse_oomfit.teamwork import decode, encode, merge_each, merge_shares, share_out
from lhotse_oomfit.training import Training, gradient_bytes, parts_of, resident_tensors
from lhotse_oomfit.trial import Trial, TrialRunner
from lhotse_oomfit.verification import Check, check_tightest

__all__ = ["Job"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_CHECKED = 2
"""Buckets that are run again where a profile is verified: the tightest, and one more in case it was a special one."""
_MAX_SIZE = 65_536
"""Without ``max_batch_size``, no size is tried above this one."""
_SAME_BUDGET = 1.02
"""Budgets that differ by less count as the same: what else runs on a card moves by some MiB."""


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A stored profile that may be used.

    :param checked: whether a step in its tightest buckets must confirm it.
    :param note: why it is only nearly the one that was looked for; empty if it is that one.
    """

    profile: Profile
    path: str
    checked: bool
    note: str


class Job:
    """A calibration, seen from one rank. Every rank must make one at the same time.

    :raises InvalidArgumentError: if the ranks' samplers have different bins, or `sampler` isn't to be calibrated.
    :raises UnsupportedStrategyError: for a training that can't be measured.
    :raises CalibrationError: if no memory is left.
    """

    def __init__(
        self, *, sampler: CalibratedBucketingSampler, training: Training, options: CalibrationOptions, ranks: Ranks
    ) -> None:
        self.sampler = sampler
        self.training = training
        self.options = options
        self.ranks = ranks
        self.memory: MemoryBackend
        said = [json.loads(text) for text in ranks.gather(self._prepare)]
        if len({each["bins"] for each in said}) > 1:
            raise InvalidArgumentError(
                "the ranks' samplers have different duration_bins, as estimates from each rank's own part of the data "
                "are; pass duration_bins, the same on every rank"
            )
        self.budget_bytes = min(each["budget_bytes"] for each in said)
        self.most_bytes = min(each["most_bytes"] for each in said)
        if self.budget_bytes <= 0:
            raise CalibrationError(
                f"no memory is left to calibrate with: {format_bytes(max(0, self.memory.budget(1.0).free_bytes))} of "
                f"{training.device} are free for this process; end what else runs on it, or lower the reserve"
            )
        self.mode = self._mode(said)
        self.store = ProfileStore(options.cache)

    def _prepare(self) -> str:
        """What this rank has to say before any measures: its budget, and what must be the same on all."""
        _check_sampler(self.sampler)
        training = self.training
        model = training.model if training.model is not None else training.module
        refuse_strategy(model, training.optimizers)
        if training.device.type == "cpu" and isinstance(model, DistributedDataParallel):
            # A card's allocator knows of the reducer's buckets; on a CPU only what is listed counts.
            self.training = replace(training, extras=[*training.extras, ReducerBuckets(training.module)])
        self.memory = backend_for(
            training.device,
            memory_limit=self.options.memory_limit,
            resident=lambda: resident_tensors(self.training),
        )
        self.allocator = self.memory.prepare()
        bins = self.sampler.bins
        said = {
            "budget_bytes": budget_bytes(self.memory, self.allocator, self.options),
            "most_bytes": self.memory.budget(1.0).bytes,
            "bins": repr(bins.as_lists()) if bins is not None else "",
            "card": self.memory.fields(),
            "reason": lockstep_reason(model),
        }
        return json.dumps(said)

    def _mode(self, said: Sequence[dict[str, Any]]) -> str:
        wanted, reason = self.options.ranks, next((each["reason"] for each in said if each["reason"]), None)
        if reason is not None or wanted == "lockstep":
            if reason is not None and self.ranks.world_size > 1:
                logger.info("all ranks run every trial together: %s", reason)
            return "lockstep"
        if self.ranks.world_size == 1:
            return "rank0"
        if wanted == "shard" and len({json.dumps([each["card"], each["budget_bytes"] >> 26]) for each in said}) > 1:
            logger.info("rank 0 measures all buckets: the ranks' cards or budgets differ, so they can't share them out")
            return "rank0"
        return wanted

    def run(self, known: Profile | None = None) -> Profile:
        """The profile, the same on every rank.

        :param known: a profile that this process has already; it is taken if it was measured for the same thing.
        """
        try:
            with ExitStack() as stack:
                if self.mode == "rank0" or self.ranks.world_size == 1:
                    return parse(self.ranks.first(lambda: self._run_here(stack, known).encode()))
                return parse(self._run_everywhere(stack, known))
        except BaseException as error:
            self.ranks.tell(error)  # it may have happened where nobody else was waiting for this rank
            raise

    def verify(self, profile: Profile, num_buckets: int) -> list[Check]:
        """Run the tightest buckets of `profile` again, in this process alone."""
        with self._reading() as worst_case, alone():
            differences = profile.fingerprint.differences(self._fingerprint(worst_case))
            if differences:
                logger.warning(
                    "the profile was measured for something else, its sizes are tried all the same: %s",
                    "; ".join(differences),
                )
            return self._check(worst_case, profile, num_buckets)

    # One rank, or all

    def _run_here(self, stack: ExitStack, known: Profile | None) -> Profile:
        """Everything on this rank, alone."""
        stack.enter_context(alone())
        worst_case = stack.enter_context(self._reading())
        fingerprint = self._fingerprint(worst_case)
        candidate = self._candidate(fingerprint, known)
        if candidate is not None:
            checks = self._check(worst_case, candidate.profile, _NUM_CHECKED) if candidate.checked else []
            profile = self._accepted(candidate, checks, fingerprint)
            if profile is not None:
                return profile
        return self._finished(self._measure(worst_case), worst_case, fingerprint)

    def _run_everywhere(self, stack: ExitStack, known: Profile | None) -> str:
        """The first rank decides and stores, all measure."""
        ranks, cases = self.ranks, []

        def read() -> str:
            with alone():
                cases.append(stack.enter_context(self._reading()))
            return json.dumps(cases[0].output_lens)

        said = [json.loads(text) for text in ranks.gather(read)]
        worst_case = cases[0]
        # Ranks may read different data; where lengths are guessed from it, the longest guess of all counts.
        worst_case.agree([max((n for n in lens if n is not None), default=None) for lens in zip(*said, strict=True)])

        def look() -> str:
            with alone():
                fingerprints.append(self._fingerprint(worst_case))
            candidate = self._candidate(fingerprints[0], known)
            return json.dumps(candidate and {**dataclasses.asdict(candidate), "profile": candidate.profile.encode()})

        fingerprints: list[Fingerprint] = []
        found = json.loads(ranks.first(look))
        if found is not None:
            candidate = _Candidate(**{**found, "profile": parse(found["profile"])})
            checks = self._checked_by_all(worst_case, candidate.profile) if candidate.checked else []

            def accept() -> str:
                profile = self._accepted(candidate, checks, fingerprints[0])
                return "" if profile is None else profile.encode()

            text = ranks.first(accept)
            if text:
                return text
        measurement = self._measured_by_all(worst_case, lambda: fingerprints[0])
        return ranks.first(lambda: self._finished(measurement, worst_case, fingerprints[0]).encode())

    def _checked_by_all(self, worst_case: WorstCases, profile: Profile) -> list[Check]:
        """The checks of a profile: by all ranks where they must run together, else by the first, for the first."""
        checks: list[Check] = []

        def check(crew: Crew | None) -> str:
            checks.extend(self._check(worst_case, profile, _NUM_CHECKED, crew))
            return ""

        if self.mode == "lockstep":
            self.ranks.gather(lambda: self._together(check))
        else:
            self.ranks.first(lambda: _by_itself(lambda: check(None)))
        return checks

    def _measured_by_all(self, worst_case: WorstCases, fingerprint: Callable[[], Fingerprint]) -> Measurement:
        """One measurement from what every rank does; `fingerprint` is known to the first rank only."""
        ranks, shapes = self.ranks, worst_case.shapes
        if self.mode == "lockstep":
            journals: list[Journal] = []

            def measure(crew: Crew) -> str:
                if ranks.rank == 0:
                    made = fingerprint()
                    journals.append(Journal(self.store.path(made), fingerprint=made, budget_bytes=self.budget_bytes))
                earlier = crew.told_by_first(journals[0].read() if journals else [])
                for journal in journals:
                    journal.start(earlier)
                return encode(self._measure(worst_case, crew=crew, journals=journals, earlier=earlier))

            texts = ranks.gather(lambda: self._together(measure, journals))
            measurements = [decode(text) for text in texts]
            sizes = {tuple(bucket.size for bucket in m.buckets) for m in measurements if m is not None}
            if len(sizes) > 1:
                raise CalibrationError(f"the ranks found different sizes, though they ran the same trials: {sizes}")
            return merge_each(measurements[:1], shapes)
        shares = share_out(shapes, ranks.world_size)
        own = shares[ranks.rank] if self.mode == "shard" else None
        texts = ranks.gather(lambda: encode(None if own == [] else _by_itself(lambda: self._measure(worst_case, own))))
        measurements = [decode(text) for text in texts]
        return merge_shares(measurements, shares, shapes) if own is not None else merge_each(measurements, shapes)

    def _together(self, work: Callable[[Crew], str], journals: Sequence[Journal] = ()) -> str:
        """Run `work` in step with all ranks; a step that ran out of memory on any of them goes into the journal."""
        if not isinstance(self.ranks, StoreRanks):
            raise CalibrationError("trials in lock-step need several ranks, this job has one")
        kept: list[Failure] = []

        def keep(failure: Failure | None) -> None:
            if failure is not None and failure.trial is not None and not kept:
                kept.append(failure)
                bucket, size = failure.trial
                for journal in journals:
                    journal.add(Observation(bucket=bucket, size=size, peak_bytes=None))

        try:
            with crew_of(self.ranks, on_failure=keep) as crew:
                return work(crew)
        except LockStepMemoryError as error:
            here = self.ranks.rank
            keep(Failure(rank=here, error=str(error), told_by=here, trial=(error.bucket, error.size)))
            raise
        except RankFailedError:
            with suppress(RuntimeError, ConnectionError):  # the store may be gone as well
                keep(self.ranks.failure())
            raise

    # Loading

    def _candidate(self, fingerprint: Fingerprint, known: Profile | None) -> _Candidate | None:
        """A profile to use instead of measuring; None, and a line in the log that says why, if there is none."""
        if known is not None and known.fingerprint == fingerprint and known.bins == self.sampler.bins:
            logger.info("batch sizes of %s buckets are known already: 0 trial steps", len(known.buckets))
            return _Candidate(profile=known, path="", checked=False, note="")
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
        if profile.budget_bytes > self.budget_bytes * _SAME_BUDGET:
            logger.info(
                "calibrating: %s was measured with a budget of %s, now it is %s",
                lookup.path,
                format_bytes(profile.budget_bytes),
                format_bytes(self.budget_bytes),
            )
            return None
        return _Candidate(
            profile=profile,
            path=str(lookup.path),
            checked=lookup.profile is None or self.options.verify_on_load,
            note=(lookup.reason or "") if lookup.profile is None else "",
        )

    def _accepted(self, candidate: _Candidate, checks: Sequence[Check], fingerprint: Fingerprint) -> Profile | None:
        """The candidate, if its checks hold; stored anew under `fingerprint` where it was only a near match."""
        failed = [str(check) for check in checks if not check.holds]
        if failed:
            logger.info("calibrating: the stored profile no longer holds: %s", "; ".join(failed))
            return None
        profile = candidate.profile
        if candidate.note:
            logger.info("%s, and holds here too", candidate.note)
            profile = replace(profile, fingerprint=fingerprint, versions=versions())
            self.store.save(profile)
        if candidate.path:
            logger.info(
                "batch sizes of %s buckets loaded from %s: %s trial steps",
                len(profile.buckets),
                candidate.path,
                len(checks),
            )
        return profile

    # Trials

    @contextmanager
    def _reading(self) -> Iterator[WorstCases]:
        """Worst-case batches, from cuts read ahead. The dataset's own generators don't notice."""
        dataset = self.training.dataset
        with leave_no_trace(torch.nn.Module(), extras=parts_of(dataset), parameters=False):
            yield WorstCases(self.sampler, self.training, self.sampler.sample_cuts(self.options.num_sample_cuts))

    def _check(
        self, worst_case: WorstCases, profile: Profile, num_buckets: int, crew: Crew | None = None
    ) -> list[Check]:
        labels = [shape_label(shape) for shape in worst_case.shapes]
        with self._trials(worst_case.make, crew) as runner:
            return check_tightest(profile, runner, self.memory, labels=labels, num_buckets=num_buckets)

    def _measure(
        self,
        worst_case: Cases,
        buckets: Sequence[int] | None = None,
        *,
        crew: Crew | None = None,
        journals: Sequence[Journal] = (),
        earlier: Sequence[Observation] = (),
    ) -> Measurement:
        """Measure these buckets, or all."""
        memory, options = self.memory, self.options
        chosen = range(len(worst_case.shapes)) if buckets is None else buckets
        shapes = [worst_case.shapes[k] for k in chosen]
        labels = [shape_label(shape) for shape in shapes]
        num_soak_steps = options.num_soak_steps
        if num_soak_steps is None:
            num_soak_steps = max(8 * len(labels), 48)
        make = worst_case.make
        with (
            self._trials(lambda k, size: make(chosen[k], size), crew) as runner,
            show_progress(labels, options.progress if self.ranks.rank == 0 else False) as show,
        ):

            def on_trial(trial: Trial, bucket: Any) -> None:
                for journal in journals:
                    journal.add(observation_of(trial))
                show(trial, bucket)
                if crew is None:
                    self.ranks.check()

            before_bytes, gradients = resident_bytes(memory), gradient_bytes(self.training.module)
            if crew is not None:
                before_bytes, gradients = crew.largest(before_bytes, gradients)
            measurement = measure_sizes(
                shapes,
                runner=runner,
                memory=memory,
                budget_bytes=self.budget_bytes,
                resident_bytes=before_bytes,
                gradient_bytes=gradients,
                forward_gradients=self.training.forward_gradients,
                headroom_bytes=max(self.most_bytes - self.budget_bytes, 0),
                max_size=options.max_batch_size or _MAX_SIZE,
                num_soak_steps=num_soak_steps if memory.name == "cuda" else 0,
                mode=options.mode,
                objective=options.objective,
                throughput_share=options.throughput_share,
                fragmenting_bytes=fragmenting_bytes(memory, self.allocator, self.budget_bytes),
                cautious=crew is not None,
                earlier=[trial_of(observation) for observation in earlier],
                on_trial=on_trial,
            )
        for journal in journals:
            journal.discard()
        return measurement

    def _trials(
        self, make_batch: Callable[[int, int], Any], crew: Crew | None = None
    ) -> AbstractContextManager[TrialRunner]:
        return rehearsal(
            self.training,
            self.memory,
            make_batch,
            budget_bytes=self.budget_bytes,
            together=self.mode == "lockstep",
            crew=crew,
        )

    # The profile

    def _finished(self, measurement: Measurement, worst_case: WorstCases, fingerprint: Fingerprint) -> Profile:
        """The profile of a measurement, stored and announced.

        :raises BucketDoesNotFitError: if some bucket can't hold one example.
        """
        labels = [shape_label(shape) for shape in worst_case.shapes]
        refuse_unfit(measurement, labels, worst_case.shapes, budget_bytes=self.budget_bytes, unit="s")
        profile = self._profile(measurement, worst_case, fingerprint)
        path = self.store.save(profile)
        logger.info("calibrated %s buckets\n%s", len(profile.buckets), render_table(profile, width=100))
        logger.info("profile kept at %s" if path else "the profile is not kept%s", path or "")
        return profile

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
            mode=self.options.mode,
            objective=self.options.objective,
            allocator=self.allocator,
            created=utc_now(),
            versions=versions(),
        )

    def _fingerprint(self, worst_case: WorstCases) -> Fingerprint:
        return fingerprint_of(
            self.training,
            self.sampler,
            self.options,
            memory=self.memory,
            allocator=self.allocator,
            cases=worst_case,
            world_size=self.options.world_size or self.ranks.world_size,
            lockstep=self.mode == "lockstep",
        )


def _by_itself(work: Callable[[], T]) -> T:
    """Run `work` without meeting other ranks."""
    with alone():
        return work()


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
