from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import FEATURES, GrowingPositions, SpeechModel, Step, batch_of, seed_everything
from torch import nn

from lhotse_oomfit.memory import backend_for
from lhotse_oomfit.snapshot import Snapshot, leave_no_trace
from lhotse_oomfit.trial import TrialRunner


@pytest.fixture(autouse=True)
def _deterministic_kernels() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Transducer(nn.Module):
    """An encoder with a convolution that cuDNN runs and positions that grow, a recurrent prediction net, a joint."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.inp = nn.Linear(8 * FEATURES // 2, 24)
        self.positions = GrowingPositions()
        self.norm = nn.BatchNorm1d(24)
        self.encoder = nn.LSTM(24, 12, num_layers=2, bidirectional=True, batch_first=True)
        self.embedding = nn.Embedding(10, 16)
        self.prediction = nn.LSTM(16, 24, num_layers=2, dropout=0.2, batch_first=True)
        self.joint = nn.Sequential(nn.Tanh(), nn.Dropout(0.1), nn.Linear(24, 10))
        self.lengths: list[int] = []

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        self.lengths.append(x.shape[1])
        tokens = (x[:, ::5, 0].abs() * 10).long().clamp(max=9)
        x = self.conv(x.unsqueeze(1)).transpose(1, 2).flatten(2)
        x = self.norm(self.positions(self.inp(x)).transpose(1, 2)).transpose(1, 2)
        x = self.encoder(x)[0].unsqueeze(2) + self.prediction(self.embedding(tokens))[0].unsqueeze(1)
        return self.joint(x).log_softmax(-1)[..., 0].neg().mean()


class EmaOptimizer:
    """A wrapper that copies the parameters into a plain attribute at its first step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.ema: tuple[torch.Tensor, ...] = ()

    def step(self) -> None:
        self.optimizer.step()
        parameters = [p.detach() for group in self.optimizer.param_groups for p in group["params"]]
        if not self.ema:
            self.ema = tuple(p.clone() for p in parameters)
        torch._foreach_lerp_(list(self.ema), parameters, 0.1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Training(Step):
    """One training on a card: model, precision, optimizer, accumulation, compilation as asked."""

    def __init__(
        self,
        *,
        model: type[Any] = SpeechModel,
        precision: str = "32",
        optimizer: str = "fused",
        accumulate: int = 1,
        compiled: bool = False,
        ema: bool = False,
    ) -> None:
        seed_everything(0)
        model = model()
        model = model.bfloat16().cuda() if precision == "bf16-true" else model.cuda()
        for module in model.modules():
            if isinstance(module, nn.LSTM):
                module.flatten_parameters()
        flags: dict[str, Any] = {
            "fused": {"fused": True}, "foreach": {"foreach": True}, "capturable": {"capturable": True},
        }[optimizer]  # fmt: skip
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3, **flags)
        super().__init__(model, EmaOptimizer(inner) if ema else inner)
        self.averaged = torch.optim.swa_utils.AveragedModel(model.inp) if ema else None
        self.precision, self.accumulate = precision, accumulate
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2, enabled=precision == "16")
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            inner,
            [torch.optim.lr_scheduler.LinearLR(inner, 0.1, total_iters=2), torch.optim.lr_scheduler.StepLR(inner, 2)],
            milestones=[2],
        )
        if compiled:
            model.block = torch.compile(model.block, dynamic=True)

    def unchanged(self, *, parameters: bool = True) -> Any:
        """The context in which trials leave no trace."""
        extras = [] if self.averaged is None else [self.averaged]
        optimizers, schedulers, scalers = [self.optimizer], [self.scheduler], [self.scaler]
        return leave_no_trace(self.model, optimizers, schedulers, scalers, extras, parameters=parameters)

    def state(self) -> dict[str, Any]:
        """All that training goes on from."""
        averaged = {} if self.averaged is None else self.averaged.state_dict()
        ema = dict(enumerate(getattr(self.optimizer, "ema", ())))
        return {
            "model": {name: tensor.tolist() for name, tensor in self.model.state_dict().items()},
            "ema": {name: tensor.tolist() for name, tensor in (averaged | ema).items()},
            "scheduler": str(self.scheduler.state_dict()),
            "scaler": self.scaler.state_dict(),
            "lengths": list(self.model.lengths),
        }

    def batch(self, size: int, length: int, seed: int = 0) -> torch.Tensor:
        x = batch_of(size, length, device="cuda", seed=seed)
        return x.bfloat16() if self.precision == "bf16-true" else x

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        narrow = {"16": torch.float16, "bf16": torch.bfloat16}.get(self.precision, torch.float32)
        with torch.autocast("cuda", narrow, enabled=narrow is not torch.float32):
            return self.model.loss(x)

    def forward_backward(self, batch: torch.Tensor) -> None:
        self.scaler.scale(self.loss(batch)).backward()

    def optimizer_step(self) -> None:
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model.inp)

    def train(self, num_steps: int) -> list[float]:
        losses = []
        for i in range(num_steps):
            for j in range(self.accumulate):
                loss = self.loss(self.batch(4, 10 + 3 * i, seed=i * 10 + j))
                self.scaler.scale(loss).backward()
                losses.append(loss.item())
            self.optimizer_step()
            self.zero_grad()
        return losses

    def trials(self) -> list[str]:
        card = backend_for("cuda", memory_limit=None)
        runner = TrialRunner(
            step=self,
            memory=card,
            make_batch=lambda bucket, size: self.batch(size, 30 + bucket),
            keep_gradients=self.accumulate > 1,
        )
        statuses = [runner.run(0, 4, with_optimizer=True).status]
        statuses += [runner.run(bucket, 8).status for bucket in (5, 20)]
        with card.cap(torch.cuda.memory_reserved() + 64 * 1024**2):
            statuses.append(runner.run(40, 20_000).status)
        self.zero_grad()
        return statuses


