"""NeMo models without pretrained parts, the buckets to calibrate them on, and batches of random tensors for them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lhotse import SupervisionSegment
from lhotse.cut import MonoCut
from lhotse.testing.dummies import dummy_recording

RATE = 16_000
TOKENS_PER_SECOND = 12
"""OOMptimizer's default ratio: so many tokens a second in the worst case of a 1D bucket."""
PROMPT_TOKENS = 5
"""Start of transcript, two languages, task and punctuation in Canary's prompt."""
LANGUAGES = ("en", "de", "es", "fr")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to calibrate: its NeMo class, its buckets and the share of the card it may fill."""

    name: str
    title: str
    module: str
    bins: tuple[Any, ...]
    cap: float

    @property
    def is_2d(self) -> bool:
        return isinstance(self.bins[0], tuple)

    def shape(self, k: int) -> tuple[float, int]:
        """Seconds and tokens of the worst case of bucket `k`, as OOMptimizer takes them."""
        edge = self.bins[k]
        return edge if self.is_2d else (edge, math.ceil(TOKENS_PER_SECOND * edge))


def _bins_2d(durations: Sequence[float], tokens_per_second: Sequence[float]) -> tuple[Any, ...]:
    return tuple((edge, PROMPT_TOKENS + round(edge * tps)) for edge in durations for tps in tokens_per_second)


_BINS_1D = tuple(round(float(edge), 2) for edge in np.linspace(1.5, 30.0, 30))
_AED = {
    "title": "Canary-1B-sized AED",
    "module": "nemo.collections.asr.models.EncDecMultiTaskModel",
    "cap": 0.57,
}
SUBJECTS = {
    "ctc": Subject(
        name="ctc",
        title="FastConformer-CTC-L, 30 1D buckets",
        module="nemo.collections.asr.models.EncDecCTCModelBPE",
        bins=_BINS_1D,
        cap=0.30,
    ),
    "aed": Subject(
        name="aed",
        **_AED | {"title": f"{_AED['title']}, 30 2D buckets"},  # type: ignore[arg-type]
        bins=_bins_2d([float(edge) for edge in range(3, 31, 3)], (4.5, 6.0, 9.0)),
    ),
    "aed150": Subject(
        name="aed150",
        **_AED | {"title": f"{_AED['title']}, 150 2D buckets"},  # type: ignore[arg-type]
        bins=_bins_2d([float(edge) for edge in range(1, 31)], (4.0, 5.0, 6.0, 7.0, 9.0)),
    ),
    "rnnt": Subject(
        name="rnnt",
        title="FastConformer-RNNT-L, 30 1D buckets",
        module="nemo.collections.asr.models.EncDecRNNTBPEModel",
        bins=_BINS_1D,
        cap=0.30,
    ),
}


# Configurations: the values of NeMo's examples/asr/conf, size L of the FastConformer table and the AED's as they stand.


def write_config(subject: Subject, work: Path, transcripts: Path, *, tiny: bool) -> Path:
    """Train small SentencePiece tokenizers and write the YAML that OOMptimizer reads; `tiny` shrinks every width."""
    from omegaconf import OmegaConf

    work.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer(work / "bpe", transcripts, vocab_size=128 if tiny else 1024)
    model = {"ctc": _ctc, "rnnt": _rnnt}.get(subject.name, _aed)(work, tokenizer, tiny)
    path = work / f"{subject.name}.yaml"
    OmegaConf.save(OmegaConf.create({"model": model}), path)
    return path


def build_model(subject: Subject, config: Path, device: torch.device) -> tuple[Any, torch.optim.Optimizer]:
    """The model and its AdamW, made as OOMptimizer makes them."""
    import lightning.pytorch as pl
    from omegaconf import OmegaConf

    trainer = pl.Trainer(barebones=True)
    trainer.log_every_n_steps = 1_000_000
    namespace, _, name = subject.module.rpartition(".")
    model = getattr(import_module(namespace), name)(cfg=OmegaConf.load(config).model, trainer=trainer).to(device)
    optimizer, _ = model.setup_optimization({"name": "adamw", "lr": 1e-7, "weight_decay": 0.0})
    return model, optimizer


def _train_tokenizer(folder: Path, transcripts: Path, *, vocab_size: int) -> Path:
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tokenizer.model").exists():
        lines = (json.loads(line)["text"].lower() for line in transcripts.read_text().splitlines())
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_prefix=str(folder / "tokenizer"),
            vocab_size=vocab_size,
            model_type="bpe",
            bos_id=-1,
            eos_id=-1,
            minloglevel=2,
        )
        pieces = (folder / "tokenizer.vocab").read_text().splitlines()
        (folder / "vocab.txt").write_text("\n".join(piece.split("\t")[0] for piece in pieces[1:]))
    return folder


def _front(features: int) -> dict[str, Any]:
    return {
        "sample_rate": RATE,
        "log_prediction": False,
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
            "sample_rate": RATE,
            "normalize": "per_feature",
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": features,
            "n_fft": 512,
            "log": True,
            "frame_splicing": 1,
            "dither": 0.00001,
            "pad_to": 0,
            "pad_value": 0.0,
        },
        "spec_augment": {
            "_target_": "nemo.collections.asr.modules.SpectrogramAugmentation",
            "freq_masks": 2,
            "time_masks": 10,
            "freq_width": 27,
            "time_width": 0.05,
        },
    }


def _encoder(features: int, *, layers: int, width: int, heads: int, xscaling: bool, channels: int) -> dict[str, Any]:
    return {
        "_target_": "nemo.collections.asr.modules.ConformerEncoder",
        "feat_in": features,
        "feat_out": -1,
        "n_layers": layers,
        "d_model": width,
        "subsampling": "dw_striding",
        "subsampling_factor": 8,
        "subsampling_conv_channels": channels,
        "causal_downsampling": False,
        "ff_expansion_factor": 4,
        "self_attention_model": "rel_pos",
        "n_heads": heads,
        "att_context_size": [-1, -1],
        "xscaling": xscaling,
        "untie_biases": True,
        "pos_emb_max_len": 5000,
        "conv_kernel_size": 9,
        "conv_norm_type": "batch_norm",
        "conv_context_size": None,
        "dropout": 0.1,
        "dropout_pre_encoder": 0.1,
        "dropout_emb": 0.0,
        "dropout_att": 0.1,
    }


def _large_encoder(tiny: bool) -> dict[str, Any]:
    return _encoder(
        80, layers=2 if tiny else 17, width=32 if tiny else 512, heads=2 if tiny else 8, xscaling=True,
        channels=16 if tiny else 256,
    )  # fmt: skip


def _ctc(work: Path, tokenizer: Path, tiny: bool) -> dict[str, Any]:
    return {
        **_front(80),
        "ctc_reduction": "mean_volume",
        "skip_nan_grad": False,
        "tokenizer": {"dir": str(tokenizer), "type": "bpe"},
        "encoder": _large_encoder(tiny),
        "decoder": {
            "_target_": "nemo.collections.asr.modules.ConvASRDecoder",
            "feat_in": None,
            "num_classes": -1,
            "vocabulary": [],
        },
        "interctc": {"loss_weights": [], "apply_at_layers": []},
    }


def _rnnt(work: Path, tokenizer: Path, tiny: bool) -> dict[str, Any]:
    width = 32 if tiny else 640
    return {
        **_front(80),
        "rnnt_reduction": "mean_volume",
        "skip_nan_grad": False,
        "model_defaults": {"enc_hidden": 32 if tiny else 512, "pred_hidden": width, "joint_hidden": width},
        "tokenizer": {"dir": str(tokenizer), "type": "bpe"},
        "encoder": _large_encoder(tiny),
        "decoder": {
            "_target_": "nemo.collections.asr.modules.RNNTDecoder",
            "normalization_mode": None,
            "random_state_sampling": False,
            "blank_as_pad": True,
            "prednet": {"pred_hidden": width, "pred_rnn_layers": 1, "t_max": None, "dropout": 0.2},
        },
        "joint": {
            "_target_": "nemo.collections.asr.modules.RNNTJoint",
            "log_softmax": None,
            "preserve_memory": False,
            "fuse_loss_wer": True,
            "fused_batch_size": 4,
            "jointnet": {"joint_hidden": width, "activation": "relu", "dropout": 0.2},
        },
        "decoding": {"strategy": "greedy_batch", "greedy": {"max_symbols": 10}},
        "loss": {"loss_name": "default", "warprnnt_numba_kwargs": {"fastemit_lambda": 0.0, "clamp": -1.0}},
        "variational_noise": {"start_step": 0, "std": 0.0},
    }


def _aed(work: Path, tokenizer: Path, tiny: bool) -> dict[str, Any]:
    from nemo.collections.common.tokenizers.canary_tokenizer import CanaryTokenizer

    special = work / "special"
    if not (special / "tokenizer.model").exists():
        CanaryTokenizer.build_special_tokenizer(["translate", "transcribe", *LANGUAGES], special)
    width, layers, heads = (32, 2, 2) if tiny else (1024, 24, 8)
    return {
        **_front(128),
        "label_smoothing": 0.0,
        "use_loss_mask_for_prompt": False,
        "prompt_format": "canary",
        "prompt_defaults": None,
        "restore_timestamps_model": False,
        "multitask_metrics_cfg": {"metrics": {"wer": {"_target_": "nemo.collections.asr.metrics.WER"}}},
        "model_defaults": {"asr_enc_hidden": width, "lm_enc_hidden": 512, "lm_dec_hidden": width},
        "tokenizer": {
            "dir": None,
            "type": "agg",
            "langs": {
                "spl_tokens": {"dir": str(special), "type": "bpe"},
                **{language: {"dir": str(tokenizer), "type": "bpe"} for language in LANGUAGES},
            },
            "custom_tokenizer": {
                "_target_": "nemo.collections.common.tokenizers.canary_tokenizer.CanaryTokenizer",
                "tokenizers": None,
            },
        },
        "encoder": _encoder(128, layers=layers, width=width, heads=heads, xscaling=False, channels=16 if tiny else 256),
        "transf_encoder": None,
        "transf_decoder": {
            "_target_": "nemo.collections.asr.modules.transformer.get_nemo_transformer",
            "model_name": None,
            "pretrained": False,
            "encoder": None,
            "pre_ln_final_layer_norm": True,
            "config_dict": {
                "max_sequence_length": 512,
                "num_token_types": 0,
                "embedding_dropout": 0.1,
                "learn_positional_encodings": False,
                "hidden_size": width,
                "inner_size": 4 * width,
                "num_layers": layers,
                "num_attention_heads": heads,
                "ffn_dropout": 0.1,
                "attn_score_dropout": 0.1,
                "attn_layer_dropout": 0.1,
                "hidden_act": "relu",
                "pre_ln": True,
                "vocab_size": None,
            },
        },
        "head": {
            "_target_": "nemo.collections.asr.parts.submodules.token_classifier.TokenClassifier",
            "num_layers": 1,
            "activation": "relu",
            "log_softmax": True,
            "hidden_size": width,
            "num_classes": None,
            "dropout": 0.0,
            "use_transformer_init": True,
        },
        "decoding": {
            "strategy": "beam",
            "return_best_hypothesis": True,
            "beam": {"beam_size": 1, "len_pen": 0.0, "max_generation_delta": 50},
        },
        "loss": {
            "_target_": "nemo.collections.common.losses.smoothed_cross_entropy.SmoothedCrossEntropyLoss",
            "label_smoothing": 0.0,
            "pad_id": None,
        },
    }


# Batches


class Batches:
    """Batches of noise and random tokens, of the structure that the model's ``oomptimizer_schema`` describes."""

    def __init__(self, subject: Subject, model: Any, device: torch.device) -> None:
        self._subject = subject
        self._vocab_size = int(model.tokenizer.vocab_size)
        self._device = device

    def worst(self, k: int, size: int) -> Any:
        """`size` examples of the worst case of bucket `k`."""
        seconds, num_tokens = self._subject.shape(k)
        return self._batch([seconds] * size, [num_tokens] * size)

    def make(self, *, batch_size: int, input_len: float, output_len: int | None) -> Any:
        """The same by lengths, as :func:`lhotse_oomfit.calibrate` asks for it."""
        if not self._subject.is_2d:
            output_len = math.ceil(TOKENS_PER_SECOND * input_len)
        return self._batch([input_len] * batch_size, [output_len or 0] * batch_size)

    def of_cuts(self, cuts: Any) -> Any:
        """A batch with the lengths of `cuts`, padded to the longest."""
        return self._batch([cut.duration for cut in cuts], [len(cut.supervisions[0].tokens) for cut in cuts])

    def _batch(self, seconds: list[float], num_tokens: list[int]) -> Any:
        num_samples = [round(value * RATE) for value in seconds]
        audio = torch.randn(len(seconds), max(num_samples), device=self._device)
        tokens = torch.randint(0, self._vocab_size, (len(seconds), max(num_tokens)), device=self._device)
        audio_lens = torch.tensor(num_samples, device=self._device)
        token_lens = torch.tensor(num_tokens, device=self._device)
        if not self._subject.name.startswith("aed"):
            return audio, audio_lens, tokens, token_lens
        from nemo.collections.asr.data.audio_to_text_lhotse_prompted import PromptedAudioToTextMiniBatch

        unused = torch.tensor([])
        return PromptedAudioToTextMiniBatch(
            audio=audio,
            audio_lens=audio_lens,
            transcript=unused,
            transcript_lens=unused,
            prompt=unused,
            prompt_lens=unused,
            prompted_transcript=tokens,
            prompted_transcript_lens=token_lens,
        )


def librispeech_cuts(subject: Subject, manifest: Path, tokenizer: Path, *, num: int) -> list[MonoCut]:
    """Cuts without audio, of LibriSpeech's lengths and transcripts, drawn again and again in another order."""
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer / "tokenizer.model"))
    prompt = PROMPT_TOKENS if subject.is_2d else 0
    lengths = []
    for line in manifest.read_text().splitlines():
        row = json.loads(line)
        num_tokens = prompt + len(pieces.encode(row["text"].lower()))
        longest = subject.bins[-1][0] if subject.is_2d else subject.bins[-1]
        if row["duration"] <= longest:
            lengths.append((row["duration"], num_tokens))
    recording = dummy_recording(0, duration=100.0)
    rng = random.Random(0)
    cuts = []
    while len(cuts) < num:
        rng.shuffle(lengths)
        for duration, num_tokens in lengths[: num - len(cuts)]:
            supervision = SupervisionSegment(f"s{len(cuts)}", recording.id, 0.0, duration)
            supervision.tokens = range(num_tokens)
            cuts.append(
                MonoCut(
                    id=str(len(cuts)),
                    start=0.0,
                    duration=duration,
                    channel=0,
                    supervisions=[supervision],
                    recording=recording,
                )
            )
    return cuts
