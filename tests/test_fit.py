"""`calibrate` as a plain PyTorch loop uses it: real model, real dataset, real cache files, the CPU memory limit."""

from __future__ import annotations

import logging
import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lhotse import CutSet
from lhotse.dataset.iterable_dataset import IterableDatasetWrapper
from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler
from tiny_asr import (
    TinyDataset,
    TinyModel,
    fingerprint_of_state,
    largest_that,
    tiny_cut,
    tiny_cuts,
    tiny_optimizer,
    tiny_sampler,
    train,
    training_step,
)
from torch.utils.data import DataLoader

from lhotse_oomfit import calibrate
from lhotse_oomfit.errors import (
    BucketDoesNotFitError,
    CalibrationError,
    EmptySourceError,
    InvalidArgumentError,
    NotCalibratedError,
    UnsupportedStrategyError,
    WorstCaseError,
)
from lhotse_oomfit.memory import CpuMemory
from lhotse_oomfit.store import read_profile
from lhotse_oomfit.training import resident_tensors

LIMIT = "24MiB"


def run(sampler=None, dataset=None, *, model=None, optimizer=None, **options):
    """Calibrate the tiny training; returns the profile."""
    torch.manual_seed(0)
    model = model or TinyModel()
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    arguments = {"training_step": training_step, "memory_limit": LIMIT, "cache": False, "progress": False, **options}
    return calibrate(
        sampler if sampler is not None else tiny_sampler(),
        dataset if dataset is not None else TinyDataset(),
        model=model,
        optimizer=optimizer,
        **arguments,
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "profiles"


# What it finds


def test_every_batch_of_the_calibrated_sampler_trains_inside_the_limit():
    torch.manual_seed(0)
    model, cuts = TinyModel(), tiny_cuts(400)
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = tiny_sampler(cuts)
    profile = run(sampler, model=model, optimizer=optimizer, memory_limit="10MiB")
    assert sampler.profile == profile
    memory = CpuMemory(limit_bytes=profile.budget_bytes, resident=lambda: [*model.parameters(), *model.buffers()])
    sizes = []
    for batch in DataLoader(TinyDataset(), sampler=sampler, batch_size=None):
        with memory.measure():
            model.loss(batch).backward()
        optimizer.zero_grad()
        sizes.append(len(batch["features"]))
    assert sum(sizes) == len(cuts)
    assert set(profile.bucket_batch_size[1:]) <= set(sizes)  # most batches are full ones


def test_sizes_match_a_brute_force_search_in_eight_buckets():
    # Three in a hundred below the truth (one, at small sizes), none above; 1.5 trials a bucket; no OOM.
    edges = [0.4, 0.7, 1.0, 1.3, 1.7, 2.2, 3.0, 4.0]
    torch.manual_seed(0)
    model, dataset = TinyModel(), TinyDataset()
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = tiny_sampler(tiny_cuts(120), duration_bins=edges)
    profile = run(sampler, dataset, model=model, optimizer=optimizer, memory_limit="24MiB")
    train(model, *tiny_optimizer(model), [dataset[tiny_cuts(4)]])  # creates gradients and such, as training has them
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    memory = CpuMemory(
        limit_bytes=profile.budget_bytes,
        resident=lambda: [
            *model.parameters(),
            *model.buffers(),
            *(value for state in optimizer.state.values() for value in state.values()),
        ],
    )

    def fits(edge: float, size: int) -> bool:
        cut = tiny_cut(0, edge, int(12 * edge))  # a real cut at the edges, collated by the dataset itself
        batch = dataset[CutSet.from_cuts(cut.with_id(f"{i}") for i in range(size))]
        try:
            with memory.measure():
                model.loss(batch).backward()
        except torch.OutOfMemoryError:
            return False
        finally:
            optimizer.zero_grad()
        return True

    truth = []
    for edge, size in zip(edges, profile.bucket_batch_size, strict=True):
        truth.append(largest_that(partial(fits, edge)))
        assert min(int(0.97 * truth[-1]), truth[-1] - 1) <= size <= truth[-1]
    assert sum(size > 32 for size in truth) >= 5
    assert profile.num_trials <= 1.5 * len(edges)
    assert profile.num_ooms == 0


def test_two_dimensional_bins_get_a_size_per_pair_of_lengths():
    bins = [(1.0, 6), (1.0, 12), (2.0, 12), (2.0, 24)]
    sampler = tiny_sampler(tiny_cuts(60, longest=2.0), duration_bins=bins, max_tps=None)
    profile = run(sampler)
    assert [bucket.output_len for bucket in profile.buckets] == [6, 12, 12, 24]
    assert profile.bucket_batch_size[0] >= profile.bucket_batch_size[1] > profile.bucket_batch_size[3]


def test_without_max_tps_the_densest_cuts_seen_decide_the_output_length():
    cuts = CutSet.from_cuts([tiny_cut(i, 1.0 + i / 10, 5 + i) for i in range(20)])
    profile = run(tiny_sampler(cuts, max_tps=None, duration_bins=[2.0, 3.0]))
    assert profile.buckets[0].output_len >= 15
    assert profile.buckets[1].output_len >= 24


def test_a_dataset_that_packs_is_collated_for_real(caplog):
    class Packing(TinyDataset):
        def __getitem__(self, cuts):
            batch = super().__getitem__(cuts)
            rows = [row[:n] for row, n in zip(batch["features"], batch["feature_lens"], strict=True)]
            offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
            return {"packed": torch.cat(rows), "offsets": offsets, "token_lens": batch["token_lens"]}

    seen = []

    def step(model, batch):
        seen.append(len(batch["token_lens"]))
        return model.head(model.subsample(batch["packed"].T[None]).transpose(1, 2)).square().mean()

    with caplog.at_level(logging.INFO):
        profile = run(dataset=Packing(), training_step=step, memory_limit="6MiB")
    assert set(profile.bucket_batch_size) <= set(seen)
    assert "collat" in caplog.text


def test_make_batch_is_asked_for_the_bucket_edges():
    asked = []

    def make_batch(*, batch_size, input_len, output_len):
        asked.append((input_len, output_len))
        frames = int(input_len * 100)
        return {
            "features": torch.randn(batch_size, frames, 16),
            "feature_lens": torch.full((batch_size,), frames),
            "tokens": torch.ones(batch_size, output_len, dtype=torch.int64),
            "token_lens": torch.full((batch_size,), output_len),
        }

    own = run(make_batch=make_batch)
    assert set(asked) == {(1.0, 12), (2.0, 24), (3.0, 36), (4.0, 48)}
    for size, found in zip(own.bucket_batch_size, run().bucket_batch_size, strict=True):
        assert size == pytest.approx(found, rel=0.02, abs=1)


def test_an_iterable_dataset_hands_its_sampler_the_sizes():
    sampler = tiny_sampler()
    wrapper = IterableDatasetWrapper(TinyDataset(), sampler)
    profile = run(sampler, wrapper)
    sizes = [len(batch["features"]) for batch in DataLoader(wrapper, batch_size=None)]
    assert sum(sizes) == 60
    assert max(sizes) <= profile.bucket_batch_size[0]


def test_functions_given_to_map_are_applied_to_worst_case_batches_too():
    def twice(cuts):
        return CutSet.from_cuts([cut.with_id(f"{cut.id}-{i}") for cut in cuts for i in range(2)])

    doubled = tiny_sampler()
    doubled.map(twice)
    plain = run().bucket_batch_size
    assert all(size <= plain[k] / 2 + 1 for k, size in enumerate(run(doubled).bucket_batch_size))


def test_accumulated_gradients_leave_less_room():
    model = TinyModel(width=96)
    single = run(model=model, memory_limit="30MiB")
    accumulated = run(model=model, memory_limit="30MiB", accumulate_grad_batches=4)
    assert accumulated.bucket_batch_size[-1] <= single.bucket_batch_size[-1]
    assert accumulated.fingerprint != single.fingerprint


def test_a_reserve_is_kept_out_of_the_budget():
    assert run(reserve="4MiB").budget_bytes == run().budget_bytes - 4 * 1024**2


def test_no_bucket_exceeds_max_batch_size():
    assert max(run(max_batch_size=3).bucket_batch_size) == 3


# No trace


def test_a_calibration_leaves_no_trace_and_six_losses_equal_those_of_a_run_that_loaded_the_profile(cache):
    def start(seed):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        model = TinyModel()
        optimizer, scheduler = tiny_optimizer(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        batches = [TinyDataset()[tiny_cuts(n)] for n in (3, 5, 4)]
        train(model, optimizer, scheduler, batches)  # resumed trainings have optimizer state already
        return model, optimizer, scheduler, scaler

    def state(model, optimizer, scheduler, scaler):
        generators = [
            torch.get_rng_state().numpy().tobytes(),
            repr(random.getstate()),
            repr(np.random.get_state()),
        ]
        gradients = [None if p.grad is None else p.grad.numpy().tobytes() for p in model.parameters()]
        objects = [id(t) for t in (*model.parameters(), *model.buffers())]
        modes = [module.training for module in model.modules()]
        return (
            fingerprint_of_state(model, optimizer, scheduler, scaler),
            generators,
            gradients,
            objects,
            modes,
            list(model.seen),
            optimizer._opt_called,
            vars(scheduler)["last_epoch"],
        )

    def one_run():
        model, optimizer, scheduler, scaler = start(3)
        model.norm.eval()
        before = state(model, optimizer, scheduler, scaler)
        sampler = tiny_sampler()
        profile = run_here(sampler, model, optimizer, scheduler, scaler)
        assert state(model, optimizer, scheduler, scaler) == before
        model.norm.train()
        loader = iter(DataLoader(TinyDataset(), sampler=sampler, batch_size=None))
        return profile, train(model, optimizer, scheduler, [next(loader) for _ in range(6)])

    def run_here(sampler, model, optimizer, scheduler, scaler):
        return calibrate(
            sampler,
            TinyDataset(),
            model=model,
            optimizer=optimizer,
            training_step=training_step,
            scheduler=scheduler,
            scaler=scaler,
            memory_limit="3MiB",
            cache=cache,
            progress=False,
        )

    measured, losses = one_run()
    loaded, losses_after_loading = one_run()
    assert measured == loaded
    assert measured.num_trials > 0
    assert losses == losses_after_loading


def test_optimizer_state_that_was_empty_is_empty_again():
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    before = fingerprint_of_state(model)
    run(model=model, optimizer=optimizer)
    assert not optimizer.state
    assert fingerprint_of_state(model) == before


def test_the_generators_of_a_dataset_do_not_notice():
    class Augmented(TinyDataset):
        def __init__(self):
            super().__init__()
            self.augment = Noise()

        def __getitem__(self, cuts):
            batch = super().__getitem__(cuts)
            batch["features"] += self.augment.rng.random()
            self.augment.calls += 1
            return batch

    class Noise:
        def __init__(self):
            self.rng = random.Random(5)
            self.calls = 0

    dataset = Augmented()
    before = dataset.augment.rng.getstate()
    run(dataset=dataset)
    assert dataset.augment.rng.getstate() == before
    assert dataset.augment.calls == 0


def test_an_error_in_the_users_step_comes_out_as_itself_with_everything_restored():
    model = TinyModel()
    before = fingerprint_of_state(model)

    def step(model, batch):
        if len(batch["features"]) > 4:
            raise ZeroDivisionError("a bug of the user's")
        return model.loss(batch)

    with pytest.raises(ZeroDivisionError, match="a bug of the user's"):
        run(model=model, training_step=step)
    assert fingerprint_of_state(model) == before
    assert all(p.grad is None for p in model.parameters())


# The cache


def test_a_second_run_loads_the_profile_and_runs_no_trial(cache, caplog):
    steps = []

    def step(model, batch):
        steps.append(len(batch["features"]))
        return model.loss(batch)

    first = run(cache=cache, training_step=step)
    num = len(steps)
    with caplog.at_level(logging.INFO):
        second = run(cache=cache, training_step=step)
    assert second == first
    assert len(steps) == num > 0
    assert "loaded from" in caplog.text
    assert "0 trial steps" in caplog.text


@pytest.mark.parametrize("how", ["argument", "environment", "deleted"])
def test_a_new_measurement_can_be_forced(cache, monkeypatch, how):
    steps = []

    def step(model, batch):
        steps.append(len(batch["features"]))
        return model.loss(batch)

    run(cache=cache, training_step=step)
    first = len(steps)
    options = {}
    if how == "argument":
        options["recalibrate"] = "always"
    elif how == "environment":
        monkeypatch.setenv("OOMFIT_RECALIBRATE", "always")
    else:
        (path,) = cache.glob("*.yaml")
        path.unlink()
    run(cache=cache, training_step=step, **options)
    assert len(steps) == 2 * first


def test_another_limit_recalibrates_and_says_why(cache, caplog):
    run(cache=cache)
    with caplog.at_level(logging.INFO):
        run(cache=cache, memory_limit="32MiB")
    assert re.search(r"measured for something else: device_memory: \S+ -> \S+", caplog.text)


def test_another_model_recalibrates_and_says_why(tmp_path, caplog):
    path = tmp_path / "bins.yaml"
    run(cache=path)
    with caplog.at_level(logging.INFO):
        run(cache=path, model=TinyModel(width=32))
    assert "model.parameters" in caplog.text
    assert read_profile(path).bucket_batch_size


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "unreadable"),
        (lambda text: "", "unreadable"),
        (lambda text: text.replace("format_version: 1", "format_version: 99"), "format_version is 99"),
        (lambda text: "\x00\x01\x02", "unreadable"),
    ],
    ids=["truncated", "empty", "another-version", "binary"],
)
def test_an_unreadable_profile_is_measured_again_and_says_why(tmp_path, caplog, damage, reason):
    path = tmp_path / "bins.yaml"
    first = run(cache=path)
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.INFO):
        second = run(cache=path)
    assert reason in caplog.text
    assert second.bucket_batch_size == first.bucket_batch_size
    assert read_profile(path) == second


