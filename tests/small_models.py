"""Small models with every kind of state that a training step changes, shared by the tests of memory and trials."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn

torch.set_num_threads(1)

FEATURES = 16
WIDTH = 24


class GrowingPositions(nn.Module):
    """A positional encoding that is replaced by a longer one, with a plain attribute beside it."""

    def __init__(self, max_length: int = 8) -> None:
        super().__init__()
        self.max_length = max_length
        self.register_buffer("pe", self._table(max_length), persistent=False)

    def _table(self, length: int) -> torch.Tensor:
        return torch.sin(torch.arange(length).unsqueeze(1) * torch.linspace(0.1, 1.0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > self.max_length:
            self.max_length = x.shape[1]
            del self.pe
            self.register_buffer("pe", self._table(x.shape[1]).to(x), persistent=False)
        return x + self.pe[: x.shape[1]].to(x)


class Masking(nn.Module):
    """Masks features, with a generator of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.own_python = random.Random(3)
        self.own_numpy = np.random.default_rng(3)
        self.old_numpy = np.random.RandomState(3)
        self.own_torch = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = [
            self.own_python.random() + random.random(),
            self.own_numpy.random() + np.random.random() + self.old_numpy.rand(),
            torch.rand((), generator=self.own_torch).item() + torch.rand(()).item(),
        ]
        return x * (1.0 + sum(keep) / 10)


class Bookkeeper:
    """A plain object inside a module."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.by_length: dict[int, list[int]] = {}


class SpeechModel(nn.Module):
    """Convolution, LSTM, attention, BatchNorm, dropout, a growing buffer, own generators, counters."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.masking = Masking()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.positions = GrowingPositions()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=dropout, batch_first=True)
        self.out = nn.Linear(WIDTH, 5)
        self.num_forwards = 0
        self.lengths: list[int] = []
        self.bookkeeper = Bookkeeper()
        self.running_loss = torch.zeros(())
        self.register_forward_hook(self._count)

    @staticmethod
    def _count(module: Any, args: Any, output: Any) -> None:
        module.num_forwards += 1
        module.lengths.append(args[0].shape[1])
        module.bookkeeper.num_steps += 1
        module.bookkeeper.by_length.setdefault(args[0].shape[1], []).append(args[0].shape[0])
        module.last_shape = tuple(output.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.positions(self.inp(self.masking(x)))
        x = x + self.conv(self.norm(x.transpose(1, 2))).transpose(1, 2)
        x = x + self.lstm(x)[0]
        return self.out(self.block(x))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        loss = self(x).log_softmax(-1)[..., 0].neg().mean()
        self.running_loss.mul_(0.9).add_(loss.detach().to(self.running_loss))
        return loss


class Step:
    """The parts of one training step, as a trial runs them."""

    def __init__(self, model: SpeechModel, optimizer: Any, scheduler: Any = None) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler

    def forward_backward(self, batch: torch.Tensor) -> None:
        self.model.loss(batch).backward()

    def optimizer_step(self) -> None:
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


def batch_of(size: int, length: int = 20, *, device: Any = "cpu", seed: int = 0) -> torch.Tensor:
    """``size`` examples of ``length`` frames, drawn without touching any global generator."""
    generator = torch.Generator().manual_seed(seed * 1000 + size)
    return torch.randn(size, length, FEATURES, generator=generator).to(device)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
