"""Worst-case examples: which real cut is taken, and how it is fitted to a bucket's edges."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lhotse.cut import Cut
from lhotse.cut.data import DataCut

from lhotse_oomfit.errors import WorstCaseError
from lhotse_oomfit.field_laws import FieldLaw, learn_laws, token_fields
from lhotse_oomfit.script import Script, learn_script
from lhotse_oomfit.stretch import PlainCut, num_samples_at
from lhotse_oomfit.transcript import fit_output, scale_output, scale_time_fields

__all__ = ["SHORTEST_S", "Edges", "Examples", "fit_to_edges"]

logger = logging.getLogger(__name__)

Edges = tuple[float, "int | None"]  # upper length edge, upper edge in tokens (None: no token edge)

_CACHED_EXAMPLES = 8  # audio in memory: the bucket in work and its neighbours, two each
_DENSE_QUANTILE = 0.95
_MAX_DOUBLINGS = 32
_SAMPLES_OF_TOLERANCE = 2
_SHORTER_BY_S = 0.2  # one frame of an encoder that subsamples by 16
_SHORTER_BY_AT_MOST = 0.2  # of the length
SHORTEST_S = 0.05  # five usual frames; a text over less of a cut than this is a slip of its segmentation


class Examples:
    """Stretches the densest readable cut of the chosen kind to any edges.

    Cuts are of one kind if they have the same class, channels, rate, manifests, number of supervisions and fields.

    :param cuts: the sample of real cuts.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        *,
        measure_length: Callable[[Cut], float],
        measure_tokens: Callable[[Cut], int | None],
    ) -> None:
        self.measure_length = measure_length
        self.measure_tokens = measure_tokens
        self.failures: list[str] = []
        grouped: dict[str, list[Cut]] = {}
        for cut in self._long_enough(cuts):
            grouped.setdefault(_kind_of(cut), []).append(cut)
        self.kinds = sorted(grouped.items(), key=lambda item: -len(item[1]))
        self._readable: dict[int, bool] = {}
        self._plain: PlainCut | None = None
        self._kind = -1
        self._laws: Mapping[str, FieldLaw] = {}
        self._script = learn_script(sup.text for cut in cuts for sup in getattr(cut, "supervisions", ()))
        self._cache: OrderedDict[Edges, DataCut] = OrderedDict()
        self._counted: list[tuple[float, int]] = []  # length and tokens of the real cuts of the template's kind

    def use_kind(self, index: int) -> bool:
        """Take the template from kind number ``index``, the commonest being 0; False if none of it can be read."""
        _, cuts = self.kinds[index]
        for cut in sorted(cuts, key=self._rank, reverse=True):
            if not self._can_be_read(cut):
                continue
            self._plain = PlainCut.read(cut)
            self._kind = index
            self._laws = learn_laws(cuts, self.measure_tokens)
            self._counted = [
                (float(self.measure_length(cut)), tokens)
                for cut in cuts
                if (tokens := self.measure_tokens(cut)) is not None
            ]
            self._cache.clear()
            return True
        return False

    @property
    def plain(self) -> PlainCut:
        """The template, read into memory."""
        if self._plain is None:
            raise RuntimeError("no kind of cut was chosen yet")
        return self._plain

    @property
    def own_edges(self) -> Edges:
        """What the measures say of the template as it is."""
        return float(self.measure_length(self.plain.cut)), self.measure_tokens(self.plain.cut)

    def at(self, edges: Edges) -> DataCut:
        """Return the example stretched to ``edges``; without a token edge, as dense as the densest cuts of the sample.

        :raises WorstCaseError: if the measures don't follow the cut.
        """
        if edges not in self._cache:
            while len(self._cache) >= _CACHED_EXAMPLES:
                self._cache.popitem(last=False)
            input_len, output_len = edges
            if output_len is None and self.measure_tokens(self.plain.cut):
                output_len = self._usual_output_len(input_len)
            self._cache[edges] = fit_to_edges(
                self.plain,
                input_len=input_len,
                output_len=output_len,
                measure_length=self.measure_length,
                measure_tokens=self.measure_tokens,
                laws=self._laws,
                script=self._script,
            )
        return self._cache[edges]

    def shorter(self, edges: Edges) -> DataCut:
        """Return an example slightly shorter than the one at ``edges``, in length and by one of its tokens."""
        full = self.at(edges)
        input_len = edges[0] * (1 - min(_SHORTER_BY_S / full.duration, _SHORTER_BY_AT_MOST))
        tokens = self.measure_tokens(full)
        return self.at((input_len, tokens - 1 if tokens and tokens > 1 else tokens))

    def _long_enough(self, cuts: Sequence[Cut]) -> list[Cut]:
        """Pass over cuts without a length or hardly any: nothing can be learned from their density."""
        some = [cut for cut in cuts if cut.duration > 0 and float(self.measure_length(cut)) > 0]
        usable = [cut for cut in some if cut.duration >= SHORTEST_S] or some
        if len(usable) < len(cuts):
            kept = {id(cut) for cut in usable}
            passed_over = [cut for cut in cuts if id(cut) not in kept]
            self.failures.append(f"{passed_over[0].id}: lasts {passed_over[0].duration:g} s")
            logger.warning(
                "%d of %d sampled cuts are too short to be measured, and are passed over: %s",
                len(passed_over),
                len(cuts),
                ", ".join(f"{cut.id} ({cut.duration:g} s)" for cut in passed_over[:3]),
            )
        return usable

    def _rank(self, cut: Cut) -> tuple[bool, float]:
        """Cuts whose tokens can be counted come first, then the densest; by characters where there are no tokens."""
        tokens = self.measure_tokens(cut)
        count = sum(len(sup.text or "") for sup in getattr(cut, "supervisions", ())) if tokens is None else tokens
        return tokens is not None, count / max(float(self.measure_length(cut)), 1e-9)

    def _usual_output_len(self, input_len: float) -> int:
        """The tokens of a dense cut of this length; a few outliers among short cuts don't speak for long ones."""
        densities = [tokens / max(length, 1e-9) for length, tokens in self._counted]
        seen = max((tokens for length, tokens in self._counted if length <= input_len), default=0)
        return max(seen, math.ceil(float(np.quantile(densities, _DENSE_QUANTILE)) * input_len - 1e-6))

    def real(self, num: int, *, within: Edges | None = None, every_kind: bool = False) -> list[Cut]:
        """Return up to ``num`` distinct real cuts that can be read.

        :param within: only cuts inside these edges, and not much shorter.
        :param every_kind: take turns over all kinds; otherwise the template's kind only.
        """
        groups = [list(cuts) for _, cuts in self.kinds] if every_kind else [list(self.kinds[self._kind][1])]
        chosen: list[Cut] = []
        while any(groups) and len(chosen) < num:
            for group in groups:
                while group and len(chosen) < num:
                    cut = group.pop(0)
                    if (within is None or self._falls_in(cut, within)) and self._can_be_read(cut):
                        chosen.append(cut)
                        break
        return chosen

    def edges_of(self, cuts: Sequence[Cut]) -> Edges:
        """The smallest edges that hold all of ``cuts``."""
        tokens = [self.measure_tokens(cut) for cut in cuts]
        most = None if None in tokens else max(count for count in tokens if count is not None)
        return max(float(self.measure_length(cut)) for cut in cuts), most

    def _falls_in(self, cut: Cut, edges: Edges) -> bool:
        tokens = self.measure_tokens(cut)
        fits = edges[1] is None or tokens is None or tokens <= edges[1]
        return fits and 0.7 * edges[0] < float(self.measure_length(cut)) <= edges[0]

    def _can_be_read(self, cut: Cut) -> bool:
        if id(cut) not in self._readable:
            try:
                PlainCut.read(cut)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # noqa: BLE001 - any reader may raise anything; the caller decides on the whole
                why = (str(error).splitlines() or [""])[0]
                self.failures.append(f"{getattr(cut, 'id', '?')}: {type(error).__name__}: {why}")
                logger.warning("a sampled cut can't be read and is passed over: %s", self.failures[-1])
                self._readable[id(cut)] = False
            else:
                self._readable[id(cut)] = True
        return self._readable[id(cut)]


