"""The phases of two_cards.py as each rank runs them; started by it, under torchrun or by itself."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import json
import logging
import os
import random
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from recording import every_trial
from two_cards_models import Setting, Trained

from lhotse_oomfit import Profile
from lhotse_oomfit.trial import Verdict, judge

GIB = 2**30
EQUAL_AFTER = 20
"""Training steps after which all ranks' parameters are compared."""
SAVE_EVERY = 50
"""Training steps after which what is known so far is written, for a phase that takes too long."""
NUM_LOCKSTEP_STEPS = 40
FAULTY_TRIAL = 3
WATCHDOG = ("atchdog", "ollective operation timeout", "NCCL WARN", "eartbeatMonitor")
"""What NCCL's process group writes when it gives a collective up."""


class Rank:
    """This process: what it was told, where it writes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", 0)))
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.device = torch.device(args.device)
        if args.device == "cuda":
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        edges = [round((k + 1) * args.longest_s / args.num_buckets, 2) for k in range(args.num_buckets)]
        self.setting = Setting(
            subject=args.subject,
            size=args.size,
            edges=tuple(edges),
            device=self.device,
            memory_limit=args.memory_limit_bytes,
            memory_fraction=args.memory_fraction,
            transcripts=args.transcripts,
            work=args.out / "work",
            heartbeat_s=args.heartbeat_s,
        )
        self.profile_path = self.setting.work / f"{args.subject}-profile.yaml"
        self.log_path = args.out / "logs" / f"{args.job}.rank{self.rank}.log"

    def join(self) -> None:
        """Make the default group, with a timeout that a wait exceeds."""
        if dist.is_initialized():
            return
        if self.args.backend == "nccl":
            dist.init_process_group("nccl", device_id=self.device)
        else:
            dist.init_process_group("gloo")
        limit_group(self.args.group_timeout_s)

    def save(self, phase: str, found: dict[str, Any]) -> None:
        path = self.args.out / f"{self.args.subject}-{phase}.rank{self.rank}.json"
        card = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        args = self.args
        about = {"card": card, "torch": torch.__version__, "backend": args.backend, "size": args.size}
        about["group_timeout_s"] = args.group_timeout_s
        path.write_text(json.dumps({**about, **found}))

    def meet(self) -> None:
        """All ranks are here, and their devices idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def limit_group(timeout_s: float) -> None:
    """Shorten the default group's timeout; not before it is there, as the ranks don't start at the same moment."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), dist.group.WORLD)


def said_of(profile: Profile, seconds: float) -> dict[str, Any]:
    return {
        "sizes": profile.bucket_batch_size,
        "edges": [bucket.input_len for bucket in profile.buckets],
        "peaks": [bucket.peak_bytes for bucket in profile.buckets],
        "budget": profile.budget_bytes,
        "trials": profile.num_trials,
        "soak_steps": profile.num_soak_steps,
        "ooms": profile.num_ooms,
        "retries": profile.num_retries,
        "search_s": profile.search_s,
        "seconds": seconds,
        "ranks": profile.fingerprint.fields["ranks"],
    }


def measured(rank: Rank, trained: Trained, **options: Any) -> tuple[Profile, dict[str, Any]]:
    rank.meet()
    begun = time.perf_counter()
    with every_trial() as own:
        profile = trained.calibrate(**options)
    took_s = time.perf_counter() - begun
    rank.meet()
    return profile, said_of(profile, took_s) | {"own_trials": len(own)}


def checksum(module: torch.nn.Module) -> str:
    """A digest of every bit of the parameters."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(whole.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def all_equal(module: torch.nn.Module) -> bool:
    """Whether all ranks' parameters are equal to the last bit."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, checksum(module))
    return len(set(said)) == 1


def train(
    rank: Rank, trained: Trained, profile: Profile, *, num_steps: int, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Shuffled steps at full size, under a hard cap equal to the budget.

    Every other step all ranks are in the same bucket, in the others each in one of its own. A rank that runs out of
    memory ends, since its peers wait for it.
    """
    device, is_cuda = rank.device, rank.device.type == "cuda"
    common, own = random.Random(0), random.Random(1 + rank.rank)
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"steps": 0, "ooms": 0, "retries": 0}
    if is_cuda:
        gc.collect()
        torch.cuda.empty_cache()
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(profile.budget_bytes / total_bytes, device)
    begun = time.perf_counter()
    try:
        for number in range(num_steps):
            bucket = (common if number % 2 else own).randrange(len(profile.buckets))
            if is_cuda:
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_stats(device)
            try:
                trained.step(profile, bucket)
            except RuntimeError as error:
                if judge(error) is not Verdict.OOM:
                    raise
                save(
                    _summary(found, rows, profile)
                    | {"ooms": 1, "error": str(error)[:600], "bucket": bucket, "step": number}
                )
                sys.stderr.write(f"two_cards: rank {rank.rank} ran out of memory in step {number}: {error}\n")
                os._exit(4)
            found["steps"] = number + 1
            if is_cuda:
                torch.cuda.synchronize(device)
                after = torch.cuda.memory_stats(device)
                found["retries"] += after["num_alloc_retries"] - before["num_alloc_retries"]
                peak = profile.buckets[bucket].peak_bytes
                rows.append(
                    {
                        "bucket": bucket,
                        "allocated": after["allocated_bytes.all.peak"],
                        "reserved": after["reserved_bytes.all.peak"],
                        "of_trial": None if peak is None else after["allocated_bytes.all.peak"] / peak,
                        "reserved_of_trial": None if peak is None else after["reserved_bytes.all.peak"] / peak,
                    }
                )
            if number + 1 in (EQUAL_AFTER, num_steps):
                found[f"equal_after_{number + 1}"] = all_equal(trained.model)
            if (number + 1) % SAVE_EVERY == 0:
                save(_summary(found, rows, profile))
    finally:
        if is_cuda:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    return _summary(found, rows, profile) | {"seconds": time.perf_counter() - begun, "rows": rows}


