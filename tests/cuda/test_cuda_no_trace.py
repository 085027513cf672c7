from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import SpeechModel, Step, batch_of, seed_everything

from lhotse_oomfit.memory import backend_for
from lhotse_oomfit.snapshot import Snapshot, leave_no_trace
from lhotse_oomfit.trial import TrialRunner


@pytest.fixture(autouse=True)
def _deterministic_kernels() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Training(Step):
    """One training on a card: precision, optimizer, accumulation, compilation as asked."""

    def __init__(
        self, *, precision: str = "32", optimizer: str = "fused", accumulate: int = 1, compiled: bool = False
    ) -> None:
        seed_everything(0)
        model = SpeechModel()
        model = model.bfloat16().cuda() if precision == "bf16-true" else model.cuda()
        model.lstm.flatten_parameters()
        flags: dict[str, Any] = {
            "fused": {"fused": True}, "foreach": {"foreach": True}, "capturable": {"capturable": True},
        }[optimizer]  # fmt: skip
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=3e-3, **flags))
        self.precision, self.accumulate = precision, accumulate
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2, enabled=precision == "16")
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        if compiled:
            model.block = torch.compile(model.block, dynamic=True)

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
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

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
}


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")  # bfloat16's never are
@pytest.mark.parametrize("case", CASES)
def test_six_steps_after_trials_are_bitwise_those_without_trials(case: str) -> None:
    Training(**CASES[case]).train(1)  # kernels that tune or load themselves at their first use do so here
    plain = Training(**CASES[case])
    expected = plain.train(6)
    assert expected == Training(**CASES[case]).train(6), "not deterministic by itself"
    training = Training(**CASES[case])
    scale = training.scaler.state_dict()
    with leave_no_trace(training.model, [training.optimizer], [training.scheduler], [training.scaler]):
        assert training.trials() == ["fits", "fits", "fits", "oom"]
        assert len(training.optimizer.state) > 0
    assert len(training.optimizer.state) == 0
    assert training.scaler.state_dict() == scale
    assert training.train(6) == expected
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(tensor, plain.model.state_dict()[name]), name
    assert training.scaler.state_dict() == plain.scaler.state_dict()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about torch's own code
def test_a_compiled_model_trains_on_as_if_no_trial_had_been() -> None:
    torch._dynamo.reset()
    expected = Training(compiled=True, precision="bf16").train(3)
    torch._dynamo.reset()
    training = Training(compiled=True, precision="bf16")
    with leave_no_trace(training.model, [training.optimizer], [training.scheduler], [training.scaler]):
        assert training.trials() == ["fits", "fits", "fits", "oom"]
    torch._dynamo.reset()
    assert training.train(3) == expected
    torch._dynamo.reset()


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
