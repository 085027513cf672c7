"""MagpieTTS, whose cuts carry arrays of codes beside their text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import nemo
import numpy as np
import pytest
import torch
from conftest import Corpus
from lhotse import CutSet, MonoCut, NumpyFilesWriter, Recording, SupervisionSegment
from lhotse_oomfit_nemo.finder import NemoBatchSizeFinder
from nemo.collections.tts.models import magpietts
from omegaconf import OmegaConf
from short_runs import Shapes, short_trainer

FRAME_S = 0.04


class Codec(pl.LightningModule):
    """Stands for the codec, which training on stored codes asks for nothing but these numbers."""

    sample_rate = output_sample_rate = 16000
    samples_per_frame = 640
    num_codebooks = 2
    codebook_size = 64
    vector_quantizer = None

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = torch.nn.Linear(1, 1)


def write_codes(corpus: Corpus, folder: Path) -> Path:
    rng = np.random.default_rng(0)
    cuts = []
    with NumpyFilesWriter(folder / "codes") as writer:
        for line in map(json.loads, corpus.train.read_text().splitlines()[:24]):
            recording = Recording.from_file(line["audio_filepath"])
            name, end = recording.id, recording.duration
            supervision = SupervisionSegment(
                id=name,
                recording_id=name,
                start=0.0,
                duration=end,
                text=line["text"],
                speaker="| Language:en Dataset:rendered Speaker:one |",
            )
            cut = MonoCut(name, start=0.0, duration=end, channel=0, recording=recording, supervisions=[supervision])
            for field, num_frames in (("target_codes", int(np.ceil(end / FRAME_S))), ("context_codes", 100)):
                codes = rng.integers(0, 64, (2, num_frames)).astype(np.int32)
                stored = writer.store_array(f"{name}-{field}", codes, temporal_dim=1, frame_shift=FRAME_S, start=0.0)
                setattr(cut, field, stored)
            cuts.append(cut)
    shar = folder / "shar"
    shar.mkdir()
    fields = {"recording": "wav", "target_codes": "numpy", "context_codes": "numpy"}
    CutSet.from_cuts(cuts).to_shar(shar, fields=fields, shard_size=12)
    return shar


@pytest.mark.skipif(nemo.__version__.startswith("2."), reason="NeMo 2.7 keeps the section of the data elsewhere")
def test_a_model_of_speech_from_text_trains(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def restored(path: str, return_config: bool = False, **settings: Any) -> Any:
        return OmegaConf.create({}) if return_config else Codec()

    monkeypatch.setattr(magpietts.AudioCodecModel, "restore_from", restored)
    transformer = {
        "n_layers": 1,
        "d_model": 16,
        "d_ffn": 32,
        "sa_n_heads": 2,
        "kernel_size": 3,
        "p_dropout": 0.1,
        "has_xattn": False,
        "is_causal": False,
        "max_length_causal_mask": 1024,
        "use_learnable_pos_emb": True,
    }
    tokenizers = "nemo.collections.common.tokenizers.text_to_speech.tts_tokenizers"
    config = {
        "model_type": "decoder_ce",
        "codecmodel_path": "codec.nemo",
        "embedding_dim": 16,
        "context_duration_min": 1.0,
        "context_duration_max": 3.0,
        "use_text_conditioning_encoder": False,
        "load_cached_codes_if_available": True,
        "prior_scaling_factor": 0.5,
        "prior_end_step": 100,
        "prior_scaledown_start_step": 50,
        "alignment_loss_scale": 0.0,
        "max_epochs": 1,
        "text_tokenizers": {"english_phoneme": {"_target_": f"{tokenizers}.EnglishCharsTokenizer"}},
        "encoder": transformer,
        "context_encoder": transformer,
        "decoder": transformer | {"has_xattn": True, "is_causal": True, "xa_d_memory": 16, "xa_n_heads": 2},
        "train_ds": {
            "use_lhotse": True,
            "volume_norm": True,
            "shar_path": str(write_codes(corpus, tmp_path)),
            "shuffle": True,
            "max_duration": 5,
            "use_bucketing": True,
            "bucket_batch_size": "auto",
            "num_buckets": 2,
            "num_cuts_for_bins_estimate": 24,
            "bucket_buffer_size": 24,
            "num_workers": 0,
            "oomfit_memory_limit": "250MiB",
            "oomfit_max_batch_size": 3,
            "oomfit_num_sample_cuts": 24,
            "oomfit_cache": False,
        },
        "validation_ds": None,
        "optim": {"_target_": "torch.optim.Adam", "lr": 2e-4},
    }
    shapes = Shapes("audio_codes")
    trainer = short_trainer(2, shapes)
    model = magpietts.MagpieTTSModel(cfg=OmegaConf.create(config), trainer=trainer)
    trainer.fit(model)
    (finder,) = [callback for callback in trainer.callbacks if isinstance(callback, NemoBatchSizeFinder)]
    assert list(finder.profile.bucket_batch_size) == [3, 3]
    assert [shape[0] for shape in shapes.seen] == [3, 3]
    assert model.cfg.train_ds.bucket_batch_size is None
    assert "oomfit" not in OmegaConf.to_yaml(model.cfg)