@pytest.mark.parametrize("what", ["training_step", "collate_fn", "map"])
def test_another_function_of_the_users_recalibrates_and_says_which(tmp_path, caplog, what):
    def heavier(model, batch):
        return model.loss(batch) + model.loss(batch)

    def doubled(batch):
        return {name: torch.cat([value, value], dim=0) for name, value in batch.items()}

    path = tmp_path / "bins.yaml"
    first = run(cache=path)
    sampler = tiny_sampler()
    options = {"training_step": heavier} if what == "training_step" else {}
    if what == "collate_fn":
        options["collate_fn"] = doubled
    if what == "map":
        sampler.map(lambda cuts: CutSet.from_cuts([cut.with_id(f"{cut.id}-{i}") for cut in cuts for i in range(2)]))
    with caplog.at_level(logging.INFO):
        second = run(sampler, cache=path, **options)
    assert f"code.{what}" in caplog.text
    assert second.bucket_batch_size[-1] < first.bucket_batch_size[-1]


def test_parts_in_eval_mode_stay_there_in_trials():
    seen = set()

    def step(model, batch):
        seen.add((model.training, model.block.training))
        return model.loss(batch)

    model = TinyModel()
    model.block.eval()
    run(model=model, training_step=step)
    assert seen == {(True, False)}


