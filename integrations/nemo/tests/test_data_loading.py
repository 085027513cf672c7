"""NeMo's own function for DataLoaders, given ``bucket_batch_size: auto``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Corpus
from lhotse.dataset import DynamicBucketingSampler, IterableDatasetWrapper, RoundRobinSampler, ZipSampler
from lhotse_oomfit_nemo.request import Request
from lhotse_oomfit_nemo.sampling import NemoBucketingSampler
from lhotse_oomfit_nemo.seams import install
from nemo.collections.asr.data.audio_to_text_lhotse import LhotseSpeechToTextBpeDataset
from nemo.collections.common.data.lhotse import dataloader as loading
from nemo.collections.common.data.lhotse import get_lhotse_dataloader_from_config
from nemo.collections.common.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from omegaconf import OmegaConf

from lhotse_oomfit.errors import EmptySourceError, InvalidArgumentError

install()


@pytest.fixture(scope="module")
def tokenizer(corpus: Corpus) -> Any:
    return SentencePieceTokenizer(str(corpus.tokenizer / "tokenizer.model"))


def loader(corpus: Corpus, tokenizer: Any, *, rank: int = 0, world_size: int = 1, **settings: Any) -> Any:
    config = {
        "use_lhotse": True,
        "manifest_filepath": str(corpus.train),
        "sample_rate": 16000,
        "shuffle": True,
        "use_bucketing": True,
        "bucket_batch_size": "auto",
        "num_buckets": 4,
        **settings,
    }
    config = {key: value for key, value in config.items() if value is not ...}
    dataset = LhotseSpeechToTextBpeDataset(tokenizer)
    return get_lhotse_dataloader_from_config(OmegaConf.create(config), rank, world_size, dataset, tokenizer)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the plugin logged; NeMo logs too."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("lhotse_oomfit_nemo")]


def ids(sampler: Any) -> list[list[str]]:
    return [[cut.id for cut in batch] for batch in sampler]


def test_a_section_without_auto_gets_the_samplers_of_nemo(corpus: Corpus, tokenizer: Any) -> None:
    fixed = loader(corpus, tokenizer, bucket_batch_size=[3, 2], bucket_duration_bins=[3.0, 9.0])
    assert type(fixed.sampler) is DynamicBucketingSampler
    dynamic = loader(corpus, tokenizer, bucket_batch_size=None, batch_duration=20)
    assert type(dynamic.sampler) is DynamicBucketingSampler
    assert loading.DynamicBucketingSampler is DynamicBucketingSampler


def test_bins_that_are_given_are_kept(corpus: Corpus, tokenizer: Any) -> None:
    made = loader(corpus, tokenizer, bucket_duration_bins=[2.0, 3.0, 9.0], max_duration=9.0)
    assert type(made.sampler) is NemoBucketingSampler
    assert made.sampler.bins.edges == (2.0, 3.0, 9.0)
    assert made.sampler.is_auto
    assert made.sampler.bucket_batch_size is None
    assert loading.DynamicBucketingSampler is DynamicBucketingSampler


def test_given_bins_that_end_before_the_data_are_warned_of(
    corpus: Corpus, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lhotse_oomfit_nemo"):
        loader(corpus, tokenizer, bucket_duration_bins=[2.0, 3.0], max_duration=9.0)
    assert said(caplog) == [
        "train_ds.max_duration is 9 and bucket_duration_bins end at 3: what lies between is skipped; add an edge of 9, "
        "or leave bucket_duration_bins out and have them estimated"
    ]


def test_estimated_bins_hold_the_longest_cut(corpus: Corpus, tokenizer: Any) -> None:
    edges = loader(corpus, tokenizer).sampler.bins.edges
    assert len(edges) == 4
    assert corpus.longest_s <= edges[-1] < corpus.longest_s + 0.011
    assert all(round(edge, 2) == edge for edge in edges)


def test_estimated_bins_reach_to_max_duration(corpus: Corpus, tokenizer: Any) -> None:
    near = 1.05 * corpus.longest_s
    edges = loader(corpus, tokenizer, max_duration=near).sampler.bins.edges
    assert len(edges) == 4
    assert edges[-1] == near


def test_what_is_far_longer_than_the_cuts_seen_gets_a_bucket_of_its_own(corpus: Corpus, tokenizer: Any) -> None:
    edges = loader(corpus, tokenizer, max_duration=12.5).sampler.bins.edges
    assert len(edges) == 4
    assert corpus.longest_s <= edges[2] < corpus.longest_s + 0.011
    assert edges[3] == 12.5
    assert loader(corpus, tokenizer, max_duration=12.5, num_buckets=1).sampler.bins.edges == (12.5,)


def test_an_empty_source_is_named(corpus: Corpus, tokenizer: Any) -> None:
    with pytest.raises(EmptySourceError, match="train_ds has no cut that passes its filters"):
        loader(corpus, tokenizer, min_duration=100.0)


def test_buckets_follow_from_auto_and_may_be_left_unsaid(corpus: Corpus, tokenizer: Any) -> None:
    assert type(loader(corpus, tokenizer, use_bucketing=...).sampler) is NemoBucketingSampler


BINS_2D = [[2.5, 30], [2.5, 50], [5.0, 60], [5.0, 120]]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"bucket_duration_bins": [2.0, 5.0]}, [3, 2]),
        ({"bucket_duration_bins": [2.0, 5.0], "max_tps": 18.0, "min_tps": 5}, [3, 2]),
        ({"bucket_duration_bins": BINS_2D}, [4, 3, 2, 2]),
        ({"bucket_duration_bins": BINS_2D, "bucketing_2d_strict_mode": False}, [4, 3, 2, 2]),
        ({"bucket_duration_bins": BINS_2D, "max_tps": [16.0, 17.0, 17.0, 17.5]}, [4, 3, 2, 2]),
        ({"bucket_duration_bins": [2.0, 5.0], "max_duration": 3.0}, [3, 2]),
    ],
    ids=["1D", "1D with tps", "2D strict", "2D lenient", "2D with a list of tps", "with a filter"],
)
def test_an_epoch_holds_the_cuts_that_nemo_takes_with_the_same_sizes(
    corpus: Corpus, tokenizer: Any, settings: dict[str, Any], sizes: list[int]
) -> None:
    ours = loader(corpus, tokenizer, **settings).sampler
    ours.apply(sizes)
    theirs = loader(corpus, tokenizer, **settings | {"bucket_batch_size": sizes}, concurrent_bucketing=False).sampler
    taken = sorted(name for batch in ids(ours) for name in batch)
    expected = sorted(name for batch in ids(theirs) for name in batch)
    assert taken == expected
    assert 0 < len(taken) <= 80


@pytest.mark.parametrize("word", ["Auto", "atuo"])
def test_another_word_than_auto_is_named(corpus: Corpus, tokenizer: Any, word: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        loader(corpus, tokenizer, bucket_batch_size=word)
    assert str(raised.value) == f"bucket_batch_size must be 'auto', a list of sizes or null, it is '{word}'"


@pytest.mark.parametrize("word", ["Auto", "AUTO"])
def test_another_word_at_the_top_of_a_multi_config_is_named(corpus: Corpus, tokenizer: Any, word: str) -> None:
    part = {"manifest_filepath": str(corpus.train), "batch_size": 2}
    config = {"multi_config": True, "bucket_batch_size": word, "seed": 0, "shard_seed": 0, "part": part}
    with pytest.raises(InvalidArgumentError, match=f"bucket_batch_size must be 'auto', .*, it is '{word}'"):
        get_lhotse_dataloader_from_config(OmegaConf.create(config), 0, 1, torch.utils.data.Dataset(), tokenizer)


def test_cuts_that_are_made_longer_than_their_bucket_are_refused(corpus: Corpus, tokenizer: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"train_ds.concatenate_duration_factor must be 1 .*, it is 1.5"):
        loader(corpus, tokenizer, concatenate_samples=True, concatenate_duration_factor=1.5)
    edges = [2.5, 6.0]
    sampler = loader(corpus, tokenizer, concatenate_samples=True, bucket_duration_bins=edges).sampler
    sampler.apply([4, 3])
    assert all(max(cut.duration for cut in batch) <= edges[-1] for batch in sampler)


def test_where_more_may_follow_than_was_seen_max_duration_is_asked_for(
    corpus: Corpus, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lhotse_oomfit_nemo"):
        loader(corpus, tokenizer, num_cuts_for_bins_estimate=10)
    (warning,) = said(caplog)
    assert "the longest of the first 10 cuts: what is longer is skipped; set train_ds.max_duration" in warning
    caplog.clear()
    with caplog.at_level(logging.WARNING, "lhotse_oomfit_nemo"):
        loader(corpus, tokenizer)
        loader(corpus, tokenizer, num_cuts_for_bins_estimate=10, max_duration=9.0)
    assert said(caplog) == []


def test_a_source_without_an_end_is_read_in_another_order_each_epoch_by_all_ranks_alike(
    corpus: Corpus, tokenizer: Any, tmp_path: Path
) -> None:
    lines = corpus.train.read_text().splitlines(keepends=True)
    parts = [tmp_path / f"{k}.jsonl" for k in range(4)]
    for k, part in enumerate(parts):
        part.write_text("".join(lines[k::4]))
    sources = [{"type": "nemo", "manifest_filepath": str(part), "weight": 1.0} for part in parts]
    small = {"bucket_duration_bins": [9.0], "bucket_buffer_size": 8, "shuffle_buffer_size": 8}

    def epochs(rank: int, **settings: Any) -> list[list[list[str]]]:
        given = {"manifest_filepath": ..., "input_cfg": sources, "seed": 0, **small, **settings}
        sampler = loader(corpus, tokenizer, rank=rank, world_size=2, **given).sampler
        assert sampler.starts_anew
        sampler.apply([4])
        read = []
        for epoch in (0, 1, 2, 1):
            sampler.set_epoch(epoch)
            read.append([[cut.id for cut in batch] for batch in finite(sampler, 3)])
        return read

    first, second = epochs(0), epochs(1)
    for ours, theirs in zip(first, second, strict=True):
        drawn = [name for batch in (*ours, *theirs) for name in batch]
        assert sorted(drawn) == sorted(set(drawn))
    sets = [{name for batch in (*ours, *theirs) for name in batch} for ours, theirs in zip(first, second, strict=True)]
    assert sets[0] != sets[1] != sets[2]
    assert first[1] == first[3]
    assert not loader(corpus, tokenizer).sampler.starts_anew
    ending = loader(corpus, tokenizer, manifest_filepath=..., input_cfg=sources, force_finite=True)
    assert not ending.sampler.starts_anew


def test_a_list_of_tps_holds_in_one_dimension_too(corpus: Corpus, tokenizer: Any) -> None:
    made = loader(corpus, tokenizer, bucket_duration_bins=[2.0, 5.0], max_tps=[15.0, 20.0]).sampler
    assert made.bins.max_tps == (15.0, 20.0)


def test_a_limit_of_density_without_tokens_is_told(corpus: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    config = {"manifest_filepath": str(corpus.train), "bucket_batch_size": "auto", "max_tps": 25.0, "shuffle": True}
    with caplog.at_level(logging.WARNING, "lhotse_oomfit_nemo"):
        made = get_lhotse_dataloader_from_config(OmegaConf.create(config), 0, 1, torch.utils.data.Dataset(), None)
    assert made.sampler.bins.max_tps is None
    assert "train_ds.max_tps has no effect: cuts have no tokens here" in caplog.text


def test_options_are_flat_keys(corpus: Corpus, tokenizer: Any) -> None:
    made = loader(
        corpus,
        tokenizer,
        oomfit_memory_fraction=0.85,
        oomfit_recalibrate="always",
        oomfit_cache=False,
        oomfit_ranks="shard",
        oomfit_objective="throughput",
        oomfit_memory_limit="600MiB",
        oomfit_verify_on_load=True,
        oomfit_batches="schema",
    )
    request: Request = made.sampler.request
    assert request.batches == "schema"
    options = request.options
    assert (options.memory_fraction, options.recalibrate, options.cache) == (0.85, "always", False)
    assert (options.ranks, options.objective, options.memory_limit) == ("shard", "throughput", "600MiB")
    assert options.verify_on_load is True


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "oomfit_memory_fracton",
            0.8,
            "train_ds.oomfit_memory_fracton is no option of a calibration; did you mean 'oomfit_memory_fraction'?",
        ),
        (
            "oomfitmemory_fraction",
            0.8,
            "train_ds.oomfitmemory_fraction is no option of a calibration; did you mean 'oomfit_memory_fraction'?",
        ),
        ("oomfit_memory_fraction", 1.5, "oomfit_memory_fraction must lie above 0 and at most at 1, it is 1.5"),
        ("oomfit_memory_fraction", "much", "oomfit_memory_fraction must be a number, it is 'much'"),
        ("oomfit_batches", "random", "oomfit_batches must be 'dataset' or 'schema', it is 'random'"),
        ("oomfit_world_size", 2, "train_ds.oomfit_world_size is no option of a calibration; there are "),
    ],
)
def test_a_wrong_option_is_an_error(corpus: Corpus, tokenizer: Any, key: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        loader(corpus, tokenizer, **{key: value})
    assert str(raised.value).startswith(message)


def test_map_style_ranks_draw_from_one_order_and_lose_nothing(
    corpus: Corpus, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    batches = []
    for rank in range(4):
        caplog.clear()
        with caplog.at_level(logging.INFO, "lhotse_oomfit_nemo"):
            sampler = loader(
                corpus, tokenizer, rank=rank, world_size=4, seed="trng", bucket_duration_bins=[2.5, 6.0]
            ).sampler
        assert said(caplog) == [
            "map-style data: shard_seed=trng becomes 0, so that all ranks draw from one order of the data, and "
            "concurrent_bucketing reads ahead in that order"
        ]
        sampler.apply([4, 3])
        batches.append(ids(sampler))
    assert len({len(each) for each in batches}) == 1
    drawn = [name for each in batches for batch in each for name in batch]
    assert sorted(drawn) == sorted(set(drawn))
    assert len(drawn) == 80


def test_a_seed_of_the_users_stands_in_for_trng(corpus: Corpus, tokenizer: Any) -> None:
    assert loader(corpus, tokenizer, seed=5).sampler.seed == 5
    assert loader(corpus, tokenizer, seed=5, shard_seed=7).sampler.seed == 7


def finite(batches: Any, num: int) -> Iterator[Any]:
    for _, batch in zip(range(num), batches, strict=False):
        yield batch


@pytest.mark.parametrize("kind", ["tarred", "shar"])
@pytest.mark.parametrize("bins", [None, [2.5, 6.0]], ids=["estimated", "given"])
def test_iterable_data_are_sampled_in_the_dataset_by_each_rank_for_itself(
    request: pytest.FixtureRequest, corpus: Corpus, tokenizer: Any, kind: str, bins: list[float] | None
) -> None:
    source = request.getfixturevalue(kind)
    where = {"manifest_filepath": ..., "shar_path": source} if kind == "shar" else source
    made = [
        loader(
            corpus,
            tokenizer,
            rank=rank,
            world_size=2,
            bucket_duration_bins=bins,
            num_cuts_for_bins_estimate=80,
            bucket_buffer_size=60,
            **where,
        )
        for rank in range(2)
    ]
    for each in made:
        assert isinstance(each.dataset, IterableDatasetWrapper)
        sampler = each.dataset.sampler
        assert type(sampler) is NemoBucketingSampler
        assert (sampler.rank, sampler.world_size) == (0, 1)
        sampler.apply([4] * len(sampler.bins))
        shapes = [batch[0].shape for batch in finite(each, 5)]
        assert max(shape[0] for shape in shapes) == 4
    # Estimated in one order of the data, though the ranks read it in different ones.
    assert made[0].dataset.sampler.bins == made[1].dataset.sampler.bins


@pytest.mark.parametrize(("fusion", "kind"), [("round_robin", RoundRobinSampler), ("zip", ZipSampler)])
def test_the_top_of_a_multi_config_speaks_for_its_parts(
    corpus: Corpus, tokenizer: Any, fusion: str, kind: type
) -> None:
    part = {"manifest_filepath": str(corpus.train), "use_bucketing": True, "bucket_duration_bins": [2.5, 6.0]}
    config = {
        "multi_config": True,
        "sampler_fusion": fusion,
        "seed": "trng",
        "shard_seed": "trng",
        "shuffle": True,
        "bucket_batch_size": "auto",
        "oomfit_memory_limit": "300MiB",
        "first": part,
        "second": part | {"bucket_duration_bins": [3.0, 6.0]},
        "fixed": part | {"bucket_batch_size": [2, 1]},
    }
    dataset = LhotseSpeechToTextBpeDataset(tokenizer)
    given = OmegaConf.create(config)
    made = get_lhotse_dataloader_from_config(given, 0, 2, dataset, tokenizer)
    assert type(made.sampler) is kind
    first, second, fixed = made.sampler.samplers
    assert type(first) is type(second) is NemoBucketingSampler
    assert second.bins.edges == (3.0, 6.0)
    assert first.request == second.request
    assert first.request.options.memory_limit == "300MiB"
    assert first.seed == second.seed == 0
    assert type(fixed) is DynamicBucketingSampler
    assert "bucket_batch_size" not in given.first  # what was given stays as it was


def test_parts_of_a_multi_config_must_be_calibrated_alike(corpus: Corpus, tokenizer: Any) -> None:
    part = {"manifest_filepath": str(corpus.train), "bucket_batch_size": "auto", "oomfit_mode": "fast"}
    config = {"multi_config": True, "seed": 0, "shard_seed": 0, "shuffle": True, "oomfit_mode": "verify", "part": part}
    with pytest.raises(InvalidArgumentError, match=r"train_ds.oomfit_mode is 'verify' and train_ds.part.oomfit_mode"):
        get_lhotse_dataloader_from_config(OmegaConf.create(config), 0, 1, torch.utils.data.Dataset(), tokenizer)


def test_with_a_prompt_the_whole_prompt_is_the_length(corpus: Corpus, tokenizer: Any) -> None:
    made = loader(corpus, tokenizer, prompt_format="plain", bucket_duration_bins=[[6.0, 20], [6.0, 200]], max_tps=50.0)
    cut = made.sampler.sample_cuts(1)[0]
    assert made.sampler.measure_tokens(cut) == len(cut.input_ids)


@pytest.mark.parametrize("total", [True, False])
def test_with_multimodal_sampling_lengths_are_tokens(corpus: Corpus, tokenizer: Any, total: bool) -> None:
    made = loader(
        corpus,
        tokenizer,
        use_multimodal_sampling=True,
        token_equivalent_duration=0.08,
        measure_total_length=total,
        bucket_duration_bins=None,
    )
    cut = made.sampler.sample_cuts(1)[0]
    audio = -(-cut.duration // 0.08)
    assert made.sampler.measure_length(cut) == audio + total * len(cut.supervisions[0].tokens)
    longest = max(made.sampler.measure_length(cut) for cut in made.sampler.sample_cuts(80))
    assert made.sampler.bins.edges[-1] == longest


def test_buckets_of_tokens_reach_to_max_tokens(corpus: Corpus, tokenizer: Any) -> None:
    settings = {"use_multimodal_sampling": True, "token_equivalent_duration": 0.08, "measure_total_length": True}
    edges = loader(corpus, tokenizer, max_tokens=400, **settings).sampler.bins.edges
    assert len(edges) == 4
    assert edges[-1] == 400
    assert edges[-2] < 200


def test_a_sampler_that_is_given_to_several_epochs_reads_the_manifest_anew(corpus: Corpus, tokenizer: Any) -> None:
    sampler = loader(corpus, tokenizer, bucket_duration_bins=[2.5, 6.0]).sampler
    sampler.apply([4, 3])
    first = ids(sampler)
    sampler.set_epoch(1)
    second = ids(sampler)
    assert first != second
    names = [json.loads(line)["audio_filepath"] for line in corpus.train.read_text().splitlines()]
    assert sum(map(len, first)) == sum(map(len, second)) == len(names)


@pytest.mark.parametrize("name", ["ctc_1d", "aed_2d", "tarred", "multi_config"])
def test_the_examples_load(corpus: Corpus, tokenizer: Any, tarred: dict[str, str], name: str) -> None:
    example = OmegaConf.load(Path(__file__).parents[1] / "examples" / f"{name}.yaml")
    parts = [example.short, example.long] if name == "multi_config" else [example]
    for part in parts:
        part.update(tarred if name == "tarred" else {"manifest_filepath": str(corpus.train)})
        part.update(max_duration=5, min_duration=0, num_cuts_for_bins_estimate=80)
    if name == "aed_2d":
        example.prompt_format = "plain"  # canary's needs special tokens in the tokenizer
    dataset = LhotseSpeechToTextBpeDataset(tokenizer)
    made = get_lhotse_dataloader_from_config(example, 0, 1, dataset, tokenizer)
    sampler = made.dataset.sampler if name == "tarred" else made.sampler
    for each in getattr(sampler, "samplers", [sampler]):
        assert type(each) is NemoBucketingSampler
