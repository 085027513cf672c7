from __future__ import annotations

import copy
import random
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import GrowingPositions, SpeechModel, Step, batch_of, seed_everything
from tiny_asr import TinyDataset, TinyModel, tiny_cuts, tiny_optimizer, tiny_sampler, train, training_step
from torch import nn

from lhotse_oomfit import calibrate
from lhotse_oomfit.errors import CalibrationError, InvalidArgumentError
from lhotse_oomfit.snapshot import Snapshot, leave_no_trace


class EmaOptimizer:
    """A wrapper that copies the parameters into a plain attribute at its first step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.ema: tuple[torch.Tensor, ...] = ()
        self.num_steps = 0
        self.rate = {"decay": 0.9}

    def step(self) -> None:
        self.optimizer.step()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not self.ema:
            self.ema = tuple(p.detach().clone() for p in parameters)
        for ema, p in zip(self.ema, parameters, strict=True):
            ema.lerp_(p.detach(), 1 - self.rate["decay"])
        self.num_steps += 1
        self.rate["decay"] *= 0.99

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
    "adamw_amsgrad_lr_tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(3e-3), amsgrad=True, foreach=False),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "ema": lambda p: EmaOptimizer(torch.optim.AdamW(p, lr=3e-3)),
}


class Training:
    def __init__(self, optimizer: str = "adamw") -> None:
        seed_everything(0)
        self.model = SpeechModel()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            inner,
            [
                torch.optim.lr_scheduler.LinearLR(inner, 0.1, total_iters=3),
                torch.optim.lr_scheduler.CosineAnnealingLR(inner, 10),
            ],
            milestones=[3],
        )
        self.step = Step(self.model, self.optimizer, self.scheduler)

    def train(self, num_steps: int, start: int = 0) -> list[float]:
        losses = []
        for i in range(start, start + num_steps):
            self.step.zero_grad()
            loss = self.model.loss(batch_of(4, 10 + 3 * i, seed=i))
            loss.backward()
            self.step.optimizer_step()
            losses.append(loss.item())
        return losses

    def trials(self, *, with_optimizer: bool = True) -> None:
        """What a calibration does: one step with the optimizer, then others, one that fails half-way."""
        for size, length in ((2, 50), (6, 30), (1, 90)):
            self.step.forward_backward(batch_of(size, length))
            if with_optimizer:
                self.step.optimizer_step()
                with_optimizer = False
            self.step.zero_grad()
        with pytest.raises(RuntimeError):
            self.model.loss(batch_of(3, 95)).backward(torch.ones(2))
        self.step.zero_grad()

    def snapshot(self, **kwargs: Any) -> Snapshot:
        return Snapshot.take(self.model, [self.optimizer], [self.scheduler], **kwargs)


@pytest.mark.parametrize("num_steps_before", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_six_steps_after_trials_are_bitwise_those_without_trials(optimizer: str, num_steps_before: int) -> None:
    plain = Training(optimizer)
    expected = plain.train(num_steps_before + 6)
    training = Training(optimizer)
    losses = training.train(num_steps_before)
    with leave_no_trace(training.model, [training.optimizer], [training.scheduler]):
        training.trials()
    losses += training.train(6, start=num_steps_before)
    assert losses == expected
    assert training.scheduler.state_dict() == plain.scheduler.state_dict()
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(tensor, plain.model.state_dict()[name]), name


@pytest.mark.parametrize("forgotten", ["everything", "parameters", "generators"])
def test_trials_that_are_not_undone_show_in_the_losses(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Training().train(6)
    training = Training()
    if forgotten == "everything":
        training.trials()
    else:
        snapshot = training.snapshot()
        if forgotten == "parameters":
            monkeypatch.setattr("torch.Tensor.copy_", lambda self, other: self)
        else:
            monkeypatch.setattr(snapshot._globals, "restore", lambda: None)
        training.trials()
        snapshot.restore()
        monkeypatch.undo()
    assert training.train(6) != expected


def test_steps_without_the_optimizer_need_no_copy_of_the_parameters() -> None:
    expected = Training().train(6)
    training = Training()
    with leave_no_trace(training.model, [training.optimizer], [training.scheduler], parameters=False):
        training.trials(with_optimizer=False)
    assert training.train(6) == expected


def noted_copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the tensors are that are copied from now on."""
    copied: list[int] = []
    original = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("copy"):
            copied.append(self.data_ptr())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    return copied


