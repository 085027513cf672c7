"""What a length bucket is, and which one an example belongs to.

Bins are *closed upper edges*: ``N`` edges make ``N`` buckets, and an example of exactly an edge's length belongs to
that edge's bucket (as Lhotse's ``bisect_left`` has it, whatever its documentation says). Whatever lies beyond the
last edge belongs to no bucket. A bin is a length (1D), or a length and a number of output tokens (2D).
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, Literal

from lhotse_oomfit.errors import EmptySourceError, InvalidArgumentError, InvalidBinsError, MissingTokensError

__all__ = ["Bins", "Rejection", "checked_length", "estimate_bins", "output_length"]

logger = logging.getLogger(__name__)


class Rejection(str, Enum):
    """Why an example belongs to no bucket."""

    TOO_LONG = "too long"
    TOO_MANY_TOKENS = "too many tokens"
    TOO_DENSE = "too dense"
    TOO_SPARSE = "too sparse"
    NO_TOKENS = "no tokens"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Closed upper edges of length buckets, and the limits on token density that go with them.

    :param edges: 1D: increasing lengths (seconds, or the sampler's own unit). 2D: increasing pairs of length and
        number of output tokens.
    :param strict_2d: ``True``: only the sub-buckets of the first length edge that fits are considered.
        ``False``: the first bucket that fits both the length and the tokens is taken.
    :param min_tps: one per bucket: fewest output tokens per unit of length (per second, usually).
    :param max_tps: one per bucket: most output tokens per unit of length.
    :raises InvalidBinsError: when these don't describe buckets.
    """

    edges: tuple[float, ...] | tuple[tuple[float, int], ...]
    strict_2d: bool = True
    min_tps: tuple[float, ...] | None = None
    max_tps: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_edges(self.edges)
        for name in ("min_tps", "max_tps"):
            limits = getattr(self, name)
            if limits is None:
                continue
            if len(limits) != len(self.edges):
                raise InvalidBinsError(
                    f"{name} must be one number, or one per bucket: it has {len(limits)} numbers for "
                    f"{len(self.edges)} buckets"
                )
            for limit in limits:
                if not (math.isfinite(limit) and limit >= 0.0):
                    raise InvalidBinsError(f"{name} must hold finite numbers of at least 0, it holds {limit!r}")
        if self.min_tps is not None and self.max_tps is not None:
            for low, high in zip(self.min_tps, self.max_tps, strict=True):
                if low > high:
                    raise InvalidBinsError(f"min_tps must not exceed max_tps, it is {low} where max_tps is {high}")
        # Look-up tables for select(); not fields, so that equality and repr speak of the bins alone.
        groups: list[tuple[float, list[tuple[int, int]]]] = []
        if self.is_2d:
            numbered = [(edge[0], edge[1], k) for k, edge in enumerate(self.edges)]  # type: ignore[index]
            groups = [
                (length, [(tokens, k) for _, tokens, k in members])
                for length, members in groupby(numbered, key=lambda edge: edge[0])
            ]
        object.__setattr__(self, "_is_2d", isinstance(self.edges[0], tuple))
        object.__setattr__(self, "_has_density", self.min_tps is not None or self.max_tps is not None)
        object.__setattr__(self, "_lengths", tuple(g[0] for g in groups) if groups else tuple(self.edges))
        object.__setattr__(self, "_token_edges", tuple(tuple(t for t, _ in g[1]) for g in groups))
        object.__setattr__(self, "_first", tuple(g[1][0][1] for g in groups))

    @classmethod
    def from_edges(
        cls,
        duration_bins: Sequence[Any],
        *,
        strict_2d: bool = True,
        min_tps: float | Sequence[float] | None = None,
        max_tps: float | Sequence[float] | None = None,
    ) -> Bins:
        """Bins from any sequence of edges: lists, tuples, numpy arrays; of numbers, or of (length, tokens) pairs.

        A single ``min_tps`` or ``max_tps`` holds for every bucket.

        :raises InvalidBinsError: when these don't describe buckets; the message says which edge is wrong.
        """
        if isinstance(duration_bins, (str, bytes)) or not isinstance(duration_bins, Iterable):
            raise InvalidBinsError(f"duration_bins must be a sequence of numbers or pairs, it is {duration_bins!r}")
        edges = tuple(_edge(edge) for edge in duration_bins)
        return cls(
            edges=edges,  # type: ignore[arg-type]
            strict_2d=strict_2d,
            min_tps=_limits("min_tps", min_tps, len(edges)),
            max_tps=_limits("max_tps", max_tps, len(edges)),
        )

    @property
    def is_2d(self) -> bool:
        """Whether a bin limits the output tokens too."""
        return isinstance(self.edges[0], tuple)

    @property
    def needs_tokens(self) -> bool:
        """Whether the number of output tokens has a say in the choice of a bucket."""
        return self.is_2d or self.min_tps is not None or self.max_tps is not None

    def __len__(self) -> int:
        return len(self.edges)

    def select(self, length: float, num_tokens: int | None = None) -> int | Rejection:
        """The bucket of an example, or why there is none.

        A length of zero is a length like any other: with tokens its density is infinite, without any it is zero.

        :param length: in the unit of the edges.
        :param num_tokens: output tokens; needed in 2D and with ``min_tps``/``max_tps``, ``None`` there is
            :attr:`Rejection.NO_TOKENS`.
        :raises InvalidArgumentError: when ``length`` is negative or not a number.
        """
        if not length >= 0.0:
            raise InvalidArgumentError(f"the length of an example must be a number of at least 0, it is {length!r}")
        lengths: tuple[float, ...] = self._lengths  # type: ignore[attr-defined]
        has_density: bool = self._has_density  # type: ignore[attr-defined]
        group = bisect_left(lengths, length)
        if group == len(lengths):
            return Rejection.TOO_LONG
        if not self._is_2d:  # type: ignore[attr-defined]
            if not has_density:
                return group
            return Rejection.NO_TOKENS if num_tokens is None else self._density(group, length, num_tokens) or group
        if num_tokens is None:
            return Rejection.NO_TOKENS
        token_edges: tuple[tuple[int, ...], ...] = self._token_edges  # type: ignore[attr-defined]
        first: tuple[int, ...] = self._first  # type: ignore[attr-defined]
        if self.strict_2d:
            within = bisect_left(token_edges[group], num_tokens)
            if within == len(token_edges[group]):
                return Rejection.TOO_MANY_TOKENS
            k = first[group] + within
            return (self._density(k, length, num_tokens) or k) if has_density else k
        reason = Rejection.TOO_MANY_TOKENS
        for g in range(group, len(lengths)):
            within = bisect_left(token_edges[g], num_tokens)
            for k in range(first[g] + within, first[g] + len(token_edges[g])):
                refused = self._density(k, length, num_tokens) if has_density else None
                if refused is None:
                    return k
                reason = refused
        return reason

    def _density(self, k: int, length: float, num_tokens: int) -> Rejection | None:
        # Compared as products, so that a length of zero needs no case of its own.
        if self.max_tps is not None and num_tokens > self.max_tps[k] * length:
            return Rejection.TOO_DENSE
        if self.min_tps is not None and num_tokens < self.min_tps[k] * length:
            return Rejection.TOO_SPARSE
        if self.min_tps is not None and self.min_tps[k] > 0.0 and num_tokens == 0:
            return Rejection.TOO_SPARSE  # also at length 0
        return None

    def input_len(self, k: int) -> float:
        """The longest input that bucket ``k`` admits."""
        edge = self.edges[k]
        return edge[0] if isinstance(edge, tuple) else edge

    def max_output_len(self, k: int) -> int | None:
        """The most output tokens that an example of bucket ``k`` can have; ``None`` where nothing limits them."""
        edge = self.edges[k]
        limits = [edge[1]] if isinstance(edge, tuple) else []
        if self.max_tps is not None:
            limits.append(math.floor(self.max_tps[k] * self.input_len(k)))
        return min(limits) if limits else None

    def as_lists(self) -> list[Any]:
        """The edges as plain lists, as YAML and NeMo's ``bucket_duration_bins`` have them."""
        return [list(edge) if isinstance(edge, tuple) else edge for edge in self.edges]


