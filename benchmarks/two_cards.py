"""Calibration on two cards of one host over NCCL: by one rank, shared out, in lock-step, and what goes wrong.

    python benchmarks/two_cards.py --transcripts librispeech.jsonl --out results
    python benchmarks/two_cards.py --report results

Subjects are the Conformer of the examples and NeMo's FastConformer-CTC, with SyncBatchNorm and
``sync_max_audio_length``; the latter needs ``nemo-toolkit[asr]`` and ``--transcripts``, a manifest with durations and
texts. Each job is a start of two ranks, under torchrun unless it says otherwise, and runs some phases; each rank
writes a JSON file per phase and a log. A phase that takes too long ends, with all threads' stacks in the log. Phases:

``rank0``, ``shard``: the first rank measures, or the ranks share the buckets out, with nothing else on the cards;
``train``: a second start, and shuffled DDP steps at full size under a hard cap equal to the budget;
``half``: the second rank may use half the memory; ``wait``: a trial longer than the default group's timeout;
``static``, ``fsdp2``: in lock-step; ``lightning``: Lightning's DDP, by its own launcher;
``memory``, ``memory-fsdp2``: one rank runs out of memory in a trial of all;
``killed``, ``killed-torchrun``: rank 0 dies.

``--device cpu --size tiny`` tries everything over gloo, without cards.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SUBJECTS = ("conformer", "ctc")
PHASES = ("rank0", "shard", "train", "half", "wait", "static", "fsdp2", "lightning")
FAULTS = ("memory", "memory-fsdp2", "killed", "killed-torchrun")
TOGETHER = (("train", "half"), ("static", "fsdp2"), ("lightning",), ("wait",))
"""Phases of one job each, after the first jobs."""
ALONE = ("wait", *FAULTS)
"""Phases of the first subject only, unless there is no other."""
REASONS = ("RankFailedError", "LockStepMemoryError", "lhotse-oomfit: rank", "OutOfMemoryError")
FAULT_LIMIT_S = 90.0
"""Seconds for a job in which something goes wrong; less if the limit of a phase is less."""
EXIT_S = 15.0
"""How long the last process may take to end after the deadline of a job."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start of two ranks.

    :param gate: a file that its ranks wait for once they have imported everything.
    """

    name: str
    subject: str
    phases: tuple[str, ...]
    gate: Path | None = None

    @property
    def launcher(self) -> str:
        """What starts the ranks; torchrun would end the survivors before they can say why they end."""
        if self.phases == ("lightning",):
            return "lightning"
        return "plain" if self.phases[0] in FAULTS and self.phases[0] != "killed-torchrun" else "torchrun"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    known = (*PHASES, *FAULTS)
    add("--report", type=Path, metavar="DIR", help="print the results in this folder as Markdown, and stop")
    add("--out", type=Path, default=Path("two-cards-results"), help="folder for results and logs")
    add("--subjects", default=",".join(SUBJECTS), help=f"some of {','.join(SUBJECTS)}")
    add("--phases", default=",".join(known), help=f"some of {','.join(known)}")
    add("--transcripts", type=Path, help="a manifest with texts, for NeMo's tokenizer")
    add("--device", choices=["cpu", "cuda"], default="cuda")
    add("--backend", choices=["nccl", "gloo"], help="gloo lets both ranks share one card (else nccl on cards)")
    add(
        "--size",
        default="large",
        choices=["tiny", "small", "medium", "large"],
        help="of the Conformer; NeMo: L or tiny",
    )
    add("--memory-limit-mib", type=int, default=10 * 1024, help="what each rank's device counts as having")
    add("--memory-fraction", type=float, default=0.9)
    add("--num-buckets", type=int, default=10)
    add("--longest-s", type=float, default=20.0, help="edge of the last bucket")
    add("--steps", type=int, default=300, help="of the training under the hard cap")
    add("--group-timeout-s", type=float, default=20.0, help="timeout of the default process group")
    add("--delay-s", type=float, default=26.0, help="how much longer a trial takes in wait")
    add("--heartbeat-s", type=float, default=15.0, help="heartbeat_timeout")
    add("--phase-limit-s", type=float, default=180.0, help="seconds for one phase")
    add(
        "--limit-s", type=float, default=470.0, help="seconds for everything; jobs that can't begin before are left out"
    )
    add("--lanes", type=int, default=3, help="jobs at the same time, after rank0 and shard")
    options = parser.parse_args(arguments)
    for name, names in (("subjects", SUBJECTS), ("phases", known)):
        chosen = tuple(getattr(options, name).split(","))
        if unknown := sorted(set(chosen) - set(names)):
            parser.error(f"--{name} must be among {', '.join(names)}, it has {', '.join(unknown)}")
        setattr(options, name, chosen)
    options.backend = options.backend or ("nccl" if options.device == "cuda" else "gloo")
    if "ctc" in options.subjects and options.transcripts is None and options.report is None:
        parser.error("--transcripts must be given for ctc: a manifest with durations and texts")
    return options


def planned(options: argparse.Namespace) -> tuple[list[Job], list[Job]]:
    """The jobs that need the cards for themselves, and the others."""
    first, others = [], []
    for subject in options.subjects:
        chosen = tuple(phase for phase in ("rank0", "shard") if phase in options.phases)
        if chosen:
            gate = options.out / "work" / f"{subject}.go"
            first.append(Job(name=f"{subject}-measure", subject=subject, phases=chosen, gate=gate))
    groups = [*TOGETHER, *((phase,) for phase in FAULTS)]
    for group in groups:
        for subject in options.subjects:
            chosen = tuple(phase for phase in group if phase in options.phases)
            if chosen and (subject == options.subjects[0] or chosen[0] not in ALONE):
                others.append(Job(name=f"{subject}-{chosen[0]}", subject=subject, phases=chosen))
    return first, others


class Driver:
    """Starts jobs; one that fails or hangs doesn't end the others."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.begun = time.monotonic()

    def run(self) -> None:
        options = self.options
        for folder in (options.out / "work", options.out / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        first, others = planned(options)
        with ThreadPoolExecutor(max(len(first), options.lanes)) as pool:
            started: list[tuple[Job, Future[None]]] = []
            if options.device == "cuda":
                started = [(job, pool.submit(self._run_all, job)) for job in first]  # they import at the same time
            for index, job in enumerate(first):
                if job.gate is not None:
                    job.gate.touch()
                (started[index][1] if started else pool.submit(self._run_all, job)).result()
        with ThreadPoolExecutor(options.lanes) as pool:
            for future in [pool.submit(self._run_all, job) for job in others]:
                future.result()

    @property
    def _left_s(self) -> float:
        return float(self.options.limit_s) - (time.monotonic() - self.begun)

    def _run_all(self, job: Job) -> None:
        """Run a job; after a phase that failed, start again with those that come after it."""
        phases, attempt = job.phases, 0
        while phases:
            if self._left_s < EXIT_S:
                print(f"{job.name} {','.join(phases)}: left out, the time is up", file=sys.stderr, flush=True)
                return
            now = Job(
                name=f"{job.name}.{attempt}" if attempt else job.name, subject=job.subject, phases=phases, gate=job.gate
            )
            begun = time.time()
            codes = self._run(now)
            ended = time.time()
            self._note(now, codes, ended)
            took = f"{ended - begun:.0f} s, {time.monotonic() - self.begun:.0f} s in all"
            print(f"{now.name} {','.join(phases)}: exit codes {codes}, {took}", file=sys.stderr, flush=True)
            if all(code == 0 for code in codes) or phases[0] in FAULTS:
                return
            begun_phases = [p for p in phases if (self._work / f"{job.subject}-{p}.started").exists()]
            phases, attempt = phases[max(1, len(begun_phases)) :], attempt + 1

    @property
    def _work(self) -> Path:
        return Path(self.options.out) / "work"

    def _run(self, job: Job) -> list[int | None]:
        """Start the ranks, and wait for their end; the exit codes of what was started."""
        for phase in job.phases:
            (self._work / f"{job.subject}-{phase}.started").unlink(missing_ok=True)
        script = [str(Path(__file__).with_name("two_cards_phases.py")), *self._arguments(job)]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        here = Path(__file__).resolve().parent
        paths = [str(here.parent), str(here), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if job.launcher == "torchrun":
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            starts = [([sys.executable, *torchrun, *script], environment)]
        elif job.launcher == "lightning":
            starts = [([sys.executable, *script], environment)]
        else:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            group = environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
            ranks = [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
            starts = [([sys.executable, *script], each) for each in ranks]
        with (Path(self.options.out) / "logs" / f"{job.name}.launcher.log").open("w") as log:
            processes = [
                subprocess.Popen(command, env=each, stdout=log, stderr=log, start_new_session=True)
                for command, each in starts
            ]
            deadline = time.monotonic() + self._left_s
            codes: list[int | None] = []
            for process in processes:
                try:
                    codes.append(process.wait(max(0.0, deadline - time.monotonic())))
                except subprocess.TimeoutExpired:
                    codes.append(None)
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return codes

    def _arguments(self, job: Job) -> list[str]:
        options = self.options
        said = {
            "out": options.out.resolve(),
            "job": job.name,
            "gate": job.gate and job.gate.resolve(),
            "subject": job.subject,
            "phases": ",".join(job.phases),
            "device": options.device,
            "backend": options.backend,
            "size": options.size,
            "memory-limit-bytes": options.memory_limit_mib * 2**20,
            "transcripts": options.transcripts and options.transcripts.resolve(),
        }
        same = ["memory_fraction", "num_buckets", "longest_s", "steps", "group_timeout_s", "delay_s", "heartbeat_s"]
        said |= {name.replace("_", "-"): getattr(options, name) for name in same}
        limit_s = options.phase_limit_s
        said["phase-limit-s"] = min(limit_s, FAULT_LIMIT_S) if job.phases[0] in FAULTS else limit_s
        return [text for name, value in said.items() if value is not None for text in (f"--{name}", str(value))]

    def _note(self, job: Job, codes: list[int | None], ended: float) -> None:
        """What became of a job that was to fail: how long after the fault its last rank ended, and why."""
        fault = self._work / f"{job.name}.fault"
        if job.phases[0] not in FAULTS:
            return
        reasons = {}
        for log in sorted((Path(self.options.out) / "logs").glob(f"{job.name}.rank*.log")):
            lines = [line for line in log.read_text(errors="replace").splitlines() if any(r in line for r in REASONS)]
            reasons[log.name.split(".")[-2]] = lines[-1][:400] if lines else ""
        found = {
            "codes": codes,
            "seconds_after_fault": ended - float(fault.read_text()) if fault.exists() else None,
            "reasons": reasons,
            "heartbeat_s": self.options.heartbeat_s,
        }
        (Path(self.options.out) / f"{job.subject}-{job.phases[0]}.job.json").write_text(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.report is not None:
        from two_cards_report import render

        print(render(options.report))
        return
    Driver(options).run()


if __name__ == "__main__":
    main()
