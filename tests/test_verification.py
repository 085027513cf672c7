"""A stored profile, tried again: on load, where torch's patch version changed, and by name."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_profiles import make_profile
from tiny_asr import TinyDataset, TinyModel, fingerprint_of_state, tiny_sampler, training_step

from lhotse_oomfit import calibrate
from lhotse_oomfit.errors import InvalidArgumentError, ProfileMismatchError
from lhotse_oomfit.fingerprint import Fingerprint
from lhotse_oomfit.fit import loop_training, verify_training
from lhotse_oomfit.options import CalibrationOptions
from lhotse_oomfit.profile import Profile
from lhotse_oomfit.store import ProfileStore
from lhotse_oomfit.verification import tightest_buckets

LIMIT = "24MiB"


class Parts:
    """A tiny training, the same one each time."""

    def __init__(self, **sampler: Any) -> None:
        torch.manual_seed(0)
        self.model = TinyModel()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.sampler = tiny_sampler(**sampler)

    def calibrate(self, cache: Path, **options: Any) -> Profile:
        return calibrate(
            self.sampler,
            TinyDataset(),
            model=self.model,
            optimizer=self.optimizer,
            training_step=training_step,
            memory_limit=LIMIT,
            cache=cache,
            progress=False,
            **options,
        )


def other_patch(profile: Profile) -> Profile:
    """The profile as if another patch version of torch had measured it."""
    fields = dict(profile.fingerprint.fields)
    release, plus, build = fields["torch"].partition("+")
    major, minor, patch = release.split(".")
    fields["torch"] = f"{major}.{minor}.{int(patch) + 1}{plus}{build}"
    return replace(profile, fingerprint=Fingerprint(fields=fields))


def oversized(profile: Profile) -> Profile:
    """The profile with twice as large batches."""
    return replace(profile, buckets=tuple(replace(bucket, size=2 * bucket.size) for bucket in profile.buckets))


def messages(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


def test_a_loaded_profile_is_verified_with_two_steps_when_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    stored = Parts().calibrate(tmp_path)
    parts = Parts()
    before = fingerprint_of_state(parts.model, parts.optimizer)
    with caplog.at_level(logging.INFO):
        assert parts.calibrate(tmp_path, verify_on_load=True) == stored
    assert ": 2 trial steps" in messages(caplog)
    assert fingerprint_of_state(parts.model, parts.optimizer) == before
    assert parts.sampler.bucket_batch_size == stored.bucket_batch_size


def test_a_loaded_profile_that_no_longer_holds_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    stored = Parts().calibrate(tmp_path)
    ProfileStore(tmp_path).save(oversized(stored))
    with caplog.at_level(logging.INFO):
        found = Parts().calibrate(tmp_path, verify_on_load=True)
    assert found.bucket_batch_size == stored.bucket_batch_size
    assert "the stored profile no longer holds: bucket" in messages(caplog)
    assert "out of memory" in messages(caplog)


def test_without_verification_a_loaded_profile_costs_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    stored = Parts().calibrate(tmp_path)
    with caplog.at_level(logging.INFO):
        assert Parts().calibrate(tmp_path) == stored
    assert ": 0 trial steps" in messages(caplog)


def test_a_profile_of_another_patch_version_of_torch_is_verified_and_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    stored = Parts().calibrate(tmp_path / "first")
    ProfileStore(tmp_path / "second").save(other_patch(stored))
    with caplog.at_level(logging.INFO):
        found = Parts().calibrate(tmp_path / "second")
    assert found.bucket_batch_size == stored.bucket_batch_size
    assert found.num_trials == stored.num_trials  # not searched again
    assert found.fingerprint == stored.fingerprint
    assert ": 2 trial steps" in messages(caplog)
    assert "torch: " in messages(caplog)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        Parts().calibrate(tmp_path / "second")
    assert ": 0 trial steps" in messages(caplog)


def test_a_near_profile_that_does_not_hold_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    stored = Parts().calibrate(tmp_path / "first")
    ProfileStore(tmp_path / "second").save(oversized(other_patch(stored)))
    with caplog.at_level(logging.INFO):
        found = Parts().calibrate(tmp_path / "second")
    assert found.bucket_batch_size == stored.bucket_batch_size
    assert "no longer holds" in messages(caplog)


def verify(profile: Profile, num_buckets: int = 2, **sampler: Any) -> list[Any]:
    parts = Parts(**sampler)
    training = loop_training(
        parts.sampler, TinyDataset(), model=parts.model, optimizer=parts.optimizer, training_step=training_step
    )
    options = CalibrationOptions(memory_limit=LIMIT, cache=False, progress=False)
    return verify_training(parts.sampler, training, options, profile, num_buckets=num_buckets)


def test_verification_runs_the_tightest_buckets_and_says_what_each_took(tmp_path: Path):
    profile = Parts().calibrate(tmp_path)
    checks = verify(profile)
    assert [check.bucket for check in checks] == tightest_buckets(profile, 2)
    assert all(check.holds for check in checks)
    assert all(abs(check.peak_bytes / check.stored_peak_bytes - 1) < 0.02 for check in checks)
    failed = verify(oversized(profile), num_buckets=3)
    assert [check.holds for check in failed] == [False] * 3
    assert "out of memory" in failed[0].reason
    assert str(failed[0]).startswith(f"bucket {failed[0].bucket} (")


def test_verification_needs_the_profile_s_bins(tmp_path: Path):
    profile = Parts().calibrate(tmp_path)
    with pytest.raises(ProfileMismatchError, match="was measured for the bins"):
        verify(profile, duration_bins=[1.0, 4.0])


def test_the_tightest_buckets_are_those_with_the_highest_share_and_the_unmeasured_first():
    profile = make_profile()  # the third bucket is only predicted, the second's peak is above the first's
    assert tightest_buckets(profile, 2) == [2, 1]
    assert tightest_buckets(profile, 9) == [2, 1, 0]


def test_options_out_of_range_are_refused():
    for name, value in (("world_size", 0), ("world_size", True), ("max_batch_size", 0)):
        with pytest.raises(InvalidArgumentError, match=f"{name} must be a whole number of at least 1, it is {value}"):
            CalibrationOptions(**{name: value})
