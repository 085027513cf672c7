"""One rank measures, the others wait: over a key-value store, so that no collective's timeout can strike.

A collective would be the obvious way to wait, and the wrong one: NCCL's watchdog ends a job whose collective takes
ten minutes, and a gloo wait that timed out leaves its pair unusable. So the waiting ranks poll the store that
``torch.distributed`` was initialised with, and the measuring rank proves with a heartbeat that it is alive.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch.distributed as dist

from lhotse_oomfit.errors import LockStepMemoryError, RankFailedError, UnsupportedStrategyError

__all__ = ["Failure", "Ranks", "SingleRank", "StoreRanks", "current_ranks", "first_line", "lost_store"]

logger = logging.getLogger(__name__)

_POLL_S, _POLL_MOST_S = 0.1, 1.0
"""How often a waiting rank asks the store: at first, and in the long run. Hundreds of ranks ask the same store."""
_HEARTBEAT_S = 10.0
_LOG_EVERY_S = 60.0
_FAREWELL_S = 10.0
"""How long a rank stays until its word was read: if the first ended at once, the store's server would go too."""
_FAILED = "failed"
"""The key of the first failure of any rank."""


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

    def check(self) -> None:
        """Raise if another rank failed.

        :raises RankFailedError: with its error.
        """

    def tell(self, error: BaseException) -> None:
        """Let all other ranks end with this error of this rank; told once, later calls do nothing."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first failure of a job.

    :param rank: where it happened.
    :param error: what happened there.
    :param told_by: which rank says so; another one where a rank fell silent.
    :param trial: the bucket and size of the step that ran out of memory, if that is what failed.
    """

    rank: int
    error: str
    told_by: int
    trial: tuple[int, int] | None = None


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

    def check(self) -> None:
        """Nobody else can fail."""

    def tell(self, error: BaseException) -> None:
        """Nobody is there to be told."""


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
        self._has_told = False

    def first(self, work: Callable[[], str]) -> str:
        """See :meth:`Ranks.first`."""
        key = self._next_key("first")
        if self.rank > 0:
            return self._await(key, leader=0)
        with self._heart():
            return self._publish(key, work, readers=self._others)

    def gather(self, work: Callable[[], str]) -> list[str]:
        """See :meth:`Ranks.gather`. The first rank collects and tells the others, so that the store's work grows with
        the number of ranks and not with its square."""
        key = self._next_key("gather")
        with self._heart():
            if self.rank > 0:
                self._publish(f"{key}/{self.rank}", work, readers=[])
                return list(json.loads(self._await(key, leader=0)))

            def collect() -> str:
                return json.dumps([work(), *(self._await(f"{key}/{rank}", leader=rank) for rank in self._others)])

            return list(json.loads(self._publish(key, collect, readers=self._others)))

    @property
    def heartbeat_timeout_s(self) -> float:
        """Seconds of silence after which a rank counts as dead."""
        return self._timeouts.heartbeat_s

    @property
    def calibration_timeout_s(self) -> float:
        """Seconds that a rank waits for others in all."""
        return self._timeouts.total_s

    def num_beats(self, rank: int) -> int:
        """How often the heart of `rank` has beaten."""
        return int(self._store.add(f"heart/{rank}", 0))

    def fail(self, failure: Failure) -> Failure:
        """Tell all ranks of a failure; the first one counts, and is returned."""
        said = self._store.compare_set(_FAILED, "", json.dumps(vars(failure)))
        return _failure(said)

    def failure(self) -> Failure | None:
        """The first failure that any rank told; None while there is none.

        :raises RuntimeError: if the process that serves the store is gone.
        """
        return _failure(self._store.get(_FAILED)) if self._store.check([_FAILED]) else None

    def acknowledge(self) -> None:
        """Let the failed rank know that this one has read what happened."""
        self._store.set(f"{_FAILED}/read/{self.rank}", "1")

    def check(self) -> None:
        """See :meth:`Ranks.check`."""
        try:
            failure = self.failure()
        except (RuntimeError, ConnectionError) as error:
            raise lost_store(self.rank, error) from error
        if failure is not None:
            self.acknowledge()
            raise self._failed(failure)

    def tell(self, error: BaseException) -> None:
        """See :meth:`Ranks.tell`."""
        if self._has_told:
            return
        self._has_told = True
        failure = Failure(rank=self.rank, error=f"{type(error).__name__}: {error}", told_by=self.rank)
        if isinstance(error, RankFailedError) and error.rank is not None and error.cause is not None:
            failure = replace(failure, rank=error.rank, error=error.cause)  # somebody else's, passed on
        elif isinstance(error, LockStepMemoryError):
            failure = replace(failure, trial=(error.bucket, error.size))
        try:
            if self.fail(failure) == failure:  # else another one came first, and waits itself
                self._wait_for_readers(_FAILED, self._others, seconds=_FAREWELL_S)
        except (RuntimeError, ConnectionError) as lost:  # the process that serves the store is gone as well
            logger.warning("the other ranks can't be told that this one failed: %s", first_line(lost))

    def _failed(self, failure: Failure) -> RankFailedError:
        return RankFailedError(
            f"rank {failure.rank} failed while rank {self.rank} waited for it: {failure.error}",
            rank=failure.rank,
            cause=failure.error,
        )

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def _next_key(self, name: str) -> str:
        # Ranks make the same calls in the same order, so that counting gives them the same keys.
        self._num_calls += 1
        return f"{self._num_calls}/{name}"

    def _publish(self, key: str, work: Callable[[], str], *, readers: list[int]) -> str:
        """Run `work`, let the other ranks know what came of it, and stay until the `readers` have read it."""
        try:
            result = work()
        except BaseException as error:
            self.tell(error)
            raise
        try:
            self._store.set(key, json.dumps(result))
            missing = self._wait_for_readers(key, readers, seconds=self._timeouts.heartbeat_s)
        except (RuntimeError, ConnectionError) as error:
            raise lost_store(self.rank, error) from error
        if missing:
            silent = RankFailedError(
                f"rank {missing[0]} did not read what rank {self.rank} found within "
                f"{self._timeouts.heartbeat_s:g} s (heartbeat_timeout); it was killed, stopped or hangs: see its log",
                rank=missing[0],
                cause=f"silent for {self._timeouts.heartbeat_s:g} s",
            )
            self.tell(silent)
            raise silent
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
                logger.warning("the heartbeat to the waiting ranks failed: %s", first_line(error))
                return
            stop.wait(interval_s)

    def _wait_for_readers(self, key: str, readers: list[int], *, seconds: float) -> list[int]:
        """Wait until `readers` have read `key`; returns those that haven't after so many seconds."""
        deadline = time.monotonic() + seconds
        while readers:
            readers = [rank for rank in readers if not self._store.check([f"{key}/read/{rank}"])]
            if time.monotonic() > deadline:
                break
            if readers:
                time.sleep(_POLL_S)
        return readers

    def _await(self, key: str, *, leader: int) -> str:
        """Wait until `key` is set, as long as the leader's heart beats. One that has not begun to beat is only late."""
        inbox: queue.Queue[tuple[str, str]] = queue.Queue()
        stop = threading.Event()
        # The store is asked from a thread of its own: if the process that serves it is stopped, a request never ends.
        threading.Thread(target=self._watch, args=(key, leader, inbox, stop), name="oomfit-watch", daemon=True).start()
        try:
            result: str = json.loads(self._listen(inbox, leader))
        finally:
            stop.set()
        return result

    def _watch(self, key: str, leader: int, inbox: queue.Queue[tuple[str, str]], stop: threading.Event) -> None:
        """Poll the store, and put into `inbox` what it says: a beat, the message, or that it is lost."""
        beats, pause_s = 0, _POLL_S
        try:
            while not stop.is_set():
                inbox.put(("poll", ""))
                if self._store.check([key]):
                    message = self._store.get(key).decode()
                    self._store.set(f"{key}/read/{self.rank}", "1")
                    inbox.put(("message", message))
                    return
                if self._store.check([_FAILED]):
                    inbox.put(("failed", self._store.get(_FAILED).decode()))
                    self.acknowledge()
                    return
                if (now_beats := self.num_beats(leader)) != beats:
                    beats = now_beats
                    inbox.put(("beat", ""))
                stop.wait(pause_s)
                pause_s = min(1.02 * pause_s, _POLL_MOST_S)
        except (RuntimeError, ConnectionError) as error:
            inbox.put(("lost", first_line(error)))

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
            if what == "failed":
                raise self._failed(_failure(text))
            if what != "nothing":
                last_poll = now  # the store answers
            if what == "beat":
                last_beat = now
            if what == "lost":
                raise lost_store(self.rank, text)
            silent_s = now - min(last_poll, last_beat or last_poll)
            if silent_s > self._timeouts.heartbeat_s:
                raise RankFailedError(
                    f"rank {leader} was silent for {silent_s:.0f} s while rank {self.rank} waited for it "
                    f"(heartbeat_timeout is {self._timeouts.heartbeat_s:g} s); it was killed, stopped or hangs: see "
                    f"its log",
                    rank=leader,
                    cause=f"silent for {silent_s:.0f} s",
                )
            if now - started > self._timeouts.total_s:
                waited = f"waited {now - started:.0f} s for rank {leader} to calibrate"
                late = RankFailedError(
                    f"rank {self.rank} {waited} (calibration_timeout is {self._timeouts.total_s:g} s); raise it if "
                    f"that is what it takes",
                    rank=self.rank,
                    cause=waited,
                )
                self.tell(late)
                raise late
            if now - last_log > _LOG_EVERY_S:
                last_log = now
                logger.info("waiting for rank %s to calibrate (%.0f s so far)", leader, now - started)


