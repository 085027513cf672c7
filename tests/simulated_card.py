"""Simulated memory of training steps: affine beyond a knee within a bucket, a polynomial across buckets."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from lhotse_oomfit.search import BucketShape, Probe, Search

GB = 10**9


@dataclass(kw_only=True)
class Card:
    """Simulated memory: the peak is the larger of two regimes, the forward pass's end and the backward pass's."""

    shapes: list[BucketShape]
    coefficients: tuple[float, float, float, float, float]
    resident: int = GB
    budget: int = 20 * GB
    gradients: int = GB // 4
    constant: int = GB // 20
    limit: int | None = None  # a hard one: beyond it a step fails without telling its peak
    headroom: float = 0.0  # share of the budget by which a step may exceed it
    noise: dict[int, float] = field(default_factory=dict)

    def peak(self, k: int, size: int) -> int:
        slope = sum(a * b for a, b in zip(self.coefficients, self.shapes[k].features(), strict=True))
        slope *= self.noise.get(k, 1.0)
        backward = 1.5 * self.gradients + 0.3 * slope * size
        return int(self.resident + max(self.constant + slope * size, backward))

    def largest(self, k: int) -> int:
        low, high = 0, 1 << 22
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(k, middle) <= self.budget else (low, middle)
        return low

    def search(self, **options: Any) -> Search:
        return Search(
            self.shapes,
            budget_bytes=self.budget,
            resident_bytes=self.resident,
            gradient_bytes=self.gradients,
            headroom_bytes=int(self.headroom * self.budget),
            **options,
        )

    def run(self, search: Search | None = None) -> tuple[Search, list[tuple[Probe, int]]]:
        search = search or self.search()
        steps = []
        while (probe := search.ask()) is not None:
            peak = self.peak(probe.bucket, probe.size)
            steps.append((probe, peak))
            failed = self.limit is not None and peak > self.limit
            search.tell(probe, peak_bytes=None if failed else peak)
            assert len(steps) < 20 * len(self.shapes), "the search doesn't end"
        return search, steps


def one_d(num: int, *, longest: float = 30.0, tokens_per_s: int = 12) -> list[BucketShape]:
    return [
        BucketShape(input_len=longest * (k + 1) / num, output_len=int(tokens_per_s * longest * (k + 1) / num))
        for k in range(num)
    ]


def grid(num_lengths: int = 15, num_rates: int = 10) -> list[BucketShape]:
    return [
        BucketShape(input_len=2.0 * (k + 1), output_len=int(2.0 * rate * 2.0 * (k + 1)))
        for k in range(num_lengths)
        for rate in range(1, num_rates + 1)
    ]


def noise_for(shapes: list[BucketShape], seed: int = 0) -> dict[int, float]:
    random = Random(seed)
    return {k: random.uniform(0.97, 1.03) for k in range(len(shapes))}


def two_d(num: int) -> list[BucketShape]:
    return [
        BucketShape(input_len=3.0 * (k + 1), output_len=int(rate * 3.0 * (k + 1)))
        for k in range(num)
        for rate in (4, 8, 16)
    ]


CTC = (1e5, 4e6, 1e4, 0.0, 3e4)
AED = (1e5, 6e6, 4e5, 3e3, 9e4)
