"""`BucketBatchSizeFinder` in real Lightning trainings, whatever the way the loader reaches the trainer."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lhotse.dataset.iterable_dataset import IterableDatasetWrapper
from processes import results, run_ranks
from tiny_asr import TinyDataset, TinyModel, fingerprint_of_state, tiny_cuts, tiny_sampler
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch")

from lhotse_oomfit.errors import InvalidArgumentError, UnsupportedStrategyError  # noqa: E402
from lhotse_oomfit.lightning import BucketBatchSizeFinder  # noqa: E402

# Lightning's own advice on workers, logging intervals and checkpoints, and its use of what torch deprecated.
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


class IdsDataset(TinyDataset):
    """Keeps the IDs of the cuts beside the tensors."""

    def __getitem__(self, cuts):
        return {**super().__getitem__(cuts), "ids": [cut.id for cut in cuts]}


class Recogniser(pl.LightningModule):
    """The tiny model with logging, a metric-like buffer, a scheduler and augmentation from global generators."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyModel()
        self.losses: list[float] = []
        self.ids: list[list[str]] = []
        self.num_direct_logs = 0

    def training_step(self, batch, batch_idx):
        features = batch["features"] + 0.01 * (random.random() + np.random.rand() + torch.rand(()).item())
        loss = self.model.loss({**batch, "features": features})
        self.log("train_loss", loss, prog_bar=True, on_epoch=True, batch_size=len(features))
        self.log_dict({"size": float(len(features))}, batch_size=len(features))
        if self.logger is not None:
            self.logger.log_metrics({"direct": 1.0}, step=self.num_direct_logs)
            self.num_direct_logs += 1
        self.losses.append(loss.item())
        self.ids.append(batch.get("ids", []))
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("valid_loss", self.model.loss(batch), batch_size=len(batch["features"]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def finder(cache: Any = False, **options: Any) -> BucketBatchSizeFinder:
    return BucketBatchSizeFinder(**{"memory_limit": "3MiB", "cache": cache, "progress": False, **options})


def loader_for(sampler=None, dataset=None, style="map", num_workers=0):
    sampler = sampler if sampler is not None else tiny_sampler()
    dataset = dataset if dataset is not None else TinyDataset()
    if style == "iterable":
        return DataLoader(IterableDatasetWrapper(dataset, sampler), batch_size=None, num_workers=num_workers)
    return DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=num_workers)


def trainer_for(*callbacks: Any, folder: Path | None = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 6,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
        "callbacks": list(callbacks),
    }
    return pl.Trainer(**{**defaults, **options})


def fit(*callbacks: Any, module: Any = None, loader: Any = None, **options: Any) -> tuple[Any, Any]:
    pl.seed_everything(1, verbose=False)
    module = module if module is not None else Recogniser()
    trainer = trainer_for(*callbacks, **options)
    trainer.fit(module, loader if loader is not None else loader_for())
    return trainer, module


# Ways to the loader


@pytest.mark.parametrize("style", ["map", "iterable"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_given_to_fit_is_calibrated_before_its_first_batch(style, num_workers):
    callback = finder()
    _, module = fit(callback, loader=loader_for(style=style, num_workers=num_workers, dataset=IdsDataset()))
    trained = module.ids[-6:]
    assert callback.profile is not None
    assert callback.profile.num_trials > 0
    # Trials keep no entries of their own, so what is there is training.
    assert len(module.ids) == 6
    assert all(1 <= len(ids) <= callback.profile.bucket_batch_size[0] for ids in trained)
    if style == "map" or num_workers < 2:  # each worker of an iterable dataset has a stream of its own
        assert len({i for ids in trained for i in ids}) == sum(map(len, trained))


def test_loaders_made_by_the_module_and_by_a_datamodule_are_calibrated():
    class WithLoader(Recogniser):
        def train_dataloader(self):
            return loader_for()

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return loader_for()

    by_module, by_datamodule = finder(), finder()
    trainer_for(by_module).fit(WithLoader())
    trainer_for(by_datamodule).fit(Recogniser(), datamodule=Data())
    assert by_module.profile.bucket_batch_size == by_datamodule.profile.bucket_batch_size


def test_a_training_step_without_batch_idx_and_one_that_returns_a_dict_work():
    class Short(Recogniser):
        def training_step(self, batch):
            return {"loss": self.model.loss(batch), "extra": torch.zeros(2)}

    callback = finder()
    fit(callback, module=Short())
    assert callback.profile is not None


def test_a_batch_that_the_module_transfers_itself_is_transferred_in_trials_too():
    class Transfers(Recogniser):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            batch["marked"] = True
            return batch

        def training_step(self, batch, batch_idx):
            assert batch["marked"]
            return super().training_step(batch, batch_idx)

    callback = finder()
    fit(callback, module=Transfers())
    assert callback.profile is not None


def test_validation_data_and_sanity_checks_do_not_get_in_the_way():
    callback = finder()
    valid = DataLoader(TinyDataset(), sampler=tiny_sampler(bucket_batch_size=[4, 3, 2, 1]), batch_size=None)
    module = Recogniser()
    trainer = trainer_for(callback, val_check_interval=3, num_sanity_val_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader_for(), valid)
    assert callback.profile is not None
    assert len(module.losses) == 6


def test_bf16_training_is_measured_in_bf16():
    plain, half = finder(), finder()
    fit(plain)
    _, module = fit(half, precision="bf16-mixed")
    assert half.profile.fingerprint.fields["precision"] == "bf16-mixed"
    assert half.profile.fingerprint != plain.profile.fingerprint
    assert len(module.losses) == 6


def test_loaders_made_anew_each_epoch_get_the_sizes_too(tmp_path):
    class Reloading(Recogniser):
        def train_dataloader(self):
            samplers.append(tiny_sampler())
            return loader_for(samplers[-1])

    samplers: list[Any] = []
    callback = finder(tmp_path)
    trainer_for(callback, max_steps=-1, max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(Reloading())
    assert len(samplers) == 2
    assert samplers[0].bucket_batch_size == samplers[1].bucket_batch_size


# No trace


def test_measuring_and_loading_lead_to_the_same_training_to_the_last_bit(tmp_path):
    def one(name):
        from lightning.pytorch.loggers import CSVLogger

        callback = finder(tmp_path / "profiles")
        log = CSVLogger(str(tmp_path), name=name, version="", flush_logs_every_n_steps=1)
        trainer, module = fit(callback, logger=log, accumulate_grad_batches=2)
        state = fingerprint_of_state(module, *trainer.optimizers, *(c.scheduler for c in trainer.lr_scheduler_configs))
        generators = (torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), repr(np.random.get_state()))
        csv = (tmp_path / name / "metrics.csv").read_text()
        progress = repr(trainer.fit_loop.epoch_loop.batch_progress), repr(trainer.fit_loop.epoch_progress)
        return callback.profile, module.losses, state, generators, csv, progress, module.num_direct_logs

    measured, loaded = one("measured"), one("loaded")
    assert measured[0].num_trials > 0
    assert measured == loaded
    assert len(measured[1]) == 12  # two batches a step
    assert "direct" in measured[4]


def test_the_trainer_has_its_own_methods_back():
    trainer, module = fit(finder())
    assert "process_dataloader" not in vars(trainer.strategy)
    assert "setup_data" not in vars(trainer.fit_loop)
    assert "log" not in vars(module)


def test_an_error_in_training_step_comes_out_as_itself_and_gives_the_methods_back():
    class Buggy(Recogniser):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError("a bug of the user's")

    trainer, module = trainer_for(finder()), Buggy()
    with pytest.raises(ZeroDivisionError, match="a bug of the user's"):
        trainer.fit(module, loader_for())
    assert "process_dataloader" not in vars(trainer.strategy)
    assert "setup_data" not in vars(trainer.fit_loop)
    assert "log" not in vars(module)


def test_a_second_fit_of_the_same_trainer_works(tmp_path, caplog):
    callback = finder(tmp_path)
    trainer, module = fit(callback)
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = None, 12
    with caplog.at_level(logging.INFO):
        trainer.fit(module, loader_for())
    assert "0 trial steps" in caplog.text
    assert len(module.losses) == 12


# Resuming


class StopAfter(pl.Callback):
    """Ends a training as a pre-empted job ends, after a checkpoint."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


@pytest.mark.parametrize("style", ["map", "iterable"])
@pytest.mark.parametrize("auto", [True, False], ids=["calibrated", "given-sizes"])
def test_a_resumed_run_continues_with_the_very_next_batch_although_workers_prefetch(tmp_path, style, auto):
    def one(*callbacks, checkpoint=None, epochs=2):
        pl.seed_everything(1, verbose=False)
        sampler = tiny_sampler(tiny_cuts(90), bucket_batch_size="auto" if auto else [12, 7, 5, 3])
        module = Recogniser()
        trainer = trainer_for(*callbacks, finder(tmp_path / "profiles"), max_steps=-1, max_epochs=epochs)
        loader = loader_for(sampler, IdsDataset(), style, num_workers=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(KeyboardInterrupt, SystemExit):
                trainer.fit(module, loader, ckpt_path=checkpoint)
        return module.ids

    whole = one()
    path = tmp_path / "stopped.ckpt"
    before = one(StopAfter(5, path))
    after = one(checkpoint=path)
    assert len(before) == 5
    assert before + after == whole


def test_a_checkpoint_from_between_epochs_starts_the_next_epoch(tmp_path):
    class AtEpochEnd(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / "epoch.ckpt")

    def one(*callbacks, checkpoint=None):
        pl.seed_everything(1, verbose=False)
        module = Recogniser()
        sampler = tiny_sampler(tiny_cuts(60), bucket_batch_size=[12, 7, 5, 3])
        trainer = trainer_for(*callbacks, finder(), max_steps=-1, max_epochs=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, loader_for(sampler, IdsDataset()), ckpt_path=checkpoint)
        return module.ids

    whole = one(AtEpochEnd())
    second_epoch = one(checkpoint=tmp_path / "epoch.ckpt")
    assert whole[-len(second_epoch) :] == second_epoch
    assert sum(map(len, second_epoch)) == 60


@pytest.mark.skipif(
    not hasattr(pl.loops.fit_loop._FitLoop, "restarted_on_epoch_end"),
    reason="this Lightning trains an epoch again that a checkpoint of its last batch had ended",
)
@pytest.mark.parametrize("style", ["map", "iterable"])
def test_a_checkpoint_of_an_epochs_last_batch_goes_on_with_the_next_epoch(tmp_path, style):
    def one(*callbacks, checkpoint=None):
        pl.seed_everything(1, verbose=False)
        module = Recogniser()
        sampler = tiny_sampler(tiny_cuts(60), bucket_batch_size=[12, 7, 5, 3])
        trainer = trainer_for(*callbacks, finder(), max_steps=-1, max_epochs=2)
        with warnings.catch_warnings(), contextlib.suppress(KeyboardInterrupt, SystemExit):
            warnings.simplefilter("ignore")
            trainer.fit(module, loader_for(sampler, IdsDataset(), style, num_workers=1), ckpt_path=checkpoint)
        return module.ids

    whole = one()
    num = next(n for n in range(len(whole)) if sum(map(len, whole[:n])) == 60)
    one(StopAfter(num, tmp_path / "last.ckpt"))
    assert one(checkpoint=tmp_path / "last.ckpt") == whole[num:]


# What needs the trainer's plans


def test_a_schedule_made_from_the_estimated_number_of_steps_works():
    class Estimating(Recogniser):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            steps = self.trainer.estimated_stepping_batches
            self.estimate = steps
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    callback, module = finder(), Estimating()
    trainer = trainer_for(callback, max_steps=-1, max_epochs=1)
    sampler = tiny_sampler()
    trainer.fit(module, loader_for(sampler, IdsDataset()))
    assert callback.profile.num_trials > 0
    assert sampler.bucket_batch_size == callback.profile.bucket_batch_size
    assert sorted(i for ids in module.ids for i in ids) == sorted(cut.id for cut in tiny_cuts())
    assert callback.state_dict() == {"next_epoch": 1}


def test_gradients_accumulated_in_a_later_epoch_are_counted_from_the_start():
    class Wide(Recogniser):
        def __init__(self):
            super().__init__()
            self.model = TinyModel(width=64)

    later = finder()
    schedule = pl.callbacks.GradientAccumulationScheduler({0: 1, 3: 4})
    fit(later, schedule, module=Wide(), max_steps=2)
    now = finder()
    fit(now, module=Wide(), accumulate_grad_batches=4, max_steps=1)
    assert later.profile.bucket_batch_size == now.profile.bucket_batch_size


def test_parameters_that_a_callback_may_unfreeze_are_warned_about(caplog):
    class Unfreeze(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.model.block)

        def finetune_function(self, pl_module, epoch, optimizer):
            pass

    with caplog.at_level(logging.WARNING):
        fit(finder(), Unfreeze(), max_steps=2)
    assert "a finetuning callback may unfreeze them later" in caplog.text


def test_parts_that_a_module_keeps_in_eval_mode_are_measured_in_eval_mode():
    seen = set()

    class Frozen(Recogniser):
        def __init__(self):
            super().__init__()
            self.model.block.eval()

        def training_step(self, batch, batch_idx):
            seen.add(self.model.block.training)
            return super().training_step(batch, batch_idx)

    fit(finder(), module=Frozen())
    assert seen == {False}


def test_what_training_step_finds_missing_because_it_is_made_too_late_says_so():
    class Late(Recogniser):
        def on_train_start(self):
            self.running = []

        def training_step(self, batch, batch_idx):
            self.running.append(1)
            return super().training_step(batch, batch_idx)

    with pytest.raises(AttributeError, match="running") as caught:
        trainer_for(finder()).fit(Late(), loader_for())
    assert any(
        "trial steps run before on_train_start" in note
        for note in getattr(caught.value, "__notes__", ["trial steps run before on_train_start"])
    )


# Refusals


def test_manual_optimization_is_refused_with_the_remedy():
    class Manual(Recogniser):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    wanted = r"manual optimization.*pass training_step= to BucketBatchSizeFinder"
    with pytest.raises(UnsupportedStrategyError, match=wanted):
        trainer_for(finder()).fit(Manual(), loader_for())


def test_a_sampler_hidden_in_another_one_is_refused():
    class Hiding(torch.utils.data.Sampler):  # type: ignore[type-arg]
        def __init__(self, sampler):
            self.sampler = sampler

        def __iter__(self):
            return iter(self.sampler)

    loader = DataLoader(TinyDataset(), sampler=Hiding(tiny_sampler()), batch_size=None)
    with pytest.raises(InvalidArgumentError, match=r"is wrapped in Hiding.*use_distributed_sampler=False"):
        trainer_for(finder()).fit(Recogniser(), loader)


def test_a_callback_with_nothing_to_do_says_so(caplog):
    cuts = tiny_cuts(12)
    loader = DataLoader(list(range(4)), batch_size=None, collate_fn=lambda i: TinyDataset()[cuts])
    with caplog.at_level(logging.WARNING):
        fit(finder(), loader=loader, max_steps=2)
    assert "found no CalibratedBucketingSampler in the training data" in caplog.text


def test_options_are_checked_when_the_callback_is_made():
    with pytest.raises(InvalidArgumentError, match="memory_fraction"):
        BucketBatchSizeFinder(memory_fraction=2)
    with pytest.raises(TypeError, match="memory_fractoin"):
        BucketBatchSizeFinder(memory_fractoin=0.9)


# Ranks


def _ddp(rank, cache):
    os.environ["LOCAL_RANK"] = str(rank)
    warnings.simplefilter("ignore")
    pl.seed_everything(1, verbose=False)
    callback, module = finder(cache), Recogniser()
    sampler = tiny_sampler(tiny_cuts(150))
    trainer = trainer_for(
        callback, devices=2, strategy="ddp", use_distributed_sampler=False, max_steps=-1, max_epochs=1
    )
    trainer.fit(module, loader_for(sampler, IdsDataset()))
    trained = {k: v for k, v in fingerprint_of_state(module).items() if "norm.running" not in k}
    return callback.profile.encode(), [i for ids in module.ids for i in ids], len(module.ids), trained


def test_under_ddp_ranks_share_the_profile_the_data_and_the_parameters(tmp_path):
    first, second = results(run_ranks(_ddp, tmp_path, timeout_s=200))
    assert first[0] == second[0]
    assert first[2] == second[2]
    assert sorted({*first[1], *second[1]}) == sorted(cut.id for cut in tiny_cuts(150))
    assert not {*first[1]} & {*second[1]}
    assert first[3] == second[3]


def _distributed_sampler(rank):
    os.environ["LOCAL_RANK"] = str(rank)
    warnings.simplefilter("ignore")
    trainer = trainer_for(finder(), devices=2, strategy="ddp", use_distributed_sampler=True)
    trainer.fit(Recogniser(), loader_for(tiny_sampler()))


def test_lightnings_distributed_sampler_around_ours_is_an_error_that_says_to_switch_it_off():
    found = run_ranks(_distributed_sampler, timeout_s=100)
    assert all("use_distributed_sampler=False" in text for _, text in found.values()), found
