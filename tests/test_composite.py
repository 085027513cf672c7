"""Several samplers at once: by turns, and with one batch of each in every step; under the CPU memory limit."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lhotse import CutSet
from lhotse.dataset.iterable_dataset import IterableDatasetWrapper
from lhotse.dataset.sampling import SimpleCutSampler
from lhotse.dataset.sampling.round_robin import RoundRobinSampler
from lhotse.dataset.sampling.zip import ZipSampler
from tiny_asr import TinyDataset, TinyModel, fingerprint_of_state, tiny_cut, tiny_cuts, tiny_sampler, training_step
from torch.utils.data import DataLoader

from lhotse_oomfit import CalibratedBucketingSampler, Profile, calibrate
from lhotse_oomfit.errors import BucketDoesNotFitError, InvalidArgumentError, WorstCaseError
from lhotse_oomfit.memory import CpuMemory

LIMIT = 12 << 20


@pytest.fixture(autouse=True, scope="module")
def _what_exists_is_no_garbage() -> Iterator[None]:
    """Trials collect garbage; looking through all of torch each time would take much of this file's time."""
    torch.optim.AdamW(TinyModel().parameters())  # imports most of it
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class PairDataset(TinyDataset):
    """A batch of each of two sets of cuts."""

    def __getitem__(self, cuts: Any) -> Any:
        return [super(PairDataset, self).__getitem__(each) for each in cuts]


def pair_step(model: Any, batch: Any) -> torch.Tensor:
    return sum(model.loss(each) for each in batch)


def short() -> CalibratedBucketingSampler:
    return tiny_sampler(tiny_cuts(40, longest=2.0), duration_bins=[0.7, 1.3, 2.0])


def long() -> CalibratedBucketingSampler:
    return tiny_sampler(tiny_cuts(30), duration_bins=[1.0, 2.0, 4.0], seed=1)


