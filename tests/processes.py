"""Several ranks as real processes, with a hard timeout: a hang is a failure."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def start_group(backend: str) -> None:
    """Join the job's default group; with NCCL on this rank's own card, to which the group is bound."""
    if backend == "nccl":
        card = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(card)
        dist.init_process_group("nccl", device_id=card)
    else:
        dist.init_process_group("nccl" if backend == "nccl-unbound" else backend)


def _main(
    rank: int,
    world_size: int,
    port: int,
    backend: str,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    out: Queue[Any],
) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
    try:
        start_group(backend)
        result = work(rank, *args)
        out.put((rank, "result", result))
    except BaseException as error:  # noqa: BLE001  the test's own process judges
        out.put((rank, "error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_ranks(
    work: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    timeout_s: float = 120.0,
    silent: tuple[int, ...] = (),
    backend: str = "gloo",
) -> dict[int, tuple[str, Any]]:
    """Run ``work(rank, *args)`` on every rank of a group.

    :param work: importable (top-level), since processes are spawned.
    :param silent: ranks that are stopped or killed, and so not waited for.
    :param backend: ``"gloo"``, ``"nccl"`` for a card each, or ``"nccl-unbound"``, which connects when it first must.
    :return: for each rank that said something, ``("result", value)`` or ``("error", text)``; a killed rank is missing.
    """
    # Processes are forked from one that has imported what takes seconds, and done nothing else.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["lhotse_oomfit.fit", "torch.distributed", "tiny_asr"])
    out = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_main, args=(rank, world_size, port, backend, work, args, out), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    found: dict[int, tuple[str, Any]] = {}
    deadline = monotonic() + timeout_s
    try:
        while len(found.keys() - set(silent)) < world_size - len(silent) and monotonic() < deadline:
            try:
                rank, kind, value = out.get(timeout=0.2)
                found[rank] = (kind, value)
            except Empty:
                if not any(process.is_alive() for process in processes):
                    break
        alive = [rank for rank, process in enumerate(processes) if process.is_alive() and rank not in (*found, *silent)]
        if alive and monotonic() >= deadline:
            _dump_stacks(processes[rank].pid for rank in alive)
            raise TimeoutError(f"ranks {alive} still ran after {timeout_s:g} s; the others said {found}")
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    return found


_APART = """
import faulthandler, importlib, signal, sys, traceback
import torch, torch.distributed as dist
from processes import start_group
torch.set_num_threads(1)
faulthandler.register(signal.SIGUSR1)
module, name = sys.argv[2].split(":")
start_group(sys.argv[1])
try:
    getattr(importlib.import_module(module), name)(dist.get_rank(), *sys.argv[3:])
except BaseException:
    traceback.print_exc()
    sys.exit(3)
"""


def run_apart(
    work: str, *args: str, folder: Path, world_size: int = 2, timeout_s: float = 60.0, backend: str = "gloo"
) -> tuple[list[str], list[int | None]]:
    """Run ``module:function`` on every rank, in processes that may end themselves; a rank that is stopped is killed
    once all others have ended.

    :param work: in a module of the tests.
    :param args: passed on as texts, after the rank.
    :param folder: for what the ranks write.
    :param backend: as for :func:`run_ranks`.
    :return: what each rank wrote, and its exit code; None for one that was stopped.
    """
    port, here = free_port(), Path(__file__).parent
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    env["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent), env.get("PYTHONPATH", "")])
    env["OMP_NUM_THREADS"] = "1"
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", _APART, backend, work, *args],
                    env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
    deadline = monotonic() + timeout_s
    codes: list[int | None] = [None] * world_size
    try:
        while monotonic() < deadline:
            codes = [process.poll() for process in processes]
            running = [process.pid for process, code in zip(processes, codes, strict=True) if code is None]
            if all(_is_stopped(pid) for pid in running):
                return [log.read_text() for log in logs], codes
            sleep(0.1)
        _dump_stacks(process.pid for process in processes if process.poll() is None)
        raise TimeoutError(f"ranks {codes} still ran after {timeout_s:g} s: {[log.read_text() for log in logs]}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _dump_stacks(pids: Iterable[int | None]) -> None:
    """Have processes that hang write where all their threads are."""
    for pid in pids:
        if pid is not None:
            os.kill(pid, signal.SIGUSR1)
    sleep(1)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def results(found: dict[int, tuple[str, Any]]) -> list[Any]:
    """The results of all ranks, in order; any error is raised here."""
    for rank, (kind, value) in sorted(found.items()):
        if kind == "error":
            raise AssertionError(f"rank {rank} failed: {value}")
    return [found[rank][1] for rank in sorted(found)]
