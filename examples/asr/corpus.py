"""A corpus that makes itself: every letter is a short chord, so a small model learns to read it in a minute or two.

Texts are pseudo-words of alternating consonants and vowels; a letter sounds as three tones under a raised-cosine
envelope, a space as a pause, with varying tempo, loudness and background noise. Utterances last from about half a
second to eight seconds, so that length buckets really differ.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import soundfile

CONSONANTS = "bcdfghjklmnpqrstvwxz"
VOWELS = "aeiouy"
LETTERS = "".join(sorted(CONSONANTS + VOWELS))


@dataclass(frozen=True, kw_only=True)
class ChordCorpus:
    """What the corpus holds; equal settings give the same files, byte for byte.

    :param num_utterances: how many recordings are written.
    :param min_s, max_s: shortest and longest utterance aimed at, in seconds; lengths are log-uniform in between.
    :param letter_s: how long a letter sounds at normal tempo, in seconds.
    :param sampling_rate: of the files, in Hz.
    :param seed: everything random follows from it.
    """

    num_utterances: int = 1200
    min_s: float = 0.5
    max_s: float = 8.0
    letter_s: float = 0.08
    sampling_rate: int = 16000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_utterances < 2:
            raise ValueError(f"num_utterances must be at least 2 (one is held out), got {self.num_utterances}")
        if not 4 * self.letter_s <= self.min_s <= self.max_s:
            raise ValueError(
                f"min_s and max_s must be ordered and hold at least four letters of {self.letter_s} s, "
                f"got min_s={self.min_s}, max_s={self.max_s}"
            )

    def write(self, folder: str | Path) -> Path:
        """Write WAV files and ``manifest.jsonl`` (NeMo's format) into ``folder``; returns the manifest's path.

        A folder that already holds this very corpus is left as it is; one that holds another is replaced.
        """
        folder = Path(folder)
        manifest = folder / "manifest.jsonl"
        card = folder / "corpus.json"
        if manifest.is_file() and card.is_file() and json.loads(card.read_text()) == asdict(self):
            return manifest
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        partial.mkdir(parents=True)

        def write_utterance(index: int) -> str:
            text, audio = self.utterance(index)
            name = f"chord-{index:06d}.wav"
            soundfile.write(partial / name, audio, self.sampling_rate, subtype="PCM_16")
            return json.dumps({"audio_filepath": name, "duration": len(audio) / self.sampling_rate, "text": text})

        with ThreadPoolExecutor() as pool:  # numpy and soundfile leave the interpreter to others while they work
            lines = pool.map(write_utterance, range(self.num_utterances))
            (partial / "manifest.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        (partial / "corpus.json").write_text(json.dumps(asdict(self)))
        if folder.exists():
            if not card.is_file():
                raise FileExistsError(f"{folder} must be empty or hold a chord corpus; name another folder")
            shutil.rmtree(folder)
        partial.rename(folder)
        return manifest

    def utterance(self, index: int) -> tuple[str, np.ndarray]:
        """Text and audio (num_samples,) float32 of one utterance; depends on the settings and ``index`` only."""
        rng = np.random.default_rng([self.seed, index])
        seconds = float(np.exp(rng.uniform(np.log(self.min_s), np.log(self.max_s))))
        text = _pseudo_words(rng, max(3, round(seconds / self.letter_s) - 1))
        tempo = rng.uniform(0.9, 1.1)
        pieces = [np.zeros(int(0.02 * self.sampling_rate))]
        for letter in text:
            num_samples = int(self.letter_s * tempo * rng.uniform(0.9, 1.1) * self.sampling_rate)
            pieces.append(_chord(letter, num_samples, self.sampling_rate, rng))
        pieces.append(np.zeros(int(0.02 * self.sampling_rate)))
        audio = np.concatenate(pieces) * rng.uniform(0.1, 0.3)
        audio += rng.normal(0.0, rng.uniform(0.0005, 0.003), audio.shape)
        limit = int(self.max_s * self.sampling_rate)
        if len(audio) > limit:  # a slow reader: play it a little faster, so that max_s holds
            audio = np.interp(np.linspace(0, len(audio) - 1, limit), np.arange(len(audio)), audio)
        return text, np.clip(audio, -1.0, 1.0).astype(np.float32)


def _pseudo_words(rng: np.random.Generator, num_letters: int) -> str:
    """``num_letters`` characters of words like "kavo tine": no letter ever follows itself."""
    text = ""
    while len(text) < num_letters:
        syllables = "".join(rng.choice(list(CONSONANTS)) + rng.choice(list(VOWELS)) for _ in range(rng.integers(1, 4)))
        text += (" " if text else "") + syllables + (rng.choice(list("nrst")) if rng.random() < 0.3 else "")
    return text[:num_letters].strip()


def _chord(letter: str, num_samples: int, sampling_rate: int, rng: np.random.Generator) -> np.ndarray:
    """Three tones that name the letter: one of a low, one of a middle and one of a high set."""
    if letter == " ":
        return np.zeros(num_samples)
    index = LETTERS.index(letter)
    tones_hz = (300.0 * 1.28 ** (index % 3), 700.0 * 1.22 ** (index // 3 % 3), 1500.0 * 1.28 ** (index // 9))
    time_s = np.arange(num_samples) / sampling_rate
    detune = rng.uniform(0.985, 1.015)
    wave = sum(np.sin(2 * np.pi * (tone * detune * time_s + rng.random())) for tone in tones_hz) / len(tones_hz)
    ramp = min(num_samples // 3, int(0.015 * sampling_rate))
    envelope = np.ones(num_samples)
    envelope[:ramp] = 0.5 - 0.5 * np.cos(np.pi * np.arange(ramp) / ramp)
    envelope[num_samples - ramp :] = envelope[:ramp][::-1]
    return wave * envelope * rng.uniform(0.7, 1.0)
