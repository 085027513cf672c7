"""One rank measures, the others wait: over a key-value store, so that no collective's timeout can strike.

A collective would be the obvious way to wait, and the wrong one: NCCL's watchdog ends a job whose collective takes
ten minutes, and a gloo wait that timed out leaves its pair unusable. So the waiting ranks poll the store that
``torch.distributed`` was initialised with, and the measuring rank proves with a heartbeat that it is alive.

Inside a trial the measuring rank must not meet its peers either: model code asks ``torch.distributed`` how long the
longest input of all ranks is (NeMo's ConformerEncoder) or averages batch statistics (SyncBatchNorm). So its default
process group is a group of one rank for that while, see :func:`alone`.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from lhotse_oomfit.errors import RankFailedError

__all__ = ["Ranks", "SingleRank", "StoreRanks", "alone", "current_ranks"]

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_HEARTBEAT_S = 10.0
_LOG_EVERY_S = 60.0
_FAREWELL_S = 10.0
"""How long rank 0 stays until the others have read its word: if it ended at once, the store's server would go too."""


class Ranks(Protocol):
    """All processes of a job, seen from one of them."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    @property
    def world_size(self) -> int:
        """The number of processes."""

    def first(self, work: Callable[[], str]) -> str:
        """Run `work` on rank 0 while the others wait; every rank gets its result.

        :raises RankFailedError: on the waiting ranks, if rank 0 failed, fell silent or took too long; with its error.
        """

    def gather(self, work: Callable[[], str]) -> list[str]:
        """What `work` gives on every rank, in the order of ranks.

        :raises RankFailedError: if another rank's `work` failed, with its error, or if a rank fell silent.
        """


class SingleRank:
    """A job of one process."""

    rank = 0
    world_size = 1

    def first(self, work: Callable[[], str]) -> str:
        """Run `work`."""
        return work()

    def gather(self, work: Callable[[], str]) -> list[str]:
        """What `work` gives."""
        return [work()]


@dataclass(frozen=True, kw_only=True)
class _Timeouts:
    heartbeat_s: float
    total_s: float


class StoreRanks:
    """Several processes with a common key-value store.

    :param store: a ``torch.distributed`` store (TCPStore, FileStore, HashStore), the same one on every rank.
    :param heartbeat_timeout_s: a rank that is silent for so long counts as dead.
    :param calibration_timeout_s: how long the others wait for rank 0 in all.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        heartbeat_timeout_s: float = 60.0,
        calibration_timeout_s: float = 7200.0,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._timeouts = _Timeouts(heartbeat_s=heartbeat_timeout_s, total_s=calibration_timeout_s)
        self._num_calls = 0

    def first(self, work: Callable[[], str]) -> str:
        """See :meth:`Ranks.first`."""
        key = self._next_key("first")
        if self.rank > 0:
            return self._await(key, leader=0)
        with self._heart():
            return self._publish(key, work)

    def gather(self, work: Callable[[], str]) -> list[str]:
        """See :meth:`Ranks.gather`."""
        key = self._next_key("gather")
        with self._heart():
            own = self._publish(f"{key}/{self.rank}", work)
            return [own if r == self.rank else self._await(f"{key}/{r}", leader=r) for r in range(self.world_size)]

    def _next_key(self, name: str) -> str:
        # Ranks make the same calls in the same order, so that counting gives them the same keys.
        self._num_calls += 1
        return f"{self._num_calls}/{name}"

    def _publish(self, key: str, work: Callable[[], str]) -> str:
        """Run `work`, and let the other ranks know what came of it."""
        try:
            result = work()
        except BaseException as error:
            self._store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
            self._wait_for_readers(key)
            raise
        self._store.set(key, json.dumps({"result": result}))
        if self.rank == 0:
            self._wait_for_readers(key)
        return result

    @contextmanager
    def _heart(self) -> Iterator[None]:
        """Prove while inside that this rank is alive."""
        stop = threading.Event()
        interval_s = min(_HEARTBEAT_S, self._timeouts.heartbeat_s / 4)
        thread = threading.Thread(target=self._beat, args=(stop, interval_s), name="oomfit-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(interval_s)

    def _beat(self, stop: threading.Event, interval_s: float) -> None:
        while not stop.is_set():
            try:
                self._store.add(f"heart/{self.rank}", 1)
            except (RuntimeError, ConnectionError) as error:
                logger.warning("the heartbeat to the waiting ranks failed: %s", error)
                return
            stop.wait(interval_s)

    def _wait_for_readers(self, key: str) -> None:
        deadline = time.monotonic() + _FAREWELL_S
        readers = [f"{key}/read/{rank}" for rank in range(self.world_size) if rank != self.rank]
        while time.monotonic() < deadline:
            try:
                if self._store.check(readers):
                    return
            except (RuntimeError, ConnectionError):
                return
            time.sleep(_POLL_S)

    def _await(self, key: str, *, leader: int) -> str:
        """Wait until `key` is set, as long as the leader's heart beats. One that has not begun to beat is only late."""
        inbox: queue.Queue[tuple[str, str]] = queue.Queue()
        stop = threading.Event()
        # The store is asked from a thread of its own: if the process that serves it is stopped, a request never ends.
        threading.Thread(target=self._watch, args=(key, leader, inbox, stop), name="oomfit-watch", daemon=True).start()
        try:
            message = json.loads(self._listen(inbox, leader))
        finally:
            stop.set()
        if "error" in message:
            raise RankFailedError(f"rank {leader} failed while rank {self.rank} waited for it: {message['error']}")
        result: str = message["result"]
        return result

    def _watch(self, key: str, leader: int, inbox: queue.Queue[tuple[str, str]], stop: threading.Event) -> None:
        """Poll the store, and put into `inbox` what it says: a beat, the message, or that it is lost."""
        beats = 0
        try:
            while not stop.is_set():
                inbox.put(("poll", ""))
                if self._store.check([key]):
                    message = self._store.get(key).decode()
                    self._store.set(f"{key}/read/{self.rank}", "1")
                    inbox.put(("message", message))
                    return
                if (now_beats := self._store.add(f"heart/{leader}", 0)) != beats:
                    beats = now_beats
                    inbox.put(("beat", ""))
                stop.wait(_POLL_S)
        except (RuntimeError, ConnectionError) as error:
            inbox.put(("lost", str(error).partition("\n")[0]))

    def _listen(self, inbox: queue.Queue[tuple[str, str]], leader: int) -> str:
        started = last_log = last_poll = time.monotonic()
        last_beat: float | None = None
        while True:
            try:
                what, text = inbox.get(timeout=_POLL_S)
            except queue.Empty:
                what, text = "nothing", ""
            now = time.monotonic()
            if what == "message":
                return text
            if what != "nothing":
                last_poll = now  # the store answers
            if what == "beat":
                last_beat = now
            if what == "lost":
                raise RankFailedError(
                    f"rank {self.rank} lost the connection to the job's store while it waited for rank {leader}, "
                    f"which usually means that the process serving it died ({text}); see its log"
                )
            silent_s = now - min(last_poll, last_beat or last_poll)
            if silent_s > self._timeouts.heartbeat_s:
                raise RankFailedError(
                    f"rank {leader} was silent for {silent_s:.0f} s while rank {self.rank} waited for it "
                    f"(heartbeat_timeout is {self._timeouts.heartbeat_s:g} s); it was killed, stopped or hangs: see "
                    f"its log"
                )
            if now - started > self._timeouts.total_s:
                raise RankFailedError(
                    f"rank {self.rank} waited {now - started:.0f} s for rank {leader} to calibrate "
                    f"(calibration_timeout is {self._timeouts.total_s:g} s); raise it if that is what it takes"
                )
            if now - last_log > _LOG_EVERY_S:
                last_log = now
                logger.info("waiting for rank %s to calibrate (%.0f s so far)", leader, now - started)


_num_sessions = 0


def current_ranks(*, heartbeat_timeout_s: float = 60.0, calibration_timeout_s: float = 7200.0) -> Ranks:
    """The job that this process belongs to, by ``torch.distributed``; a job of one where that isn't initialised.

    Every rank must call it equally often, since the keys of its store are numbered.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SingleRank()
    global _num_sessions
    _num_sessions += 1
    store = dist.distributed_c10d._get_default_store()
    return StoreRanks(
        dist.PrefixStore(  # type: ignore[attr-defined]
            f"lhotse_oomfit/{_num_sessions}", store
        ),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        heartbeat_timeout_s=heartbeat_timeout_s,
        calibration_timeout_s=calibration_timeout_s,
    )


@contextmanager
def alone() -> Iterator[None]:
    """While inside, this process's default group is a group of itself: collectives return at once, with its own values.

    Patching ``is_initialized`` instead would miss names that were bound at import, and ``get_world_size``.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    world: Any = dist.group
    everyone = world.WORLD
    # Local synchronisation: only the members of the group call, and it has only one.
    solo = dist.new_group([dist.get_rank()], use_local_synchronization=True, timeout=timedelta(minutes=10))
    world.WORLD = solo
    try:
        yield
    finally:
        world.WORLD = everyone
        dist.destroy_process_group(solo)
