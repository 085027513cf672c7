"""Worst-case batches of training steps that hold one batch of each of several samplers.

Three ways lead into a step. Each batch may be collated by itself, by a dataset of its own (Lightning's CombinedLoader);
one dataset may get a tuple of CutSets (``ZipSampler(merge_batches=False)``); or one CutSet in which all are merged,
and every example may be padded to the longest of all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lhotse import CutSet

from lhotse_oomfit.errors import WorstCaseError
from lhotse_oomfit.sampler import CalibratedBucketingSampler
from lhotse_oomfit.search import BucketShape
from lhotse_oomfit.shapes import WorstCases
from lhotse_oomfit.stretch import independent
from lhotse_oomfit.training import Training
from lhotse_oomfit.undisturbed import undisturbed, untracked

__all__ = ["ApartBatches", "Choice", "JointBatches", "Member", "MergedBatches", "TupleBatches"]

Choice = tuple[int, int]  # a bucket, and a number of examples of it


@dataclass(frozen=True, kw_only=True)
class Member:
    """One of several samplers of a training.

    :param training: how its batches become those of a step.
    """

    sampler: CalibratedBucketingSampler
    training: Training


class JointBatches(ABC):
    """Batches for a step that holds examples of several samplers.

    :param members: the samplers, in the order in which a step gets their batches.
    :param num_few: how many examples of each a step holds while another one is measured.
    """

    def __init__(self, members: Sequence[Member], *, num_sample_cuts: int, num_few: int) -> None:
        self.members = members
        self.cases = [
            WorstCases(member.sampler, self._training(i), member.sampler.sample_cuts(num_sample_cuts))
            for i, member in enumerate(members)
        ]
        self.few: list[Choice] = [(_longest(case.shapes), num_few) for case in self.cases]
        """For each sampler its longest bucket with few examples."""
        self.given = {i: self._heaviest(i) for i, member in enumerate(members) if not member.sampler.is_auto}
        """For each sampler whose sizes are given its heaviest batch."""

    def _training(self, i: int) -> Training:
        return self.members[i].training

    def _heaviest(self, i: int) -> Choice:
        shapes, sizes = self.shapes(i), self.members[i].sampler.bucket_batch_size or []
        k = max(range(len(shapes)), key=lambda k: (shapes[k].input_len * sizes[k], shapes[k].input_len))
        return k, sizes[k]

    def shapes(self, i: int) -> list[BucketShape]:
        """What an example of each bucket of sampler `i` is like in a step with few examples of the others."""
        return self.cases[i].shapes

    @abstractmethod
    def varied(self, i: int, bucket: int, size: int) -> Any:
        """The batch of a step with `size` examples of a bucket of sampler `i`, and few of the others."""

    @abstractmethod
    def together(self, choices: Sequence[Choice]) -> Any:
        """The batch of a step with these examples of each sampler."""


class ApartBatches(JointBatches):
    """Every sampler's batch is collated by itself.

    :param assemble: makes of one batch of each what a step gets.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        assemble: Callable[[list[Any]], Any],
        num_sample_cuts: int,
        num_few: int,
    ) -> None:
        super().__init__(members, num_sample_cuts=num_sample_cuts, num_few=num_few)
        self._assemble = assemble

    def varied(self, i: int, bucket: int, size: int) -> Any:
        return self.together([(bucket, size) if j == i else few for j, few in enumerate(self.few)])

    def together(self, choices: Sequence[Choice]) -> Any:
        return self._assemble([case.make(*choice) for case, choice in zip(self.cases, choices, strict=True)])


class MergedBatches(JointBatches):
    """All examples are merged into one CutSet, and are as long as the longest of them."""

    def shapes(self, i: int) -> list[BucketShape]:
        others = [case.shapes[k] for j, (case, (k, _)) in enumerate(zip(self.cases, self.few, strict=True)) if j != i]
        return [_largest([shape, *others]) for shape in self.cases[i].shapes]

    def varied(self, i: int, bucket: int, size: int) -> Any:
        return self.together([(bucket, size) if j == i else few for j, few in enumerate(self.few)])

    def together(self, choices: Sequence[Choice]) -> Any:
        shapes = [case.shapes[k] for case, (k, _) in zip(self.cases, choices, strict=True)]
        lens = [case.output_lens[k] for case, (k, _) in zip(self.cases, choices, strict=True)]
        longest = _longest(shapes)
        return self.cases[longest].at(
            input_len=shapes[longest].input_len,
            output_len=max((n for n in lens if n is not None), default=None),
            size=sum(size for _, size in choices),
        )


class TupleBatches(JointBatches):
    """The dataset gets a tuple of CutSets.

    :raises WorstCaseError: if it can't take one.
    """

    def __init__(self, members: Sequence[Member], *, num_sample_cuts: int, num_few: int) -> None:
        self._beside: list[list[Any]] = [[] for _ in members]  # few cuts of each sampler
        super().__init__(members, num_sample_cuts=num_sample_cuts, num_few=num_few)
        for i, (case, choice) in enumerate(zip(self.cases, self.few, strict=True)):
            self._beside[i] += case.copies(*choice)
        self._is_list = type(self.together(self.few)) is list

    def _training(self, i: int) -> Training:
        training = self.members[i].training
        samplers, beside = [member.sampler for member in self.members], self._beside
        collate: Callable[[Any], Any] = training.collate

        # Collation is watched for what it changes, objects that this function reaches included: not `self`.
        def collate_beside(cuts: CutSet) -> Any:
            batch = collate(
                tuple(
                    cuts if j == i else sampler.transform(CutSet.from_cuts([independent(cut) for cut in beside[j]]))
                    for j, sampler in enumerate(samplers)
                )
            )
            # The parts of a list are taken for examples, those of a tuple aren't.
            return tuple(batch) if type(batch) is list else batch

        return replace(training, collate=collate_beside)

    def varied(self, i: int, bucket: int, size: int) -> Any:
        batch = self.cases[i].make(bucket, size)
        return list(batch) if self._is_list else batch

    def together(self, choices: Sequence[Choice]) -> Any:
        collate: Callable[[Any], Any] = self.members[0].training.collate
        with untracked(), undisturbed(collate):
            cuts = tuple(
                member.sampler.transform(CutSet.from_cuts(case.copies(*choice)))
                for member, case, choice in zip(self.members, self.cases, choices, strict=True)
            )
            try:
                return collate(cuts)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise WorstCaseError(
                    f"the dataset must collate a tuple of CutSets, one of each sampler, but raised "
                    f"{type(error).__name__}: {error}; ZipSampler(merge_batches=True) gives it a single CutSet"
                ) from error


def _longest(shapes: Sequence[BucketShape]) -> int:
    return max(range(len(shapes)), key=lambda k: (shapes[k].input_len, shapes[k].output_len))


def _largest(shapes: Sequence[BucketShape]) -> BucketShape:
    return BucketShape(
        input_len=max(shape.input_len for shape in shapes), output_len=max(shape.output_len for shape in shapes)
    )
