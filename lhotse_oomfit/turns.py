"""Whose turn it is among a loader's workers, when an epoch is continued in its middle.

A loader asks its workers in turn and always begins with worker 0. An epoch that stopped after a number of batches that
isn't a multiple of the number of workers goes on with another one, so that after a resume each worker must play the
part of a neighbour: its random numbers, and its share of the data. Both hang on what torch and Lhotse tell about the
worker, which is why that is what changes here, inside the worker process and for the rest of the epoch.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from lhotse.dataset.dataloading import LHOTSE_PROCESS_SEED
from torch.utils.data._utils import worker as torch_worker

__all__ = ["own_number", "play"]

_SEED_STEP = 100  # between the seeds of workers: lhotse/dataset/dataloading.py, worker_init_fn

_own_numbers: dict[int, int] = {}  # by process, of those that play another part


def own_number() -> int | None:
    """The number that the loader gave this worker, whichever part it plays; ``None`` outside of workers."""
    info: Any = torch.utils.data.get_worker_info()
    return None if info is None else _own_numbers.get(os.getpid(), int(info.id))


def play(number: int) -> bool:
    """Be worker number ``number`` to whoever asks, from now on; ``False`` where this torch doesn't let us."""
    info: Any = torch.utils.data.get_worker_info()
    if info is None or info.id == number:
        return True
    if getattr(info, "worker_method", "multiprocessing") != "multiprocessing":
        return False  # workers that are threads share what would be changed
    own, shift = own_number(), number - info.id
    part = copy.copy(info)
    # It is frozen against mistakes of users; the copy is ours.
    object.__setattr__(part, "id", number)
    object.__setattr__(part, "seed", info.seed + shift)
    torch_worker._worker_info = part
    if torch.utils.data.get_worker_info() is not part:
        return False
    _own_numbers[os.getpid()] = int(own or 0)
    if LHOTSE_PROCESS_SEED in os.environ:
        os.environ[LHOTSE_PROCESS_SEED] = str(int(os.environ[LHOTSE_PROCESS_SEED]) + _SEED_STEP * shift)
    return True
