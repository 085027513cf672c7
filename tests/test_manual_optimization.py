"""Trainings that run several backward passes a step: a generator against a discriminator, each with its optimizer."""

from __future__ import annotations

import os
import random
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lhotse import CutSet
from processes import results, run_ranks
from test_lightning import Recogniser, finder, loader_for, pl, trainer_for  # skips without Lightning
from tiny_asr import (
    FEATURES,
    TinyDataset,
    TinyModel,
    fingerprint_of_state,
    largest_that,
    tiny_cut,
    tiny_cuts,
    tiny_sampler,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lhotse_oomfit import calibrate
from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.memory import CpuMemory, live_tensors
from lhotse_oomfit.training import forget_trials

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]

LIMIT = "3MiB"


class Gan(nn.Module):
    """A generator that repeats what it hears, dropout and all, and a discriminator that tells."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Conv1d(FEATURES, width, 9, padding=4),
            nn.BatchNorm1d(width),
            nn.LeakyReLU(),
            nn.Dropout(0.1),
            nn.Conv1d(width, FEATURES, 9, padding=4),
        )
        self.discriminator = nn.Sequential(
            nn.Conv1d(FEATURES, 2 * width, 9, stride=2), nn.LeakyReLU(), nn.Conv1d(2 * width, 1, 3)
        )


def adams(gan: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return (
        torch.optim.Adam(gan.generator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
        torch.optim.Adam(gan.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9)),
    )


def gan_step(gan: Any, batch: Any, optimizers: Any, *, steps: bool = False, backward: Any = None) -> list[float]:
    """One step of both, as a vocoder's training takes it; `steps` says whether optimizers step."""
    backward = backward if backward is not None else torch.Tensor.backward
    of_generator, of_discriminator = optimizers
    real = batch["features"].transpose(1, 2)
    fake = gan.generator(real)
    of_discriminator.zero_grad()
    loss_d = (gan.discriminator(real) - 1).square().mean() + gan.discriminator(fake.detach()).square().mean()
    backward(loss_d)
    if steps:
        of_discriminator.step()
    of_generator.zero_grad()
    loss_g = (gan.discriminator(fake) - 1).square().mean() + (fake - real).abs().mean()
    backward(loss_g)
    if steps:
        of_generator.step()
    return [loss_d.item(), loss_g.item()]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def state_of(gan: Any, optimizers: Any) -> Any:
    generators = torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), repr(np.random.get_state())
    gradients = [None if p.grad is None else p.grad.numpy().tobytes() for p in gan.parameters()]
    return fingerprint_of_state(gan, *optimizers), generators, gradients


def find(gan: Any, optimizers: Any, training_step: Any, sampler: Any = None, **options: Any) -> Any:
    return calibrate(
        sampler if sampler is not None else tiny_sampler(),
        TinyDataset(),
        model=gan,
        optimizer=optimizers,
        training_step=training_step,
        **{"memory_limit": LIMIT, "cache": False, "progress": False, **options},
    )


def largest_sizes(gan: Any, optimizers: Any, budget_bytes: int, edges: list[float]) -> list[int]:
    """By brute force: the most cuts of each length whose step trains, with everything there that training has."""
    dataset = TinyDataset()
    gan_step(gan, dataset[tiny_cuts(3)], optimizers, steps=True)
    memory = CpuMemory(limit_bytes=budget_bytes, resident=lambda: live_tensors(gan, optimizers))

    def fits(edge: float, size: int) -> bool:
        cut = tiny_cut(0, edge, int(12 * edge))
        batch = dataset[CutSet.from_cuts(cut.with_id(f"{i}") for i in range(size))]
        try:
            with memory.measure():
                gan_step(gan, batch, optimizers)
        except torch.OutOfMemoryError:
            for parameter in gan.parameters():
                parameter.grad = torch.zeros_like(parameter)
            return False
        return True

    return [largest_that(partial(fits, edge)) for edge in edges]


# A plain loop


def test_both_passes_are_measured_and_sizes_match_a_brute_force_search():
    torch.manual_seed(0)
    gan = Gan()
    optimizers = adams(gan)
    profile = find(gan, optimizers, lambda gan, batch: gan_step(gan, batch, optimizers) and None)
    truth = largest_sizes(gan, optimizers, profile.budget_bytes, [1.0, 2.0, 3.0, 4.0])
    for size, largest in zip(profile.bucket_batch_size, truth, strict=True):
        assert min(int(0.97 * largest), largest - 1) <= size <= largest
    assert max(truth) > 8


