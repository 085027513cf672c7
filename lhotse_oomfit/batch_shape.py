"""What a batch is made of: sizes by place, and where two batches differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lhotse.array import Array, TemporalArray
from lhotse.audio import Recording
from lhotse.cut import Cut, CutSet
from lhotse.features import Features
from lhotse.supervision import SupervisionSegment

__all__ = [
    "OPAQUE",
    "SCALARS",
    "Shape",
    "compare",
    "exceeds",
    "largest",
    "largest_bytes",
    "num_bytes",
    "same_structure",
    "shape_of",
    "spell",
    "sum_of_integers",
]

OPAQUE = (Cut, SupervisionSegment, Recording, Features, Array, TemporalArray)  # manifests, never looked into
SCALARS = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device, Path, Enum)

Shape = Mapping[str, tuple[int, ...]]


def compare(tiled: Any, real: Any, *, integers: bool = True) -> str | None:
    """Say where a tiled batch differs from a really collated one; None where it doesn't.

    Compared are classes, keys, dtypes, shapes, and the values of integers and numbers; the values of float tensors
    depend on augmentation. Cuts are opaque: their number is compared.

    :param integers: False leaves out the values of integer tensors, for datasets that draw them at random.
    """
    return _compare(tiled, real, "batch", values=True, integers=integers)


def exceeds(real: Shape, worst: Shape, *, tolerance: float = 0.0) -> str | None:
    """Say where a real batch is larger than the worst case of as many examples; None where it's dominated.

    :param tolerance: an excess of up to this share of the worst case is none.
    """
    for path, shape in real.items():
        limit = worst.get(path)
        if limit is None or len(limit) != len(shape):
            continue  # another structure, which same_structure() tells of
        if any(size > most * (1.0 + tolerance) for size, most in zip(shape, limit, strict=True)):
            return f"{path} has shape {shape}, the worst case {limit}"
    return None


def largest(one: Shape, other: Shape) -> dict[str, tuple[int, ...]]:
    """Return the larger size in every dimension of every place."""
    merged = dict(one)
    for path, shape in other.items():
        known = merged.get(path)
        merged[path] = shape if known is None or len(known) != len(shape) else tuple(map(max, known, shape))
    return merged


def largest_bytes(batch: Any) -> int:
    """Return the bytes of the largest tensor or array in the batch."""
    return max((_bytes_of(x) for _, x in _arrays(batch, "batch")), default=0)


def same_structure(one: Any, other: Any, *, path: str = "batch") -> str | None:
    """Say where two batches differ in classes, keys, dtypes or ranks, whatever their sizes; None where they don't."""
    return _compare(one, other, path, values=False)


def shape_of(batch: Any, *, strings: bool = True) -> Shape:
    """Return the sizes of everything in the batch, by place: tensors, lists, and strings if they are wanted."""
    return dict(_shapes(batch, "batch", strings=strings))


def num_bytes(batch: Any) -> int:
    """Return the bytes of all tensors and arrays in the batch."""
    return sum(_bytes_of(x) for _, x in _arrays(batch, "batch"))


def sum_of_integers(batch: Any) -> int:
    """Return the sum of all integers in tensors and arrays; of batches alike but for lengths, the fullest has most."""
    return sum(int(array.sum()) for _, array in _arrays(batch, "batch") if "int" in str(array.dtype))


def _compare(one: Any, other: Any, path: str, *, values: bool, integers: bool = True) -> str | None:
    if isinstance(one, OPAQUE) and isinstance(other, OPAQUE):
        return None
    if type(one) is not type(other):
        if not values and (one is None or other is None):
            return None  # a field that only some examples have
        return f"{path} is a {type(one).__name__} here and a {type(other).__name__} there"
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return _compare_arrays(one, other, path, values=values, integers=integers)
    if isinstance(one, CutSet):
        one, other = list(one), list(other)
    parts = _parts(one)
    if parts is None:
        return f"{path}: {one!r} != {other!r}" if values and not _close(one, other) else None
    other_parts = dict(_parts(other) or ())
    if type(one) in (list, tuple, CutSet) and not values:
        pairs = zip([v for _, v in parts], other_parts.values(), strict=False)
        return next((d for i, (a, b) in enumerate(pairs) if (d := _compare(a, b, f"{path}[{i}]", values=False))), None)
    if [key for key, _ in parts] != list(other_parts):
        return f"{path} has the entries {[k for k, _ in parts][:8]!r} here and {list(other_parts)[:8]!r} there"
    for key, value in parts:
        difference = _compare(value, other_parts[key], f"{path}[{key!r}]", values=values, integers=integers)
        if difference is not None:
            return difference
    return None


def _compare_arrays(one: Any, other: Any, path: str, *, values: bool, integers: bool) -> str | None:
    if one.dtype != other.dtype or one.ndim != other.ndim:
        return f"{path} is {spell(one)} here and {spell(other)} there"
    if values and tuple(one.shape) != tuple(other.shape):
        return f"{path} has shape {tuple(one.shape)} tiled and {tuple(other.shape)} collated"
    if values and integers and "int" in str(one.dtype) and not bool((one == other).all()):
        return f"{path} holds other integers tiled than collated"
    return None


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, str):
        return True  # ids differ between examples, and texts are of one length
    if isinstance(one, float):
        return one != one or abs(one - other) <= 1e-6 * max(abs(one), abs(other))
    return bool(one == other)


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the children of a container, None for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, CutSet):
        return list(enumerate(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(name, getattr(value, name)) for name in value._fields]
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, *OPAQUE)):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def _bytes_of(array: Any) -> int:
    if isinstance(array, torch.Tensor):
        return array.numel() * array.element_size()
    return int(array.nbytes)


def _arrays(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield path, value
        return
    for key, part in _parts(value) or ():
        yield from _arrays(part, f"{path}[{key!r}]")


def _shapes(value: Any, path: str, *, strings: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        if isinstance(value, torch.Tensor) and value.is_nested:  # has no shape that could be compared
            yield path, (value.size(0), value.numel())
        else:
            yield path, tuple(value.shape)
        return
    if isinstance(value, str):
        if strings:
            yield path, (len(value),)
        return
    if type(value) is list and len({_kind(part) for part in value}) <= 1:
        yield path, (len(value),)
        inner: dict[str, list[tuple[int, ...]]] = {}
        for part in value:  # per-example items are one place, as large as the largest of them
            for name, shape in _shapes(part, f"{path}[*]", strings=strings):
                inner.setdefault(name, []).append(shape)
        for name, shapes in inner.items():
            rank = max(len(shape) for shape in shapes)
            yield name, tuple(max(s[d] for s in shapes if len(s) > d) for d in range(rank))
        return
    if isinstance(value, CutSet):
        yield path, (len(list(value)),)
        return
    for key, part in _parts(value) or ():
        yield from _shapes(part, f"{path}[{key!r}]", strings=strings)


def _kind(value: Any) -> Any:
    """Parts of one list that are of one kind are taken for one entry per example."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value), str(value.dtype), value.ndim
    return type(value)


def spell(array: Any) -> str:
    return f"{array.dtype} of rank {array.ndim}"
