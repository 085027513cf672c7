"""Calibrations by two ranks, each with a card or both on one: what tests start as real processes.

Without a card everything runs on the CPU, with a smaller model and less memory.
"""

from __future__ import annotations

import os
import random
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tiny_asr import TinyDataset, TinyModel, tiny_cuts, tiny_sampler
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lhotse_oomfit import Profile, calibrate
from lhotse_oomfit.ranks import current_ranks
from lhotse_oomfit.solitude import alone

ON_CARD = torch.cuda.is_available()
LIMIT = "3GiB" if ON_CARD else "16MiB"
WIDTH = 512 if ON_CARD else 24


def device_of(rank: int) -> torch.device:
    if not ON_CARD:
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class Losing(TinyModel):
    """A model whose forward pass gives the loss, so that a wrapper sees all of it; asks all ranks for the longest."""

    def forward(self, batch: Any) -> torch.Tensor:
        if not isinstance(batch, dict):
            return super().forward(batch)
        device = next(self.parameters()).device
        batch = {name: value.to(device) for name, value in batch.items()}
        if dist.is_initialized():
            longest = torch.tensor([batch["features"].shape[1]], device=device)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return self.loss(batch)


def made(kind: str, rank: int) -> nn.Module:
    """A model by name; all but "fsdp2" have batch normalisation over all ranks."""
    device = device_of(rank)
    torch.manual_seed(0)
    model: nn.Module = Losing(width=WIDTH)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model.to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        fully_shard(model.block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if ON_CARD:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to(device)
    if kind == "plain":
        return model
    where = {"device_ids": [device]} if ON_CARD else {}
    return DistributedDataParallel(model, static_graph=kind == "static", **where)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch)


def calibrated(model: nn.Module, optimizer: Any = None, **options: Any) -> Profile:
    defaults: dict[str, Any] = {
        "training_step": loss_step,
        "memory_limit": LIMIT,
        "cache": False,
        "num_sample_cuts": 40,
        "heartbeat_timeout": 8,
        "progress": False,
    }
    sampler = tiny_sampler(tiny_cuts(60))
    return calibrate(sampler, TinyDataset(), model=model, optimizer=optimizer or adam(model), **{**defaults, **options})


def sizes_of(rank: int, kind: str, options: dict[str, Any]) -> list[int]:
    return calibrated(made(kind, rank), **options).bucket_batch_size


def several(rank: int, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """A calibration for each case, in one pair of processes."""
    found = {}
    for name, (kind, options) in cases.items():
        profile = calibrated(made(kind, rank), **options)
        found[name] = {
            "sizes": profile.bucket_batch_size,
            "ranks": profile.fingerprint.fields["ranks"],
            "num_trials": profile.num_trials,
            "num_ooms": profile.num_ooms,
            "budget_bytes": profile.budget_bytes,
        }
    return found


def with_half_the_memory(rank: int) -> tuple[int, int]:
    """The budget of all, and what is half of what a rank without a cap would have."""
    model = made("ddp", rank)
    whole = calibrated(model, num_soak_steps=0).budget_bytes
    if ON_CARD and rank == 1:
        total_bytes = torch.cuda.get_device_properties(device_of(rank)).total_memory
        torch.cuda.set_per_process_memory_fraction(whole / 2 / total_bytes)
    options = {} if ON_CARD or rank == 0 else {"memory_limit": "8MiB"}
    return calibrated(model, num_soak_steps=0, **options).budget_bytes, whole // 2


def patient(rank: int, ranks: str) -> tuple[list[int], float]:
    """A trial that takes longer than the default group's timeout; afterwards the group still works."""
    model = made("ddp", rank)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=4), dist.group.WORLD)
    slept: list[None] = []

    def step(module: Any, batch: Any) -> torch.Tensor:
        if rank == 0 and not slept:
            slept.append(time.sleep(7))
        return module(batch)

    sizes = calibrated(model, training_step=step, ranks=ranks, heartbeat_timeout=20).bucket_batch_size
    value = torch.ones(1, device=device_of(rank))
    dist.all_reduce(value)
    return sizes, value.item()


def trained(rank: int, cache: str, num_steps: int) -> dict[str, Any]:
    """Calibrate, then train at full size under a hard cap equal to the budget."""
    device = device_of(rank)
    model = made("ddp", rank)
    optimizer = adam(model)
    num_trials = 0

    def step(module: Any, batch: Any) -> torch.Tensor:
        nonlocal num_trials
        num_trials += 1
        return module(batch)

    profile = calibrated(model, optimizer, training_step=step, cache=cache)
    num_stepped = num_trials
    before = torch.cuda.memory_stats(device) if ON_CARD else {}
    if ON_CARD:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(profile.budget_bytes / total_bytes)
        torch.cuda.reset_peak_memory_stats(device)
    rng = random.Random(0)
    own = random.Random(1 + rank)
    for n in range(num_steps):
        k = (rng if n % 2 else own).randrange(len(profile.buckets))  # the ranks in the same bucket, and in any
        optimizer.zero_grad()
        model(full_batch(profile, k)).backward()
        optimizer.step()
    after = torch.cuda.memory_stats(device) if ON_CARD else {}
    counts = {name: after.get(name, 0) - before.get(name, 0) for name in ("num_ooms", "num_alloc_retries")}
    return {
        "profile": profile.encode(),
        "num_trials": num_stepped,
        "parameters": [p.detach().float().cpu().numpy().tobytes() for p in model.parameters()],
        **counts,
    }


def full_batch(profile: Profile, k: int) -> dict[str, torch.Tensor]:
    """The worst case of a bucket: its longest cut, as often as its size says."""
    edge, size = profile.buckets[k].input_len, profile.bucket_batch_size[k]
    one = TinyDataset()[tiny_cuts(1, shortest=edge, longest=edge, chars_per_s=12)]
    return {name: value.expand(size, *value.shape[1:]) for name, value in one.items()}


def ends(rank: int, kind: str, how: str, culprit: str) -> None:
    """Calibrate, with something going wrong in the third trial of one rank."""
    num_trials = 0

    def step(module: Any, batch: Any) -> torch.Tensor:
        nonlocal num_trials
        num_trials += 1
        if rank == int(culprit) and num_trials == 3:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if not ON_CARD:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1048576.00 GiB.")
            torch.empty(2**50, dtype=torch.uint8, device=device_of(rank))
        return module(batch)

    calibrated(made(kind, rank), training_step=step)


def by_itself(rank: int) -> tuple[list[float], int]:
    """What collectives give to each rank alone, at the same time, with tensors on its device."""
    device = device_of(rank)

    def work() -> str:
        with alone():
            value = torch.full((1,), 5.0 + rank, device=device)
            dist.all_reduce(value)
            gathered = [None]
            dist.all_gather_object(gathered, rank)
            dist.barrier()
            return f"{value.item()} {gathered} {dist.get_world_size()} {dist.get_backend()}"

    return current_ranks().gather(work), dist.get_world_size()
