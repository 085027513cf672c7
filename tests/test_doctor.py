"""What the doctor finds: each finding says what, why and what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lhotse import CutSet
from synthetic_profiles import make_profile
from tiny_asr import tiny_cuts, tiny_sampler

from lhotse_oomfit import doctor
from lhotse_oomfit.doctor import Finding, check_environment, check_training
from lhotse_oomfit.store import ProfileStore

VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "OOMFIT_RECALIBRATE",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def store(tmp_path: Path) -> ProfileStore:
    return ProfileStore(tmp_path / "cache")


def only(findings: list[Finding], words: str) -> Finding:
    (found,) = [finding for finding in findings if words in finding.what]
    assert found.why
    assert found.remedy
    return found


def hurting(findings: list[Finding]) -> list[str]:
    return [finding.what for finding in findings if finding.hurts]


def test_a_good_environment_has_nothing_that_hurts(store: ProfileStore) -> None:
    findings = check_environment(store)
    assert hurting(findings) == []
    assert not only(findings, "no CUDA card").hurts


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512", "leaves expandable segments off"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", "leaves expandable segments off"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "chooses another allocator"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "PYTORCH_NO_CUDA_MEMORY_CACHING is set"),
        ("OOMFIT_RECALIBRATE", "always", "OOMFIT_RECALIBRATE=always is set"),
        ("OOMFIT_RECALIBRATE", "sometimes", "OOMFIT_RECALIBRATE=sometimes is set"),
    ],
)
def test_a_variable_that_hurts(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    assert only(check_environment(store), words).hurts


@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:512,expandable_segments:True"])
def test_expandable_segments_are_as_they_should_be(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    assert hurting(check_environment(store)) == []


@pytest.mark.parametrize(
    ("package", "version", "remedy"),
    [
        ("lhotse", "1.30.0", "pip install 'lhotse>=1.33,<2.0'"),
        ("lhotse", "2.0.0a1", "pip install 'lhotse>=1.33,<2.0'"),
        ("lightning", "2.7.0", "pip install 'lightning>=2.3,<2.7'"),
        ("torch", "2.3.1+cu121", "pip install 'torch>=2.4'"),
    ],
)
def test_versions_outside_the_range(
    store: ProfileStore, monkeypatch: pytest.MonkeyPatch, package: str, version: str, remedy: str
) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(doctor, "version", lambda name: version if name == package else real(name))
    finding = only(check_environment(store), f"{package} {version} is outside")
    assert (finding.hurts, finding.remedy) == (True, remedy)


def test_a_missing_package(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "urllib3" else real(name))
    findings = check_environment(store)
    assert hurting(findings) == ["torch isn't installed", "lhotse isn't installed", "urllib3 isn't installed"]
    assert "'import lhotse' fails" in only(findings, "urllib3").why


def test_a_card_that_others_use(store: ProfileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((79 if index else 40) * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    out = SimpleNamespace(stdout=f"{os.getpid()}, me\n77, python\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **options: out)
    finding = only(check_environment(store), "in use by other processes")
    assert finding.what == "card 0 (H200): 40.0 GiB of 80.0 GiB are in use by other processes (pid 77, python)"


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    finding = only(check_environment(ProfileStore(tmp_path / "file" / "cache")), "can't be written")
    assert finding.hurts
    assert "every run measures again" in finding.why


def test_profiles_that_cannot_be_read_are_worth_knowing(store: ProfileStore) -> None:
    assert store.directory is not None
    store.directory.mkdir()
    (store.directory / "0123456789abcdef.yaml").write_text("a: [")
    finding = only(check_environment(store), "1 of the profiles")
    assert not finding.hurts
    assert finding.remedy == f"oomfit clear {store.directory / '0123456789abcdef.yaml'}"
    assert not list(store.directory.glob(".doctor*"))


def training(sampler: Any, store: ProfileStore, **options: Any) -> list[Finding]:
    return check_training(sampler, **{"trainer": None, "store": store, **options})


def test_the_trainer_s_default_sampler_hurts(store: ProfileStore) -> None:
    sampler = tiny_sampler()
    assert only(training(sampler, store, trainer={}), "use_distributed_sampler=True").hurts
    assert training(sampler, store, trainer={"use_distributed_sampler": False}) == []
    assert training(sampler, store) == []


def test_infinite_data_needs_a_number_of_steps(store: ProfileStore) -> None:
    trainer = {"use_distributed_sampler": False}
    for cuts in (tiny_cuts(8).repeat(), CutSet.infinite_mux(tiny_cuts(4), tiny_cuts(4))):
        sampler = tiny_sampler(cuts)
        assert only(training(sampler, store, trainer=trainer), "the data is infinite and the Trainer").hurts
        assert not only(training(sampler, store), "the data is infinite").hurts
        assert hurting(training(sampler, store, trainer={**trainer, "max_steps": 100})) == []
    assert training(tiny_sampler(tiny_cuts(8).repeat(times=2)), store, trainer=trainer) == []


def test_a_buffer_smaller_than_the_sizes(store: ProfileStore) -> None:
    options = {"bucket_batch_size": [100, 50, 25, 25], "buffer_size": 100}
    assert not only(training(tiny_sampler(**options), store), "takes 200 examples by the sampler's sizes").hurts
    finding = only(training(tiny_sampler(**options), store, world_size=8), "on 8 ranks takes 1,600 examples")
    assert (finding.hurts, finding.remedy) == (True, "max_buffer_size=1600 or more")
    assert training(tiny_sampler(bucket_batch_size=[1, 1, 1, 1]), store) == []


def test_a_buffer_smaller_than_the_stored_sizes_of_the_same_bins(store: ProfileStore) -> None:
    sampler = tiny_sampler(duration_bins=[2.0, 4.5, 30.0], max_tps=None, buffer_size=50)
    assert training(sampler, store) == []
    store.save(make_profile())
    finding = only(training(sampler, store), "takes 301 examples by the sizes of the profile of 2026-01-31T12:00:00Z")
    assert finding.hurts


def test_a_source_in_another_order_each_time_is_worth_knowing(store: ProfileStore) -> None:
    sampler = tiny_sampler(CutSet.mux(tiny_cuts(4), tiny_cuts(4), seed="trng"))
    assert not only(training(sampler, store), "can't be read again in the same order").hurts
