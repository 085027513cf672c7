from __future__ import annotations

import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lhotse import CutSet
from lhotse.dataset import IterableDatasetWrapper
from lhotse.dataset.dataloading import make_worker_init_fn, resolve_seed
from sampler_corpora import flat, ids, make_cuts
from torch.utils.data import DataLoader, Dataset

from lhotse_oomfit import CalibratedBucketingSampler
from lhotse_oomfit.errors import NotCalibratedError, ResumeError

CUTS = make_cuts(300)


class Ids(Dataset[list[str]]):
    def __getitem__(self, cuts: CutSet) -> list[str]:
        return list(cuts.ids)


class WorkerAndIds(Dataset[Any]):
    def __getitem__(self, cuts: CutSet) -> tuple[int, list[str]]:
        return cuts[0].dataloading_info["worker_id"], list(cuts.ids)


def make(**options: Any) -> CalibratedBucketingSampler:
    defaults: dict[str, Any] = {
        "bucket_batch_size": [16, 8, 4, 2],
        "duration_bins": [5.0, 10.0, 20.0, 30.0],
        "buffer_size": 100,
        "shuffle": True,
        "rank": 0,
        "world_size": 1,
    }
    return CalibratedBucketingSampler(CUTS, **(defaults | options))


def map_style(sampler: Any, num_workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Ids(), sampler=sampler, batch_size=None, num_workers=num_workers, **options)


def iterable_style(sampler: Any, num_workers: int, **options: Any) -> DataLoader[Any]:
    dataset = IterableDatasetWrapper(WorkerAndIds(), sampler, reset_on_iter=True)
    return DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)


# Map-style


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_map_style_run_stopped_with_batches_prefetched_resumes_exactly(concurrent: bool) -> None:
    whole = ids(make(concurrent=concurrent))
    sampler = make(concurrent=concurrent)
    loader = map_style(sampler, 2)
    consumed = []
    for batch in loader:
        consumed.append(batch)
        if len(consumed) == 5:
            break
    assert sampler.num_batches_drawn > 5
    resumed = make(concurrent=concurrent)
    resumed.load_state_dict(sampler.state_dict_at(5))
    assert consumed + list(map_style(resumed, 2)) == whole


def test_a_break_and_a_new_loop_start_the_next_epoch_cleanly() -> None:
    sampler = make(concurrent=True)
    loader = map_style(sampler, 1, persistent_workers=True)
    for _ in loader:
        break
    sampler.set_epoch(1)
    expected = make()
    expected.set_epoch(1)
    assert sorted(name for batch in loader for name in batch) == sorted(flat(expected))
    assert list(loader) == ids(sampler)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's, of a loader half made
def test_an_auto_sampler_fails_in_the_main_process_before_workers_start() -> None:
    with pytest.raises(NotCalibratedError):
        iter(map_style(make(bucket_batch_size="auto"), 2))


def test_a_script_that_breaks_out_of_a_concurrent_loader_exits() -> None:
    program = """
import sys
sys.path.insert(0, sys.argv[1])
from test_sampler_loaders import make, map_style
for batch in map_style(make(concurrent=True), 0):
    break
print("done", flush=True)
"""
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (finished.returncode, finished.stdout) == (0, "done\n"), finished.stderr


# Iterable-style


@pytest.mark.parametrize(
    ("context", "concurrent"),
    [("fork", False), ("fork", True), pytest.param("spawn", True, marks=pytest.mark.slow)],
)
def test_an_iterable_style_run_stopped_with_batches_prefetched_resumes_exactly(context: str, concurrent: bool) -> None:
    whole = list(iterable_style(make(concurrent=concurrent), 2))
    assert [worker for worker, _ in whole[:4]] == [0, 1, 0, 1]
    sampler = make(concurrent=concurrent)
    consumed = []
    for batch in iterable_style(sampler, 2):
        consumed.append(batch)
        if len(consumed) == 7:
            break
    state = pickle.loads(pickle.dumps(sampler.state_dict_at(7, num_workers=2)))
    resumed = make(concurrent=concurrent)
    resumed.load_state_dict(state)
    assert resumed.num_batches_drawn == 7
    again = list(iterable_style(resumed, 2, multiprocessing_context=context))
    assert consumed + again == whole


def test_sizes_that_differ_after_an_iterable_style_resume_hold_for_what_is_left_and_are_saved_again() -> None:
    def stop_after(sampler: CalibratedBucketingSampler, num: int, *, before: int = 0) -> tuple[list[Any], Any]:
        batches = [batch for batch, _ in zip(iterable_style(sampler, 2), range(num), strict=False)]
        return batches, sampler.state_dict_at(before + num, num_workers=2)

    first, state = stop_after(make(), 7)
    second = make(bucket_batch_size=[2, 2, 2, 2])
    second.load_state_dict(state)
    middle, state = stop_after(second, 8, before=7)
    assert all(len(names) == 2 for _, names in middle)
    third = make(bucket_batch_size=[2, 2, 2, 2])
    third.load_state_dict(state)
    last = list(iterable_style(third, 2))
    for worker in (0, 1):
        drawn = [name for w, names in first + middle + last for name in names if w == worker]
        assert sorted(drawn) == sorted(CUTS.ids)


