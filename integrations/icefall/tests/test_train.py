"""The script in icefall's style, run as a person would run it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment

SCRIPT = Path(__file__).parents[1] / "train.py"


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuts")
    rng = np.random.default_rng(0)
    made = []
    for index in range(120):
        path = folder / f"{index}.wav"
        soundfile.write(path, rng.normal(0, 0.1, int(16000 * rng.uniform(0.5, 3.0))).astype(np.float32), 16000)
        recording = Recording.from_file(path)
        text = "".join(rng.choice(list("abcdef "), int(8 * recording.duration)))
        segment = SupervisionSegment(str(index), recording.id, 0.0, recording.duration, text=text)
        made.append(MonoCut(str(index), 0.0, recording.duration, 0, recording=recording, supervisions=[segment]))
    CutSet.from_cuts(made).to_file(folder / "cuts.jsonl.gz")
    return folder / "cuts.jsonl.gz"


def trained(cuts: Path, folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(SCRIPT), "--cuts", str(cuts), "--cache", str(folder), *arguments]
    command += ["--memory-limit", "60MiB", "--num-buckets", "3", "--num-workers", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def test_the_recipe_calibrates_trains_and_remembers(cuts: Path, tmp_path: Path) -> None:
    first = trained(cuts, tmp_path)
    assert "calibrated 3 buckets" in first
    assert "epoch 1: " in first
    second = trained(cuts, tmp_path, "--num-epochs", "1")
    assert "0 trial steps" in second
    assert re.findall(r"sizes \[.*\]", second)[0] in first


def test_the_recipe_trains_on_two_ranks(cuts: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = trained(cuts, tmp_path, "--world-size", "2", "--master-port", str(port), "--num-epochs", "1")
    assert "calibrated 3 buckets" in log
    assert "epoch 0: " in log
