"""Lightning trainings of two ranks with a card each, over NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch")

from test_lightning_ranks import check_alike, launched

pytestmark = [
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards"),
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:::lightning"),
]

FINDER = {"memory_limit": "2GiB", "max_batch_size": 8}  # so that an epoch has many batches
CASES: dict[str, dict[str, Any]] = {
    "DDP": {"strategy": "ddp", "sync_batchnorm": True, "precision": "bf16-mixed"},
    "shared out": {"strategy": "ddp", "sync_batchnorm": True, "finder": {"ranks": "shard"}},
    "static graph": {"strategy": "static_graph", "sync_batchnorm": True},
    "FSDP2": {"strategy": "fsdp2"},
}


@pytest.mark.parametrize("name", CASES)
def test_a_job_of_two_cards_is_calibrated_and_trains_in_step(tmp_path: Path, name: str) -> None:
    options = {**CASES[name], "accelerator": "cuda", "finder": {**FINDER, **CASES[name].get("finder", {})}}
    (first, second), log = launched(tmp_path, **options)
    check_alike(first, second)
    assert first["ranks"] == ("2 in lock-step" if name in ("static graph", "FSDP2") else "several")
    assert "atchdog" not in log
