"""Corpora for the sampler's tests: metadata only, no audio."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from lhotse import CutSet, SupervisionSegment
from lhotse.cut import MonoCut
from lhotse.testing.dummies import dummy_recording

_RECORDING = dummy_recording(0, duration=100.0)


def make_cut(number: int, duration: float, *, text: str | None = None, num_tokens: int | None = None) -> MonoCut:
    supervisions = []
    if text is not None or num_tokens is not None:
        supervision = SupervisionSegment(f"s{number}", "dummy-recording-0000", 0.0, duration, text=text)
        if num_tokens is not None:
            supervision.tokens = list(range(num_tokens))
        supervisions.append(supervision)
    return MonoCut(
        id=f"cut-{number:05d}",
        start=0.0,
        duration=duration,
        channel=0,
        supervisions=supervisions,
        recording=_RECORDING,
    )


def make_cuts(num: int, *, seed: int = 0, longest: float = 30.0, tokens_per_s: float | None = None) -> CutSet:
    """Log-normal durations from 1 s to ``longest``."""
    rng = random.Random(seed)
    cuts = []
    for number in range(num):
        duration = min(longest, max(1.0, rng.lognormvariate(2.0, 0.6)))
        num_tokens = None if tokens_per_s is None else int(duration * tokens_per_s * rng.uniform(0.5, 1.5))
        cuts.append(make_cut(number, duration, num_tokens=num_tokens))
    return CutSet(cuts)


def ids(batches: Iterable[Any]) -> list[list[str]]:
    """The IDs of the cuts in each batch."""
    return [[cut.id for cut in batch] for batch in batches]


def flat(batches: Iterable[Any]) -> list[str]:
    """The IDs of the cuts in all batches."""
    return [name for batch in ids(batches) for name in batch]
