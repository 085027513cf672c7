"""Our sampler from the settings that NeMo has for Lhotse's."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lhotse_oomfit import CalibratedBucketingSampler, estimate_bins
from lhotse_oomfit.errors import EmptySourceError, InvalidArgumentError
from lhotse_oomfit.lightning_loaders import find_composite, find_sampler, members_of
from lhotse_oomfit.source import endless, seeds, set_seeds
from lhotse_oomfit_nemo.request import Request

__all__ = [
    "NemoBucketingSampler",
    "common_seed",
    "estimated_edges",
    "limits_from",
    "plain_edges",
    "samplers_of",
    "warn_of_top_edge",
]

logger = logging.getLogger(__name__)

_FAR = 1.1  # times the longest cut seen: a last bucket up to there would be a tenth too small for the cuts seen


class NemoBucketingSampler(CalibratedBucketingSampler):
    """A sampler that knows how its sizes are to be found."""

    def __init__(self, *cuts: Any, request: Request, **settings: Any) -> None:
        super().__init__(*cuts, **settings)
        self.request = request
        self._source_seeds: list[int] | None = None

    def vary_by_epoch(self) -> None:
        """From now on read the source in another order each epoch, as seeds drawn by chance would, but on all ranks
        alike: NeMo's multiplexers begin anew with every epoch."""
        self._source_seeds = seeds(self.cuts)

    @property
    def starts_anew(self) -> bool:
        """Whether a source without an end is begun again by each epoch, in the main process."""
        return self._source_seeds is not None and endless(self.cuts)

    def _open(self) -> None:
        if self._source_seeds is not None:
            set_seeds(self.cuts, [seed + self.epoch for seed in self._source_seeds])
        super()._open()


def samplers_of(dataloader: Any) -> list[NemoBucketingSampler]:
    """The samplers that a DataLoader iterates whose sizes are to be found."""
    if dataloader is None:
        return []
    sampler = find_composite(dataloader) or find_sampler(dataloader)
    return [member for member in members_of(sampler) if isinstance(member, NemoBucketingSampler)]


def estimated_edges(
    cuts: Iterable[Any],
    *,
    num_buckets: int,
    num_cuts: int,
    max_length: float,
    measure_length: Callable[[Any], float] | None,
) -> list[float]:
    """Edges of about equal total lengths from the first `num_cuts`; the last is `max_length` where that is finite.

    NeMo keeps cuts of up to ``max_duration``, of which the first need not hold the longest. Where that is far above
    all that was seen, what may still come gets a bucket of its own: the size of a bucket is that of its edge.
    """
    sample = list(itertools.islice(cuts, num_cuts))
    if not sample:
        raise EmptySourceError("train_ds has no cut that passes its filters; look at its durations and max_tps")
    longest = max(cut.duration if measure_length is None else measure_length(cut) for cut in sample)
    is_far = math.isfinite(max_length) and max_length > _FAR * longest and num_buckets > 1
    bins = estimate_bins(sample, num_buckets - is_far, measure_length=measure_length)
    edges = [edge for edge in bins.edges if isinstance(edge, float)]
    if measure_length is None:
        # Manifests round durations, so a file can hold a few samples more than its edge says.
        edges = sorted({math.ceil(edge * 100.0) / 100.0 for edge in edges})
    if is_far:
        edges.append(max_length)
    elif math.isfinite(max_length) and max_length > edges[-1]:
        edges[-1] = max_length
    elif not math.isfinite(max_length) and len(sample) == num_cuts:
        logger.warning(
            "bucket_duration_bins end at %g, the longest of the first %d cuts: what is longer is skipped; set "
            "train_ds.%s, up to which the last bucket then reaches",
            edges[-1],
            len(sample),
            "max_duration" if measure_length is None else "max_tokens",
        )
    logger.info(
        "bucket_duration_bins, estimated from %d cuts: [%s]", len(sample), ", ".join(f"{edge:g}" for edge in edges)
    )
    return edges


def plain_edges(bins: Any) -> list[Any]:
    """``bucket_duration_bins`` without OmegaConf's types: numbers, or pairs."""
    return [tuple(edge) if isinstance(edge, Sequence) else float(edge) for edge in bins]


def warn_of_top_edge(edges: Sequence[Any], max_length: float) -> None:
    """Say that examples are lost, where the edges end before the filter does."""
    top = edges[-1][0] if isinstance(edges[-1], tuple) else edges[-1]
    if math.isfinite(max_length) and top < max_length:
        logger.warning(
            "train_ds.max_duration is %g and bucket_duration_bins end at %g: what lies between is skipped; add an edge "
            "of %g, or leave bucket_duration_bins out and have them estimated",
            max_length,
            top,
            max_length,
        )


def limits_from(min_tps: Any, max_tps: Any, *, counts_tokens: bool) -> dict[str, Any]:
    """``min_tps`` and ``max_tps`` as our sampler takes them.

    :param counts_tokens: whether cuts come with tokens (NeMo has a tokenizer, and ``pretokenize`` is on).
    """
    limits: dict[str, Any] = {}
    if isinstance(max_tps, Sequence):
        limits["max_tps"] = [float(limit) for limit in max_tps]
    elif max_tps is not None and math.isfinite(float(max_tps)):
        limits["max_tps"] = float(max_tps)
    if min_tps is not None and min_tps > 0:
        limits["min_tps"] = float(min_tps)
    if limits and not counts_tokens:
        logger.warning(
            "train_ds.%s has no effect: cuts have no tokens here, as this model's data loading has no tokenizer or "
            "pretokenize is false",
            " and train_ds.".join(sorted(limits)),
        )
        return {}
    return limits


def common_seed(shard_seed: Any, seed: int, *, seed_is_random: bool, world_size: int) -> int:
    """A seed by which all ranks draw from one order; what map-style data need.

    :param seed: ``train_ds.seed``, resolved.
    :param seed_is_random: whether it was drawn at random, by each rank for itself.
    """
    if isinstance(shard_seed, int):
        return shard_seed
    if isinstance(shard_seed, str) and shard_seed.isdigit():
        return int(shard_seed)
    if shard_seed not in ("trng", "randomized"):
        raise InvalidArgumentError(
            f"train_ds.shard_seed must be a whole number, 'trng' or 'randomized', it is {shard_seed!r}"
        )
    return 0 if seed_is_random and world_size > 1 else int(seed)
