"""A profile as a picture: sizes, peaks against the budget, and input per second, bucket by bucket; grids in 2D.

Needs matplotlib (the extra ``plot``). Draws on a canvas of its own: no global state of pyplot is touched.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize, to_rgb
from matplotlib.figure import Figure

from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.profile import BucketProfile, Profile, format_bytes
from lhotse_oomfit.report import summary

__all__ = ["profile_figure", "save_plot"]

_DPI = 150


@dataclass(frozen=True, kw_only=True)
class _Style:
    ground: str
    ink: str
    faint: str
    fill: str
    soft: str  # a predicted bucket
    limit: str  # the budget
    low: str  # the ends of the colour map of a grid
    high: str


_STYLES = {
    "light": _Style(
        ground="#ffffff", ink="#1f2328", faint="#d6dade", fill="#2f6fb2", soft="#b3cde8", limit="#b8390b",
        low="#e4eef8", high="#174a80",
    ),
    "dark": _Style(
        ground="#14181d", ink="#e8ebee", faint="#39414a", fill="#69aeef", soft="#31506e", limit="#ffab70",
        low="#1f3347", high="#9fd0ff",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Panel:
    title: str
    value: Callable[[BucketProfile], float | None]
    text: Callable[[float], str]
    limit: float | None = None
    limit_text: str = ""
    starred: bool = False  # a star marks predicted buckets
    log: bool = False  # colours of a grid on a logarithmic scale


def save_plot(profile: Profile, path: Path, *, style: str = "light") -> None:
    """Draw a profile into a file.

    :param path: ends in ``.svg``, ``.png`` or ``.html`` (one file that needs nothing else).
    :param style: ``light`` or ``dark``; ``auto`` (html only) follows the reader's setting.
    :raises InvalidArgumentError: another ending or style.
    :raises OSError: the file can't be written.
    """
    kind = path.suffix.lower().lstrip(".")
    if kind not in {"svg", "png", "html"}:
        raise InvalidArgumentError(f"a plot must end in .svg, .png or .html, is {path}; rename it")
    if style not in _STYLES and not (style == "auto" and kind == "html"):
        raise InvalidArgumentError(f"the style of a .{kind} plot must be light or dark, is {style!r}; choose one")
    if kind == "png":
        figure = profile_figure(profile, style=style)
        buffer = io.BytesIO()
        FigureCanvasAgg(figure).print_png(buffer)
        path.write_bytes(buffer.getvalue())
    elif kind == "svg":
        path.write_text(_svg(profile, style), encoding="utf-8")
    else:
        path.write_text(_html(profile, style), encoding="utf-8")


def profile_figure(profile: Profile, *, style: str = "light") -> Figure:
    """Draw a profile: one panel each for sizes, peaks as a share of the budget, and throughput.

    :param style: ``light`` or ``dark``.
    """
    colours = _STYLES[style]
    panels = _panels(profile)
    draw = _grid if profile.bins.is_2d else _bars
    columns = len({_length(profile, i) for i in range(len(profile.buckets))})
    rows = max(_rows(profile).values()) if profile.bins.is_2d else 0
    width = min(max(7.0, 2.2 + 0.5 * columns), 20.0)
    height = len(panels) * (0.9 + 0.36 * rows if rows else 2.0) + 0.7
    with rc_context({"font.size": 9.0, "svg.fonttype": "none", "svg.hashsalt": "oomfit", "font.family": "sans-serif"}):
        figure = Figure(figsize=(width, height), dpi=_DPI, facecolor=colours.ground, layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            axis.set_facecolor(colours.ground)
            axis.set_title(panel.title, loc="left", color=colours.ink, fontsize=10)
            axis.tick_params(colors=colours.ink, length=0)
            for spine in axis.spines.values():
                spine.set_visible(False)
            draw(axis, panel, profile, colours)
        axes[-1].set_xlabel("upper length edge of the bucket", color=colours.ink)
        figure.suptitle(summary(profile), color=colours.ink, fontsize=8, x=0.01, ha="left")
    return figure


def _panels(profile: Profile) -> list[_Panel]:
    budget = format_bytes(profile.budget_bytes)
    panels = [
        _Panel(
            title="batch size" + ("" if all(bucket.verified for bucket in profile.buckets) else "  (* predicted)"),
            value=lambda bucket: float(bucket.size),
            text=lambda value: f"{value:.0f}",
            starred=True,
            log=True,
        )
    ]
    if any(profile.share(bucket) is not None for bucket in profile.buckets):
        panels.append(
            _Panel(
                title=f"peak memory, % of the budget ({budget})",
                value=lambda bucket: None if (share := profile.share(bucket)) is None else 100 * share,
                text=lambda value: f"{value:.0f}",
                limit=100.0,
                limit_text="budget",
            )
        )
    if any(bucket.input_s_per_s is not None for bucket in profile.buckets):
        panels.append(
            _Panel(title="input seconds per second of training", value=lambda b: b.input_s_per_s, text=_compact)
        )
    else:
        panels.append(_Panel(title="input seconds per step", value=lambda b: b.input_s_per_step, text=_compact))
    return panels


def _bars(axis: Any, panel: _Panel, profile: Profile, colours: _Style) -> None:
    """1D: a bar a bucket; predicted ones are pale."""
    values = [panel.value(bucket) for bucket in profile.buckets]
    positions = range(len(values))
    fills = [colours.fill if bucket.verified else colours.soft for bucket in profile.buckets]
    axis.bar(positions, [value or 0.0 for value in values], color=fills, width=0.78)
    top = max([value for value in values if value is not None] + ([panel.limit] if panel.limit else []))
    size = 8 if len(values) <= 24 else 7
    ink_on = _contrast()
    for position, value, fill, bucket in zip(positions, values, fills, profile.buckets, strict=True):
        label = _label(panel, bucket, value)
        if panel.limit is not None and value is not None and value > 0.3 * top:  # inside, clear of the limit's line
            axis.text(
                position, value - 0.03 * top, label, ha="center", va="top", color=ink_on(to_rgb(fill)), fontsize=size
            )
        else:
            axis.text(
                position, (value or 0.0) + 0.03 * top, label, ha="center", va="bottom",
                color=colours.ink, fontsize=size,
                bbox={"facecolor": colours.ground, "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
    if panel.limit is not None:
        axis.axhline(panel.limit, color=colours.limit, linewidth=1.2, linestyle="--")
        axis.annotate(
            panel.limit_text, (1.0, panel.limit), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", color=colours.limit, va="center", fontsize=8, annotation_clip=False,
        )  # fmt: skip
    axis.set_ylim(0, 1.18 * top)
    axis.set_xlim(-0.6, len(values) - 0.4)
    axis.grid(axis="y", color=colours.faint, linewidth=0.6)
    axis.set_axisbelow(True)
    _length_ticks(axis, [f"{_length(profile, i):g}" for i in positions])


def _grid(axis: Any, panel: _Panel, profile: Profile, colours: _Style) -> None:
    """2D: a column a length edge, a row a sub-bucket; each cell says its value and, small, its token edge."""
    lengths = sorted({_length(profile, i) for i in range(len(profile.buckets))})
    values = [panel.value(bucket) for bucket in profile.buckets]
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    low = low if high > low else 0.9 * low - 1e-9
    norm = LogNorm(low, high) if panel.log and low > 0 else Normalize(low, high)
    ramp = LinearSegmentedColormap.from_list("oomfit", [colours.low, colours.high])
    ramp_ink = _contrast()
    next_row = dict.fromkeys(lengths, 0)
    for index, (bucket, value) in enumerate(zip(profile.buckets, values, strict=True)):
        edge = profile.bins.edges[index]
        length, tokens = edge if isinstance(edge, tuple) else (edge, 0)
        column, row = lengths.index(length), next_row[length]
        next_row[length] += 1
        fill = to_rgb(colours.ground) if value is None else to_rgb(ramp(norm(value)))
        ink = colours.ink if value is None else ramp_ink(fill)
        over = panel.limit is not None and value is not None and value > panel.limit
        axis.bar(
            column, 0.94, bottom=row + 0.03, width=0.94, color=[fill], linewidth=1.6 if over else 0.6,
            edgecolor=colours.limit if over else colours.faint,
        )  # fmt: skip
        axis.text(column, row + 0.6, _label(panel, bucket, value), ha="center", va="center", color=ink, fontsize=8)
        axis.text(column, row + 0.22, f"≤{tokens}", ha="center", va="center", color=ink, fontsize=5.5)
    axis.set_xlim(-0.6, len(lengths) - 0.4)
    axis.set_ylim(0, max(next_row.values()))
    axis.set_yticks([])
    axis.set_ylabel("≤ tokens", color=colours.ink)
    _length_ticks(axis, [f"{length:g}" for length in lengths])


def _contrast() -> Callable[[Sequence[float]], str]:
    """Ink for text on a colour: the one of dark and light that contrasts more, by WCAG 2's relative luminance."""

    def ink(fill: Sequence[float]) -> str:
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in fill[:3])
        return "#10151a" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else "#ffffff"

    return ink


