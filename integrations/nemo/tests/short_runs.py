"""Trainings of a few steps on the CPU, and what they were fed with."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch


class Shapes(pl.Callback):
    """Notes the shape of one tensor of each batch that was trained on, and that the loss was finite.

    :param key: of the tensor in the batch.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.seen: list[tuple[int, ...]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.as_tensor(outputs["loss"]).isfinite()
        self.seen.append(tuple(batch[self.key].shape))


def short_trainer(num_steps: int, shapes: Shapes, **settings: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=num_steps,
        limit_train_batches=num_steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[shapes],
        **settings,
    )
