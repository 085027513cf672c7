"""Two ranks on one card: over gloo, and over NCCL for what a rank does by itself.

NCCL connects no two ranks of one card, but a group of NCCL that never communicates is there to be left alone.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import card_ranks
import pytest
from processes import results, run_apart, run_ranks

pytestmark = pytest.mark.timeout(120)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rank0": ("ddp", {}),
    "shard": ("ddp", {"ranks": "shard"}),
    "each": ("ddp", {"ranks": "each"}),
    "static graph": ("static", {}),
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, Any]]]:
    return results(run_ranks(card_ranks.several, CASES, timeout_s=100))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_share_what_they_measured_on_a_card(found: list[dict[str, dict[str, Any]]], name: str) -> None:
    first, second = (each[name] for each in found)
    assert first == second
    assert first["num_trials"] > 0
    assert first["ranks"] == ("2 in lock-step" if name == "static graph" else "several")
    assert first["sizes"] == sorted(first["sizes"], reverse=True)
    assert first["sizes"] == pytest.approx(found[0]["rank0"]["sizes"], rel=0.1)


def test_lock_step_runs_out_of_memory_on_no_rank(found: list[dict[str, dict[str, Any]]]) -> None:
    assert [each["static graph"]["num_ooms"] for each in found] == [0, 0]


def test_the_rank_with_half_the_memory_of_a_card_counts() -> None:
    for budget_bytes, half_bytes in results(run_ranks(card_ranks.with_half_the_memory, timeout_s=100)):
        assert budget_bytes == pytest.approx(half_bytes, rel=0.01)


def test_sizes_hold_in_training_and_a_second_start_runs_no_trial(tmp_path: Path) -> None:
    first, second = results(run_ranks(card_ranks.trained, str(tmp_path), 20, timeout_s=100))
    assert first["profile"] == second["profile"]
    assert first["parameters"] == second["parameters"]
    assert first["num_trials"] > 0
    assert second["num_trials"] == 0
    for each in (first, second):
        assert (each["num_ooms"], each["num_alloc_retries"]) == (0, 0)
    again = results(run_ranks(card_ranks.trained, str(tmp_path), 1, timeout_s=100))
    assert [each["num_trials"] for each in again] == [0, 0]
    assert again[0]["profile"] == first["profile"]


def test_collectives_of_a_rank_alone_return_over_nccl_too() -> None:
    told = [f"{5.0 + rank} [{rank}] 1 nccl" for rank in range(2)]
    assert results(run_ranks(card_ranks.by_itself, backend="nccl-unbound", timeout_s=60)) == [(told, 2)] * 2


def test_ranks_that_measure_by_themselves_never_meet_over_nccl() -> None:
    cases = {ranks: ("plain", {"ranks": ranks}) for ranks in ("rank0", "shard")}
    first, second = results(run_ranks(card_ranks.several, cases, backend="nccl-unbound", timeout_s=100))
    assert first == second
    assert first["shard"]["sizes"] == pytest.approx(first["rank0"]["sizes"], rel=0.1)


def test_memory_that_runs_out_on_one_rank_in_lock_step_ends_all(tmp_path: Path) -> None:
    said, codes = run_apart("card_ranks:ends", "static", "memory", "1", folder=tmp_path, timeout_s=60)
    assert all(codes), said
    assert all("rank 1 can't finish a trial step that all ranks run together" in text for text in said)
    assert all("Tried to allocate 1048576.00 GiB" in text for text in said)


def test_a_first_rank_that_is_killed_in_a_trial_ends_the_other(tmp_path: Path) -> None:
    said, codes = run_apart("card_ranks:ends", "ddp", "killed", "0", folder=tmp_path, timeout_s=60)
    assert all(codes), said
    assert re.search("lost the connection|was silent for", said[1])
