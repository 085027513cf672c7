from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lhotse import CutSet
from lhotse.dataset.sampling.base import TimeConstraint
from lhotse.dataset.sampling.dynamic_bucketing import FixedBucketBatchSizeConstraint
from sampler_corpora import flat, ids, make_cut, make_cuts
from synthetic_profiles import make_profile

from lhotse_oomfit import CalibratedBucketingSampler
from lhotse_oomfit.bins import Bins
from lhotse_oomfit.errors import (
    BufferTooSmallError,
    EmptySourceError,
    InvalidArgumentError,
    InvalidBinsError,
    MissingTokensError,
    NotCalibratedError,
    ProfileMismatchError,
)

BINS = [5.0, 10.0, 20.0, 30.0]
SIZES = [16, 8, 4, 2]


def fixed(cuts: Any, **options: Any) -> CalibratedBucketingSampler:
    defaults: dict[str, Any] = {"bucket_batch_size": SIZES, "duration_bins": BINS, "buffer_size": 200}
    return CalibratedBucketingSampler(cuts, **(defaults | options))


# Batches


@pytest.mark.parametrize("concurrent", [False, True], ids=["in line", "concurrent"])
@pytest.mark.parametrize("shuffle", [False, True], ids=["in order", "shuffled"])
def test_every_cut_comes_once_in_a_batch_of_its_bucket(concurrent: bool, shuffle: bool) -> None:
    cuts = make_cuts(1000)
    sampler = fixed(cuts, concurrent=concurrent, shuffle=shuffle)
    batches = list(sampler)
    assert sorted(flat(batches)) == sorted(cuts.ids)
    for batch in batches:
        (k,) = {sampler.bins.select(cut.duration) for cut in batch}
        assert len(batch) <= SIZES[k]
    assert sum(len(b) == SIZES[sampler.bins.select(b[0].duration)] for b in batches) >= len(batches) - len(SIZES)


def test_the_same_seed_gives_the_same_batches_and_another_seed_or_epoch_does_not() -> None:
    cuts = make_cuts(500)
    first = ids(fixed(cuts, shuffle=True, seed=1))
    assert ids(fixed(cuts, shuffle=True, seed=1)) == first
    assert ids(fixed(cuts, shuffle=True, seed=2)) != first
    sampler = fixed(cuts, shuffle=True, seed=1)
    assert ids(sampler) == first
    assert ids(sampler) == first
    sampler.set_epoch(1)
    assert ids(sampler) != first


def test_cuts_are_handed_out_as_the_source_made_them() -> None:
    cuts = make_cuts(50)
    originals = {id(cut) for cut in cuts}
    assert {id(cut) for batch in fixed(cuts, shuffle=True) for cut in batch} == originals


def test_a_break_and_a_new_iter_start_the_epoch_again() -> None:
    sampler = fixed(make_cuts(500), shuffle=True, concurrent=True)
    whole = ids(sampler)
    for number, _ in enumerate(sampler):
        if number == 3:
            break
    assert ids(sampler) == whole


def test_several_sources_come_as_tuples() -> None:
    cuts = make_cuts(200)
    sampler = CalibratedBucketingSampler(cuts, cuts, bucket_batch_size=SIZES, duration_bins=BINS, shuffle=True)
    batches = list(sampler)
    assert all(isinstance(batch, tuple) and ids([batch[0]]) == ids([batch[1]]) for batch in batches)
    assert sorted(flat(batch[0] for batch in batches)) == sorted(cuts.ids)


def test_sources_in_different_orders_are_an_error_that_names_the_cuts() -> None:
    cuts = make_cuts(20)
    backwards = CutSet(list(cuts)[::-1])
    sampler = CalibratedBucketingSampler(cuts, backwards, bucket_batch_size=[2], duration_bins=[30.0])
    with pytest.raises(InvalidArgumentError, match=r"they hold 'cut-00000', 'cut-00019' at the same place"):
        next(iter(sampler))
    unchecked = CalibratedBucketingSampler(
        cuts, backwards, bucket_batch_size=[2], duration_bins=[30.0], consistent_ids=False
    )
    assert len(list(unchecked)) == 10


def test_2d_batches_hold_their_sizes_and_every_cut_is_accounted_for() -> None:
    cuts = make_cuts(1000, tokens_per_s=4.0)
    bins = [[5.0, 15], [5.0, 30], [15.0, 50], [15.0, 90], [30.0, 120]]
    sampler = fixed(cuts, bucket_batch_size=[9, 8, 7, 6, 5], duration_bins=bins, max_tps=5.5)
    batches = list(sampler)
    for batch in batches:
        (k,) = {sampler.bins.select(cut.duration, sampler.measure_tokens(cut)) for cut in batch}
        assert len(batch) <= [9, 8, 7, 6, 5][k]
    assert len(flat(batches)) == len(set(flat(batches)))
    assert len(flat(batches)) + sum(sampler.num_skipped.values()) == 1000
    assert set(sampler.num_skipped) == {"too many tokens", "too dense"}