def test_another_number_of_workers_is_refused_with_both_numbers() -> None:
    state = make().state_dict_at(4, num_workers=2)
    resumed = make()
    resumed.load_state_dict(state)
    with pytest.raises(
        ResumeError, match="the state was sampled in 2 worker processes, now it is sampled in the main process"
    ):
        iter(resumed)
    state = make().state_dict_at(4, num_workers=2)
    lenient = make(on_resume="new_epoch")
    lenient.load_state_dict(state)
    assert ids(lenient) == ids(make())


def test_persistent_workers_follow_set_epoch_and_restart_after_a_break() -> None:
    loader = iterable_style(make(), 1, persistent_workers=True)
    assert isinstance(loader.dataset, IterableDatasetWrapper)

    def expected(epoch: int) -> list[list[str]]:
        sampler = make()
        sampler.set_epoch(epoch)
        return [list(names) for _, names in iterable_style(sampler, 1)]

    assert [names for _, names in loader] == expected(0)
    loader.dataset.set_epoch(1)
    assert [names for _, names in loader] == expected(1)
    loader.dataset.set_epoch(2)
    for _ in loader:
        break
    loader.dataset.set_epoch(3)
    assert [names for _, names in loader] == expected(3)


def test_persistent_workers_take_over_new_sizes_with_the_next_epoch() -> None:
    sampler = deepcopy(make())
    loader = iterable_style(sampler, 1, persistent_workers=True)
    assert max(len(names) for _, names in loader) > 1
    sampler.apply([1, 1, 1, 1])
    assert {len(names) for _, names in loader} == {1}


def test_the_loaders_own_way_of_counting_epochs_in_workers_still_works() -> None:
    dataset = IterableDatasetWrapper(WorkerAndIds(), make(), auto_increment_epoch=True)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    first, second = list(loader), list(loader)
    assert first != second
    assert sorted(name for _, names in second for name in names) == sorted(CUTS.ids)


def test_workers_of_equal_number_choose_the_same_buckets_on_ranks_with_other_data() -> None:
    def buckets(seed: int) -> list[int]:
        sampler = CalibratedBucketingSampler(
            make_cuts(2000, seed=seed),
            bucket_batch_size=[4, 4],
            duration_bins=[8.0, 30.0],
            rank=0,
            world_size=1,
            seed=seed,
            shuffle=True,
        )
        return [int(batch[0].duration > 8.0) for batch in sampler]

    pairs = list(zip(buckets(0), buckets(1), strict=False))[:300]
    assert sum(a == b for a, b in pairs) > 0.9 * len(pairs)


@pytest.mark.parametrize("seed", ["trng", "randomized"])
def test_such_seeds_differ_between_workers(seed: str) -> None:
    loader = iterable_style(make(seed=seed), 2, worker_init_fn=make_worker_init_fn(rank=0, world_size=1, seed=7))
    by_worker: dict[int, list[list[str]]] = {0: [], 1: []}
    for worker, names in loader:
        by_worker[worker].append(names)
    assert by_worker[0] != by_worker[1]
    assert all(sorted(name for names in b for name in names) == sorted(CUTS.ids) for b in by_worker.values())


def test_trng_in_workers_resumes_exactly_on_the_rank_that_saved() -> None:
    sampler = make(seed="trng")
    consumed = [batch for batch, _ in zip(iterable_style(sampler, 2), range(6), strict=False)]
    whole = list(iterable_style(sampler, 2))
    resumed = make(seed="trng")
    resumed.load_state_dict(sampler.state_dict_at(6, num_workers=2))
    assert consumed + list(iterable_style(resumed, 2)) == whole


