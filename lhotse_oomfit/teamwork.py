"""What several ranks measured, each by itself, made into one measurement."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace

from lhotse_oomfit.calibration import MeasuredBucket, Measurement
from lhotse_oomfit.peak_model import BucketShape, lighter_than, monotone

__all__ = ["decode", "encode", "merge_each", "merge_shares", "share_out"]


def share_out(shapes: Sequence[BucketShape], world_size: int) -> list[list[int]]:
    """Deal the buckets out, so that every rank gets about the same work, long and short ones.

    :return: for each rank the indexes of its buckets, ascending; empty where there are more ranks than buckets.
    """
    order = sorted(range(len(shapes)), key=lambda k: (-shapes[k].input_len, -shapes[k].output_len))
    shares: list[list[int]] = [[] for _ in range(world_size)]
    for position, k in enumerate(order):
        turn, place = divmod(position, world_size)
        shares[place if turn % 2 == 0 else world_size - 1 - place].append(k)
    return [sorted(share) for share in shares]


def encode(measurement: Measurement | None) -> str:
    """A measurement as text; None where a rank had nothing to measure."""
    return json.dumps(None if measurement is None else dataclasses.asdict(measurement))


def decode(text: str) -> Measurement | None:
    """What :func:`encode` made."""
    said = json.loads(text)
    if said is None:
        return None
    return Measurement(**{**said, "buckets": tuple(MeasuredBucket(**bucket) for bucket in said["buckets"])})


def merge_shares(
    measurements: Sequence[Measurement | None], shares: Sequence[Sequence[int]], shapes: Sequence[BucketShape]
) -> Measurement:
    """One measurement of all buckets from those of each rank's share, with sizes that never grow with length."""
    buckets = [MeasuredBucket()] * len(shapes)
    for measurement, share in zip(measurements, shares, strict=True):
        if measurement is not None:
            for k, bucket in zip(share, measurement.buckets, strict=True):
                buckets[k] = bucket
    return _combined([m for m in measurements if m is not None], _monotone(buckets, shapes))


def merge_each(measurements: Sequence[Measurement | None], shapes: Sequence[BucketShape]) -> Measurement:
    """One measurement from those of all buckets by every rank: the smallest size of each."""
    made = [measurement for measurement in measurements if measurement is not None]
    smallest = [min(found, key=lambda b: b.size) for found in zip(*(m.buckets for m in made), strict=True)]
    return _combined(made, _monotone(smallest, shapes))


def _combined(made: Sequence[Measurement], buckets: Sequence[MeasuredBucket]) -> Measurement:
    return Measurement(
        buckets=tuple(buckets),
        num_trials=sum(m.num_trials for m in made),
        num_soak_steps=sum(m.num_soak_steps for m in made),
        num_ooms=sum(m.num_ooms for m in made),
        num_retries=sum(m.num_retries for m in made),
        search_s=max(m.search_s for m in made),
    )


def _monotone(buckets: Sequence[MeasuredBucket], shapes: Sequence[BucketShape]) -> list[MeasuredBucket]:
    """No bucket gets a larger size than one whose examples all fit in its own."""
    sizes = monotone([bucket.size for bucket in buckets], lighter_than(shapes))
    return [
        bucket if bucket.size == size else replace(bucket, size=size, peak_bytes=None, step_s=None)
        for bucket, size in zip(buckets, sizes, strict=True)
    ]
