"""The heaviest batch that a bucket can yield at a given size, made from the user's own cuts and dataset.

A real cut is stretched to the bucket's edges and collated by the user's dataset twice, as a batch of two and as one
of three; what changed is the batch dimension, and is repeated up to the size asked for (:mod:`~lhotse_oomfit.tile`).
That is checked against real collations, of copies and of distinct real cuts, before it is believed. Where it doesn't
hold, or the batch can't be understood, the batch is collated for real at its full size: slower, never wrong.

The last example of a batch is slightly shorter than the edges, so that there is padding to mask: some models leave
masks out where nothing is padded, and use less memory then than real batches do. No padded size changes by that; where
one would (examples laid end to end), all examples are full.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lhotse.cut import Cut, CutSet
from lhotse.cut.data import DataCut

from lhotse_oomfit import tile as tiling
from lhotse_oomfit.batch_shape import (
    compare,
    exceeds,
    largest,
    num_bytes,
    same_structure,
    shape_of,
)
from lhotse_oomfit.draws import LENGTH_DRAWS, Draws
from lhotse_oomfit.errors import EmptySourceError, InvalidArgumentError, WorstCaseError
from lhotse_oomfit.stretch import PlainCut, clone
from lhotse_oomfit.template import Edges, Examples, fit_to_edges

__all__ = ["WorstCaseBatches", "stretch_cut"]

logger = logging.getLogger(__name__)

_CHECK_SIZES = (5, 131)  # 131: a prime above 128, so that padding the batch to 8, 64 or 128 shows
_NUM_REAL = 5  # distinct real cuts collated to compare with
_SHAPE_DRAWS = 8  # draws of three examples: a length changed with probability 0.1 shows in 92% of cases
_ROUNDING = 0.001  # a file may hold a few samples more than its manifest, with durations rounded, says
_MAX_KINDS = 4  # kinds of cuts tried as a template
_UNFORESEEN = (
    TypeError,
    ValueError,
    NotImplementedError,
    AttributeError,
)  # of classes and dtypes with ways of their own
_CACHE_BYTES = 64 << 20  # of learned structures, one example each


class WorstCaseBatches:
    """Makes worst-case batches from a sample of real cuts and the user's collation function.

    :param collate: what the DataLoader applies to a sampled CutSet: the dataset's ``__getitem__`` after the sampler's
        ``map()`` transforms.
    :param cuts: a sample of real cuts; a few dozen show what varies among them.
    :param measure_length: length of a cut in the unit of the bins' length edges.
    :param measure_tokens: number of output tokens of a cut; None where there's no telling.
    :param tile: False collates every batch for real.
    :param seed: for the dataset's random augmentation. All generators are left as they were found.
    :raises EmptySourceError: if ``cuts`` is empty.
    :raises WorstCaseError: on first use, if no cut of the sample can be read and stretched, or the dataset refuses it.
    """

    def __init__(
        self,
        *,
        collate: Callable[[CutSet], Any],
        cuts: Sequence[Cut],
        measure_length: Callable[[Cut], float],
        measure_tokens: Callable[[Cut], int | None],
        tile: bool = True,
        seed: int = 0,
    ) -> None:
        if not cuts:
            raise EmptySourceError(
                "the sample of cuts for worst-case batches must hold at least one cut, but is empty; "
                "check that the source of cuts yields any within the bins"
            )
        self._examples = Examples(cuts, measure_length=measure_length, measure_tokens=measure_tokens)
        self._draws = Draws(collate, self._examples, seed=seed)
        self._num_cuts = len(cuts)
        self._reason: str | None = None if tile else "tiling was switched off"
        self._prepared = False
        self._signature: Any = None
        self._structures: OrderedDict[Edges, Any] = OrderedDict()
        self._ends_shorter = False  # whether tiled batches do, as verified at the template's own edges
        self._checked: set[Edges] = set()
        self._told: set[str] = set()

    @property
    def how(self) -> str:
        """``"tiled"``, or ``"collated"`` from the bucket on at which tiling was refused; :attr:`reason` says why."""
        with self._apart():
            pass
        return "tiled" if self._reason is None else "collated"

    @property
    def reason(self) -> str | None:
        """Why batches are collated for real at their full size; None while they are tiled."""
        return self._reason

    def batch(self, *, input_len: float, output_len: int | None, size: int) -> Any:
        """Return a batch of ``size`` examples at the bucket's edges, as the user's dataset would collate it.

        The last of several examples is up to 0.2 seconds and one token shorter, where no padded size changes by that.

        :param input_len: upper length edge, in the unit of ``measure_length``.
        :param output_len: upper edge in tokens; None where tokens don't decide buckets: then texts and token fields
            grow with the length, as dense as the densest cuts of the sample.
        :raises InvalidArgumentError: for edges or a size that aren't positive.
        :raises WorstCaseError: if the cuts can't be stretched, or the dataset can't collate them.
        """
        _validate(input_len, output_len, size)
        edges = (float(input_len), output_len)
        with self._apart():
            if self._reason is None:
                try:
                    return tiling.tile(self._structure(edges), int(size))
                except tiling.RefusedError as refusal:
                    self._refuse(str(refusal))
            return self._collated(edges, int(size))

    def reached(self, *, input_len: float, output_len: int | None) -> tuple[float, int | None]:
        """Return the length and number of tokens, by the user's measures, of the example made for these edges."""
        _validate(input_len, output_len, 1)
        with self._apart():
            return self._measured(self._examples.at((float(input_len), output_len)))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        with self._draws.apart():
            self._prepare()
            yield

    # ---- preparation, once

    def _prepare(self) -> None:
        if self._prepared:
            return
        self._choose_kind()
        edges = self._examples.own_edges
        shapes = [shape_of(self._draws.draw(edges, 3, draw)) for draw in range(_SHAPE_DRAWS)]
        if any(shape != shapes[0] for shape in shapes):
            self._draws.learn_longest(edges)
        if self._reason is None:
            try:
                structure = self._check(edges)
                self._ends_shorter = self._check_shorter(structure, edges)
            except tiling.RefusedError as refusal:
                self._refuse(str(refusal))
            except _UNFORESEEN as error:
                self._refuse(f"the batch can't be taken apart ({type(error).__name__}: {error})")
        self._check_perturbed(edges)
        self._prepared = True

    def _choose_kind(self) -> None:
        """Take the commonest kind of cut, unless another kind dominates a batch of real cuts and it doesn't."""
        kinds = self._examples.kinds
        if len(kinds) > 1:
            logger.warning(
                "the sampled cuts are of %d kinds: %s",
                len(kinds),
                "; ".join(f"{len(cuts)} x {kind}" for kind, cuts in kinds[:_MAX_KINDS]),
            )
        excesses: dict[int, str] = {}
        for index in range(len(kinds)):
            if len(excesses) >= _MAX_KINDS or not self._examples.use_kind(index):
                continue
            excess = self._excess()
            if excess is not None and not excesses:
                self._draws.distinct = True  # the dataset may drop copies, such as repeated texts
                if self._excess() is None:
                    self._refuse(f"copies of one cut make a smaller batch than distinct cuts ({excess})")
                    break
                self._draws.distinct = False
            if excess is None:
                break
            excesses[index] = excess
        else:
            if not excesses:
                raise WorstCaseError(
                    "a worst-case batch needs one cut that can be read and stretched, but of "
                    f"{self._num_cuts} sampled cuts none could be "
                    f"({'; '.join(self._examples.failures[:3])}); check the data, or pass make_batch"
                )
            index = next(iter(excesses))
            self._examples.use_kind(index)
            self._warn_once(
                f"a batch of real cuts is larger than the worst case made for it: {excesses[index]}; "
                "sizes may be too large for such data, so keep a margin or pass make_batch"
            )
        if len(kinds) > 1:
            logger.warning("worst-case batches are made of this kind of cut: %s", kinds[index][0])

    def _excess(self, within: Edges | None = None) -> str | None:
        """Say where a batch of real cuts is larger than a worst-case batch that should dominate it."""
        for every_kind in (False, True) if len(self._examples.kinds) > 1 else (False,):
            real = self._examples.real(_NUM_REAL, within=within, every_kind=every_kind)
            batch = self._real_batch(real)
            if batch is None:
                continue
            edges = self._examples.edges_of(real) if within is None else within
            shape = shape_of(batch, strings=False)  # the characters of a text are no measure of its tokens
            limit: dict[str, tuple[int, ...]] = {}
            for draw in range(_SHAPE_DRAWS):  # of random lengths, the longest
                limit = largest(limit, shape_of(self._draws.draw(edges, len(real), draw), strings=False))
                excess = exceeds(shape, limit, tolerance=_ROUNDING)
                if excess is None:
                    break
            else:
                return excess
        return None

    def _check(self, edges: Edges) -> Any:
        """Return the structure at the template's own edges, after a comparison with real collations.

        :raises RefusedError: with the first difference.
        """
        structure = self._learn(edges)
        if not tiling.has_batch_dimension(structure):
            raise tiling.RefusedError("nothing in the batch grows with the number of examples")
        for size in _CHECK_SIZES:
            real, tiled = self._draws.draw(edges, size, 3), tiling.tile(structure, size)
            if self._draws.random_lengths:
                difference = exceeds(shape_of(real, strings=False), shape_of(tiled, strings=False))
            else:
                difference = compare(tiled, real, integers=tiling.is_steady(structure))
            if difference is not None:
                raise tiling.RefusedError(f"at {size} examples, {difference}")
        distinct = self._examples.real(_NUM_REAL)
        real = self._real_batch(distinct)
        difference = None if real is None else same_structure(tiling.tile(structure, len(distinct)), real)
        if difference is not None:
            raise tiling.RefusedError(f"with {len(distinct)} distinct cuts, {difference}")
        self._signature = tiling.signature(structure)
        return structure

    def _check_shorter(self, structure: Any, edges: Edges) -> bool:
        """Whether a shorter last example can be tiled, by a comparison with a real collation."""
        ragged = self._with_shorter(structure, edges)
        if ragged is structure:
            return False
        size = _CHECK_SIZES[0]
        real, tiled = self._draws.draw(edges, size, 3, shorter=True), tiling.tile(ragged, size)
        if self._draws.random_lengths:
            difference = exceeds(shape_of(real, strings=False), shape_of(tiled, strings=False))
        else:
            difference = compare(tiled, real, integers=tiling.is_steady(structure))
        if difference is not None:
            logger.info("all worst-case examples are of full length: at %d examples, %s", size, difference)
        return difference is None

    def _with_shorter(self, structure: Any, edges: Edges) -> Any:
        """Return the structure with a shorter last example; as it is, where that can't be tiled."""
        try:
            return tiling.with_last(structure, self._draws.longest_shorter(edges))
        except (tiling.RefusedError, WorstCaseError, *_UNFORESEEN) as error:
            logger.info("all worst-case examples of length %g are of full length: %s", edges[0], error)
            return structure

    def _check_perturbed(self, edges: Edges) -> None:
        """Say so if the length, or the number of tokens, changes nothing in the batch."""
        length, tokens = edges
        base = shape_of(self._draws.draw(edges, 2))
        if shape_of(self._draws.draw((2 * length, tokens), 2)) == base:
            self._warn_once(
                "examples of twice the length give batches of the same shape: the dataset crops or pads to a fixed "
                "length, or takes its inputs from elsewhere than the cut"
            )
        if tokens and shape_of(self._draws.draw((length, 2 * tokens), 2)) == base:
            logger.info(
                "examples of twice the number of tokens give batches of the same shape: the dataset crops its "
                "targets, has none, or takes them from elsewhere than the cut"
            )

    # ---- one bucket

    def _structure(self, edges: Edges) -> Any:
        if edges in self._structures:
            return self._structures[edges]
        structure = self._learn(edges)
        if tiling.signature(structure) != self._signature:
            raise tiling.RefusedError(f"a batch of length {edges[0]:g} has another structure than others")
        self._check_bucket(edges)
        if self._ends_shorter:
            structure = self._with_shorter(structure, edges)
        self._structures[edges] = structure
        while len(self._structures) > 1 and sum(map(tiling.structure_bytes, self._structures.values())) > _CACHE_BYTES:
            self._structures.popitem(last=False)
        return structure

    def _check_bucket(self, edges: Edges) -> None:
        if edges in self._checked:
            return
        self._checked.add(edges)
        length, tokens = self._measured(self._examples.at(edges))
        if edges[1] is not None and tokens != edges[1]:
            self._warn_once(
                f"the bucket of length {edges[0]:g} and {edges[1]} tokens is measured with {tokens} tokens, "
                "the nearest number that a text can have"
            )
        if length > edges[0] or length < 0.98 * edges[0]:
            self._warn_once(
                f"the bucket of length {edges[0]:g} is measured at a length of {length:g}, "
                "the nearest that a cut can have"
            )
        excess = self._excess(within=edges)
        if excess is not None:
            self._warn_once(
                f"a batch of real cuts is larger than the worst case for length {edges[0]:g}: {excess}; "
                "sizes may be too large for such data, so keep a margin or pass make_batch"
            )

    def _learn(self, edges: Edges) -> Any:
        if not self._draws.random_lengths:
            two, three, other = (
                self._draws.draw(edges, 2, 0),
                self._draws.draw(edges, 3, 1),
                self._draws.draw(edges, 2, 2),
            )
            return tiling.find_structure(two, three, other_two=other)
        two, other = self._draws.longest(edges, 2)
        three, _ = self._draws.longest(edges, 3)
        return tiling.find_structure(two, three, other_two=other, random_lengths=True)

    def _collated(self, edges: Edges, size: int) -> Any:
        """Collate ``size`` copies for real; of random lengths, until they are as long as small batches can be."""
        shorter = size > 1 and self._draws.can_be_shorter(edges)
        batch = self._draws.draw(edges, size, shorter=shorter)
        self._check_bucket(edges)
        if not self._draws.random_lengths:
            return batch
        for draw in range(1, LENGTH_DRAWS):
            if self._draws.is_longest(batch, edges, size):
                break
            another = self._draws.draw(edges, size, draw, shorter=shorter)
            if num_bytes(another) > num_bytes(batch):
                batch = another
        return batch

    def _real_batch(self, cuts: Sequence[Cut]) -> Any:
        """Collate real cuts as they are; None if there are none, or the dataset can't, which is told."""
        if not cuts:
            return None
        try:
            return self._draws.collate(list(cuts), 5, f"{len(cuts)} real cuts")
        except WorstCaseError as error:
            self._warn_once(f"worst-case batches can't be compared with real ones: {error}")
            return None

    def _measured(self, cut: DataCut) -> tuple[float, int | None]:
        return float(self._examples.measure_length(cut)), self._examples.measure_tokens(cut)

    def _refuse(self, reason: str) -> None:
        self._reason = reason
        self._structures.clear()
        logger.info("worst-case batches are collated at their full size, since tiling was refused: %s", reason)

    def _warn_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning("%s", text)


