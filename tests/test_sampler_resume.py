from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lhotse import CutSet
from lhotse.dataset import RoundRobinSampler, ZipSampler
from lhotse.dataset.sampling.base import TimeConstraint
from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler
from sampler_corpora import flat, ids, make_cuts

from lhotse_oomfit import CalibratedBucketingSampler
from lhotse_oomfit.errors import EmptySourceError, ResumeError

BINS = [5.0, 10.0, 20.0, 30.0]
SIZES = [16, 8, 4, 2]
CUTS = make_cuts(600, tokens_per_s=3.0)


def make(cuts: Any = CUTS, **options: Any) -> CalibratedBucketingSampler:
    defaults: dict[str, Any] = {
        "bucket_batch_size": SIZES,
        "duration_bins": BINS,
        "buffer_size": 150,
        "shuffle": True,
    }
    return CalibratedBucketingSampler(cuts, **(defaults | options))


def rest(sampler: Any) -> list[list[str]]:
    """IDs of what is left, without starting the epoch again."""
    found = []
    while True:
        try:
            found.append([cut.id for cut in next(sampler)])
        except StopIteration:
            return found


def take(sampler: Any, num: int) -> Any:
    iterator = iter(sampler)
    for _ in range(num):
        next(iterator)
    return iterator


KINDS: dict[str, dict[str, Any]] = {
    "1D": {},
    "concurrent": {"concurrent": True},
    "in order": {"shuffle": False},
    "2D": {
        "duration_bins": [[5.0, 12], [5.0, 40], [30.0, 50], [30.0, 200]],
        "max_tps": 4.0,
    },
    "one of four ranks": {"rank": 2, "world_size": 4},
    "unsynchronised ranks": {"rank": 1, "world_size": 2, "sync_buckets": False},
    "drop_last": {"drop_last": True},
    "Lhotse's limits": {"bucket_batch_size": None, "max_duration": 60.0, "duration_bins": None},
    "a custom constraint": {"bucket_batch_size": None, "constraint": TimeConstraint(max_duration=60.0)},
}


@pytest.mark.parametrize("num", [0, 1, 7, 10_000], ids=["unused", "once", "some way in", "at the end"])
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_a_resumed_epoch_goes_on_as_an_unbroken_one(options: dict[str, Any], num: int) -> None:
    sampler = make(**options)
    sampler.set_epoch(2)
    whole = ids(sampler)
    num = min(num, len(whole))
    state = take(sampler, num).state_dict()
    resumed = make(**options)
    resumed.load_state_dict(state)
    assert state == {}
    assert ids(resumed) == whole[num:]
    assert ids(resumed) == whole
    reference = make(**options)
    reference.set_epoch(2)
    list(reference)
    assert resumed.diagnostics.current_epoch_stats == reference.diagnostics.current_epoch_stats


