"""Markdown tables of what ``nemo_script.py`` measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from nemo_script_job import BATCH_DURATION, KINDS, MODELS
from recording import table

TITLES = {"ctc": "CTC", "aed": "AED"}
BATCHINGS = {
    "auto": "`bucket_batch_size=auto`",
    "oomptimizer": "OOMptimizer's profile",
    "shipped": f"`batch_duration={BATCH_DURATION}`",
}
NONE = "-"


def render(folder: Path) -> str:
    """The tables of every job of which there is a file in `folder`."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*-*.json"))}
    jobs = {(m, k): found[f"{m}-{k}"] for m in MODELS for k in KINDS if f"{m}-{k}" in found}
    parts = [_setting(jobs), _search(jobs), _training(jobs), *(_sizes(jobs, model) for model in MODELS)]
    return "\n\n".join(part for part in parts if part)


def _setting(jobs: dict[tuple[str, str], Any]) -> str:
    versions: dict[str, str] = next((job["versions"] for job in jobs.values() if "versions" in job), {})
    sizes = [
        f"{TITLES[model]}: {job['parameters'] / 1e6:,.0f}M parameters, {job['strategy']}"
        for (model, kind), job in jobs.items()
        if kind == "auto" and "strategy" in job
    ]
    return "; ".join([", ".join(f"{name} {value}" for name, value in versions.items()), *sizes])


def _search(jobs: dict[tuple[str, str], Any]) -> str:
    header = ["search", "trial steps", "OOMs", "seconds", "soak steps", "seconds"]
    header += ["sizes over OOMptimizer's: mean / smallest / largest", "peaks, of the budget: mean / smallest"]
    rows = []
    for model in MODELS:
        job = jobs.get((model, "auto"), {})
        if "trial_steps" not in job:
            continue
        theirs = jobs.get((model, "oomptimizer"), {}).get("sizes")
        ratio = NONE
        if theirs:
            ratios = [ours / their for ours, their in zip(job["sizes"], theirs, strict=True)]
            ratio = f"{statistics.mean(ratios):.3f} / {min(ratios):.3f} / {max(ratios):.3f}"
        peaks = [b["peak_bytes"] / job["budget_bytes"] for b in job["buckets"] if b["peak_bytes"]]
        search_s = job["search_s"] or 0.0
        rows.append(
            [
                TITLES[model],
                str(job["trial_steps"]),
                str(job["trial_ooms"]),
                f"{search_s:.1f}",
                str(job["soak_steps"]),
                f"{job['search_and_soak_s'] - search_s:.1f}",
                ratio,
                f"{statistics.mean(peaks):.3f} / {min(peaks):.3f}" if peaks else NONE,
            ]
        )
    return table(header, rows)


def _training(jobs: dict[tuple[str, str], Any]) -> str:
    header = ["training", "steps", "audio-s/s", "median", "with waiting", "over OOMptimizer's", "over shipped"]
    header += ["audio-s a step", "peak, of the cap: mean / largest", "reserved", "retries", "OOMs"]
    rows = []
    for (model, kind), job in jobs.items():
        title = f"{TITLES[model]}: {BATCHINGS[kind]}"
        if not job.get("num_steps"):
            rows.append([title, "0", *[NONE] * (len(header) - 3), str(int(job.get("ran_out_of_memory", False)))])
            continue
        speed = job["audio_s_per_s"]
        over = [jobs.get((model, other), {}).get("audio_s_per_s", 0.0) for other in ("oomptimizer", "shipped")]
        rows.append(
            [
                title if job["finished"] else f"{title} (ended early)",
                str(job["num_steps"]),
                f"{speed:,.0f}",
                f"{job['median_audio_s_per_s']:,.0f}",
                f"{job['audio_s_per_s_with_waiting']:,.0f}",
                *(f"{speed / base:.2f}" if base else NONE for base in over),
                f"{job['audio_s_per_step']:,.0f}",
                f"{job['mean_peak']:.3f} / {job['max_peak']:.3f}" if "mean_peak" in job else NONE,
                f"{job['max_reserved']:.3f}" if "max_reserved" in job else NONE,
                str(job["retries"]),
                str(job["ooms"]),
            ]
        )
    return table(header, rows)


def _sizes(jobs: dict[tuple[str, str], Any], model: str) -> str:
    """A bucket's sizes side by side, and the peak of its trial step."""
    ours, theirs = jobs.get((model, "auto"), {}), jobs.get((model, "oomptimizer"), {})
    if "sizes" not in ours:
        return ""
    header = [f"{TITLES[model]}: up to", "ours", "OOMptimizer's", "ratio", "peak, of the budget"]
    rows = []
    for k, edge in enumerate(ours["bins"]):
        size, peak = ours["sizes"][k], ours["buckets"][k]["peak_bytes"]
        their = theirs.get("sizes", [None] * (k + 1))[k]
        rows.append(
            [
                f"{edge[0]:g} s, {edge[1]} tokens" if isinstance(edge, list) else f"{edge:g} s",
                str(size),
                str(their or NONE),
                f"{size / their:.3f}" if their else NONE,
                f"{peak / ours['budget_bytes']:.3f}" if peak else NONE,
            ]
        )
    return table(header, rows)
