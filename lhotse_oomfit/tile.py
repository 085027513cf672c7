"""The structure of a batch, found from two small batches, and grown to any number of examples.

Two batches that differ in nothing but the number of examples show which dimensions are the batch dimension: those of
sizes ``k * N``. A batch of any size then takes a repetition instead of a collation. Integers that number the
examples (Lhotse's ``sequence_idx``) are continued, everything else is repeated. Whatever isn't understood is refused
with its place and the reason, and never guessed: a mask of N by N, a padded batch dimension, a packed sequence, an
object of an unknown class.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from lhotse.cut import Cut, CutSet
from lhotse.utils import fastcopy

from lhotse_oomfit.batch_shape import OPAQUE, SCALARS, num_bytes, same_structure, spell

__all__ = [
    "RefusedError",
    "find_structure",
    "has_batch_dimension",
    "is_steady",
    "signature",
    "structure_bytes",
    "tile",
    "with_last",
]

_NOT_NUMBERED = torch.empty(0)


class RefusedError(Exception):
    """The batch can't be tiled; the text says which part of it, and why. Never leaves this package."""


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """Base of what was learned of one place in the batch. ``signature`` doesn't depend on lengths."""

    path: str


@dataclasses.dataclass(frozen=True)
class _Constant(_Leaf):
    value: Any


@dataclasses.dataclass(frozen=True)
class _Affine(_Leaf):
    """A number that counts examples: ``offset + slope * num_examples``."""

    offset: float
    slope: float
    kind: type


@dataclasses.dataclass(frozen=True)
class _BatchTensor(_Leaf):
    """``source`` is one example, ``per_example`` entries along ``dim``; ``step`` is added from example to example.

    ``last`` is the last example of a batch of several, where that is another one.
    """

    source: torch.Tensor
    dim: int
    per_example: int
    step: torch.Tensor | None
    as_numpy: bool
    random: bool
    last: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class _AffineTensor(_Leaf):
    """A tensor without batch dimension whose integers count examples."""

    offset: torch.Tensor
    slope: torch.Tensor
    as_numpy: bool


@dataclasses.dataclass(frozen=True)
class _BatchList(_Leaf):
    """``items`` are those of one example; ``step`` is given where they are integers that number examples."""

    items: tuple[Any, ...]
    step: int
    build: Callable[[list[Any]], Any]
    last: tuple[Any, ...] | None = None


@dataclasses.dataclass(frozen=True)
class _Container(_Leaf):
    children: tuple[tuple[Any, _Leaf], ...]
    build: Callable[[dict[Any, Any]], Any]


@dataclasses.dataclass(frozen=True)
class _Draws:
    """The same place in a batch of two, in one of three, and in a second draw of the batch of two."""

    two: Any
    three: Any
    other: Any

    def map(self, function: Callable[[Any], Any]) -> _Draws:
        return _Draws(function(self.two), function(self.three), function(self.other))


def find_structure(two: Any, three: Any, *, other_two: Any, random_lengths: bool = False) -> _Leaf:
    """Learn the structure from batches of two and three copies of one example.

    :param other_two: a second draw of the batch of two, made with other random numbers: contents that differ
        between the draws are taken for random, contents that don't for a function of the number of examples.
    :param random_lengths: the dataset is known to draw lengths at random, so equal draws prove nothing.
    :raises RefusedError: with the place and the reason.
    """
    return _Finder(random_lengths=random_lengths).find(_Draws(two, three, other_two), "batch")


def tile(structure: _Leaf, size: int) -> Any:
    """Build the batch of ``size`` examples; its tensors share no memory with the structure or each other."""
    if isinstance(structure, _Constant):
        value = structure.value
        if isinstance(value, torch.Tensor):
            return value.clone()
        return value.copy() if isinstance(value, np.ndarray) else value
    if isinstance(structure, _Affine):
        return structure.kind(structure.offset + structure.slope * size)
    if isinstance(structure, _AffineTensor):
        return _restored(structure.offset + structure.slope * size, structure.as_numpy)
    if isinstance(structure, _BatchTensor):
        return _tile_tensor(structure, size)
    if isinstance(structure, _BatchList):
        return structure.build(_tile_list(structure, size))
    if isinstance(structure, _Container):
        return structure.build({key: tile(child, size) for key, child in structure.children})
    raise TypeError(f"{type(structure).__name__} is no structure of a batch")


