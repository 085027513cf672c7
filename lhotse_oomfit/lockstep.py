"""Trials that all ranks run together, for steps that one rank can't run alone.

Before each step the ranks vote whether all have built their batch; after it they take the largest peak of all, so that
every rank's search sees the same numbers and asks for the same next trial. Votes go over a gloo group of their own.

A rank that runs out of memory in the middle of such a step can't vote: its peers sit in a collective and wait for it.
So sizes are approached from below (:class:`~lhotse_oomfit.search.Search` with ``cautious=True``), and for the case that
it happens all the same, or that a rank dies, a thread on every rank watches the job's store, and ends a process whose
main thread doesn't come back.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from lhotse_oomfit.errors import CalibrationError, LockStepMemoryError, RankFailedError
from lhotse_oomfit.memory import MemoryBackend
from lhotse_oomfit.ranks import Failure, StoreRanks, first_line, lost_store
from lhotse_oomfit.solitude import unbound
from lhotse_oomfit.trial import TrainingStep, Trial, TrialRunner, Verdict, judge

__all__ = ["Crew", "LockStepRunner", "crew_of"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ASK_EVERY_S = 0.5
_GRACE_S = 5.0
"""How long a rank may take to notice by itself that another one failed, before its process is ended."""
_READY, _NO_MEMORY, _BROKEN = 0, 1, 2
_STATUSES: tuple[Literal["fits", "ceiling", "oom"], ...] = ("fits", "ceiling", "oom")


class Crew:
    """All ranks of a job, in step. See :func:`crew_of`."""

    def __init__(self, ranks: StoreRanks, group: Any) -> None:
        self._ranks = ranks
        self._group = group

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._ranks.rank

    def largest(self, *values: int) -> list[int]:
        """The largest of each value over all ranks.

        :raises RankFailedError: if another rank failed meanwhile.
        """
        tensor = torch.tensor(values, dtype=torch.int64)
        try:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise self.failed() from error
        return [int(value) for value in tensor]

    def told_by_first(self, value: T) -> T:
        """What the first rank passes, on every rank."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def vote(self, ready: int, bucket: int, size: int) -> int:
        """Hear whether all ranks are ready for a trial; returns the worst that any says.

        :raises CalibrationError: if the ranks are about to run different trials.
        """
        worst, *numbers = self.largest(ready, bucket, -bucket, size, -size)
        if numbers != [bucket, -bucket, size, -size]:
            raise CalibrationError(
                f"rank {self.rank} is about to try {size} examples of bucket {bucket}, another rank something else: "
                f"the ranks' models, data or versions differ"
            )
        return worst

    def tell(self, error: BaseException) -> None:
        """Let the other ranks end with this error."""
        self._ranks.tell(error)

    def failed(self) -> RankFailedError:
        """The error that says which rank failed; waits a moment for that rank to tell."""
        deadline = time.monotonic() + _GRACE_S / 2
        failure: Failure | None = None
        try:
            while failure is None and time.monotonic() < deadline:
                failure = self._ranks.failure()
                if failure is None:
                    time.sleep(0.1)
        except (RuntimeError, ConnectionError) as error:
            return lost_store(self.rank, error, where=" in a trial that all ranks run together")
        if failure is None:
            return RankFailedError(f"another rank than {self.rank} died in a trial that all ranks run together")
        self._ranks.acknowledge()
        return RankFailedError(
            f"rank {failure.rank} failed in a trial that all ranks run together: {failure.error}",
            rank=failure.rank,
            cause=failure.error,
        )


@contextmanager
def crew_of(ranks: StoreRanks, *, on_failure: Callable[[Failure], None] = lambda failure: None) -> Iterator[Crew]:
    """All ranks in step, watched; every rank must enter and leave. Inside :meth:`StoreRanks.gather`, whose heart beats.

    :param on_failure: called with the first failure of any rank, before this process is ended for it, in a thread.
    """
    stop = threading.Event()
    said: queue.Queue[Failure | None] = queue.Queue()
    watch = threading.Thread(target=_watch, args=(ranks, said, stop, on_failure), name="oomfit-lockstep", daemon=True)
    watch.start()  # before the group is made, which waits for all ranks too
    try:
        with unbound(dist.group.WORLD):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=ranks.calibration_timeout_s))
        yield Crew(ranks, group)
    finally:
        stop.set()
        said.put(None)  # wakes the thread, which sees that it's over
    dist.destroy_process_group(group)  # not after a failure: peers may be gone


def _watch(
    ranks: StoreRanks,
    said: queue.Queue[Failure | None],
    stop: threading.Event,
    on_failure: Callable[[Failure], None],
) -> None:
    """End this process if another rank fails and the main thread, waiting for it, doesn't notice."""
    # Asked from a thread of its own: while the process that serves the store is stopped, a request never ends.
    threading.Thread(target=_ask, args=(ranks, stop, said), name="oomfit-lockstep-ask", daemon=True).start()
    failure: Failure | None = None
    while failure is None:
        try:
            failure = said.get(timeout=ranks.heartbeat_timeout_s)
        except queue.Empty:
            failure = _told(ranks, 0, f"the job's store was silent for {ranks.heartbeat_timeout_s:.0f} s")
        if stop.is_set():
            return
    on_failure(failure)
    if failure.told_by == ranks.rank == failure.rank:
        return  # its own: the main thread is telling it
    if stop.wait(_GRACE_S):
        return
    text = (
        f"rank {ranks.rank} ends: rank {failure.rank} failed in a trial that all ranks run together, and this rank "
        f"waits for it in a collective: {failure.error}"
    )
    logger.critical("%s", text)
    sys.stderr.write(f"lhotse-oomfit: {text}\n")
    sys.stderr.flush()
    os._exit(1)