def test_without_a_step_no_parameter_and_no_optimizer_state_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.train(1)
    training.step.zero_grad()
    large = {p.data_ptr() for p in training.model.parameters()}
    large |= {s["exp_avg"].data_ptr() for s in training.optimizer.state.values()}
    copied = noted_copies(monkeypatch)
    training.snapshot(parameters=False)
    assert copied
    assert not large & set(copied)
    training.snapshot(parameters=True)
    assert large <= set(copied)


def test_a_calibration_copies_optimizer_state_only_if_the_optimizer_has_to_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[bool] = []
    original = Snapshot.take

    def take(model: nn.Module, *args: Any, parameters: bool, optimizer_state: bool) -> Snapshot:
        if isinstance(model, TinyModel):
            assert parameters  # a step may clamp or renormalise them by itself
            taken.append(optimizer_state)
        return original(model, *args, parameters=parameters, optimizer_state=optimizer_state)

    model = TinyModel()
    optimizer, scheduler = tiny_optimizer(model)
    dataset, sampler = TinyDataset(), tiny_sampler()
    calibration = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "training_step": training_step,
        "memory_limit": "64MiB", "max_batch_size": 2, "cache": False, "progress": False,
    }  # fmt: skip
    monkeypatch.setattr(Snapshot, "take", take)
    calibrate(sampler, dataset, **calibration)
    assert taken == [True]
    train(model, optimizer, scheduler, [dataset[tiny_cuts(2)]])  # now the optimizer's state is there
    calibrate(tiny_sampler(), dataset, **calibration)
    assert taken == [True, False]


def test_with_parameters_alone_kept_those_that_a_step_clamps_are_restored_and_no_state_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training()
    training.train(1)
    before = [p.detach().clone() for p in training.model.parameters()]
    of_state = {s["exp_avg"].data_ptr() for s in training.optimizer.state.values()}
    copied = noted_copies(monkeypatch)
    with leave_no_trace(training.model, [training.optimizer], optimizer_state=False), torch.no_grad():
        for parameter in training.model.parameters():
            parameter.clamp_(-0.001, 0.001)
    assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))
    assert copied
    assert not of_state & set(copied)


def test_optimizer_state_that_changes_without_a_copy_is_reported_and_all_else_restored() -> None:
    training = Training()
    training.train(1)
    before = [p.detach().clone() for p in training.model.parameters()]
    message = (
        r"the optimizer's state must not change in a trial, \d+ of its tensors did .*leave every optimizer.step\(\)"
    )
    with (
        pytest.raises(CalibrationError, match=message),
        leave_no_trace(training.model, [training.optimizer], optimizer_state=False),
    ):
        training.trials()
    assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))


def test_a_parameter_that_changes_without_a_copy_is_reported_and_all_else_restored() -> None:
    training = Training()
    snapshot = training.snapshot(parameters=False)
    training.trials()
    message = r"must not change in a trial without an optimizer step, \d+ did .*take the snapshot with parameters=True"
    with pytest.raises(CalibrationError, match=message):
        snapshot.restore()
    assert training.model.num_forwards == 0
    assert len(training.optimizer.state) == 0


def test_a_parameter_whose_values_only_moved_is_not_reported() -> None:
    model = nn.Linear(3, 3)
    snapshot = Snapshot.take(model, parameters=False)
    with torch.no_grad():
        model.weight.set_(model.weight.clone())
    snapshot.restore()