def test_optimizer_state_of_some_parameters_is_not_taken_for_complete():
    fresh = run(memory_limit="3MiB")
    model = TinyModel()
    optimizer = torch.optim.AdamW([model.head.weight])
    model.loss(TinyDataset()[tiny_cuts(2)]).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [p for p in model.parameters() if p is not model.head.weight]})
    assert run(model=model, optimizer=optimizer, memory_limit="3MiB").bucket_batch_size == fresh.bucket_batch_size
    assert len(optimizer.state) == 1


def test_a_teacher_that_the_forward_pass_updates_is_restored_on_resume_too():
    model = TinyModel()
    model.teacher = torch.nn.Linear(4, 4).requires_grad_(False)
    optimizer, _ = tiny_optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # as a resumed optimizer, it has all its state
    optimizer.zero_grad()
    before = fingerprint_of_state(model)

    def step(model, batch):
        with torch.no_grad():
            for parameter in model.teacher.parameters():
                parameter.mul_(0.9)
        return model.loss(batch)

    run(model=model, optimizer=optimizer, training_step=step)
    assert fingerprint_of_state(model) == before


def test_a_norm_that_needs_two_examples_names_the_bucket_that_holds_only_one():
    class Pooling(TinyModel):
        def __init__(self):
            super().__init__()
            self.pooled = torch.nn.BatchNorm1d(24)

        def loss(self, batch):
            x = self.subsample(batch["features"].transpose(1, 2))
            attention = x.transpose(1, 2) @ x
            return self.pooled((x @ attention.softmax(-1)).mean(-1)).square().sum()

    with pytest.raises(BucketDoesNotFitError, match="a batch of one example exceeds"):
        run(model=Pooling(), memory_limit="400KiB")


