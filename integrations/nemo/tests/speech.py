"""A small corpus of rendered speech: sentences, spoken by espeak-ng where it is installed, else by formants."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import soundfile

RATE = 16000

WORDS = [
    "the", "a", "river", "market", "morning", "window", "letter", "garden", "doctor", "yellow", "silver", "winter",
    "harbour", "captain", "evening", "butter", "walks", "opens", "carries", "follows", "remembers", "paints",
    "answers", "measures", "watches", "gathers", "slowly", "quietly", "never", "often", "under", "over", "near",
    "behind", "without", "seven", "twelve", "forty", "old", "young", "bright", "narrow", "heavy", "gentle", "and",
    "but", "when", "because",
]  # fmt: skip

# First three resonances of each vowel, in Hz; other letters get a resonance of their own, and some noise.
VOWELS = {
    "a": (730, 1090, 2440),
    "e": (530, 1840, 2480),
    "i": (270, 2290, 3010),
    "o": (570, 840, 2410),
    "u": (300, 870, 2240),
    "y": (350, 2000, 2800),
}


def sentences(num: int, *, seed: int = 0, max_words: int = 14) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(2, max_words))) for _ in range(num)]


def spoken(text: str, seed: int) -> np.ndarray:
    """Samples of `text`, float32, at 16 kHz."""
    program = shutil.which("espeak-ng")
    if program is not None:
        raw = subprocess.run([program, "-v", "en-us", "-s", "230", "--stdout", text], check=True, capture_output=True)
        samples = np.frombuffer(raw.stdout[44:], dtype="<i2").astype(np.float32) / 32768.0
        return np.interp(np.arange(0, len(samples), 22050 / RATE), np.arange(len(samples)), samples).astype(np.float32)
    return np.concatenate([_letter(letter, np.random.default_rng([seed, k])) for k, letter in enumerate(text)])


def _letter(letter: str, rng: np.random.Generator) -> np.ndarray:
    """A glottal pulse train through damped resonances; consonants are short and noisy, a space is silent."""
    num = int(RATE * rng.uniform(0.05, 0.08))
    if letter == " ":
        return np.zeros(num, dtype=np.float32)
    source = rng.normal(0.0, 0.02, num)
    source[:: int(RATE / rng.uniform(110, 140))] += 1.0 if letter in VOWELS else 0.2
    time = np.arange(int(0.02 * RATE)) / RATE
    tones = VOWELS.get(letter, (200 + 90 * (ord(letter) % 26), 1500 + 60 * (ord(letter) % 13), 3200))
    response = sum(np.exp(-time * 300) * np.sin(2 * np.pi * tone * time) for tone in tones)
    return (0.2 * np.convolve(source, response)[:num]).astype(np.float32)


def write_corpus(folder: Path, num: int, *, seed: int = 0, lang: str = "en") -> Path:
    """WAV files and a NeMo manifest; returns the manifest's path."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index, text in enumerate(sentences(num, seed=seed)):
        path = folder / f"utt-{seed}-{index:04d}.wav"
        samples = spoken(text, index)
        soundfile.write(path, samples, RATE, subtype="PCM_16")
        line = {"audio_filepath": str(path), "duration": round(len(samples) / RATE, 4), "text": text, "lang": lang}
        line |= {"source_lang": lang, "target_lang": lang, "taskname": "asr", "pnc": "no", "answer": text}
        lines.append(json.dumps(line | {"sampling_rate": RATE}))
    manifest = folder / f"manifest-{seed}.jsonl"
    manifest.write_text("".join(f"{line}\n" for line in lines))
    return manifest


def train_tokenizer(folder: Path, vocab_size: int = 128) -> Path:
    """A SentencePiece tokenizer in the layout that NeMo's ``model.tokenizer.dir`` expects."""
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text("\n".join(sentences(400, seed=7)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=vocab_size,
        model_type="bpe",
        bos_id=-1,
        eos_id=-1,
        minloglevel=2,
    )
    pieces = [line.split("\t")[0] for line in (folder / "tokenizer.vocab").read_text().splitlines()]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    return folder


def with_pieces(tokenizer: Path, folder: Path, pieces: list[str]) -> Path:
    """A copy of a tokenizer with more pieces at its end."""
    from sentencepiece import sentencepiece_model_pb2

    folder.mkdir(parents=True)
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString((tokenizer / "tokenizer.model").read_bytes())
    for name in pieces:
        model.pieces.add(piece=name, score=0.0, type=4)  # 4: defined by the user
    model.trainer_spec.vocab_size = len(model.pieces)
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    (folder / "vocab.txt").write_text("\n".join(piece.piece for piece in model.pieces))
    return folder