def stretch_cut(
    cut: Cut,
    *,
    input_len: float,
    output_len: int | None,
    measure_length: Callable[[Cut], float],
    measure_tokens: Callable[[Cut], int | None],
    index: int = 0,
) -> DataCut:
    """Return a copy of ``cut`` in memory, at ``input_len`` and ``output_len`` by the given measures.

    :param index: number of the copy; its ids are made unique by it.
    :raises WorstCaseError: if the cut can't be stretched, or the measures don't follow it.
    """
    _validate(input_len, output_len, 1)
    stretched = fit_to_edges(
        PlainCut.read(cut),
        input_len=float(input_len),
        output_len=output_len,
        measure_length=measure_length,
        measure_tokens=measure_tokens,
        laws={},
    )
    return clone(stretched, index)


def _validate(input_len: float, output_len: int | None, size: int) -> None:
    if not (math.isfinite(input_len) and input_len > 0):
        raise InvalidArgumentError(f"input_len must be a finite length above 0, but is {input_len!r}; check the bins")
    if output_len is not None and output_len < 0:
        raise InvalidArgumentError(
            f"output_len must be None or a number of tokens from 0 on, but is {output_len!r}; check the bins"
        )
    if size < 1:
        raise InvalidArgumentError(f"size must be at least 1 example, but is {size!r}; ask for a batch of 1 or more")