# Lhotse's own limits


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_duration": 100.0},
        {"max_cuts": 7},
        {"max_duration": 100.0, "max_cuts": 7},
        {"max_duration": 100.0, "quadratic_duration": 15.0},
    ],
    ids=["duration", "cuts", "both", "quadratic"],
)
def test_lhotses_limits_make_batches_as_lhotses_constraint_does(limits: dict[str, Any], shuffle: bool) -> None:
    cuts = make_cuts(1000)
    batches = list(CalibratedBucketingSampler(cuts, buffer_size=300, num_buckets=5, shuffle=shuffle, **limits))
    assert sorted(flat(batches)) == sorted(cuts.ids)
    num_partial = 0
    for batch in batches:
        constraint = TimeConstraint(**limits)
        for number, cut in enumerate(batch):
            assert number == 0 or not constraint.close_to_exceeding()
            constraint.add(cut)
        num_partial += not constraint.close_to_exceeding()
    assert num_partial <= 6


def test_a_custom_constraint_makes_batches_and_buckets() -> None:
    cuts = make_cuts(500)
    constraint = FixedBucketBatchSizeConstraint(max_seq_len_buckets=BINS, batch_sizes=SIZES)
    sampler = CalibratedBucketingSampler(cuts, constraint=constraint, duration_bins=BINS, shuffle=True)
    batches = list(sampler)
    assert sorted(flat(batches)) == sorted(cuts.ids)
    bins = Bins.from_edges(BINS)
    assert all(len(batch) <= SIZES[bins.select(batch[0].duration)] for batch in batches)


class Choosy(TimeConstraint):
    def select_bucket(self, buckets: Any, example: Any = None, example_len: Any = None) -> int | None:
        return None if example.duration > 10.0 else super().select_bucket(buckets, example, example_len)


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_constraint_that_has_no_bucket_for_a_cut_skips_it_and_says_so(
    concurrent: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cuts = make_cuts(200)
    sampler = CalibratedBucketingSampler(
        cuts, constraint=Choosy(max_duration=50.0), duration_bins=BINS, concurrent=concurrent
    )
    with caplog.at_level(logging.WARNING):
        kept = flat(sampler)
    assert sorted(kept) == sorted(cut.id for cut in cuts if cut.duration <= 10.0)
    assert f"{200 - len(kept)} no bucket of the constraint (look at the constraint's select_bucket)" in caplog.text


def test_density_limits_hold_under_lhotses_limits_too() -> None:
    cuts = make_cuts(300, tokens_per_s=4.0)
    sampler = CalibratedBucketingSampler(cuts, max_duration=60.0, duration_bins=BINS, min_tps=3.0, max_tps=5.0)
    kept = flat(sampler)
    expected = [cut.id for cut in cuts if 3.0 * cut.duration <= sampler.measure_tokens(cut) <= 5.0 * cut.duration]
    assert sorted(kept) == sorted(expected)
    assert set(sampler.num_skipped) == {"too dense", "too sparse"}


def test_a_cut_that_exceeds_the_limit_by_itself_is_a_batch_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    cuts = CutSet([make_cut(0, 20.0), make_cut(1, 25.0), make_cut(2, 3.0)])
    with caplog.at_level(logging.WARNING):
        batches = ids(CalibratedBucketingSampler(cuts, max_duration=10.0, duration_bins=[5.0]))
    assert sorted(batches) == [["cut-00000"], ["cut-00001"], ["cut-00002"]]
    assert caplog.text.count("exceeds max_duration, 10.0 s; it is a batch of its own") == 1


# What is left out


def test_what_is_left_out_is_counted_and_warned_about_once_with_a_remedy(caplog: pytest.LogCaptureFixture) -> None:
    cuts = [make_cut(i, 4.0, num_tokens=20) for i in range(50)]
    cuts += [make_cut(50, 31.0, num_tokens=20), make_cut(51, 32.0, num_tokens=20)]
    cuts += [make_cut(52, 4.0, num_tokens=90), make_cut(53, 4.0, num_tokens=1), make_cut(54, 4.0)]
    sampler = fixed(CutSet(cuts), min_tps=1.0, max_tps=20.0)
    with caplog.at_level(logging.WARNING):
        kept = flat(sampler)
        with pytest.raises(StopIteration):
            next(sampler)
    assert len(kept) == 50
    assert sampler.num_skipped == {"no tokens": 1, "too dense": 1, "too long": 2, "too sparse": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "epoch 0: 5 cuts were skipped: 1 no tokens (give the cuts supervisions, or use 1D bins without min_tps and "
        "max_tps); 1 too dense (raise max_tps); 2 too long (add a longer edge to duration_bins); 1 too sparse (lower "
        "min_tps)"
    ]
    assert sampler.diagnostics.discarded_cuts == 5
    assert sampler.diagnostics.kept_cuts == 50
    assert sampler.get_report().endswith("epoch 0 skipped | 1 no tokens, 1 too dense, 2 too long, 1 too sparse |")


def test_filtered_cuts_are_discarded_cuts_but_neither_batches_nor_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    sampler = fixed(make_cuts(300)).filter(lambda cut: cut.duration < 8.0)
    with caplog.at_level(logging.WARNING):
        batches = list(sampler)
    assert all(cut.duration < 8.0 for batch in batches for cut in batch)
    stats = sampler.diagnostics.current_epoch_stats
    assert (stats.kept_cuts + stats.discarded_cuts, stats.discarded_batches) == (300, 0)
    assert stats.kept_batches == len(batches)
    assert caplog.records == []


def test_a_cut_of_zero_duration_goes_to_the_first_bucket() -> None:
    cut = make_cut(0, 1.0)
    cut.duration = 0.0
    assert flat(fixed(CutSet([cut]))) == ["cut-00000"]


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_duration_that_is_no_number_is_an_error_that_names_the_cut(concurrent: bool) -> None:
    cuts = list(make_cuts(20))
    cuts[7].duration = math.nan
    with pytest.raises(
        InvalidArgumentError,
        match="cut 'cut-00007': the length of an example must be a number of at least 0, it is nan",
    ):
        list(fixed(CutSet(cuts), concurrent=concurrent))


@pytest.mark.parametrize("duration", [math.nan, -3.0, math.inf])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_duration": 60.0},
        {"max_duration": 60.0, "quadratic_duration": 20.0},
        {"max_cuts": 5},
        {"max_duration": 60.0, "max_tps": 9.0},
        {"constraint": TimeConstraint(max_duration=60.0)},
    ],
    ids=lambda limits: "-".join(limits),
)
def test_under_lhotses_limits_such_a_duration_is_an_error_that_names_the_cut_too(
    duration: float, limits: dict[str, Any]
) -> None:
    cuts = list(make_cuts(30, tokens_per_s=3.0))
    cuts[7].duration = duration
    message = f"cut 'cut-00007': the length of an example must be a finite number of at least 0, it is {duration}"
    with pytest.raises(InvalidArgumentError, match=message):
        list(CalibratedBucketingSampler(CutSet(cuts), duration_bins=BINS, **limits))
    with pytest.raises(InvalidArgumentError, match=message):
        CalibratedBucketingSampler(CutSet(cuts), num_buckets=3, **limits)