def test_a_buffer_that_was_replaced_comes_back_as_the_same_object_with_the_attribute_beside_it() -> None:
    model = nn.Sequential(GrowingPositions(), nn.BatchNorm1d(8))
    model[0].register_buffer("last", torch.zeros(2))
    pe, names = model[0].pe, list(dict(model.named_buffers()))
    values = pe.clone()
    with leave_no_trace(model):
        model[0](torch.zeros(1, 50, 24))
        assert model[0].max_length == 50
        assert list(model[0]._buffers) == ["last", "pe"]
    assert model[0].pe is pe
    assert torch.equal(pe, values)
    assert model[0].max_length == 8
    assert list(dict(model.named_buffers())) == names
    assert model[0]._non_persistent_buffers_set == {"pe"}


def test_optimizer_state_that_was_empty_is_empty_again() -> None:
    training = Training()
    state = training.optimizer.state
    with leave_no_trace(training.model, [training.optimizer], [training.scheduler]):
        training.trials()
        assert len(state) > 0
    assert training.optimizer.state is state
    assert len(state) == 0
    assert isinstance(state, defaultdict)


def test_optimizer_state_that_existed_keeps_its_objects_and_values() -> None:
    training = Training()
    training.train(2)
    before = {p: dict(s) for p, s in training.optimizer.state.items()}
    values = copy.deepcopy(training.optimizer.state_dict())
    with leave_no_trace(training.model, [training.optimizer], [training.scheduler]):
        training.trials()
    for parameter, state in training.optimizer.state.items():
        for name, value in state.items():
            assert value is before[parameter][name]
    assert_same(training.optimizer.state_dict(), values)


def test_a_wrapper_that_copied_the_parameters_at_its_first_step_lets_go_of_them() -> None:
    training = Training("ema")
    with leave_no_trace(training.model, [training.optimizer], [training.scheduler]):
        training.trials()
        assert training.optimizer.ema
    assert training.optimizer.ema == ()
    assert training.optimizer.num_steps == 0
    assert training.optimizer.rate == {"decay": 0.9}
    assert len(training.optimizer.optimizer.state) == 0


def test_schedulers_do_not_notice_the_steps() -> None:
    training = Training()
    before = copy.deepcopy(training.scheduler.state_dict())
    rates = [group["lr"] for group in training.optimizer.param_groups]
    with leave_no_trace(training.model, [training.optimizer], [training.scheduler]):
        training.trials()
        assert training.scheduler.state_dict() != before
    assert training.scheduler.state_dict() == before
    assert [group["lr"] for group in training.optimizer.param_groups] == rates
    assert not getattr(training.optimizer, "_opt_called", False)
    training.train(1)  # warns, if the scheduler thinks that it stepped before the optimizer