def test_a_state_is_the_same_after_loading_and_survives_torch_save(tmp_path: Path) -> None:
    sampler = take(make().filter(_is_short), 5)
    state = sampler.state_dict()
    torch.save(state, tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt")
    assert loaded == state
    resumed = make().filter(_is_short)
    resumed.load_state_dict(loaded)
    assert resumed.state_dict() == state
    assert resumed.num_batches_drawn == 5
    next(resumed)
    assert resumed.num_batches_drawn == 6


def _is_short(cut: Any) -> bool:
    return bool(cut.duration < 12.0)


def test_filtered_cuts_do_not_shift_the_position() -> None:
    whole = ids(make().filter(_is_short))
    state = take(make().filter(_is_short), 6).state_dict()
    resumed = make().filter(_is_short)
    resumed.load_state_dict(state)
    assert ids(resumed) == whole[6:]


def test_a_resumed_sampler_can_be_told_to_start_again() -> None:
    whole = ids(make())
    resumed = make()
    resumed.load_state_dict(take(make(), 5).state_dict())
    resumed.allow_iter_to_reset_state()
    assert ids(resumed) == whole
    resumed.load_state_dict(take(make(), 5).state_dict())
    resumed.set_epoch(1)
    other = make()
    other.set_epoch(1)
    assert ids(resumed) == ids(other)


def test_next_without_iter_continues_a_loaded_state() -> None:
    whole = ids(make())
    resumed = make()
    resumed.load_state_dict(take(make(), 5).state_dict())
    assert rest(resumed) == whole[5:]


def test_a_state_saved_after_a_resume_is_exact_again() -> None:
    whole = ids(make())
    resumed = make()
    resumed.load_state_dict(take(make(), 5).state_dict())
    take(resumed, 4)
    again = make()
    again.load_state_dict(resumed.state_dict())
    assert ids(again) == whole[9:]


@pytest.mark.parametrize("num", [10, 10_000], ids=["in the middle", "at the end"])
def test_a_state_saved_after_set_epoch_and_before_iter_is_the_new_epochs_beginning(num: int) -> None:
    sampler = make()
    whole = ids(sampler)
    take(sampler, min(num, len(whole)))
    sampler.set_epoch(1)
    assert sampler.num_batches_drawn == 0
    states = [sampler.state_dict(), sampler.state_dict_at(0)]
    expected = ids(sampler)
    assert len(expected) > 10
    for state in states:
        resumed = make()
        resumed.load_state_dict(state)
        assert ids(resumed) == expected


def test_an_exhausted_iterator_stays_exhausted_when_the_epoch_is_set() -> None:
    sampler = make()
    list(sampler)
    sampler.set_epoch(1)
    with pytest.raises(StopIteration):
        next(sampler)
    assert len(list(sampler)) > 10


# What would otherwise be silent


def test_an_endless_source_of_which_nothing_is_admitted_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    def source() -> Iterator[Any]:
        for _ in range(100):
            yield from CUTS

    sampler = make(CutSet(source()), max_tps=0.1)
    with caplog.at_level(logging.WARNING):
        assert list(sampler) == []
    first, *_ = caplog.messages
    assert first.startswith("epoch 0: none of the 1500 cuts read so far belongs to a bucket: 1500 too dense (raise max")
    assert len(caplog.messages) == 3  # again at ten times as many, and at the end


def test_cuts_that_an_endless_source_lets_skip_are_told_of_without_an_end(caplog: pytest.LogCaptureFixture) -> None:
    sampler = make(CUTS.repeat(), duration_bins=[5.0, 10.0, 20.0, 25.0])
    with caplog.at_level(logging.WARNING):
        take(sampler, 400)
    (message,) = caplog.messages
    assert re.match(r"epoch 0: \d+ cuts were skipped so far: \d+ too long \(add a longer edge", message)


def test_a_sample_of_cuts_is_given_up_where_an_endless_source_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lhotse_oomfit.sampler._MOST_IN_VAIN", 1000)
    with pytest.raises(EmptySourceError, match="belongs to a bucket, there is none among the first 1000; look at"):
        make(CUTS.repeat(), max_tps=0.1).sample_cuts(3)


def test_sources_out_of_step_are_an_error_on_every_rank_at_the_same_step() -> None:
    cuts = list(CUTS)
    swapped = [*cuts[:50], cuts[51], cuts[50], *cuts[52:]]
    failed = []
    for rank in range(4):
        sampler = CalibratedBucketingSampler(
            CutSet(cuts), CutSet(swapped), bucket_batch_size=SIZES, duration_bins=BINS, rank=rank, world_size=4
        )
        with pytest.raises(ValueError, match="the sources must hold cuts of the same IDs in the same order"):
            list(sampler)
        failed.append(sampler.num_batches_drawn)
    assert len(set(failed)) == 1


def test_a_map_that_raises_stop_iteration_does_not_end_the_epoch() -> None:
    def stop(_: CutSet) -> CutSet:
        raise StopIteration

    with pytest.raises(RuntimeError, match=r"a function given to map\(\) raised StopIteration"):
        list(make().map(stop))


def test_dropping_every_cut_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    sampler = make(bucket_batch_size=[200] * 4, drop_last=True, world_size=4, rank=0, max_buffer_size=4000)
    with caplog.at_level(logging.WARNING):
        assert list(sampler) == []
    assert "epoch 0 has no batch: drop_last=True leaves out all of its 600 cuts, which don't fill" in caplog.text
    assert "600 left over (drop_last=False keeps them)" in sampler.get_report()


def test_ranks_together_count_every_cut_once() -> None:
    options: dict[str, Any] = {"duration_bins": [5.0, 10.0, 20.0, 25.0], "drop_last": True, "world_size": 4}
    ranks = [make(rank=rank, **options) for rank in range(4)]
    kept = [len(flat(sampler)) for sampler in ranks]
    assert [sampler.diagnostics.kept_cuts for sampler in ranks] == kept
    assert sum(kept) + sum(sampler.diagnostics.discarded_cuts for sampler in ranks) == len(CUTS)


def test_several_sources_count_a_tuple_as_one_cut() -> None:
    sampler = CalibratedBucketingSampler(CUTS, CUTS, bucket_batch_size=[4, 4], duration_bins=[5.0, 20.0])
    kept = sum(len(first) for first, _ in sampler)
    stats = sampler.diagnostics.current_epoch_stats
    assert 0 < stats.discarded_cuts == len(CUTS) - kept


# The schedule of sizes


@settings(deadline=None, max_examples=40)
@given(
    concurrent=st.booleans(),
    buffer_size=st.sampled_from([20, 150]),
    changes=st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(1, 20), min_size=4, max_size=4)), max_size=4),
    stop=st.integers(0, 60),
)
def test_sizes_that_changed_on_the_way_are_replayed_where_they_changed(
    concurrent: bool, buffer_size: int, changes: list[tuple[int, list[int]]], stop: int
) -> None:
    options: dict[str, Any] = {"concurrent": concurrent, "buffer_size": buffer_size}
    sampler = iter(make(**options))
    seen: list[list[str]] = []
    by_batch = dict(changes)
    for number in range(stop):
        if number in by_batch:
            sampler.apply(by_batch[number])
        try:
            seen.append([cut.id for cut in next(sampler)])
        except StopIteration:
            break
    sizes = sampler.bucket_batch_size
    state = sampler.state_dict()
    remaining = rest(sampler)
    resumed = make(bucket_batch_size=sizes, **options)
    resumed.load_state_dict(state)
    assert ids(resumed) == remaining
    assert sorted(name for batch in seen + remaining for name in batch) == sorted(CUTS.ids)


