from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_profiles import EDGES_2D, make_profile

from lhotse_oomfit.report import bucket_label, diff_fields, diff_sizes, render_table, summary


def test_the_table_of_a_1d_profile_reads_well_at_80_columns() -> None:
    assert render_table(make_profile(), width=80).splitlines() == [
        "",
        " up to  size     peak  budget  input s/step    step  input s/s",
        " ─────────────────────────────────────────────────────────────",
        "     2   200  858 MiB   90.0%           400  0.25 s      1,600",
        "   4.5    88  859 MiB   90.1%           396  0.26 s      1,523",
        "    30   13*        -       -           390  0.27 s      1,444",
        "",
        "7 trial steps, 0 OOMs, 0 allocator retries, 12.5 s",
        "budget 954 MiB (fraction 0.9, expandable_segments)",
        "* predicted: no step ran at this size",
    ]


def test_buckets_in_2d_are_shown_as_length_by_tokens() -> None:
    table = render_table(make_profile(EDGES_2D), width=80)
    assert " 2 x 25   200  859 MiB" in table
    assert " 8 x 40   50*" in table
    assert bucket_label(make_profile(EDGES_2D), 3) == "<= 8 x 90"


def test_a_narrow_terminal_gets_the_essential_columns_in_full() -> None:
    lines = render_table(make_profile(EDGES_2D), width=40).splitlines()
    assert lines[1].split() == ["up", "to", "size", "peak", "budget"]
    assert "…" not in "".join(lines[:8])


@given(st.integers(min_value=40, max_value=200))
@settings(max_examples=30, deadline=None)
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    edges = [[29.5 + k, 1000 * (k + 1)] for k in range(4)]
    assert max(map(len, render_table(make_profile(edges), width=width).splitlines())) <= width


def test_a_profile_without_times_has_no_columns_for_them() -> None:
    import dataclasses

    profile = make_profile()
    untimed = tuple(dataclasses.replace(bucket, step_s=None) for bucket in profile.buckets)
    table = render_table(dataclasses.replace(profile, buckets=untimed))
    assert "input s/s " not in table
    assert "0.25 s" not in table


def test_the_summary_counts_in_the_singular_too() -> None:
    text = summary(make_profile(num_trials=1, num_ooms=1, num_retries=1))
    assert text.startswith("1 trial step, 1 OOM, 1 allocator retry, 12.5 s; budget 954 MiB")


def test_the_summary_says_when_sizes_are_predicted_or_chosen_for_throughput() -> None:
    text = summary(make_profile(mode="fast", objective="throughput"))
    assert text.endswith("(fraction 0.9, expandable_segments, fast mode, for throughput)")
    assert summary(make_profile()).endswith("(fraction 0.9, expandable_segments)")


def test_profiles_of_different_modes_differ() -> None:
    fast = make_profile(mode="fast", objective="throughput")
    assert diff_fields(make_profile(), fast) == [("mode", "verify", "fast"), ("objective", "memory", "throughput")]


def test_sizes_are_compared_bucket_by_bucket() -> None:
    a, b = make_profile([2.0, 4.0], sizes=[20, 10]), make_profile([2.0, 6.0], sizes=[30, 5])
    assert diff_sizes(a, b) == [("<= 2", 20, 30), ("<= 4", 10, None), ("<= 6", None, 5)]


def test_what_a_profile_was_measured_for_is_compared_field_by_field() -> None:
    a = make_profile(fields={"device": "A100", "hop": "160"}, max_tps=25.0)
    b = make_profile(fields={"device": "H200", "sdpa": "flash"}, memory_fraction=0.8)
    assert diff_fields(a, b) == [
        ("memory fraction", "0.9", "0.8"),
        ("max_tps", "25.0", None),
        ("device", "A100", "H200"),
        ("hop", "160", None),
        ("sdpa", None, "flash"),
    ]
    assert diff_fields(a, a) == []


@pytest.mark.parametrize("style", ["light", "dark"])
@pytest.mark.parametrize("edges", [None, EDGES_2D], ids=["1D", "2D"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # matplotlib's dependencies
def test_a_figure_has_a_panel_each_for_sizes_peaks_and_throughput(edges: list[object] | None, style: str) -> None:
    pytest.importorskip("matplotlib")
    from lhotse_oomfit.plots import profile_figure

    figure = profile_figure(make_profile(edges), style=style)
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles == [
        "batch size  (* predicted)",
        "peak memory, % of the budget (954 MiB)",
        "input seconds per second of training",
    ]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "200" in texts
    assert ("50*" if edges else "13*") in texts