def test_parameters_both_optimizers_and_generators_are_as_before_and_losses_equal_those_with_given_sizes():
    def start() -> Any:
        seed(3)
        gan = Gan()
        optimizers = adams(gan)
        gan_step(gan, TinyDataset()[tiny_cuts(3)], optimizers, steps=True)
        return gan, optimizers

    def losses(gan: Any, optimizers: Any, sampler: Any) -> list[float]:
        loader = iter(DataLoader(TinyDataset(), sampler=sampler, batch_size=None))
        return [loss for _ in range(5) for loss in gan_step(gan, next(loader), optimizers, steps=True)]

    gan, optimizers = start()
    sampler = tiny_sampler()
    before = state_of(gan, optimizers)
    profile = find(gan, optimizers, lambda gan, batch: gan_step(gan, batch, optimizers) and None, sampler)
    assert state_of(gan, optimizers) == before
    calibrated = losses(gan, optimizers, sampler)
    given = losses(*start(), tiny_sampler(bucket_batch_size=profile.bucket_batch_size))
    assert calibrated == given


def test_optimizers_without_state_are_without_it_again():
    gan = Gan()
    optimizers = adams(gan)
    before = state_of(gan, optimizers)
    find(gan, optimizers, lambda gan, batch: gan_step(gan, batch, optimizers) and None)
    assert state_of(gan, optimizers) == before
    assert not any(optimizer.state for optimizer in optimizers)


def test_a_profile_is_found_again_with_optimizers_in_the_step_s_closure(tmp_path):
    def one() -> Any:
        torch.manual_seed(0)
        gan = Gan()
        optimizers = adams(gan)
        return find(gan, optimizers, lambda gan, batch: gan_step(gan, batch, optimizers) and None, cache=tmp_path)

    first, second = one(), one()
    assert first == second  # the time of its creation too


def test_a_step_of_an_optimizer_inside_is_refused_before_anything_changes():
    gan = Gan()
    optimizers = adams(gan)
    before = state_of(gan, optimizers)
    with pytest.raises(InvalidArgumentError, match=r"training_step must leave optimizer.step\(\) out.*Adam.step\(\)"):
        find(gan, optimizers, lambda gan, batch: gan_step(gan, batch, optimizers, steps=True) and None)
    assert state_of(gan, optimizers) == before
    gan_step(gan, TinyDataset()[tiny_cuts(2)], optimizers, steps=True)  # steps are steps again


@pytest.mark.parametrize("accumulate", [1, 4])
def test_none_without_a_backward_pass_is_refused(accumulate):
    with pytest.raises(InvalidArgumentError, match="or None after running backward itself; it returned None and no"):
        find(Gan(), adams(Gan()), lambda gan, batch: None, accumulate_grad_batches=accumulate)


def alternating_step(
    gan: Any,
    batch: Any,
    optimizers: Any,
    *,
    backward: Any,
    steps: bool = False,
    toggle: Any = None,
    untoggle: Any = None,
) -> None:
    """One step of both as Lightning's documentation has it: each ends with ``zero_grad()``."""
    real = batch["features"].transpose(1, 2)
    for index, optimizer in enumerate(optimizers):
        if toggle is not None:
            toggle(optimizer)
        fake = gan.generator(real)
        if index == 0:
            loss = (gan.discriminator(fake) - 1).square().mean()
        else:
            loss = (gan.discriminator(real) - 1).square().mean() + gan.discriminator(fake.detach()).square().mean()
        backward(loss)
        if steps:
            optimizer.step()
        optimizer.zero_grad()
        if untoggle is not None:
            untoggle(optimizer)


def test_a_step_that_ends_without_gradients_is_measured_since_it_had_some():
    gan = Gan()
    optimizers = adams(gan)
    before = state_of(gan, optimizers)
    profile = find(
        gan, optimizers, lambda gan, batch: alternating_step(gan, batch, optimizers, backward=Tensor.backward)
    )
    assert min(profile.bucket_batch_size) > 2
    assert state_of(gan, optimizers) == before
    assert all(parameter._post_accumulate_grad_hooks is None for parameter in gan.parameters())


@pytest.mark.parametrize("warm", [False, True])
def test_a_step_that_clamps_parameters_itself_is_measured_and_they_are_as_before(warm):
    def step(gan: Any, batch: Any) -> None:
        with torch.no_grad():
            for parameter in gan.discriminator.parameters():
                parameter.clamp_(-0.01, 0.01)
        gan_step(gan, batch, optimizers)

    gan = Gan()
    optimizers = adams(gan)
    if warm:
        gan_step(gan, TinyDataset()[tiny_cuts(3)], optimizers, steps=True)
    before = state_of(gan, optimizers)
    assert max(parameter.abs().max() for parameter in gan.discriminator.parameters()) > 0.02
    profile = find(gan, optimizers, step)
    assert min(profile.bucket_batch_size) > 2
    assert state_of(gan, optimizers) == before


