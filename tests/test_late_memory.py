"""Memory that appears after a calibration counts where a trial can wake it, and is told, with cause only, elsewhere."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from test_lightning import Recogniser, finder, loader_for, pl, trainer_for  # skips without Lightning
from tiny_asr import TinyDataset, TinyModel, fingerprint_of_state, tiny_cuts, tiny_sampler, training_step
from torch.utils.data import DataLoader

from lhotse_oomfit import calibrate
from lhotse_oomfit.fit import loop_training
from lhotse_oomfit.late_memory import LateMemory, watch_steps
from lhotse_oomfit.training import must_wake, resident_tensors

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]

MIB = 1024**2
BUDGET = 64 * MIB


class Averaging(torch.optim.Optimizer):
    """An optimizer around another one, which copies the parameters at its first step, as NeMo's EMAOptimizer does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.averages: tuple[torch.Tensor, ...] = ()
        self.is_to_copy = True
        self.num_steps = 0

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.is_to_copy:
            self.averages = tuple(p.detach().clone() for p in parameters)
            self.is_to_copy = False
        loss = self.optimizer.step(closure)
        for average, parameter in zip(self.averages, parameters, strict=True):
            average.lerp_(parameter.detach(), 0.1)
        self.num_steps += 1
        return loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def state_dict(self) -> Any:
        return {"inner": self.optimizer.state_dict(), "averages": self.averages, "num_steps": self.num_steps}


def training_of(model: Any, *optimizers: Any) -> Any:
    return loop_training(
        tiny_sampler(), TinyDataset(), model=model, optimizer=list(optimizers), training_step=training_step
    )


@functools.cache
def batch_of(num_cuts: int) -> Any:
    return TinyDataset()[tiny_cuts(num_cuts)]


def run_steps(model: Any, optimizer: Any, num: int = 6, size: int = 40, after: Any = None) -> None:
    """A plain loop that holds on to its last batch and outputs, as loops do."""
    for index in range(num):
        batch = {name: values.clone() for name, values in batch_of(size).items()}
        optimizer.zero_grad()
        log_probs = model(batch["features"])
        loss = log_probs.square().mean()
        loss.backward()
        optimizer.step()
        if after is not None:
            after(index)
    assert log_probs.numel() > 0