def signature(structure: _Leaf) -> Any:
    """What must be the same in every bucket: keys, classes, dtypes, ranks, batch dimensions; no lengths."""
    if isinstance(structure, _BatchTensor):
        step = structure.step is not None
        return ("batch", str(structure.source.dtype), structure.source.ndim, structure.dim, step)
    if isinstance(structure, _Container):
        return ("container", tuple((key, signature(child)) for key, child in structure.children))
    if isinstance(structure, _BatchList):
        return ("list", type(structure.items[0]).__name__ if structure.items else "empty", structure.step)
    if isinstance(structure, _Constant):
        value = structure.value
        if isinstance(value, torch.Tensor):
            return ("constant", str(value.dtype), value.ndim)
        return ("constant", type(value).__name__)
    return (type(structure).__name__,)


def has_batch_dimension(structure: _Leaf) -> bool:
    """Whether anything in the batch grows with the number of examples."""
    if isinstance(structure, _Container):
        return any(has_batch_dimension(child) for _, child in structure.children)
    return isinstance(structure, (_BatchTensor, _BatchList))


def is_steady(structure: _Leaf) -> bool:
    """Whether all integer tensors hold the same values in every draw."""
    if isinstance(structure, _Container):
        return all(is_steady(child) for _, child in structure.children)
    return not (isinstance(structure, _BatchTensor) and structure.random and _is_exact(structure.source))


def structure_bytes(structure: _Leaf) -> int:
    """Return the bytes of the tensors that the structure holds: about one example's."""
    if isinstance(structure, _Container):
        return sum(structure_bytes(child) for _, child in structure.children)
    if isinstance(structure, _BatchTensor):
        return structure.source.nbytes + (0 if structure.last is None else structure.last.nbytes)
    return num_bytes((structure.items, structure.last)) if isinstance(structure, _BatchList) else 0


def with_last(structure: _Leaf, three: Any) -> _Leaf:
    """Return the structure of batches whose last example is another one, learned from a batch of three.

    :param three: a batch of two copies of the structure's example, then the other one; its padded sizes are those of
        three copies. A batch of one stays the structure's own example.
    :raises RefusedError: with the place where ``three`` isn't such a batch.
    """
    if isinstance(structure, _Container):
        parts = _children(three, [key for key, _ in structure.children], structure.path)
        children = tuple((key, with_last(child, parts[key])) for key, child in structure.children)
        return dataclasses.replace(structure, children=children)
    if isinstance(structure, _BatchTensor):
        return _with_last_rows(structure, _as_tensor(three, structure.path))
    if isinstance(structure, _BatchList):
        return _with_last_items(structure, list(three))
    if isinstance(structure, _AffineTensor):
        counted = _as_tensor(three, structure.path)
        _check_shape(counted, structure.offset.shape, structure.path)
        return dataclasses.replace(structure, offset=counted - 3 * structure.slope)
    if isinstance(structure, _Affine):
        return dataclasses.replace(structure, offset=three - 3 * structure.slope)
    if isinstance(structure, _Constant):
        if type(three) is not type(structure.value):
            raise RefusedError(f"{structure.path} is a {type(three).__name__} where one example is another")
        if isinstance(three, (torch.Tensor, np.ndarray)):
            _check_shape(three, structure.value.shape, structure.path)
        return dataclasses.replace(structure, value=three)
    raise TypeError(f"{type(structure).__name__} is no structure of a batch")


def _with_last_rows(leaf: _BatchTensor, three: torch.Tensor) -> _BatchTensor:
    expected = _as_tensor(_tile_tensor(leaf, 3), leaf.path)
    _check_shape(three, expected.shape, leaf.path)
    first = (leaf.dim, 0, 2 * leaf.per_example)
    if not leaf.random and not _equal(three.narrow(*first), expected.narrow(*first)):
        raise RefusedError(f"{leaf.path} doesn't keep the last example at its end")
    last = three.narrow(leaf.dim, 2 * leaf.per_example, leaf.per_example)
    if leaf.step is not None:
        last = last - 2 * leaf.step
    return dataclasses.replace(leaf, last=last.clone(memory_format=torch.contiguous_format))


