"""Calls that leave generators and attributes as they were."""

from __future__ import annotations

import functools
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch

from lhotse_oomfit.undisturbed import Generators, reseed, undisturbed


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_global_generators_are_put_back() -> None:
    reseed(3)
    expected = draw()
    reseed(3)
    with undisturbed():
        reseed(99)
        draw()
    assert draw() == expected


def test_generators_are_put_back_after_an_error() -> None:
    reseed(3)
    expected = draw()
    reseed(3)

    def fail() -> None:
        with undisturbed():
            draw()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert draw() == expected


def test_the_same_seed_gives_the_same_draws() -> None:
    with undisturbed():
        reseed(2**40 + 1)
        first = draw()
        reseed(2**40 + 1)
        assert draw() == first


class Transform:
    def __init__(self) -> None:
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.legacy = np.random.RandomState(1)
        self.torch = torch.Generator().manual_seed(1)
        self.later: random.Random | None = None
        self.history: list[float] = []
        self.recent: deque[float] = deque([1.0], maxlen=3)
        self.counts = {"calls": 0}
        self.ids: set[int] = set()

    def __call__(self) -> list[float]:
        self.later = self.later or random.Random(1)
        values = [self.python.random(), self.numpy.random(), float(self.legacy.rand()), self.later.random()]
        values.append(float(torch.rand(1, generator=self.torch)))
        self.history.extend(values)
        self.recent.append(values[0])
        self.counts["calls"] += 1
        self.ids.add(len(self.history))
        self.extra = True
        return values


def reach_by_attribute(transform: Transform) -> Any:
    class Dataset:
        def __init__(self) -> None:
            self.transforms = [transform]

        def __getitem__(self, index: int) -> Any:
            return self.transforms[0]()

    return Dataset().__getitem__


@pytest.mark.parametrize(
    "reach",
    [
        reach_by_attribute,
        lambda transform: lambda index: transform(),
        lambda transform: functools.partial(lambda index, other: other(), other=transform),
        lambda transform: {"a": (transform,)},
        lambda transform: torch.nn.Sequential(module_with(transform)),
    ],
    ids=["attribute of a bound method", "closure", "partial", "containers", "module"],
)
def test_what_transforms_keep_is_put_back(reach: Any) -> None:
    transform = Transform()
    root = reach(transform)
    expected = Transform()()
    with undisturbed(root):
        transform()
        transform()
    assert transform.history == []
    assert list(transform.recent) == [1.0]
    assert transform.counts == {"calls": 0}
    assert transform.ids == set()
    assert transform.later is None
    assert not hasattr(transform, "extra")
    assert transform() == expected


def module_with(transform: Transform) -> torch.nn.Module:
    module = torch.nn.Identity()
    module.transform = transform
    return module


def test_containers_stay_the_same_objects() -> None:
    transform = Transform()
    history, counts = transform.history, transform.counts
    with undisturbed(transform):
        transform()
        transform.counts = {}
    assert transform.history is history
    assert transform.counts is counts


def test_cycles_and_data_are_passed_by() -> None:
    loop: dict[str, Any] = {"data": torch.ones(3), "array": np.ones(3), "many": list(range(50_000))}
    loop["self"] = loop
    with undisturbed(loop):
        loop["data"] += 1
        loop["new"] = 1
    assert "new" not in loop
    assert loop["data"].tolist() == [2.0, 2.0, 2.0], "tensors are data, and no business of this module"


@pytest.mark.parametrize("root", [reach_by_attribute, lambda transform: lambda index: transform()])
def test_generators_within_reach_are_seeded_and_those_made_later_are_found(root: Any) -> None:
    drawn = []
    for _ in range(2):
        transform = Transform()
        generators = Generators(root(transform))
        transform.python.random()
        assert generators.find()
        assert not generators.find()
        assert transform() != Transform()
        assert generators.find(), "one was made on first use"
        generators.reseed(5)
        drawn.append(transform())
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 5


def test_the_system_s_own_generator_has_no_state_to_keep() -> None:
    holder = [random.SystemRandom()]
    generators = Generators(holder)
    with undisturbed(holder):
        assert not generators.find()
        generators.reseed(1)
