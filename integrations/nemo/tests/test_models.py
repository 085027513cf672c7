"""NeMo's models made with ``auto`` in this process: their configs, what is refused, what is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import Corpus
from hydra import compose, initialize_config_dir
from lhotse_oomfit_nemo.finder import NemoBatchSizeFinder
from lhotse_oomfit_nemo.schema import SchemaBatches
from nemo.collections.asr.models import ASRModel, EncDecCTCModelBPE
from omegaconf import DictConfig, OmegaConf

from lhotse_oomfit.errors import InvalidArgumentError

CONFIGS = str(Path(__file__).parent / "conf")


@pytest.fixture
def config(corpus: Corpus, tmp_path: Path) -> DictConfig:
    with initialize_config_dir(CONFIGS, version_base=None):
        cfg = compose("ctc", overrides=[f"record_dir={tmp_path}", f"model.tokenizer.dir={corpus.tokenizer}"])
    OmegaConf.set_struct(cfg, False)
    cfg.model.train_ds.manifest_filepath = str(corpus.train)
    cfg.model.validation_ds.manifest_filepath = str(corpus.validation)
    cfg.model.train_ds.update(
        use_bucketing=True,
        bucket_batch_size="auto",
        num_buckets=2,
        oomfit_memory_limit="250MiB",
        oomfit_max_batch_size=4,
        oomfit_cache=False,
    )
    cfg.trainer.max_steps = 1
    return cfg


def finders(trainer: Any) -> list[NemoBatchSizeFinder]:
    return [callback for callback in trainer.callbacks if isinstance(callback, NemoBatchSizeFinder)]


def test_a_model_keeps_no_trace_of_auto_and_neither_does_its_file(config: DictConfig, tmp_path: Path) -> None:
    trainer = pl.Trainer(**config.trainer)
    model = EncDecCTCModelBPE(cfg=config.model, trainer=trainer)
    assert model.cfg.train_ds.bucket_batch_size is None
    assert "oomfit" not in OmegaConf.to_yaml(model.cfg)
    model.save_to(str(tmp_path / "model.nemo"))
    restored = ASRModel.restore_from(str(tmp_path / "model.nemo"))
    assert "oomfit" not in OmegaConf.to_yaml(restored.cfg)


def test_a_restored_model_is_fine_tuned_with_auto(config: DictConfig, tmp_path: Path) -> None:
    data = config.model.train_ds.copy()
    config.model.train_ds = None
    EncDecCTCModelBPE(cfg=config.model, trainer=pl.Trainer(**config.trainer)).save_to(str(tmp_path / "model.nemo"))
    trainer = pl.Trainer(**config.trainer)
    model = ASRModel.restore_from(str(tmp_path / "model.nemo"))
    model.set_trainer(trainer)
    model.setup_training_data(OmegaConf.merge(data, {"sample_rate": 16000}))
    model.setup_optimization(config.model.optim)
    trainer.fit(model)
    assert finders(trainer)[0].profile is not None
    assert trainer.global_step == 1


@pytest.mark.parametrize("section", ["validation_ds", "test_ds"])
def test_auto_is_refused_where_nothing_is_trained(config: DictConfig, section: str) -> None:
    config.model[section] = OmegaConf.merge(config.model.validation_ds, {"bucket_batch_size": "auto"})
    with pytest.raises(InvalidArgumentError) as raised:
        EncDecCTCModelBPE(cfg=config.model, trainer=pl.Trainer(**config.trainer))
    assert str(raised.value) == (
        f"{section}.bucket_batch_size must be a list of sizes or null, it is 'auto': sizes are measured for training "
        f"steps only; set {section}.batch_size, or {section}.batch_duration, and {section}.use_bucketing=false"
    )


def test_a_training_without_auto_loses_the_callback(config: DictConfig) -> None:
    train = config.model.train_ds
    config.model.train_ds = {key: train[key] for key in train if "oomfit" not in key and "bucket" not in key}
    trainer = pl.Trainer(**config.trainer)
    assert len(finders(trainer)) == 1
    model = EncDecCTCModelBPE(cfg=config.model, trainer=trainer)
    trainer.fit(model)
    assert finders(trainer) == []
    assert "setup_data" not in vars(trainer.fit_loop)


def test_data_that_are_set_up_late_are_calibrated_too(config: DictConfig) -> None:
    config.model.train_ds.defer_setup = True
    trainer = pl.Trainer(**config.trainer)
    model = EncDecCTCModelBPE(cfg=config.model, trainer=trainer)
    trainer.fit(model)
    assert finders(trainer)[0].profile is not None
    assert model.cfg.train_ds.bucket_batch_size is None


def test_batches_come_from_the_models_schema_on_request(config: DictConfig) -> None:
    config.model.train_ds.oomfit_batches = "schema"
    trainer = pl.Trainer(**config.trainer)
    model = EncDecCTCModelBPE(cfg=config.model, trainer=trainer)
    trainer.fit(model)
    (finder,) = finders(trainer)
    assert isinstance(finder.make_batch, SchemaBatches)
    assert finder.profile is not None
    audio, lengths, tokens, token_lengths = finder.make_batch(batch_size=3, input_len=1.5, output_len=7)
    assert (tuple(audio.shape), tuple(tokens.shape)) == ((3, 24000), (3, 7))
    assert (lengths.tolist(), token_lengths.tolist()) == ([24000] * 3, [7] * 3)


def test_a_model_without_a_schema_says_so() -> None:
    with pytest.raises(InvalidArgumentError, match="must find an oomptimizer_schema on the model, Linear has none"):
        SchemaBatches(torch.nn.Linear(1, 1), sampling_rate=16000)
