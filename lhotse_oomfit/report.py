"""Profiles as tables for a terminal: one, several, or two side by side."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from lhotse_oomfit.profile import BucketProfile, Profile, format_bytes

__all__ = [
    "bucket_label",
    "diff_fields",
    "diff_sizes",
    "diff_tables",
    "entries_table",
    "fields_table",
    "profile_table",
    "render_table",
    "summary",
]

_NARROW = 60  # columns below which a table keeps to the essentials


def profile_table(profile: Profile, *, width: int = 80) -> Table:
    """One row a bucket: upper edges, size (a star: only predicted), peak, share of the budget, input, step time.

    :param width: columns available. Below 60, the columns that follow from others are left out.
    """
    wide = width >= _NARROW
    timed = wide and any(bucket.step_s is not None for bucket in profile.buckets)
    predicted = any(not bucket.verified for bucket in profile.buckets)
    table = _table(
        caption=summary(profile).replace("; ", "\n", 1)
        + ("\n* predicted: no step ran at this size" if predicted else "")
    )
    heads = ["up to", "size", "peak", "budget"]
    heads += ["input s/step"] if wide else []
    heads += ["step", "input s/s"] if timed else []
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for index, bucket in enumerate(profile.buckets):
        share = profile.share(bucket)
        row = [
            bucket_label(profile, index).removeprefix("<= "),
            f"{bucket.size}{'' if not predicted else ' ' if bucket.verified else '*'}",
            "-" if bucket.peak_bytes is None else format_bytes(bucket.peak_bytes),
            "-" if share is None else f"{share:.1%}",
        ]
        row += [_number(bucket.input_s_per_step)] if wide else []
        row += [_seconds(bucket), _number(bucket.input_s_per_s)] if timed else []
        table.add_row(*row)
    return table


def render_table(profile: Profile, width: int = 80) -> str:
    """The table as plain text of at most `width` columns."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(profile_table(profile, width=width))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def summary(profile: Profile) -> str:
    """One sentence: what the sizes cost to find, under which budget."""
    soak = f" and {_count(profile.num_soak_steps, 'soak step')}" if profile.num_soak_steps else ""
    return (
        f"{_count(profile.num_trials, 'trial step')}{soak}, {_count(profile.num_ooms, 'OOM')}, "
        f"{_count(profile.num_retries, 'allocator retry', 'allocator retries')}, {profile.search_s:.1f} s; "
        f"budget {format_bytes(profile.budget_bytes)} "
        f"(fraction {profile.memory_fraction:g}, {profile.allocator}{_choices(profile)})"
    )


def _choices(profile: Profile) -> str:
    """How sizes were found, where it isn't as usual."""
    mode = ", fast mode" if profile.mode == "fast" else ""
    return mode + (", for throughput" if profile.objective == "throughput" else "")


def bucket_label(profile: Profile, index: int) -> str:
    """A bucket by its upper edges: ``<= 7.5``, or ``<= 7.5 x 40`` (length x tokens) in 2D."""
    edge = profile.bins.edges[index]
    return f"<= {edge[0]:g} x {edge[1]}" if isinstance(edge, tuple) else f"<= {edge:g}"


def fields_table(fields: Mapping[str, str]) -> Table:
    """A fingerprint, one field a row."""
    table = _table()
    table.add_column("field", overflow="fold", ratio=2)
    table.add_column("value", overflow="fold", ratio=3)
    for name, value in fields.items():
        table.add_row(_literal(name), _literal(value))
    return table


def entries_table(entries: Sequence[tuple[str, Profile | None, str | None]], *, width: int = 80) -> Table:
    """Profiles, one a row: name, date, number of buckets, sizes, and what for; or why one can't be read."""
    table = _table()
    for head in ("profile", "measured", "buckets", "sizes") if width >= _NARROW else ("profile", "sizes"):
        table.add_column(head, no_wrap=True)
    table.add_column("for", overflow="fold")
    for name, profile, error in entries:
        if profile is None:
            table.add_row(name, *([""] * (len(table.columns) - 2)), _literal(f"unreadable: {error}"))
            continue
        sizes = profile.bucket_batch_size
        fields = profile.fingerprint.fields
        what = ", ".join(fields[key] for key in ("model", "device") if key in fields)
        row = [profile.created[:16].replace("T", " "), str(len(sizes))] if width >= _NARROW else []
        table.add_row(name, *row, f"{min(sizes)}..{max(sizes)}", _literal(what))
    return table


def diff_sizes(a: Profile, b: Profile) -> list[tuple[str, int | None, int | None]]:
    """Buckets of both profiles in order, with their sizes; None where a profile has no such bucket."""
    sizes = [{p.bins.edges[i]: bucket.size for i, bucket in enumerate(p.buckets)} for p in (a, b)]
    labels = {p.bins.edges[i]: bucket_label(p, i) for p in (a, b) for i in range(len(p.buckets))}
    edges = sorted(labels, key=lambda edge: edge if isinstance(edge, tuple) else (edge, 0))
    return [(labels[edge], sizes[0].get(edge), sizes[1].get(edge)) for edge in edges]


def diff_fields(a: Profile, b: Profile) -> list[tuple[str, str | None, str | None]]:
    """Fields of the fingerprints that differ, and what else decides the sizes: budget, fraction, limits of tokens."""
    extra = [
        {
            "budget": format_bytes(p.budget_bytes),
            "memory fraction": f"{p.memory_fraction:g}",
            "allocator": p.allocator,
            "mode": p.mode,
            "objective": p.objective,
            **{key: str(value) for key, value in p.train_ds().items() if not key.startswith("bucket_")},
        }
        for p in (a, b)
    ]
    left, right = ({**own, **p.fingerprint.fields} for own, p in zip(extra, (a, b), strict=True))
    names = dict.fromkeys([*left, *right])
    return [(name, left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)]


def diff_tables(
    sizes: Sequence[tuple[str, int | None, int | None]], fields: Sequence[tuple[str, str | None, str | None]]
) -> list[Table]:
    """Two profiles side by side: a table of sizes, and one of the fields that differ where any do."""
    table = _table()
    for head in ("up to", "a", "b", "change"):
        table.add_column(head, justify="right", no_wrap=True)
    for label, x, y in sizes:
        change = "" if x == y else "only in b" if x is None else "only in a" if y is None else f"{(y - x) / x:+.1%}"
        table.add_row(label.removeprefix("<= "), _number(x, "d"), _number(y, "d"), change)
    if not fields:
        table.caption = "measured for the same"
        return [table]
    different = _table()
    for head in ("measured for", "a", "b"):
        different.add_column(head, overflow="fold", ratio=1)
    for name, old, new in fields:
        different.add_row(_literal(name), _literal(old or "-"), _literal(new or "-"))
    return [table, different]


def _table(caption: str | None = None) -> Table:
    return Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left", collapse_padding=True, pad_edge=False)


def _literal(text: str) -> str:
    """Text in which square brackets aren't markup."""
    return text.replace("[", r"\[")


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _seconds(bucket: BucketProfile) -> str:
    if bucket.step_s is None:
        return "-"
    return f"{bucket.step_s:.2f} s" if bucket.step_s >= 0.1 else f"{bucket.step_s * 1000:.1f} ms"


def _number(value: float | None, style: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or style == "d" else f"{value:.1f}"
