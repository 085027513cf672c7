"""The worst-case shapes of buckets, and what is told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from lhotse import CutSet
from tiny_asr import TinyDataset, TinyModel, tiny_cuts, tiny_sampler

from lhotse_oomfit.shapes import WorstCases
from lhotse_oomfit.training import Training


def worst_cases(
    sampler: Any = None, collate: Callable[[CutSet], Any] | None = None, *, cuts: list[Any] | None = None
) -> WorstCases:
    dataset = TinyDataset()
    training = Training(
        module=TinyModel(),
        step=cast("Any", None),
        collate=dataset.__getitem__ if collate is None else collate,
        dataset=dataset,
        optimizers=(),
    )
    sampler = tiny_sampler() if sampler is None else sampler
    return WorstCases(sampler, training, sampler.sample_cuts(40) if cuts is None else cuts)


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