def test_other_sizes_than_the_saved_ones_hold_after_the_replay() -> None:
    before = ids(make())[:9]
    resumed = make(bucket_batch_size=[3, 2, 1, 1])
    resumed.load_state_dict(take(make(), 9).state_dict())
    after = list(resumed)
    assert all(len(batch) <= 3 for batch in after)
    assert sorted([name for batch in before for name in batch] + flat(after)) == sorted(CUTS.ids)


@pytest.mark.parametrize("at_batch", [None, 30], ids=["prefetched", "still to come"])
def test_smaller_sizes_than_the_saved_ones_hold_at_once_whatever_changes_were_to_come(at_batch: int | None) -> None:
    sampler = iter(make())
    before = [next(sampler) for _ in range(8)][:6]
    sampler.apply([8, 4, 2, 1], at_batch=at_batch)
    next(sampler)
    resumed = make(bucket_batch_size=[2, 1, 1, 1])
    resumed.load_state_dict(sampler.state_dict_at(6))
    after = list(resumed)
    assert all(len(batch) <= 2 for batch in after)
    assert sorted(flat(before + after)) == sorted(CUTS.ids)


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("buffer_size", [20, 150])
def test_sizes_applied_before_the_first_batch_are_as_if_given_from_the_start(
    concurrent: bool, buffer_size: int
) -> None:
    options: dict[str, Any] = {"concurrent": concurrent, "buffer_size": buffer_size}
    for sizes in ([1, 1, 1, 1], [16, 1, 8, 3]):
        sampler = iter(make(**options))
        sampler.apply(sizes)
        assert rest(sampler) == ids(make(bucket_batch_size=sizes, **options))


def test_an_auto_sampler_replays_the_saved_sizes_and_goes_on_with_its_new_ones() -> None:
    before = ids(make())[:9]
    resumed = make(bucket_batch_size="auto")
    resumed.load_state_dict(take(make(), 9).state_dict())
    assert resumed.needs_calibration
    resumed.apply([3, 2, 1, 1])
    after = list(resumed)
    assert all(len(batch) <= 3 for batch in after)
    assert sorted([name for batch in before for name in batch] + flat(after)) == sorted(CUTS.ids)
    assert flat(iter(resumed))  # the next epoch


# Consumed rather than drawn


