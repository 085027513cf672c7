"""The worst-case shapes of buckets, and what is told of them."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from lhotse import CutSet
from lhotse.dataset import SpecAugment
from lhotse.dataset.cut_transforms import PerturbSpeed
from tiny_asr import TinyDataset, TinyModel, tiny_cuts, tiny_sampler

from lhotse_oomfit.shapes import WorstCases
from lhotse_oomfit.training import Training


def worst_cases(
    sampler: Any = None, collate: Callable[[CutSet], Any] | None = None, *, make_batch: Any = None
) -> WorstCases:
    dataset = TinyDataset()
    training = Training(
        module=TinyModel(),
        step=cast("Any", None),
        collate=dataset.__getitem__ if collate is None else collate,
        dataset=dataset,
        optimizers=(),
        make_batch=make_batch,
    )
    sampler = tiny_sampler() if sampler is None else sampler
    return WorstCases(sampler, training, sampler.sample_cuts(40))


GUESS = (
    "nothing limits the length of outputs, so it was guessed from 40 cuts read ahead: from 5 to 24 {unit} by bucket; "
    "denser cuts later in the data may run out of memory, so pass max_tps to the sampler (or 2D duration_bins)"
)


@pytest.mark.parametrize(("tokenizer", "unit"), [(list, "tokens"), (None, "characters")])
def test_guessed_output_lengths_are_told_of_once(tokenizer: Any, unit: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        cases = worst_cases(tiny_sampler(tokenizer=tokenizer, max_tps=None))
    assert cases.output_lens == [5, 12, 18, 24]
    assert [record.message for record in caplog.records] == [GUESS.format(unit=unit)]


def without_texts() -> CutSet:
    return CutSet.from_cuts([cut.drop_supervisions() for cut in tiny_cuts(50)])


@pytest.mark.parametrize(
    "make_sampler",
    [
        tiny_sampler,
        lambda: tiny_sampler(max_tps=None, duration_bins=[[2.0, 12], [4.0, 24]]),
        lambda: tiny_sampler(without_texts(), max_tps=None, tokenizer=None),
    ],
    ids=["max_tps", "2D bins", "no texts"],
)
def test_nothing_is_told_where_nothing_is_guessed(
    make_sampler: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    def features_only(cuts: CutSet) -> Any:
        return {"audio": torch.zeros(len(list(cuts)), 10)}

    with caplog.at_level(logging.WARNING):
        worst_cases(make_sampler(), features_only)
    assert caplog.text == ""


def augmented(**options: Any) -> dict[str, str]:
    """The fields with every length and every mask drawn at random, from generators that nobody seeded."""
    sampler = tiny_sampler()
    sampler.map(PerturbSpeed(factors=[0.9, 1.1], p=0.5))
    augment, dataset = SpecAugment(p=0.9, **options), TinyDataset()

    def collate(cuts: CutSet) -> Any:
        batch = dataset[cuts]
        return {**batch, "features": augment(batch["features"])}

    return worst_cases(sampler, collate).batch_fields()


def test_processes_with_other_seeds_see_the_same_batch() -> None:
    code = """
import json, random, sys
import numpy, torch
seed = int(sys.argv[1])
random.seed(seed), numpy.random.seed(seed), torch.manual_seed(seed)
from test_shapes import augmented
print(json.dumps(augmented()))
"""
    here = Path(__file__).parent
    runs = []
    for seed in ("1", "2"):
        path = os.pathsep.join([str(here), str(here.parent)])
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        runs.append(
            subprocess.Popen([sys.executable, "-c", code, seed], env=environment, stdout=subprocess.PIPE, text=True)
        )
    seen = [json.loads(run.communicate(timeout=120)[0]) for run in runs]
    assert seen[0] == seen[1]
    assert seen[0]["batch.sizes"] == "feature_lens: 2, features: 2x111x16, token_lens: 2, tokens: 2x12"


def test_the_batch_is_the_same_whatever_was_drawn_before() -> None:
    first = augmented()
    for seed in range(3):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        assert augmented() == first


def test_a_dataset_or_a_map_that_doubles_the_length_is_seen() -> None:
    dataset = TinyDataset()

    def doubled(cuts: CutSet) -> Any:
        batch = dataset[cuts]
        return {**batch, "features": batch["features"].repeat(1, 2, 1)}

    usual, by_dataset = worst_cases().batch_fields(), worst_cases(collate=doubled).batch_fields()
    slower = tiny_sampler()
    slower.map(lambda cuts: CutSet.from_cuts(cut.perturb_speed(0.5) for cut in cuts))
    by_map = worst_cases(slower).batch_fields()
    assert usual["batch.sizes"] == "feature_lens: 2, features: 2x100x16, token_lens: 2, tokens: 2x12"
    assert by_dataset["batch.sizes"] == "feature_lens: 2, features: 2x200x16, token_lens: 2, tokens: 2x12"
    assert by_map["batch.sizes"] == "feature_lens: 2, features: 2x200x16, token_lens: 2, tokens: 2x12"
    assert usual["batch"] == by_dataset["batch"] == by_map["batch"]


def test_sizes_that_make_batch_draws_at_random_stay_out() -> None:
    sizes = iter(range(10, 20))
    cases = worst_cases(make_batch=lambda **options: torch.zeros(options["batch_size"], next(sizes)))
    assert cases.batch_fields() == {"batch": "batch: float32 2d"}
    fixed = worst_cases(make_batch=lambda **options: torch.zeros(options["batch_size"], 7))
    assert fixed.batch_fields() == {"batch": "batch: float32 2d", "batch.sizes": "batch: 2x7"}
