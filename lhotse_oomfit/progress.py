"""Progress of a calibration: a bar over buckets at a terminal, one log line a bucket elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lhotse_oomfit.calibration import MeasuredBucket
from lhotse_oomfit.profile import format_bytes
from lhotse_oomfit.trial import Trial

__all__ = ["show_progress"]

logger = logging.getLogger(__name__)


@contextmanager
def show_progress(labels: Sequence[str], wanted: bool | None) -> Iterator[Callable[[Trial, MeasuredBucket], None]]:
    """Yields what :func:`~lhotse_oomfit.calibration.measure_sizes` calls after each trial.

    :param labels: one per bucket.
    :param wanted: whether to show a bar; None to show one at a terminal.
    """
    console = Console(stderr=True)
    settled: set[int] = set()

    def note(trial: Trial, bucket: MeasuredBucket) -> bool:
        new = bucket.settled and trial.bucket not in settled
        if new:
            settled.add(trial.bucket)
        return new

    if not (console.is_terminal if wanted is None else wanted):

        def log(trial: Trial, bucket: MeasuredBucket) -> None:
            if note(trial, bucket):
                peak = format_bytes(bucket.peak_bytes) if bucket.peak_bytes is not None else "unknown"
                logger.info(
                    "bucket %s/%s (%s): size %s, peak %s, %s trials",
                    trial.bucket + 1,
                    len(labels),
                    labels[trial.bucket],
                    bucket.size or "does not fit",
                    peak,
                    bucket.num_trials,
                )

        yield log
        return
    columns = (
        TextColumn("calibrating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(labels))

        def show(trial: Trial, bucket: MeasuredBucket) -> None:
            note(trial, bucket)
            bar.update(task, completed=len(settled), description=f"{labels[trial.bucket]}: size {trial.size}")

        yield show
