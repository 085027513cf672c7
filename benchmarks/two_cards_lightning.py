"""Two ranks under Lightning's DDP: calibrated by the callback, trained, and started a second time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from recording import every_trial
from torch.utils.data import DataLoader
from two_cards_models import ConformerLoss, Noise, Setting, make_sampler, nemo_config

from lhotse_oomfit.lightning import BucketBatchSizeFinder

NUM_STEPS = 20


class Recogniser(pl.LightningModule):
    """The examples' Conformer."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.loss = ConformerLoss(setting)
        self.vocabulary = self.loss.vocabulary

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.loss(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def nemo_model(setting: Setting, trainer: pl.Trainer) -> Any:
    """NeMo's model as it stands, with AdamW."""
    from nemo.collections.asr.models import EncDecCTCModelBPE
    from omegaconf import OmegaConf

    config = OmegaConf.load(nemo_config(setting)).model
    config.optim = {"name": "adamw", "lr": 1e-5, "weight_decay": 0.0}
    model = EncDecCTCModelBPE(cfg=config, trainer=trainer)
    model.vocabulary = int(model.tokenizer.vocab_size)
    return model


class Limit(pl.Callback):
    """Shortens the default group's timeout as soon as the group is there."""

    def __init__(self, limit: Callable[[float], None], timeout_s: float) -> None:
        self.limit, self.timeout_s = limit, timeout_s

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.limit(self.timeout_s)


class Data(pl.LightningDataModule):
    """Makes the loader once the processes know each other: a sampler asks for its rank when it is made."""

    def __init__(self, setting: Setting, noise: Noise) -> None:
        super().__init__()
        self.setting, self.noise = setting, noise

    def train_dataloader(self) -> Any:
        return DataLoader(self.noise, sampler=make_sampler(self.setting), batch_size=None)


def run(
    rank: Any,
    *,
    checksum: Callable[[Any], str],
    limit_group: Callable[[float], None],
) -> dict[str, Any]:
    """Two fits from the same weights: the first measures, the second loads."""
    found: dict[str, Any] = {}
    setting, args = rank.setting, rank.args
    is_cuda = setting.device.type == "cuda"
    for name in ("first", "second"):
        noise = Noise(setting, 2)
        finder = BucketBatchSizeFinder(
            make_batch=noise.make,
            memory_limit=setting.memory_limit,
            memory_fraction=setting.memory_fraction,
            heartbeat_timeout=setting.heartbeat_s,
            cache=setting.work / f"{setting.subject}-lightning",
            progress=False,
        )
        trainer = pl.Trainer(
            accelerator=setting.device.type,
            devices=2,
            strategy=DDPStrategy(),
            sync_batchnorm=is_cuda,
            precision="bf16-mixed",
            max_steps=NUM_STEPS,
            callbacks=[Limit(limit_group, args.group_timeout_s), finder],
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        torch.manual_seed(0)
        with setting.device:
            module = nemo_model(setting, trainer) if setting.subject == "ctc" else Recogniser(setting)
        noise.vocabulary = module.vocabulary
        begun = time.perf_counter()
        with every_trial() as own:
            trainer.fit(module, Data(setting, noise))
        profile = finder.profile
        if profile is None:
            raise RuntimeError("the callback has no profile after fit")
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, checksum(module))
        found[name] = {
            "sizes": profile.bucket_batch_size,
            "trials": profile.num_trials,
            "ooms": profile.num_ooms,
            "own_trials": len(own),
            "steps": trainer.global_step,
            "seconds": time.perf_counter() - begun,
            "equal": len(set(said)) == 1,
            "strategy": profile.fingerprint.fields["strategy"],
        }
    return found