CASES: dict[str, dict[str, Any]] = {
    "fp32_fused": {},
    "fp32_foreach": {"optimizer": "foreach"},
    "fp32_capturable": {"optimizer": "capturable"},
    "bf16_mixed": {"precision": "bf16"},
    "bf16_true": {"precision": "bf16-true", "optimizer": "foreach"},
    "16_mixed": {"precision": "16"},
    "accumulation": {"precision": "16", "accumulate": 3},
    "ema": {"precision": "bf16", "ema": True},
    "transducer": {"model": Transducer, "precision": "bf16"},
    "transducer_fp32": {"model": Transducer, "accumulate": 2},
}


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")  # bfloat16's never are
@pytest.mark.parametrize("case", CASES)
def test_six_steps_after_trials_are_bitwise_those_without_trials(case: str) -> None:
    check_no_trace(**CASES[case])


def test_cudnns_own_search_for_algorithms_leaves_no_trace_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    check_no_trace(model=Transducer, precision="16")
    assert torch.backends.cudnn.benchmark


def check_no_trace(**options: Any) -> None:
    Training(**options).train(6)  # kernels that tune or load themselves at their first use do so here
    plain = Training(**options)
    expected = plain.train(6)
    assert expected == Training(**options).train(6), "not deterministic by itself"
    training = Training(**options)
    before = training.state()
    with training.unchanged():
        assert training.trials() == ["fits", "fits", "fits", "oom"]
        assert training.state() != before
    assert training.state() == before
    assert len(getattr(training.optimizer, "optimizer", training.optimizer).state) == 0
    assert training.train(6) == expected
    assert training.state() == plain.state()


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch's own code
def test_a_compiled_module_trains_on_as_if_no_trial_had_been_and_compiles_nothing_more() -> None:
    torch._dynamo.reset()
    expected = Training(compiled=True, precision="bf16").train(3)
    torch._dynamo.reset()
    training = Training(compiled=True, precision="bf16")
    with training.unchanged():
        assert training.trials() == ["fits", "fits", "fits", "oom"]
    compiled = num_graphs()
    assert training.train(3) == pytest.approx(expected, rel=1e-2)  # another graph may round otherwise
    assert num_graphs() <= compiled + 1  # a length that a graph took for a multiple of something, at worst
    torch._dynamo.reset()
    again = Training(compiled=True, precision="bf16")
    with again.unchanged():
        again.trials()
    torch._dynamo.reset()
    assert again.train(3) == expected  # with graphs made anew, to the last bit
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch's own code
def test_trials_of_many_sizes_make_two_graphs_of_a_module_compiled_by_default() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 1)).cuda()
    compiled: Any = torch.compile(model)
    step = Step(compiled, torch.optim.AdamW(model.parameters()))
    step.forward_backward = lambda x: compiled(x).square().mean().backward()  # type: ignore[method-assign]
    runner = TrialRunner(
        step=step, memory=backend_for("cuda"), make_batch=lambda k, size: torch.ones(size, 8 + k, 64, device="cuda")
    )
    first = num_graphs()
    with leave_no_trace(compiled, [step.optimizer]):
        assert runner.run(0, 4, with_optimizer=True).status == "fits"
        for bucket, size in ((1, 9), (2, 30), (3, 21), (0, 55), (1, 46), (3, 64)):
            assert runner.run(bucket, size).status == "fits"
    assert num_graphs() - first <= 3
    trials = num_graphs()
    for length in (8, 12, 19):
        step.forward_backward(torch.ones(6, length, 64, device="cuda"))
        step.optimizer_step()
        step.zero_grad()
    assert num_graphs() == trials
    torch._dynamo.reset()


