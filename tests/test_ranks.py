"""Ranks as real processes over gloo: one measures, the others poll, whatever happens to the first."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext, suppress
from datetime import timedelta
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

from lhotse_oomfit import calibrate, solitude
from lhotse_oomfit.errors import RankFailedError
from lhotse_oomfit.ranks import SingleRank, StoreRanks, current_ranks
from lhotse_oomfit.solitude import alone, unbound

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


def run_threads(num, work, **timeouts):
    """``work(ranks)`` for each of so many ranks, threads over one store; what each gave or raised."""
    store, said = dist.HashStore(), {}

    def run(rank):
        ranks = StoreRanks(store, rank=rank, world_size=num, **{"heartbeat_timeout_s": 4.0, **timeouts})
        try:
            said[rank] = work(ranks)
        except (RankFailedError, ValueError) as error:
            said[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return said


def _raises_on(culprit, ranks, text="no luck"):
    if ranks.rank == culprit:
        raise ValueError(text)
    return ""


@pytest.mark.parametrize(("call", "culprit"), [("first", 0), ("gather", 0), ("gather", 1), ("gather", 2)])
def test_an_error_of_any_rank_reaches_all_others_with_its_text(call, culprit):
    said = run_threads(3, lambda ranks: getattr(ranks, call)(lambda: _raises_on(culprit, ranks)))
    assert str(said[culprit]) == "no luck"
    for rank in {0, 1, 2} - {culprit}:
        assert str(said[rank]) == f"rank {culprit} failed while rank {rank} waited for it: ValueError: no luck"
        assert (said[rank].rank, said[rank].cause) == (culprit, "ValueError: no luck")


def test_a_failure_is_noticed_while_another_rank_is_still_at_work():
    def work(ranks):
        if ranks.rank == 1:
            for _ in range(100):  # its own trials, between which it looks
                time.sleep(0.1)
                ranks.check()
        return ranks.gather(lambda: _raises_on(2, ranks))

    begun = time.monotonic()
    said = run_threads(3, work)
    assert time.monotonic() - begun < 9
    assert all("rank 2 failed while rank" in str(said[rank]) for rank in (0, 1))


def test_a_rank_that_gives_up_waiting_ends_the_one_it_waited_for():
    def work(ranks):
        if ranks.rank == 0:
            return ranks.first(lambda: [time.sleep(0.1) or ranks.check() for _ in range(80)] and "")
        return ranks.first(lambda: "")

    said = run_threads(2, work, calibration_timeout_s=2.0)
    assert "calibration_timeout is 2 s" in str(said[1])
    assert "rank 1 failed while rank 0 waited for it: waited 2 s for rank 0 to calibrate" in str(said[0])


def test_a_rank_that_does_not_read_what_was_found_is_missed():
    store = dist.HashStore()
    ranks = StoreRanks(store, rank=0, world_size=2, heartbeat_timeout_s=1.0)
    with pytest.raises(RankFailedError, match=r"rank 1 did not read what rank 0 found within 1 s"):
        ranks.first(lambda: "")


def test_a_group_of_oneself_is_not_split_off_a_bound_group():
    """NCCL's split is a collective of all ranks of the parent; the group is bound where a device_id was given."""

    class Bound:
        bound_device_id = torch.device("cuda:0")

    group = Bound()
    with unbound(group):
        assert group.bound_device_id is None
    assert group.bound_device_id == torch.device("cuda:0")


def _bound(rank, unbinds):
    if not unbinds:
        solitude.unbound = lambda group: nullcontext()
    asked = []
    original = dist.distributed_c10d._get_split_source
    dist.distributed_c10d._get_split_source = lambda group: asked.append(group.bound_device_id) or original(group)
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cuda:0")
    with suppress(RuntimeError), alone():  # there is no such card, of which a split would make use
        pass
    assert world.bound_device_id == torch.device("cuda:0")
    world.bound_device_id = None
    return [str(device) for device in asked]


def test_alone_asks_for_no_split_of_a_group_that_is_bound_to_a_device():
    assert not any("cuda:0" in asked for asked in results(run_ranks(_bound, True)))
    assert all("cuda:0" in asked for asked in results(run_ranks(_bound, False)))  # which is what it prevents


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
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=10), dist.group.WORLD)
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
