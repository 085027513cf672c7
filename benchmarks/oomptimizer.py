"""NeMo's OOMptimizer and this package's calibration on the same model, buckets, cap, precision and optimizer.

    python benchmarks/oomptimizer.py --oomptimizer NEMO/scripts/speech_recognition/oomptimizer.py \
        --transcripts librispeech.jsonl --out results
    python benchmarks/oomptimizer.py --report results [--plot docs/img]

Needs ``nemo-toolkit[asr]`` and one CUDA card; ``--tiny`` tries everything but OOMptimizer on a CPU. The transcripts are
a NeMo manifest with ``duration`` and ``text``, from which the lengths of the training part and small tokenizers come.
Each model takes two processes, one for each allocator; results are written after every phase, one JSON file each:
``oomptimizer`` (its search), ``default`` (our search and a soak on the default allocator), ``ours`` and ``fast`` (our
searches, expandable segments), ``soak`` (both profiles), ``train`` (throughput). ``--report`` prints the tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from recording import versions

GROUPS = (("oomptimizer", "default"), ("ours", "fast", "soak", "train"))
"""Phases of one process: the first on torch's default allocator, as OOMptimizer runs by itself."""
PHASES = tuple(phase for group in GROUPS for phase in group)
MODELS = ("ctc", "aed", "aed150", "rnnt")
TINY_MEMORY = 192 * 2**20
TINY_NUM_BUCKETS = 4


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oomptimizer", type=Path, help="NeMo's script; without it its parts are left out")
    parser.add_argument("--transcripts", type=Path, help="a manifest with durations and texts")
    parser.add_argument("--out", type=Path, default=Path("oomptimizer-results"), help="folder for the results")
    parser.add_argument("--models", default="ctc,aed,aed150", help=f"some of {','.join(MODELS)}")
    parser.add_argument("--phases", default=",".join(PHASES), help=f"some of {','.join(PHASES)}")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="seconds for each process")
    parser.add_argument(
        "--search-limit-s", type=float, default=400.0, help="seconds for each of OOMptimizer's searches"
    )
    parser.add_argument("--own-soak-steps", type=int, help="the most steps of the soak that ends our calibration")
    parser.add_argument("--soak-steps", type=int, default=500, help="steps of the soak of our profile")
    parser.add_argument("--their-soak-steps", type=int, default=100, help="steps of the soak of OOMptimizer's profile")
    parser.add_argument("--soak-limit-s", type=float, default=300.0, help="seconds for each soak")
    parser.add_argument("--train-steps", type=int, default=50, help="steps of each training")
    parser.add_argument("--num-buckets", type=int, help="only so many of the buckets, evenly spaced, the last included")
    parser.add_argument("--cap", type=float, help="share of the card, instead of the model's own")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--report", type=Path, help="print the tables of the results in this folder, and stop")
    parser.add_argument("--plot", type=Path, help="with --report: folder to draw SVG plots into")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name, known in (("models", MODELS), ("phases", PHASES)):
        chosen = getattr(options, name).split(",")
        if unknown := sorted(set(chosen) - set(known)):
            parser.error(f"--{name} must be among {', '.join(known)}, it has {', '.join(unknown)}")
        setattr(options, name, chosen)
    if options.report is None and options.transcripts is None:
        parser.error("--transcripts must be given: a manifest with durations and texts")
    if options.plot is not None and options.report is None:
        parser.error("--plot needs --report")
    return options


def drive(options: argparse.Namespace, arguments: list[str]) -> None:
    """One process for each model and allocator; one that fails or hangs doesn't end the others."""
    options.out.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        for group in GROUPS:
            phases = [phase for phase in group if phase in options.phases]
            if not phases:
                continue
            command = [sys.executable, __file__, *arguments, "--child", "--models", model, "--phases", ",".join(phases)]
            begun = time.perf_counter()
            try:
                code = subprocess.run(command, timeout=options.limit_s, check=False).returncode
            except subprocess.TimeoutExpired:
                code = -1
                print(f"{model} {phases}: ended after {options.limit_s:g} s", file=sys.stderr)
            took = time.perf_counter() - begun
            print(f"{model} {','.join(phases)}: exit code {code}, {took:.0f} s", file=sys.stderr, flush=True)


