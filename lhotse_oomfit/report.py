"""Profiles as tables for a terminal."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table

from lhotse_oomfit.profile import BucketProfile, Profile, format_bytes

__all__ = ["bucket_label", "profile_table", "render_table", "summary"]

_NARROW = 60  # columns below which the table keeps to the essentials


def profile_table(profile: Profile, *, width: int = 80) -> Table:
    """One row a bucket: upper edges, size, peak, share of the budget, input per step, step time, how it's known.

    :param width: columns available. Below 60, the columns that follow from others are left out.
    """
    wide = width >= _NARROW
    timed = wide and any(bucket.step_s is not None for bucket in profile.buckets)
    table = Table(box=box.SIMPLE_HEAD, caption=summary(profile), caption_justify="left", padding=(0, 1), pad_edge=False)
    heads = ["bucket", "size", "peak", "of budget"]
    heads += ["input-s/step"] if wide else []
    heads += ["step", "input-s/s"] if timed else []
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    for index, bucket in enumerate(profile.buckets):
        share = profile.share(bucket)
        row = [
            bucket_label(profile, index),
            str(bucket.size),
            "-" if bucket.peak_bytes is None else format_bytes(bucket.peak_bytes),
            "-" if share is None else f"{share:.1%}",
        ]
        row += [_number(bucket.input_s_per_step)] if wide else []
        row += [_seconds(bucket), _number(bucket.input_s_per_s)] if timed else []
        table.add_row(*row, "" if bucket.verified else "predicted")
    return table


def render_table(profile: Profile, width: int = 80) -> str:
    """The table as plain text of at most `width` columns."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(profile_table(profile, width=width))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def summary(profile: Profile) -> str:
    """One sentence: what the sizes cost to find, under which budget."""
    return (
        f"{profile.num_trials} trial steps, {profile.num_ooms} OOMs, {profile.num_retries} allocator retries, "
        f"{profile.search_s:.1f} s; budget {format_bytes(profile.budget_bytes)} "
        f"(fraction {profile.memory_fraction:g}, allocator {profile.allocator})"
    )


def bucket_label(profile: Profile, index: int) -> str:
    """A bucket by its upper edges: ``<= 7.5``, or ``<= 7.5 x 40`` (length x tokens) in 2D."""
    edge = profile.bins.edges[index]
    return f"<= {edge[0]:g} x {edge[1]}" if isinstance(edge, tuple) else f"<= {edge:g}"


def _seconds(bucket: BucketProfile) -> str:
    if bucket.step_s is None:
        return "-"
    return f"{bucket.step_s:.2f} s" if bucket.step_s >= 0.1 else f"{bucket.step_s * 1000:.1f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
