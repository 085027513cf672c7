"""Profiles made up for tests."""

from __future__ import annotations

from typing import Any

from lhotse_oomfit.bins import Bins
from lhotse_oomfit.fingerprint import Fingerprint
from lhotse_oomfit.profile import BucketProfile, Profile

EDGES_1D = [2.0, 4.5, 30.0]
EDGES_2D = [[2.0, 10], [2.0, 25], [8.0, 40], [8.0, 90]]


def make_profile(
    edges: list[Any] | None = None,
    *,
    fields: dict[str, str] | None = None,
    sizes: list[int] | None = None,
    **changes: Any,
) -> Profile:
    """A plausible profile; the third bucket is only predicted."""
    limits = {name: changes.pop(name) for name in ("strict_2d", "min_tps", "max_tps") if name in changes}
    bins = Bins.from_edges(EDGES_1D if edges is None else edges, **limits)
    sizes = sizes or [max(1, int(400 / bins.input_len(k))) for k in range(len(bins))]
    buckets = tuple(
        BucketProfile(
            size=size,
            input_len=bins.input_len(k),
            output_len=bins.max_output_len(k),
            verified=k != 2,
            peak_bytes=None if k == 2 else 900_000_000 + 1_000_000 * k,
            step_s=0.25 + 0.01 * k,
            num_trials=1,
            num_ooms=0,
        )
        for k, size in enumerate(sizes)
    )
    values: dict[str, Any] = {
        "budget_bytes": 1_000_000_000,
        "num_trials": 7,
        "num_soak_steps": 0,
        "num_ooms": 0,
        "num_retries": 0,
        "search_s": 12.5,
        "memory_fraction": 0.9,
        "allocator": "expandable_segments",
        "created": "2026-01-31T12:00:00Z",
        "versions": {"torch": "2.11.0", "lhotse": "1.33.0"},
    }
    fingerprint = Fingerprint(fields={"device": "H200", "torch": "2.11.0"} if fields is None else fields)
    return Profile(bins=bins, buckets=buckets, fingerprint=fingerprint, **{**values, **changes})