def fit_to_edges(
    plain: PlainCut,
    *,
    input_len: float,
    output_len: int | None,
    measure_length: Callable[[Cut], float],
    measure_tokens: Callable[[Cut], int | None],
    laws: Mapping[str, FieldLaw],
    script: Script | None = None,
) -> DataCut:
    """Return the cut in memory at these edges, by these measures.

    With ``output_len`` of None, texts and token fields grow with the length.

    :raises WorstCaseError: if the measures don't follow the cut.
    """
    own, duration = float(measure_length(plain.cut)), float(plain.cut.duration)
    in_seconds = abs(own - duration) <= 1e-3
    wanted_s = input_len if in_seconds else duration * input_len / max(own, 1e-9)
    described = scale_time_fields(plain.cut, wanted_s / duration, laws)
    if output_len is None:
        described = scale_output(described, wanted_s / duration, laws, script=script)
    else:
        described = fit_output(described, output_len, measure_tokens, laws, script=script)
    plain = dataclasses.replace(plain, cut=described)
    cut = plain.stretched(num_samples_at(wanted_s, plain.sampling_rate))
    tolerance = _SAMPLES_OF_TOLERANCE / plain.sampling_rate
    if not (in_seconds and 0 <= input_len - float(measure_length(cut)) <= tolerance):
        cut = plain.stretched(_bisect(plain, cut.duration, input_len, measure_length))
    if output_len is not None and measure_tokens(cut) != output_len:
        cut = fit_output(
            cut, output_len, measure_tokens, laws, script=script
        )  # the number of tokens depends on the length, too
    return cut


