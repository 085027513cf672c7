"""Who measures in a job of several ranks, and what happens where the ranks differ or the model asks for its peers."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from hypothesis import given
from hypothesis import strategies as st
from processes import results, run_apart, run_ranks
from test_lockstep import HiddenMeeting, calibrated, loss_step, made
from tiny_asr import TinyModel
from torch.nn.parallel import DistributedDataParallel

from lhotse_oomfit.calibration import MeasuredBucket, Measurement
from lhotse_oomfit.errors import UnsupportedStrategyError
from lhotse_oomfit.ranks import current_ranks
from lhotse_oomfit.search import BucketShape
from lhotse_oomfit.solitude import alone
from lhotse_oomfit.teamwork import decode, encode, merge_each, merge_shares, share_out

pytestmark = pytest.mark.timeout(240)


def _counted(rank: int, options: dict[str, Any], limits: tuple[str, ...]) -> tuple[list[int], int, int]:
    steps = 0

    def step(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return loss_step(module, batch)

    profile = calibrated(made("ddp"), training_step=step, memory_limit=limits[rank % len(limits)], **options)
    return profile.bucket_batch_size, steps, profile.num_trials


EIGHT = {"sampler": {"duration_bins": [0.5 * k for k in range(1, 9)]}}


def test_shares_of_the_buckets_are_measured_at_once_and_give_the_sizes_of_one_rank():
    together = results(run_ranks(_counted, {"ranks": "shard", **EIGHT}, ("24MiB",), timeout_s=100))
    alone_ = results(run_ranks(_counted, {**EIGHT}, ("24MiB",), timeout_s=100))
    assert together[0][0] == together[1][0]
    assert all(steps >= 4 for _, steps, _ in together)
    assert sum(steps for _, steps, _ in together) == together[0][2]
    assert [steps > 0 for _, steps, _ in alone_] == [True, False]
    for shared, single in zip(together[0][0], alone_[0][0], strict=True):
        assert abs(shared - single) <= max(1, 0.03 * single)


@pytest.mark.parametrize("ranks", ["rank0", "shard", "each"])
def test_where_one_rank_has_half_the_memory_the_smaller_counts(ranks: str):
    unequal = results(run_ranks(_counted, {"ranks": ranks}, ("24MiB", "12MiB"), timeout_s=100))
    small = results(run_ranks(_counted, {}, ("12MiB",), timeout_s=100))
    assert unequal[0][0] == unequal[1][0]
    for size, expected in zip(unequal[0][0], small[0][0], strict=True):
        assert abs(size - expected) <= max(1, 0.03 * expected)
    # Unequal cards can't share buckets out; each by itself can.
    assert [steps > 0 for _, steps, _ in unequal] == [True, ranks == "each"]


def _everyone(rank: int) -> tuple[list[int], int]:
    sizes, steps, _ = _counted(rank, {"ranks": "each"}, ("24MiB",))
    return sizes, steps


def test_each_rank_measures_everything_and_the_smallest_sizes_count():
    first, second = results(run_ranks(_everyone, timeout_s=100))
    assert first[0] == second[0]
    assert first[1] > 4
    assert second[1] > 4


# What models ask of their peers


def _hidden(rank: int, options: dict[str, Any]) -> list[int]:
    torch.manual_seed(0)
    return calibrated(HiddenMeeting(), **options).bucket_batch_size


def test_a_collective_over_a_group_that_nobody_saw_is_an_error_that_leads_to_lockstep():
    found = run_ranks(_hidden, {}, timeout_s=60)
    for _, text in found.values():
        assert "calls allreduce over a process group of 2 ranks (experts), in a trial that this rank runs alone" in text
        assert "Pass ranks='lockstep'" in text
    first, second = results(run_ranks(_hidden, {"ranks": "lockstep"}, timeout_s=100))
    assert first == second


def _raw(rank: int, kind: str) -> str:
    group = dist.new_group([0, 1], group_desc="experts")

    def meet() -> Any:
        if kind == "operator":
            return torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group.group_name)
        if kind == "functional":
            return functional_collectives.all_reduce(torch.ones(2), "sum", group)
        whole, part = torch.ones(4), torch.ones(2)
        if kind == "all-gather":
            return dist.all_gather_into_tensor(whole, part, group=group)
        return dist.reduce_scatter_tensor(part, whole, group=group)

    def work() -> str:
        with pytest.raises(UnsupportedStrategyError, match="ranks='lockstep'") as caught, alone():
            meet()
        return str(caught.value)

    told = current_ranks(heartbeat_timeout_s=20).first(work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        meet()  # meets the other rank again
    return told


@pytest.mark.parametrize("kind", ["operator", "functional", "all-gather", "reduce-scatter"])
def test_no_way_to_call_a_collective_in_a_trial_of_one_rank_hangs(kind: str):
    first, second = results(run_ranks(_raw, kind, timeout_s=60))
    assert first == second


class Synchronised(TinyModel):
    """Averages over all ranks behind the gate that torch's SyncBatchNorm has, which doesn't run on a CPU."""

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super().loss(batch)
        if dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
            if dist.get_world_size(group) > 1:
                mean = loss.detach().clone()
                dist.all_reduce(mean, group=group)
                self.means.append(float(mean))
        return loss

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []


def _synchronised(rank: int) -> tuple[list[int], int, list[float]]:
    torch.manual_seed(0)
    model = Synchronised()
    sizes = calibrated(DistributedDataParallel(model)).bucket_batch_size
    during = len(model.means)
    model.eval()
    batch = {
        "features": torch.ones(1, 40, 16),
        "feature_lens": torch.tensor([40]),
        "tokens": torch.tensor([[1 + rank]]),
        "token_lens": torch.tensor([1]),
    }
    model.loss(batch)
    return sizes, during, model.means


def test_batch_statistics_of_all_ranks_are_those_of_one_in_a_trial_and_of_all_in_training():
    first, second = results(run_ranks(_synchronised, timeout_s=100))
    assert first[0] == second[0]
    assert first[1] == second[1] == 0
    assert first[2] == second[2]
    assert len(first[2]) == 1


class CompiledWorld(torch.nn.Module):
    """What torch.compile traces here depends on how many ranks there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_world_size() > 1:
            return x + 100
        return x + 1


