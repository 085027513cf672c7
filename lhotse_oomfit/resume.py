"""Going on in the middle of an epoch: what a sampler saves, what it takes from a state, and what it refuses.

The batches before the position are drawn again, and nobody gets them: the rest is then what it would have been.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from operator import index
from typing import Any

import torch

from lhotse_oomfit.batch_rules import describe_bins, digests, restored_bins, restored_edges
from lhotse_oomfit.epoch import EpochSampler
from lhotse_oomfit.errors import InvalidArgumentError, ResumeError
from lhotse_oomfit.position import OPTIONS, STATE_KEY, Position, num_processes, process_rank
from lhotse_oomfit.rank_share import share_of
from lhotse_oomfit.source import counters, counting_unknown, inexact_because, sequential
from lhotse_oomfit.turns import own_number, play

__all__ = ["ResumableSampler"]

logger = logging.getLogger(__name__)

_OPTIONS = {name: f"_{name}" if name == "max_buffer_size" else name for name in OPTIONS}  # by name, the attribute
_FROM_STATE = (
    *_OPTIONS.values(),
    *(
        "duration_bins",
        "buffer_size",
        "shuffle",
        "drop_last",
        "consistent_ids",
        "max_duration",
        "max_cuts",
        "quadratic_duration",
    ),
)


class ResumableSampler(EpochSampler):
    """An epoch's sampler whose state another one continues, from any batch."""

    _bins_are_estimated: bool
    """Whether the bins come from cuts, so that other cuts may have made others."""
    _on_resume: str
    """What becomes of a state that can't be continued here: ``"error"`` or ``"new_epoch"``."""
    _loaded: Position | None
    """A loaded state that is still to be continued."""

    def _init_epoch(self) -> None:
        super()._init_epoch()
        self._loaded = None

    # Saving

    @property
    def num_batches_drawn(self) -> int:
        """How many batches of this epoch were drawn here, or lie before a loaded state that isn't continued yet.

        Of an iterable-style loader, whose workers draw, that is the number that the loaded state stands for.
        """
        return self._drawn if self._loaded is None else self._loaded.num_batches

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches that this sampler has drawn; see :meth:`state_dict_at` for prefetched ones."""
        constraint, self.constraint = self.constraint, None  # Lhotse refuses custom ones, which make no difference here
        try:
            state: dict[str, Any] = super().state_dict()
        finally:
            self.constraint = constraint
        state[STATE_KEY] = (self._here() if self._loaded is None else self._loaded).encode()
        return state

    def state_dict_at(self, num_batches: int, *, num_workers: int = 0) -> dict[str, Any]:
        """The state as it was when this rank had *consumed* ``num_batches`` batches of the epoch.

        A loader with workers is ahead of training: the batches that it prefetched would be lost in a resumed run
        if the state were that of :meth:`state_dict`. Call this in the main process, on the sampler that the loader
        was made with, and give the result to :meth:`load_state_dict` of a new sampler before its loader is iterated.
        After a resume, go on counting from :attr:`num_batches_drawn`, as it is right after :meth:`load_state_dict`
        (also where workers then refuse the state and, with ``on_resume="new_epoch"``, start the epoch anew).

        Map-style (the loader iterates the sampler in the main process): leave ``num_workers`` at 0, whatever the
        loader has. Iterable-style (each worker iterates a copy of the sampler): pass the loader's ``num_workers``;
        workers have handed out batches in turn. After a resume they play each other's parts where the next turn isn't
        that of worker 0 (:mod:`lhotse_oomfit.turns`), so batches come in the same order. That holds until some worker
        has ended its epoch, after which the others take more turns, so a state taken that late may repeat batches.

        :param num_batches: batches of this epoch that training has finished.
        :param num_workers: of an iterable-style loader.
        :raises InvalidArgumentError: for a negative number, or more map-style batches than were drawn.
        """
        if num_batches < 0 or num_workers < 0:
            raise InvalidArgumentError(
                f"num_batches and num_workers must be at least 0, they are {num_batches} and {num_workers}"
            )
        if num_workers == 0 and num_batches > self.num_batches_drawn:
            raise InvalidArgumentError(
                f"num_batches must be at most the {self.num_batches_drawn} batches that were drawn, it is "
                f"{num_batches}; for an iterable-style loader, pass its num_workers"
            )
        state = self.state_dict()
        # Workers take over what was applied since only with their next iter().
        start = self._workers.start() if num_workers > 0 else None
        if start is not None and start.anew and self._loaded is not None:
            self._workers.num_lost = self._loaded.num_batches
            self._forget()
            state = self.state_dict()
        num_batches = max(0, num_batches - self._workers.num_lost)
        sizes = self._sizes if start is None or self._sizes is None else start.sizes
        here = self._here() if self._loaded is None else self._loaded.with_sizes(sizes)
        here = here.at(num_batches, num_workers)
        if start is not None:
            here = replace(here, counters=start.counters)
            if start.epoch != self.epoch:
                logger.warning(
                    "the state's epoch is %d, but the workers are in epoch %d: call set_epoch() in the main process, "
                    "instead of auto_increment_epoch=True",
                    self.epoch,
                    start.epoch,
                )
        if self.bins is not None and not here.schedule:
            here = replace(here, schedule=[([0], list(sizes or ()))])
        state[STATE_KEY] = here.encode()
        return state

    def _here(self) -> Position:
        worker = torch.utils.data.get_worker_info()
        return Position(
            drawn={0 if worker is None else worker.id: self._drawn},
            num_workers=0 if worker is None else worker.num_workers,
            num_processes=num_processes(),
            rank=process_rank(),
            seed=self._epoch_seed.number,
            worker_seed=self._epoch_seed.worker_seed if self.seed == "trng" else 0,
            schedule=[([start], sizes) for start, sizes in self._schedule],
            bins=describe_bins(self.bins, self.duration_bins),
            options={
                "concurrent": self.concurrent,
                "sync_buckets": self.sync_buckets,
                "max_buffer_size": self._max_buffer_size,
            },
            counters=self._counters or counters(self.cuts),
            rules=digests(self._selection()),
        )

    # Loading

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the state was taken. As in Lhotse, ``state_dict`` is emptied.

        The batches before it are drawn again with the sizes they had, at the next ``iter()`` (in the worker processes
        where those iterate the sampler), which costs reading the source up to there. If this sampler has other sizes
        than the state's last ones, they hold from there on.

        :raises ResumeError: when the state can't be continued here: another number of ranks or workers, other bins,
            another seed, a state that is damaged or that Lhotse's own sampler saved; ``state_dict`` is left as it
            was. With ``on_resume="new_epoch"`` the epoch starts anew instead.
        """
        self._num_changes += 1
        self._replayed = ""
        before = {name: getattr(self, name) for name in _FROM_STATE}
        kept = self.__dict__ | {"_diagnostics": deepcopy(self.diagnostics)}
        try:
            loaded = Position.parse(state_dict)
            # Measured sizes belong to the bins they were measured for.
            if self._bins_are_estimated and not self.is_auto:
                self._take_bins(loaded.bins)
            loaded.check(self._here())
            for name in ("world_size", "seed"):
                if state_dict.get(name) != getattr(self, name):
                    raise ResumeError(
                        f"the state was saved with {name}={state_dict.get(name)!r}, this sampler has "
                        f"{getattr(self, name)!r}"
                    )
            _load_lhotse_state(super().load_state_dict, state_dict)
        except ResumeError as problem:
            self.__dict__.update(kept)
            self._refuse(problem, _epoch_of(state_dict, self.epoch))
            state_dict.clear()
            return
        state_dict.clear()
        self._close()
        for name, attribute in _OPTIONS.items():
            setattr(self, attribute, loaded.options[name])
        for name, old in before.items():
            if getattr(self, name) != old:
                logger.warning("%s becomes %s, as in the loaded state", name.lstrip("_"), getattr(self, name))
        self._loaded = loaded
        self._replayed = loaded.replay(in_step=self.world_size > 1)
        self._workers.expect(loaded.num_workers)
        self._over = False
        self._drawn = 0
        self._schedule = []
        self._epoch_seed.restore(loaded.seed, loaded.worker_seed)
        self._counters = list(loaded.counters)
        self._workers.tell(self.epoch, self._sizes)

    def _take_bins(self, described: list[Any]) -> None:
        """Work with the bins of a state, if they could have been estimated here from other cuts."""
        if self.bins is None:
            self.duration_bins = restored_edges(described, self.duration_bins) or self.duration_bins
            return
        bins = restored_bins(described, self.bins)
        if bins is not None:
            self.bins, self.duration_bins = bins, bins.as_lists()

    def _fast_forward(self) -> None:
        """Lhotse calls this at the end of ``load_state_dict``; here, replay waits for ``iter()`` or ``next()``."""

    def _refuse(self, problem: ResumeError, epoch: int) -> None:
        if self._on_resume == "error":
            raise ResumeError(
                f"the sampler's state must come from the same set-up: {problem}; restore that, or pass "
                f"on_resume='new_epoch' to start the epoch anew"
            ) from problem
        # Not the next one: the trainer counts this epoch as the one that it is in, and will ask for the next.
        logger.warning("not resumed in the middle of epoch %d: %s; the epoch starts anew", epoch, problem)
        self._close()
        self._forget()
        self._over = False
        self.allow_iter_to_reset_state()
        self.set_epoch(epoch)

    # Continuing

    def _goes_on(self) -> bool:
        return super()._goes_on() and not (self._loaded is not None and self._workers.was_continued())

    def _forget(self) -> None:
        super()._forget()
        self._loaded = None

    def _open(self) -> None:
        super()._open()
        self._loaded = None

    def _rebuild(self) -> None:
        """Draw the batches of this epoch up to the position again: after a load, in a copy, in a forked process."""
        target = self._drawn
        if self._loaded is not None:
            try:
                target = self._play_part(self._loaded)
            except ResumeError as problem:
                self._refuse(problem, self.epoch)
                target, self._is_anew = 0, True
        self._draw_again(target)

    def _draw_again(self, target: int) -> None:
        """Start the epoch and draw its first ``target`` batches, which nobody gets."""
        if target:
            again = ", which reads its archives from their start" if sequential(self.cuts) else ""
            logger.info("drawing %d batches of epoch %d again%s", target, self.epoch, again)
        self._open()
        self._drawn = 0
        while self._drawn < target:
            step = self._advance()
            if step is None:
                logger.warning(
                    "the source ended after %d of %d batches that were drawn before: it holds fewer cuts than when the "
                    "state was saved",
                    self._drawn,
                    target,
                )
                break
            self._note_kept(share_of(self.rank, step))

    def _play_part(self, loaded: Position) -> int:
        """Take this process's part in the loaded state; how many batches that is.

        :raises ResumeError: where another number of workers sampled.
        """
        worker = torch.utils.data.get_worker_info()
        num_workers = 0 if worker is None else worker.num_workers
        if loaded.num_batches == 0 and loaded.num_workers != num_workers:
            return 0  # nothing depends on who sampled
        loaded.check_workers(num_workers)
        number = loaded.part_of(own_number() or 0)
        if not play(number):
            number = own_number() or 0
            logger.warning("the workers' turns begin anew: batches come in another order")
        drawn = loaded.drawn[number]
        self._schedule = loaded.with_sizes(self._sizes).schedule_of(number)
        self._warn_if_inexact(loaded)
        return drawn

    def _warn_if_inexact(self, loaded: Position) -> None:
        reason = inexact_because(self.cuts)
        if self.seed == "trng" and loaded.num_workers > 0 and loaded.rank != process_rank():
            reason = f"seed='trng' was drawn by rank {loaded.rank}, and this is rank {process_rank()}"
        if reason is not None and loaded.num_batches > 0:
            logger.warning("resume is not exact: %s; use whole numbers as seeds", reason)
        counting = None if self.epoch == 0 else counting_unknown(self.cuts)
        if counting is not None and loaded.num_batches > 0:
            logger.warning(
                "resume may not be exact: %s, which isn't part of the state; shuffle by the sampler's epoch, or not "
                "in the source",
                counting,
            )
        others = loaded.other_rules(digests(self._selection()))
        if others and loaded.num_batches > 0:
            logger.warning(
                "resume is not exact: %s differs from when the state was saved, so that cuts may repeat or be missing "
                "in this epoch",
                " and ".join(others),
            )


def _load_lhotse_state(load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
    """Load Lhotse's part of a state, which is left as it is.

    :raises ResumeError: when something in it is missing or isn't what it should be.
    """
    state = deepcopy({key: value for key, value in state_dict.items() if key != STATE_KEY})
    try:
        diagnostics = state["diagnostics"]
        # JSON knows no other keys than strings.
        diagnostics["stats_per_epoch"] = {int(key): value for key, value in diagnostics["stats_per_epoch"].items()}
        for name in ("epoch", "buffer_size", "shuffle", "drop_last"):
            index(state[name])
        load(state)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:
        raise ResumeError(f"the state is damaged ({type(error).__name__}: {error})") from error


def _epoch_of(state_dict: Any, default: int) -> int:
    epoch = state_dict.get("epoch") if isinstance(state_dict, Mapping) else None
    return epoch if isinstance(epoch, int) else default
