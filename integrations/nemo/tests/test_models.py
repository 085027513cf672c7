"""NeMo's models made with ``auto`` in this process: their configs, what is refused, what is left alone."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import nemo
import pytest
import torch
from conftest import Corpus
from hydra import compose, initialize_config_dir
from lhotse import CutSet, Recording
from lhotse_oomfit_nemo.finder import NemoBatchSizeFinder
from lhotse_oomfit_nemo.request import refuse_auto
from lhotse_oomfit_nemo.schema import SchemaBatches
from nemo.collections.asr import models
from nemo.collections.asr.models import ASRModel, EncDecCTCModelBPE
from nemo.collections.audio.models.enhancement import PredictiveAudioToAudioModel
from nemo.collections.common.tokenizers.canary_tokenizer import CanaryTokenizer
from nemo.utils.app_state import AppState
from omegaconf import DictConfig, OmegaConf
from speech import with_pieces

from lhotse_oomfit.errors import InvalidArgumentError

SMALL = {"oomfit_memory_limit": "250MiB", "oomfit_max_batch_size": 4, "oomfit_cache": False}
CONFIGS = str(Path(__file__).parent / "conf")


@pytest.fixture(autouse=True)
def forget_restored_models() -> None:
    """NeMo remembers in one place for all the file that a model came from; the next model would look into it."""
    AppState().model_restore_path = None


def small_config(name: str, corpus: Corpus, folder: Path) -> DictConfig:
    overrides = [f"model.tokenizer.dir={corpus.tokenizer}"]
    if name == "aed":
        special = folder / "special_tokens"
        CanaryTokenizer.build_special_tokenizer(["translate", "transcribe", "en", "es"], str(special))
        overrides = [f"model.tokenizer.langs.en.dir={corpus.tokenizer}"]
        overrides += [f"model.tokenizer.langs.spl_tokens.dir={special}", "spl_tokens.model_dir=none"]
    with initialize_config_dir(CONFIGS, version_base=None):
        cfg = compose(name, overrides=[f"record_dir={folder}", *overrides])
    OmegaConf.set_struct(cfg, False)
    cfg.model.train_ds.manifest_filepath = str(corpus.train)
    cfg.model.validation_ds.manifest_filepath = str(corpus.validation)
    cfg.model.train_ds.update(use_bucketing=True, bucket_batch_size="auto", num_buckets=2, **SMALL)
    cfg.trainer.update(max_steps=1, limit_val_batches=0)
    return cfg


@pytest.fixture
def config(corpus: Corpus, tmp_path: Path) -> DictConfig:
    return small_config("ctc", corpus, tmp_path)


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


def test_auto_is_refused_in_a_part_of_such_a_section_too() -> None:
    section = OmegaConf.create({"datasets": {"clean": {"bucket_batch_size": "auto", "seed": "${leads.nowhere}"}}})
    with pytest.raises(InvalidArgumentError, match=r"validation_ds.datasets.clean.bucket_batch_size must be a list"):
        refuse_auto(section, "validation_ds")


@pytest.mark.parametrize("cfg", [types.SimpleNamespace(train_ds=1), "a name", None, [1]], ids=str)
def test_a_module_whose_cfg_is_no_config_trains_as_without_the_plugin(cfg: Any) -> None:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.cfg = cfg
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Data(pl.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.cfg = cfg

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)

    trainer = pl.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(Module(), Data())
    assert trainer.global_step == 2
    assert finders(trainer) == []


def test_a_model_that_gets_other_data_is_no_longer_asked_for_auto(config: DictConfig) -> None:
    trainer = pl.Trainer(**config.trainer)
    model = EncDecCTCModelBPE(cfg=config.model, trainer=trainer)
    train = config.model.train_ds
    data = {key: train[key] for key in train if "oomfit" not in key}
    model.setup_training_data(
        OmegaConf.create(data | {"bucket_batch_size": None, "batch_size": 2, "use_bucketing": False})
    )
    trainer.fit(model)
    assert trainer.global_step == 1


def test_epochs_that_end_before_an_endless_source_does_are_warned_of(
    config: DictConfig, caplog: pytest.LogCaptureFixture
) -> None:
    train = config.model.train_ds
    manifest = train.manifest_filepath
    train.manifest_filepath = None
    train.input_cfg = [{"type": "nemo", "manifest_filepath": manifest, "weight": weight} for weight in (1.0, 2.0)]
    config.trainer.limit_train_batches = 1
    found(EncDecCTCModelBPE, config)
    assert "train_ds has no end, and begins anew after each epoch of trainer.limit_train_batches=1" in caplog.text


NO_LHOTSE = (
    "train_ds.bucket_batch_size is 'auto', but the training data of this {} don't come from Lhotse; set "
    "++model.train_ds.use_lhotse=true where the model has it, else give batch_size and leave bucket_batch_size out"
)


def test_auto_without_lhotse_is_refused_and_not_ignored(config: DictConfig) -> None:
    config.model.train_ds.use_lhotse = False
    trainer = pl.Trainer(**config.trainer)
    model = EncDecCTCModelBPE(cfg=config.model, trainer=trainer)
    with pytest.raises(InvalidArgumentError) as raised:
        trainer.fit(model)
    assert str(raised.value) == NO_LHOTSE.format("EncDecCTCModelBPE")


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


def test_a_cpu_asks_for_a_limit_by_the_name_that_it_has_in_the_data_section(config: DictConfig) -> None:
    del config.model.train_ds["oomfit_memory_limit"]
    trainer = pl.Trainer(**config.trainer)
    model = EncDecCTCModelBPE(cfg=config.model, trainer=trainer)
    with pytest.raises(InvalidArgumentError, match=r"add for instance \+\+model.train_ds.oomfit_memory_limit=600MiB"):
        trainer.fit(model)


def test_a_model_without_a_schema_says_so() -> None:
    with pytest.raises(InvalidArgumentError, match="must find an oomptimizer_schema on the model, Linear has none"):
        SchemaBatches(torch.nn.Linear(1, 1), sampling_rate=16000)


def found(model_class: Any, config: DictConfig) -> list[list[int]]:
    """The sizes of each sampler, after a training of one step."""
    trainer = pl.Trainer(**config.trainer)
    trainer.fit(model_class(cfg=config.model, trainer=trainer))
    assert trainer.global_step == 1
    return [list(profile.bucket_batch_size) for profile in finders(trainer)[0].profiles]


def test_a_model_of_characters_trains(config: DictConfig) -> None:
    labels = list(" abcdefghijklmnopqrstuvwxyz'")
    del config.model["tokenizer"]
    config.model.labels = labels
    config.model.decoder.update(vocabulary=labels, num_classes=len(labels))
    for section in (config.model.train_ds, config.model.validation_ds):
        section.labels = labels
    assert found(models.EncDecCTCModel, config) == [[4, 4]]


def test_models_that_mark_the_end_of_an_utterance_train(corpus: Corpus, tmp_path: Path) -> None:
    eou_models = pytest.importorskip("nemo.collections.asr.models.asr_eou_models")  # not in NeMo 2.7
    config = small_config("rnnt", corpus, tmp_path)
    config.model.tokenizer.dir = str(with_pieces(corpus.tokenizer, tmp_path / "tokenizer", ["<EOU>", "<EOB>"]))
    for section in (config.model.train_ds, config.model.validation_ds):
        section.update(subsampling_factor=8, window_stride=0.01)
    padding = {"prob": 0.9, "max_pad_duration": 0.5, "min_post_pad_duration": 0.2, "max_total_duration": 3.0}
    config.model.train_ds.update(max_duration=1.5, random_padding=padding)
    assert found(eou_models.EncDecRNNTBPEEOUModel, config) == [[4, 4]]


def test_a_hybrid_with_a_prompt_whose_schema_is_wrong_trains(corpus: Corpus, tmp_path: Path) -> None:
    config = small_config("hybrid", corpus, tmp_path)
    prompt = {"num_prompts": 128, "prompt_dictionary": {"en": 0}, "initialize_prompt_feature": True}
    config.model.initialize_prompt_feature = True
    config.model.model_defaults.update(prompt)
    for section in (config.model.train_ds, config.model.validation_ds):
        section.update(prompt, prompt_field="target_lang", subsampling_factor=8, window_stride=0.01)
    config.model.train_ds.max_duration = 2.5
    assert found(models.EncDecHybridRNNTCTCBPEModelWithPrompt, config) == [[4, 4]]


def test_a_self_supervised_model_trains(config: DictConfig) -> None:
    model = config.model
    del model["tokenizer"], model["interctc"]
    model.model_defaults = {"subsampling_factor": 8, "enc_hidden": 64, "decoder_out_channels": 128}
    model.decoder = {
        "_target_": "nemo.collections.asr.modules.ConvASRDecoderReconstruction",
        "feat_in": 64,
        "feat_hidden": 128,
        "feat_out": 128,
        "stride_layers": 0,
        "non_stride_layers": 0,
        "stride_transpose": False,
    }
    model.spec_augment = {
        "_target_": "nemo.collections.asr.modules.MaskedPatchAugmentation",
        "freq_masks": 3,
        "freq_width": 20,
        "patch_size": 16,
        "mask_patches": 0.5,
    }
    model.loss = {
        "_target_": "nemo.collections.asr.losses.ContrastiveLoss",
        "in_dim": 80,
        "proj_dim": 128,
        "combine_time_steps": 8,
        "quantized_targets": True,
        "codebook_size": 30,
        "num_groups": 2,
        "num_negatives": 5,
        "sample_from_same_utterance_only": True,
        "sample_from_non_masked": False,
    }
    assert found(models.SpeechEncDecSelfSupervisedModel, config) == [[4, 4]]


@pytest.mark.skipif(nemo.__version__.startswith("2."), reason="NeMo 2.7 refuses to make its own losses for audio")
@pytest.mark.parametrize("truncated", [False, True])
def test_a_model_from_audio_to_audio_trains(corpus: Corpus, tmp_path: Path, truncated: bool) -> None:
    cuts = CutSet.from_cuts(
        Recording.from_file(json.loads(line)["audio_filepath"]).to_cut()
        for line in corpus.train.read_text().splitlines()[:20]
    )
    for cut in (cuts := cuts.to_eager()):
        cut.target_recording = cut.recording
    cuts.to_file(tmp_path / "cuts.jsonl")
    train_ds = {"use_lhotse": True, "cuts_path": str(tmp_path / "cuts.jsonl"), "sample_rate": 16000, "shuffle": True}
    train_ds |= {"use_bucketing": True, "bucket_batch_size": "auto", "num_buckets": 2, "num_workers": 0, **SMALL}
    train_ds["oomfit_memory_limit"] = "600MiB"
    if truncated:
        train_ds |= {"truncate_duration": 1.0, "truncate_offset_type": "random"}
    transforms = "nemo.collections.audio.modules.transforms"
    config = {
        "model": {
            "sample_rate": 16000,
            "num_outputs": 1,
            "normalize_input": True,
            "train_ds": train_ds,
            "encoder": {"_target_": f"{transforms}.AudioToSpectrogram", "fft_length": 126, "hop_length": 64},
            "decoder": {"_target_": f"{transforms}.SpectrogramToAudio", "fft_length": 126, "hop_length": 64},
            "estimator": {
                "_target_": "nemo.collections.audio.parts.submodules.conformer.SpectrogramConformer",
                "in_channels": 1,
                "out_channels": 1,
                "feat_in": 64,
                "n_layers": 1,
                "d_model": 16,
                "subsampling_factor": 1,
                "n_heads": 2,
                "conv_norm_type": "layer_norm",
            },
            "loss": {"_target_": "nemo.collections.audio.losses.MSELoss"},
            "optim": {"name": "adamw", "lr": 1e-3},
        },
        "trainer": {"accelerator": "cpu", "devices": 1, "max_steps": 1, "limit_val_batches": 0, "logger": False},
    }
    config["trainer"] |= {"enable_checkpointing": False, "enable_progress_bar": False}
    assert set(found(PredictiveAudioToAudioModel, OmegaConf.create(config))[0]) == {4}


def test_an_encoder_decoder_trains_in_buckets_of_seconds_and_tokens(corpus: Corpus, tmp_path: Path) -> None:
    config = small_config("aed", corpus, tmp_path)
    config.model.train_ds.update(bucket_duration_bins=[[2.5, 30], [2.5, 60], [5, 60], [5, 120]], max_tps=[25.0] * 4)
    assert found(models.EncDecMultiTaskModel, config) == [[4, 4, 4, 4]]


@pytest.mark.parametrize("fusion", ["round_robin", "zip"])
def test_several_configs_train(config: DictConfig, corpus: Corpus, fusion: str) -> None:
    part = {"manifest_filepath": str(corpus.train), "sample_rate": 16000, "use_bucketing": True, "num_buckets": 2}
    config.model.train_ds = {
        "use_lhotse": True,
        "multi_config": True,
        "sampler_fusion": fusion,
        "seed": 0,
        "shard_seed": 0,
        "shuffle": True,
        "num_workers": 0,
        "bucket_batch_size": "auto",
        **SMALL,
        "short": part | {"max_duration": 2.5},
        "long": part | {"min_duration": 2.5, "max_duration": 6},
    }
    assert found(EncDecCTCModelBPE, config) == [[4, 4], [4, 4]]
