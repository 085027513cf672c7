"""How bins divide a corpus: what falls in each bucket, and how much of a batch is padding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lhotse_oomfit.bins import Bins, Rejection

__all__ = ["BucketShare", "Coverage", "cover", "rounded_up"]

Measured = tuple[float, int | None]  # length, tokens


@dataclass(frozen=True, kw_only=True)
class BucketShare:
    """What falls in one bucket. Shares are of all examples drawn, weights included, and of their lengths.

    :param padding: share of a batch that is padding at most: as if some example reached the bucket's edge.
    """

    num_examples: int
    share: float
    length_share: float
    padding: float
    token_padding: float | None


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """All buckets, and what belongs to none."""

    buckets: tuple[BucketShare, ...]
    num_examples: int
    total_length: float
    padding: float
    token_padding: float | None
    left_out: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def cover(bins: Bins, sources: Sequence[Sequence[Measured]], weights: Sequence[float] | None = None) -> Coverage:
    """Put every example in its bucket.

    :param sources: lengths and tokens of the examples of each source.
    :param weights: how often a source is drawn from, relative to the others; None where each example counts once.
    """
    n = len(bins)
    counts, drawn, lengths, areas = [0] * n, [0.0] * n, [0.0] * n, [0.0] * n
    tokens, token_areas = [0.0] * n, [0.0] * n
    left_out: Counter[str] = Counter()
    for number, source in enumerate(sources):
        share = 1.0 if weights is None else weights[number] / max(1, len(source))
        for length, num_tokens in source:
            k = bins.select(length, num_tokens)
            if isinstance(k, Rejection):
                left_out[k.value] += 1
                continue
            counts[k] += 1
            drawn[k] += share
            lengths[k] += share * length
            areas[k] += share * bins.input_len(k)
            if bins.is_2d:
                tokens[k] += share * (num_tokens or 0)
                token_areas[k] += share * (bins.max_output_len(k) or 0)

    def padding(used: float, area: float) -> float:
        return max(0.0, 1.0 - used / area) if area else 0.0

    buckets = tuple(
        BucketShare(
            num_examples=counts[k],
            share=drawn[k] / (sum(drawn) or 1.0),
            length_share=lengths[k] / (sum(lengths) or 1.0),
            padding=padding(lengths[k], areas[k]),
            token_padding=padding(tokens[k], token_areas[k]) if bins.is_2d else None,
        )
        for k in range(n)
    )
    return Coverage(
        buckets=buckets,
        num_examples=sum(counts),
        total_length=sum(length for source in sources for length, _ in source),
        padding=padding(sum(lengths), sum(areas)),
        token_padding=padding(sum(tokens), sum(token_areas)) if bins.is_2d else None,
        left_out=dict(sorted(left_out.items())),
    )


def rounded_up(value: float, digits: int) -> float:
    """The smallest number of so many decimals that is at least `value`.

    Bins made from lengths that are rounded up hold the same examples, in the same buckets, as the lengths themselves.
    """
    near = round(value, digits)
    return near if near >= value else round(near + 10.0**-digits, digits)
