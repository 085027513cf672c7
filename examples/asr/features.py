"""Log-mel features and SpecAugment, on the model's device."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mel_filterbank(num_mels: int, num_bins: int, sampling_rate: int) -> Tensor:
    """Triangular filters (num_bins, num_mels), evenly spaced on the HTK mel scale, 2595·log10(1 + f/700)."""
    top = 2595.0 * torch.log10(torch.tensor(1.0 + sampling_rate / 2 / 700.0))
    edges_hz = 700.0 * (10.0 ** (torch.linspace(0.0, float(top), num_mels + 2) / 2595.0) - 1.0)
    bins_hz = torch.linspace(0.0, sampling_rate / 2, num_bins)[:, None]
    rising = (bins_hz - edges_hz[:-2]) / (edges_hz[1:-1] - edges_hz[:-2])
    falling = (edges_hz[2:] - bins_hz) / (edges_hz[2:] - edges_hz[1:-1])
    return torch.minimum(rising, falling).clamp(min=0.0)


def padding_mask(lens: Tensor, longest: int) -> Tensor:
    """(B, longest) bool, True at the positions inside each length."""
    return torch.arange(longest, device=lens.device) < lens[:, None]


class LogMel(nn.Module):
    """Log-mel energies every 10 ms, each band normalised to zero mean and unit variance over its utterance."""

    def __init__(self, num_mels: int = 40, sampling_rate: int = 16000) -> None:
        super().__init__()
        self.hop = sampling_rate // 100
        self.n_fft = 512
        self.register_buffer("window", torch.hann_window(sampling_rate // 40), persistent=False)
        self.register_buffer("filters", mel_filterbank(num_mels, self.n_fft // 2 + 1, sampling_rate), persistent=False)

    @torch.no_grad()
    def forward(self, audio: Tensor, audio_lens: Tensor) -> tuple[Tensor, Tensor]:
        """
        :param audio: (B, S) float. :param audio_lens: (B,) in samples.
        :return: features (B, T, num_mels), zero in the padding, and their lengths (B,) in frames.
        """
        with torch.autocast(audio.device.type, enabled=False):
            spectrum = torch.stft(
                audio.float(),
                self.n_fft,
                self.hop,
                len(self.window),
                self.window,
                pad_mode="constant",
                return_complex=True,
            )
            power = spectrum.real.square() + spectrum.imag.square()
            features = (power.transpose(1, 2) @ self.filters).add_(1e-6).log_()
            lens = audio_lens // self.hop + 1
            mask = padding_mask(lens, features.shape[1])[:, :, None]
            count = lens[:, None, None]
            mean = (features * mask).sum(dim=1, keepdim=True) / count
            features = (features - mean) * mask
            deviation = (features.square().sum(dim=1, keepdim=True) / count).sqrt()
            return features / (deviation + 1e-3), lens


class SpecAugment(nn.Module):
    """Zeroes random bands of frequency and of time, in training only (Park et al., 2019, without time warping)."""

    def __init__(self, freq_masks: int = 2, freq_width: int = 5, time_masks: int = 2, time_width: int = 5) -> None:
        super().__init__()
        self.freq_masks, self.freq_width = freq_masks, freq_width
        self.time_masks, self.time_width = time_masks, time_width

    def forward(self, features: Tensor, lens: Tensor) -> Tensor:
        """:param features: (B, T, num_mels); :param lens: (B,); returns features of the same shape."""
        if not self.training:
            return features
        _, num_frames, num_mels = features.shape
        ends = torch.full_like(lens, num_mels)
        kept = ~_bands(ends, num_mels, self.freq_masks, self.freq_width)[:, None, :]
        kept = kept & ~_bands(lens, num_frames, self.time_masks, self.time_width)[:, :, None]
        return features * kept


def _bands(ends: Tensor, size: int, count: int, width: int) -> Tensor:
    """(B, size) bool: True inside ``count`` random bands per example, each up to ``width`` wide, before ``ends``."""
    shape = (len(ends), count, 1)
    widths = torch.rand(shape, device=ends.device) * width
    starts = torch.rand(shape, device=ends.device) * (ends[:, None, None] - widths).clamp(min=0.0)
    position = torch.arange(size, device=ends.device)
    return ((position >= starts) & (position < starts + widths)).any(dim=1)
