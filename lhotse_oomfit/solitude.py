"""One rank by itself, in a job of several.

Inside a trial the measuring rank must not meet its peers: model code asks ``torch.distributed`` how long the
longest input of all ranks is (NeMo's ConformerEncoder) or averages batch statistics (SyncBatchNorm). So its default
process group is a group of one rank for that while, see :func:`alone`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lhotse_oomfit.tripwire import refuse_collectives

__all__ = ["alone", "unbound"]


@contextmanager
def alone() -> Iterator[None]:
    """While inside, this process's default group is a group of itself: collectives return at once, with its own values.

    Patching ``is_initialized`` instead would miss names that were bound at import, and ``get_world_size``. Collectives
    over other groups of several ranks raise instead of waiting. What ``torch.compile`` traced may hold the group in its
    code, so it is traced anew after each change of groups.

    :raises UnsupportedStrategyError: from a collective over a group of several ranks.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    world: Any = dist.group
    everyone = world.WORLD
    # Local synchronisation: only the members of the group call, and it has only one.
    with unbound(everyone):
        solo = dist.new_group([dist.get_rank()], use_local_synchronization=True, timeout=timedelta(minutes=10))
    _forget_traces()
    world.WORLD = solo
    try:
        with refuse_collectives():
            yield
    finally:
        world.WORLD = everyone
        _forget_traces()
        dist.destroy_process_group(solo)


@contextmanager
def unbound(group: Any) -> Iterator[None]:
    """While inside, `group` isn't bound to a device, so that new groups aren't split off it: NCCL's split is a
    collective of all its ranks, where one makes a group of itself, or all one for another backend."""
    device = getattr(group, "bound_device_id", None)
    if device is None:
        yield
        return
    group.bound_device_id = None
    try:
        yield
    finally:
        group.bound_device_id = device


def _forget_traces() -> None:
    dynamo = sys.modules.get("torch._dynamo")  # nothing was compiled where it isn't loaded
    if dynamo is not None:
        dynamo.reset()
