"""NeMo's own training scripts and YAML, on one card, by three kinds of batching: ours, OOMptimizer's, as shipped.

    python benchmarks/nemo_script.py --nemo NEMO --transcripts librispeech.jsonl --oomptimizer-results DIR --out results
    python benchmarks/nemo_script.py --report results

Needs ``nemo-toolkit[asr]``, ``lhotse-oomfit`` and ``lhotse-oomfit-nemo`` installed, NeMo's ``examples/asr`` below
``--nemo``, and what ``oomptimizer.py`` left in ``--oomptimizer-results`` (``ctc-oomptimizer.json`` and
``aed-oomptimizer.json``, whose buckets all use). The transcripts are a NeMo manifest with ``duration`` and ``text``;
the audio is noise of these durations. Each job is one process that runs NeMo's script, unchanged, with other settings
of ``train_ds``; all import at once, and train one after another. ``--tiny`` tries everything with tiny models on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nemo_script_job import KINDS, MODELS, RATE, STANDING_BY_S, Job, run_job

JOBS = tuple(f"{model}-{kind}" for kind in KINDS for model in MODELS)
"""In this order, so that what is cut off by the time limit is what is known best."""
REPEATS = 20
"""The manifest holds each utterance so often, so that an epoch lasts longer than the training."""
SET_UP_S, CALIBRATION_S = 15.0, 75.0
"""What a job takes beside its training, and one that calibrates on top: for sharing out what time is left."""
LEAST_TRAIN_S = 8.0
NOISE = re.compile(r"rank_zero|^I0000|^ - |FutureWarning|UserWarning|warnings\.warn|OneLogger|^\s*$|NeMo W|^ {4,}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nemo", type=Path, help="a checkout of NeMo, of which examples/asr is used")
    parser.add_argument("--transcripts", type=Path, help="a manifest with durations and texts")
    parser.add_argument("--oomptimizer-results", type=Path, help="folder with ctc- and aed-oomptimizer.json")
    parser.add_argument("--out", type=Path, default=Path("nemo-script-results"), help="folder for the results")
    parser.add_argument("--work", type=Path, default=Path("/tmp/nemo-script"), help="folder for audio and logs")
    parser.add_argument("--jobs", default=",".join(JOBS), help=f"some of {','.join(JOBS)}, in their order")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="seconds for everything")
    parser.add_argument("--train-s", type=float, default=60.0, help="the most seconds of each training")
    parser.add_argument("--train-steps", type=int, default=400, help="the most steps of each training")
    parser.add_argument("--num-workers", type=int, default=10, help="of each training's data loading")
    parser.add_argument("--override", action="append", default=[], help="one more Hydra override, for all jobs")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--report", type=Path, help="print the tables of the results in this folder, and stop")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.report is not None:
        return options
    for name in ("nemo", "transcripts", "oomptimizer_results"):
        if getattr(options, name) is None:
            parser.error(f"--{name.replace('_', '-')} must be given")
    options.jobs = options.jobs.split(",")
    if unknown := sorted(set(options.jobs) - set(JOBS)):
        parser.error(f"--jobs must be among {', '.join(JOBS)}, it has {', '.join(unknown)}")
    return options


@dataclass(frozen=True, kw_only=True)
class Started:
    """A job's process, and when the driver began."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


def drive(options: argparse.Namespace, arguments: list[str]) -> None:
    """Start all jobs, and let one after another train; one that fails or hangs doesn't end the others."""
    begun = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the jobs end too
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for old in (*options.work.glob("*.ready"), *options.work.glob("*.gate"), options.work / "prepared"):
        old.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(_started(name, options, arguments)) for name in options.jobs]
        prepare(options.work, options.transcripts, num=80 if options.tiny else None)
        say(begun, "data are there")
        for n, job in enumerate(jobs):
            left = [other.name for other in jobs[n:]]
            wait(job, options.work / f"{job.name}.ready", until=begun + options.limit_s)
            remaining = options.limit_s - (time.perf_counter() - begun)
            num_calibrated = sum(name.endswith("auto") for name in left)
            spare = (remaining - SET_UP_S * len(left) - CALIBRATION_S * num_calibrated) / len(left)
            train_s = min(options.train_s, max(LEAST_TRAIN_S, spare))
            gate = options.work / f"{job.name}.gate"
            gate.with_suffix(".part").write_text(str(train_s))
            gate.with_suffix(".part").rename(gate)
            allowed = SET_UP_S * 4 + train_s * 2 + (CALIBRATION_S * 2 if job.name.endswith("auto") else 0.0)
            before = time.perf_counter()
            wait(job, None, until=min(before + allowed, begun + options.limit_s))
            took = time.perf_counter() - before
            say(begun, f"{job.name}: exit code {job.process.poll()}, {took:.0f} s of which up to {train_s:.0f} train")
            tell(job, options.out / f"{job.name}.json")
            keep_logs(jobs, options.out / "logs.txt")