def _label(panel: _Panel, bucket: BucketProfile, value: float | None) -> str:
    if value is None:
        return "-"
    return panel.text(value) + ("*" if panel.starred and not bucket.verified else "")


def _length_ticks(axis: Any, labels: list[str]) -> None:
    axis.set_xticks(range(len(labels)), labels, rotation=0 if len(labels) <= 16 else 90, fontsize=8)


def _length(profile: Profile, index: int) -> float:
    edge = profile.bins.edges[index]
    return edge[0] if isinstance(edge, tuple) else edge


def _rows(profile: Profile) -> dict[float, int]:
    rows: dict[float, int] = {}
    for index in range(len(profile.buckets)):
        rows[_length(profile, index)] = rows.get(_length(profile, index), 0) + 1
    return rows


def _compact(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def _svg(profile: Profile, style: str) -> str:
    buffer = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": f"oomfit-{style}"}):  # text stays text
        figure = profile_figure(profile, style=style)
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    return buffer.getvalue().decode("utf-8")


def _html(profile: Profile, style: str) -> str:
    shown = ["light", "dark"] if style == "auto" else [style]
    pictures = "\n".join(f'<div class="{name}">{_inline(_svg(profile, name))}</div>' for name in shown)
    rules = [
        f"body {{ margin: 1rem; background: {_STYLES[shown[0]].ground}; }} svg {{ max-width: 100%; height: auto; }}"
    ]
    if style == "auto":
        rules.append(
            ".dark { display: none; } @media (prefers-color-scheme: dark) { "
            f"body {{ background: {_STYLES['dark'].ground}; }} "
            ".light { display: none; } .dark { display: block; } }"
        )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Batch sizes per bucket</title>'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
        f"<style>{' '.join(rules)}</style></head>\n<body>\n{pictures}\n</body></html>\n"
    )


def _inline(svg: str) -> str:
    """The svg element alone, without the XML declaration and the document type."""
    return svg[svg.index("<svg") :]