def _with_last_items(leaf: _BatchList, three: list[Any]) -> _BatchList:
    num = len(leaf.items)
    if len(three) != 3 * num:
        raise RefusedError(f"{leaf.path} has {len(three)} entries for three examples of which the last is another one")
    last = three[2 * num :]
    for index, (item, other) in enumerate(zip(leaf.items, last, strict=True)):
        _check_item(other, f"{leaf.path}[{index}]")
        difference = same_structure(item, other, path=f"{leaf.path}[{index}]")
        if difference is not None:
            raise RefusedError(f"{leaf.path} holds unlike items: {difference}")
    return dataclasses.replace(leaf, last=tuple(item - 2 * leaf.step if leaf.step else item for item in last))


def _children(value: Any, keys: list[Any], path: str) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        found = dict(value)
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        found = dict(enumerate(value))
    else:
        found = {name: getattr(value, name) for name in _field_names(value) or ()}
    if list(found) != keys:
        raise RefusedError(f"{path} has other entries where one example is another: {list(found)!r}, not {keys!r}")
    return found


def _as_tensor(value: Any, path: str) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
    _check_plain(tensor, path)
    return tensor.detach()


def _check_shape(value: Any, shape: Any, path: str) -> None:
    if tuple(value.shape) != tuple(shape):
        raise RefusedError(f"{path} has shape {tuple(value.shape)} where one example is another, not {tuple(shape)}")


