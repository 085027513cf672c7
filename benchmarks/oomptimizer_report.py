"""Tables and plots of the comparison with OOMptimizer, from the JSON files that it wrote."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from oomptimizer_models import SUBJECTS
from recording import table

BATCHINGS = {
    "shipped": "`batch_duration` as shipped",
    "tuned": "`batch_duration` tuned by hand",
    "oomptimizer": "OOMptimizer's profile",
    "ours": "ours",
}
SEARCHES = {
    "oomptimizer": "OOMptimizer",
    "ours": "ours",
    "fast": 'ours, `mode="fast"`',
    "default": "ours, default allocator",
}
SERIES = ("#2f6fb2", "#b8390b", "#8a9099")
INK, FAINT = "#1f2328", "#d6dade"


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """What was found, by model and phase."""
    found: dict[str, dict[str, Any]] = {}
    for model in SUBJECTS:
        phases = {}
        for path in sorted(folder.glob(f"{model}-*.json")):
            phases[path.stem.partition("-")[2]] = json.loads(path.read_text())
        if phases:
            found[model] = phases
    return found


def render(folder: Path) -> str:
    """All tables in Markdown."""
    found = load(folder)
    parts = [
        table(
            [
                "model",
                "search",
                "trial steps",
                "OOMs",
                "seconds",
                "soak steps, seconds",
                "size over OOMptimizer's: mean",
                "smallest",
            ],
            (row for model, phases in found.items() for row in _searches(model, phases)),
        ),
        table(
            ["model", "soak of", "allocator", "steps", "OOMs", "retries", "audio-s/s", "reserved at most, of the cap"],
            (row for model, phases in found.items() for row in _soaks(model, phases)),
        ),
        table(
            [
                "model",
                "batching",
                "audio-s/s",
                "over tuned",
                "over OOMptimizer's",
                "mean peak, of the cap",
                "OOMs",
                "retries",
            ],
            (row for model, phases in found.items() for row in _trainings(model, phases)),
        ),
    ]
    parts += [_sizes(model, phases) for model, phases in found.items()]
    versions = {
        name: value for phases in found.values() for p in phases.values() for name, value in p["versions"].items()
    }
    parts.append(", ".join(f"{name} {value}" for name, value in versions.items()))
    return "\n\n".join(part for part in parts if part)


def ratios(phases: dict[str, Any], name: str) -> list[float]:
    """Our sizes over OOMptimizer's, where both are known."""
    theirs = phases.get("oomptimizer", {}).get("sizes") or []
    mine = phases.get(name, {}).get("sizes") or []
    return [a / b for a, b in zip(mine, theirs, strict=False) if a and b]


def _searches(model: str, phases: dict[str, Any]) -> Iterator[list[str]]:
    for name, title in SEARCHES.items():
        found = phases.get(name)
        if found is None or "skipped" in found:
            continue
        over = ratios(phases, name) if name != "oomptimizer" else []
        seconds = f"{found['seconds']:.1f}"
        if found.get("finished") is False:
            seconds += f" (stopped: {found['buckets_done']} of {len(found['sizes'])} buckets)"
        soak = f"{found['soak_steps']}, {found['soak_seconds']:.1f} s" if found.get("soak_steps") else ""
        yield [
            SUBJECTS[model].title, title, str(found["steps"]), str(found["ooms"]), seconds, soak,
            f"{statistics.mean(over):.3f}" if over else "", f"{min(over):.3f}" if over else "",
        ]  # fmt: skip


def _soaks(model: str, phases: dict[str, Any]) -> Iterator[list[str]]:
    soaks = [
        ("ours", "expandable segments", phases.get("soak", {}).get("ours")),
        ("OOMptimizer's", "expandable segments", phases.get("soak", {}).get("oomptimizer")),
        ("ours, found there", "default", phases.get("default", {}).get("soak")),
    ]
    for title, allocator, found in soaks:
        if found is not None:
            yield [
                SUBJECTS[model].title, title, allocator, str(found["steps"]), str(found["ooms"]),
                str(found["retries"]), f"{found['audio_s_per_s']:,.0f}", f"{found['max_reserved']:.3f}",
            ]  # fmt: skip


def _trainings(model: str, phases: dict[str, Any]) -> Iterator[list[str]]:
    trainings = phases.get("train", {})
    for name, title in BATCHINGS.items():
        found = trainings.get(name)
        if found is None:
            continue
        if "batch_duration" in found:
            title += f": {found['batch_duration']:g}"
        speeds = [trainings.get(peer, {}).get("audio_s_per_s") for peer in ("tuned", "oomptimizer")]
        over = [f"{found['audio_s_per_s'] / speed:.2f}" if speed else "" for speed in speeds]
        yield [
            SUBJECTS[model].title, title, f"{found['audio_s_per_s']:,.0f}", *over,
            f"{found['mean_peak']:.3f}", str(found["ooms"]), str(found["retries"]),
        ]  # fmt: skip