@pytest.mark.parametrize("length", [None, "3", [1.0], -1])
@pytest.mark.parametrize("options", [{}, {"max_tps": 9.0}], ids=["1D", "density"])
def test_a_measure_that_returns_no_length_is_an_error_that_names_the_cut(length: Any, options: dict[str, Any]) -> None:
    def measure(cut: Any) -> Any:
        return length if cut.id == "cut-00005" else cut.duration

    sampler = fixed(make_cuts(20, tokens_per_s=3.0), measure_length=measure, **options)
    message = r"cut 'cut-00005': the length of an example must be a (finite )?number of at least 0, it is "
    with pytest.raises(InvalidArgumentError, match=message + re.escape(repr(length))):
        list(sampler)
    with pytest.raises(InvalidArgumentError, match=message):
        sampler.sample_cuts(20)
    with pytest.raises(InvalidArgumentError, match=message):
        sampler.measure_length(make_cut(5, 3.0))
    with pytest.raises(InvalidArgumentError, match=message):
        CalibratedBucketingSampler(make_cuts(20), bucket_batch_size="auto", measure_length=measure)


@pytest.mark.parametrize("options", [{"duration_bins": [[30.0, 50]]}, {"duration_bins": [30.0], "max_tps": 9.0}])
def test_text_without_tokens_needs_a_tokenizer(options: dict[str, Any]) -> None:
    cuts = CutSet([make_cut(0, 4.0, text="hello")])
    with pytest.raises(MissingTokensError, match=r"cut 'cut-00000' must have tokens.*or pass tokenizer="):
        list(fixed(cuts, bucket_batch_size=[1], **options))
    assert flat(fixed(cuts, bucket_batch_size=[1], tokenizer=list, **options)) == ["cut-00000"]


def test_with_drop_last_only_full_batches_come_and_the_rest_is_counted() -> None:
    sampler = fixed(make_cuts(1000), shuffle=True, drop_last=True)
    batches = list(sampler)
    assert all(len(batch) == SIZES[sampler.bins.select(batch[0].duration)] for batch in batches)
    stats = sampler.diagnostics.current_epoch_stats
    assert stats.kept_cuts == len(flat(batches))
    assert stats.kept_cuts + stats.discarded_cuts == 1000


# Ranks


def rank_batches(make: Callable[[int], CalibratedBucketingSampler], world_size: int) -> list[list[CutSet]]:
    return [list(make(rank)) for rank in range(world_size)]