def test_training_settings_do_not_change_what_a_profile_is_valid_for(cache):
    first = run(cache=cache)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    torch.manual_seed(99)
    assert run(tiny_sampler(seed=7), model=model, optimizer=optimizer, cache=cache) == first


# What is refused


def test_iterating_before_calibration_says_what_to_call():
    with pytest.raises(NotCalibratedError, match="calibrate"):
        next(iter(tiny_sampler()))


def test_a_bucket_that_holds_not_even_one_example_is_named_with_what_to_do(caplog):
    with caplog.at_level(logging.INFO), pytest.raises(BucketDoesNotFitError) as caught:
        run(memory_limit="900KiB")
    message = str(caught.value)
    assert re.search(r"a batch of one example exceeds the budget of .* KiB in \d of 4 buckets: bucket \d", message)
    assert "input length 4 s, output length 48" in message
    assert "peak" in message
    assert "Lower the last duration bin" in message
    assert "raise memory_fraction or memory_limit" in message
    assert re.search(r"The other buckets fit: 1 s x 12: \d+", message)


def test_a_cpu_needs_a_memory_limit():
    with pytest.raises(InvalidArgumentError, match="memory_limit"):
        run(memory_limit=None)


def test_a_limit_below_the_model_itself_says_so():
    with pytest.raises(CalibrationError, match=r"runs out of memory|leaves nothing of the budget"):
        run(memory_limit="20KiB")


