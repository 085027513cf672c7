"""All ranks run every trial together, as real processes over gloo: FSDP, a static graph, collectives in the model."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import results, run_ranks
from tiny_asr import TinyDataset, TinyModel, fingerprint_of_state, tiny_cuts, tiny_sampler, training_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lhotse_oomfit import calibrate

pytestmark = pytest.mark.timeout(240)


class Meeting(TinyModel):
    """A model whose forward pass meets all ranks, through a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.group: Any = dist.new_group([0, 1], group_desc="experts")

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        longest = torch.tensor(batch["features"].shape[1])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.group)
        return super().loss(batch)


class HiddenMeeting(Meeting):
    """The same, with the group where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["group"] = _Holder(self.__dict__.pop("group"))

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        longest = torch.tensor(batch["features"].shape[1])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.group.inner)
        return TinyModel.loss(self, batch)


class _Holder:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = TinyModel()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.set_reshard_after_forward(True)
        register = torch.distributed.fsdp.register_fsdp_forward_method
        register(model, "loss")
        return model
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = TinyModel()

            def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
                return self.model.loss(batch)

        return FullyShardedDataParallel(Loss(), device_id=torch.device("cpu"), use_orig_params=True)
    if kind == "static":
        return DistributedDataParallel(_Losing(), static_graph=True)
    if kind == "ddp":
        return DistributedDataParallel(_Losing())
    return Meeting() if kind == "meeting" else HiddenMeeting()


class _Losing(TinyModel):
    def forward(self, batch: Any) -> torch.Tensor:
        return TinyModel.loss(self, batch) if isinstance(batch, dict) else super().forward(batch)


def loss_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model.loss(batch) if hasattr(type(model), "loss") else model(batch)


def find(model: nn.Module, cache: Path | bool = False, **options: Any) -> list[int]:
    sampler = tiny_sampler(tiny_cuts(60))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    defaults: dict[str, Any] = {"memory_limit": "24MiB", "cache": cache, "num_sample_cuts": 40}
    profile = calibrate(
        sampler,
        TinyDataset(),
        model=model,
        optimizer=optimizer,
        training_step=loss_step,
        **{**defaults, **options},
    )
    return profile.bucket_batch_size


def _sizes(rank: int, kind: str, options: dict[str, Any]) -> list[int]:
    return find(made(kind), **options)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "static", "meeting"])
def test_what_one_rank_cannot_run_alone_is_measured_by_all_together(kind: str):
    first, second = results(run_ranks(_sizes, kind, {}, timeout_s=150))
    assert first == second
    assert all(size > 1 for size in first)
    assert first == sorted(first, reverse=True)