def first_line(error: object) -> str:
    """The first line of an error's text; torch's go on with a trace of C++."""
    return str(error).partition("\n")[0]


def lost_store(rank: int, error: object, *, where: str = "") -> RankFailedError:
    """The error that says that this rank can no longer reach the store.

    :param error: what asking it raised, or the text of that.
    """
    return RankFailedError(
        f"rank {rank} lost the connection to the job's store{where}, which usually means that the process serving it "
        f"died ({first_line(error)}); see its log"
    )


def _failure(text: bytes | str) -> Failure:
    said = json.loads(text)
    said["trial"] = tuple(said["trial"]) if said["trial"] else None
    return Failure(**said)


_num_sessions = 0


def current_ranks(*, heartbeat_timeout_s: float = 60.0, calibration_timeout_s: float = 7200.0) -> Ranks:
    """The job that this process belongs to, by ``torch.distributed``; a job of one where that isn't initialised.

    Every rank must call it equally often, since the keys of its store are numbered.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SingleRank()
    global _num_sessions
    _num_sessions += 1
    shared = dist.distributed_c10d._get_default_store()
    if shared is None:
        raise UnsupportedStrategyError(
            f"torch.distributed must have a key-value store for ranks to wait for each other, its backend "
            f"{dist.get_backend()} has none; initialise it with gloo or nccl"
        )
    return StoreRanks(
        _own_store(
            shared,
            f"lhotse_oomfit/{_num_sessions}",
            heartbeat_s=heartbeat_timeout_s,
            total_s=calibration_timeout_s,
        ),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        heartbeat_timeout_s=heartbeat_timeout_s,
        calibration_timeout_s=calibration_timeout_s,
    )


def _own_store(shared: Any, prefix: str, *, heartbeat_s: float, total_s: float) -> Any:
    """A connection of our own to the job's store.

    While one thread waits for a key, as NCCL does when a group first communicates, a TCPStore's connection serves no
    other thread of its process: hearts would stand still. The keys that it sees begin with a word of the first rank's,
    since a launcher that starts a job again keeps the store, and tells jobs apart by a prefix of `shared`.
    """
    prefixed: Any = dist.PrefixStore(prefix, shared)  # type: ignore[attr-defined]
    served: Any = shared
    while hasattr(served, "underlying_store"):
        served = served.underlying_store
    if not isinstance(served, dist.TCPStore) or not served.host:  # type: ignore[attr-defined]
        return prefixed
    said: queue.Queue[Any] = queue.Queue()
    # From a thread of its own: if the process that serves the store is stopped, a request never ends.
    threading.Thread(target=_connect, args=(prefixed, served, said), name="oomfit-connect", daemon=True).start()
    deadline = time.monotonic() + total_s
    while time.monotonic() < deadline:
        try:
            answer = said.get(timeout=heartbeat_s)
        except queue.Empty:
            raise RankFailedError(
                f"the job's store was silent for {heartbeat_s:g} s (heartbeat_timeout); the process that serves it was "
                f"killed, stopped or hangs: see its log"
            ) from None
        if isinstance(answer, Exception):
            raise lost_store(dist.get_rank(), answer) from answer
        if answer is not None:
            return answer
    raise RankFailedError(f"rank 0 did not begin to calibrate within {total_s:g} s (calibration_timeout)")


def _connect(prefixed: Any, served: Any, said: queue.Queue[Any]) -> None:
    """Put into `said` the new connection, or an error; None as a sign that the store answers."""
    try:
        if dist.get_rank() == 0:
            prefixed.set("word", uuid.uuid4().hex)
        while not prefixed.check(["word"]):
            said.put(None)
            time.sleep(_POLL_S)
        client = dist.TCPStore(  # type: ignore[attr-defined]
            served.host, served.port, is_master=False, wait_for_workers=False
        )
        said.put(dist.PrefixStore(f"lhotse_oomfit/{prefixed.get('word').decode()}", client))  # type: ignore[attr-defined]
    except (RuntimeError, ConnectionError) as error:
        said.put(error)
