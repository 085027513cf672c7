"""`oomfit calibrate`, `verify` and `doctor` on Lightning modules, the callback's way."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_training_commands import LIMIT, calibrated, failed, here, run

pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]
__all__ = ["here"]

LIGHTNING = """
import lightning.pytorch as pl
import torch
from tiny_asr import TinyDataset, TinyModel, tiny_sampler
from torch.utils.data import DataLoader

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = TinyModel()

    def training_step(self, batch, batch_idx):
        loss = self.model.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return loader()

def loader(**options):
    return DataLoader(TinyDataset(), sampler=tiny_sampler(duration_bins=[2.0, 4.0], **options), batch_size=None)

def make_training():
    return Module(), Data()

def with_trainer():
    return {"module": Module(), "data": loader(), "trainer": {"accumulate_grad_batches": 2, "max_steps": 5}}

def fixed_sizes():
    return Module(), loader(bucket_batch_size=[3, 2])

def with_a_trainer_object():
    return {"module": Module(), "data": loader(), "trainer": pl.Trainer(barebones=True)}
"""


@pytest.fixture(autouse=True)
def job(here: Path) -> Iterator[None]:
    (here / "oomfit_lightning_job.py").write_text(LIGHTNING)
    yield
    sys.modules.pop("oomfit_lightning_job", None)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_lightning_modules_go_the_callback_s_way() -> None:
    profile = calibrated("oomfit_lightning_job:make_training")
    assert profile.fingerprint.fields["strategy"] == "SingleDeviceStrategy"
    result = run("verify", "latest", "oomfit_lightning_job:make_training", *LIMIT, "-n", "1")
    assert result.exit_code == 0, result.stderr
    assert "measured for something else" not in result.stderr
    accumulating = calibrated("oomfit_lightning_job:with_trainer")
    assert accumulating.fingerprint.fields["accumulated gradients"] == "True"


def test_lightning_with_ddp_runs_the_real_strategy_in_one_process() -> None:
    profile = calibrated("oomfit_lightning_job:make_training", "--ddp")
    assert profile.fingerprint.fields["strategy"] == "DDPStrategy"
    assert profile.fingerprint.fields["ranks"] == "several"


def test_lightning_data_with_nothing_to_calibrate_is_refused_before_it_trains() -> None:
    line = failed(5, "calibrate", "oomfit_lightning_job:fixed_sizes", *LIMIT)
    assert "no CalibratedBucketingSampler with bucket_batch_size='auto'" in line
    line = failed(5, "calibrate", "oomfit_lightning_job:with_a_trainer_object", *LIMIT)
    assert "trainer must be a mapping of the Trainer's arguments" in line


def test_doctor_looks_at_a_training() -> None:
    calm = json.loads(run("doctor", "oomfit_lightning_job:make_training", "--json").stdout)
    assert not any("use_distributed_sampler" in finding["what"] for finding in calm["findings"])
    result = run("doctor", "oomfit_lightning_job:with_trainer")
    assert result.exit_code == 1
    assert "HURTS  the Trainer has use_distributed_sampler=True, which is its default" in result.stdout
    assert "do:  Trainer(use_distributed_sampler=False)" in result.stdout
