"""The worst-case shape of every bucket, and batches of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from lhotse_oomfit.errors import InvalidArgumentError, WorstCaseError
from lhotse_oomfit.search import BucketShape
from lhotse_oomfit.stretch import clone, independent
from lhotse_oomfit.template import SHORTEST_S, Examples
from lhotse_oomfit.text_examples import TextBatches, are_texts
from lhotse_oomfit.traits import batch_fields
from lhotse_oomfit.worst_case import WorstCaseBatches

if TYPE_CHECKING:
    from lhotse import CutSet
    from lhotse.cut import Cut

    from lhotse_oomfit.sampler import CalibratedBucketingSampler
    from lhotse_oomfit.training import Training

__all__ = ["Cases", "WorstCases", "shape_label"]

logger = logging.getLogger(__name__)

_NUM_TEMPLATES = 64
"""Cuts that worst-case batches choose their template from."""


class Cases(Protocol):
    """Shapes to be measured, and batches of them."""

    @property
    def shapes(self) -> list[BucketShape]:
        """What an example of each bucket is like."""

    def make(self, bucket: int, size: int) -> Any:
        """A batch with `size` examples of `bucket`."""


class WorstCases:
    """The worst-case shape of every bucket, and batches of it."""

    def __init__(self, sampler: CalibratedBucketingSampler, training: Training, cuts: list[Cut]) -> None:
        bins = sampler.bins
        if bins is None:
            raise InvalidArgumentError("sampler has no bins; pass duration_bins, or let it estimate them")
        measure_tokens = _token_measure(sampler, cuts)
        self.output_lens = _output_lens(sampler, cuts, measure_tokens)
        self.shapes = [
            BucketShape(input_len=bins.input_len(k), output_len=self.output_lens[k] or 0) for k in range(len(bins))
        ]
        self._make_batch = training.make_batch
        some = cuts[:: max(1, len(cuts) // _NUM_TEMPLATES)][:_NUM_TEMPLATES]
        self._examples: Examples | None = None
        self._make_examples = lambda: Examples(
            some, measure_length=sampler.measure_length, measure_tokens=measure_tokens
        )
        self._batches: WorstCaseBatches | TextBatches | None = None

        def collate(batch: CutSet) -> Any:
            return training.collate(sampler.transform(batch))

        if self._make_batch is not None:
            return
        if are_texts(some):
            self._batches = TextBatches(collate=collate, examples=some, measure_length=sampler.measure_length)
            return
        if any(not hasattr(cut, "duration") for cut in some):
            raise WorstCaseError(
                f"examples must be cuts, or text examples alone, to be brought to a bucket's edges, some are "
                f"{', '.join(sorted({type(cut).__name__ for cut in some}))}; pass make_batch"
            )
        self._batches = WorstCaseBatches(
            collate=collate, cuts=some, measure_length=sampler.measure_length, measure_tokens=measure_tokens
        )

    def agree(self, output_lens: list[int | None]) -> None:
        """Take these output lengths, one a bucket, instead of those that this rank's data suggests."""
        self.output_lens = output_lens
        self.shapes = [
            BucketShape(input_len=shape.input_len, output_len=output_len or 0)
            for shape, output_len in zip(self.shapes, output_lens, strict=True)
        ]

    def make(self, bucket: int, size: int) -> Any:
        """The batch of `size` worst-case examples of `bucket`."""
        return self.at(input_len=self.shapes[bucket].input_len, output_len=self.output_lens[bucket], size=size)

    def at(self, *, input_len: float, output_len: int | None, size: int) -> Any:
        """The batch of `size` examples of these lengths."""
        if self._batches is None:
            return self._make_batch(batch_size=size, input_len=input_len, output_len=output_len)  # type: ignore[misc]
        return self._batches.batch(input_len=input_len, output_len=output_len, size=size)

    def copies(self, bucket: int, size: int) -> list[Any]:
        """`size` worst-case examples of `bucket`, as cuts, for datasets that get several sets of them at once.

        :raises WorstCaseError: if no cut can be read and stretched.
        """
        if self._examples is None:
            examples = self._make_examples()
            if not any(examples.use_kind(index) for index in range(len(examples.kinds))):
                raise WorstCaseError(
                    f"a worst-case batch needs one cut that can be read and stretched, but none of the sampled cuts "
                    f"could be ({'; '.join(examples.failures[:3])}); check the data"
                )
            self._examples = examples
        example = self._examples.at((self.shapes[bucket].input_len, self.output_lens[bucket]))
        return [independent(clone(example, index)) for index in range(size)]

    def batch_fields(self) -> dict[str, str]:
        """What a batch of two looks like, for the fingerprint: a dataset that makes other ones uses other memory.

        The same in every process, as generators are seeded; sizes that `make_batch` draws at random stay out.
        """
        lightest = min(range(len(self.shapes)), key=lambda k: self.shapes[k].input_len)
        fields = batch_fields(self.make(lightest, 2))
        if self._make_batch is not None and fields != batch_fields(self.make(lightest, 2)):
            fields.pop("batch.sizes", None)
        return fields