@pytest.mark.parametrize("parameters", [True, False], ids=["optimizer_steps", "no_optimizer_step"])
def test_parameters_come_to_the_host_only_if_a_step_is_taken(parameters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.train(1)  # from here on, the optimizer's state is there
    copied: list[int] = []
    original = torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.is_cuda and args[:1] == ("cpu",):
            copied.append(self.nbytes)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    with training.unchanged(parameters=parameters):
        pass
    parameter_bytes = sum(p.nbytes for p in training.model.parameters())
    buffer_bytes = sum(b.nbytes for b in training.model.buffers())
    if parameters:
        assert sum(copied) >= 3 * parameter_bytes + buffer_bytes  # Adam's two moments too
    else:
        assert buffer_bytes <= sum(copied) <= buffer_bytes + 1024


def test_every_cards_generator_continues_as_if_nothing_had_been_drawn() -> None:
    model = torch.nn.Linear(1, 1)
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    with leave_no_trace(model):
        first = [torch.rand(3, device=device).tolist() for device in devices]
    assert [torch.rand(3, device=device).tolist() for device in devices] == first


def test_copies_lie_in_host_memory() -> None:
    model = torch.nn.Linear(4000, 4000, device="cuda")
    model.register_buffer("table", torch.zeros(1000, 1000, device="cuda"))
    model(torch.ones(1, 4000, device="cuda")).sum().backward()
    before = torch.cuda.memory_allocated()
    snapshot = Snapshot.take(model)
    assert torch.cuda.memory_allocated() == before
    with torch.no_grad():
        model.table.fill_(1)
    snapshot.restore()
    assert torch.cuda.memory_allocated() == before
    assert model.table.sum() == 0


def test_weights_that_a_recurrent_net_flattens_are_not_taken_for_changed() -> None:
    class Flattening(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(8, 8, num_layers=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.lstm.flatten_parameters()
            return self.lstm(x)[0]

    model = Flattening().cuda()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # scattered, so that flattening moves them
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with leave_no_trace(model, parameters=False):
        model(torch.ones(3, 2, 8, device="cuda")).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
