"""How to calibrate, in one validated value; the CLI, the configuration and every entry point share it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lhotse_oomfit.amounts import parse_bytes
from lhotse_oomfit.errors import InvalidArgumentError

__all__ = ["CalibrationOptions", "check_option_names", "check_recalibrate"]


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """How to calibrate; each of these is a keyword argument of :func:`calibrate` as well.

    :param memory_fraction: share of the device's memory that a training step may take, over 0 and at most 1.
    :param memory_limit: bytes or a string such as ``"600MiB"``: what the device counts as having. Needed on a CPU.
    :param reserve: bytes or a string: kept out of the budget for memory that appears only later, such as an EMA copy
        of the parameters made at its first step.
    :param cache: where the profile is kept: None for the user's cache directory (or ``$OOMFIT_CACHE_DIR``), a path
        ending in ``.yaml`` for that file, another path for that directory, False to keep nothing.
    :param recalibrate: ``"auto"`` measures when no profile matches; ``"always"`` measures; the environment variable
        ``OOMFIT_RECALIBRATE`` overrides it.
    :param verify_on_load: whether a profile that was loaded is used only if its two tightest buckets still train inside
        the budget, which takes two steps.
    :param max_batch_size: no bucket gets a larger size.
    :param num_sample_cuts: how many cuts are read ahead to choose a template and to see how many tokens occur.
    :param num_soak_steps: the most steps of the closing soak on a CUDA card, which ends when a pass over all buckets
        was clean; None for eight per bucket, but at least 48; 0 for no soak.
    :param mode: ``"verify"`` runs a training step at every bucket's size; ``"fast"`` runs about a fifth of the buckets
        and predicts the others, a few percent smaller.
    :param objective: ``"memory"`` for the largest batches that fit; ``"throughput"`` for the smallest that train nearly
        as fast, which takes two to four more steps per bucket.
    :param throughput_share: how much of the largest batch's examples per second ``"throughput"`` may give away, from 0
        to below 1; without that objective it counts for nothing.
    :param ranks: who measures in a job of several ranks. ``"rank0"``: the first, while the others wait. ``"shard"``:
        each rank some of the buckets at the same time, if their cards and budgets are equal, else the first all.
        ``"each"``: every rank all buckets, and the smallest size counts. ``"lockstep"``: all ranks every trial
        together, as is done anyway where one rank can't run a step alone (FSDP, tensor parallel, a static graph).
    :param heartbeat_timeout: seconds of silence after which another rank counts as dead.
    :param calibration_timeout: seconds that ranks wait for the measuring one in all.
    :param progress: whether to show a progress bar; None to show one at a terminal.
    :param world_size: how many ranks the job has that the profile is for; None for those of this process. Only
        whether there are several counts.
    :raises InvalidArgumentError: for a value out of its range.
    """

    memory_fraction: float = 0.9
    memory_limit: str | int | None = None
    reserve: str | int | None = None
    cache: str | os.PathLike[str] | Literal[False] | None = None
    recalibrate: Literal["auto", "always"] = "auto"
    verify_on_load: bool = False
    max_batch_size: int | None = None
    num_sample_cuts: int = 1000
    num_soak_steps: int | None = None
    mode: Literal["verify", "fast"] = "verify"
    objective: Literal["memory", "throughput"] = "memory"
    throughput_share: float = 0.02
    ranks: Literal["rank0", "shard", "each", "lockstep"] = "rank0"
    heartbeat_timeout: float = 60.0
    calibration_timeout: float = 7200.0
    progress: bool | None = None
    world_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("memory_fraction", "throughput_share", "heartbeat_timeout", "calibration_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidArgumentError(f"{name} must be a number, it is {value!r}")
        for name in ("memory_limit", "reserve"):
            _check_amount(name, getattr(self, name))
        _check_cache(self.cache)
        if not isinstance(self.verify_on_load, bool):
            raise InvalidArgumentError(f"verify_on_load must be true or false, it is {self.verify_on_load!r}")
        if self.progress is not None and not isinstance(self.progress, bool):
            raise InvalidArgumentError(f"progress must be true, false or None, it is {self.progress!r}")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise InvalidArgumentError(
                f"memory_fraction must lie above 0 and at most at 1, it is {self.memory_fraction!r}; pass for instance "
                f"0.9"
            )
        check_recalibrate("recalibrate", self.recalibrate)
        if self.mode not in ("verify", "fast"):
            raise InvalidArgumentError(f"mode must be 'verify' or 'fast', it is {self.mode!r}")
        if self.objective not in ("memory", "throughput"):
            raise InvalidArgumentError(f"objective must be 'memory' or 'throughput', it is {self.objective!r}")
        if not 0.0 <= self.throughput_share < 1.0:
            raise InvalidArgumentError(
                f"throughput_share must be at least 0 and below 1, it is {self.throughput_share!r}; pass for instance "
                f"0.02"
            )
        if self.ranks not in ("rank0", "shard", "each", "lockstep"):
            raise InvalidArgumentError(f"ranks must be 'rank0', 'shard', 'each' or 'lockstep', it is {self.ranks!r}")
        for name in ("max_batch_size", "num_sample_cuts", "world_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidArgumentError(f"{name} must be a whole number of at least 1, it is {value!r}")
        soak = self.num_soak_steps
        if soak is not None and (isinstance(soak, bool) or not isinstance(soak, int) or soak < 0):
            raise InvalidArgumentError(f"num_soak_steps must be a whole number of at least 0, it is {soak!r}")
        for name in ("heartbeat_timeout", "calibration_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(f"{name} must be seconds above 0, it is {getattr(self, name)!r}")


def _check_amount(name: str, amount: object) -> None:
    if amount is None:
        return
    try:
        parse_bytes(amount)  # type: ignore[arg-type]
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"{name} must be bytes or a text such as '600MiB' or '2GB', or None, it is {amount!r}"
        ) from error


def _check_cache(cache: object) -> None:
    if cache is None or cache is False or (isinstance(cache, (str, os.PathLike)) and cache != ""):
        return
    raise InvalidArgumentError(
        f"cache must be a directory, a path ending in .yaml, None (the user's cache) or False (store nothing), it is "
        f"{cache!r}"
    )


def check_option_names(names: Iterable[object], known: Iterable[str]) -> None:
    """Refuse a name that isn't known, and say which one may have been meant.

    :raises InvalidArgumentError: naming it.
    """
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            raise InvalidArgumentError(
                f"{name!r} is no option of a calibration"
                + (f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}")
            )


def check_recalibrate(name: str, value: str) -> None:
    """Refuse what is no way to recalibrate.

    :param name: where the value comes from, for the error.
    :raises InvalidArgumentError: for another value than ``"auto"`` and ``"always"``.
    """
    if value not in ("auto", "always"):
        raise InvalidArgumentError(f"{name} must be 'auto' or 'always', it is {value!r}")
