"""Batches of stretched examples as the user's dataset collates them, each with random numbers of its own.

A dataset that draws lengths at random (perturbed speed) is asked many times, for the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lhotse.cut import Cut, CutSet

from lhotse_oomfit.batch_shape import largest_bytes, num_bytes, shape_of, sum_of_integers
from lhotse_oomfit.errors import WorstCaseError
from lhotse_oomfit.stretch import clone, independent
from lhotse_oomfit.template import Edges, Examples
from lhotse_oomfit.undisturbed import Generators, undisturbed, untracked

__all__ = ["LENGTH_DRAWS", "Draws"]

LENGTH_DRAWS = 16
"""Draws of two and of three from which the longest are taken, where lengths are random."""

_NEARLY = 0.99


class Draws:
    """Collates copies of an example, the same in every process for the same draw.

    :param collate: the dataset's ``__getitem__`` after the sampler's ``map()`` transforms.
    :param seed: for the dataset's random augmentation.
    :ivar random_lengths: whether lengths were seen to be random.
    :ivar distinct: give copies texts and recordings of their own, for datasets that drop repetitions.
    """

    def __init__(self, collate: Callable[[CutSet], Any], examples: Examples, *, seed: int) -> None:
        self.random_lengths = False
        self.distinct = False
        self._collate = collate
        self._examples = examples
        self._seed = seed
        self._generators = Generators(collate)
        self._is_first_call = True
        self._longest_law = (0.0, 0.0)  # bytes of an example's largest tensor, where lengths are random: offset, slope
        self._can_be_shorter: dict[Edges, bool] = {}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave all generators, and the dataset's attributes, as they were; and hide what happens from trackers."""
        with undisturbed(self._collate), untracked():
            self._is_first_call = True
            yield

    def learn_longest(self, edges: Edges) -> None:
        """Learn how large the largest tensor gets, from many draws at two lengths that are cheap to collate.

        From then on lengths are taken for random.
        """
        self.random_lengths = True
        length, tokens = edges
        short, long = (
            max(largest_bytes(self.draw((input_len, tokens), 3, draw)) for draw in range(LENGTH_DRAWS)) / 3
            for input_len in (length, 2 * length)
        )
        slope = max(0.0, (long - short) / length)
        self._longest_law = (short - slope * length, slope)

    def is_longest(self, batch: Any, edges: Edges, size: int) -> bool:
        """Whether a batch of random lengths is nearly as large as such batches get."""
        offset, slope = self._longest_law
        return largest_bytes(batch) >= _NEARLY * size * (offset + slope * edges[0])

    def longest(self, edges: Edges, size: int) -> tuple[Any, Any]:
        """Return the largest of many draws, and another of the same shape (itself, if there's none)."""
        best, twin = self.draw(edges, size), None
        for draw in range(1, LENGTH_DRAWS):
            if twin is not None and self.is_longest(best, edges, size):
                break
            batch = self.draw(edges, size, draw)
            if num_bytes(batch) > num_bytes(best):
                best, twin = batch, None
            elif shape_of(batch) == shape_of(best):
                twin = batch
        return best, best if twin is None else twin

    def longest_shorter(self, edges: Edges) -> Any:
        """Return the fullest of the largest batches of three that end in a shorter example."""
        draws = range(LENGTH_DRAWS) if self.random_lengths else range(1)
        batches = (self.draw(edges, 3, draw, shorter=True) for draw in draws)
        return max(batches, key=lambda batch: (num_bytes(batch), sum_of_integers(batch)))

    def can_be_shorter(self, edges: Edges) -> bool:
        """Whether a shorter last example leaves every size of a collated batch as it is."""
        if edges not in self._can_be_shorter:
            full = self.longest(edges, 3)[0] if self.random_lengths else self.draw(edges, 3)
            sizes = shape_of(full, strings=False)
            try:
                same = bool(sizes) and shape_of(self.longest_shorter(edges), strings=False) == sizes
            except WorstCaseError:  # a dataset that takes examples of equal lengths only
                same = False
            self._can_be_shorter[edges] = same
        return self._can_be_shorter[edges]

    def draw(self, edges: Edges, size: int, draw: int = 0, *, shorter: bool = False) -> Any:
        """Collate ``size`` copies of the example for real, with the random numbers of one draw.

        :param shorter: make the last of several slightly shorter.
        """
        example = self._examples.at(edges)
        examples = [example] * size
        if shorter and size > 1:
            examples[-1] = self._examples.shorter(edges)
        copies = [clone(one, index, distinct=self.distinct) for index, one in enumerate(examples)]
        return self.collate(copies, draw, f"{size} copies of cut {example.id!r}")

    def collate(self, cuts: list[Cut], draw: int, what: str) -> Any:
        """Collate ``cuts`` with the random numbers of one draw.

        :param what: the cuts in words.
        :raises WorstCaseError: if the dataset raises, or returns nothing.
        """
        try:
            batch = self._seeded(cuts, draw)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise WorstCaseError(
                f"the dataset must collate worst-case examples, but raised {type(error).__name__} on {what}: {error}; "
                "if it can't work with cuts held in memory, pass make_batch(batch_size, input_len, output_len)"
            ) from error
        if batch is None:
            raise WorstCaseError(
                f"the dataset must return a batch of worst-case examples, but returned None for {what}; return the "
                "batch from its __getitem__ (and from collate_fn), and if it drops what it can't read, such as cuts "
                "held in memory, pass make_batch(batch_size, input_len, output_len)"
            )
        return batch

    def _seeded(self, cuts: list[Cut], draw: int) -> Any:
        """Collate with the random numbers of one draw, the same in every process."""
        if self._is_first_call:
            self._generators.find()
        self._generators.reseed(self._seed + draw)
        batch = self._collate(CutSet.from_cuts([independent(cut) for cut in cuts]))
        if self._is_first_call:
            self._is_first_call = False
            if self._generators.find():  # made just now, and seeded by chance
                return self._seeded(cuts, draw)
        return batch
