"""The samplers of ours in the DataLoaders of a Lightning training: one, several in one, or one in each of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from lhotse_oomfit.composite import auto_samplers, is_composite
from lhotse_oomfit.errors import InvalidArgumentError, UnsupportedStrategyError
from lhotse_oomfit.sampler import CalibratedBucketingSampler

try:
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
except ImportError:  # the other name of the same package
    from pytorch_lightning.utilities.combined_loader import CombinedLoader

__all__ = ["RequestedLoaders", "find_composite", "find_sampler", "members_of", "watch_request"]


@dataclass(kw_only=True)
class RequestedLoaders:
    """The training DataLoaders of one set-up of the data.

    :param num: how many there are.
    :param assemble: makes of one batch of each what a step gets.
    :param are_together: whether each step gets a batch of each, and some have sizes to be calibrated.
    :param ready: those that Lightning has prepared so far, with their samplers.
    """

    num: int = 1
    assemble: Callable[[list[Any]], Any] = list
    are_together: bool = False
    ready: list[tuple[Any, CalibratedBucketingSampler]] = field(default_factory=list)


@contextmanager
def watch_request(loop: Any) -> Iterator[RequestedLoaders]:
    """Yields what is to be known of the training DataLoaders as soon as Lightning has asked for them.

    :raises UnsupportedStrategyError: when the block asks for loaders that can't be calibrated.
    """
    source = loop._data_source
    request = source.dataloader
    requested = RequestedLoaders()

    def watched() -> Any:
        made = request()
        if not isinstance(made, DataLoader):
            _look_at(made, requested)
        return made

    source.dataloader = watched
    try:
        yield requested
    finally:
        del source.dataloader


def _look_at(made: Any, requested: RequestedLoaders) -> None:
    loaders, spec = tree_flatten(made.iterables if isinstance(made, CombinedLoader) else made)
    autos = [sampler for loader in loaders for sampler in auto_samplers(find_composite(loader) or find_sampler(loader))]
    if not autos:
        return
    if isinstance(made, CombinedLoader) and made._mode == "sequential":
        raise UnsupportedStrategyError(
            "Lightning trains on no CombinedLoader in mode 'sequential'; take 'max_size_cycle', 'max_size' or "
            "'min_size', or one DataLoader with a RoundRobinSampler"
        )
    others = [loader for loader in loaders if find_sampler(loader) is None]
    if others:
        sampler = find_composite(others[0]) or getattr(others[0], "sampler", None)
        raise UnsupportedStrategyError(
            f"{len(loaders)} training DataLoaders in a {type(made).__name__} share each step, so all of them need a "
            f"CalibratedBucketingSampler, as it must be known what each adds; one has a {type(sampler).__name__}"
        )
    requested.num = len(loaders)
    requested.assemble = lambda batches: tree_unflatten(batches, spec)
    requested.are_together = True


def find_composite(dataloader: Any) -> Any:
    """The RoundRobinSampler or ZipSampler that a DataLoader iterates, if it holds one of ours to be calibrated."""
    if not isinstance(dataloader, DataLoader):
        return None
    for candidate in _candidates(dataloader):
        if is_composite(candidate) and auto_samplers(candidate):
            return candidate
    return None


def members_of(sampler: Any) -> list[CalibratedBucketingSampler]:
    """All samplers of ours in one made of several."""
    if is_composite(sampler):
        return [found for member in sampler.samplers for found in members_of(member)]
    return [sampler] if isinstance(sampler, CalibratedBucketingSampler) else []


def _candidates(dataloader: Any) -> list[Any]:
    return [dataloader.sampler, dataloader.batch_sampler, getattr(dataloader.dataset, "sampler", None)]


def find_sampler(dataloader: Any) -> CalibratedBucketingSampler | None:
    """The sampler of ours that a DataLoader iterates, map-style or in an iterable dataset; None if there is none.

    :raises InvalidArgumentError: if something wraps it that would make it repeat batches or hide it.
    """
    if not isinstance(dataloader, DataLoader):
        return None
    for candidate in _candidates(dataloader):
        if isinstance(candidate, CalibratedBucketingSampler):
            return candidate
        if is_composite(candidate):
            continue
        hidden = _inside(candidate)
        if hidden is not None and hidden.is_auto:
            raise InvalidArgumentError(
                f"a CalibratedBucketingSampler with bucket_batch_size='auto' is wrapped in {type(candidate).__name__}: "
                f"pass it to the DataLoader itself (sampler=..., batch_size=None), with use_distributed_sampler=False "
                f"in the Trainer, since it splits the data over ranks by itself; or give it a list of sizes"
            )
    return None


def _inside(sampler: Any, depth: int = 3) -> CalibratedBucketingSampler | None:
    """Our sampler inside a wrapper: Lightning's distributed one, Lhotse's Zip and RoundRobin, torch's BatchSampler."""
    if isinstance(sampler, CalibratedBucketingSampler) or depth == 0 or not hasattr(sampler, "__dict__"):
        return sampler if isinstance(sampler, CalibratedBucketingSampler) else None
    for name in ("sampler", "_sampler", "dataset", "samplers"):
        inner = vars(sampler).get(name)
        for item in inner if isinstance(inner, (list, tuple)) else [inner]:
            found = _inside(item, depth - 1)
            if found is not None:
                return found
    return None
