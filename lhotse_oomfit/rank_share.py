"""What of a step, one batch for each rank, belongs to a single one."""

from __future__ import annotations

from itertools import chain
from typing import Any

from lhotse import CutSet

from lhotse_oomfit.buckets import Batch
from lhotse_oomfit.errors import InvalidArgumentError

__all__ = ["as_cuts", "check_ids", "share_of"]


def share_of(rank: int, step: list[Batch]) -> Batch:
    """The batch of ``rank``. Where there are fewer examples than ranks, it repeats one of them, marked as such in its
    ID, since no rank can skip the step."""
    if rank < len(step):
        return step[rank]
    item, number = step[rank % len(step)][0], rank // len(step) - 1
    if isinstance(item, tuple):
        return [tuple(cut.with_id(f"{cut.id}_dup{number}") for cut in item)]
    return [item.with_id(f"{item.id}_dup{number}")]


def as_cuts(batch: Batch, num_sources: int) -> Any:
    """A CutSet of the batch, or with several sources a tuple of them."""
    if num_sources == 1:
        return CutSet.from_cuts(batch)
    return tuple(CutSet.from_cuts(cuts) for cuts in zip(*batch, strict=True))


def check_ids(step: list[Batch]) -> None:
    """Refuse a step of several sources whose cuts don't belong together. On all ranks alike: one that went on alone
    would wait for the others for ever.

    :raises InvalidArgumentError: when cuts at the same place differ in their IDs.
    """
    for cuts in chain.from_iterable(step):
        if any(cut.id != cuts[0].id for cut in cuts):
            raise InvalidArgumentError(
                f"the sources must hold cuts of the same IDs in the same order, they hold "
                f"{', '.join(repr(cut.id) for cut in cuts)} at the same place; sort them alike, or pass "
                f"consistent_ids=False"
            )