def run(sampler: Any, dataset: Any = None, *, model: TinyModel | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = model or TinyModel()
    arguments = {"training_step": training_step, "memory_limit": LIMIT, "cache": False, "progress": False, **options}
    optimizer = arguments.pop("optimizer", None) or torch.optim.AdamW(model.parameters())
    return calibrate(sampler, dataset or TinyDataset(), model=model, optimizer=optimizer, **arguments)


def run_pair(sampler: Any, **options: Any) -> Any:
    return run(sampler, PairDataset(), training_step=pair_step, **options)


def cut_at(edge: float, index: int = 0) -> Any:
    return tiny_cut(0, edge, int(12 * edge)).with_id(f"{index}")


def cuts_at(edge: float, size: int) -> CutSet:
    return CutSet.from_cuts([cut_at(edge, index) for index in range(size)])


class Bench:
    """Steps of the tiny training, with what they take."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = TinyModel()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        state = [v for s in self.optimizer.state.values() for v in s.values()]
        self.resident = [*self.model.parameters(), *self.model.buffers(), *state]
        self.resident_bytes = sum(t.untyped_storage().nbytes() for t in self.resident)

    def peak(self, loss: Any) -> int:
        memory = CpuMemory(limit_bytes=1 << 40, resident=lambda: self.resident)
        with memory.measure() as usage:
            loss(self.model).backward()
        self.optimizer.zero_grad()
        return usage().allocated_bytes


# By turns


def test_samplers_that_take_turns_are_each_calibrated_as_if_alone() -> None:
    pair = RoundRobinSampler(short(), long())
    found = run(pair)
    assert [type(profile) for profile in found] == [Profile, Profile]
    assert [profile.bucket_batch_size for profile in found] == [
        run(short()).bucket_batch_size,
        run(long()).bucket_batch_size,
    ]
    assert [sampler.profile for sampler in pair.samplers] == found
    sizes = [len(batch["features"]) for batch in DataLoader(TinyDataset(), sampler=pair, batch_size=None)]
    assert sum(sizes) == 70


def test_samplers_with_given_sizes_and_nested_ones_are_left_out_of_the_turns() -> None:
    fixed = tiny_sampler(bucket_batch_size=[4, 3, 2, 1])
    inner = RoundRobinSampler(fixed, long())
    found = run(RoundRobinSampler(short(), inner, SimpleCutSampler(tiny_cuts(5), max_cuts=2)))
    assert [profile.bins.as_lists() for profile in found] == [[0.7, 1.3, 2.0], [1.0, 2.0, 4.0]]
    assert fixed.bucket_batch_size == [4, 3, 2, 1]


def test_each_sampler_has_a_cache_entry_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = run(RoundRobinSampler(short(), long()), cache=tmp_path)
    assert len(list(tmp_path.glob("*.yaml"))) == 2
    with caplog.at_level(logging.INFO):
        assert run(RoundRobinSampler(short(), long()), cache=tmp_path) == found
        assert run(long(), cache=tmp_path) == found[1]
    assert caplog.text.count("0 trial steps") == 3


def test_one_file_cannot_hold_two_profiles(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="cache must be a directory where 2 samplers are calibrated"):
        run(RoundRobinSampler(short(), long()), cache=tmp_path / "one.yaml")
    assert len(run(RoundRobinSampler(short()), cache=tmp_path / "one.yaml")) == 1


@pytest.mark.parametrize("kind", [RoundRobinSampler, ZipSampler])
def test_without_a_sampler_to_calibrate_there_is_nothing_to_do(kind: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{kind.__name__} holds no CalibratedBucketingSampler with"):
        run(kind(tiny_sampler(bucket_batch_size=[4, 3, 2, 1])))


# Together, one CutSet of each


def check_every_combination(sizes: Any, make_loss: Any) -> float:
    """No combination exceeds the budget; returns the share of the room that the heaviest one uses."""
    bench, budget_bytes, edges, peaks = Bench(), int(0.9 * LIMIT), [[0.7, 1.3, 2.0], [1.0, 2.0, 4.0]], {}
    for combination in itertools.product(*(range(len(each)) for each in edges)):
        chosen = [(edges[i][k], sizes[i][k]) for i, k in enumerate(combination)]
        peaks[combination] = bench.peak(lambda model, chosen=chosen: make_loss(model, chosen))
    assert {c: p for c, p in peaks.items() if p > budget_bytes} == {}
    return (max(peaks.values()) - bench.resident_bytes) / (budget_bytes - bench.resident_bytes)


def pair_loss(model: Any, chosen: Any) -> torch.Tensor:
    return pair_step(model, PairDataset()[[cuts_at(*each) for each in chosen]])


def test_no_combination_of_buckets_exceeds_the_budget_and_the_heaviest_uses_most_of_it() -> None:
    sampler = ZipSampler(short(), long(), merge_batches=False)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    before = fingerprint_of_state(model, optimizer)
    found = run_pair(sampler, model=model, optimizer=optimizer)
    assert fingerprint_of_state(model, optimizer) == before
    assert [member.profile for member in sampler.samplers] == found
    sizes = [profile.bucket_batch_size for profile in found]
    assert check_every_combination(sizes, pair_loss) > 0.85
    assert all(0.8 < (profile.share(bucket) or 0) <= 1 for profile in found for bucket in profile.buckets)
    assert all("tuple, number" in profile.fingerprint.fields["beside"] for profile in found)
    batches = list(DataLoader(PairDataset(), sampler=sampler, batch_size=None))
    assert max(len(batch[1]["features"]) for batch in batches) <= max(sizes[1])


def test_sizes_found_together_are_loaded_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def zipped() -> ZipSampler:
        return ZipSampler(short(), long(), merge_batches=False)

    options = {"cache": tmp_path, "max_batch_size": 3}
    found = run_pair(zipped(), **options)
    with caplog.at_level(logging.INFO):
        assert run_pair(zipped(), **options) == found
        assert caplog.text.count(": 0 trial steps") == 2
        assert run_pair(zipped(), **options, verify_on_load=True) == found
        assert caplog.text.count(": 1 trial steps") == 2
        next(tmp_path.glob("*.yaml")).unlink()
        assert [p.bucket_batch_size for p in run_pair(zipped(), **options)] == [[3, 3, 3], [3, 3, 3]]
    assert caplog.text.count("calibrated 3 buckets") == 2


def test_what_samplers_with_given_sizes_take_is_set_aside() -> None:
    fixed = tiny_sampler(tiny_cuts(60), bucket_batch_size=[40, 20, 8], duration_bins=[1.0, 2.0, 4.0])
    (profile,) = run_pair(ZipSampler(short(), fixed, merge_batches=False))
    assert fixed.bucket_batch_size == [40, 20, 8]
    assert check_every_combination([profile.bucket_batch_size, [40, 20, 8]], pair_loss) > 0.85


SEEN: set[tuple[str, int]] = set()


def outer(pair: Any) -> Any:
    SEEN.add(("outer", len(pair)))
    return pair


def inner(cuts: CutSet) -> CutSet:
    SEEN.add(("inner", len(cuts)))
    return cuts


def test_transforms_of_the_samplers_and_of_the_zip_are_applied() -> None:
    SEEN.clear()
    sampler = ZipSampler(short(), long(), merge_batches=False)
    sampler.samplers[1].map(inner)
    sampler.map(outer)
    found = run_pair(sampler, max_batch_size=4)
    assert {("outer", 2), ("inner", 2), ("inner", 4)} <= SEEN
    assert "code.ZipSampler map 0" in found[0].fingerprint.fields


def test_a_step_without_room_for_two_examples_of_each_is_measured_with_one() -> None:
    sampler = ZipSampler(long(), long(), merge_batches=False)
    limit_bytes = int((Bench().peak(lambda m: pair_loss(m, [(4.0, 1), (4.0, 1)])) + 20_000) / 0.9)
    found = run_pair(sampler, memory_limit=limit_bytes)
    assert [profile.bucket_batch_size[-1] for profile in found] == [1, 1]
    with pytest.raises(BucketDoesNotFitError, match="one example of each sampler's longest bucket"):
        run_pair(ZipSampler(long(), long(), merge_batches=False), memory_limit=int(0.9 * limit_bytes))


def attending_loss(model: Any, batch: Any) -> torch.Tensor:
    """Every example of one batch is held against every example of the other: more than the sum of both."""
    one, other = (model(each["features"]).mean(1).sum(-1) for each in batch)
    pairs = (one[:, None, None] * other[None, :, None]).expand(-1, -1, 600).exp()
    return pair_step(model, batch) + pairs.mean()


def test_where_full_batches_take_more_together_than_apart_all_sizes_shrink(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: Any, chosen: Any) -> torch.Tensor:
        return attending_loss(model, PairDataset()[[cuts_at(*each) for each in chosen]])

    with caplog.at_level(logging.INFO):
        found = run(ZipSampler(short(), long(), merge_batches=False), PairDataset(), training_step=attending_loss)
    assert "full batches together" in caplog.text
    assert "all sizes shrink by" in caplog.text
    sizes = [profile.bucket_batch_size for profile in found]
    assert check_every_combination(sizes, loss) > 0.7
    for each in sizes:
        assert each == sorted(each, reverse=True)


# Together, merged


def test_merged_batches_stay_inside_the_budget_and_a_warning_says_what_they_cost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loss(model: Any, chosen: Any) -> torch.Tensor:
        cuts = [cut_at(edge, 1000 * i + j) for i, (edge, size) in enumerate(chosen) for j in range(size)]
        return model.loss(TinyDataset()[CutSet.from_cuts(cuts)])

    found = run(ZipSampler(short(), long()))
    sizes = [profile.bucket_batch_size for profile in found]
    assert check_every_combination(sizes, loss) > 0.85
    assert len(set(sizes[0])) == 1  # all are padded to the other sampler's longest bucket
    assert sizes[1][0] == sizes[1][1] > sizes[1][2]
    assert [bucket.input_len for bucket in found[0].buckets] == [0.7, 1.3, 2.0]
    assert caplog.text.count("with ZipSampler(merge_batches=False) the dataset gets one CutSet of each") == 1


def test_make_batch_can_make_merged_batches_only() -> None:
    asked: list[tuple[int, float, int]] = []

    def make_batch(*, batch_size: int, input_len: float, output_len: int) -> Any:
        asked.append((batch_size, input_len, output_len))
        return TinyDataset()[cuts_at(input_len, batch_size)]

    run(ZipSampler(short(), long()), make_batch=make_batch, max_batch_size=3)
    assert (5, 4.0, 48) in asked  # three beside two
    assert (6, 4.0, 48) in asked
    with pytest.raises(InvalidArgumentError, match="make_batch must be left out with a ZipSampler"):
        run_pair(ZipSampler(short(), long(), merge_batches=False), make_batch=make_batch)


# What is refused


def test_samplers_of_unknown_size_cannot_share_a_step() -> None:
    for other, name in (
        (SimpleCutSampler(tiny_cuts(5), max_cuts=2), "SimpleCutSampler"),
        (CalibratedBucketingSampler(tiny_cuts(5), max_cuts=2, num_buckets=2), "without bucket_batch_size"),
        (RoundRobinSampler(long()), "RoundRobinSampler"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"must all be CalibratedBucketingSamplers.*{name}"):
            run_pair(ZipSampler(short(), other, merge_batches=False))


def test_a_dataset_that_takes_no_tuples_is_told_of_merging() -> None:
    with pytest.raises(WorstCaseError, match=r"must collate a tuple of CutSets.*merge_batches=True"):
        run(ZipSampler(short(), long(), merge_batches=False))


# In workers


class Lengths(TinyDataset):
    def __getitem__(self, cuts: CutSet) -> Any:
        return {**super().__getitem__(cuts), "num": len(cuts)}


def test_copies_in_spawned_persistent_workers_have_the_sizes_that_were_found() -> None:
    sampler = RoundRobinSampler(short(), long())
    wrapper = IterableDatasetWrapper(Lengths(), sampler)
    loader: DataLoader[Any] = DataLoader(
        wrapper, batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context="spawn"
    )
    found = run(sampler, wrapper, max_batch_size=5)
    assert {tuple(profile.bucket_batch_size) for profile in found} == {(5, 5, 5)}
    for epoch in range(2):
        wrapper.set_epoch(epoch)
        sizes = [batch["num"] for batch in loader]
        assert sum(sizes) == 70
        assert max(sizes) == 5
