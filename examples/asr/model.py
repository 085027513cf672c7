"""A Conformer with a CTC head (Gulati et al., 2020), from waveform to loss and to text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from asr.features import LogMel, SpecAugment, padding_mask


@dataclass(frozen=True, kw_only=True)
class ConformerConfig:
    """The model's size. Attention heads are ``dim / num_heads`` wide, and that must be even (rotary positions)."""

    vocab_size: int
    dim: int = 80
    num_layers: int = 2
    num_heads: int = 4
    subsampling_channels: int = 32
    conv_kernel: int = 9
    num_mels: int = 40
    dropout: float = 0.05


SIZES: dict[str, dict[str, int]] = {
    "tiny": {"dim": 80, "num_layers": 2, "num_heads": 4},
    "small": {
        "dim": 176,
        "num_layers": 16,
        "num_heads": 4,
        "subsampling_channels": 176,
        "conv_kernel": 31,
        "num_mels": 80,
    },
    "medium": {
        "dim": 256,
        "num_layers": 16,
        "num_heads": 4,
        "subsampling_channels": 256,
        "conv_kernel": 31,
        "num_mels": 80,
    },
    "large": {
        "dim": 512,
        "num_layers": 17,
        "num_heads": 8,
        "subsampling_channels": 256,
        "conv_kernel": 31,
        "num_mels": 80,
    },
}
"""Sizes by name; all but "tiny" follow the Conformer paper's S, M and L."""


class ConvSubsampling(nn.Module):
    """Two strided convolutions: a frame every 40 ms from features every 10 ms."""

    def __init__(self, num_mels: int, channels: int, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, kernel_size=3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)
        self.project = nn.Linear(channels * ((num_mels + 3) // 4), dim)

    def forward(self, features: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, num_mels) -> (B, ceil(T/4), dim), with the lengths that go with it."""
        x = F.relu(self.conv1(features[:, None]))
        x = F.relu(self.conv2(x))
        return self.project(x.transpose(1, 2).flatten(2)), (lens + 3) // 4


class FeedForward(nn.Sequential):
    """A macaron half of a Conformer block."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__(
            nn.LayerNorm(dim),
            nn.Linear(dim, 4 * dim),
            nn.SiLU(),
            nn.Dropout(dropout),
            nn.Linear(4 * dim, dim),
            nn.Dropout(dropout),
        )


class SelfAttention(nn.Module):
    """Multi-head self-attention with rotary positions (Su et al., 2021)."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        width = dim // num_heads
        self.register_buffer("rates", 10000.0 ** (-torch.arange(0, width, 2) / width), persistent=False)

    def _rotate(self, x: Tensor) -> Tensor:
        """Turns each pair of channels of (B, H, T, width) by an angle that grows with T."""
        angle = torch.arange(x.shape[2], device=x.device)[:, None] * self.rates
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        even, odd = x.chunk(2, dim=-1)
        return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, T, dim), mask (B, T) True at real frames -> (B, T, dim)."""
        batch, time, dim = x.shape
        query, key, value = self.qkv(self.norm(x)).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            self._rotate(query), self._rotate(key), value, attn_mask=mask[:, None, None, :]
        )
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, time, dim)))


class ConvModule(nn.Module):
    """Gated pointwise, depthwise and pointwise convolution with batch normalisation."""

    def __init__(self, dim: int, kernel: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.batch_norm = nn.BatchNorm1d(dim)
        self.project = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, T, dim), mask (B, T) True at real frames -> (B, T, dim)."""
        x = F.glu(self.expand(self.norm(x)), dim=-1) * mask[:, :, None]
        x = F.silu(self.batch_norm(self.depthwise(x.transpose(1, 2)))).transpose(1, 2)
        return self.dropout(self.project(x))


class ConformerBlock(nn.Module):
    """Half a feed-forward, attention, convolution, the other half, a norm."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.feed_forward1 = FeedForward(config.dim, config.dropout)
        self.attention = SelfAttention(config.dim, config.num_heads, config.dropout)
        self.conv = ConvModule(config.dim, config.conv_kernel, config.dropout)
        self.feed_forward2 = FeedForward(config.dim, config.dropout)
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(B, T, dim), mask (B, T) True at real frames -> (B, T, dim)."""
        x = x + 0.5 * self.feed_forward1(x)
        x = x + self.attention(x, mask)
        x = x + self.conv(x, mask)
        x = x + 0.5 * self.feed_forward2(x)
        return self.norm(x)


class ConformerCTC(nn.Module):
    """Waveform in, log-probabilities over characters every 40 ms out."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.config = config
        self.features = LogMel(config.num_mels)
        self.augment = SpecAugment(freq_width=config.num_mels // 8)
        self.subsampling = ConvSubsampling(config.num_mels, config.subsampling_channels, config.dim)
        self.blocks = nn.ModuleList(ConformerBlock(config) for _ in range(config.num_layers))
        self.head = nn.Linear(config.dim, config.vocab_size)

    def forward(self, audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        """
        :param audio: (B, S) at 16 kHz. :param audio_lens: (B,) in samples.
        :return: log-probabilities (B, T, vocab_size) in float32, and their lengths (B,); T is S / 640, about.
        """
        x, lens = self.features(audio, audio_lens)
        x, lens = self.subsampling(self.augment(x, lens), lens)
        mask = padding_mask(lens, x.shape[1])
        for block in self.blocks:
            x = block(x, mask)
        return F.log_softmax(self.head(x).float(), dim=-1), lens

    def loss(self, batch: dict[str, Any]) -> Tensor:
        """CTC loss of a batch as :class:`~asr.dataset.SpeechDataset` makes it, on the model's device; a scalar.

        Texts too long for their audio (more characters than frames) have no alignment and count as zero.
        """
        log_probs, lens = self(batch["audio"], batch["audio_lens"])
        return F.ctc_loss(
            log_probs.transpose(0, 1), batch["tokens"], lens, batch["token_lens"], blank=0, zero_infinity=True
        )


def greedy_tokens(log_probs: Tensor, lens: Tensor) -> list[list[int]]:
    """The best token of each frame, repeats merged and blanks removed, for (B, T, V) log-probabilities."""
    best = log_probs.argmax(dim=-1)
    return [
        [t for t in torch.unique_consecutive(row[:n]).tolist() if t != 0] for row, n in zip(best, lens, strict=True)
    ]


def move_to(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on ``device``."""
    return {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}
