"""What decides which cuts belong to which batch, in plain types: a state tells by them whether it can be continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lhotse_oomfit.bins import Bins
from lhotse_oomfit.bytecode import callable_digest
from lhotse_oomfit.digest import short_sha
from lhotse_oomfit.selection import Selection

__all__ = ["describe_bins", "digests", "restored_bins", "restored_edges"]


def describe_bins(bins: Bins | None, edges: Sequence[Any]) -> list[Any]:
    """The bins, or only Lhotse's ``duration_bins`` where batches go by its own limits."""
    if bins is None:
        return list(edges)
    return [bins.as_lists(), bins.strict_2d, list(bins.min_tps or ()), list(bins.max_tps or ())]


def restored_bins(described: Any, own: Bins) -> Bins | None:
    """The bins that :func:`describe_bins` described; None if they couldn't be ``own``, estimated from other cuts."""
    try:
        edges, strict_2d, min_tps, max_tps = described
        bins = Bins.from_edges(edges, strict_2d=strict_2d, min_tps=min_tps or None, max_tps=max_tps or None)
    except (TypeError, ValueError):
        return None
    return bins if len(bins) == len(own) and replace(bins, edges=own.edges) == own else None


def restored_edges(described: Any, own: Sequence[Any]) -> list[Any] | None:
    """Likewise Lhotse's ``duration_bins``."""
    try:
        if len(described) != len(own):
            return None
        return Bins.from_edges(described).as_lists() if described else []
    except (TypeError, ValueError):
        return None


def digests(selection: Selection) -> dict[str, str]:
    """Digests of what has a say apart from the bins, by name."""
    density = selection.density
    rules: dict[str, Any] = {
        "filter()": selection.keep,
        "measure_length": selection.measure,
        "tokenizer": selection.tokenizer,
    }
    return {
        **{name: "" if rule is None else callable_digest(rule) for name, rule in rules.items()},
        "constraint": "" if selection.constraint is None else _constraint_digest(selection.constraint),
        "min_tps or max_tps": "" if density is None else repr((density.min_tps, density.max_tps)),
    }


def _constraint_digest(constraint: Any) -> str:
    """Of what it was made with, not of the batch that it has seen last."""
    fresh = constraint.copy()
    fresh.reset()
    fields = sorted((name, repr(value)) for name, value in vars(fresh).items() if _is_plain(value))
    return short_sha([type(fresh).__qualname__, fields])


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