def _edge(edge: Any) -> float | tuple[float, int]:
    if isinstance(edge, Iterable) and not isinstance(edge, (str, bytes)):
        pair = list(edge)
        if len(pair) != 2:
            raise InvalidBinsError(f"a 2D bin must be a pair of length and tokens, it is {pair!r}")
        length, tokens = _number(pair[0]), _number(pair[1])
        if not tokens.is_integer():
            raise InvalidBinsError(f"the tokens of a 2D bin must be a whole number, they are {pair[1]!r} in {pair!r}")
        return (length, int(tokens))
    return _number(edge)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidBinsError(f"duration_bins must hold numbers, they hold {value!r}") from None
    if isinstance(value, (str, bytes, bool)):
        raise InvalidBinsError(f"duration_bins must hold numbers, they hold {value!r}")
    if not math.isfinite(number):
        raise InvalidBinsError(f"duration_bins must hold finite numbers, they hold {value!r}")
    return number


def _limits(name: str, limits: float | Sequence[float] | None, num_bins: int) -> tuple[float, ...] | None:
    if limits is None:
        return None
    # Arrays and tensors without a dimension are numbers, although they have an __iter__.
    several = isinstance(limits, Iterable) and not isinstance(limits, (str, bytes)) and getattr(limits, "ndim", 1) > 0
    values: list[Any] = list(limits) if several else [limits] * num_bins  # type: ignore[arg-type]
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        numbers = ()
    if len(numbers) < len(values) or any(isinstance(value, (str, bytes, bool)) for value in values):
        raise InvalidBinsError(f"{name} must be one number, or one per bucket, it is {limits!r}")
    return numbers


