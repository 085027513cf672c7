"""The heaviest batch that a bucket can yield at a given size, made from the user's own cuts and dataset.

A real cut is stretched to the bucket's edges and collated by the user's dataset twice, as a batch of two and as one
of three; what changed is the batch dimension, and is repeated up to the size asked for (:mod:`~lhotse_oomfit.tile`).
That is checked against real collations, of copies and of distinct real cuts, before it is believed. Where it doesn't
hold, or the batch can't be understood, the batch is collated for real at its full size: slower, never wrong.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lhotse.cut import Cut, CutSet
from lhotse.cut.data import DataCut

from lhotse_oomfit import tile as tiling
from lhotse_oomfit.errors import EmptySourceError, InvalidArgumentError, WorstCaseError
from lhotse_oomfit.stretch import PlainCut, clone, num_samples_at
from lhotse_oomfit.transcript import FieldLaw, fit_output, learn_laws, scale_output, token_fields
from lhotse_oomfit.undisturbed import reseed, undisturbed

__all__ = ["WorstCaseBatches", "stretch_cut"]

logger = logging.getLogger(__name__)

_CHECK_SIZES = (5, 131)  # 131: a prime above 128, so that padding the batch to 8, 64 or 128 shows
_SHAPE_DRAWS = 8  # draws of three examples: a length changed with probability 0.1 shows in 92% of cases
_LENGTH_DRAWS = 16  # draws of two and of three from which the longest are taken
_FULL_DRAWS = 3  # real collations at full size, where lengths are random
_MAX_ROUNDS = 4  # text and length fitted in turns, for measures that count both together
_CACHED_BUCKETS = 128

Edges = tuple[float, "int | None"]


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
        self._collate = collate
        self._cuts = list(cuts)
        self._measure_length = measure_length
        self._measure_tokens = measure_tokens
        self._seed = seed
        self._reason: str | None = None if tile else "tiling was switched off"
        self._template: PlainCut | None = None
        self._laws: dict[str, FieldLaw] = {}
        self._real: list[Cut] = []
        self._random_lengths = False
        self._signature: Any = None
        self._examples: OrderedDict[Edges, DataCut] = OrderedDict()
        self._structures: OrderedDict[Edges, Any] = OrderedDict()
        self._told: set[str] = set()

    @property
    def how(self) -> str:
        """``"tiled"``, or ``"collated"`` from the first bucket on where tiling was refused; :attr:`reason` says why."""
        with undisturbed(self._collate):
            self._prepare()
        return "tiled" if self._reason is None else "collated"

    @property
    def reason(self) -> str | None:
        """Why batches are collated for real at their full size; None while they are tiled."""
        return self._reason

    def batch(self, *, input_len: float, output_len: int | None, size: int) -> Any:
        """Return a batch of ``size`` examples at the bucket's edges, as the user's dataset would collate it.

        :param input_len: upper length edge, in the unit of ``measure_length``.
        :param output_len: upper edge in tokens; None where tokens don't decide buckets: then the densest text of the
            sample is lengthened with the audio.
        :raises InvalidArgumentError: for edges or a size that aren't positive.
        :raises WorstCaseError: if the dataset can't collate the stretched cuts.
        """
        _validate(input_len, output_len, size)
        edges = (float(input_len), output_len)
        with undisturbed(self._collate):
            self._prepare()
            if self._reason is None:
                try:
                    return tiling.tile(self._structure(edges), size)
                except tiling.RefusedError as refusal:
                    self._refuse(str(refusal))
            return self._collated(edges, size)

    def reached(self, *, input_len: float, output_len: int | None) -> tuple[float, int | None]:
        """Return the length and number of tokens, by the user's measures, of the example made for these edges."""
        with undisturbed(self._collate):
            self._prepare()
            example = self._example((float(input_len), output_len))
            return float(self._measure_length(example)), self._measure_tokens(example)

    def _prepare(self) -> None:
        if self._template is not None:
            return
        self._template = self._choose_template()
        self._laws = learn_laws(self._real, self._measure_tokens)
        edges = self._own_edges()
        self._random_lengths = self._draws_lengths(edges)
        if self._reason is None:
            try:
                self._check(edges)
            except tiling.RefusedError as refusal:
                self._refuse(str(refusal))
        self._check_dominance(self._real)

    def _choose_template(self) -> PlainCut:
        """Take the densest readable cut of the commonest kind; unreadable ones and other kinds are told of."""
        kinds: dict[Any, list[Cut]] = {}
        for cut in self._cuts:
            kinds.setdefault(_kind_of(cut), []).append(cut)
        ranked = sorted(kinds.items(), key=lambda item: -len(item[1]))
        if len(ranked) > 1:
            logger.warning(
                "the sample of %d cuts holds %d kinds; worst-case batches are made of the commonest, %s (%d cuts); "
                "others: %s",
                len(self._cuts),
                len(ranked),
                ranked[0][0],
                len(ranked[0][1]),
                "; ".join(f"{kind} ({len(cuts)})" for kind, cuts in ranked[1:4]),
            )
        failures: list[str] = []
        for _, cuts in ranked:
            self._real = sorted(cuts, key=self._density, reverse=True)
            for cut in self._real:
                try:
                    return PlainCut.read(cut)
                except (MemoryError, torch.OutOfMemoryError):
                    raise
                except Exception as error:  # noqa: BLE001 - any reader may raise anything; raised below if none can be read
                    failures.append(
                        f"{cut.id}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                    )
                    logger.warning("cut %s can't serve as a worst case and is passed over: %s", cut.id, failures[-1])
        raise WorstCaseError(
            f"a worst-case batch needs one readable cut, but none of the {len(self._cuts)} sampled cuts could be read "
            f"and stretched ({'; '.join(failures[:3])}); check the data, or pass make_batch"
        )

    def _density(self, cut: Cut) -> float:
        """Tokens per unit of length, or characters where tokens can't be counted."""
        tokens = self._measure_tokens(cut)
        if tokens is None:
            tokens = sum(len(sup.text or "") for sup in cut.supervisions)
        return tokens / max(float(self._measure_length(cut)), 1e-9)

    def _own_edges(self) -> Edges:
        template = self._plain.cut
        return float(self._measure_length(template)), self._measure_tokens(template)

    @property
    def _plain(self) -> PlainCut:
        if self._template is None:
            raise RuntimeError("no template was chosen yet")
        return self._template

    def _example(self, edges: Edges) -> DataCut:
        if edges not in self._examples:
            _trim(self._examples, 4)  # audio in memory: keep the bucket in work, not all of them
            example = self._stretch(edges)
            self._examples[edges] = example
            self._tell_of_missed_edges(example, edges)
        return self._examples[edges]

    def _stretch(self, edges: Edges) -> DataCut:
        input_len, output_len = edges
        if output_len is None:
            densest = max(self._density(cut) for cut in self._real)
            if self._measure_tokens(self._plain.cut):
                output_len = math.ceil(densest * input_len - 1e-6)
        return _stretched(
            self._plain,
            input_len=input_len,
            output_len=output_len,
            measure_length=self._measure_length,
            measure_tokens=self._measure_tokens,
            laws=self._laws,
        )

    def _tell_of_missed_edges(self, example: DataCut, edges: Edges) -> None:
        length, tokens = float(self._measure_length(example)), self._measure_tokens(example)
        if edges[1] is not None and tokens != edges[1]:
            self._warn_once(
                f"the bucket of {edges[0]:g} and {edges[1]} tokens is measured at {tokens} tokens: "
                "no text has the number of tokens asked for"
            )
        if length > edges[0] or length < 0.98 * edges[0]:
            self._warn_once(
                f"the bucket of length {edges[0]:g} is measured at a length of {length:g}: "
                "the measure of length can't be driven closer"
            )

    def _draw(self, edges: Edges, size: int, draw: int = 0) -> Any:
        """Collate ``size`` copies of the example for real, with the random numbers of one draw."""
        example = self._example(edges)
        return self._call(
            [clone(example, index) for index in range(size)], draw, f"{size} copies of cut {example.id!r}"
        )

    def _call(self, cuts: list[Cut], draw: int, what: str) -> Any:
        reseed(self._seed + draw)
        try:
            return self._collate(CutSet.from_cuts(cuts))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise WorstCaseError(
                f"the dataset must collate worst-case examples, but raised {type(error).__name__} on {what}: {error}; "
                "if it can't work with cuts held in memory, pass make_batch(batch_size, input_len, output_len)"
            ) from error

    def _draws_lengths(self, edges: Edges) -> bool:
        """Whether the dataset draws lengths at random, such as by perturbing speed."""
        shapes = [tiling.shape_of(self._draw(edges, 3, draw)) for draw in range(_SHAPE_DRAWS)]
        return any(shape != shapes[0] for shape in shapes)

    def _structure(self, edges: Edges) -> Any:
        if edges not in self._structures:
            _trim(self._structures, _CACHED_BUCKETS)
            structure = self._learn(edges)
            if self._signature is not None and tiling.signature(structure) != self._signature:
                raise tiling.RefusedError(f"the structure of a batch of length {edges[0]:g} differs from others")
            self._check_dominance([cut for cut in self._real if self._falls_in(cut, edges)][:4], edges)
            self._structures[edges] = structure
        return self._structures[edges]

    def _learn(self, edges: Edges) -> Any:
        if not self._random_lengths:
            two, three, other = self._draw(edges, 2, 0), self._draw(edges, 3, 1), self._draw(edges, 2, 2)
            return tiling.find_structure(two, three, other_two=other)
        two, other = self._longest(edges, 2)
        three, _ = self._longest(edges, 3)
        return tiling.find_structure(two, three, other_two=other, random_lengths=True)

    def _longest(self, edges: Edges, size: int) -> tuple[Any, Any]:
        """Return the largest of many draws, and another of the same shape (itself, if there's none)."""
        draws = [self._draw(edges, size, draw) for draw in range(_LENGTH_DRAWS)]
        draws.sort(key=tiling.num_bytes, reverse=True)
        largest = tiling.shape_of(draws[0])
        return draws[0], next((d for d in draws[1:] if tiling.shape_of(d) == largest), draws[0])

    def _check(self, edges: Edges) -> None:
        """Learn the structure at the template's own size, and compare it with real collations.

        :raises RefusedError: with the first difference.
        """
        structure = self._learn(edges)
        if not tiling.has_batch_dimension(structure):
            raise tiling.RefusedError("nothing in the batch grows with the number of examples")
        for size in _CHECK_SIZES:
            real, tiled = self._draw(edges, size, 3), tiling.tile(structure, size)
            difference = (
                tiling.exceeds(real, tiled)
                if self._random_lengths
                else tiling.compare(tiled, real, integers=tiling.is_steady(structure))
            )
            if difference is not None:
                raise tiling.RefusedError(f"at {size} examples, {difference}")
        distinct = self._readable(_CHECK_SIZES[0])
        if len(distinct) > 1:
            real = self._call(distinct, 4, f"{len(distinct)} real cuts")
            difference = tiling.same_structure(tiling.tile(structure, len(distinct)), real)
            if difference is not None:
                raise tiling.RefusedError(f"with {len(distinct)} distinct cuts, {difference}")
        self._signature = tiling.signature(structure)
        self._structures[edges] = structure
        self._check_perturbed(edges)

    def _check_perturbed(self, edges: Edges) -> None:
        """Say so if the length, or the number of tokens, changes nothing in the batch."""
        length, tokens = edges
        base = tiling.shape_of(self._draw(edges, 2, 0))
        if tiling.shape_of(self._draw((2 * length, tokens), 2, 0)) == base:
            self._warn_once(
                "examples of twice the length give batches of the same shape: the dataset crops or pads to "
                "a fixed length, or doesn't look at the stretched data"
            )
        if tokens and tiling.shape_of(self._draw((length, 2 * tokens), 2, 0)) == base:
            self._warn_once(
                "examples of twice the number of tokens give batches of the same shape: the dataset takes "
                "its targets from elsewhere; pass make_batch if the model's memory depends on them"
            )

    def _check_dominance(self, cuts: Sequence[Cut], edges: Edges | None = None) -> None:
        """Say so if a batch of real cuts within the edges is larger, anywhere, than the worst case for these edges."""
        real = self._readable(_CHECK_SIZES[0], cuts)
        if not real:
            return
        if edges is None:
            lengths = [float(self._measure_length(cut)) for cut in real]
            tokens = [self._measure_tokens(cut) for cut in real]
            edges = max(lengths), None if None in tokens else max(t for t in tokens if t is not None)
        excess = tiling.exceeds(self._call(real, 5, f"{len(real)} real cuts"), self._draw(edges, len(real), 5))
        if excess is not None:
            self._warn_once(
                f"a batch of real cuts is larger than the worst case for length {edges[0]:g}: {excess}; "
                "sizes may be too large for such data"
            )

    def _falls_in(self, cut: Cut, edges: Edges) -> bool:
        tokens = self._measure_tokens(cut)
        fits = edges[1] is None or tokens is None or tokens <= edges[1]
        return fits and 0.7 * edges[0] < float(self._measure_length(cut)) <= edges[0]

    def _readable(self, num: int, cuts: Sequence[Cut] | None = None) -> list[Cut]:
        """Return up to ``num`` distinct real cuts whose data can be read."""
        return list(_take(num, (cut for cut in (self._real if cuts is None else cuts) if _can_be_read(cut))))

    def _collated(self, edges: Edges, size: int) -> Any:
        if not self._random_lengths:
            return self._draw(edges, size)
        largest, most = None, -1
        for draw in range(_FULL_DRAWS):
            batch = self._draw(edges, size, draw)
            if tiling.num_bytes(batch) > most:
                largest, most = batch, tiling.num_bytes(batch)
        return largest

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
    stretched = _stretched(
        PlainCut.read(cut),
        input_len=input_len,
        output_len=output_len,
        measure_length=measure_length,
        measure_tokens=measure_tokens,
        laws={},
    )
    return clone(stretched, index)


def _stretched(
    plain: PlainCut,
    *,
    input_len: float,
    output_len: int | None,
    measure_length: Callable[[Cut], float],
    measure_tokens: Callable[[Cut], int | None],
    laws: dict[str, FieldLaw],
) -> DataCut:
    own = float(measure_length(plain.cut))
    duration = float(plain.cut.duration)

    def at(num_samples: int) -> DataCut:
        cut = plain.stretched(num_samples)
        if output_len is None:
            return scale_output(cut, cut.duration / duration)
        return fit_output(cut, output_len, measure_tokens, laws)

    if abs(own - duration) <= 1e-3:
        num = num_samples_at(input_len, plain.sampling_rate)
        cut = at(num)
        if 0 <= input_len - float(measure_length(cut)) <= 2 / plain.sampling_rate:
            return cut
    else:
        num = max(1, round(duration * input_len / max(own, 1e-9) * plain.sampling_rate))
    # The length isn't measured in seconds (frames, samples, audio and prompt together): bisect over samples.
    low, high = 1, num
    for _ in range(_MAX_ROUNDS * 8):
        if float(measure_length(at(high))) > input_len:
            break
        low, high = high, 2 * high
    else:
        raise WorstCaseError(
            f"the length of cut {plain.cut.id!r} must reach {input_len:g}, but stays at "
            f"{float(measure_length(at(low))):g} however long the cut is made; pass make_batch"
        )
    while high - low > max(1, low >> 16):
        middle = (low + high) // 2
        if float(measure_length(at(middle))) <= input_len:
            low = middle
        else:
            high = middle
    return at(low)


def _validate(input_len: float, output_len: int | None, size: int) -> None:
    if not (math.isfinite(input_len) and input_len > 0):
        raise InvalidArgumentError(f"input_len must be a finite length above 0, but is {input_len!r}")
    if output_len is not None and output_len < 0:
        raise InvalidArgumentError(f"output_len must be None or a number of tokens from 0 on, but is {output_len!r}")
    if size < 1:
        raise InvalidArgumentError(f"size must be at least 1 example, but is {size!r}")


def _kind_of(cut: Cut) -> tuple[tuple[str, Any], ...]:
    """What datasets are sensitive to besides lengths; readable in a log line."""
    mixed = type(cut).__name__
    fields = Counter(name for (_, name) in token_fields(cut)) if hasattr(cut, "supervisions") else Counter()
    return (
        ("cut", mixed),
        ("channels", getattr(cut, "num_channels", None)),
        ("rate", getattr(cut, "sampling_rate", None)),
        ("recording", bool(getattr(cut, "has_recording", False))),
        ("features", bool(getattr(cut, "has_features", False))),
        ("supervisions", len(getattr(cut, "supervisions", ()))),
        ("text", sum(sup.text is not None for sup in getattr(cut, "supervisions", ()))),
        ("fields", tuple(sorted(fields))),
    )


def _can_be_read(cut: Cut) -> bool:
    try:
        PlainCut.read(cut)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # noqa: BLE001 - any reader may raise anything; an unreadable cut is only left out
        return False
    return True


def _take(num: int, items: Iterator[Any]) -> Iterator[Any]:
    for _, item in zip(range(num), items, strict=False):
        yield item


def _trim(cache: OrderedDict[Edges, Any], limit: int) -> None:
    while len(cache) >= limit:
        cache.popitem(last=False)
