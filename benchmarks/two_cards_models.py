"""What two ranks train: a NeMo FastConformer-CTC or the Conformer of the examples, on noise of random lengths."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock
from lhotse import SupervisionSegment
from lhotse.cut import MonoCut
from lhotse.testing.dummies import dummy_recording
from oomptimizer_models import RATE, SUBJECTS, TOKENS_PER_SECOND, build_model, write_config
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lhotse_oomfit import CalibratedBucketingSampler, Profile, calibrate

VOCABULARY = 32


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One model on this rank's device, and how it is calibrated.

    :param subject: ``"conformer"`` or ``"ctc"``, NeMo's.
    :param size: ``"tiny"``, or another of the Conformer's sizes; NeMo's is tiny or large.
    :param edges: of the buckets, seconds.
    """

    subject: str
    size: str
    edges: tuple[float, ...]
    device: torch.device
    memory_limit: int
    memory_fraction: float
    transcripts: Path | None
    work: Path
    heartbeat_s: float


class ConformerLoss(nn.Module):
    """The examples' Conformer from batch to loss, under autocast as in training."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
        from asr.model import SIZES, ConformerConfig, ConformerCTC

        self.model = ConformerCTC(ConformerConfig(vocab_size=VOCABULARY, **SIZES[setting.size]))
        self.vocabulary = VOCABULARY

    @property
    def layers(self) -> Any:
        """The blocks that FSDP shards one by one."""
        return self.model.blocks

    def forward(self, batch: Any) -> torch.Tensor:
        audio, audio_lens, tokens, token_lens = batch
        with torch.autocast(audio.device.type, torch.bfloat16):
            loss: torch.Tensor = self.model.loss(
                {"audio": audio, "audio_lens": audio_lens, "tokens": tokens, "token_lens": token_lens}
            )
        return loss


class NemoLoss(nn.Module):
    """NeMo's model from batch to loss, through its own ``training_step``."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        config = nemo_config(setting)
        self.model, self.optimizer = build_model(SUBJECTS["ctc"], config, setting.device)
        if not self.model.encoder.sync_max_audio_length:
            raise RuntimeError("encoder.sync_max_audio_length must be on, it is off in this NeMo's ConformerEncoder")
        self.vocabulary = int(self.model.tokenizer.vocab_size)

    @property
    def layers(self) -> Any:
        """The blocks that FSDP shards one by one."""
        return self.model.encoder.layers

    def forward(self, batch: Any) -> torch.Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            loss: torch.Tensor = self.model.training_step(batch, 0)["loss"].sum()
        return loss


def nemo_config(setting: Setting) -> Path:
    """The YAML of NeMo's model, made once in a folder that all ranks and jobs share."""
    if setting.transcripts is None:
        raise SystemExit("--transcripts must be given for NeMo's model: a manifest with durations and texts")
    subject = dataclasses.replace(SUBJECTS["ctc"], bins=setting.edges)
    path = setting.work / f"{subject.name}.yaml"
    with FileLock(setting.work / "config.lock"):
        if not path.exists():
            write_config(subject, setting.work, setting.transcripts, tiny=setting.size == "tiny")
    return path


class Noise(torch.utils.data.Dataset[Any]):
    """Turns cuts into noise of their lengths, and lengths into worst cases, on the device."""

    def __init__(self, setting: Setting, vocabulary: int) -> None:
        self._setting, self.vocabulary = setting, vocabulary

    def __getitem__(self, cuts: Any) -> Any:
        return self._batch([cut.duration for cut in cuts], [len(cut.supervisions[0].tokens) for cut in cuts])

    def make(self, *, batch_size: int, input_len: float, output_len: int | None) -> Any:
        """`batch_size` examples, as :func:`lhotse_oomfit.calibrate` asks for them."""
        return self._batch([input_len] * batch_size, [math.ceil(TOKENS_PER_SECOND * input_len)] * batch_size)

    def _batch(self, seconds: list[float], num_tokens: list[int]) -> Any:
        device = self._setting.device
        num_samples = [round(value * RATE) for value in seconds]
        audio = torch.randn(len(seconds), max(num_samples), device=device)
        tokens = torch.randint(1, self.vocabulary, (len(seconds), max(num_tokens)), device=device)
        return audio, torch.tensor(num_samples, device=device), tokens, torch.tensor(num_tokens, device=device)


def make_cuts(setting: Setting, num: int = 2000) -> list[MonoCut]:
    """Cuts without audio, of evenly drawn lengths."""
    rng = random.Random(0)
    recording = dummy_recording(0, duration=100.0)
    cuts = []
    for index in range(num):
        duration = round(rng.uniform(0.5, setting.edges[-1]), 2)
        supervision = SupervisionSegment(f"s{index}", recording.id, 0.0, duration)
        supervision.tokens = range(max(1, int(10 * duration)))
        cuts.append(
            MonoCut(
                id=str(index), start=0.0, duration=duration, channel=0, supervisions=[supervision], recording=recording
            )
        )
    return cuts


def make_sampler(setting: Setting) -> CalibratedBucketingSampler:
    """A sampler in need of calibration; its rank is that of this process."""
    return CalibratedBucketingSampler(
        make_cuts(setting),
        bucket_batch_size="auto",
        duration_bins=list(setting.edges),
        max_tps=TOKENS_PER_SECOND,
        shuffle=True,
    )


class Trained:
    """A model on this rank, wrapped, with its optimizer and its data.

    :param wrapping: ``"ddp"``, ``"static"`` or ``"fsdp2"``.
    """

    def __init__(self, setting: Setting, wrapping: str) -> None:
        self.setting = setting
        device = setting.device
        torch.manual_seed(0)
        with device:  # a hundred million random numbers take their time on the host
            loss: Any = NemoLoss(setting) if setting.subject == "ctc" else ConformerLoss(setting)
        loss.to(device).train()
        self.data = Noise(setting, loss.vocabulary)
        if device.type == "cuda":
            loss = nn.SyncBatchNorm.convert_sync_batchnorm(loss)
        self.model: Any = loss
        if wrapping == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for layer in loss.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(loss, mesh=mesh)
        else:
            where = {"device_ids": [device]} if device.type == "cuda" else {}
            self.model = DistributedDataParallel(loss, static_graph=wrapping == "static", **where)
        self.optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-5)
        if setting.subject == "ctc":
            loss.model._optimizer = self.optimizer  # whose learning rate NeMo's training_step reads
        torch.manual_seed(1 + dist.get_rank())

    def calibrate(self, **options: Any) -> Profile:
        """Calibrate a sampler for this model, through the public entry point."""
        defaults: dict[str, Any] = {
            "training_step": lambda model, batch: model(batch),
            "make_batch": self.data.make,
            "memory_limit": self.setting.memory_limit,
            "memory_fraction": self.setting.memory_fraction,
            "heartbeat_timeout": self.setting.heartbeat_s,
            "precision": "bf16",
            "cache": False,
            "progress": False,
        }
        return calibrate(
            make_sampler(self.setting),
            self.data,
            model=self.model,
            optimizer=self.optimizer,
            **{**defaults, **options},
        )

    def step(self, profile: Profile, bucket: int) -> None:
        """One training step of all ranks, at the full size of a bucket."""
        shape = profile.buckets[bucket]
        batch = self.data.make(
            batch_size=profile.bucket_batch_size[bucket], input_len=shape.input_len, output_len=shape.output_len
        )
        self.optimizer.zero_grad()
        self.model(batch).backward()
        self.optimizer.step()
