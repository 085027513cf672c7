"""Ranks as real processes over gloo: one measures, the others poll, whatever happens to the first."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import results, run_ranks
from tiny_asr import (
    TinyDataset,
    TinyModel,
    fingerprint_of_state,
    tiny_cuts,
    tiny_optimizer,
    tiny_sampler,
    training_step,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lhotse_oomfit import calibrate
from lhotse_oomfit.ranks import SingleRank, StoreRanks, alone, current_ranks

pytestmark = pytest.mark.timeout(180)


def test_a_job_of_one_process_has_one_rank():
    ranks = current_ranks()
    assert isinstance(ranks, SingleRank)
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.first(lambda: "done") == "done"
    assert ranks.gather(lambda: "own") == ["own"]
    with alone():
        assert not dist.is_initialized()


def _share(rank):
    ranks = current_ranks()
    told = ranks.first(lambda: f"by rank {dist.get_rank()}")
    return told, ranks.gather(lambda: f"{10 - rank}"), ranks.first(lambda: "again")


def test_every_rank_gets_what_the_first_found_and_what_all_say():
    assert results(run_ranks(_share, world_size=3)) == [("by rank 0", ["10", "9", "8"], "again")] * 3


class CountingStore:
    """A store in this process that counts how often values are fetched."""

    def __init__(self) -> None:
        self.inner = dist.HashStore()
        self.num_gets = 0

    def get(self, key):
        self.num_gets += 1
        return self.inner.get(key)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_what_the_store_serves_grows_with_the_number_of_ranks_and_not_with_its_square():
    store, num = CountingStore(), 24
    told = {}

    def run(rank):
        told[rank] = StoreRanks(store, rank=rank, world_size=num).gather(lambda: str(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(told[rank] == [str(each) for each in range(num)] for rank in range(num))
    assert store.num_gets == 2 * (num - 1)


def _alone(rank):
    def work():
        with alone():
            value = torch.tensor([5.0])
            dist.all_reduce(value)
            dist.barrier()
            gathered = [None]
            dist.all_gather_object(gathered, rank)
            return f"{value.item()} {dist.get_world_size()} {dist.get_rank()} {gathered}"

    told = current_ranks().first(work)
    value = torch.tensor([float(rank + 1)])
    dist.all_reduce(value)
    return told, value.item(), dist.get_world_size()


def test_collectives_of_a_rank_alone_return_at_once_and_meet_all_ranks_again_afterwards():
    assert results(run_ranks(_alone)) == [("5.0 1 0 [0]", 3.0, 2)] * 2


def _fail(rank):
    current_ranks(heartbeat_timeout_s=10).first(lambda: str(1 / 0))


def test_an_error_on_the_first_rank_reaches_the_others_with_its_text():
    found = run_ranks(_fail)
    assert found[0][1].startswith("ZeroDivisionError: division by zero")
    assert (
        "RankFailedError: rank 0 failed while rank 1 waited for it: ZeroDivisionError: division by zero" in found[1][1]
    )


def _die(rank, how):
    def work():
        os.kill(os.getpid(), how)
        time.sleep(60)
        return ""

    current_ranks(heartbeat_timeout_s=3).first(work)


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=["killed", "terminated", "stopped"]
)
def test_a_first_rank_that_dies_or_stops_ends_the_others(how):
    found = run_ranks(_die, how, timeout_s=60, silent=(0,))
    assert "RankFailedError" in found[1][1]
    assert "lost the connection" in found[1][1] or "was silent for" in found[1][1]


def _too_long(rank):
    current_ranks(heartbeat_timeout_s=10, calibration_timeout_s=2).first(lambda: time.sleep(6) or "")


def test_waiting_has_an_end_although_the_heart_beats():
    found = run_ranks(_too_long)
    assert "calibration_timeout is 2 s" in found[1][1]


def _patient(rank):
    dist.destroy_process_group()
    from datetime import timedelta

    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    told = current_ranks().first(lambda: time.sleep(13) or "patience")
    value = torch.ones(1)
    dist.all_reduce(value)
    return told, value.item()


def test_a_wait_longer_than_the_groups_own_timeout_is_no_failure():
    assert results(run_ranks(_patient)) == [("patience", 2.0)] * 2


# Calibration under DDP


class Synchronising(TinyModel):
    """Asks all ranks for the longest input in every forward pass, as NeMo's ConformerEncoder does."""

    def forward(self, features):
        if dist.is_available() and dist.is_initialized():
            longest = torch.tensor([features.shape[1]])
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
            self.longest = int(longest)
        return super().forward(features)


def _calibrate(rank, cache, synchronising):
    torch.manual_seed(0)
    model = Synchronising() if synchronising else TinyModel()
    ddp = DistributedDataParallel(model, broadcast_buffers=True)
    optimizer, _ = tiny_optimizer(ddp)
    sampler = tiny_sampler(tiny_cuts(200))
    steps = []

    def step(module, batch):
        assert module is model, "the unwrapped module must be given"
        steps.append(len(batch["features"]))
        return training_step(module, batch)

    before = fingerprint_of_state(model)
    profile = calibrate(
        sampler,
        TinyDataset(),
        model=ddp,
        optimizer=optimizer,
        training_step=step,
        memory_limit="6MiB" if rank == 0 else "4MiB",
        cache=cache,
        progress=False,
        heartbeat_timeout=30,
    )
    assert fingerprint_of_state(model) == before
    ids, num = [], 0
    for batch in DataLoader(TinyDataset(), sampler=sampler, batch_size=None):
        optimizer.zero_grad()
        log_probs = ddp(batch["features"])
        log_probs.square().mean().backward()
        optimizer.step()
        num += 1
        ids.append(len(batch["features"]))
    return profile.encode(), len(steps), num, sum(ids), fingerprint_of_state(model)


@pytest.mark.parametrize("synchronising", [False, True], ids=["plain", "collective-forward"])
def test_two_ranks_agree_on_the_profile_and_train_in_step(tmp_path: Path, synchronising):
    first, second = results(run_ranks(_calibrate, tmp_path, synchronising, timeout_s=150))
    assert first[0] == second[0]
    assert first[1] > 0
    assert second[1] == 0  # only rank 0 ran trials
    assert first[2] == second[2]
    assert first[3] + second[3] == 200
    # BatchNorm's running statistics are each rank's own; what is trained is equal to the last bit.
    trained = [{k: v for k, v in each[4].items() if "norm.running" not in k} for each in (first, second)]
    assert trained[0] == trained[1]
    loaded = results(run_ranks(_calibrate, tmp_path, synchronising, timeout_s=150))
    assert [each[1] for each in loaded] == [0, 0]
    assert loaded[0][0] == first[0]


def _unfit(rank):
    ddp = DistributedDataParallel(TinyModel())
    optimizer, _ = tiny_optimizer(ddp)
    calibrate(
        tiny_sampler(),
        TinyDataset(),
        model=ddp,
        optimizer=optimizer,
        training_step=training_step,
        memory_limit="700KiB",
        cache=False,
        heartbeat_timeout=20,
    )


def test_a_bucket_that_does_not_fit_ends_all_ranks_with_the_reason():
    found = run_ranks(_unfit)
    assert all("a batch of one example exceeds the budget" in text for _, text in found.values())
