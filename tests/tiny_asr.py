"""A small speech recogniser of real parts, its dataset and its cuts: quick to train, and memory like a big one's."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import soundfile
import torch
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.audio import AudioSource
from torch import nn

from lhotse_oomfit import CalibratedBucketingSampler

torch.set_num_threads(1)

RATE = 8000
HOP = 80
FEATURES = 16
ALPHABET = "abcdefghijklmnop"


def tiny_cut(index: int, duration: float, num_chars: int, *, text: str | None = "") -> MonoCut:
    """A cut of noise held in memory, with a text of `num_chars` characters."""
    rng = np.random.default_rng(index)
    num_samples = int(duration * RATE)
    file = io.BytesIO()
    soundfile.write(file, 0.1 * rng.standard_normal(num_samples), RATE, format="WAV")
    recording = Recording(
        id=f"rec-{index}",
        sources=[AudioSource(type="memory", channels=[0], source=file.getvalue())],
        sampling_rate=RATE,
        num_samples=num_samples,
        duration=num_samples / RATE,
    )
    if text == "":
        text = "".join(rng.choice(list(ALPHABET), size=num_chars))
    supervision = SupervisionSegment(
        id=f"sup-{index}", recording_id=recording.id, start=0.0, duration=recording.duration, text=text
    )
    return MonoCut(
        id=f"cut-{index}",
        start=0.0,
        duration=recording.duration,
        channel=0,
        recording=recording,
        supervisions=[supervision],
    )


def tiny_cuts(num: int = 60, *, shortest: float = 0.3, longest: float = 4.0, chars_per_s: float = 6.0) -> CutSet:
    """Cuts of evenly spread lengths, `chars_per_s` characters a second."""
    durations = np.linspace(shortest, longest, num).round(2)
    return CutSet.from_cuts(
        [
            tiny_cut(i, float(d), max(1, int(chars_per_s * d)))
            for i, d in enumerate(np.random.default_rng(0).permutation(durations))
        ]
    )


class TinyDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Frames and characters of a batch, padded."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.projection = torch.randn(HOP, FEATURES, generator=generator) / HOP**0.5

    def __getitem__(self, cuts: CutSet) -> dict[str, torch.Tensor]:
        features, tokens = [], []
        for cut in cuts:
            audio = torch.from_numpy(cut.load_audio()[0])
            frames = audio[: len(audio) // HOP * HOP].view(-1, HOP)
            features.append((frames @ self.projection).abs().add(1e-3).log())
            text = cut.supervisions[0].text
            tokens.append(torch.tensor([1 + ALPHABET.index(c) if c in ALPHABET else 1 for c in text]))
        pad = nn.utils.rnn.pad_sequence
        return {
            "features": pad(features, batch_first=True),
            "feature_lens": torch.tensor([len(f) for f in features]),
            "tokens": pad(tokens, batch_first=True),
            "token_lens": torch.tensor([len(t) for t in tokens]),
        }


class TinyModel(nn.Module):
    """Convolution, BatchNorm, self-attention, dropout, CTC."""

    def __init__(self, width: int = 24, dropout: float = 0.1) -> None:
        super().__init__()
        self.subsample = nn.Conv1d(FEATURES, width, 5, stride=4, padding=2)
        self.norm = nn.BatchNorm1d(width)
        self.block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, len(ALPHABET) + 1)
        self.seen: list[int] = []

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.subsample(features.transpose(1, 2))).relu().transpose(1, 2)
        return self.head(self.block(x)).log_softmax(-1)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen.append(len(batch["features"]))
        log_probs = self(batch["features"])
        lens = torch.div(batch["feature_lens"] - 1, 4, rounding_mode="floor") + 1
        return nn.functional.ctc_loss(
            log_probs.transpose(0, 1), batch["tokens"], lens, batch["token_lens"], zero_infinity=True
        )


def training_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model.loss(batch)


def tiny_sampler(cuts: CutSet | None = None, **options: Any) -> CalibratedBucketingSampler:
    """A sampler in need of calibration over four buckets, unless `options` say otherwise."""
    defaults: dict[str, Any] = {
        "bucket_batch_size": "auto",
        "duration_bins": [1.0, 2.0, 3.0, 4.0],
        "max_tps": 12,
        "tokenizer": list,
        "shuffle": True,
        "buffer_size": 5000,
    }
    return CalibratedBucketingSampler(cuts if cuts is not None else tiny_cuts(), **{**defaults, **options})


def tiny_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100)


def train(
    model: TinyModel,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    batches: Sequence[dict[str, torch.Tensor]],
) -> list[float]:
    """One step a batch; returns the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def largest_that(fits: Callable[[int], bool]) -> int:
    """The largest size that fits, by doubling and bisection; 0 if not even one example does."""
    low, high = 0, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fingerprint_of_state(*holders: Any) -> dict[str, Any]:
    """Every tensor and number of the state dicts, to compare to the last bit."""
    found: dict[str, Any] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = (
                value.dtype,
                tuple(value.shape),
                value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes(),
            )
        elif isinstance(value, dict):
            for key, item in value.items():
                visit(f"{name}.{key}", item)
        elif isinstance(value, (list, tuple)):
            for key, item in enumerate(value):
                visit(f"{name}.{key}", item)
        else:
            found[name] = repr(value)

    for index, holder in enumerate(holders):
        visit(f"{index}:{type(holder).__name__}", holder.state_dict())
    return found