def test_the_state_at_an_earlier_batch_leaves_prefetched_ones_for_the_resumed_run() -> None:
    whole = ids(make())
    sampler = take(make(), 10)
    resumed = make()
    resumed.load_state_dict(sampler.state_dict_at(6))
    assert resumed.num_batches_drawn == 6
    assert ids(resumed) == whole[6:]


def test_sizes_that_changed_while_batches_were_prefetched_change_there_again() -> None:
    sampler = iter(make())
    batches = [next(sampler) for _ in range(8)]
    sampler.apply([2, 2, 2, 2])
    batches += [next(sampler) for _ in range(4)]
    state = sampler.state_dict_at(6)
    whole = ids(batches) + rest(sampler)
    resumed = make(bucket_batch_size=[2, 2, 2, 2])
    resumed.load_state_dict(state)
    assert ids(resumed) == whole[6:]


def test_the_state_at_a_batch_that_was_not_drawn_is_refused() -> None:
    sampler = take(make(), 3)
    with pytest.raises(ValueError, match=r"at most the 3 batches that were drawn, it is 4; for an iterable-style"):
        sampler.state_dict_at(4)
    with pytest.raises(ValueError, match="must be at least 0, they are -1 and 0"):
        sampler.state_dict_at(-1)


# Compound samplers


@pytest.mark.parametrize("compound", [ZipSampler, RoundRobinSampler], ids=["zip", "round robin"])
def test_compound_samplers_resume_exactly(compound: Any) -> None:
    def both() -> Any:
        return compound(make(concurrent=True), make(make_cuts(300, seed=1), seed=3))

    whole = ids(both())
    state = take(both(), 7).state_dict()
    resumed = both()
    resumed.load_state_dict(state)
    assert ids(resumed) == whole[7:]
    resumed = both()
    resumed.load_state_dict(take(both(), 7).state_dict())
    assert rest(resumed) == whole[7:]


# Copies