def _check_edges(edges: Sequence[Any]) -> None:
    if len(edges) == 0:
        raise InvalidBinsError("duration_bins must hold at least one edge, they are empty")
    if len({isinstance(edge, tuple) for edge in edges}) > 1:
        raise InvalidBinsError(
            f"duration_bins must be all numbers (1D) or all pairs of length and tokens (2D), they are {list(edges)!r}"
        )
    for edge in edges:
        numbers = edge if isinstance(edge, tuple) else (edge,)
        if not all(math.isfinite(number) for number in numbers):
            raise InvalidBinsError(f"duration_bins must hold finite numbers, they hold {edge!r}")
        if numbers[0] <= 0.0 or (len(numbers) == 2 and numbers[1] < 0):
            raise InvalidBinsError(f"duration_bins must hold upper edges above 0, they hold {edge!r}")
    for before, after in pairwise(edges):
        if before == after:
            raise InvalidBinsError(f"duration_bins must not repeat an edge, {after!r} is there twice")
        if before > after:
            raise InvalidBinsError(f"duration_bins must be sorted upwards, {after!r} comes after {before!r}")


def output_length(cut: Any, tokenizer: Callable[[str], Sequence[Any]] | None = None) -> int | None:
    """How many output tokens an example has, counted as NeMo counts them.

    The length of ``cut.input_ids`` where it is set (prompt and answer together); else the sum over the supervisions
    of the length of ``supervision.tokens``, or of ``tokenizer(supervision.text)`` where there are no tokens.
    A supervision with neither tokens nor text counts as 0.

    :param cut: a Lhotse cut, or an object of the same shape.
    :param tokenizer: turns a text into a sequence of tokens.
    :return: the number of tokens; ``None`` when there is no supervision at all, or a text that nothing can count.
    """
    input_ids = _custom(cut, "input_ids")
    if input_ids is not None:
        return len(input_ids)
    supervisions = getattr(cut, "supervisions", None)
    if not supervisions:
        return None
    total = 0
    for supervision in supervisions:
        tokens = _custom(supervision, "tokens")
        if tokens is not None:
            total += len(tokens)
        elif supervision.text:
            if tokenizer is None:
                return None
            total += len(tokenizer(supervision.text))
    return total


def _custom(item: Any, name: str) -> Any:
    # Lhotse's custom fields live in a dict; asking for a missing one as an attribute costs an exception.
    fields = getattr(item, "__dict__", None)
    if fields is None or "custom" not in fields:
        return getattr(item, name, None)
    custom = fields["custom"]
    if custom and name in custom:
        return custom[name]
    return fields.get(name)


