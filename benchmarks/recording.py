"""What several benchmarks note and show: the trials of a calibration, versions, tables."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["every_trial", "table", "versions"]

_PACKAGES = ("torch", "lhotse", "nemo-toolkit", "lightning", "lhotse-oomfit", "lhotse-oomfit-nemo")


@contextmanager
def every_trial() -> Iterator[list[dict[str, Any]]]:
    """Note each trial of a calibration, those of its soak included, and when it ended after the first began."""
    from lhotse_oomfit.trial import TrialRunner

    rows: list[dict[str, Any]] = []
    run, started = TrialRunner.run, list[float]()

    def noted(self: TrialRunner, bucket: int, size: int, **options: Any) -> Any:
        started.append(time.perf_counter())
        trial = run(self, bucket, size, **options)
        rows.append(
            {
                "bucket": bucket,
                "size": size,
                "status": trial.status,
                "allocated": trial.usage.allocated_bytes,
                "reserved": trial.usage.reserved_bytes,
                "retries": trial.usage.num_retries,
                "seconds": trial.usage.seconds,
                "until_s": time.perf_counter() - started[0],
            }
        )
        return trial

    TrialRunner.run = noted  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        TrialRunner.run = run  # type: ignore[method-assign]


def versions() -> dict[str, str]:
    """Of Python, of the packages that are installed, and of the card."""
    import torch

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found |= {"card": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown; nothing without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]) if lines else ""
