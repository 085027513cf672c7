"""Two ranks with a card each, over NCCL: what other tests show over gloo, and NCCL's own timeouts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import card_ranks
import pytest
import torch
from processes import results, run_apart, run_ranks

pytestmark = [
    pytest.mark.two_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA cards"),
    pytest.mark.timeout(150),
]

BACKEND = "nccl"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rank0": ("ddp", {}),
    "shard": ("ddp", {"ranks": "shard"}),
    "each": ("ddp", {"ranks": "each"}),
    "lockstep": ("ddp", {"ranks": "lockstep"}),
    "static graph": ("static", {}),
    "FSDP2": ("fsdp2", {}),
}
TOGETHER = ("lockstep", "static graph", "FSDP2")


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, Any]]]:
    return results(run_ranks(card_ranks.several, CASES, timeout_s=140, backend=BACKEND))


@pytest.mark.parametrize("name", CASES)
def test_ranks_share_what_they_measured_over_nccl(found: list[dict[str, dict[str, Any]]], name: str) -> None:
    first, second = (each[name] for each in found)
    assert first == second
    assert first["num_trials"] > 0
    assert first["ranks"] == ("2 in lock-step" if name in TOGETHER else "several")
    assert first["sizes"] == sorted(first["sizes"], reverse=True)
    if name != "FSDP2":  # which holds less
        assert first["sizes"] == pytest.approx(found[0]["rank0"]["sizes"], rel=0.1)


@pytest.mark.parametrize("name", TOGETHER)
def test_lock_step_runs_out_of_memory_on_no_card(found: list[dict[str, dict[str, Any]]], name: str) -> None:
    assert [each[name]["num_ooms"] for each in found] == [0, 0]


@pytest.mark.parametrize("ranks", ["rank0", "shard"])
def test_a_trial_longer_than_nccls_timeout_is_no_failure(ranks: str) -> None:
    first, second = results(run_ranks(card_ranks.patient, ranks, timeout_s=100, backend=BACKEND))
    assert first == second
    assert first[1] == 2.0


def test_the_card_with_half_the_memory_counts() -> None:
    for budget_bytes, half_bytes in results(run_ranks(card_ranks.with_half_the_memory, timeout_s=100, backend=BACKEND)):
        assert budget_bytes == pytest.approx(half_bytes, rel=0.01)


def test_sizes_hold_in_training_under_nccl_and_a_second_start_runs_no_trial(tmp_path: Path) -> None:
    first, second = results(run_ranks(card_ranks.trained, str(tmp_path), 60, timeout_s=120, backend=BACKEND))
    assert first["profile"] == second["profile"]
    assert first["parameters"] == second["parameters"]
    assert first["num_trials"] > 0
    assert second["num_trials"] == 0
    for each in (first, second):
        assert (each["num_ooms"], each["num_alloc_retries"]) == (0, 0)
    again = results(run_ranks(card_ranks.trained, str(tmp_path), 1, timeout_s=60, backend=BACKEND))
    assert [each["num_trials"] for each in again] == [0, 0]
    assert again[0]["profile"] == first["profile"]


def test_collectives_of_a_rank_alone_return_over_nccl_bound_to_cards() -> None:
    told = [f"{5.0 + rank} [{rank}] 1 nccl" for rank in range(2)]
    assert results(run_ranks(card_ranks.by_itself, backend=BACKEND, timeout_s=60)) == [(told, 2)] * 2


@pytest.mark.parametrize("kind", ["static", "fsdp2"])
def test_memory_that_runs_out_on_one_card_in_lock_step_ends_all(tmp_path: Path, kind: str) -> None:
    said, codes = run_apart("card_ranks:ends", kind, "memory", "1", folder=tmp_path, timeout_s=60, backend=BACKEND)
    assert all(codes), said
    assert all("rank 1 can't finish a trial step that all ranks run together" in text for text in said)
    assert all("Tried to allocate 1048576.00 GiB" in text for text in said)


@pytest.mark.parametrize(("kind", "culprit"), [("ddp", 0), ("static", 0), ("static", 1)])
def test_a_rank_that_is_killed_in_a_trial_ends_the_other(tmp_path: Path, kind: str, culprit: int) -> None:
    said, codes = run_apart(
        "card_ranks:ends", kind, "killed", str(culprit), folder=tmp_path, timeout_s=60, backend=BACKEND
    )
    assert all(codes), said
    assert re.search(
        r"lost the connection|was silent for|rank \d+ failed in a trial|another rank than \d died", said[1 - culprit]
    )
