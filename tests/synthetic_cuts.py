"""Cuts made up for tests: a tone a word, in small WAV files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from lhotse import CutSet, Fbank, FbankConfig, MonoCut, MultiCut, Recording, SupervisionSegment
from lhotse.features.io import MemoryRawWriter

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "quietly",
    "box",
]


def make_cut(
    folder: Path,
    index: int,
    *,
    duration: float = 2.0,
    sampling_rate: int = 16000,
    num_channels: int = 1,
    num_supervisions: int = 1,
    num_words: int | None = None,
    custom: dict[str, Any] | None = None,
) -> Any:
    """A cut of ``duration`` seconds over a WAV file in ``folder``, three words a second by default."""
    rng = np.random.default_rng(index)
    num_samples = round(duration * sampling_rate)
    time = np.arange(num_samples) / sampling_rate
    audio = 0.1 * np.sin(2 * np.pi * (200 + 20 * index) * time) + 0.01 * rng.standard_normal(num_samples)
    path = folder / f"rec-{index}-{sampling_rate}-{num_channels}.wav"
    soundfile.write(path, np.stack([audio] * num_channels, axis=1), sampling_rate)
    recording = Recording.from_file(path)
    num_words = max(num_supervisions, round(3 * duration)) if num_words is None else num_words
    words = [str(rng.choice(WORDS)) for _ in range(num_words)]
    share = num_words // num_supervisions
    channel = 0 if num_channels == 1 else list(range(num_channels))
    supervisions = [
        SupervisionSegment(
            id=f"sup-{index}-{part}",
            recording_id=recording.id,
            start=part * duration / num_supervisions,
            duration=duration / num_supervisions,
            channel=channel,
            text=" ".join(words[part * share : (part + 1) * share]),
            speaker=f"speaker-{index % 3}",
        )
        for part in range(num_supervisions)
    ]
    kind = MonoCut if num_channels == 1 else MultiCut
    return kind(
        id=f"cut-{index}",
        start=0.0,
        duration=recording.duration,
        channel=channel,
        recording=recording,
        supervisions=supervisions,
        custom=custom,
    )


def make_cuts(folder: Path, num: int = 8, **options: Any) -> list[Any]:
    """Cuts of 1.0, 1.25, 1.5, ... seconds."""
    return [make_cut(folder, index, duration=1.0 + 0.25 * index, **options) for index in range(num)]


def with_features(cuts: list[Any], num_mels: int = 20) -> list[Any]:
    """The cuts with precomputed log-mel features, held in memory."""
    sampling_rate = cuts[0].sampling_rate
    extractor = Fbank(FbankConfig(num_mel_bins=num_mels, sampling_rate=sampling_rate))
    with MemoryRawWriter() as writer:
        return [cut.compute_and_store_features(extractor=extractor, storage=writer) for cut in cuts]


def num_characters(cut: Any) -> int | None:
    """Output tokens of a cut, if every character is one."""
    return sum(len(sup.text or "") for sup in cut.supervisions)


def seconds(cut: Any) -> float:
    return float(cut.duration)


def as_set(cuts: list[Any]) -> CutSet:
    return CutSet.from_cuts(cuts)