def test_a_scheduler_on_a_plateau_and_a_chained_one_are_kept() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    chained = torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)])
    before = copy.deepcopy(plateau.state_dict())
    with leave_no_trace(nn.Linear(1, 1), [optimizer], [plateau, chained]):
        optimizer.step()
        for loss in (1.0, 2.0, 3.0):
            plateau.step(loss)
            chained.step()
        assert optimizer.param_groups[0]["lr"] < 0.1
    assert plateau.state_dict() == before
    assert chained._schedulers[0].last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_a_gradient_scaler_is_kept_before_its_first_use_and_after() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)

    def step(scale: float = 1.0) -> None:
        scaler.scale(model(x).sum() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with leave_no_trace(model, [optimizer], scalers=[scaler]):
        step()
        assert scaler.get_scale() == 2048.0
    assert scaler._scale is None
    step()
    scale = scaler._scale
    with leave_no_trace(model, [optimizer], scalers=[scaler]):
        step()
        step(float("inf"))
    assert scaler._scale is scale
    assert scaler.get_scale() == 2048.0
    assert len(scaler._per_optimizer_states) == 0


def test_every_generator_continues_as_if_nothing_had_been_drawn() -> None:
    model = SpeechModel()

    def draw() -> list[Any]:
        m = model.masking
        return [
            random.random(), np.random.rand(), torch.rand(1).item(), m.own_python.random(), m.own_numpy.random(),
            m.old_numpy.rand(), torch.rand(1, generator=m.own_torch).item(), np.random.randn(),
        ]  # fmt: skip

    with leave_no_trace(model):
        first = draw()
    assert draw() == first


def test_gradients_at_entry_come_back_as_the_same_objects_with_their_values() -> None:
    training = Training()
    training.step.forward_backward(batch_of(2))
    grads = {name: p.grad for name, p in training.model.named_parameters()}
    values = {name: grad.clone() for name, grad in grads.items() if grad is not None}
    with leave_no_trace(training.model, [training.optimizer]):
        training.step.forward_backward(batch_of(3))
        training.step.zero_grad()
        training.step.forward_backward(batch_of(5))
    for name, parameter in training.model.named_parameters():
        assert parameter.grad is grads[name]
        assert torch.equal(parameter.grad, values[name])


def test_no_gradient_is_left_where_there_was_none() -> None:
    training = Training()
    with leave_no_trace(training.model):
        training.step.forward_backward(batch_of(2))
    assert all(p.grad is None for p in training.model.parameters())


def test_modes_flags_hooks_and_attributes_come_back() -> None:
    model = SpeechModel()
    model.norm.eval()
    model.inp.weight.requires_grad_(False)
    model.inp.weight.tag = "kept"
    with leave_no_trace(model):
        model(batch_of(2))
        model.eval()
        model.norm.train()
        model.inp.weight.requires_grad_(True)
        model.out.bias.requires_grad_(False)
        model.register_forward_pre_hook(lambda *_: None)
        model.inp.weight.tag = "changed"
        model.added = torch.ones(3)
        model.out = nn.Linear(1, 1)
        del model.num_forwards
        torch.set_grad_enabled(False)
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    assert model.training
    assert not model.norm.training
    assert not model.inp.weight.requires_grad
    assert model.out.bias.requires_grad
    assert len(model._forward_pre_hooks) == 0
    assert model.inp.weight.tag == "kept"
    assert not hasattr(model, "added")
    assert not hasattr(model, "last_shape")
    assert model.out.in_features == 24
    assert model.num_forwards == 0
    assert torch.is_grad_enabled()
    assert torch.backends.cudnn.benchmark is False


def test_containers_and_plain_objects_inside_modules_come_back_as_the_same_objects() -> None:
    model = SpeechModel()
    model.queue = deque([1, 2, 3], maxlen=3)
    model.seen = {1, 2}
    model.ordered = OrderedDict(a=[torch.zeros(2)], b=({"c": bytearray(b"xy")},))
    model.array = np.zeros(3)
    bookkeeper, lengths, tensor = model.bookkeeper, model.lengths, model.ordered["a"][0]
    with leave_no_trace(model):
        model(batch_of(2))
        model.queue.append(4)
        model.seen.add(3)
        model.ordered.move_to_end("a")
        tensor.add_(1)
        model.ordered["a"].append(torch.ones(1))
        model.ordered["b"][0]["c"].extend(b"z")
        model.array += 1
        model.bookkeeper.late = 1
        assert bookkeeper.by_length == {20: [2]}
    assert model.queue == deque([1, 2, 3])
    assert model.queue.maxlen == 3
    assert model.seen == {1, 2}
    assert list(model.ordered) == ["a", "b"]
    assert len(model.ordered["a"]) == 1
    assert model.ordered["a"][0] is tensor
    assert torch.equal(tensor, torch.zeros(2))
    assert model.ordered["b"][0]["c"] == b"xy"
    assert model.array.tolist() == [0, 0, 0]
    assert model.bookkeeper is bookkeeper
    assert vars(bookkeeper) == {"num_steps": 0, "by_length": {}}
    assert model.lengths is lengths
    assert lengths == []


def test_metrics_keep_their_states() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    model = nn.Linear(2, 2)
    model.mean = torchmetrics.MeanMetric()
    model.cat = torchmetrics.CatMetric()
    model.mean.update(1.0)
    model.cat.update(torch.tensor([1.0]))
    with leave_no_trace(model):
        model.mean(5.0)
        model.mean.update(3.0)
        model.cat.update(torch.tensor([2.0, 3.0]))
        assert model.mean.compute() != 1.0
        model.cat.reset()
    assert model.mean.compute() == 1.0
    assert model.cat.compute() == 1.0
    assert model.mean.update_count == 1


def test_extras_are_kept_whatever_they_are() -> None:
    class Counter:
        def __init__(self) -> None:
            self.num_batches = 3
            self.values = {"loss": [1.0]}
            self.model = nn.BatchNorm1d(2)

    counter, values, tensor = Counter(), {"a": 1}, torch.zeros(2)
    with leave_no_trace(nn.Linear(1, 1), extras=[counter, values, tensor, None, "text"]):
        counter.num_batches += 1
        counter.values["loss"].append(2.0)
        counter.model(torch.randn(4, 2))
        values["b"] = 2
        tensor += 1
    assert counter.num_batches == 3
    assert counter.values == {"loss": [1.0]}
    assert counter.model.num_batches_tracked == 0
    assert values == {"a": 1}
    assert tensor.tolist() == [0, 0]


def test_a_trainer_that_a_module_refers_to_is_not_opened() -> None:
    class Trainer:
        __module__ = "lightning.pytorch.trainer"

        def __init__(self) -> None:
            self.num_batches = 0

    model = nn.Linear(1, 1)
    model._trainer = Trainer()
    with leave_no_trace(model):
        model._trainer.num_batches = 5
    assert model._trainer.num_batches == 5
    with leave_no_trace(model, extras=[model._trainer]):
        model._trainer.num_batches = 6
    assert model._trainer.num_batches == 5


def test_what_is_unchanged_is_not_written_to() -> None:
    class Frozen(dict):  # type: ignore[type-arg]
        def clear(self) -> None:
            raise TypeError("read-only")

    model = nn.Linear(1, 1)
    model.config = Frozen(a=1)
    model.constants = np.zeros(2)
    model.constants.flags.writeable = False
    with leave_no_trace(model):
        pass
    assert model.config == {"a": 1}


def test_an_array_mapped_from_a_file_is_not_copied(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    model.table = np.memmap(tmp_path / "table", dtype=np.float32, mode="w+", shape=(4,))
    with leave_no_trace(model):
        model.table[0] = 1.0
    assert model.table[0] == 1.0


def test_tensors_of_every_layout_come_back() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("expanded", torch.arange(3.0).unsqueeze(1).expand(3, 4))
    model.register_buffer("transposed", torch.arange(6.0).view(2, 3).t())
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("narrow", torch.ones(2, dtype=torch.bfloat16))
    model.resized = torch.ones(4)
    with torch.inference_mode():
        model.frozen = torch.zeros(2)
    strides = model.expanded.stride(), model.transposed.stride()
    with leave_no_trace(model):
        model.expanded[:, :1].mul_(7)
        model.transposed.mul_(7)
        model.sparse.mul_(7)
        model.narrow.mul_(7)
        model.resized.resize_(9).zero_()
        with torch.inference_mode():
            model.frozen.add_(1)
    assert model.expanded.tolist() == [[0] * 4, [1] * 4, [2] * 4]
    assert model.transposed.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (model.expanded.stride(), model.transposed.stride()) == strides
    assert torch.equal(model.sparse.to_dense(), torch.eye(3))
    assert model.narrow.tolist() == [1, 1]
    assert model.resized.tolist() == [1, 1, 1, 1]
    assert model.frozen.tolist() == [0, 0]


def test_scripted_modules_are_kept() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch calls scripting deprecated
        scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))
    model = nn.Sequential(scripted)
    before = copy.deepcopy(model.state_dict())
    with leave_no_trace(model):
        scripted(torch.randn(5, 3)).sum().backward()
        scripted.eval()
    assert_same(dict(model.state_dict()), dict(before))
    assert scripted.training
    assert all(p.grad is None for p in scripted.parameters())


