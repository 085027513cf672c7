"""Trials as training will run its steps, after which everything is as it was before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lhotse_oomfit.calibration import wake_optimizers
from lhotse_oomfit.errors import CalibrationError
from lhotse_oomfit.journal import Observation
from lhotse_oomfit.lockstep import Crew, LockStepRunner
from lhotse_oomfit.memory import MemoryBackend, Usage
from lhotse_oomfit.profile import format_bytes
from lhotse_oomfit.snapshot import leave_no_trace
from lhotse_oomfit.training import Training, forget_trials, hold_gradients, must_wake, parts_of
from lhotse_oomfit.trial import Trial, TrialRunner

__all__ = ["observation_of", "rehearsal", "resident_bytes", "trial_of"]


@contextmanager
def rehearsal(
    training: Training,
    memory: MemoryBackend,
    make_batch: Callable[[int, int], Any],
    *,
    budget_bytes: int,
    together: bool = False,
    crew: Crew | None = None,
) -> Iterator[TrialRunner]:
    """Yields what runs trials: optimizer state is there, gradients too where they live on.

    :param make_batch: the batch of ``(bucket, size)``.
    :param together: whether a step is the one that all ranks run at once, through the model's wrapper.
    :param crew: the ranks that run each trial in step; None where this one is alone.
    :raises CalibrationError: if a step of the optimizer alone exceeds the budget.
    """
    step = training.step
    if together and training.step_together is not None:
        step = training.step_together
    wake = must_wake(training.optimizers)
    if crew is not None:
        wake = bool(crew.largest(int(wake))[0])
    keep_gradients = training.accumulate_grad_batches > 1
    try:
        with leave_no_trace(
            training.module,
            training.optimizers,
            training.schedulers,
            training.scalers,
            [*training.extras, *parts_of(training.dataset)],
            optimizer_state=wake,
        ):
            if not training.module.training:
                training.module.train()  # parts that are kept in eval mode within a training model stay so
            step.zero_grad()
            if wake:
                peak_bytes = wake_optimizers(step, memory, training.module.parameters())
                if peak_bytes > budget_bytes:
                    raise CalibrationError(
                        f"one step of the optimizer, without any batch, takes {format_bytes(peak_bytes)} of a budget "
                        f"of {format_bytes(budget_bytes)}; raise memory_fraction or memory_limit"
                    )
            if keep_gradients:
                hold_gradients(training.module)
            if crew is None:
                yield TrialRunner(step=step, memory=memory, make_batch=make_batch, keep_gradients=keep_gradients)
            else:
                yield LockStepRunner(
                    crew=crew, step=step, memory=memory, make_batch=make_batch, keep_gradients=keep_gradients
                )
    finally:
        forget_trials(training.model)
    memory.release()


def resident_bytes(memory: MemoryBackend) -> int:
    """What is allocated before a step begins."""
    with memory.measure() as usage:
        pass
    return usage().allocated_bytes


def observation_of(trial: Trial) -> Observation:
    """What is kept of a trial."""
    fits = trial.status == "fits"
    return Observation(
        bucket=trial.bucket,
        size=trial.size,
        peak_bytes=trial.usage.allocated_bytes if fits else None,
        reserved_bytes=trial.usage.reserved_bytes if fits else 0,
    )


def trial_of(observation: Observation) -> Trial:
    """A trial that was kept."""
    peak_bytes = observation.peak_bytes
    return Trial(
        bucket=observation.bucket,
        size=observation.size,
        status="oom" if peak_bytes is None else "fits",
        usage=Usage(
            allocated_bytes=peak_bytes or 0,
            reserved_bytes=observation.reserved_bytes,
            num_retries=0,
            num_ooms=0,
            seconds=0.0,
        ),
        error="an earlier job ran out of memory" if peak_bytes is None else None,
    )