@pytest.mark.parametrize("copy", [deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("concurrent", [False, True])
def test_a_copy_made_in_the_middle_of_an_epoch_goes_on_from_there(copy: Any, concurrent: bool) -> None:
    sampler = take(make(concurrent=concurrent), 6)
    copied = copy(sampler)
    assert rest(copied) == rest(sampler)
    assert ids(copied) == ids(sampler)


# Sources that count how often they were iterated


class Reshuffling:
    """Stands for Lhotse's stateful lazy sets, which shuffle differently each time."""

    def __init__(self, cuts: CutSet) -> None:
        self.cuts = cuts
        self.num_times_iterated = 0

    def __iter__(self) -> Iterator[Any]:
        import random

        self.num_times_iterated += 1
        cuts = list(self.cuts)
        random.Random(self.num_times_iterated).shuffle(cuts)
        yield from cuts


Reshuffling.__module__ = "lhotse.lazy"  # the walk through a source looks at Lhotse's classes only


def test_a_source_that_reshuffles_itself_is_put_back_to_where_the_epoch_began() -> None:
    def sampler() -> CalibratedBucketingSampler:
        return make(CutSet(Reshuffling(CUTS)))

    first = sampler()
    list(first)
    list(first)
    first.sample_cuts(3)
    state = take(first, 5).state_dict()
    expected = rest(first)
    resumed = sampler()
    resumed.load_state_dict(state)
    assert ids(resumed) == expected
    assert ids(resumed) == ids(first)


def test_a_lazy_jsonl_source_resumes_exactly(tmp_path: Path) -> None:
    path = tmp_path / "cuts.jsonl"
    make_cuts(600).to_file(path)
    lazy = CutSet.from_jsonl_lazy(path)
    whole = ids(make(lazy))
    resumed = make(lazy, concurrent=False)
    resumed.load_state_dict(take(make(lazy), 8).state_dict())
    assert ids(resumed) == whole[8:]


def test_resuming_an_unseeded_source_says_that_it_is_not_exact(caplog: pytest.LogCaptureFixture) -> None:
    def mixed() -> CutSet:
        return CutSet.mux(CUTS.subset(first=300), CUTS.subset(last=300), seed="trng")

    resumed = make(mixed())
    resumed.load_state_dict(take(make(mixed()), 5).state_dict())
    with caplog.at_level(logging.WARNING):
        list(resumed)
    assert "resume is not exact: LazyIteratorMultiplexer is seeded with 'trng'; use whole numbers" in caplog.text


@pytest.mark.parametrize("seed", ["trng", "randomized"])
def test_a_drawn_seed_is_kept_in_the_state(seed: str) -> None:
    sampler = take(make(seed=seed), 5)
    state = sampler.state_dict()
    expected = rest(sampler)
    resumed = make(seed=seed)
    resumed.load_state_dict(state)
    assert ids(resumed) == expected


def test_trng_differs_from_one_epoch_to_the_next() -> None:
    sampler = make(seed="trng")
    assert ids(sampler) != ids(sampler)


class NotLhotses:
    """Stands for the sources of other packages."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __iter__(self) -> Iterator[Any]:
        return iter(CUTS)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (NotLhotses(shard_seed="trng"), "resume is not exact: NotLhotses is seeded with 'trng'; use whole numbers"),
        (NotLhotses(epoch=0), "may not be exact: NotLhotses seems to count how often it is iterated, in 'epoch', whi"),
    ],
)
def test_sources_of_others_that_differ_each_time_are_told_of(
    source: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = make(CutSet(source))
    sampler.set_epoch(1)
    resumed = make(CutSet(source))
    resumed.load_state_dict(take(sampler, 5).state_dict())
    with caplog.at_level(logging.WARNING):
        list(resumed)
    assert message in caplog.text


def _half(cut: Any) -> float:
    return float(cut.duration) / 2


def _whole(cut: Any) -> float:
    return float(cut.duration)


LIMITS: dict[str, Any] = {"bucket_batch_size": None, "duration_bins": None, "num_buckets": 3}


@pytest.mark.parametrize(
    ("saved", "loaded", "name"),
    [
        ({"measure_length": _whole}, {"measure_length": _half}, "measure_length"),
        ({}, {"measure_length": _whole}, "measure_length"),
        (LIMITS | {"max_cuts": 8, "max_tps": 4.0}, LIMITS | {"max_cuts": 8, "max_tps": 3.5}, "min_tps or max_tps"),
        (
            LIMITS | {"constraint": TimeConstraint(max_duration=60.0)},
            LIMITS | {"constraint": TimeConstraint(max_duration=90.0)},
            "constraint",
        ),
    ],
)
def test_rules_that_changed_since_the_state_was_saved_are_told_of(
    saved: dict[str, Any], loaded: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for options, expected in ((loaded, [name]), (saved, [])):
        caplog.clear()
        resumed = make(**options)
        resumed.load_state_dict(take(make(**saved), 5).state_dict())
        with caplog.at_level(logging.WARNING):
            next(iter(resumed))
        told = [text for text in caplog.messages if "differs from when the state was saved" in text]
        assert told == [
            f"resume is not exact: {each} differs from when the state was saved, so that cuts may repeat or be missing "
            f"in this epoch"
            for each in expected
        ]


def test_another_filter_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    resumed = make()
    resumed.load_state_dict(take(make().filter(_is_short), 5).state_dict())
    with caplog.at_level(logging.WARNING):
        list(resumed)
    assert "resume is not exact: filter() differs from when the state was saved" in caplog.text


def test_a_filter_in_the_middle_of_an_epoch_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    sampler = take(make(), 5)
    with caplog.at_level(logging.WARNING):
        sampler.filter(_is_short)
    assert caplog.messages == ["filter() takes effect with the next iter(), not in the epoch that is being sampled"]
    assert all(cut.duration < 12.0 for batch in sampler for cut in batch)


def test_a_source_that_ends_before_the_position_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    resumed = make(CUTS.subset(first=200))
    resumed.load_state_dict(take(make(), 60).state_dict())
    with caplog.at_level(logging.WARNING):
        list(resumed)
    assert "of 60 batches that were drawn before: it holds fewer cuts than when the state was saved" in caplog.text


@pytest.mark.parametrize(
    "options", [{"bucket_batch_size": [8, 4, 2]}, {"bucket_batch_size": None, "max_duration": 60.0}]
)
def test_bins_that_were_estimated_are_those_of_the_state(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    options = options | {"duration_bins": None, "num_buckets": 3}
    sampler = make(**options)
    whole = ids(sampler)
    resumed = make(**options, num_cuts_for_bins_estimate=100)
    assert resumed.duration_bins != sampler.duration_bins
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(take(sampler, 5).state_dict())
    assert resumed.duration_bins == sampler.duration_bins
    assert ids(resumed) == whole[5:]
    assert "duration_bins becomes [" in caplog.text


# What can't be continued


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (
            {"rank": 0, "world_size": 2},
            {"rank": 0, "world_size": 4},
            "the state was saved with world_size=2, this sampler has 4; restore that, or pass on_resume='new_epoch'",
        ),
        ({"seed": 1}, {"seed": 2}, "the state was saved with seed=1, this sampler has 2"),
        (
            {},
            {"duration_bins": [5.0, 10.0, 20.0, 40.0]},
            r"saved with the bins \[\[5.0, 10.0, 20.0, 30.0\], True, \[\], \[\]\], this sampler has \[\[5.0",
        ),
    ],
    ids=["other ranks", "another seed", "other bins"],
)
def test_a_state_of_another_set_up_is_refused_or_starts_the_epoch_anew(
    saved: dict[str, Any], loaded: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = make(**saved)
    sampler.set_epoch(3)
    take(sampler, 5)
    with pytest.raises(ResumeError, match=message):
        make(**loaded).load_state_dict(sampler.state_dict())
    resumed = make(**loaded, on_resume="new_epoch")
    state = sampler.state_dict()
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(state)
    assert state == {}
    assert "not resumed in the middle of epoch 3" in caplog.text
    assert resumed.epoch == 3
    fresh = make(**loaded)
    fresh.set_epoch(3)
    assert ids(resumed) == ids(fresh)


def test_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    state = take(make(rank=0, world_size=1), 3).state_dict()
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ResumeError, match="the state was saved on 2 ranks, this job has 8"):
        make(rank=0, world_size=1).load_state_dict(state)


def test_a_state_of_lhotses_own_sampler_is_refused() -> None:
    with pytest.warns(UserWarning, match="eagerly read CutSet"):
        theirs = DynamicBucketingSampler(CUTS, max_duration=60.0, duration_bins=BINS)
    iter(theirs)
    next(theirs)
    ours = CalibratedBucketingSampler(CUTS, max_duration=60.0, duration_bins=BINS)
    with pytest.raises(ResumeError, match="the state was saved by Lhotse's own sampler, which draws other batches"):
        ours.load_state_dict(theirs.state_dict())


def _damaged(change: Any) -> dict[str, Any]:
    state = take(make(), 3).state_dict()
    change(state)
    return dict(state)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state.clear(), "the state is empty: it was loaded before, which empties it, or never saved"),
        (lambda state: state.pop("diagnostics"), r"the state is damaged \(KeyError: 'diagnostics'\)"),
        (lambda state: state.update(buffer_size="many"), r"the state is damaged \(TypeError"),
        (lambda state: state["oomfit"].pop("drawn"), r"the state is damaged \(KeyError: 'drawn'\)"),
        (lambda state: state["oomfit"].update(drawn=[["a", "b"]]), r"the state is damaged \(ValueError"),
        (lambda state: state["oomfit"].update(extra=1), r"the state is damaged \(TypeError"),
        (lambda state: state.update(oomfit=3), "the state has format None, this version reads 1"),
    ],
)
def test_a_damaged_state_is_refused_and_left_as_it_was(change: Any, reason: str) -> None:
    state = _damaged(change)
    before = deepcopy(state)
    sampler = make()
    with pytest.raises(ResumeError, match=reason):
        sampler.load_state_dict(state)
    assert state == before
    assert ids(sampler) == ids(make())
    lenient = make(on_resume="new_epoch")
    lenient.load_state_dict(state)
    assert ids(lenient) == ids(make())


def test_a_state_that_was_refused_can_be_loaded_where_it_belongs() -> None:
    state = take(make(), 5).state_dict()
    with pytest.raises(ResumeError, match="bins"):
        make(duration_bins=[5.0, 10.0, 20.0, 40.0]).load_state_dict(state)
    resumed = make()
    resumed.load_state_dict(state)
    assert ids(resumed) == ids(make())[5:]


def test_settings_that_decide_what_comes_next_are_taken_from_the_state(caplog: pytest.LogCaptureFixture) -> None:
    whole = ids(make(concurrent=True))
    resumed = make(concurrent=False)
    with caplog.at_level(logging.WARNING):
        resumed.load_state_dict(take(make(concurrent=True), 4).state_dict())
    assert "concurrent becomes True, as in the loaded state" in caplog.text
    assert ids(resumed) == whole[4:]
