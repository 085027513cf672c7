"""Several samplers at once on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from lhotse.dataset.sampling.zip import ZipSampler
from processes import results, run_ranks
from test_composite import long, run_pair, short
from tiny_asr import TinyModel


def _zipped(rank: int, ranks: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(TinyModel())
    optimizer = torch.optim.AdamW(model.parameters())
    found = run_pair(
        ZipSampler(short(), long(), merge_batches=False),
        model=model,
        optimizer=optimizer,
        max_batch_size=4,
        ranks=ranks,
    )
    return [profile.encode() for profile in found], len(model.module.seen)


def test_ranks_share_the_profiles_of_samplers_that_share_a_step() -> None:
    (first, num_first), (second, num_second) = results(run_ranks(_zipped, "shard"))
    assert first == second
    assert num_first == num_second == 0  # trials leave no trace, on the rank that measured neither


def test_lock_step_is_refused_on_every_rank() -> None:
    for kind, text in run_ranks(_zipped, "lockstep").values():
        assert kind == "error"
        assert "samplers whose batches meet in one step can't be calibrated where all ranks must run every" in text