def test_restoring_twice_is_as_good_as_once() -> None:
    expected = Training().train(6)
    training = Training()
    snapshot = training.snapshot()
    for _ in range(2):
        training.trials()
        snapshot.restore()
    assert training.train(6) == expected


def test_an_exception_on_the_way_restores_too() -> None:
    expected = Training().train(6)
    training = Training()
    model, optimizers, schedulers = training.model, [training.optimizer], [training.scheduler]
    with pytest.raises(RuntimeError, match="Mismatch in shape"), leave_no_trace(model, optimizers, schedulers):
        training.model.loss(batch_of(3, 95)).backward(torch.ones(2))
    assert training.train(6) == expected


def test_a_restoration_that_fails_does_not_hide_the_error_that_came_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = Training()
    optimizers = [training.optimizer]
    with pytest.raises(ValueError, match="the bug"), leave_no_trace(training.model, optimizers, parameters=False):
        trials_and_then_a_bug(training)
    assert "what the trials changed could not all be restored: the parameters must not change" in caplog.text
    assert training.model.num_forwards == 0


def trials_and_then_a_bug(training: Training) -> None:
    training.trials()  # changes parameters, which were not to be kept
    raise ValueError("the bug")


def test_an_optimizer_class_in_an_attribute_is_no_wrapper() -> None:
    model = nn.Linear(1, 1)
    model.optimizer = torch.optim.AdamW
    with leave_no_trace(model):
        model.optimizer = torch.optim.SGD
    assert model.optimizer is torch.optim.AdamW


