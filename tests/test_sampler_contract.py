"""What Lhotse's sampler promises, held to both classes, and nothing that depends on which numbers a generator draws.

The last section has one counterpart for each of Lhotse's own tests that do (see docs/sampler.md).
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from lhotse import CutSet
from lhotse.dataset import RoundRobinSampler, ZipSampler
from lhotse.dataset.sampling.base import TimeConstraint
from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler, FixedBucketBatchSizeConstraint
from lhotse.testing.dummies import DummyManifest
from sampler_corpora import flat, ids, make_cut, make_cuts

from lhotse_oomfit import CalibratedBucketingSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:You are using DynamicBucketingSampler with an eagerly read CutSet"),
    pytest.mark.filterwarnings("ignore:We have exceeded the max_duration constraint"),
    pytest.mark.filterwarnings("ignore:Your 'buffer_size' setting of"),
    pytest.mark.parametrize(
        "make", [DynamicBucketingSampler, CalibratedBucketingSampler], ids=["Lhotse's", "calibrated"]
    ),
]

Make = Callable[..., Any]
CUTS = make_cuts(400)


def test_every_cut_comes_once(make: Make) -> None:
    for shuffle in (False, True):
        assert sorted(flat(make(CUTS, max_duration=80.0, num_buckets=4, shuffle=shuffle))) == sorted(CUTS.ids)


def test_batches_are_cut_sets_of_similar_durations(make: Make) -> None:
    sampler = make(CUTS, max_duration=80.0, duration_bins=[5.0, 10.0, 20.0])
    for batch in sampler:
        assert isinstance(batch, CutSet)
        assert len({sum(cut.duration > edge for edge in (5.0, 10.0, 20.0)) for cut in batch}) == 1


def test_an_edge_belongs_to_the_bucket_below(make: Make) -> None:
    cuts = CutSet([make_cut(i, 5.0 if i % 2 else 5.1) for i in range(20)])
    for batch in make(cuts, max_cuts=5, duration_bins=[5.0]):
        assert len({cut.duration for cut in batch}) == 1


def test_max_cuts_limits_the_number_of_cuts(make: Make) -> None:
    sizes = [len(batch) for batch in make(CUTS, max_duration=500.0, max_cuts=6, num_buckets=4)]
    assert max(sizes) == 6
    assert sum(size < 6 for size in sizes) <= 4


def test_a_batch_is_as_large_as_the_limit_allows_unless_data_runs_out(make: Make) -> None:
    partial = 0
    for batch in make(CUTS, max_duration=80.0, quadratic_duration=20.0, num_buckets=4):
        constraint = TimeConstraint(max_duration=80.0, quadratic_duration=20.0)
        for number, cut in enumerate(batch):
            assert number == 0 or not constraint.close_to_exceeding()
            constraint.add(cut)
        partial += not constraint.close_to_exceeding()
    assert partial <= 4


def test_drop_last_leaves_partial_batches_out(make: Make) -> None:
    sampler = make(CUTS, max_cuts=7, num_buckets=4, drop_last=True)
    batches = list(sampler)
    assert {len(batch) for batch in batches} == {7}
    assert 400 - 7 * 4 < len(flat(batches)) <= 400


def test_too_little_data_for_one_batch_comes_as_one_or_is_dropped(make: Make) -> None:
    few = make_cuts(4)
    assert len(flat(make(few, max_duration=1000.0, duration_bins=[100.0]))) == 4
    assert list(make(few, max_duration=1000.0, duration_bins=[100.0], drop_last=True)) == []


def test_a_filter_leaves_cuts_out_and_filters_add_up(make: Make) -> None:
    sampler = make(CUTS, max_duration=80.0, num_buckets=4)
    sampler.filter(lambda cut: cut.duration > 4.0)
    sampler.filter(lambda cut: cut.duration < 9.0)
    assert sorted(flat(sampler)) == [cut.id for cut in CUTS if 4.0 < cut.duration < 9.0]
    assert sampler.diagnostics.kept_cuts + sampler.diagnostics.discarded_cuts == 400


def test_a_map_is_applied_to_every_batch(make: Make) -> None:
    sampler = make(CUTS, max_duration=80.0, num_buckets=4)
    sampler.map(lambda cuts: cuts.modify_ids(lambda name: name + "-seen"))
    assert all(name.endswith("-seen") for name in flat(sampler))


def test_another_epoch_has_another_order_and_the_same_one_the_same(make: Make) -> None:
    sampler = make(CUTS, max_duration=80.0, num_buckets=4, shuffle=True)
    first = ids(sampler)
    assert ids(sampler) == first
    sampler.set_epoch(1)
    second = ids(sampler)
    assert second != first
    assert sorted(name for batch in second for name in batch) == sorted(CUTS.ids)


def test_ranks_get_equally_many_batches_that_cover_the_data(make: Make) -> None:
    ranks = [
        list(make(CUTS, max_duration=80.0, num_buckets=4, shuffle=True, rank=rank, world_size=3)) for rank in range(3)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(name for batches in ranks for name in flat(batches)) == sorted(CUTS.ids)


def test_several_sources_come_as_tuples_of_matching_cuts(make: Make) -> None:
    for batch in make(CUTS, CUTS, CUTS, max_duration=80.0, num_buckets=4, shuffle=True):
        assert isinstance(batch, tuple)
        first, second, third = ([cut.id for cut in cuts] for cuts in batch)
        assert first == second == third


def test_cuts_say_where_they_were_sampled(make: Make) -> None:
    batch = next(iter(make(CUTS, max_duration=80.0, num_buckets=4, rank=1, world_size=2)))
    assert all(cut.dataloading_info == {"rank": 1, "world_size": 2, "worker_id": None} for cut in batch)


def test_the_report_counts_cuts_and_batches(make: Make) -> None:
    sampler = make(CUTS, max_cuts=10, duration_bins=[1000.0])
    list(sampler)
    assert "cuts kept 400/400 (100.00%)" in sampler.get_report()
    assert "batches kept 40/40 (100.00%)" in sampler.get_report()


def test_a_sampler_survives_pickling(make: Make) -> None:
    sampler = make(CUTS, max_duration=80.0, num_buckets=4, shuffle=True)
    again = pickle.loads(pickle.dumps(sampler))
    assert again.state_dict() == sampler.state_dict()
    assert ids(again) == ids(sampler)


def test_a_state_is_continued_from_the_next_batch(make: Make) -> None:
    sampler = make(CUTS, max_duration=80.0, num_buckets=4, shuffle=True)
    sampler.set_epoch(1)
    whole = ids(sampler)
    iterator = iter(sampler)
    for _ in range(6):
        next(iterator)
    resumed = make(CUTS, max_duration=80.0, num_buckets=4, shuffle=True)
    resumed.load_state_dict(sampler.state_dict())
    assert ids(resumed) == whole[6:]


@pytest.mark.parametrize("compound", [ZipSampler, RoundRobinSampler], ids=["zip", "round robin"])
def test_compound_samplers_take_it_as_a_part(make: Make, compound: Any) -> None:
    other = make_cuts(400, seed=1).modify_ids(lambda name: "other-" + name)
    sampler = compound(make(CUTS, max_cuts=10, num_buckets=2), make(other, max_cuts=10, num_buckets=2))
    names = flat(sampler)
    assert len(names) == len(set(names))
    assert {name.startswith("other-") for name in names} == {False, True}


def test_estimated_bins_divide_the_total_duration(make: Make) -> None:
    sampler = make(CUTS, max_duration=80.0, num_buckets=4)
    assert len(sampler.duration_bins) == 3
    assert list(sampler.duration_bins) == sorted(sampler.duration_bins)


# Counterparts of Lhotse's tests that pin draws


def dummy_cuts() -> CutSet:
    cuts = DummyManifest(CutSet, begin_id=0, end_id=10)
    for number, cut in enumerate(cuts):
        cut.duration = 1 if number < 5 else 2
    return cuts


def test_a_bucket_that_is_always_empty_does_no_harm(make: Make) -> None:
    """For ``test_dynamic_bucketing_sampler_precomputed_duration_bins``."""
    cuts = dummy_cuts()
    sampler = make(cuts, max_duration=5, num_buckets=2, duration_bins=[0.5], seed=0, shuffle=True)
    next(iter(sampler))
    batches = list(sampler)
    assert sorted(flat(batches)) == sorted(cuts.ids)
    assert 3 <= len(batches) <= 5
    for number, batch in enumerate(batches):
        constraint = TimeConstraint(max_duration=5)
        for cut in batch:
            assert not constraint.close_to_exceeding()
            constraint.add(cut)
        assert constraint.close_to_exceeding() or number == len(batches) - 1


def test_a_constraint_with_a_size_per_bucket_makes_batches_of_those_sizes(make: Make) -> None:
    """For ``test_dynamic_bucketing_sampler_fixed_batch_constraint``."""
    cuts = dummy_cuts()
    bins = [1.5, 2.5]
    constraint = FixedBucketBatchSizeConstraint(max_seq_len_buckets=bins, batch_sizes=[2, 1])
    batches = list(make(cuts, duration_bins=bins, constraint=constraint, seed=0, shuffle=True))
    assert sorted(flat(batches)) == sorted(cuts.ids)
    assert sorted((batch[0].duration, len(batch)) for batch in batches) == [(1, 1), (1, 2), (1, 2)] + [(2, 1)] * 5
    assert all(len({cut.duration for cut in batch}) == 1 for batch in batches)


@pytest.mark.parametrize("sync_buckets", [True, False])
def test_streams_with_other_seeds_share_shapes_only_with_sync_buckets(make: Make, sync_buckets: bool) -> None:
    """For ``test_dynamic_bucketing_sampler_sync_buckets_iterable_dataset_usage[False]``."""
    rng = random.Random(0)
    cuts = CutSet([make_cut(i, rng.choices([1.0, 10.0], weights=[0.9, 0.1])[0]) for i in range(3000)])

    def first_batches(seed: int) -> list[Any]:
        sampler = make(
            cuts,
            max_duration=5,
            duration_bins=[5.0],
            rank=0,
            world_size=1,
            drop_last=True,
            shuffle=True,
            seed=seed,
            sync_buckets=sync_buckets,
        )
        return list(islice(sampler, 100))

    one, other = first_batches(0), first_batches(1)
    same_shape = [len(a) == len(b) for a, b in zip(one, other, strict=True)]
    assert all(same_shape) if sync_buckets else not all(same_shape)
    # By chance alone a few cuts are in both.
    assert len(set(flat(one)) & set(flat(other))) < 0.3 * len(flat(one))