@settings(deadline=None, max_examples=25)
@given(
    durations=st.lists(st.floats(0.5, 30.0), min_size=60, max_size=400),
    delay_every=st.sampled_from([0, 50]),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_on_four_ranks_no_cut_comes_twice_and_none_is_missing_at_two_speeds(
    durations: list[float], delay_every: int, shuffle: bool, drop_last: bool
) -> None:
    import time

    corpus = [make_cut(number, duration) for number, duration in enumerate(durations)]

    class Source:
        def __iter__(self) -> Iterator[Any]:
            for number, cut in enumerate(corpus):
                if delay_every and number % delay_every == 0:
                    time.sleep(0.0005)
                yield cut

    def make(rank: int) -> CalibratedBucketingSampler:
        return fixed(
            Source(),
            rank=rank,
            world_size=4,
            concurrent=True,
            shuffle=shuffle,
            drop_last=drop_last,
            duration_bins=[5.0, 10.0, 20.0, 30.0],
            bucket_batch_size=[6, 4, 3, 2],
            buffer_size=60,
        )

    ranks = rank_batches(make, 4)
    assert len({len(batches) for batches in ranks}) == 1
    drawn = [name for batches in ranks for name in flat(batches)]
    assert len(drawn) == len(set(drawn))
    if not drop_last:
        assert sorted(drawn) == [cut.id for cut in corpus]
    bins = Bins.from_edges([5.0, 10.0, 20.0, 30.0])
    for batch in (batch for batches in ranks for batch in batches):
        (k,) = {bins.select(cut.duration) for cut in batch}
        assert len(batch) <= [6, 4, 3, 2][k]


def test_ranks_get_the_same_bucket_until_the_leftovers() -> None:
    cuts = make_cuts(3000)
    ranks = rank_batches(lambda rank: fixed(cuts, rank=rank, world_size=4, shuffle=True, concurrent=True), 4)
    bins = Bins.from_edges(BINS)
    same = [len({bins.select(batch[0].duration) for batch in step}) == 1 for step in zip(*ranks, strict=True)]
    assert sum(same) >= 0.95 * len(same)


def test_with_unsynchronised_buckets_ranks_still_share_every_cut() -> None:
    cuts = make_cuts(1000)
    ranks = rank_batches(lambda rank: fixed(cuts, rank=rank, world_size=4, shuffle=True, sync_buckets=False), 4)
    assert len({len(batches) for batches in ranks}) == 1
    assert sorted(name for batches in ranks for name in flat(batches)) == sorted(cuts.ids)


def test_with_fewer_cuts_than_ranks_some_are_repeated_under_another_id() -> None:
    cuts = make_cuts(3)
    ranks = rank_batches(lambda rank: fixed(cuts, rank=rank, world_size=5), 5)
    assert [len(batches) for batches in ranks] == [1] * 5
    names = sorted(name for batches in ranks for name in flat(batches))
    assert len(names) == len(set(names)) == 5
    assert {name[:9] for name in names} == set(cuts.ids)
    assert sum(name.endswith("_dup0") for name in names) == 2


@pytest.mark.parametrize("seed", ["trng", "randomized"])
def test_a_seed_that_each_rank_would_draw_for_itself_is_refused_without_a_process_group(seed: str) -> None:
    sampler = fixed(make_cuts(20), rank=0, world_size=2, seed=seed)
    with pytest.raises(
        InvalidArgumentError,
        match=rf"seed must be a whole number on 2 ranks of a map-style dataset, it is '{seed}': .* torch.distributed "
        r"isn't initialised",
    ):
        iter(sampler)


@pytest.mark.parametrize("seed", ["trng", "randomized"])
def test_such_seeds_work_on_one_rank(seed: str) -> None:
    cuts = make_cuts(100)
    assert sorted(flat(fixed(cuts, seed=seed, shuffle=True))) == sorted(cuts.ids)


# Sizes


def test_auto_must_be_calibrated_first_and_says_how() -> None:
    sampler = fixed(make_cuts(20), bucket_batch_size="auto")
    assert (sampler.needs_calibration, sampler.is_auto, sampler.bucket_batch_size) == (True, True, None)
    with pytest.raises(
        NotCalibratedError,
        match=r"bucket_batch_size='auto' must be calibrated .*calibrate\(sampler, dataset, \.\.\.\) first, add "
        r"lhotse_oomfit.lightning.BucketBatchSizeFinder\(\)",
    ):
        iter(sampler)
    sampler.apply(SIZES)
    assert (sampler.needs_calibration, sampler.bucket_batch_size) == (False, SIZES)
    assert len(flat(sampler)) == 20


def test_a_profile_brings_its_bins_and_sizes() -> None:
    profile = make_profile(BINS, sizes=SIZES, max_tps=9.0)
    sampler = CalibratedBucketingSampler(make_cuts(20, tokens_per_s=4.0), bucket_batch_size=profile)
    assert sampler.bins == profile.bins
    assert sampler.profile is profile
    assert sampler.bucket_batch_size == SIZES
    assert len(flat(sampler)) == 20


def test_a_profile_for_other_bins_is_refused_with_both() -> None:
    sampler = fixed(make_cuts(20), bucket_batch_size="auto")
    with pytest.raises(
        ProfileMismatchError,
        match=r"measured for the bins \[5.0, 10.0\], this sampler has \[5.0, 10.0, 20.0, 30.0\]; recalibrate",
    ):
        sampler.apply(make_profile([5.0, 10.0], sizes=[2, 1]))
    with pytest.raises(
        ProfileMismatchError, match=r"measured with at most 45 tokens in bucket 0, this sampler admits any number"
    ):
        sampler.apply(make_profile(BINS, sizes=SIZES, max_tps=9.0))
    assert sampler.needs_calibration


def test_sizes_applied_in_the_middle_of_an_epoch_hold_from_the_next_batch_or_a_later_one() -> None:
    cuts = make_cuts(1000)
    sampler = fixed(cuts, shuffle=True)
    iterator = iter(sampler)
    batches = [next(iterator) for _ in range(5)]
    sampler.apply([2, 2, 2, 2])
    batches += [next(iterator) for _ in range(5)]
    assert [len(batch) for batch in batches[5:]] == [2] * 5
    sampler.apply([1, 1, 1, 1], at_batch=15)
    batches += list(iterator_rest(iterator))
    assert [len(batch) for batch in batches[10:15]] == [2] * 5
    assert {len(batch) for batch in batches[15:]} == {1}
    assert sorted(flat(batches)) == sorted(cuts.ids)
    assert {len(batch) for batch in sampler} == {1}


def iterator_rest(sampler: Any) -> Iterator[Any]:
    # A for loop would call iter() and start the epoch again.
    while True:
        try:
            yield next(sampler)
        except StopIteration:
            return


def test_sizes_cannot_be_applied_to_batches_that_were_drawn() -> None:
    sampler = fixed(make_cuts(100))
    with pytest.raises(InvalidArgumentError, match=r"at_batch must be a batch of the epoch .* and no epoch has begun"):
        sampler.apply(SIZES, at_batch=3)
    iterator = iter(sampler)
    next(iterator)
    next(iterator)
    with pytest.raises(InvalidArgumentError, match="isn't drawn yet, 2 or above, it is 1"):
        sampler.apply(SIZES, at_batch=1)


def test_bins_are_estimated_with_the_longest_cut_included() -> None:
    cuts = make_cuts(500)
    sampler = CalibratedBucketingSampler(cuts, bucket_batch_size="auto", num_buckets=6)
    assert len(sampler.bins) == sampler.num_buckets == 6
    assert sampler.bins.edges[-1] == max(cut.duration for cut in cuts)
    listed = CalibratedBucketingSampler(cuts, bucket_batch_size=[3, 2, 1])
    assert len(listed.bins) == 3
    assert sorted(flat(listed)) == sorted(cuts.ids)


def test_lengths_can_be_measured_in_another_unit() -> None:
    cuts = make_cuts(100)
    sampler = fixed(cuts, duration_bins=[500.0, 1000.0, 2000.0, 3000.0], measure_length=lambda cut: cut.duration * 100)
    batches = list(sampler)
    assert sorted(flat(batches)) == sorted(cuts.ids)
    assert all(len(batch) <= SIZES[Bins.from_edges(BINS).select(batch[0].duration)] for batch in batches)


def test_a_buffer_that_cannot_hold_the_batches_is_an_error_at_iter() -> None:
    sampler = fixed(make_cuts(20), buffer_size=10, max_buffer_size=20)
    with pytest.raises(BufferTooSmallError, match="30 examples, and may hold 20; raise max_buffer_size to"):
        iter(sampler)


# What calibration asks for


def test_a_sample_holds_the_first_cuts_that_would_be_batched_and_disturbs_nothing() -> None:
    cuts = make_cuts(300)
    sampler = fixed(cuts, duration_bins=[5.0, 10.0, 12.0, 15.0], shuffle=True).filter(lambda cut: cut.duration > 2.0)
    expected = [cut.id for cut in cuts if 2.0 < cut.duration <= 15.0]
    iterator = iter(sampler)
    batches = [next(iterator) for _ in range(3)]
    assert [cut.id for cut in sampler.sample_cuts(10)] == expected[:10]
    assert [cut.id for cut in sampler.sample_cuts(1000)] == expected
    batches += list(iterator_rest(iterator))
    assert sorted(flat(batches)) == sorted(expected)


def test_a_sample_of_nothing_is_an_error() -> None:
    sampler = fixed(make_cuts(10)).filter(lambda cut: False)
    with pytest.raises(EmptySourceError, match="at least one cut that passes its filter and belongs to a bucket"):
        sampler.sample_cuts(1)


@pytest.mark.parametrize("wrap", [iter, lambda cuts: CutSet(cut for cut in cuts)], ids=["iterator", "in a CutSet"])
def test_a_source_that_can_be_read_once_is_not_read_ahead(wrap: Callable[[CutSet], Any]) -> None:
    cuts = make_cuts(40)
    source = wrap(cuts)
    sampler = fixed(source)
    message = "the source of cuts must be one that can be iterated again, since {} reads ahead, it is '.*', an iterator"
    with pytest.raises(InvalidArgumentError, match=message.format("calibration")):
        sampler.sample_cuts(5)
    for options in ({"bucket_batch_size": "auto"}, {"max_duration": 60.0}):
        with pytest.raises(InvalidArgumentError, match=message.format("the estimation of duration_bins")):
            CalibratedBucketingSampler(source, **options)
    assert sorted(flat(sampler)) == sorted(cuts.ids)


@pytest.mark.parametrize("limits", [{"bucket_batch_size": SIZES}, {"max_cuts": 4}], ids=["sizes", "limits"])
def test_the_constructor_leaves_the_source_alone_when_bins_are_given(limits: dict[str, Any]) -> None:
    class Untouched:
        def __iter__(self) -> Iterator[Any]:
            raise OSError("the source was read")

    sampler = CalibratedBucketingSampler(Untouched(), duration_bins=BINS, **limits)
    with pytest.raises(OSError, match="the source was read"):
        next(iter(sampler))


def test_transform_applies_what_was_given_to_map() -> None:
    def rename(cuts: CutSet) -> CutSet:
        return cuts.modify_ids(lambda name: name + "-seen")

    sampler = fixed(make_cuts(10)).map(rename)
    assert all(name.endswith("-seen") for name in sampler.transform(make_cuts(3)).ids)
    assert all(name.endswith("-seen") for name in flat(sampler))


# Arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bucket_batch_size": [1, 2]}, InvalidArgumentError, "it holds 2 for 4 duration_bins"),
        ({"bucket_batch_size": [1, 2, 3, 0]}, InvalidArgumentError, "whole numbers of at least 1, it holds 0"),
        ({"bucket_batch_size": [1, 2, 3, -1]}, InvalidArgumentError, "whole numbers of at least 1, it holds -1"),
        ({"bucket_batch_size": [1, 2, 3, 4.0]}, InvalidArgumentError, "whole numbers of at least 1, it holds 4.0"),
        ({"bucket_batch_size": [1, 2, 3, True]}, InvalidArgumentError, "whole numbers of at least 1, it holds True"),
        ({"bucket_batch_size": "all"}, InvalidArgumentError, "must be 'auto', one size per bucket, or a profile"),
        ({"bucket_batch_size": 8}, InvalidArgumentError, "must be 'auto', one size per bucket, or a profile, it is 8"),
        ({"max_duration": 100.0}, InvalidArgumentError, "must be the only limit on batches, max_duration came with it"),
        ({"quadratic_duration": 9.0}, InvalidArgumentError, "the only limit on batches, quadratic_duration came"),
        ({"duration_bins": [5.0, 3.0, 10.0, 20.0]}, InvalidBinsError, "sorted upwards, 3.0 comes after 5.0"),
        ({"duration_bins": [5.0, math.nan, 9.0, 20.0]}, InvalidBinsError, "must hold finite numbers, they hold nan"),
        ({"duration_bins": [5.0, 5.0, 9.0, 20.0]}, InvalidBinsError, "must not repeat an edge, 5.0"),
        ({"on_resume": "guess"}, InvalidArgumentError, "on_resume must be 'error' or 'new_epoch', it is 'guess'"),
        ({"buffer_size": 0}, InvalidArgumentError, "buffer_size must be a whole number of at least 1, it is 0"),
        ({"max_buffer_size": 5}, InvalidArgumentError, "max_buffer_size must be at least buffer_size, 200, it is 5"),
        ({"seed": "time"}, InvalidArgumentError, "seed must be a whole number, 'randomized' or 'trng', it is 'time'"),
        ({"rank": 2, "world_size": 2}, InvalidArgumentError, "rank must be one of world_size ranks, it is 2 of 2"),
        ({"bucket_batch_size": None}, InvalidArgumentError, "the size of batches must be limited: pass bucket_batch"),
        ({"bucket_batch_size": []}, InvalidArgumentError, "must hold one size per bucket, it is empty"),
        (
            {"bucket_batch_size": np.array(8)},
            InvalidArgumentError,
            r"one size per bucket, or a profile, it is array\(8",
        ),
        ({"bucket_batch_size": torch.ones(4)}, InvalidArgumentError, r"at least 1, it holds tensor\(1.\)"),
        ({"bucket_batch_size": torch.ones(4, dtype=torch.bool)}, InvalidArgumentError, r"it holds tensor\(True\)"),
        ({"buffer_size": 200.5}, InvalidArgumentError, "buffer_size must be a whole number of at least 1, it is 200.5"),
        ({"buffer_size": "200"}, InvalidArgumentError, "buffer_size must be a whole number of at least 1, it is '200'"),
        ({"max_buffer_size": 1e6}, InvalidArgumentError, "max_buffer_size must be a whole number of at least 1, it is"),
        ({"shuffle_buffer_size": -1}, InvalidArgumentError, "shuffle_buffer_size must be a whole number of at least 0"),
        ({"num_buckets": "4"}, InvalidArgumentError, "num_buckets must be a whole number, it is '4'"),
        ({"num_buckets": True}, InvalidArgumentError, "num_buckets must be a whole number, it is True"),
        (
            {"num_cuts_for_bins_estimate": 0},
            InvalidArgumentError,
            "num_cuts_for_bins_estimate must be a whole number of at least 1, it is 0",
        ),
        (
            {"world_size": 0, "rank": 0},
            InvalidArgumentError,
            "world_size must be a whole number of at least 1, it is 0",
        ),
        ({"world_size": 2.0, "rank": 0}, InvalidArgumentError, "world_size must be a whole number of .*, it is 2.0"),
        ({"world_size": 2, "rank": "0"}, InvalidArgumentError, "rank must be a whole number of at least 0, it is '0'"),
        ({"world_size": 2, "rank": -1}, InvalidArgumentError, "rank must be a whole number of at least 0, it is -1"),
        ({"seed": True}, InvalidArgumentError, "seed must be a whole number, 'randomized' or 'trng', it is True"),
        ({"seed": 1.0}, InvalidArgumentError, "seed must be a whole number, 'randomized' or 'trng', it is 1.0"),
        ({"seed": np.bool_(True)}, InvalidArgumentError, "seed must be a whole number, 'randomized' or 'trng', it is"),
        ({"max_tps": "25"}, InvalidBinsError, "max_tps must be one number, or one per bucket, it is '25'"),
        ({"min_tps": True}, InvalidBinsError, "min_tps must be one number, or one per bucket, it is True"),
        (
            {"bucket_batch_size": None, "max_duration": "60"},
            InvalidArgumentError,
            "max_duration must be a number above 0, it is '60'",
        ),
        (
            {"bucket_batch_size": None, "max_duration": True},
            InvalidArgumentError,
            "max_duration must be a number above 0, it is True",
        ),
        (
            {"bucket_batch_size": None, "max_duration": math.nan},
            InvalidArgumentError,
            "max_duration must be a number above 0, it is nan",
        ),
        (
            {"bucket_batch_size": None, "max_duration": 9.0, "quadratic_duration": [20.0]},
            InvalidArgumentError,
            r"quadratic_duration must be a number above 0, it is \[20.0\]",
        ),
        (
            {"bucket_batch_size": None, "max_cuts": 7.5},
            InvalidArgumentError,
            "max_cuts must be a whole number of at least 1, it is 7.5",
        ),
        (
            {"bucket_batch_size": None, "max_duration": 9.0, "max_tps": "25"},
            InvalidArgumentError,
            "max_tps must be one number without bucket_batch_size, it is '25'",
        ),
        (
            {"bucket_batch_size": None, "max_duration": 9.0, "duration_bins": ""},
            InvalidBinsError,
            "duration_bins must be a sequence of numbers or pairs, it is ''",
        ),
        (
            {"bucket_batch_size": None, "max_duration": -1.0},
            InvalidArgumentError,
            "max_duration must be a number above 0, it is -1.0",
        ),
        (
            {"bucket_batch_size": None, "max_duration": 9.0, "strict_2d": False},
            InvalidArgumentError,
            "strict_2d=False must come with bucket_batch_size",
        ),
        (
            {"bucket_batch_size": None, "max_duration": 9.0, "measure_length": len},
            InvalidArgumentError,
            "measure_length must come with bucket_batch_size",
        ),
        (
            {"bucket_batch_size": None, "max_duration": 9.0, "max_tps": [1.0]},
            InvalidArgumentError,
            r"max_tps must be one number without bucket_batch_size, it is \[1.0\]",
        ),
        (
            {"bucket_batch_size": None, "max_duration": 9.0, "tokenizer": list},
            InvalidArgumentError,
            "tokenizer must come with bucket_batch_size, min_tps or max_tps",
        ),
        (
            {"bucket_batch_size": None, "max_duration": 9.0, "duration_bins": [[5.0, 3]]},
            InvalidBinsError,
            "2D duration_bins must come with bucket_batch_size, or a constraint for them",
        ),
        (
            {"bucket_batch_size": None, "max_duration": 9.0, "constraint": TimeConstraint(max_cuts=1)},
            InvalidArgumentError,
            "constraint must not come with max_duration or max_cuts",
        ),
        (
            {"bucket_batch_size": None, "max_duration": 9.0, "duration_bins": None, "num_buckets": 1},
            InvalidArgumentError,
            "num_buckets must be from 2 to the number of cuts seen, 30, it is 1",
        ),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_do(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fixed(make_cuts(30), **options)


def test_a_sampler_needs_a_source_with_cuts() -> None:
    with pytest.raises(InvalidArgumentError, match="must be given at least one source of cuts"):
        CalibratedBucketingSampler(bucket_batch_size=[1], duration_bins=[1.0])
    with pytest.raises(EmptySourceError, match="must be estimated from at least one example"):
        CalibratedBucketingSampler(CutSet([]), bucket_batch_size="auto")
    with pytest.raises(EmptySourceError, match="must be estimated from at least one cut, the source has none"):
        CalibratedBucketingSampler(CutSet([]), max_duration=9.0)


def test_sizes_and_bins_come_from_numpy_and_tuples_too() -> None:
    sampler = fixed(make_cuts(30), bucket_batch_size=np.array(SIZES), duration_bins=np.array(BINS))
    assert sampler.bucket_batch_size == SIZES
    assert fixed(make_cuts(30), bucket_batch_size=tuple(SIZES), duration_bins=tuple(BINS)).bins == sampler.bins


@pytest.mark.parametrize("sizes", [torch.tensor(SIZES), np.array(SIZES, dtype=np.uint8), map(int, SIZES)])
def test_sizes_come_from_tensors_and_iterators_too(sizes: Any) -> None:
    sampler = fixed(make_cuts(30), bucket_batch_size=sizes)
    assert sampler.bucket_batch_size == SIZES
    assert {type(size) for size in sampler.bucket_batch_size} == {int}


def test_bins_are_estimated_for_as_many_sizes_as_an_iterator_holds() -> None:
    sampler = CalibratedBucketingSampler(make_cuts(200), bucket_batch_size=iter([3, 2, 1]))
    assert (len(sampler.bins), sampler.bucket_batch_size) == (3, [3, 2, 1])


def numpy_numbers() -> dict[str, Any]:
    names = {"buffer_size": 200, "max_buffer_size": 900, "world_size": 2, "rank": 1, "seed": 3}
    return {name: np.int64(number) for name, number in names.items()}


@pytest.mark.parametrize("shuffle", [False, True])
def test_numbers_come_from_numpy_and_the_state_is_plain(shuffle: bool, tmp_path: Path) -> None:
    sized = fixed(make_cuts(100), bucket_batch_size=np.array(SIZES), shuffle=shuffle, **numpy_numbers())
    limited = CalibratedBucketingSampler(
        make_cuts(100),
        max_duration=np.float64(60.0),
        max_cuts=np.int32(9),
        quadratic_duration=np.float32(20.0),
        duration_bins=np.array(BINS),
        shuffle=shuffle,
        **numpy_numbers(),
    )
    plain = fixed(make_cuts(100), shuffle=shuffle, max_buffer_size=900, world_size=2, rank=1, seed=3)
    assert ids(sized) == ids(plain)
    for sampler in (sized, limited):
        next(iter(sampler))
        state = sampler.state_dict()
        json.dumps(state)
        torch.save(state, tmp_path / "state.pt")
        assert torch.load(tmp_path / "state.pt", weights_only=True) == state


def test_sizes_hold_from_a_batch_that_is_a_whole_number() -> None:
    sampler = fixed(make_cuts(100))
    next(iter(sampler))
    with pytest.raises(InvalidArgumentError, match=r"at_batch must be a whole number, it is 2\.0"):
        sampler.apply(SIZES, at_batch=2.0)  # type: ignore[arg-type]
    sampler.apply([1, 1, 1, 1], at_batch=np.int64(2))  # type: ignore[arg-type]
    json.dumps(sampler.state_dict())


def test_the_largest_buffer_is_five_times_the_usual_one_unless_it_is_given() -> None:
    assert fixed(make_cuts(5)).max_buffer_size == 1000
    assert fixed(make_cuts(5), max_buffer_size=300).max_buffer_size == 300
    with pytest.raises(AttributeError):
        fixed(make_cuts(5)).max_buffer_size = 3  # type: ignore[misc]


def test_sizes_cannot_be_applied_under_lhotses_limits() -> None:
    sampler = CalibratedBucketingSampler(make_cuts(30), max_duration=30.0, duration_bins=BINS)
    assert (sampler.bins, sampler.needs_calibration, sampler.is_auto) == (None, False, False)
    with pytest.raises(InvalidArgumentError, match="this one batches by Lhotse's limits"):
        sampler.apply(SIZES)


def test_the_thread_of_a_sampler_ends_with_it() -> None:
    import gc
    import threading

    sampler = fixed(make_cuts(2000), concurrent=True, buffer_size=100)
    next(iter(sampler))
    running = [thread for thread in threading.enumerate() if thread.name == "oomfit-readahead"]
    del sampler
    gc.collect()
    for thread in running:
        thread.join(10.0)
    assert not any(thread.is_alive() for thread in running)