def test_a_model_with_lazy_parameters_is_refused() -> None:
    message = "must all be initialised before trial steps, 1.weight, 1.bias are lazy; run one forward pass first"
    with pytest.raises(InvalidArgumentError, match=message):
        Snapshot.take(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))


LEAVES = st.one_of(
    st.integers(-3, 3), st.text(max_size=2), st.none(), st.builds(lambda n: torch.arange(float(n)), st.integers(0, 4))
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.tuples(inner, inner),
        st.lists(inner, max_size=3).map(deque),
        st.sets(st.integers(0, 5), max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(attributes=st.dictionaries(st.sampled_from("abcd"), NESTED), seed=st.integers(0, 1000))
def test_nested_attributes_come_back_whatever_is_done_to_them(attributes: dict[str, Any], seed: int) -> None:
    model = nn.Module()
    for name, value in attributes.items():
        setattr(model, name, value)
    expected = copy.deepcopy(attributes)
    with leave_no_trace(model):
        generator = random.Random(seed)
        for value in list(attributes.values()):
            scramble(value, generator)
        if generator.random() < 0.5:
            model.a = 5
    assert_same({name: vars(model)[name] for name in attributes}, expected)
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert set(vars(model)) - set(attributes) == set(vars(nn.Module()))


def scramble(value: Any, generator: random.Random) -> None:
    if isinstance(value, dict | list | tuple | deque):
        for item in list(value.values() if isinstance(value, dict) else value):
            scramble(item, generator)
    if isinstance(value, torch.Tensor):
        value.add_(generator.randint(0, 2))
    elif isinstance(value, list | deque):
        for _ in range(generator.randint(0, 3)):
            value.append(generator.random()) if generator.random() < 0.5 or not value else value.pop()
    elif isinstance(value, set):
        value.symmetric_difference_update({generator.randint(0, 5)})
    elif isinstance(value, dict):
        if value and generator.random() < 0.5:
            key = generator.choice(list(value))
            value[key] = value.pop(key)
        value[generator.choice("xyz")] = generator.random()


def assert_same(a: Any, b: Any) -> None:
    """Equal to the last bit, order of keys included."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple | deque):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b