def _compiled(rank: int) -> tuple[float, float, float]:
    model = torch.compile(CompiledWorld(), backend="eager")
    x = torch.zeros(1)
    before = model(x).item()

    def work() -> str:
        with alone():
            return str(model(x).item())

    told = current_ranks().first(work)
    return before, float(told), model(x).item()


def test_compiled_code_that_depends_on_the_group_is_traced_anew_after_a_calibration():
    assert results(run_ranks(_compiled, timeout_s=100)) == [(100.0, 1.0, 100.0)] * 2


# Faults


def _dies(rank: int, ranks: str) -> list[int]:
    trials = 0

    def step(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal trials
        trials += 1
        if rank == 0 and trials == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_step(module, batch)

    return calibrated(made("ddp"), training_step=step, ranks=ranks).bucket_batch_size


@pytest.mark.parametrize("ranks", ["rank0", "shard", "each", "lockstep"])
def test_the_first_rank_dying_in_its_third_trial_ends_the_others(tmp_path: Path, ranks: str):
    said, codes = run_apart("test_who_measures:_dies", ranks, folder=tmp_path, timeout_s=60)
    assert codes[0] == -signal.SIGKILL
    assert codes[1]
    assert "RankFailedError" in said[1] or "rank 1 ends: rank 0 failed" in said[1]


def _runs_out(rank: int, ranks: str) -> list[int]:
    """The last rank runs out of memory in each trial of over 30 examples."""

    def step(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if rank == 1 and len(batch["features"]) > 30:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss_step(module, batch)

    return calibrated(made("ddp"), training_step=step, ranks=ranks).bucket_batch_size


def test_a_rank_that_runs_out_of_memory_by_itself_limits_the_sizes_of_all():
    first, second = results(run_ranks(_runs_out, "each", timeout_s=100))
    assert first == second
    assert max(first) == 30


# Sharing out, as such


@given(st.integers(1, 40), st.integers(1, 17))
def test_every_bucket_is_dealt_to_exactly_one_rank(num: int, world_size: int):
    shapes = [BucketShape(input_len=float(k % 7 + 1), output_len=k) for k in range(num)]
    shares = share_out(shapes, world_size)
    assert sorted(k for share in shares for k in share) == list(range(num))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def _measurement(sizes: list[int]) -> Measurement:
    return Measurement(
        buckets=tuple(MeasuredBucket(size=size, peak_bytes=1000 * size, num_trials=2) for size in sizes),
        num_trials=2 * len(sizes),
        num_soak_steps=1,
        num_ooms=0,
        num_retries=3,
        search_s=1.5,
    )


@given(st.lists(st.integers(1, 500), min_size=1, max_size=12), st.integers(1, 5))
def test_shares_put_together_never_grow_with_length_and_none_exceeds_what_was_measured(sizes: list[int], world: int):
    shapes = [BucketShape(input_len=float(k + 1)) for k in range(len(sizes))]
    shares = share_out(shapes, world)
    texts = [encode(_measurement([sizes[k] for k in share]) if share else None) for share in shares]
    merged = merge_shares([decode(text) for text in texts], shares, shapes)
    found = [bucket.size for bucket in merged.buckets]
    assert found == sorted(found, reverse=True)
    assert all(size <= measured for size, measured in zip(found, sizes, strict=True))
    assert merged.num_trials == 2 * len(sizes)


def test_the_smallest_of_all_measurements_counts_bucket_by_bucket():
    shapes = [BucketShape(input_len=1.0), BucketShape(input_len=2.0)]
    merged = merge_each([_measurement([50, 20]), _measurement([40, 30])], shapes)
    assert [bucket.size for bucket in merged.buckets] == [40, 20]
    assert merged.num_trials == 8
