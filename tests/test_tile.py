"""The structure of a batch: found from two small ones, grown to any size."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lhotse import CutSet, MonoCut

from lhotse_oomfit.batch_shape import compare, exceeds, largest, num_bytes, same_structure, shape_of
from lhotse_oomfit.tile import (
    RefusedError,
    find_structure,
    has_batch_dimension,
    is_steady,
    structure_bytes,
    tile,
    with_last,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def tiled(make: Callable[[int], Any], size: int) -> Any:
    return tile(find_structure(make(2), make(3), other_two=make(2)), size)


@settings(deadline=None, max_examples=80)
@given(data=st.data(), size=st.integers(1, 40), per_example=st.integers(1, 3))
def test_padded_tensors_of_any_layout_are_what_they_would_be(data: st.DataObject, size: int, per_example: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=3))
    dim = data.draw(st.integers(0, len(sizes)))
    dtype = data.draw(st.sampled_from(DTYPES))

    def make(num: int) -> torch.Tensor:
        one = (torch.arange(int(np.prod(sizes))) % 2).reshape(sizes).to(dtype).unsqueeze(dim)
        return one.repeat_interleave(num * per_example, dim)

    batch = tiled(make, size)
    assert batch.dtype == dtype
    assert torch.equal(batch, make(size))


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(1, 300),
    start=st.integers(-3, 3),
    step=st.integers(-2, 5),
    per_example=st.integers(1, 3),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_integers_that_number_examples_are_continued(
    size: int, start: int, step: int, per_example: int, dtype: torch.dtype
) -> None:
    def make(num: int) -> dict[str, Any]:
        index = (start + step * torch.arange(num)).repeat_interleave(per_example).to(dtype)
        return {"index": index, "array": index.numpy(), "list": index.tolist()}

    assert compare(tiled(make, size), make(size)) is None


def test_each_entry_of_an_example_has_its_own_step() -> None:
    def make(num: int) -> torch.Tensor:
        return torch.stack([torch.arange(num), torch.full((num,), 7), 2 * torch.arange(num)], dim=1)

    assert torch.equal(tiled(make, 9), make(9))


def make_everything(num: int) -> dict[str, Any]:
    return {
        "dict": {"tensor": torch.ones(num, 3), "none": None, "text": "constant"},
        "ordered": OrderedDict(flag=True, ratio=0.5),
        "default": defaultdict(list, lens=torch.full((num,), 4)),
        "pair": (torch.zeros(num), [torch.ones(5), torch.ones(2 * num)]),
        "texts": ["words"] * num,
        "alignments": [[1, 2, 3]] * num,
        "waves": [torch.ones(1, 4)] * num,
        "records": [{"id": f"a{i:03}", "wave": torch.ones(2)} for i in range(num)],
        "count": num,
        "total": 2.5 * num,
        "sum": torch.tensor(3 * num),
        "scalar": np.float32(2.0),
        "array": np.ones((num, 2), dtype=np.float32),
        "empty": [],
        "nothing": torch.zeros(num, 0),
        "path_like": b"x",
        "nan": float("nan"),
    }


@pytest.mark.parametrize("size", [1, 2, 5, 64])
def test_containers_and_scalars_are_what_they_would_be(size: int) -> None:
    batch = tiled(make_everything, size)
    assert compare(batch, make_everything(size)) is None
    assert shape_of(batch) == shape_of(make_everything(size))
    assert batch["default"].default_factory is list
    assert type(batch["ordered"]) is OrderedDict


def test_cuts_are_repeated_with_ids_of_their_own() -> None:
    def make(num: int) -> dict[str, Any]:
        cuts = [MonoCut(id=f"c{i}", start=0, duration=1, channel=0) for i in range(num)]
        return {"set": CutSet.from_cuts(cuts), "list": cuts}

    batch = tiled(make, 6)
    assert isinstance(batch["set"], CutSet)
    assert len({cut.id for cut in batch["set"]}) == 6
    assert len(batch["list"]) == 6


def test_a_tiled_batch_shares_no_memory() -> None:
    def make(num: int) -> dict[str, Any]:
        return {"list": [torch.ones(3)] * num, "tensor": torch.ones(num), "constant": torch.ones(4)}

    structure = find_structure(make(2), make(3), other_two=make(2))
    one, other = tile(structure, 4), tile(structure, 4)
    pointers = [x.data_ptr() for batch in (one, other) for x in (*batch["list"], batch["tensor"], batch["constant"])]
    assert len(set(pointers)) == len(pointers)


def test_random_contents_are_taken_for_contents() -> None:
    def make(num: int) -> dict[str, Any]:
        return {"noise": torch.randn(num, 100), "masked": torch.randint(0, 1000, (num, 50)), "gain": torch.rand(7)}

    structure = find_structure(make(2), make(3), other_two=make(2))
    assert not is_steady(structure)
    assert shape_of(tile(structure, 12)) == shape_of(make(12))


def test_of_random_lengths_the_longest_stands_for_all() -> None:
    two, other = {"lens": torch.tensor([9, 7])}, {"lens": torch.tensor([8, 9])}
    structure = find_structure(two, {"lens": torch.tensor([7, 9, 8])}, other_two=other, random_lengths=True)
    assert tile(structure, 4)["lens"].tolist() == [9, 9, 9, 9]


def ragged(lengths: list[int]) -> dict[str, Any]:
    """Everything that may hold the lengths of examples."""
    num, longest = len(lengths), max(lengths)
    lens = torch.tensor(lengths)
    return {
        "padded": torch.nn.utils.rnn.pad_sequence([torch.ones(n, 2) for n in lengths], batch_first=True),
        "time first": torch.nn.utils.rnn.pad_sequence([torch.ones(n) for n in lengths]),
        "mask": torch.arange(longest) < lens[:, None],
        "lens": lens,
        "array": lens.int().numpy(),
        "index and end": torch.stack([torch.arange(num), 100 * torch.arange(num) + lens], dim=1),
        "list": [torch.ones(n) for n in lengths],
        "ends": [100 * index + n for index, n in enumerate(lengths)],
        "texts": ["x" * n for n in lengths],
        "total": sum(lengths),
        "sum": lens.sum(),
        "longest": longest,
        "shortest": min(lengths),
        "fixed": torch.ones(3),
        "pair": (lens.half(), [num, longest]),
        "rows": lens.repeat_interleave(2),
    }


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 20), full=st.integers(3, 9), shorter_by=st.integers(1, 2))
def test_a_last_example_of_its_own_is_kept_at_the_end(size: int, full: int, shorter_by: int) -> None:
    structure = find_structure(ragged([full] * 2), ragged([full] * 3), other_two=ragged([full] * 2))
    structure = with_last(structure, ragged([full, full, full - shorter_by]))
    assert has_batch_dimension(structure)
    assert is_steady(structure)
    batch, real = tile(structure, size), ragged([full] * (size - 1) + [full - shorter_by * (size > 1)])
    if size == 1:
        for name in ("total", "sum", "shortest"):  # what sums up several examples has no law for one
            del batch[name], real[name]
    assert compare(batch, real) is None
    for name in ("padded", "time first", "mask"):
        assert torch.equal(batch[name], real[name])
    assert [len(text) for text in batch["texts"]] == [len(text) for text in real["texts"]]


LASTS: dict[str, tuple[Callable[[list[int]], Any], str]] = {
    "ascending": (lambda n: {"lens": torch.tensor(sorted(n))}, r"batch\['lens'\] doesn't keep the last example at its"),
    "packed": (lambda n: torch.ones(sum(n)), r"batch has shape \(14,\) where one example is another, not \(15,\)"),
    "a packed list": (lambda n: [0] * sum(n), r"batch has 14 entries for three examples of which the last"),
    "another class": (lambda n: n[-1] if n[-1] == 5 else None, r"batch is a NoneType where one example is another"),
    "other keys": (lambda n: {f"of {k}": 1 for k in sorted(set(n))}, r"batch has other entries where one example"),
    "other sizes": (lambda n: torch.ones(min(n)), r"batch has shape \(4,\) where one example is another, not \(5,\)"),
    "unlike items": (lambda n: ["x" if k == 5 else 1 for k in n], r"batch holds unlike items: batch\[0\] is a str"),
}


@pytest.mark.parametrize("case", LASTS)
def test_a_last_example_that_cannot_be_kept_is_refused_by_its_place(case: str) -> None:
    make, message = LASTS[case]
    structure = find_structure(make([5, 5]), make([5, 5, 5]), other_two=make([5, 5]))
    with pytest.raises(RefusedError, match=message):
        with_last(structure, make([5, 5, 4]))


REFUSALS: dict[str, tuple[Callable[[int], Any], str]] = {
    "another class": (lambda n: [1] if n == 2 else (1,), "batch is a list for two examples and a tuple for three"),
    "another dtype": (
        lambda n: torch.ones(n, dtype=torch.int32 if n == 2 else torch.int64),
        "batch is torch.int32 of rank 1 for two examples and torch.int64 of rank 1 for three",
    ),
    "another rank": (lambda n: torch.ones([1] * n), "batch is torch.float32 of rank 2 for two examples and"),
    "two dimensions": (lambda n: torch.ones(n, n), r"batch changes with the number of examples in 2 dimensions"),
    "one more": (lambda n: torch.ones(n + 1), "3 entries along dimension 0 for two examples and 4 for three"),
    "a list with one more": (lambda n: ["x"] * (n + 1), "batch has 3 entries for two examples and 4 for three"),
    "a mean": (lambda n: torch.tensor(1 / n), "batch holds values that depend on the number of examples"),
    "a joined text": (lambda n: "a " * n, "batch depends on the number of examples: 'a a ' for two"),
    "unlike items": (lambda n: [torch.ones(1), "x", torch.ones(1)][:n], "batch holds unlike items"),
    "object arrays": (lambda n: np.array(["a"] * n, dtype=object), "batch is an array of object"),
    "sparse": (lambda n: torch.eye(n).to_sparse(), "batch is a nested or sparse tensor"),
    "a set": (lambda n: set(range(n)), "batch is a builtins.set, whose structure isn't known"),
    "unknown items": (lambda n: [object()] * n, r"batch\[0\] is a builtins.object, whose structure isn't known"),
    "unsteady integers": (lambda n: [5, 1, 4][:n], "batch holds integers that differ between examples"),
    "an order": (lambda n: torch.tensor([1, 0, 2])[:n], "batch differs between examples that are the same"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_understood_is_refused_by_its_place(case: str) -> None:
    make, message = REFUSALS[case]
    with pytest.raises(RefusedError, match=message):
        find_structure(make(2), make(3), other_two=make(2))


def test_random_shapes_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"batch has a random shape: \(2, 5\) and \(2, 6\)"):
        find_structure(torch.ones(2, 5), torch.ones(3, 5), other_two=torch.ones(2, 6))


def test_a_batch_without_batch_dimension_is_known_as_such() -> None:
    structure = find_structure({"a": torch.ones(4)}, {"a": torch.ones(4)}, other_two={"a": torch.ones(4)})
    assert not has_batch_dimension(structure)


def test_the_structure_holds_one_example() -> None:
    structure = find_structure(torch.ones(2, 10), torch.ones(3, 10), other_two=torch.ones(2, 10))
    assert structure_bytes(structure) == 40
    assert num_bytes(tile(structure, 8)) == 320


def test_differences_are_told_by_their_place() -> None:
    one = {"x": torch.ones(3), "n": 3}
    assert compare(one, {"x": torch.ones(4), "n": 3}) == "batch['x'] has shape (3,) tiled and (4,) collated"
    assert compare(one, {"x": torch.ones(3), "n": 4}) == "batch['n']: 3 != 4"
    assert compare(one, {"x": torch.ones(3)}) == "batch has the entries ['x', 'n'] here and ['x'] there"
    assert "is torch.float32 of rank 1 here" in (same_structure(one, {"x": torch.ones(3, 1), "n": 4}) or "")
    assert same_structure(one, {"x": torch.ones(30), "n": 4}) is None


def test_a_larger_real_batch_is_told_by_its_place() -> None:
    real, worst = shape_of({"x": torch.ones(3, 5)}), shape_of({"x": torch.ones(3, 4)})
    assert exceeds(real, worst) == "batch['x'] has shape (3, 5), the worst case (3, 4)"
    assert exceeds(worst, real) is None
    assert exceeds(real, largest(worst, shape_of({"x": torch.ones(2, 6)}))) is None


def test_an_excess_within_the_tolerance_is_none() -> None:
    worst = shape_of({"x": torch.ones(3, 16000)})
    assert exceeds(shape_of({"x": torch.ones(3, 16015)}), worst, tolerance=0.001) is None
    assert exceeds(shape_of({"x": torch.ones(3, 16017)}), worst, tolerance=0.001) is not None
    few = shape_of({"x": torch.ones(3, 40)})
    assert exceeds(shape_of({"x": torch.ones(3, 41)}), few, tolerance=0.001) is not None
