"""How long the custom fields of cuts are, learned from a sample: by their tokens, or by their seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lhotse.cut import Cut

__all__ = ["CUT", "TEXT", "Field", "FieldLaw", "learn_laws", "sequence_fields", "token_fields"]

Field = tuple[int, str]  # owner (-1: the cut, otherwise the supervision's index) and name in its custom dict

CUT = -1
TEXT = ""  # the name of the characters of the texts among laws

_TIME_TOLERANCE = 0.02  # frame rates are constant, but for the rounding at the ends
_MIN_CUTS = 3  # two cuts lie on a line whatever they are


@dataclass(frozen=True, kw_only=True)
class FieldLaw:
    """The length of a field: ``offset + slope * num_tokens``, or so many entries a second."""

    slope: float
    offset: float = 0.0
    per_second: bool = False

    def length(self, amount: float) -> int:
        """The length at so many tokens (or seconds)."""
        return max(0, math.ceil(self.offset + self.slope * amount - 1e-6))


def sequence_fields(cut: Cut) -> dict[Field, Any]:
    """Return the custom fields that hold sequences: of tokens, or arrays whose first dimension may be time."""
    found = token_fields(cut)
    for owner, holder in [(CUT, cut), *enumerate(cut.supervisions)]:
        for name, value in (holder.custom or {}).items():
            if isinstance(value, (np.ndarray, torch.Tensor)) and value.ndim:
                found.setdefault((owner, name), value)
    return found


def token_fields(cut: Cut) -> dict[Field, Any]:
    """Return the custom fields that hold one-dimensional sequences of tokens: integers, or strings such as phonemes."""
    found: dict[Field, Any] = {}
    for owner, holder in [(CUT, cut), *enumerate(cut.supervisions)]:
        for name, value in (holder.custom or {}).items():
            if isinstance(value, (np.ndarray, torch.Tensor)):
                if value.ndim == 1 and "int" in str(value.dtype):
                    found[owner, name] = value
            elif isinstance(value, (list, tuple)) and all(isinstance(x, (int, str)) for x in value) and len(value):
                found[owner, name] = value
    return found


def learn_laws(cuts: Sequence[Cut], measure: Callable[[Cut], int | None]) -> Mapping[str, FieldLaw]:
    """Learn from real cuts what the lengths of their custom fields follow.

    A prompt of constant length has slope 0; a prompt with its answer has slope 1 and the prompt's length as offset;
    codes of so many a second follow the duration. A field of tokens that follows none of these gets the steepest
    proportion to the number of tokens that was seen. Fields are known by name, the characters of the texts by an
    empty one; where nothing can be learned, a field is left out.
    """
    rows: dict[str, list[tuple[float, float, float]]] = {}  # tokens (NaN: unknown), seconds, length
    of_tokens = {TEXT}
    for cut in cuts:
        if not hasattr(cut, "custom"):
            continue  # padding
        tokens = measure(cut)
        of_tokens.update(name for _, name in token_fields(cut))
        totals: dict[str, int] = {}
        for (_, name), value in sequence_fields(cut).items():
            totals[name] = totals.get(name, 0) + len(value)
        if any(sup.text for sup in cut.supervisions):
            totals[TEXT] = sum(len(sup.text or "") for sup in cut.supervisions)
        for name, total in totals.items():
            rows.setdefault(name, []).append((math.nan if tokens is None else tokens, cut.duration, total))
    laws = {name: _law(np.array(seen), of_tokens=name in of_tokens) for name, seen in rows.items()}
    return {name: law for name, law in laws.items() if law is not None}


def _law(seen: np.ndarray, *, of_tokens: bool) -> FieldLaw | None:
    tokens, seconds, lengths = seen.T
    if np.ptp(lengths) == 0:
        return FieldLaw(slope=0.0, offset=float(lengths[0])) if len(seen) >= _MIN_CUTS else None
    counted = of_tokens and not np.isnan(tokens).any() and np.ptp(tokens) > 0
    if counted and len(np.unique(tokens)) >= _MIN_CUTS:
        slope, offset = np.polyfit(tokens, lengths, 1)
        if slope >= 0 and np.abs(slope * tokens + offset - lengths).max() < 1e-6 * lengths.max():
            return FieldLaw(slope=round(float(slope), 9), offset=round(float(offset), 6))
    rate = float(np.median(lengths / seconds))
    if (
        len(seen) >= _MIN_CUTS
        and (np.abs(lengths - rate * seconds) <= np.maximum(1.5, _TIME_TOLERANCE * lengths)).all()
    ):
        return FieldLaw(slope=rate, per_second=True)
    return FieldLaw(slope=float((lengths / np.maximum(tokens, 1)).max())) if counted else None
