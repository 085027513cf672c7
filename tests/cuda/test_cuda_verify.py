"""A stored profile tried again on a CUDA card, and what DDP's buckets cost there."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from tiny_asr import TinyDataset, TinyModel, tiny_sampler

from lhotse_oomfit.fit import CalibrationOptions, calibrate_training, loop_training, verify_training
from lhotse_oomfit.offline import use_training

pytestmark = pytest.mark.cuda


def step(model, batch):
    with torch.autocast("cuda", torch.bfloat16):
        return model.loss({name: value.cuda() for name, value in batch.items()})


def parts(width=512):
    torch.manual_seed(1)
    model = TinyModel(width=width).cuda()
    return {
        "sampler": tiny_sampler(),
        "dataset": TinyDataset(),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "training_step": step,
        "precision": "bf16",
    }


def options(cache, *, memory_limit="8GiB", **more):
    return CalibrationOptions(memory_limit=memory_limit, memory_fraction=0.8, cache=cache, progress=False, **more)


def test_what_was_just_measured_holds_and_twice_as_much_does_not(tmp_path, caplog):
    made = parts()
    profile = use_training(made, calibrate_training, options(tmp_path))
    training = loop_training(**made)
    checks = verify_training(made["sampler"], training, options(tmp_path), profile)
    assert [check.reason for check in checks] == [None, None]
    twice = replace(profile, buckets=tuple(replace(bucket, size=2 * bucket.size) for bucket in profile.buckets))
    assert not any(check.holds for check in verify_training(made["sampler"], training, options(tmp_path), twice))
    with caplog.at_level(logging.INFO):
        assert use_training(parts(), calibrate_training, options(tmp_path, verify_on_load=True)) == profile
    assert ": 2 trial steps" in caplog.text