def _summary(found: dict[str, Any], rows: list[dict[str, Any]], profile: Profile) -> dict[str, Any]:
    """What the steps so far come to."""
    summary = dict(found)
    for name in ("of_trial", "reserved_of_trial"):
        values = [row[name] for row in rows if row[name] is not None]
        if values:
            summary[f"{name}_mean"], summary[f"{name}_max"] = statistics.mean(values), max(values)
    if rows:
        summary["reserved_of_budget_max"] = max(row["reserved"] for row in rows) / profile.budget_bytes
    return summary


# Phases


def rank0(rank: Rank) -> dict[str, Any]:
    """The first rank measures; the profile is kept for training."""
    return measured(rank, Trained(rank.setting, "ddp"), cache=rank.profile_path, recalibrate="always")[1]


def shard(rank: Rank) -> dict[str, Any]:
    """The ranks share the buckets out."""
    return measured(rank, Trained(rank.setting, "ddp"), ranks="shard")[1]


def second_start(rank: Rank) -> dict[str, Any]:
    """A start with the profile of the first, then training at its sizes."""
    trained = Trained(rank.setting, "ddp")
    profile, loaded = measured(rank, trained, cache=rank.profile_path)
    found = {"start": loaded}
    return found | train(
        rank,
        trained,
        profile,
        num_steps=rank.args.steps,
        save=lambda so_far: rank.save("train", found | so_far),
    )


def half(rank: Rank) -> dict[str, Any]:
    """The second rank may use half of what the first may."""
    options: dict[str, Any] = {"num_soak_steps": 0}
    half_bytes = rank.setting.memory_limit // 2
    if rank.rank == 1 and rank.device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(rank.device).total_memory
        torch.cuda.set_per_process_memory_fraction(half_bytes / total_bytes, rank.device)
    elif rank.rank == 1:
        options["memory_limit"] = half_bytes
    try:
        return measured(rank, Trained(rank.setting, "ddp"), **options)[1] | {"half": half_bytes}
    finally:
        if rank.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, rank.device)


def wait(rank: Rank) -> dict[str, Any]:
    """Trials that take longer than the default group's timeout, by the first rank alone and where all share."""
    found: dict[str, Any] = {"delay_s": rank.args.delay_s}
    for ranks, sleeper in (("rank0", 0), ("shard", 1)):
        step = _delayed(rank.args.delay_s if rank.rank == sleeper else 0.0)
        options = {"training_step": step, "max_batch_size": 4, "num_soak_steps": 0}
        found[ranks] = measured(rank, Trained(rank.setting, "ddp"), ranks=ranks, **options)[1]
    return found


def _delayed(delay_s: float) -> Callable[[Any, Any], torch.Tensor]:
    """A training step that takes so much longer the first time."""
    left_s = [delay_s]

    def step(model: Any, batch: Any) -> torch.Tensor:
        time.sleep(left_s.pop() if left_s else 0.0)
        loss: torch.Tensor = model(batch)
        return loss

    return step


