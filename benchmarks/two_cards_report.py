"""Markdown of what two_cards.py measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recording import table

TITLES = {"conformer": "Conformer of the examples", "ctc": "NeMo FastConformer-CTC"}
GIB = 2**30


def render(folder: Path) -> str:
    """All tables."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {subject: {} for subject in TITLES}
    for path in sorted(folder.glob("*.rank*.json")):
        subject, _, phase = path.name.split(".")[0].partition("-")
        found[subject].setdefault(phase, []).append(json.loads(path.read_text()))
    blocks = []
    for subject, phases in found.items():
        if phases:
            any_said = next(iter(phases.values()))[0]
            head = f"### {TITLES[subject]} ({any_said['card']}, {any_said['backend']}, torch {any_said['torch']})"
            blocks += [head, _calibrations(phases), _training(phases), _others(phases)]
    return "\n\n".join(block for block in [*blocks, _faults(folder)] if block)


def _calibrations(phases: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    base = phases.get("rank0")
    titles = {"rank0": 'ranks="rank0"', "shard": 'ranks="shard"', "half": "second rank capped to half"}
    titles |= {"static": "DDP, static graph: lock-step", "fsdp2": "FSDP2: lock-step"}
    for phase, title in titles.items():
        if phase not in phases:
            continue
        each = phases[phase]
        said = each[0]
        if "sizes" not in said:
            continue
        ratio = largest = ""
        if base and "sizes" in base[0]:
            ratio = f"{base[0]['seconds'] / said['seconds']:.2f}"
            pairs = list(zip(said["sizes"], base[0]["sizes"], strict=True))
            largest = f"{min(a / b for a, b in pairs):.3f} to {max(a / b for a, b in pairs):.3f}"
        rows.append(
            [
                title,
                f"{said['budget'] / GIB:.2f}",
                " ".join(map(str, said["sizes"])),
                largest,
                " + ".join(str(s["own_trials"]) for s in each),
                f"{said['trials']} + {said['soak_steps']}",
                f"{said['ooms']} / {said['retries']}",
                f"{said['seconds']:.1f}",
                ratio,
                "yes" if len({tuple(s["sizes"]) for s in each}) == 1 else "NO",
                str(sum(len(s.get("watchdog", [])) for s in each)),
            ]
        )
    head = ["", "budget (GiB)", "sizes", "sizes over rank0's", "steps by rank", "trials + soak", "OOMs / retries"]
    return table([*head, "seconds", "times as fast", "ranks agree", "watchdog lines"], rows)


def _training(phases: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for phase in ("train", "static", "fsdp2"):
        for rank, said in enumerate(phases.get(phase, [])):
            done = said if phase == "train" else said.get("train", {})
            if "steps" not in done:
                continue
            equal = [f"{name.split('_')[-1]}: {value}" for name, value in done.items() if name.startswith("equal_")]
            rows.append(
                [
                    f"{phase}, rank {rank}",
                    str(done["steps"]),
                    f"{done['ooms']} / {done['retries']}",
                    *(_share(done.get(name)) for name in ("of_trial_mean", "of_trial_max")),
                    *(_share(done.get(name)) for name in ("reserved_of_trial_max", "reserved_of_budget_max")),
                    "; ".join(equal),
                    str(said["start"]["own_trials"]) if "start" in said else "",
                ]
            )
    head = ["", "steps at full size", "OOMs / retries", "allocated peak over trial's, mean", "largest"]
    head += ["reserved over trial's peak, largest", "reserved over budget, largest", "parameters equal after"]
    return table([*head, "trials of the second start"], rows)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _others(phases: dict[str, list[dict[str, Any]]]) -> str:
    lines = []
    for rank, said in enumerate(phases.get("wait", [])):
        parts = ", ".join(f"{name} {said[name]['seconds']:.0f} s" for name in ("rank0", "shard") if name in said)
        lines.append(
            f"- A trial of {said['delay_s']:g} s with a group timeout of {said['group_timeout_s']:g} s, rank {rank}: "
            f"{parts}; watchdog lines: {len(said.get('watchdog', []))}."
        )
    for rank, said in enumerate(phases.get("lightning", [])):
        for name in ("first", "second"):
            if name in said:
                fit = said[name]
                lines.append(
                    f"- Lightning's DDP, {name} fit, rank {rank}: {fit['own_trials']} trials here, {fit['ooms']} OOMs, "
                    f"{fit['steps']} steps, parameters equal: {fit['equal']}, sizes {' '.join(map(str, fit['sizes']))}."
                )
    return "\n".join(lines)


def _faults(folder: Path) -> str:
    rows = []
    for path in sorted(folder.glob("*.job.json")):
        said = json.loads(path.read_text())
        after = said["seconds_after_fault"]
        reasons = "<br>".join(f"{rank}: {text}" for rank, text in said["reasons"].items())
        rows.append([path.name.split(".")[0], str(said["codes"]), "" if after is None else f"{after:.1f}", reasons])
    return table(["fault", "exit codes", "seconds until all had ended", "last reason in each log"], rows)