def test_an_embedding_that_renormalises_itself_in_the_forward_pass_is_as_before_after_a_resume():
    class Embedding(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(40, 8, max_norm=0.1)

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) + self.embedding(batch["tokens"].clamp(0, 39)).square().mean()

    model = Embedding()
    optimizer = torch.optim.AdamW(model.parameters())
    model.loss(TinyDataset()[tiny_cuts(3)]).backward()
    optimizer.step()
    with torch.no_grad():
        model.embedding.weight.add_(0.1)
    before = state_of(model, [optimizer])
    find(model, optimizer, lambda model, batch: model.loss(batch), memory_limit="8MiB")
    assert state_of(model, [optimizer]) == before


def test_hooks_that_tell_of_gradients_are_there_in_the_first_trial_alone_and_the_user_s_stay():
    gan = Gan()
    optimizers = adams(gan)
    called = []
    parameter = next(gan.parameters())
    handle = parameter.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter))
    num_hooks = []

    def step(gan: Any, batch: Any) -> None:
        num_hooks.append(len(parameter._post_accumulate_grad_hooks))
        alternating_step(gan, batch, optimizers, backward=Tensor.backward)

    find(gan, optimizers, step)
    assert num_hooks[:3] == [2, 1, 1]
    assert set(num_hooks[3:]) == {1}
    assert len(parameter._post_accumulate_grad_hooks) == 1
    assert called
    handle.remove()


def test_parameters_frozen_for_one_pass_train_again_after_a_trial_that_ran_out_of_memory():
    gan = Gan()
    optimizers = adams(gan)
    trained = []

    def step(gan: Any, batch: Any) -> None:
        trained.append(all(parameter.requires_grad for parameter in gan.parameters()))
        for parameter in gan.discriminator.parameters():
            parameter.requires_grad_(False)
        gan.generator(batch["features"].transpose(1, 2)).square().mean().backward()
        if len(trained) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        for parameter in gan.discriminator.parameters():
            parameter.requires_grad_(True)

    find(gan, optimizers, step)
    assert len(trained) > 3
    assert all(trained)


def test_an_optimizer_that_is_none_is_refused():
    with pytest.raises(InvalidArgumentError, match="optimizer must be an optimizer, or several in a list"):
        find(Gan(), [], lambda gan, batch: None)
    with pytest.raises(InvalidArgumentError, match="optimizer must be an optimizer, or several in a list"):
        find(Gan(), "adam", lambda gan, batch: None)


# Lightning


class Vocoder(pl.LightningModule):
    """The same in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gan = Gan()
        self.losses: list[list[float]] = []

    def configure_optimizers(self):
        return list(adams(self.gan))

    def training_step(self, batch, batch_idx):
        self.losses.append(gan_step(self.gan, batch, self.optimizers(), steps=True, backward=self.manual_backward))
        self.log("loss", self.losses[-1][0], batch_size=1)


def vocoder_step(module: Any, batch: Any) -> None:
    """For trials: without the optimizers' steps."""
    gan_step(module.gan, batch, module.optimizers(), backward=module.manual_backward)


