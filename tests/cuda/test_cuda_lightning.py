"""Lightning on a card: in every precision, a training that measured goes on as one that loaded the profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_asr import TinyDataset, TinyModel, fingerprint_of_state, tiny_cuts, tiny_sampler
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch import callbacks  # noqa: E402

from lhotse_oomfit.lightning import BucketBatchSizeFinder  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


class Recogniser(pl.LightningModule):
    """The tiny model with a loss whose gradients are the same to the last bit each time, unlike CTC's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyModel(width=64)
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        log_probs = self.model(batch["features"])
        loss = log_probs.float()[..., :5].square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss, batch_size=len(log_probs))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


CASES: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "32-true"},
    "bf16_mixed": {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
    "16_mixed": {"precision": "16-mixed", "gradient_clip_val": 0.5},
    "bf16_true": {"precision": "bf16-true", "gradient_clip_val": 0.5},
    "ema": {"precision": "bf16-mixed", "ema": True},
}


@pytest.mark.parametrize("case", CASES)
def test_measuring_and_loading_lead_to_the_same_training_to_the_last_bit(tmp_path: Path, case: str) -> None:
    options = dict(CASES[case])
    averaging = getattr(callbacks, "EMAWeightAveraging", None)
    if (ema := options.pop("ema", False)) and averaging is None:
        pytest.skip("this Lightning has no EMA callback")

    def one() -> tuple[Any, ...]:
        pl.seed_everything(1, verbose=False)
        finder = BucketBatchSizeFinder(
            memory_limit="8GiB", memory_fraction=0.8, cache=tmp_path, progress=False, max_batch_size=6
        )
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            max_steps=5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[finder, *([averaging(decay=0.9)] if ema else [])],
            **options,
        )
        module = Recogniser()
        trainer.fit(module, DataLoader(TinyDataset(), sampler=tiny_sampler(tiny_cuts(40)), batch_size=None))
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        state = fingerprint_of_state(module, *trainer.optimizers, *(c.scheduler for c in trainer.lr_scheduler_configs))
        generator = torch.cuda.get_rng_state().numpy().tobytes()
        return finder.profile, module.losses, state, generator, scaler and scaler.state_dict()

    torch.use_deterministic_algorithms(True)
    try:
        measured, loaded = one(), one()
    finally:
        torch.use_deterministic_algorithms(False)
    assert measured[0].num_trials > 0
    assert measured == loaded
    assert len(measured[1]) > 5 * options.get("accumulate_grad_batches", 1) - 5
    assert measured[0].fingerprint.fields["precision"] == options["precision"]
