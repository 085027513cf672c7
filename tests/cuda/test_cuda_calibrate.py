"""`calibrate` on a CUDA card: sizes that hold in shuffled training under a hard cap, and no trace."""

from __future__ import annotations

import random

import pytest
import torch
from tiny_asr import TinyDataset, TinyModel, fingerprint_of_state, tiny_cuts, tiny_optimizer, tiny_sampler
from torch.utils.data import DataLoader

from lhotse_oomfit import calibrate

pytestmark = pytest.mark.cuda


def to_card(batch):
    return {name: value.cuda() for name, value in batch.items()}


def step(model, batch):
    with torch.autocast("cuda", torch.bfloat16):
        return model.loss(to_card(batch))


def start(num_layers=1):
    random.seed(1)
    torch.manual_seed(1)
    model = TinyModel(width=512)
    layers = [torch.nn.TransformerEncoderLayer(512, 4, 1024, batch_first=True) for _ in range(num_layers - 1)]
    model.block = torch.nn.Sequential(model.block, *layers)
    model.cuda()
    return (model, *tiny_optimizer(model))


def find(model, optimizer, scheduler, sampler, **options):
    arguments = {"memory_limit": "8GiB", "memory_fraction": 0.8, "cache": False, "progress": False, **options}
    return calibrate(
        sampler,
        TinyDataset(),
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        training_step=step,
        precision="bf16",
        **arguments,
    )


def train_shuffled(profile, model, optimizer, limit_bytes, num_steps):
    """OOMs and retries of training steps at full size, buckets drawn at random, under a hard cap."""
    cut = {}
    dataset = TinyDataset()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes)
    before = torch.cuda.memory_stats()
    rng = random.Random(0)
    try:
        for _ in range(num_steps):
            k = rng.randrange(len(profile.buckets))
            if k not in cut:
                edge = profile.buckets[k].input_len
                cut[k] = dataset[tiny_cuts(1, shortest=edge, longest=edge, chars_per_s=12)]
            size = profile.bucket_batch_size[k]
            batch = {name: value.expand(size, *value.shape[1:]) for name, value in cut[k].items()}
            optimizer.zero_grad()
            step(model, batch).backward()
            optimizer.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    after = torch.cuda.memory_stats()
    return {
        "ooms": after["num_ooms"] - before["num_ooms"],
        "retries": after["num_alloc_retries"] - before["num_alloc_retries"],
    }


def test_sizes_hold_in_shuffled_training_under_a_hard_cap_at_the_budget():
    model, optimizer, scheduler = start()
    profile = find(model, optimizer, scheduler, tiny_sampler())
    assert profile.num_ooms == 0
    assert profile.num_trials <= 2 * len(profile.buckets) + 3
    shares = [profile.share(bucket) for bucket in profile.buckets]
    assert min(shares) > 0.8, shares
    trained = train_shuffled(profile, model, optimizer, profile.budget_bytes, 60)
    assert trained["ooms"] == 0
    assert trained["retries"] <= 6, shares  # fragments of 20 MiB are a large share of so small a budget


@pytest.mark.filterwarnings("ignore:.*determinis")  # said once of CTC, once of attention
def test_a_calibration_on_the_card_leaves_no_trace_and_the_same_losses(tmp_path):
    def one():
        model, optimizer, scheduler = start()
        sampler = tiny_sampler(tiny_cuts(40), max_buffer_size=200_000)

        def state():
            return fingerprint_of_state(model, optimizer, scheduler), torch.cuda.get_rng_state().numpy().tobytes()

        before = state()
        profile = find(model, optimizer, scheduler, sampler, cache=tmp_path, max_batch_size=16)
        assert state() == before
        losses = []
        for batch in DataLoader(TinyDataset(), sampler=sampler, batch_size=None):
            optimizer.zero_grad()
            loss = step(model, batch)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        return profile, losses

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        measured, loaded = one(), one()
    finally:
        torch.use_deterministic_algorithms(False)
    assert measured[0] == loaded[0]
    assert measured[1][0] == loaded[1][0]
    assert measured[1] == pytest.approx(loaded[1], rel=1e-3)  # CTC's backward on CUDA adds in any order
