"""Memory that appears after a calibration, on a card: told when it stays, and not told of normal trainings."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tiny_asr import TinyDataset, TinyModel, tiny_cuts, tiny_sampler

from lhotse_oomfit.fit import loop_training
from lhotse_oomfit.late_memory import LateMemory, watch_steps

MIB = 1024**2


@pytest.mark.parametrize("late", [False, True])
def test_a_copy_that_stays_on_the_card_is_told_and_a_training_without_one_is_not(caplog: Any, late: bool) -> None:
    model = TinyModel(width=96).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    training = loop_training(
        tiny_sampler(), TinyDataset(), model=model, optimizer=optimizer, training_step=lambda m, b: m.loss(b)
    )
    features = TinyDataset()[tiny_cuts(60)]["features"]
    watch_steps(LateMemory(training, budget_bytes=64 * MIB), training.optimizers)
    kept = [torch.zeros(9, MIB // 4, device="cuda" if late else "cpu")]
    with caplog.at_level(logging.WARNING):
        for _ in range(34):
            optimizer.zero_grad()
            outputs = model(features.cuda().repeat(8, 1, 1))
            outputs.square().mean().backward()
            optimizer.step()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == late
    assert all("9.00 MiB of memory appeared after calibration and stays" in message for message in told)
    assert kept