@pytest.mark.parametrize("fraction", [0.0, -1.0, 1.5, float("nan")])
def test_a_memory_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(InvalidArgumentError, match="memory_fraction must lie above 0 and at most at 1"):
        run(memory_fraction=fraction)


def test_an_unknown_recalibrate_is_refused(monkeypatch):
    with pytest.raises(InvalidArgumentError, match="recalibrate must be 'auto' or 'always', it is 'sometimes'"):
        run(recalibrate="sometimes")
    monkeypatch.setenv("OOMFIT_RECALIBRATE", "yes")
    with pytest.raises(InvalidArgumentError, match="OOMFIT_RECALIBRATE must be 'auto' or 'always', it is 'yes'"):
        run()


def test_an_option_that_does_not_exist_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"'memory_fractoin' is no option.*did you mean 'memory_fraction'"):
        run(memory_fractoin=0.5)


def test_a_sampler_of_lhotse_itself_is_refused_with_the_remedy():
    with pytest.warns(UserWarning, match="eagerly read CutSet"):
        sampler = DynamicBucketingSampler(tiny_cuts(10), max_duration=10, num_buckets=2)
    with pytest.raises(InvalidArgumentError, match="must be a CalibratedBucketingSampler, it is DynamicBucketing"):
        run(sampler)


def test_a_sampler_with_fixed_sizes_has_nothing_to_calibrate():
    with pytest.raises(InvalidArgumentError, match="nothing to calibrate; make it with bucket_batch_size='auto'"):
        run(tiny_sampler(bucket_batch_size=[4, 3, 2, 1]))


def test_a_dataloader_in_place_of_the_dataset_is_refused():
    sampler = tiny_sampler()
    with pytest.raises(InvalidArgumentError, match="pass the dataset that the DataLoader gets, not the DataLoader"):
        run(sampler, DataLoader(TinyDataset(), sampler=sampler, batch_size=None))


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (lambda m, b: None, "None and no parameter has a gradient"),
        (lambda m, b: m(b["features"]), r"a tensor of shape \(2, "),
        (lambda m, b: torch.tensor(1.0), "a scalar tensor without a gradient"),
        (lambda m, b: m.loss(b).item(), "float"),
    ],
    ids=["none", "not-a-scalar", "no-gradient", "a-number"],
)
def test_a_training_step_that_returns_no_loss_is_refused(output, what):
    with pytest.raises(InvalidArgumentError, match=f"training_step must return the loss.*it returned {what}"):
        run(training_step=output)