def fit(module: Any, sampler: Any, *callbacks: Any, **options: Any) -> Any:
    pl.seed_everything(1, verbose=False)
    trainer = trainer_for(*callbacks, **{"max_steps": 12, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader_for(sampler))
    return trainer


def vocoder() -> Any:
    seed(5)
    return Vocoder()


def test_manual_optimization_is_calibrated_by_a_training_step_without_steps():
    callback, module = finder(training_step=vocoder_step), vocoder()
    sampler = tiny_sampler()
    fit(module, sampler, callback)
    profile = callback.profile
    assert sampler.bucket_batch_size == profile.bucket_batch_size
    assert len(module.losses) == 6  # two optimizers' steps each; trials left no entries
    fresh = vocoder().gan
    truth = largest_sizes(fresh, adams(fresh), profile.budget_bytes, [1.0, 2.0, 3.0, 4.0])
    for size, largest in zip(profile.bucket_batch_size, truth, strict=True):
        assert min(int(0.97 * largest), largest - 1) <= size <= largest


def test_manual_optimization_whose_step_ends_with_zero_grad_is_calibrated_and_trains_as_with_given_sizes():
    class Alternating(Vocoder):
        def training_step(self, batch, batch_idx):
            self.alternate(batch, steps=True)
            self.losses.append([p.sum().item() for p in self.gan.parameters()])

        def alternate(self, batch: Any, *, steps: bool = False) -> None:
            alternating_step(
                self.gan,
                batch,
                self.optimizers(),
                backward=self.manual_backward,
                steps=steps,
                toggle=self.toggle_optimizer,
                untoggle=self.untoggle_optimizer,
            )

    def one(sampler: Any, *callbacks: Any) -> Any:
        seed(5)
        module = Alternating()
        trainer = fit(module, sampler, *callbacks)
        assert all(parameter._post_accumulate_grad_hooks is None for parameter in module.parameters())
        return module.losses, state_of(module, trainer.optimizers)

    callback = finder(training_step=lambda module, batch: module.alternate(batch))
    calibrated = one(tiny_sampler(), callback)
    assert callback.profile.num_trials > 0
    assert calibrated == one(tiny_sampler(bucket_batch_size=callback.profile.bucket_batch_size))


def test_none_without_a_backward_pass_is_refused_under_lightning():
    with pytest.raises(InvalidArgumentError, match="or None after running backward itself; it returned None and no"):
        fit(vocoder(), tiny_sampler(), finder(training_step=lambda module, batch: None))


def test_a_calibrated_manual_optimization_has_the_losses_and_states_of_one_with_given_sizes(tmp_path):
    def one(sampler: Any, *callbacks: Any) -> Any:
        module = vocoder()
        trainer = fit(module, sampler, *callbacks)
        return module.losses, state_of(module, trainer.optimizers), trainer.global_step

    callback = finder(training_step=vocoder_step)
    calibrated = one(tiny_sampler(), callback)
    given = one(tiny_sampler(bucket_batch_size=callback.profile.bucket_batch_size))
    assert calibrated == given


def test_a_training_step_given_for_trials_is_part_of_what_a_profile_was_measured_for():
    plain, own = finder(), finder(training_step=lambda module, batch: Recogniser.training_step(module, batch, 0))
    fit(Recogniser(), tiny_sampler(), plain, max_steps=1)
    fit(Recogniser(), tiny_sampler(), own, max_steps=1)
    differing = plain.profile.fingerprint.fields.keys() ^ own.profile.fingerprint.fields.keys()
    assert differing == {"code.training_step"}
    assert own.profile.bucket_batch_size == plain.profile.bucket_batch_size


def test_a_given_training_step_stands_in_for_one_that_takes_an_iterator():
    class Iterating(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = TinyModel()

        def training_step(self, dataloader_iter):
            batch, *_ = next(dataloader_iter)
            return self.model.loss(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = finder(training_step=lambda module, batch: module.model.loss(batch))
    fit(Iterating(), tiny_sampler(), callback, max_steps=2)
    assert callback.profile.num_trials > 0


def test_a_step_of_lightning_s_optimizers_inside_is_refused():
    def stepping(module: Any, batch: Any) -> None:
        gan_step(module.gan, batch, module.optimizers(), steps=True, backward=module.manual_backward)

    module = vocoder()
    before = fingerprint_of_state(module)
    with pytest.raises(InvalidArgumentError, match=r"training_step must leave optimizer.step\(\) out"):
        fit(module, tiny_sampler(), finder(training_step=stepping))
    assert fingerprint_of_state(module) == before


def test_what_is_no_function_is_refused_when_the_callback_is_made():
    with pytest.raises(InvalidArgumentError, match="training_step must be a function, it is 3"):
        finder(training_step=3)


def _ranks(rank: int, cache: Any) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    callback, module = finder(cache, training_step=vocoder_step), vocoder()
    trainer = fit(
        module,
        tiny_sampler(tiny_cuts(90)),
        callback,
        devices=2,
        strategy="ddp_find_unused_parameters_true",  # the discriminator's pass leaves the generator out
        use_distributed_sampler=False,
        max_steps=6,
    )
    trained = {name: value for name, value in fingerprint_of_state(module).items() if "running" not in name}
    return callback.profile.encode(), trainer.global_step, trained


def test_under_ddp_one_rank_tries_manual_backward_passes_alone_and_training_goes_on_together(tmp_path):
    first, second = results(run_ranks(_ranks, tmp_path, timeout_s=200))
    assert first == second


def _drops_a_layer(rank: int, forgets: bool) -> Any:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    module.forward = lambda x: module[0](x)  # type: ignore[method-assign]
    model = nn.parallel.DistributedDataParallel(module, find_unused_parameters=True)
    if rank == 0:  # as a trial that one rank runs alone on the module inside
        module[1](module[0](torch.ones(1, 2))).sum().backward()
        module.zero_grad()
        if forgets:
            forget_trials(model)
    model(torch.full((1, 2), float(rank))).sum().backward()
    return module[0].weight.grad.tolist(), module[1].weight.grad


def test_a_layer_that_a_trial_used_and_the_next_step_drops_is_no_error_under_ddp():
    first, second = results(run_ranks(_drops_a_layer, True, timeout_s=100))
    assert first == second == ([[0.5, 0.5], [0.5, 0.5]], None)