def _sizes(model: str, phases: dict[str, Any]) -> str:
    names = [name for name in SEARCHES if any(phases.get(name, {}).get("sizes") or [])]
    if not names:
        return ""
    edges = phases[names[0]]["bins"]
    shown = ["bucket", *(SEARCHES[name] for name in names)]
    if "ours" in names:
        shown += ["ours over OOMptimizer's", "our peak, of the budget"]

    def rows() -> Iterator[list[str]]:
        for k, edge in enumerate(edges):
            row = [f"{edge[0]:g} s x {edge[1]}" if isinstance(edge, list) else f"{edge:g} s"]
            row += [str(phases[name]["sizes"][k] or "-") for name in names]
            if "ours" in names:
                theirs = (phases.get("oomptimizer", {}).get("sizes") or [None] * len(edges))[k]
                row.append(f"{phases['ours']['sizes'][k] / theirs:.3f}" if theirs else "")
                peak = phases["ours"]["peaks"][k]
                row.append(f"{peak / phases['ours']['budget']:.3f}" if peak else "")
            yield row

    return f"{SUBJECTS[model].title}\n\n{table(shown, rows())}"


# Plots


def plot(folder: Path, into: Path) -> None:
    """One SVG a model with 30 buckets: sizes over OOMptimizer's and peaks by bucket, training throughput."""
    from matplotlib import rc_context

    for model, phases in load(folder).items():
        if ratios(phases, "ours") and "train" in phases:
            with rc_context({"font.size": 9.0, "svg.fonttype": "none", "svg.hashsalt": f"oomfit-{model}"}):
                _draw(model, phases, into / f"oomptimizer-{model}.svg")


def _draw(model: str, phases: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    edges = phases["ours"]["bins"]
    labels = [f"{edge[0]:g}x{edge[1]}" if isinstance(edge, list) else f"{edge:g}" for edge in edges]
    figure = Figure(figsize=(10.0, 7.4), facecolor="#ffffff", layout="constrained")
    sizes, peaks, speed = figure.subplots(3, 1, height_ratios=(2.2, 2.2, 1.4))
    for axis, title in (
        (sizes, "batch size over OOMptimizer's, same cap (its own threshold is 5%)"),
        (peaks, "peak of allocated memory at our size, % of the budget"),
        (speed, "training on LibriSpeech's lengths, audio seconds per second"),
    ):
        axis.set_title(title, loc="left", color=INK, fontsize=10)
        axis.tick_params(colors=INK, length=0)
        axis.set_axisbelow(True)
        for spine in axis.spines.values():
            spine.set_visible(False)
    positions = range(len(edges))
    theirs = phases["oomptimizer"]["sizes"]
    for name, colour in zip(("ours", "fast"), SERIES, strict=False):
        values = phases.get(name, {}).get("sizes")
        if values:
            over = [a / b if b else float("nan") for a, b in zip(values, theirs, strict=True)]
            sizes.plot(
                positions,
                over,
                color=colour,
                marker="o",
                markersize=4,
                linewidth=1.2,
                label=SEARCHES[name].replace("`", ""),
            )
    sizes.axhline(1.0, color=SERIES[2], linewidth=1.2, linestyle="--")
    sizes.margins(y=0.25)
    sizes.legend(frameon=False, loc="upper right", ncols=2)
    _bucket_axis(sizes, labels)
    budget = phases["ours"]["budget"]
    shares = [100 * peak / budget if peak else float("nan") for peak in phases["ours"]["peaks"]]
    peaks.plot(positions, shares, color=SERIES[0], marker="o", markersize=4, linewidth=1.2)
    peaks.axhline(100.0, color=SERIES[1], linewidth=1.2, linestyle="--")
    peaks.set_ylim(top=101)
    _bucket_axis(peaks, labels)
    names = [name for name in BATCHINGS if name in phases["train"]]
    speeds = [phases["train"][name]["audio_s_per_s"] for name in names]
    colours = [SERIES[0] if name == "ours" else SERIES[2] for name in names]
    speed.barh(range(len(names)), speeds, color=colours, height=0.7)
    for position, value in enumerate(speeds):
        speed.text(value, position, f" {value:,.0f}", va="center", color=INK, fontsize=8)
    speed.set_yticks(range(len(names)), [BATCHINGS[name].replace("`", "") for name in names])
    speed.invert_yaxis()
    speed.set_xlim(0, 1.1 * max(speeds))
    speed.grid(axis="x", color=FAINT, linewidth=0.6)
    figure.suptitle(SUBJECTS[model].title, color=INK, fontsize=10, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})


def _bucket_axis(axis: Any, labels: Sequence[str]) -> None:
    axis.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
    axis.set_xlim(-0.6, len(labels) - 0.4)
    axis.grid(axis="y", color=FAINT, linewidth=0.6)