def estimate_bins(
    cuts: Iterable[Any] | Sequence[Iterable[Any]],
    num_buckets: int,
    *,
    num_subbuckets: int | None = None,
    measure_length: Callable[[Any], float] | None = None,
    measure_tokens: Callable[[Any], int | None] | None = None,
    min_tps: float | None = None,
    max_tps: float | Literal["suggest"] | None = None,
    strict_2d: bool = True,
    weights: Sequence[float] | None = None,
) -> Bins:
    """Bins that hold about equal total lengths (duration-weighted quantiles), the top edge included.

    That is the balance of NeMo's ``estimate_duration_bins.py`` and ``estimate_duration_bins_2d.py``, except that
    the last edge is the longest example, so that the bins cover all the data they were made from. In 2D each length
    bucket is divided again into sub-buckets of about equal total tokens. Fewer bins than asked for come back when
    the data has too few distinct lengths.

    :param cuts: the examples; with ``weights``, a sequence of sources.
    :param num_buckets: how many length buckets.
    :param num_subbuckets: how many token buckets in each of them (2D); ``None`` for 1D.
    :param measure_length: length of an example, its ``duration`` by default.
    :param measure_tokens: output tokens of an example, :func:`output_length` by default.
    :param min_tps: examples with fewer tokens per unit of length are left out, and the bins refuse them.
    :param max_tps: likewise for more tokens; ``"suggest"`` takes the mean plus four standard deviations.
    :param strict_2d: passed on to the bins.
    :param weights: one per source: how often an example of that source is drawn, relative to the others.
    :raises InvalidArgumentError: when the length of an example, or its number of tokens, isn't a finite number of at
        least 0; the message names the example.
    :raises EmptySourceError: when no example is left to estimate from.
    :raises MissingTokensError: when tokens are needed and an example's can't be counted.
    """
    if num_buckets < 1:
        raise InvalidArgumentError(f"num_buckets must be at least 1, it is {num_buckets}")
    if num_subbuckets is not None and num_subbuckets < 1:
        raise InvalidArgumentError(f"num_subbuckets must be at least 1, it is {num_subbuckets}")
    for name, limit in (("min_tps", min_tps), ("max_tps", max_tps)):
        if limit is None or (name == "max_tps" and isinstance(limit, str) and limit == "suggest"):
            continue
        if isinstance(limit, (str, bytes, bool)) or not _is_amount(limit):
            other = ", or 'suggest'" if name == "max_tps" else ""
            raise InvalidArgumentError(f"{name} must be a finite number of at least 0{other}, it is {limit!r}")
    sources: list[Iterable[Any]] = [cuts]
    if weights is not None:
        sources = list(cuts)
        if len(sources) != len(weights):
            raise InvalidArgumentError(
                f"weights must be one per source: there are {len(weights)} weights for {len(sources)} sources"
            )
        if not all(math.isfinite(w) and w >= 0.0 for w in weights) or sum(weights) <= 0.0:
            raise InvalidArgumentError(f"weights must be numbers of at least 0 and not all 0, they are {weights!r}")
    length_of = measure_length or attrgetter("duration")
    tokens_of = measure_tokens or output_length
    with_tokens = num_subbuckets is not None or min_tps is not None or max_tps is not None
    examples: list[tuple[float, int, float]] = []
    for number, source in enumerate(sources):
        measured = [_measure(cut, length_of, tokens_of if with_tokens else None) for cut in source]
        kept = [pair for pair in measured if pair is not None]
        if kept:
            # A weight is per draw from the source, whatever its size.
            share = 1.0 if weights is None else weights[number] / len(kept)
            examples += [(length, tokens, share) for length, tokens in kept if share > 0.0]
    if max_tps == "suggest":
        max_tps = _suggest_max_tps(examples)
    examples = [
        e
        for e in examples
        if (max_tps is None or e[1] <= max_tps * e[0]) and (min_tps is None or e[1] >= min_tps * e[0])
    ]
    if not any(length > 0.0 for length, _, _ in examples):
        raise EmptySourceError("bins must be estimated from at least one example with a length, there is none")
    examples.sort()
    lengths = _quantiles([(length, share) for length, _, share in examples], num_buckets)
    if len(lengths) < num_buckets:
        logger.info("%d length bins instead of %d: the lengths take too few values", len(lengths), num_buckets)
    if num_subbuckets is None:
        return Bins.from_edges(lengths, strict_2d=strict_2d, min_tps=min_tps, max_tps=max_tps)
    edges: list[tuple[float, int]] = []
    start = 0
    for length in lengths:
        stop = start
        while stop < len(examples) and examples[stop][0] <= length:
            stop += 1
        tokens = sorted((float(count), share) for _, count, share in examples[start:stop])
        edges += [(length, int(edge)) for edge in _quantiles(tokens, num_subbuckets)]
        start = stop
    return Bins.from_edges(edges, strict_2d=strict_2d, min_tps=min_tps, max_tps=max_tps)