def _ask(ranks: StoreRanks, stop: threading.Event, said: queue.Queue[Failure | None]) -> None:
    """Put into `said` the first failure, or None as a sign that the store answers; watch the hearts meanwhile.

    The first rank watches all others, they watch the first.
    """
    watched = range(1, ranks.world_size) if ranks.rank == 0 else [0]
    last = {rank: (-1, time.monotonic()) for rank in watched}
    try:
        while not stop.wait(_ASK_EVERY_S):
            failure = ranks.failure()
            for rank, (beats, since) in last.items():
                now_beats, now = ranks.num_beats(rank), time.monotonic()
                if now_beats != beats:
                    last[rank] = (now_beats, now)
                elif failure is None and now - since > ranks.heartbeat_timeout_s:
                    silent = f"it was silent for {now - since:.0f} s; it was killed, stopped or hangs: see its log"
                    failure = ranks.fail(_told(ranks, rank, silent))
            if failure is not None:
                ranks.acknowledge()
            said.put(failure)
            if failure is not None:
                return
    except (RuntimeError, ConnectionError) as error:
        said.put(_told(ranks, 0, f"the connection to the job's store is lost ({first_line(error)})"))


def _told(ranks: StoreRanks, rank: int, error: str) -> Failure:
    return Failure(rank=rank, error=error, told_by=ranks.rank)


class LockStepRunner(TrialRunner):
    """Runs every trial on all ranks at once; each rank gets the same outcome, the worst of all.

    :param crew: the ranks; the other parameters as for :class:`TrialRunner`.
    """

    def __init__(
        self,
        *,
        crew: Crew,
        step: TrainingStep,
        memory: MemoryBackend,
        make_batch: Callable[[int, int], Any],
        keep_gradients: bool = False,
    ) -> None:
        self._progress = _Progress(step)
        super().__init__(
            step=self._progress, memory=memory, make_batch=self._make_together, keep_gradients=keep_gradients
        )
        self._crew = crew
        self._make_own = make_batch

    def run(self, bucket: int, size: int, *, with_optimizer: bool = False, release: bool = True) -> Trial:
        """As :meth:`TrialRunner.run`.

        :raises LockStepMemoryError: if this rank ran out of memory in the middle of the step.
        :raises RankFailedError: if another rank failed meanwhile.
        """
        progress = self._progress
        progress.began = progress.done = False
        try:
            trial = super().run(bucket, size, with_optimizer=with_optimizer, release=release)
        except RankFailedError:
            raise
        except BaseException as error:
            if progress.began and not progress.done and _is_about_peers(error):
                raise self._crew.failed() from error
            self._crew.tell(error)  # now, and not when all is restored: the others wait in a collective
            raise
        if progress.began and not progress.done:
            failed = LockStepMemoryError(
                f"rank {self._crew.rank} can't finish a trial step that all ranks run together, with {size} examples "
                f"of bucket {bucket}: {trial.error}. What was measured so far is kept: start the job again, and it "
                f"goes on from there with smaller sizes",
                bucket=bucket,
                size=size,
            )
            self._crew.tell(failed)
            raise failed
        return self._worst(trial)

    def _make_together(self, bucket: int, size: int) -> Any:
        """Build this rank's batch, and begin the step only if all ranks could build theirs."""
        try:
            batch = self._make_own(bucket, size)
        except Exception as error:
            memory = judge(error) in (Verdict.OOM, Verdict.HOST_OOM)
            self._crew.vote(_NO_MEMORY if memory else _BROKEN, bucket, size)
            raise
        worst = self._crew.vote(_READY, bucket, size)
        if worst == _NO_MEMORY:
            raise torch.OutOfMemoryError("CPU out of memory: another rank could not build its batch")
        if worst == _BROKEN:
            raise self._crew.failed()
        self._progress.began = True
        return batch

    def _worst(self, trial: Trial) -> Trial:
        usage = trial.usage
        status, allocated, reserved, retries, ooms, microseconds = self._crew.largest(
            _STATUSES.index(trial.status),
            usage.allocated_bytes,
            usage.reserved_bytes,
            usage.num_retries,
            usage.num_ooms,
            round(usage.seconds * 1e6),
        )
        return replace(
            trial,
            status=_STATUSES[status],
            error=trial.error if status == _STATUSES.index(trial.status) else "on another rank",
            usage=replace(
                usage,
                allocated_bytes=allocated,
                reserved_bytes=reserved,
                num_retries=retries,
                num_ooms=ooms,
                seconds=microseconds / 1e6,
            ),
        )


class _Progress:
    """A training step that knows how far it came."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self.began = False
        self.done = False

    def forward_backward(self, batch: Any) -> None:
        """See :class:`TrainingStep`."""
        self._step.forward_backward(batch)
        self.done = True

    def optimizer_step(self) -> None:
        """See :class:`TrainingStep`."""
        self._step.optimizer_step()

    def zero_grad(self) -> None:
        """See :class:`TrainingStep`."""
        self._step.zero_grad()


_PEERS = re.compile(r"gloo|NCCL|Connection (?:closed|reset) by peer|ProcessGroup|Broken pipe", re.IGNORECASE)
"""What collectives say where a peer is gone."""


def _is_about_peers(error: BaseException) -> bool:
    """Whether a collective failed, as it does where a peer is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(_PEERS.search(str(error))))