def lockstep(wrapping: str) -> Callable[[Rank], dict[str, Any]]:
    """All ranks every trial, then some training at the sizes found."""

    def phase(rank: Rank) -> dict[str, Any]:
        trained = Trained(rank.setting, wrapping)
        profile, found = measured(rank, trained)
        rank.save(wrapping, found)
        steps = min(NUM_LOCKSTEP_STEPS, rank.args.steps)
        after = train(
            rank,
            trained,
            profile,
            num_steps=steps,
            save=lambda so_far: rank.save(wrapping, found | {"train": so_far}),
        )
        after.pop("rows")
        return found | {"train": after}

    return phase


def memory(wrapping: str) -> Callable[[Rank], dict[str, Any]]:
    """The second rank runs out of memory in a trial of all."""

    def phase(rank: Rank) -> dict[str, Any]:
        def fail() -> None:
            if rank.device.type != "cuda":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1048576.00 GiB.")
            torch.empty(2**50, dtype=torch.uint8, device=rank.device)

        return _faulty(rank, wrapping, culprit=1, fault=fail)

    return phase


def killed(rank: Rank) -> dict[str, Any]:
    """The first rank is killed in a trial of its own."""
    return _faulty(rank, "ddp", culprit=0, fault=lambda: os.kill(os.getpid(), signal.SIGKILL))


def _faulty(rank: Rank, wrapping: str, *, culprit: int, fault: Callable[[], None]) -> dict[str, Any]:
    num_trials = 0

    def step(model: Any, batch: Any) -> torch.Tensor:
        nonlocal num_trials
        num_trials += 1
        if rank.rank == culprit and num_trials == FAULTY_TRIAL:
            (rank.args.out / "work" / f"{rank.args.job}.fault").write_text(str(time.time()))
            fault()
        return model(batch)

    Trained(rank.setting, wrapping).calibrate(training_step=step)
    return {"error": "the calibration came to its end, though something was to go wrong"}


def lightning(rank: Rank) -> dict[str, Any]:
    """Lightning's DDP, started by its own launcher: calibrated, trained, and started again."""
    import two_cards_lightning

    return two_cards_lightning.run(rank, checksum=checksum, limit_group=limit_group)


PHASES: dict[str, Callable[[Rank], dict[str, Any]]] = {
    "rank0": rank0,
    "shard": shard,
    "train": second_start,
    "half": half,
    "wait": wait,
    "static": lockstep("static"),
    "fsdp2": lockstep("fsdp2"),
    "memory": memory("static"),
    "memory-fsdp2": memory("fsdp2"),
    "killed": killed,
    "killed-torchrun": killed,
    "lightning": lightning,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--job", required=True, help="name of this start, for its logs")
    add("--gate", type=Path, help="a file to wait for once everything is imported")
    add("--subject", choices=["conformer", "ctc"], required=True)
    add("--phases", required=True)
    add("--device", choices=["cpu", "cuda"], required=True)
    add("--backend", choices=["nccl", "gloo"], required=True)
    add("--size", required=True)
    add("--memory-limit-bytes", type=int, required=True)
    add("--memory-fraction", type=float, required=True)
    add("--num-buckets", type=int, required=True)
    add("--longest-s", type=float, required=True)
    add("--steps", type=int, required=True)
    add("--transcripts", type=Path)
    add("--group-timeout-s", type=float, required=True)
    add("--delay-s", type=float, required=True)
    add("--heartbeat-s", type=float, required=True)
    add("--phase-limit-s", type=float, required=True)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    rank = Rank(args)
    rank.log_path.parent.mkdir(parents=True, exist_ok=True)
    log = rank.log_path.open("w")
    os.dup2(log.fileno(), 2)  # NCCL's threads write there too, past Python
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    if args.subject == "ctc":
        from oomptimizer_phases import quiet

        quiet()
        import nemo.collections.asr.models  # noqa: F401  takes its time, so before ranks wait for each other
    if args.device == "cpu":
        torch.set_num_threads(1)
    while args.gate is not None and not args.gate.exists():
        time.sleep(0.1)
    for phase in args.phases.split(","):
        (args.out / "work" / f"{args.subject}-{phase}.started").touch()
        begun, position = time.perf_counter(), rank.log_path.stat().st_size
        faulthandler.dump_traceback_later(args.phase_limit_s, exit=True, file=log)
        sys.stderr.write(f"two_cards: rank {rank.rank} begins {phase}\n")
        if phase != "lightning":
            rank.join()
        found = PHASES[phase](rank)
        sys.stderr.flush()
        lines = rank.log_path.read_text(errors="replace")[position:].splitlines()
        found["watchdog"] = [line[:300] for line in lines if any(word in line for word in WATCHDOG)]
        rank.save(phase, found | {"phase_seconds": time.perf_counter() - begun})
        faulthandler.cancel_dump_traceback_later()
        gc.collect()
        if rank.device.type == "cuda":
            torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
