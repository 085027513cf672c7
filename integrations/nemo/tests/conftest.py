"""Data that every test may read: rendered speech, in NeMo's formats, and a tokenizer."""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from speech import train_tokenizer, write_corpus

os.environ.setdefault("OMP_NUM_THREADS", "1")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    folder: Path
    train: Path
    validation: Path
    tokenizer: Path
    longest_s: float


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    train = write_corpus(folder, 80)
    durations = [json.loads(line)["duration"] for line in train.read_text().splitlines()]
    return Corpus(
        folder=folder,
        train=train,
        validation=write_corpus(folder, 8, seed=1),
        tokenizer=train_tokenizer(folder / "tokenizer"),
        longest_s=max(durations),
    )


@pytest.fixture(scope="session")
def tarred(corpus: Corpus) -> dict[str, str]:
    """NeMo's tarred format, in two shards."""
    lines = [json.loads(line) for line in corpus.train.read_text().splitlines()]
    for shard in range(2):
        members = lines[shard::2]
        with tarfile.open(corpus.folder / f"audio_{shard}.tar", "w") as archive:
            for line in members:
                archive.add(line["audio_filepath"], arcname=Path(line["audio_filepath"]).name)
        names = [line | {"audio_filepath": Path(line["audio_filepath"]).name, "shard_id": shard} for line in members]
        (corpus.folder / f"manifest_{shard}.json").write_text("".join(f"{json.dumps(name)}\n" for name in names))
    return {
        "manifest_filepath": f"{corpus.folder}/manifest__OP_0..1_CL_.json",
        "tarred_audio_filepaths": f"{corpus.folder}/audio__OP_0..1_CL_.tar",
    }


@pytest.fixture(scope="session")
def shar(corpus: Corpus) -> str:
    """Lhotse's Shar format, in two shards."""
    from lhotse import CutSet, MonoCut, Recording, SupervisionSegment

    cuts = []
    for line in map(json.loads, corpus.train.read_text().splitlines()):
        recording = Recording.from_file(line["audio_filepath"])
        name, end = recording.id, recording.duration
        segment = SupervisionSegment(id=name, recording_id=name, start=0.0, duration=end, text=line["text"])
        cuts.append(MonoCut(id=name, start=0.0, duration=end, channel=0, recording=recording, supervisions=[segment]))
    folder = corpus.folder / "shar"
    folder.mkdir()
    CutSet.from_cuts(cuts).to_shar(folder, fields={"recording": "wav"}, shard_size=40)
    return str(folder)