def _token_measure(sampler: CalibratedBucketingSampler, cuts: list[Cut]) -> Callable[[Cut], int | None]:
    """The sampler's own measure of output length, or characters where it has none (1D bins don't need one)."""
    bins = sampler.bins
    if bins is not None and bins.needs_tokens:
        return sampler.measure_tokens
    if any(sampler.measure_tokens(cut) is not None for cut in cuts[:_NUM_TEMPLATES]):
        return sampler.measure_tokens
    return _num_characters


def _num_characters(cut: Cut) -> int | None:
    texts = [supervision.text for supervision in getattr(cut, "supervisions", ()) if supervision.text]
    return sum(map(len, texts)) if texts else None


def _output_lens(
    sampler: CalibratedBucketingSampler, cuts: list[Cut], measure_tokens: Callable[[Cut], int | None]
) -> list[int | None]:
    """The largest output length that each bucket can hold: by its edges and `max_tps` where they limit it, else by the
    densest cuts seen in this bucket and its neighbours, scaled to the upper edge."""
    bins = sampler.bins
    if bins is None:
        return []
    known = [bins.max_output_len(k) for k in range(len(bins))]
    if all(output_len is not None for output_len in known):
        return known
    rates: dict[int, float] = {}
    num_cuts = 0
    for cut in cuts:
        if not hasattr(cut, "duration"):
            continue  # of text, or of text and audio in turn, whose length holds all its tokens
        length, tokens = sampler.measure_length(cut), measure_tokens(cut)
        k = bins.select(length, tokens)
        if isinstance(k, int) and tokens and length > 0 and cut.duration >= SHORTEST_S:
            rates[k] = max(rates.get(k, 0.0), tokens / length)
            num_cuts += 1
    if not rates:
        return known
    output_lens: list[int | None] = []
    longest = 0
    for k in range(len(bins)):
        near = [rates[j] for j in (k - 1, k, k + 1) if j in rates] or [rates[min(rates, key=lambda j: abs(j - k))]]
        # No shorter bucket may hold more: a longer cut can have at least as many tokens.
        longest = max(longest, int(max(near) * bins.input_len(k)))
        output_lens.append(longest)
    logger.warning(
        "nothing limits the length of outputs, so it was guessed from %d cuts read ahead: from %d to %d %s by bucket; "
        "denser cuts later in the data may run out of memory, so pass max_tps to the sampler (or 2D duration_bins)",
        num_cuts,
        output_lens[0],
        output_lens[-1],
        "characters" if measure_tokens is _num_characters else "tokens",
    )
    return output_lens


def shape_label(shape: BucketShape) -> str:
    """A shape in words: ``7.5 s x 40``."""
    return f"{shape.input_len:g} s" + (f" x {shape.output_len}" if shape.output_len else "")
