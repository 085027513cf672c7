"""Full-size steps in a row, as training runs them: what only shows there makes a size smaller."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext

from lhotse_oomfit.memory import MemoryBackend
from lhotse_oomfit.search import Search
from lhotse_oomfit.trial import Trial

__all__ = ["soak"]

logger = logging.getLogger(__name__)

_SHRINK, _SHRINK_GROWTH, _SHRINK_MOST = 0.03, 1.6, 0.12
"""An offender loses this share of its size, at least one example; the same bucket loses so many times more each further
time, up to the last (3%, 5%, 8%, 12%): few steps to a size that is far off, and never far below one that holds."""
_FAST_SHARE = 0.2
"""Share of the buckets in the first pass in fast mode."""
_LEAST_STEPS = 24
"""On an allocator that fragments: whether a step fits depends there on the shapes before it, of which two passes over
a few buckets show too little."""
_NUM_NAMED = 10


def soak(
    search: Search,
    run: Callable[[int, int], Trial],
    memory: MemoryBackend,
    *,
    cap_bytes: int,
    num_steps: int,
    fragments: bool,
    on_trial: Callable[[Trial], None],
) -> None:
    """Run passes over all buckets in shuffled order under a hard cap until one is clean; offenders shrink.

    In fast mode the first pass has a fifth of the buckets, and is the last if it is clean. Where an allocator that
    fragments runs out of memory, the shapes before have as large a part in it as this one: all buckets shrink, and two
    more passes follow. A warning is logged if the steps run out before every bucket of a pass had a clean step at its
    size.

    :param search: has the sizes, and takes back those that don't hold.
    :param run: one step with so many examples of a bucket, without giving the allocator's cache back.
    :param cap_bytes: where running out of memory would end the job, it isn't enforced, but held against what was
        reserved.
    :param num_steps: the most steps.
    :param fragments: whether the allocator fragments, so that its retries are no offence.
    :param on_trial: called after each step, when its bucket has its new size.
    """
    rng = random.Random(0)
    num_buckets = len(search.shapes)
    # The first pass begins with an empty cache, so it takes a second clean one to show that sizes hold.
    num_in_pass, least_passes = num_buckets, 2
    if search.mode == "fast":
        num_in_pass, least_passes = math.ceil(_FAST_SHARE * num_buckets), 1
    if fragments:
        least_passes = max(least_passes, math.ceil(_LEAST_STEPS / num_in_pass))
    offences: Counter[int] = Counter()
    held: set[int] = set()  # buckets whose latest step was clean
    num_left, num_passes, is_clean = num_steps, 0, False
    with nullcontext() if search.cautious else memory.cap(cap_bytes):
        while num_passes < least_passes or not is_clean:
            buckets = rng.sample(range(num_buckets), num_in_pass)
            num_passes, is_clean = num_passes + 1, True
            for k in buckets:
                if num_left == 0:
                    break
                num_left -= 1
                trial = run(k, search.sizes[k])
                offence = _offence(trial, cap_bytes if search.cautious else None, fragments=fragments)
                if offence is None:
                    held.add(k)
                else:
                    is_clean = False
                    if search.cautious:
                        memory.release()  # nothing else keeps what is reserved inside the budget
                    offenders = {k}
                    if fragments and trial.status == "oom":
                        offenders, least_passes = set(range(num_buckets)), num_passes + 2
                    smaller = {j: _smaller(search.sizes[j], offences[j]) for j in offenders}
                    logger.info(
                        "bucket %s: size %s %s in the soak; going on with %s%s",
                        k,
                        trial.size,
                        offence,
                        smaller[k],
                        ", and with less in all others too" if len(offenders) > 1 else "",
                    )
                    offences.update(offenders)
                    held -= offenders
                    for j, size in smaller.items():
                        search.lower(j, max(size, 1) + 1)
                    if smaller[k] < 1:
                        num_left = 0  # more steps change nothing
                on_trial(trial)
            if not is_clean:
                num_in_pass = num_buckets  # predicted sizes may be as wrong as those that were seen
            if num_left == 0:
                _warn_of(sorted({*buckets, *offences} - held), num_buckets, num_steps)
                break
    memory.release()


def _smaller(size: int, num_offences: int) -> int:
    """What an offender goes on with, zero if it can't get smaller."""
    share = min(_SHRINK * _SHRINK_GROWTH**num_offences, _SHRINK_MOST)
    return min(int(size * (1.0 - share)), size - 1)


def _offence(trial: Trial, limit_bytes: int | None, *, fragments: bool) -> str | None:
    """What a step did wrong, in words; None if nothing."""
    if trial.status == "ceiling":
        return "met another limit than memory"
    if trial.status == "oom":
        return "ran out of memory"
    if trial.usage.num_retries and not fragments:
        return "made the allocator retry"
    if limit_bytes is not None and trial.usage.reserved_bytes > limit_bytes:
        return "exceeded the budget"
    return None


def _warn_of(buckets: list[int], num_buckets: int, num_steps: int) -> None:
    """Say that the soak ended without a clean step of these buckets, if there are any."""
    if not buckets:
        return
    named = ", ".join(map(str, buckets[:_NUM_NAMED])) + (", …" if len(buckets) > _NUM_NAMED else "")
    logger.warning(
        "the soak ended before %s of %s buckets had a clean step at their size (%s), which may fail in training: its "
        "%s steps ran out, or not even one example is clean; raise num_soak_steps or lower memory_fraction",
        len(buckets),
        num_buckets,
        named,
        num_steps,
    )
