"""Whether all ranks go by the same sizes, found out without any of them waiting for another.

A list or profile that was read from another file on another node, or another checkpoint, would have a rank draw other
batches than its peers: it trains out of step, or ends its epoch before them, and they wait for it for ever. A
collective could tell, but it would wait too, for a rank that doesn't come. So each rank asks the job's key-value store
once: the first to arrive writes what it has, the others compare.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from lhotse_oomfit.digest import clip, short_sha
from lhotse_oomfit.errors import RanksDisagreeError

__all__ = ["Agreement", "new_agreement"]

logger = logging.getLogger(__name__)

_num_made = 0


class Agreement:
    """What all ranks must have in common at certain moments. See :func:`new_agreement`.

    :param name: the same on every rank, and no other agreement's.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def check(self, moment: str, when: str, parts: Mapping[str, str]) -> None:
        """Compare `parts` with what the first rank had that came to this moment: one request, and no waiting.

        Nothing happens where ``torch.distributed`` isn't initialised (any more) or has no store; one that can't
        compare is warned of.

        :param moment: names the moment; the same on every rank, and passed again only with the same `parts`.
        :param when: the moment in words, for the error.
        :param parts: what must be the same, by name.
        :raises RanksDisagreeError: naming both ranks, their digests, and what differs.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return
        store = dist.distributed_c10d._get_default_store()
        if store is None:  # as with MPI
            return
        digest = short_sha(sorted(parts.items()))
        own: dict[str, Any] = {"rank": dist.get_rank(), "digest": digest, "parts": dict(parts)}
        try:
            said = store.compare_set(f"lhotse_oomfit/agreement/{self._name}/{moment}", "", json.dumps(own))
        except (RuntimeError, ConnectionError) as error:
            logger.warning("the ranks' batch sizes couldn't be compared: %s", str(error).partition("\n")[0])
            return
        first = json.loads(said)
        if first["digest"] == digest:
            return
        differing = [name for name, text in parts.items() if first["parts"].get(name) != text]
        raise RanksDisagreeError(
            f"all ranks must have the same batch sizes {when}, but {_say(first, differing)} and {_say(own, differing)}"
            f"; give all ranks the same list, profile or checkpoint: nodes may have read it from different files"
        )


def _say(each: Mapping[str, Any], differing: list[str]) -> str:
    what = ", ".join(f"{name} {clip(each['parts'].get(name, '-'))}" for name in differing)
    return f"rank {each['rank']} has {what} (digest {each['digest']})"


def new_agreement() -> Agreement | None:
    """An agreement of all ranks of this job; None in a job of one.

    Every rank must call it equally often, since agreements are numbered.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    global _num_made
    _num_made += 1
    return Agreement(str(_num_made))
