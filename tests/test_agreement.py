"""Ranks whose sizes differ end with an error when an epoch starts; ranks whose sizes don't, never do."""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import re
import time
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lhotse.dataset.iterable_dataset import IterableDatasetWrapper
from processes import results, run_ranks
from sampler_corpora import ids, make_cuts
from torch.utils.data import DataLoader

from lhotse_oomfit import CalibratedBucketingSampler
from lhotse_oomfit.agreement import Agreement, new_agreement
from lhotse_oomfit.errors import RanksDisagreeError

pytestmark = pytest.mark.timeout(180)

BINS = [5.0, 10.0, 20.0, 30.0]
CUTS = make_cuts(200)


def sampler_with(sizes: Any, *, calibrated: bool = True, **options: Any) -> CalibratedBucketingSampler:
    """A sampler whose sizes hold, as after a calibration."""
    defaults: dict[str, Any] = {"duration_bins": BINS, "buffer_size": 100, "shuffle": True}
    sampler = CalibratedBucketingSampler(CUTS, bucket_batch_size="auto", **(defaults | options))
    sampler.apply(sizes)
    if calibrated:
        sampler.agreement = new_agreement()
    return sampler


def _refused(rank: int) -> dict[str, str]:
    """What each rank is told in each case; the second comes late."""
    return {what: _told(rank, what) for what in ("sizes", "bins", "loaded state", "place")}


def _told(rank: int, what: str) -> str:
    sizes = [8, 4, 2, 1] if what != "sizes" or rank == 0 else [8, 4, 2, 2]
    bins = BINS if what != "bins" or rank == 0 else [5.0, 10.0, 20.0, 40.0]
    sampler = sampler_with(sizes, duration_bins=bins, rank=rank, world_size=2)
    if what in ("loaded state", "place"):
        earlier_sizes = [9, 4, 2, 1] if rank == 0 and what == "loaded state" else [8, 4, 2, 1]
        earlier = iter(sampler_with(earlier_sizes, calibrated=False, rank=rank, world_size=2))
        for _ in range(1 + rank if what == "place" else 1):
            next(earlier)
        sampler.load_state_dict(earlier.state_dict())
    if rank > 0:
        time.sleep(1.0)
    try:
        iter(sampler)
    except RanksDisagreeError as error:
        return str(error)
    finally:
        _leave()
    return ""


def _leave() -> None:
    """Stay until all have said what they found: the first rank serves the store."""
    dist.barrier()


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    return results(run_ranks(_refused))


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("sizes", r"bucket_batch_size \[8, 4, 2, 1\]", r"bucket_batch_size \[8, 4, 2, 2\]"),
        ("bins", r"bins \[\[5.0, 10.0, 20.0, 30.0\], .*\]", r"bins \[\[5.0, 10.0, 20.0, 40.0\], .*\]"),
        ("loaded state", r"loaded schedule of sizes .*9, 4, 2, 1.*", r"loaded schedule of sizes .*8, 4, 2, 1.*"),
        ("place", r"loaded schedule of sizes .* for 1 batches", r"loaded schedule of sizes .* for 2 batches"),
    ],
)
def test_ranks_that_would_train_out_of_step_are_told_with_both_digests(
    told: list[dict[str, str]], what: str, first: str, second: str
) -> None:
    assert told[0][what] == ""  # it came first, and didn't wait
    digest = r"\(digest [0-9a-f]{8}\)"
    message = (
        rf"all ranks must have the same batch sizes when epoch 0 starts, but rank 0 has {first} {digest} and rank 1 "
        rf"has {second} {digest}; give all ranks the same list, profile or checkpoint"
    )
    assert re.match(message, told[1][what]), told[1][what]


def _agree(rank: int) -> list[int]:
    sampler = sampler_with([8, 4, 2, 1], rank=rank, world_size=2)
    other = sampler_with([3, 3, 3, 3], rank=rank, world_size=2)  # another sampler, with sizes of its own
    lengths = []
    if rank == 0:
        next(iter(sampler))  # a look at the first batch, by one rank only
    sampler.apply([8, 4, 2, 2])
    other.apply([2, 2, 2, 2])
    for epoch in range(2):
        sampler.set_epoch(epoch)
        lengths += [len(list(sampler)), len(list(sampler)), len(list(other))]
        if rank == 1:
            next(iter(sampler))
    sampler.apply([4, 4, 2, 2])  # in between
    sampler.set_epoch(2)
    if rank == 0:
        next(iter(sampler))
    state = sampler.state_dict_at(0)
    sampler.load_state_dict(state)
    lengths.append(len(list(sampler)))
    lengths.append(len(list(sampler)))
    sampler.apply([5, 5, 2, 2])  # as a second calibration does
    sampler.agreement = new_agreement()
    lengths.append(len(list(sampler)))
    _leave()
    return lengths


def test_nothing_that_all_ranks_do_and_no_look_at_a_first_batch_is_an_alarm() -> None:
    first, second = results(run_ranks(_agree))
    assert first == second


class Count(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __getitem__(self, cuts: Any) -> int:
        return len(cuts)


def _in_workers(rank: int) -> int:
    """Only the main process compares: forked workers would talk over its connection to the store."""
    sampler = sampler_with([8, 4, 2, 1] if rank == 0 else [8, 4, 2, 2])
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    num = len(list(DataLoader(IterableDatasetWrapper(Count(), sampler), batch_size=None, num_workers=1)))
    _leave()
    return num


def test_workers_do_not_compare() -> None:
    assert all(num > 1 for num in results(run_ranks(_in_workers)))


def _without_a_store(rank: int) -> list[str]:
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger("lhotse_oomfit.agreement").addHandler(Handler())
    sampler = sampler_with([8, 4, 2, 1] if rank == 0 else [8, 4, 2, 2])

    class Broken:
        def compare_set(self, *args: Any) -> bytes:
            raise RuntimeError("not implemented\nby this store")

    real = dist.distributed_c10d._get_default_store
    dist.distributed_c10d._get_default_store = lambda: Broken()
    try:
        iter(sampler)
    finally:
        dist.distributed_c10d._get_default_store = real
    return records


def test_a_store_that_cannot_compare_ends_no_training() -> None:
    for said in results(run_ranks(_without_a_store)):
        assert said == ["the ranks' batch sizes couldn't be compared: not implemented"]


def test_without_other_ranks_there_is_nothing_to_agree_on() -> None:
    assert new_agreement() is None
    Agreement("1").check("0", "now", {"sizes": "1"})


def test_copies_and_states_hold_no_agreement() -> None:
    sampler = sampler_with([8, 4, 2, 1])
    state = sampler.state_dict()
    sampler.agreement = Agreement("1")
    assert deepcopy(sampler).agreement is None
    assert pickle.loads(pickle.dumps(sampler)).agreement is None
    assert sampler.agreement is not None
    assert sampler.state_dict().keys() == state.keys()
    assert ids(deepcopy(sampler)) == ids(sampler)
