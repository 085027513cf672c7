"""What a source of cuts needs to be read again in the same order, and whether it can be.

Lhotse's lazy sets are chains of objects that refer to each other. Some of them count how often they were iterated
and shuffle differently each time; some seed themselves from the system; some read archives from their start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lhotse import CutSet

__all__ = [
    "counters",
    "counting_unknown",
    "endless",
    "inexact_because",
    "restore_counters",
    "seeds",
    "sequential",
    "set_seeds",
    "undisturbed",
]

# Attributes in which Lhotse 1.33 counts iterations: lhotse/lazy.py, lhotse/shar/readers/lazy.py, lhotse/cut/set.py.
_COUNTERS = ("epoch", "num_iters", "num_times_iterated")
_SEEDS = ("seed", "shard_seed", "shuffle_seed")
_MOST_NODES = 10_000


def _nodes(source: Any, admits: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Every object of the chain behind a lazy set, in a fixed order.

    :param admits: which objects belong to the chain; Lhotse's own by default.
    """
    admits = admits or _is_source
    pending, seen = [source], set[int]()
    while pending and len(seen) < _MOST_NODES:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, CutSet):
            # An eager set is a list of cuts, and cuts aren't sources.
            if not isinstance(node.data, (list, tuple, dict)):
                pending.append(node.data)
        elif admits(node):
            yield node
            for value in vars(node).values():
                if isinstance(value, (list, tuple)) and len(value) < _MOST_NODES:
                    pending += [item for item in value if admits(item)]
                elif admits(value):
                    pending.append(value)


def _all_nodes(source: Any) -> Iterator[Any]:
    """Like :func:`_nodes`, and whatever else the chain iterates: NeMo's adapters, the user's own classes."""
    return _nodes(source, _is_iterable_object)


def _is_iterable_object(value: Any) -> bool:
    return hasattr(type(value), "__iter__") and hasattr(value, "__dict__")


def _is_source(value: Any) -> bool:
    return isinstance(value, CutSet) or (
        type(value).__module__.startswith("lhotse.") and hasattr(type(value), "__iter__") and hasattr(value, "__dict__")
    )


def counters(sources: Iterable[Any]) -> list[int]:
    """How often each part of the sources was iterated, in a fixed order."""
    return [int(vars(node)[name]) for node, name in _numbers(sources, _COUNTERS)]


def restore_counters(sources: Iterable[Any], values: Sequence[int]) -> None:
    """Set what :func:`counters` returned for the same sources; other sources are left alone."""
    places = list(_numbers(sources, _COUNTERS))
    if len(places) == len(values):
        for (node, name), value in zip(places, values, strict=True):
            setattr(node, name, value)


def seeds(sources: Iterable[Any]) -> list[int]:
    """The whole numbers that parts of the sources are seeded with, in a fixed order; other kinds of sources too."""
    return [vars(node)[name] for node, name in _numbers(sources, _SEEDS, _all_nodes)]


def set_seeds(sources: Iterable[Any], values: Sequence[int]) -> None:
    """Seed the parts of the same sources that :func:`seeds` was told of."""
    for (node, name), value in zip(list(_numbers(sources, _SEEDS, _all_nodes)), values, strict=True):
        setattr(node, name, value)


def _numbers(
    sources: Iterable[Any], names: Sequence[str], walk: Callable[[Any], Iterator[Any]] = _nodes
) -> Iterator[tuple[Any, str]]:
    """The parts of the sources that hold whole numbers in attributes of these names, in a fixed order."""
    for source in sources:
        for node in walk(source):
            for name in names:
                if isinstance(vars(node).get(name), int):
                    yield node, name


@contextmanager
def undisturbed(sources: Sequence[Any]) -> Iterator[None]:
    """Iterate the sources inside, and leave them as if nobody had."""
    before = counters(sources)
    try:
        yield
    finally:
        restore_counters(sources, before)


def inexact_because(sources: Iterable[Any]) -> str | None:
    """Why the sources may hold other cuts, or the same in another order, when they are read again; else ``None``."""
    for source in sources:
        if isinstance(source, Iterator):
            return f"{type(source).__name__} can be read only once"
        for node in _all_nodes(source):
            for name in _SEEDS:
                seed = vars(node).get(name)
                if isinstance(seed, str) and seed in ("trng", "randomized"):
                    return f"{type(node).__name__} is seeded with {seed!r}"
            if type(node).__name__ == "LazyShuffler" and vars(node).get("rng") is None:
                return "the source is shuffled without a generator of its own"
    return None


def counting_unknown(sources: Iterable[Any]) -> str | None:
    """Which part of the sources counts its iterations although it isn't Lhotse's, so that nobody sets it back."""
    for source in sources:
        known = {id(node) for node in _nodes(source)}
        for node in _all_nodes(source):
            for name in _COUNTERS:
                if id(node) not in known and isinstance(vars(node).get(name), int):
                    return f"{type(node).__name__} seems to count how often it is iterated, in {name!r}"
    return None


def sequential(sources: Iterable[Any]) -> bool:
    """Whether reading the sources again means reading archives (tar, Shar) from their start."""
    return any(
        "Shar" in type(node).__name__ or "Webdataset" in type(node).__name__
        for source in sources
        for node in _nodes(source)
    )


def endless(sources: Iterable[Any]) -> bool:
    """Whether some source never ends: repeated without a number of times, or an infinite multiplexer."""
    return any(
        "Infinite" in type(node).__name__
        or (type(node).__name__ == "LazyRepeater" and vars(node).get("times", 1) is None)
        for source in sources
        for node in _nodes(source)
    )