class ByWorker:
    """A source of which each worker reads a part, as Shar's with ``split_for_dataloading``."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        seed = resolve_seed("randomized")
        cuts = list(CUTS)[info.id :: info.num_workers]
        random.Random(seed).shuffle(cuts)
        yield from cuts


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("num", [3, 4, 5])
def test_workers_take_each_others_parts_so_that_the_turns_go_on_where_they_stopped(num: int) -> None:
    def sampler() -> CalibratedBucketingSampler:
        return CalibratedBucketingSampler(
            CutSet(ByWorker()), bucket_batch_size=[4, 2], duration_bins=[10.0, 30.0], buffer_size=50, shuffle=True
        )

    def loader(sampler: Any) -> DataLoader[Any]:
        return iterable_style(
            sampler, 3, persistent_workers=True, worker_init_fn=make_worker_init_fn(rank=0, world_size=1)
        )

    first = loader(sampler())
    whole = list(first)
    first.dataset.set_epoch(1)  # type: ignore[attr-defined]
    second_epoch = list(first)
    stopped = sampler()
    consumed = [batch for batch, _ in zip(loader(stopped), range(num), strict=False)]
    resumed = sampler()
    resumed.load_state_dict(stopped.state_dict_at(num, num_workers=3))
    again = loader(resumed)
    assert consumed + list(again) == whole
    again.dataset.set_epoch(1)  # type: ignore[attr-defined]
    assert list(again) == second_epoch


@pytest.mark.parametrize("persistent", [False, True])
def test_the_epochs_after_a_resumed_one_are_whole_without_set_epoch(persistent: bool) -> None:
    whole = list(iterable_style(make(), 2))
    resumed = make()
    resumed.load_state_dict(make().state_dict_at(7, num_workers=2))
    loader = iterable_style(resumed, 2, persistent_workers=persistent)
    assert list(loader) == whole[7:]
    assert [list(loader), list(loader)] == [whole, whole]


def test_a_state_without_batches_can_be_continued_with_any_number_of_workers() -> None:
    sampler = make()
    list(sampler)
    sampler.set_epoch(1)
    resumed = make()
    resumed.load_state_dict(sampler.state_dict())
    assert len(list(iterable_style(resumed, 2))) == 2 * len(ids(sampler))


def test_sizes_applied_while_workers_iterate_are_not_taken_for_those_they_work_with() -> None:
    sampler = make()
    consumed = [batch for batch, _ in zip(iterable_style(sampler, 2), range(7), strict=False)]
    sampler.apply([2, 2, 2, 2])
    resumed = make(bucket_batch_size=[2, 2, 2, 2])
    resumed.load_state_dict(sampler.state_dict_at(7, num_workers=2))
    after = list(iterable_style(resumed, 2))
    assert all(len(names) <= 2 for _, names in after)
    for worker in (0, 1):
        drawn = [name for w, names in consumed + after for name in names if w == worker]
        assert sorted(drawn) == sorted(CUTS.ids)


def test_a_state_saved_after_workers_started_the_epoch_anew_counts_from_there() -> None:
    sampler = make(on_resume="new_epoch")
    sampler.load_state_dict(make().state_dict_at(4, num_workers=2))
    whole = list(iterable_style(make(), 1))
    consumed = [batch for batch, _ in zip(iterable_style(sampler, 1), range(6), strict=False)]
    for num in (5, 6):
        resumed = make()
        resumed.load_state_dict(sampler.state_dict_at(4 + num, num_workers=1))
        assert consumed[:num] + list(iterable_style(resumed, 1)) == whole


class Reshuffling:
    """Stands for Lhotse's stateful lazy sets, which shuffle differently each time."""

    def __init__(self) -> None:
        self.num_times_iterated = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_times_iterated += 1
        cuts = list(CUTS)
        random.Random(self.num_times_iterated).shuffle(cuts)
        yield from cuts


Reshuffling.__module__ = "lhotse.lazy"  # the walk through a source looks at Lhotse's classes only


@pytest.mark.parametrize("persistent", [False, True])
def test_a_source_that_reshuffles_itself_in_workers_is_put_back_to_where_their_epoch_began(persistent: bool) -> None:
    def sampler() -> CalibratedBucketingSampler:
        return CalibratedBucketingSampler(
            CutSet(Reshuffling()), bucket_batch_size=[4, 2], duration_bins=[10.0, 30.0], buffer_size=50, shuffle=True
        )

    first = sampler()
    loader = iterable_style(first, 1, persistent_workers=persistent)
    list(loader)
    first.set_epoch(1)
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
    state = first.state_dict_at(7, num_workers=1)
    expected = list(iterator)
    resumed = sampler()
    resumed.load_state_dict(state)
    assert list(iterable_style(resumed, 1, persistent_workers=persistent)) == expected


def test_a_state_of_another_epoch_than_the_workers_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    sampler = make()
    dataset = IterableDatasetWrapper(WorkerAndIds(), sampler, auto_increment_epoch=True)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    list(loader)
    next(iter(loader))
    sampler.state_dict_at(1, num_workers=1)
    assert "the state's epoch is 0, but the workers are in epoch 1: call set_epoch() in the main" in caplog.text


# Ranks that agree on a seed


def _draw_on_rank(rank: int, world_size: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    try:
        sampler = make(rank=rank, world_size=world_size, seed="trng", concurrent=True)
        results.put((rank, ids(sampler)))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_share_a_seed_from_the_system_through_the_process_group() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_draw_on_rank, args=(rank, 2, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    drawn = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(60)
    assert len(drawn[0]) == len(drawn[1])
    assert sorted(name for batches in drawn.values() for batch in batches for name in batch) == sorted(CUTS.ids)
