"""A small Lightning training on two CPU ranks, to be started as a script: what each rank ended with, as JSON.

python lightning_job.py OUTPUT '{"strategy": "ddp_spawn", "max_epochs": 1}'
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tiny_asr import TinyDataset, TinyModel, tiny_cuts, tiny_sampler
from torch.utils.data import DataLoader

from lhotse_oomfit.lightning import BucketBatchSizeFinder

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 2,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "log_every_n_steps": 1,
}


class IdsDataset(TinyDataset):
    def __getitem__(self, cuts: Any) -> Any:
        return {**super().__getitem__(cuts), "ids": [cut.id for cut in cuts]}


class Recogniser(pl.LightningModule):
    """Notes what it trained on; on the way out, writes what its rank ended with."""

    def __init__(self, output: Path, callback: BucketBatchSizeFinder, *, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = TinyModel()
        self.automatic_optimization = not manual
        self.output, self.callback = output, callback
        self.ids: list[list[str]] = []
        self.num_trials: list[int] = []
        self.sizes: list[list[int]] = []
        self.samplers: list[Any] = []

    def configure_model(self) -> None:
        """Shard the model where the strategy gives a mesh for it (FSDP2)."""
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None and not isinstance(self.model.head.weight, torch.distributed.tensor.DTensor):
            torch.distributed.fsdp.fully_shard(self.model.block, mesh=mesh["data_parallel"])
            torch.distributed.fsdp.fully_shard(self.model, mesh=mesh["data_parallel"])
            torch.distributed.fsdp.register_fsdp_forward_method(self.model, "loss")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model.loss(batch)
        self.log("loss", loss, batch_size=len(batch["ids"]))
        self.ids.append(batch["ids"])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("valid", self.model.loss(batch), batch_size=len(batch["ids"]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        self.samplers.append(tiny_sampler(tiny_cuts(90)))
        return DataLoader(IdsDataset(), sampler=self.samplers[-1], batch_size=None)

    def val_dataloader(self) -> Any:
        sampler = tiny_sampler(tiny_cuts(8), bucket_batch_size=[2, 2, 2, 2], shuffle=False)
        return DataLoader(IdsDataset(), sampler=sampler, batch_size=None)

    def on_train_epoch_start(self) -> None:
        self.sizes.append(self.samplers[-1].bucket_batch_size)

    def on_train_end(self) -> None:
        fsdp = torch.distributed.fsdp.FullyShardedDataParallel
        with fsdp.summon_full_params(self.trainer.strategy.model):  # does nothing where there is none
            state = {name: _whole(value).detach().clone() for name, value in sorted(self.named_parameters())}
            bits = b"".join(value.cpu().numpy().tobytes() for value in state.values())
        profile = self.callback.profile
        said = {
            "profile": profile.encode(),
            "num_trials": profile.num_trials,
            "ranks": profile.fingerprint.fields["ranks"],
            "strategy": profile.fingerprint.fields["strategy"],
            "bucket_batch_size": profile.bucket_batch_size,
            "sizes": self.sizes,
            "ids": self.ids,
            "parameters": hashlib.sha256(bits).hexdigest(),
        }
        self.output.joinpath(f"rank{self.global_rank}.json").write_text(json.dumps(said))


class SaveAt(pl.Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def _whole(parameter: Any) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def made_strategy(name: str) -> Any:
    from lightning.pytorch import strategies

    if name == "static_graph":
        return strategies.DDPStrategy(static_graph=True, find_unused_parameters=False)
    if name == "fsdp2":
        return strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    if name == "fsdp_on_cpu":

        class OnCpu(strategies.FSDPStrategy):
            """Lightning refuses FSDP on a CPU, by its exact type; it works all the same once it is told the device."""

            def _setup_model(self, model: Any) -> Any:
                wrap = torch.distributed.fsdp.FullyShardedDataParallel
                return wrap(model, device_id=torch.device("cpu"), **self.kwargs)

        return OnCpu(auto_wrap_policy={torch.nn.TransformerEncoderLayer})
    return name


def step_of(module: Recogniser, batch: Any) -> Any:
    loss = module.model.loss(batch)
    if module.automatic_optimization:
        return loss
    module.optimizers().zero_grad()
    module.manual_backward(loss)
    return None


def train(
    output: Path,
    strategy: str = "ddp",
    finder: dict[str, Any] | None = None,
    given_step: bool = False,
    manual: bool = False,
    save_at: tuple[int, str] | None = None,
    checkpoint: str | None = None,
    **options: Any,
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.INFO)
    callback = BucketBatchSizeFinder(
        training_step=step_of if given_step else None,
        **{"memory_limit": "3MiB", "cache": False, "progress": False, "num_sample_cuts": 40, **(finder or {})},
    )
    module = Recogniser(output, callback, manual=manual)
    callbacks = [callback] if save_at is None else [callback, SaveAt(*save_at)]
    trainer = pl.Trainer(callbacks=callbacks, strategy=made_strategy(strategy), **{**OPTIONS, **options})
    trainer.fit(module, ckpt_path=checkpoint)


if __name__ == "__main__":
    train(Path(sys.argv[1]), **json.loads(sys.argv[2]))
