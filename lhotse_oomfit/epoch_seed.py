"""What a seed of ``"trng"`` or ``"randomized"`` stands for in an epoch: the same on all ranks that must draw alike."""

from __future__ import annotations

import secrets
from typing import Any, Literal

import numpy as np
import torch
from lhotse.dataset.dataloading import resolve_seed
from torch import distributed

from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.position import process_rank

__all__ = ["EpochSeed"]


class EpochSeed:
    """Resolves a sampler's seed, once an epoch, and goes back to what it was when a state is loaded."""

    def __init__(self) -> None:
        self.worker_seed = secrets.randbits(48)
        """Stands for ``"trng"`` in worker processes, which derive theirs from it."""
        self.number: int | None = None
        """What a seed that isn't a number stands for in this epoch; None before it was asked for."""
        self._common: int | None = None  # stands for "trng" and "randomized" on several ranks

    def resolve(self, seed: int | Literal["randomized", "trng"], world_size: int) -> int:
        """The epoch's seed; the same on all ranks that share one stream of batches.

        :param seed: the sampler's.
        :param world_size: how many ranks share the stream.
        :raises InvalidArgumentError: where they must agree on a seed and can't.
        """
        if isinstance(seed, int):
            return seed
        if self.number is None:
            worker = torch.utils.data.get_worker_info()
            if worker is not None and seed == "trng":
                mixed = np.random.SeedSequence([self.worker_seed, process_rank(), worker.id])
                self.number = int(mixed.generate_state(1)[0])
            elif worker is None and world_size > 1:
                if self._common is None:
                    self._common = _agree_on_seed(seed, world_size)
                self.number = self._common
            else:
                self.number = int(resolve_seed(seed))
        return self.number

    def forget(self) -> None:
        """Another epoch begins."""
        self.number = None

    def restore(self, number: int | None, worker_seed: int) -> None:
        """Go on with what a state holds: its :attr:`number`, and its :attr:`worker_seed` or 0."""
        self.number = self._common = number
        self.worker_seed = worker_seed or self.worker_seed


def _agree_on_seed(seed: Literal["randomized", "trng"], world_size: int) -> int:
    """One seed for all ranks, drawn by the first."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise InvalidArgumentError(
            f"seed must be a whole number on {world_size} ranks of a map-style dataset, it is {seed!r}: "
            f"the ranks must draw alike, and torch.distributed isn't initialised to agree on a seed; initialise it "
            f"before iterating, or pass a number"
        )
    if distributed.get_world_size() != world_size:
        raise InvalidArgumentError(
            f"seed must be a whole number when the sampler's world_size, {world_size}, isn't that of "
            f"torch.distributed, {distributed.get_world_size()}; it is {seed!r}"
        )
    drawn: list[Any] = [resolve_seed(seed)]
    distributed.broadcast_object_list(drawn, src=0)
    return int(drawn[0])