def work(options: argparse.Namespace) -> None:
    """The phases of one process."""
    import oomptimizer_phases as phases
    import torch
    from oomptimizer_models import SUBJECTS, Subject, write_config

    phases.quiet()
    (model,) = options.models
    subject = SUBJECTS[model]
    count = options.num_buckets or (TINY_NUM_BUCKETS if options.tiny else len(subject.bins))
    stride = max(1, len(subject.bins) // count)
    chosen = tuple(subject.bins[::-1][::stride][:count][::-1])
    subject = Subject(
        name=subject.name, title=subject.title, module=subject.module, bins=chosen, cap=options.cap or subject.cap
    )
    run = phases.Run(
        subject=subject,
        config=write_config(subject, options.out / "work", options.transcripts, tiny=options.tiny),
        device=torch.device("cpu" if options.tiny else "cuda"),
        memory_limit=TINY_MEMORY if options.tiny else None,
        transcripts=options.transcripts,
        script=options.oomptimizer,
        search_limit_s=options.search_limit_s,
        soak_limit_s=options.soak_limit_s,
        train_steps=options.train_steps,
    )

    @cache
    def loop() -> phases.Loop:
        return phases.Loop(run)

    def path(phase: str) -> Path:
        return Path(options.out / f"{model}-{phase}.json")

    def save(phase: str, found: dict[str, Any]) -> None:
        text = json.dumps({"model": model, "bins": subject.bins, "versions": versions(), **found})
        path(phase).write_text(text)

    def profiles() -> dict[str, list[int]]:
        """The sizes that are known so far; OOMptimizer's where it got to the end."""
        found = {}
        for phase in ("ours", "oomptimizer"):
            if path(phase).exists():
                sizes = json.loads(path(phase).read_text()).get("sizes")
                if sizes and all(sizes) and len(sizes) == len(subject.bins):
                    found[phase] = sizes
        return found

    def on_default_allocator() -> dict[str, Any]:
        with phases.default_allocator():
            found = phases.ours(loop())
            save("default", found)
            return found | {"soak": phases.soak(loop(), found["sizes"], steps=options.soak_steps)}

    def soaks() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, sizes in profiles().items():
            steps = options.soak_steps if name == "ours" else options.their_soak_steps
            if steps:
                found[name] = phases.soak(loop(), sizes, steps=steps)
                save("soak", found)
        return found

    steps: dict[str, Callable[[], dict[str, Any]]] = {
        "oomptimizer": lambda: phases.oomptimizer(run),
        "default": on_default_allocator,
        "ours": lambda: phases.ours(loop(), num_soak_steps=options.own_soak_steps),
        "fast": lambda: phases.ours(loop(), mode="fast", num_soak_steps=0),
        "soak": soaks,
        "train": lambda: phases.train(loop(), profiles(), lambda found: save("train", found)),
    }
    for phase in options.phases:
        begun = time.perf_counter()
        found = steps[phase]()
        found["phase_seconds"] = time.perf_counter() - begun
        save(phase, found)
        kept = {name: value for name, value in found.items() if not isinstance(value, (list, dict))}
        print(f"{model} {phase}: {json.dumps(kept)}", file=sys.stderr, flush=True)
        phases.free()


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse_arguments(given)
    if options.report is not None:
        from oomptimizer_report import plot, render

        print(render(options.report))
        if options.plot is not None:
            plot(options.report, options.plot)
    elif options.child:
        work(options)
    else:
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")])
        )
        drive(options, given)


if __name__ == "__main__":
    main()