def _measure(
    cut: Any, length_of: Callable[[Any], float], tokens_of: Callable[[Any], int | None] | None
) -> tuple[float, int] | None:
    if tokens_of is None:
        return checked_length(cut, length_of(cut), finite=True), 0
    tokens = tokens_of(cut)
    if tokens is None:
        if has_text(cut):
            raise missing_tokens(cut)
        return None
    if not _is_amount(tokens):
        raise InvalidArgumentError(
            f"cut {_name(cut)!r}: the tokens of an example must be a number of at least 0, they are {tokens!r}"
        )
    return checked_length(cut, length_of(cut), finite=True), tokens


def _is_amount(value: Any, finite: bool = True) -> bool:
    """Whether ``value`` is a number of at least 0, of any type that compares with numbers."""
    try:
        return bool(0.0 <= value < math.inf if finite else value >= 0.0)
    except (TypeError, ValueError, RuntimeError):  # texts; arrays; tensors of several numbers
        return False


def checked_length(cut: Any, length: Any, *, finite: bool = False) -> float:
    """``length``, which was measured of ``cut``, as a float.

    :param finite: whether infinity is refused too; beside bins it is longer than all of them.
    :raises InvalidArgumentError: when it isn't a number of at least 0; the message names the cut.
    """
    if not _is_amount(length, finite):
        kind = "finite number" if finite else "number"
        raise InvalidArgumentError(
            f"cut {_name(cut)!r}: the length of an example must be a {kind} of at least 0, it is {length!r}"
        )
    return float(length)


def _name(cut: Any) -> Any:
    return getattr(cut, "id", cut)


def has_text(cut: Any) -> bool:
    """Whether some supervision of ``cut`` has a text."""
    return any(getattr(supervision, "text", None) for supervision in getattr(cut, "supervisions", None) or ())


def missing_tokens(cut: Any) -> MissingTokensError:
    """The error for a cut whose text nothing can turn into tokens."""
    return MissingTokensError(
        f"cut {_name(cut)!r} must have tokens, since they decide its bucket, and it has only text; set "
        f"'tokens' on its supervisions (or 'input_ids' on the cut), or pass tokenizer= (a callable from text to tokens)"
    )


def _quantiles(values: Sequence[tuple[float, float]], num: int) -> list[float]:
    """Upper edges that divide sorted (value, weight) pairs into ``num`` parts of about equal weighted sum."""
    total = sum(value * weight for value, weight in values)
    edges: list[float] = []
    running = 0.0
    for value, weight in values:
        running += value * weight
        while len(edges) < num - 1 and running >= total * (len(edges) + 1) / num:
            edges.append(value)
    edges.append(values[-1][0])
    return sorted({edge for edge in edges if edge > 0.0} or {max(edges)})


def _suggest_max_tps(examples: Sequence[tuple[float, int, float]]) -> float:
    densities = [(tokens / length, share) for length, tokens, share in examples if length > 0.0]
    if not densities:
        raise EmptySourceError("max_tps must be suggested from at least one example with a length, there is none")
    total = sum(share for _, share in densities)
    mean = sum(density * share for density, share in densities) / total
    variance = sum((density - mean) ** 2 * share for density, share in densities) / total
    # A little more, so that rounding doesn't put examples of one and the same density beyond it.
    return (mean + 4.0 * math.sqrt(variance)) * (1.0 + 1e-9)