def test_a_source_without_cuts_is_refused():
    with pytest.raises(EmptySourceError, match="at least one cut"):
        run(tiny_sampler(CutSet.from_cuts([])))


def test_a_dataset_that_always_fails_raises_its_own_error_or_says_that_no_batch_can_be_made():
    class Failing(TinyDataset):
        def __getitem__(self, cuts):
            raise ValueError("unreadable audio")

    with pytest.raises((WorstCaseError, ValueError), match="unreadable audio"):
        run(dataset=Failing())


def test_an_optimizer_whose_step_needs_a_closure_is_refused():
    model = TinyModel()
    with pytest.raises(UnsupportedStrategyError, match="needs a closure"):
        run(model=model, optimizer=torch.optim.LBFGS(model.parameters()))


def test_resident_tensors_include_gradients_and_optimizer_state():
    from lhotse_oomfit.training import LossStep, Training

    model = TinyModel()
    optimizer, scheduler = tiny_optimizer(model)
    training = Training(
        module=model,
        step=LossStep(model, [optimizer], training_step, None, 1),
        collate=TinyDataset().__getitem__,
        dataset=TinyDataset(),
        optimizers=[optimizer],
    )
    before = sum(t.numel() for t in resident_tensors(training))
    train(model, optimizer, scheduler, [TinyDataset()[tiny_cuts(2)]])
    assert sum(t.numel() for t in resident_tensors(training)) > 3.9 * before


# Lhotse's own ASR dataset


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context")  # Lhotse's mel filters under numpy 2
@pytest.mark.parametrize("strategy", ["precomputed", "audio", "on-the-fly"])
def test_lhotses_asr_dataset_needs_no_schema_under_any_input_strategy(strategy):
    from lhotse import Fbank, FbankConfig
    from lhotse.dataset import K2SpeechRecognitionDataset
    from lhotse.dataset.input_strategies import AudioSamples, OnTheFlyFeatures, PrecomputedFeatures
    from synthetic_cuts import with_features

    cuts = list(tiny_cuts(24, longest=3.0))
    if strategy == "precomputed":
        cuts = with_features(cuts, num_mels=16)
    extractor = Fbank(FbankConfig(num_mel_bins=16, sampling_rate=8000))
    inputs = {
        "precomputed": PrecomputedFeatures,
        "audio": AudioSamples,
        "on-the-fly": lambda: OnTheFlyFeatures(extractor),
    }
    seen = []

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv1d(1 if strategy == "audio" else 16, 16, 9, stride=4)
            self.block = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def step(model, batch):
        x = batch["inputs"]
        x = x[:, None, ::20] if x.ndim == 2 else x.transpose(1, 2)
        assert len(batch["supervisions"]["text"]) == len(x)
        assert sorted(batch["supervisions"]["sequence_idx"].tolist()) == list(range(len(x)))
        seen.append(x.shape)
        return model.block(model.conv(x).transpose(1, 2)).square().mean()

    torch.manual_seed(0)
    model = Net()
    sampler = tiny_sampler(CutSet.from_cuts(cuts), duration_bins=[1.0, 2.0, 3.0])
    profile = calibrate(
        sampler,
        K2SpeechRecognitionDataset(input_strategy=inputs[strategy]()),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        training_step=step,
        memory_limit="4MiB",
        cache=False,
        progress=False,
    )
    sizes = profile.bucket_batch_size
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] >= 1
    assert max(shape[0] for shape in seen) >= sizes[0]
    batches = list(
        DataLoader(K2SpeechRecognitionDataset(input_strategy=inputs[strategy]()), sampler=sampler, batch_size=None)
    )
    assert sum(len(batch["supervisions"]["text"]) for batch in batches) == 24