class _Finder:
    """Walks three draws of a batch at once, and learns each place's law."""

    def __init__(self, *, random_lengths: bool) -> None:
        self._random_lengths = random_lengths

    def find(self, draws: _Draws, path: str) -> _Leaf:
        two = draws.two
        kind = type(two)
        if kind is not type(draws.three) or kind is not type(draws.other):
            raise RefusedError(
                f"{path} is a {kind.__name__} for two examples and a {type(draws.three).__name__} for three"
            )
        if isinstance(two, torch.Tensor):
            return self._tensor(draws, path, as_numpy=False)
        if isinstance(two, np.ndarray):
            if two.dtype.kind not in "biufc":
                raise RefusedError(f"{path} is an array of {two.dtype}, which can't be tiled")
            return self._tensor(draws.map(lambda array: torch.from_numpy(np.array(array))), path, as_numpy=True)
        if isinstance(two, CutSet):
            return self._sequence(draws.map(list), path, CutSet.from_cuts)
        if isinstance(two, (*SCALARS, np.generic)):
            return self._scalar(draws, path)
        if isinstance(two, OPAQUE):
            return _Constant(path, two)
        if kind in (dict, OrderedDict, defaultdict):
            return self._mapping(draws, path)
        if kind in (list, tuple):
            return self._sequence(draws.map(list), path, kind)
        names = _field_names(two)
        if names is None:
            raise RefusedError(f"{path} is a {kind.__module__}.{kind.__qualname__}, whose structure isn't known")
        children = {name: draws.map(operator.attrgetter(name)) for name in names}
        return self._container(children, path, lambda built: kind(**built))

    def _tensor(self, draws: _Draws, path: str, *, as_numpy: bool) -> _Leaf:
        two, three, other = draws.two, draws.three, draws.other
        for tensor in (two, three, other):
            _check_plain(tensor, path)
        if two.dtype != three.dtype or two.ndim != three.ndim:
            raise RefusedError(f"{path} is {spell(two)} for two examples and {spell(three)} for three")
        if two.shape != other.shape:
            raise RefusedError(f"{path} has a random shape: {tuple(two.shape)} and {tuple(other.shape)}")
        two, three, other = two.detach(), three.detach(), other.detach()
        changed = [dim for dim in range(two.ndim) if two.shape[dim] != three.shape[dim]]
        if len(changed) > 1:
            raise RefusedError(
                f"{path} changes with the number of examples in {len(changed)} dimensions: "
                f"{tuple(two.shape)} for two, {tuple(three.shape)} for three"
            )
        steady = _equal(two, other)
        if not changed:
            return self._unbatched(two, three, path, steady=steady, as_numpy=as_numpy)
        dim = changed[0]
        per_example, rest = divmod(two.shape[dim], 2)
        if rest or three.shape[dim] != 3 * per_example:
            raise RefusedError(
                f"{path} has {two.shape[dim]} entries along dimension {dim} for two examples and {three.shape[dim]} "
                "for three, which isn't a number per example"
            )
        groups = [three.narrow(dim, i * per_example, per_example) for i in range(3)]
        step, chosen = None, 0
        if steady and _equal(two, three.narrow(dim, 0, 2 * per_example)):
            if not all(_equal(groups[0], group) for group in groups):
                step = _step(groups)
        else:
            step = _NOT_NUMBERED
        random = step is _NOT_NUMBERED
        if random:
            if steady and not self._random_lengths:
                raise RefusedError(f"{path} differs between examples that are the same, and doesn't number them")
            if (
                _is_exact(two)
                and two.numel()
                and int(two.max()) == 2 * per_example - 1 == int(three.max()) - per_example
            ):
                raise RefusedError(f"{path} looks like a random order of the examples")
            # Of examples of random lengths, the longest stands for all.
            step, chosen = None, max(range(3), key=lambda i: float(groups[i].double().sum()) if _is_exact(two) else -i)
        source = groups[chosen].clone(memory_format=torch.contiguous_format)
        return _BatchTensor(path, source, dim, per_example, step, as_numpy, random)

    def _unbatched(self, two: torch.Tensor, three: torch.Tensor, path: str, *, steady: bool, as_numpy: bool) -> _Leaf:
        if _equal(two, three) or not steady or self._random_lengths:
            return _Constant(path, _restored(three.clone(), as_numpy))
        if _is_exact(two) and two.dtype != torch.bool:
            slope = three - two
            return _AffineTensor(path, two - 2 * slope, slope, as_numpy)
        raise RefusedError(f"{path} holds values that depend on the number of examples")

    def _scalar(self, draws: _Draws, path: str) -> _Leaf:
        two, three = draws.two, draws.three
        if two == three or (two != two and three != three):  # NaN is itself
            return _Constant(path, two)
        if isinstance(two, (int, float)) and not isinstance(two, bool):
            if two != draws.other:
                return _Constant(path, max(two, three, draws.other))
            return _Affine(path, two - 2 * (three - two), three - two, type(two))
        raise RefusedError(f"{path} depends on the number of examples: {two!r} for two, {three!r} for three")

    def _mapping(self, draws: _Draws, path: str) -> _Leaf:
        two, three, other = draws.two, draws.three, draws.other
        if list(two) != list(three) or list(two) != list(other):
            raise RefusedError(f"{path} has other keys for two examples than for three: {list(two)!r}, {list(three)!r}")
        kind = type(two)
        factory = two.default_factory if isinstance(two, defaultdict) else None

        def build(built: dict[Any, Any]) -> Any:
            return defaultdict(factory, built) if kind is defaultdict else kind(built)

        return self._container({key: draws.map(operator.itemgetter(key)) for key in two}, path, build)

    def _container(self, children: Mapping[Any, _Draws], path: str, build: Callable[[dict[Any, Any]], Any]) -> _Leaf:
        found = [(key, self.find(draws, f"{path}[{key!r}]")) for key, draws in children.items()]
        return _Container(path, tuple(found), build)

    def _sequence(self, draws: _Draws, path: str, build: Callable[[list[Any]], Any]) -> _Leaf:
        two, three, other = draws.two, draws.three, draws.other
        if len(two) != len(other):
            raise RefusedError(f"{path} has a random length: {len(two)} and {len(other)}")
        if len(two) == len(three):
            children = {index: draws.map(operator.itemgetter(index)) for index in range(len(two))}
            return self._container(children, path, lambda built: build(list(built.values())))
        per_example, rest = divmod(len(two), 2)
        if rest or len(three) != 3 * per_example:
            raise RefusedError(
                f"{path} has {len(two)} entries for two examples and {len(three)} for three, "
                "which isn't a number per example"
            )
        groups = [three[i * per_example : (i + 1) * per_example] for i in range(3)]
        for index, item in enumerate(three):
            _check_item(item, f"{path}[{index}]")
            difference = same_structure(groups[0][index % per_example], item, path=f"{path}[{index}]")
            if difference is not None:
                raise RefusedError(f"{path} holds unlike items: {difference}")
        step, chosen = 0, 0
        if all(type(item) is int for item in three) and not groups[0] == groups[1] == groups[2]:
            steps = {
                b - a for one, following in itertools.pairwise(groups) for a, b in zip(one, following, strict=True)
            }
            if len(steps) == 1 and two == other:
                step = steps.pop()
            elif two == other and not self._random_lengths:
                raise RefusedError(f"{path} holds integers that differ between examples that are the same")
            else:
                chosen = max(range(3), key=lambda i: sum(groups[i]))
        else:
            chosen = max(range(3), key=lambda i: num_bytes(groups[i]))
        return _BatchList(path, tuple(groups[chosen]), step, build)


