"""Whether a stored profile still holds: its tightest buckets, one training step each, under its own budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lhotse_oomfit.memory import MemoryBackend
from lhotse_oomfit.profile import Profile, format_bytes
from lhotse_oomfit.trial import TrialRunner

__all__ = ["Check", "check_tightest", "tightest_buckets"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """What became of one bucket of a profile at its size.

    :param label: the bucket in words.
    :param stored_peak_bytes: the peak that the profile has; None if it was only predicted.
    :param peak_bytes: the peak now, as far as the step came.
    :param reason: why the size doesn't hold; None if it does.
    """

    bucket: int
    label: str
    size: int
    stored_peak_bytes: int | None
    peak_bytes: int
    step_s: float
    reason: str | None

    @property
    def holds(self) -> bool:
        """Whether the step stayed inside the budget. Allocator retries are no failure here: the cap is a hard one."""
        return self.reason is None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**vars(self), "holds": self.holds}

    def __str__(self) -> str:
        stored = "no measured peak" if self.stored_peak_bytes is None else format_bytes(self.stored_peak_bytes)
        outcome = f"peak {format_bytes(self.peak_bytes)}" if self.reason is None else self.reason
        return f"bucket {self.bucket} ({self.label}), size {self.size}: {outcome}, stored: {stored}"


def tightest_buckets(profile: Profile, num: int) -> list[int]:
    """The `num` buckets with the highest share of the budget, those without a measured peak first."""

    def tightness(k: int) -> tuple[float, float]:
        share = profile.share(profile.buckets[k])
        return (2.0 if share is None else share, profile.buckets[k].input_len)

    return sorted(range(len(profile.buckets)), key=tightness, reverse=True)[:num]


def check_tightest(
    profile: Profile, runner: TrialRunner, memory: MemoryBackend, *, labels: Sequence[str], num_buckets: int
) -> list[Check]:
    """Run one step in each of the tightest buckets, under a hard cap at the profile's budget.

    :param runner: runs the trials, by index into the profile's buckets.
    :param labels: the buckets in words.
    """
    checks = []
    for k in tightest_buckets(profile, num_buckets):
        bucket = profile.buckets[k]
        memory.release()
        with memory.cap(profile.budget_bytes):
            trial = runner.run(k, bucket.size)
        reason = None
        if trial.status != "fits":
            reason = trial.error or trial.status
        elif trial.usage.allocated_bytes > profile.budget_bytes:
            reason = f"its peak, {format_bytes(trial.usage.allocated_bytes)}, exceeds the budget"
        checks.append(
            Check(
                bucket=k,
                label=labels[k],
                size=bucket.size,
                stored_peak_bytes=bucket.peak_bytes,
                peak_bytes=trial.usage.allocated_bytes,
                step_s=trial.usage.seconds,
                reason=reason,
            )
        )
    return checks