@contextlib.contextmanager
def _started(name: str, options: argparse.Namespace, arguments: list[str]) -> Iterator[Started]:
    environment = os.environ | {"HYDRA_FULL_ERROR": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    if not name.endswith("auto"):  # the calibration switches this on by itself
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    log = options.work / f"{name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, __file__, *arguments, "--child", name],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield Started(name=name, process=process, log=log)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process with its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait(job: Started, path: Path | None, *, until: float) -> None:
    """Until the job has written `path` or, without one, has ended; it is ended at the time `until`."""
    while job.process.poll() is None and time.perf_counter() < until:
        if path is not None and path.exists():
            return
        time.sleep(STANDING_BY_S)
    _end(job.process)


def say(begun: float, text: str) -> None:
    print(f"[{time.perf_counter() - begun:.0f} s] {text}", flush=True)


def tell(job: Started, path: Path) -> None:
    """The job's figures; of one that failed the end of its log."""
    found = json.loads(path.read_text()) if path.exists() else {}
    summary = {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in found.items()
        if not isinstance(value, (list, dict))
    }
    print(f"  {json.dumps(summary)[:900]}", flush=True)
    if not found.get("finished"):
        lines = [line for line in job.log.read_text(errors="replace").splitlines() if line.strip()]
        print("\n".join(f"  | {line[:200]}" for line in lines[-16:])[-1500:], flush=True)


def keep_logs(jobs: Sequence[Started], path: Path) -> None:
    """The logs without what is usual, each of at most 200 kB."""
    kept = []
    for job in jobs:
        lines = job.log.read_text(errors="replace").splitlines()
        text = "\n".join(line[:500] for line in lines if not NOISE.search(line))
        kept.append(f"===== {job.name}\n{text[:50_000]}\n...\n{text[50_000:][-150_000:]}\n")
    path.write_text("".join(kept))


def prepare(work: Path, transcripts: Path, *, num: int | None) -> None:
    """Noise of the right lengths, the manifest, and a tokenizer; the file ``prepared`` says that they are there."""
    import numpy as np
    import sentencepiece
    import soundfile

    rows = [json.loads(line) for line in transcripts.read_text().splitlines()][:num]
    (work / "audio").mkdir(exist_ok=True)
    (work / "bpe").mkdir(exist_ok=True)
    noise = np.random.default_rng(0).normal(0.0, 1000.0, 120 * RATE).astype(np.int16)

    def write(n: int) -> str:
        row, path = rows[n], work / "audio" / f"{n}.wav"
        num_samples = round(row["duration"] * RATE)
        begin = 997 * n % (len(noise) - num_samples)
        soundfile.write(path, noise[begin : begin + num_samples], RATE, subtype="PCM_16")
        line = {"audio_filepath": str(path), "duration": row["duration"], "sampling_rate": RATE}
        line |= {"text": row["text"].lower(), "source_lang": "en", "target_lang": "en", "taskname": "asr", "pnc": "yes"}
        return json.dumps(line) + "\n"

    with ThreadPoolExecutor(4) as pool:
        lines = list(pool.map(write, range(len(rows))))
    (work / "train.json").write_text("".join(lines * REPEATS))
    (work / "validation.json").write_text("".join(lines[:8]))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(row["text"].lower() for row in rows),
        model_prefix=str(work / "bpe" / "tokenizer"),
        vocab_size=128 if num else 1024,
        model_type="bpe",
        bos_id=-1,
        eos_id=-1,
        minloglevel=2,
    )
    pieces = (work / "bpe" / "tokenizer.vocab").read_text().splitlines()
    (work / "bpe" / "vocab.txt").write_text("\n".join(piece.split("\t")[0] for piece in pieces[1:]))
    (work / "prepared").touch()


def main(arguments: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse_arguments(given)
    if options.report is not None:
        from nemo_script_report import render

        print(render(options.report))
    elif options.child is not None:
        run_job(Job.of(options))
    else:
        drive(options, given)


if __name__ == "__main__":
    main()
