"""Calibrates several samplers at once: by turns (round robin), or with one batch of each in every step (zip).

Samplers that take turns are calibrated one after another, each as if it were alone. Where a step holds one batch of
each, they share its memory: see :mod:`~lhotse_oomfit.shared_step`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lhotse.dataset.sampling.round_robin import RoundRobinSampler
from lhotse.dataset.sampling.zip import ZipSampler

from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.job import Job
from lhotse_oomfit.joint import ApartBatches, JointBatches, Member, MergedBatches, TupleBatches
from lhotse_oomfit.options import CalibrationOptions
from lhotse_oomfit.profile import Profile
from lhotse_oomfit.sampler import CalibratedBucketingSampler
from lhotse_oomfit.shared_step import Found, JointJob, ranks_of
from lhotse_oomfit.store import ProfileStore
from lhotse_oomfit.training import Training

__all__ = ["Member", "auto_samplers", "calibrate_apart", "calibrate_members", "is_composite"]

logger = logging.getLogger(__name__)


def is_composite(sampler: Any) -> bool:
    """Whether a sampler is made of several."""
    return isinstance(sampler, (RoundRobinSampler, ZipSampler))


def auto_samplers(sampler: Any) -> list[CalibratedBucketingSampler]:
    """The samplers to be calibrated in `sampler`, in order."""
    if is_composite(sampler):
        return [found for member in sampler.samplers for found in auto_samplers(member)]
    return [sampler] if isinstance(sampler, CalibratedBucketingSampler) and sampler.is_auto else []


def calibrate_members(
    sampler: Any, training: Training, options: CalibrationOptions, *, known: Sequence[Profile] = ()
) -> Found:
    """Find the sizes of all samplers with ``bucket_batch_size="auto"`` in a RoundRobinSampler or a ZipSampler.

    :param training: whose `collate` takes what `sampler` yields.
    :param known: profiles that this process has already, one for each of them.
    :return: the samplers and their profiles, in order; nothing is applied yet.
    :raises InvalidArgumentError: if there is none, or for samplers that can't be calibrated together.
    :raises CalibrationError: as a calibration of one sampler does.
    """
    autos = auto_samplers(sampler)
    if not autos:
        raise InvalidArgumentError(
            f"{type(sampler).__name__} holds no CalibratedBucketingSampler with bucket_batch_size='auto', there is "
            f"nothing to calibrate"
        )
    _refuse_one_file(options, len(autos))
    by_sampler = dict(zip(map(id, autos), known, strict=True)) if len(known) == len(autos) else {}
    return _calibrate_each(sampler, training, options, by_sampler)


def calibrate_apart(
    members: Sequence[Member],
    assemble: Callable[[list[Any]], Any],
    options: CalibrationOptions,
    *,
    known: Sequence[Profile] = (),
) -> Found:
    """Find the sizes of samplers whose batches are collated one by one and meet in a step.

    :param members: the samplers, each with the training that collates its batches.
    :param assemble: makes of one batch of each what a step gets.
    :return: as :func:`calibrate_members`.
    :raises CalibrationError: as a calibration of one sampler does.
    """
    num_autos = sum(member.sampler.is_auto for member in members)
    _refuse_one_file(options, num_autos)
    _refuse_uncounted(members)

    def batches(num_few: int) -> JointBatches:
        return ApartBatches(members, assemble=assemble, num_sample_cuts=options.num_sample_cuts, num_few=num_few)

    return JointJob(members, batches, "apart", options).run(known if len(known) == num_autos else [])


def _calibrate_each(sampler: Any, training: Training, options: CalibrationOptions, known: dict[int, Profile]) -> Found:
    if isinstance(sampler, ZipSampler):
        return _calibrate_zip(sampler, training, options, known)
    if isinstance(sampler, RoundRobinSampler):
        inner = _after(sampler, training)
        return [found for member in sampler.samplers for found in _calibrate_each(member, inner, options, known)]
    if not auto_samplers(sampler):
        return []
    ranks = ranks_of(options)
    return [
        (sampler, Job(sampler=sampler, training=training, options=options, ranks=ranks).run(known.get(id(sampler))))
    ]


def _calibrate_zip(
    sampler: ZipSampler, training: Training, options: CalibrationOptions, known: dict[int, Profile]
) -> Found:
    if not auto_samplers(sampler):
        return []
    if training.make_batch is not None and not sampler.merge_batches:
        raise InvalidArgumentError(
            "make_batch must be left out with a ZipSampler(merge_batches=False), since it makes the batch of one "
            "sampler only"
        )
    inner = _after(sampler, training)
    members = [Member(sampler=member, training=inner) for member in sampler.samplers]
    _refuse_uncounted(members)
    kind = MergedBatches if sampler.merge_batches else TupleBatches
    if sampler.merge_batches and len(members) > 1:
        logger.warning(
            "the batches of %d samplers are merged, so every example may be padded to the longest of all, and short "
            "buckets get no larger sizes than the others' longest ones allow; with ZipSampler(merge_batches=False) the "
            "dataset gets one CutSet of each and can pad it by itself",
            len(members),
        )

    def batches(num_few: int) -> JointBatches:
        return kind(members, num_sample_cuts=options.num_sample_cuts, num_few=num_few)

    found = [known[id(member.sampler)] for member in members if id(member.sampler) in known]
    return JointJob(members, batches, "merged" if sampler.merge_batches else "tuple", options).run(found)


def _after(outer: Any, training: Training) -> Training:
    """The training as seen from inside a composite sampler that has transforms of its own."""
    transforms: list[Callable[[Any], Any]] = list(outer._transforms)
    if not transforms:
        return training
    collate = training.collate

    def collate_transformed(cuts: Any) -> Any:
        for transform in transforms:
            cuts = transform(cuts)
        return collate(cuts)

    name = type(outer).__name__
    functions = {f"{name} map {index}": transform for index, transform in enumerate(transforms)}
    return replace(training, collate=collate_transformed, functions={**training.functions, **functions})


def _refuse_one_file(options: CalibrationOptions, num_samplers: int) -> None:
    if num_samplers > 1 and ProfileStore(options.cache).file is not None:
        raise InvalidArgumentError(
            f"cache must be a directory where {num_samplers} samplers are calibrated, each with a profile of its own, "
            f"it is the file {str(options.cache)!r}"
        )


def _refuse_uncounted(members: Sequence[Member]) -> None:
    for member in members:
        sampler: Any = member.sampler
        if not isinstance(sampler, CalibratedBucketingSampler) or sampler.bins is None:
            what = type(sampler).__name__
            if isinstance(sampler, CalibratedBucketingSampler):
                what += " without bucket_batch_size"
            raise InvalidArgumentError(
                f"samplers whose batches meet in one step must all be CalibratedBucketingSamplers with "
                f"bucket_batch_size ('auto', or one size per bucket), so that it is known what each adds; one is a "
                f"{what}"
            )