def told(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# What a trial wakes


def test_a_copy_that_an_optimizer_around_another_makes_counts_in_trials_and_is_gone_afterwards():
    torch.manual_seed(0)
    model, other = TinyModel(width=96), TinyModel(width=96)
    plain, wrapped = torch.optim.AdamW(model.parameters()), Averaging(torch.optim.AdamW(other.parameters()))
    options = {"training_step": training_step, "memory_limit": "8MiB", "cache": False, "progress": False}
    before = fingerprint_of_state(other, wrapped), torch.get_rng_state().numpy().tobytes()
    wraps = calibrate(tiny_sampler(), TinyDataset(), model=other, optimizer=wrapped, **options)
    assert (fingerprint_of_state(other, wrapped), torch.get_rng_state().numpy().tobytes()) == before
    assert wrapped.averages == ()
    assert wrapped.is_to_copy
    assert wrapped.num_steps == 0
    assert not wrapped.state
    copy_bytes = sum(p.nbytes for p in model.parameters())
    reserved = calibrate(tiny_sampler(), TinyDataset(), model=model, optimizer=plain, reserve=copy_bytes, **options)
    without = calibrate(tiny_sampler(), TinyDataset(), model=model, optimizer=plain, **options)
    # The copy takes as much from batches as a reserve of its size would.
    for size, other_size, larger in zip(
        wraps.bucket_batch_size, reserved.bucket_batch_size, without.bucket_batch_size, strict=True
    ):
        assert size == pytest.approx(other_size, rel=0.03, abs=1)
        assert size <= larger
    assert sum(wraps.bucket_batch_size) < sum(without.bucket_batch_size)


def test_under_lightning_the_optimizer_around_another_is_stepped_and_restored():
    class Average(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            trainer.optimizers = [Averaging(optimizer) for optimizer in trainer.optimizers]

    class Wide(Recogniser):
        def __init__(self):
            super().__init__()
            self.model = TinyModel(width=96)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

        def on_train_start(self):
            wrapper = self.trainer.strategy.optimizers[0]
            found.append((type(wrapper).__name__, len(wrapper.averages), wrapper.is_to_copy, wrapper.num_steps))

    def sizes(*callbacks: Any, **options: Any) -> list[int]:
        pl.seed_everything(1, verbose=False)
        callback = finder(memory_limit="8MiB", **options)
        trainer_for(callback, *callbacks, max_steps=2).fit(Wide(), loader_for())
        return callback.profile.bucket_batch_size

    found: list[Any] = []
    copy_bytes = sum(p.nbytes for p in TinyModel(width=96).parameters())
    wrapped = sizes(Average())
    assert found == [("Averaging", 0, True, 0)]
    Wide.on_train_start = lambda self: None
    for size, reserved in zip(wrapped, sizes(reserve=copy_bytes), strict=True):
        assert size == pytest.approx(reserved, rel=0.03, abs=1)
    assert sum(wrapped) < sum(sizes())


def test_optimizers_around_others_are_woken_although_a_checkpoint_restored_the_inner_state():
    model = TinyModel()
    inner = torch.optim.AdamW(model.parameters())
    assert must_wake([inner])
    run_steps(model, inner, num=1, size=2)
    assert not must_wake([inner])
    assert must_wake([Averaging(inner)])


def test_resident_tensors_list_what_optimizers_extras_and_holders_keep_each_once():
    class Holder:
        def __init__(self) -> None:
            self.module = torch.nn.Linear(2, 2)
            self.by_name = {"a": [torch.zeros(3)], "b": (torch.zeros(4),)}

    model = TinyModel()
    wrapper = Averaging(torch.optim.AdamW(model.parameters()))
    run_steps(model, wrapper, num=1, size=2)
    training = training_of(model, wrapper)
    listed = list(resident_tensors(training))
    assert len({id(t) for t in listed}) == len(listed)
    assert all(any(t is average for t in listed) for average in wrapper.averages)
    object.__setattr__(training, "holders", [Holder()])
    assert sum(t.numel() for t in resident_tensors(training)) == sum(t.numel() for t in listed) + 4 + 2 + 3 + 4


# What nobody can know: a plain loop


@pytest.fixture
def loop(caplog: Any) -> Any:
    """A model and its optimizer, as they are after a calibration, and what makes them be watched."""
    caplog.set_level(logging.WARNING)
    batch_of(40), batch_of(4)  # cached from here on
    model = TinyModel(width=96)
    optimizer = torch.optim.AdamW(model.parameters())

    def watch(optimizer: Any = optimizer, **options: Any) -> LateMemory:
        training = training_of(model, optimizer)
        late = LateMemory(training, **{"budget_bytes": BUDGET, **options})
        watch_steps(late, training.optimizers)
        return late

    return model, optimizer, watch


def test_a_normal_training_is_not_warned_of(loop, caplog):
    model, optimizer, watch = loop
    watch(budget_bytes=MIB)
    run_steps(model, optimizer, num=6, size=120)  # batches, outputs, gradients and optimizer state of megabytes
    assert told(caplog) == []


def test_a_copy_made_when_training_starts_is_told_once_with_what_to_set(loop, caplog):
    model, optimizer, watch = loop
    watch()
    average = [torch.zeros(9, MIB // 4)]
    run_steps(model, optimizer, num=34, size=4)
    assert told(caplog) == [
        "rank 0: 9.00 MiB of memory appeared after calibration and stays (tensors: 1, the largest of shape (9, 262144)"
        '), which the batch sizes do not allow for; set reserve="9MiB", or make it before calibrating'
    ]
    assert len(average) == 1


def test_a_copy_made_by_the_first_or_second_update_is_told(loop, caplog):
    model, optimizer, watch = loop
    kept: list[torch.Tensor] = []
    watch()
    run_steps(
        model,
        optimizer,
        num=34,
        size=4,
        after=lambda index: kept.append(torch.zeros(5, MIB // 4)) if index < 2 else None,
    )
    assert len(told(caplog)) == 1
    assert "5.00 MiB of memory appeared" in told(caplog)[0]  # the other came after the second step was over


def test_what_was_there_before_or_goes_away_or_is_reserved_for_is_not_told(loop, caplog):
    model, optimizer, watch = loop
    before = torch.zeros(16, MIB // 4)
    watch(reserve="10MiB")
    declared = torch.zeros(9, MIB // 4)
    passing = [torch.zeros(20, MIB // 4)]
    run_steps(model, optimizer, num=34, size=4, after=lambda index: passing.clear() if index == 2 else None)
    assert told(caplog) == []
    assert before.numel() + declared.numel() > 0


def test_a_little_memory_is_not_told(loop, caplog):
    model, optimizer, watch = loop
    watch(budget_bytes=1000 * MIB)
    kept = torch.zeros(9, MIB // 4)  # under one percent
    run_steps(model, optimizer)
    assert told(caplog) == []
    assert kept.numel()


def test_garbage_in_a_cycle_is_not_told(loop, caplog):
    model, optimizer, watch = loop
    watch()

    def after(index: int) -> None:
        cycle: list[Any] = [torch.zeros(6, MIB // 4)]
        cycle.append(cycle)

    run_steps(model, optimizer, after=after)
    assert told(caplog) == []


@pytest.mark.parametrize("moves", [False, True], ids=["views", "copies"])
def test_a_batch_that_many_steps_are_taken_on_is_not_told(loop, caplog, moves):
    model, optimizer, watch = loop
    late = watch(budget_bytes=MIB)
    for _ in range(3):
        batch = batch_of(40)["features"].repeat(6, 1, 1)
        assert batch.nbytes > 5 * MIB
        for start in range(0, len(batch), 12):  # twenty steps
            chunk = batch[start : start + 12]
            model(chunk.clone() if moves else chunk).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert told(caplog) == []
    assert late.is_done


def test_what_stays_beside_a_batch_that_many_steps_are_taken_on_is_told_by_itself(loop, caplog):
    model, optimizer, watch = loop
    watch()
    average = torch.zeros(9, MIB // 4)
    for _ in range(3):
        batch = batch_of(40)["features"].repeat(6, 1, 1)
        for start in range(0, len(batch), 12):
            model(batch[start : start + 12]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (message,) = told(caplog)
    assert "9.00 MiB of memory appeared after calibration and stays (tensors: 1," in message
    assert average.numel()


def test_a_step_of_a_generator_and_several_of_its_critic_on_one_batch_are_not_told(caplog):
    generator, critic = torch.nn.Conv1d(80, 80, 3, padding=1), torch.nn.Conv1d(80, 1, 3)
    optimizers = [torch.optim.RMSprop(critic.parameters()), torch.optim.RMSprop(generator.parameters())]
    training = training_of(torch.nn.ModuleList([generator, critic]), *optimizers)
    late = LateMemory(training, budget_bytes=MIB)
    watch_steps(late, training.optimizers)
    for _ in range(8):
        real = torch.randn(16, 80, 1024)
        with torch.no_grad():
            fake = generator(real)
        for _ in range(5):
            (critic(fake).mean() - critic(real).mean()).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
        critic(generator(real)).mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert told(caplog) == []
    assert late.is_done


class Encoding(TinyModel):
    """Keeps positional encodings in a plain attribute, and makes them when they are needed."""

    def loss(self, batch: Any) -> torch.Tensor:
        length = batch["features"].shape[1]
        if not hasattr(self, "encodings") or len(self.encodings[0]) < length:
            self.encodings = [torch.zeros(length, 2**17)]
        return super().loss(batch) + 0.0 * self.encodings[0][0, 0]


def test_what_a_forward_pass_keeps_in_a_module_is_not_told_since_trials_had_it(caplog):
    torch.manual_seed(0)
    model = Encoding()
    optimizer = torch.optim.AdamW(model.parameters())
    calibrate(
        tiny_sampler(),
        TinyDataset(),
        model=model,
        optimizer=optimizer,
        training_step=lambda model, batch: model.loss(batch),
        memory_limit="1GiB",
        max_batch_size=2,
        cache=False,
        progress=False,
    )
    assert not hasattr(model, "encodings")
    for _ in range(34):
        model.loss(batch_of(2)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.encodings[0].nbytes > 20 * MIB
    assert [message for message in told(caplog) if message.startswith("rank")] == []


def test_a_loop_of_accumulated_gradients_that_are_kept_is_not_told(loop, caplog):
    model, optimizer, watch = loop
    watch(budget_bytes=MIB)
    for _ in range(6):
        model.loss(TinyDataset()[tiny_cuts(8)]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert told(caplog) == []


def test_an_optimizer_s_own_late_copy_is_not_told_since_trials_woke_it(loop, caplog):
    model, optimizer, watch = loop
    wrapper = Averaging(optimizer)
    watch(wrapper, budget_bytes=MIB)
    run_steps(model, wrapper)
    assert wrapper.averages
    assert told(caplog) == []


def test_the_hook_looks_and_holds_nothing_after_the_fourth_step():
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    late = LateMemory(training_of(model, optimizer), budget_bytes=BUDGET)
    watch_steps(late, [optimizer])
    held = weakref.ref(late)
    del late
    run_steps(model, optimizer, num=3, size=2)
    assert held() is not None
    run_steps(model, optimizer, num=1, size=2)
    assert held() is None
    run_steps(model, optimizer, num=3, size=2)


def test_other_hooks_of_the_same_optimizer_are_called_at_every_step(loop):
    model, optimizer, watch = loop
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("before"))
    watch()
    optimizer.register_step_post_hook(lambda *_: called.append("between"))
    watch()  # a second calibration of the same optimizer
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    run_steps(model, optimizer, num=6, size=2)
    assert called == ["before", "between", "after"] * 6


def test_the_hook_is_in_no_pickle_copy_or_state_dict(loop):
    _, optimizer, watch = loop
    before = fingerprint_of_state(optimizer)
    watch()
    assert fingerprint_of_state(optimizer) == before
    for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert not copied._optimizer_step_post_hooks


def test_watching_changes_no_parameter_and_no_generator():
    def one(watched: bool) -> Any:
        torch.manual_seed(0)
        model = TinyModel()
        optimizer = torch.optim.AdamW(model.parameters())
        if watched:
            training = training_of(model, optimizer)
            watch_steps(LateMemory(training, budget_bytes=BUDGET), training.optimizers)
        run_steps(model, optimizer, size=3)
        return fingerprint_of_state(model, optimizer), torch.get_rng_state().numpy().tobytes()

    assert one(True) == one(False)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_step_is_the_same_graph_with_the_hook_and_is_not_watched(loop, caplog):
    model, optimizer, watch = loop

    def compiled_graphs() -> int:
        torch._dynamo.reset()
        graphs: list[Any] = []
        step = torch.compile(optimizer.step, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
        for _ in range(4):
            model.loss(batch).backward()
            step()
            optimizer.zero_grad()
        return sum(len(graph.graph.nodes) for graph in graphs)

    batch = TinyDataset()[tiny_cuts(2)]
    compiled_graphs()  # makes the optimizer's state
    without = compiled_graphs()
    watch()
    kept = torch.zeros(9, MIB // 4)
    assert compiled_graphs() == without
    assert not [message for message in told(caplog) if message.startswith("rank")]
    assert kept.numel()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_and_those_of_other_devices_are_passed_over(loop, caplog):
    model, optimizer, watch = loop
    others = [torch.eye(3).to_sparse(), torch.empty(10**9, device="meta")]
    watch()
    others += [torch.eye(3).to_sparse_csr(), torch.empty(10**9, device="meta")]
    run_steps(model, optimizer, size=2)
    assert told(caplog) == []


# What nobody can know: Lightning


def fit(module: Any, *callbacks: Any, **options: Any) -> Any:
    pl.seed_everything(1, verbose=False)
    given = {name: options.pop(name) for name in ("reserve", "memory_limit") if name in options}
    given["max_batch_size"] = 6
    callback = finder(**given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer_for(callback, *callbacks, **{"max_steps": 5, **options}).fit(module, loader_for())
    return callback


class CopiesAtStart(pl.Callback):
    """Allocates nine MiB when training starts."""

    def on_train_start(self, trainer, pl_module):
        self.average = torch.zeros(9, MIB // 4)


def test_what_a_callback_allocates_when_training_starts_is_told_once(caplog):
    fit(Recogniser(), CopiesAtStart())
    (message,) = told(caplog)
    assert message.startswith("rank 0: 9.00 MiB of memory appeared after calibration and stays")
    assert 'set reserve="10MiB"' in message  # rounded up: there are a few small ones


def test_a_module_copied_into_the_model_when_training_starts_is_told(caplog):
    class Teaching(Recogniser):
        def on_train_start(self):
            self.teacher = torch.nn.Linear(1024, 2048)

    fit(Teaching())
    assert "8.01 MiB of memory appeared after calibration" in "".join(told(caplog))


def test_a_list_of_copies_that_the_module_s_hook_made_is_told_and_what_its_forward_pass_keeps_is_not(caplog):
    class Copying(Recogniser):
        def on_train_start(self):
            self.copies = [torch.zeros(9, MIB // 4)]

        def training_step(self, batch, batch_idx):
            self.encodings = torch.zeros(7, MIB // 4) if not hasattr(self, "encodings") else self.encodings
            return super().training_step(batch, batch_idx)

    fit(Copying(), memory_limit="64MiB")
    (message,) = told(caplog)
    assert message.startswith("rank 0: 9.00 MiB of memory appeared after calibration and stays")  # not 16


def test_a_reserve_or_nothing_late_leaves_lightning_silent(caplog):
    fit(Recogniser(), CopiesAtStart(), reserve="9MiB", memory_limit="14MiB")
    fit(Recogniser(), accumulate_grad_batches=2)
    assert told(caplog) == []


def test_nothing_is_left_of_the_watching_when_a_training_is_over():
    assert fit(Recogniser())._late_memory is None


# Frozen parameters


class Thaw(pl.Callback):
    """Unfreezes in the second epoch what was frozen from the start."""

    def setup(self, trainer, pl_module, stage):
        pl_module.model.block.requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.model.block.requires_grad_(True)


def test_parameters_trained_later_than_measured_are_told_once_with_what_they_take_at_least(caplog):
    module = Recogniser()
    fit(module, Thaw(), max_steps=-1, max_epochs=3, limit_train_batches=2)
    (message,) = told(caplog)
    block = list(module.model.block.parameters())
    assert f"rank 0: {len(block)} parameters that were frozen when batch sizes were measured are trained now" in message
    least = 3 * sum(p.nbytes for p in block)  # a gradient and Adam's two moments
    assert f"at least {least / 1024:.1f} KiB" in message
    assert 'set reserve="1MiB" or above, or calibrate with them unfrozen' in message


def test_a_reserve_for_what_thaws_leaves_it_unsaid(caplog):
    fit(Recogniser(), Thaw(), max_steps=-1, max_epochs=2, limit_train_batches=2, reserve="1MiB", memory_limit="8MiB")
    assert told(caplog) == []


def test_a_finetuning_callback_is_warned_of_before_and_when_it_happens(caplog):
    class Unfreeze(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.model.block)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.model.block, optimizer)

    class Plain(Recogniser):
        def configure_optimizers(self):
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])

    fit(Plain(), Unfreeze(), max_steps=-1, max_epochs=2, limit_train_batches=2)
    early, late = told(caplog)
    assert "a finetuning callback may unfreeze them later" in early
    assert "are trained now" in late
    caplog.clear()
    fit(Plain(), Unfreeze(), max_steps=-1, max_epochs=2, limit_train_batches=2, reserve="1MiB", memory_limit="8MiB")
    assert told(caplog) == []


def test_a_calibrated_loop_over_a_real_loader_is_silent(caplog):
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    sampler = tiny_sampler()
    calibrate(
        sampler,
        TinyDataset(),
        model=model,
        optimizer=optimizer,
        training_step=training_step,
        memory_limit="3MiB",
        cache=False,
        progress=False,
    )
    for batch in DataLoader(TinyDataset(), sampler=sampler, batch_size=None):
        model.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert told(caplog) == []