def _bisect(plain: PlainCut, guess_s: float, input_len: float, measure_length: Callable[[Cut], float]) -> int:
    """Return the largest number of samples whose measure is at most ``input_len`` (frames, audio and prompt, ...)."""

    def exceeds(num_samples: int) -> bool:
        return float(measure_length(plain.stretched(num_samples))) > input_len

    low, high = 1, max(2, round(guess_s * plain.sampling_rate))
    for _ in range(_MAX_DOUBLINGS):
        if exceeds(high):
            break
        low, high = high, min(2 * high, high + 100 * plain.sampling_rate)
    else:
        raise WorstCaseError(
            f"the length of cut {plain.cut.id!r} must reach {input_len:g}, but {low / plain.sampling_rate:.0f} seconds "
            f"measure {float(measure_length(plain.stretched(low))):g}; pass make_batch"
        )
    while high - low > 1:
        middle = (low + high) // 2
        if exceeds(middle):
            high = middle
        else:
            low = middle
    return low


def _kind_of(cut: Cut) -> str:
    """What datasets are sensitive to besides lengths, in words for a log line."""
    supervisions = getattr(cut, "supervisions", ())
    names = sorted({name for (_, name) in token_fields(cut)}) if hasattr(cut, "supervisions") else []
    parts: list[Any] = [
        type(cut).__name__,
        f"{getattr(cut, 'sampling_rate', '?')} Hz",
        f"{getattr(cut, 'num_channels', '?')} channel(s)",
        "audio" if getattr(cut, "has_recording", False) else "no audio",
        "features" if getattr(cut, "has_features", False) else "no features",
        f"{len(supervisions)} supervision(s), {sum(sup.text is not None for sup in supervisions)} with text",
        *([f"with {', '.join(names)}"] if names else []),
    ]
    return ", ".join(parts)