def _step(groups: list[torch.Tensor]) -> torch.Tensor:
    """Return what must be added from example to example, or the mark that they aren't numbered."""
    if _is_exact(groups[0]) and groups[0].dtype != torch.bool:
        step = groups[1] - groups[0]
        if _equal(groups[2] - groups[1], step):
            return step
    return _NOT_NUMBERED


def _is_exact(tensor: torch.Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _check_plain(tensor: torch.Tensor, path: str) -> None:
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        raise RefusedError(f"{path} is a {type(tensor).__name__}, not a plain tensor")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise RefusedError(f"{path} is a nested or sparse tensor ({tensor.layout}), which can't be tiled")


def _field_names(value: Any) -> list[str] | None:
    """The fields of a named tuple or a dataclass that can be built from its fields; None for anything else."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return None if type(value).__name__ == "PackedSequence" else list(value._fields)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [f.name for f in fields] if all(f.init for f in fields) else None
    return None


def _check_item(item: Any, path: str) -> None:
    """Refuse what can't be repeated as an entry of a per-example list."""
    if isinstance(item, torch.Tensor):
        _check_plain(item, path)
    elif type(item) in (list, tuple):
        for index, part in enumerate(item):
            _check_item(part, f"{path}[{index}]")
    elif type(item) is dict:
        for key, part in item.items():
            _check_item(part, f"{path}[{key!r}]")
    elif not isinstance(item, (*SCALARS, *OPAQUE, np.ndarray, np.generic)):
        raise RefusedError(
            f"{path} is a {type(item).__module__}.{type(item).__qualname__}, whose structure isn't known"
        )


def _tile_tensor(leaf: _BatchTensor, size: int) -> Any:
    repeats = [1] * leaf.source.ndim
    repeats[leaf.dim] = size
    tiled = leaf.source.repeat(repeats)
    if leaf.step is not None:
        shape = [1] * leaf.source.ndim
        shape[leaf.dim] = size * leaf.per_example
        number = torch.arange(size, device=tiled.device).repeat_interleave(leaf.per_example).reshape(shape)
        tiled = (tiled + number * leaf.step.repeat(repeats)).to(leaf.source.dtype)
    if leaf.last is not None and size > 1:
        last = leaf.last if leaf.step is None else (leaf.last + (size - 1) * leaf.step).to(leaf.source.dtype)
        tiled.narrow(leaf.dim, (size - 1) * leaf.per_example, leaf.per_example).copy_(last)
    return _restored(tiled, leaf.as_numpy)


def _restored(tensor: torch.Tensor, as_numpy: bool) -> Any:
    return tensor.numpy() if as_numpy else tensor


def _tile_list(leaf: _BatchList, size: int) -> list[Any]:
    last = leaf.items if leaf.last is None or size == 1 else leaf.last
    rows = [*[leaf.items] * (size - 1), last]
    if leaf.step:
        return [item + index * leaf.step for index, items in enumerate(rows) for item in items]
    return [_copied(item, index) for index, items in enumerate(rows) for item in items]


def _copied(item: Any, index: int) -> Any:
    """A copy that shares no memory of tensors; cuts get ids of their own, as real batches have them."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone()
    if isinstance(item, np.ndarray):
        return item.copy()
    if type(item) in (list, tuple):
        return type(item)(_copied(part, index) for part in item)
    if type(item) is dict:
        return {key: _copied(part, index) for key, part in item.items()}
    if isinstance(item, Cut):
        return fastcopy(item, id=f"{item.id}-{index}")
    return item


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype.is_floating_point or one.dtype.is_complex:
        return bool(torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True))
    return bool(torch.equal(one, other))
