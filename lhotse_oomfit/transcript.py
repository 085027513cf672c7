"""Texts and token fields fitted to a number of output tokens, by the user's own measure.

What counts as an output token is the user's business (characters, a BPE, a prompt plus an answer), so this module
never tokenizes: it changes the text or the token fields of a cut until the measure says what was asked for. Texts are
fitted by doubling, bisecting, and filling up character by character.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lhotse.cut import Cut
from lhotse.cut.data import DataCut
from lhotse.supervision import AlignmentItem, SupervisionSegment
from lhotse.utils import fastcopy

from lhotse_oomfit.errors import WorstCaseError
from lhotse_oomfit.field_laws import CUT, TEXT, Field, FieldLaw, sequence_fields, token_fields

__all__ = ["fit_output", "scale_output", "scale_time_fields", "spread_alignment"]

Measure = Callable[[Cut], "int | None"]
_TEXT_LIKE = re.compile(r"text|transcri|phon|ipa|caption|answer|target", re.IGNORECASE)
_MAX_CHARS_PER_TOKEN = 200  # a tokenizer that swallows more than this can't be driven by text
_FILL_STEPS = 64
_LOOK_BACK = 24


def scale_time_fields(cut: DataCut, ratio: float, laws: Mapping[str, FieldLaw]) -> DataCut:
    """Return ``cut`` with the custom fields that follow the time (codes, pitch, ...) ``ratio`` times as long."""
    lengths = {
        key: max(1, math.ceil(len(value) * ratio - 1e-6))
        for key, value in sequence_fields(cut).items()
        if _follows_time(key, laws)
    }
    return _with_lengths(cut, lengths)


def scale_output(cut: DataCut, ratio: float, laws: Mapping[str, FieldLaw]) -> DataCut:
    """Return ``cut`` with texts, alignments and token fields ``ratio`` times as long; for cuts without a measure."""
    cut = _with_text_ratio(cut, ratio)
    lengths = {
        key: max(1, math.ceil(len(value) * ratio - 1e-6))
        for key, value in token_fields(cut).items()
        if _per_token(key) and not _follows_time(key, laws)
    }
    return _with_lengths(cut, lengths)


def fit_output(cut: DataCut, num_tokens: int, measure: Measure, laws: Mapping[str, FieldLaw]) -> DataCut:
    """Return ``cut`` with texts and token fields such that ``measure`` says ``num_tokens``.

    Where the measure can't say so (a tokenizer that skips the number), the nearest number above is taken.

    :raises WorstCaseError: if the measure says None, or follows neither the text nor any token field.
    """
    before = measure(cut)
    if before is None:
        raise WorstCaseError(
            f"the number of output tokens of cut {cut.id!r} can't be measured, so it can't be stretched to "
            f"{num_tokens} tokens; give the sampler a tokenizer, or cuts with tokens"
        )
    if before == num_tokens:
        return cut
    drivers = [key for key, value in token_fields(cut).items() if _follows(cut, key, len(value), measure, before)]
    ratio = num_tokens / max(before, 1)
    if drivers:
        num_chars = sum(len(sup.text or "") for sup in cut.supervisions)
        if TEXT in laws and not laws[TEXT].per_second and num_chars:
            ratio = laws[TEXT].length(num_tokens) / num_chars
        fitted = _fit_fields(_with_text_ratio(cut, ratio), drivers, num_tokens, measure, laws)
    elif any(sup.text is not None for sup in cut.supervisions):
        fitted = _fit_texts(cut, num_tokens, before, measure)
        lengths = _companion_lengths(fitted, [], before, num_tokens, laws)
        fitted = _with_lengths(fitted, lengths)
    else:
        raise WorstCaseError(
            f"the number of output tokens of cut {cut.id!r} follows neither its text nor any of its custom fields; "
            "pass make_batch"
        )
    return fitted


def spread_alignment(sup: SupervisionSegment, ratio: float) -> SupervisionSegment:
    """Return ``sup`` with ``ratio`` times as many items in each alignment, evenly spread over its duration."""
    if not sup.alignment:
        return sup
    alignment = {}
    for kind, items in sup.alignment.items():
        num = max(1, math.ceil(len(items) * ratio - 1e-6)) if items else 0
        step = sup.duration / max(num, 1)
        alignment[kind] = [
            AlignmentItem(
                symbol=items[index % len(items)].symbol,
                start=round(sup.start + index * step, ndigits=8),
                duration=round(step, ndigits=8),
                score=items[index % len(items)].score,
            )
            for index in range(num)
        ]
    return fastcopy(sup, alignment=alignment)


def _follows(cut: DataCut, key: Field, length: int, measure: Measure, before: int) -> bool:
    return measure(_with_lengths(cut, {key: length + 1})) != before


def _fit_fields(
    cut: DataCut, drivers: list[Field], num_tokens: int, measure: Measure, laws: Mapping[str, FieldLaw]
) -> DataCut:
    """Change the fields that the measure counts, the longest of them until it is exact; others follow."""
    before = measure(cut)
    fields = token_fields(cut)
    longest = max(drivers, key=lambda key: len(fields[key]))
    lengths = _companion_lengths(cut, drivers, before or 0, num_tokens, laws)
    if num_tokens < (before or 0):
        for key in drivers:
            lengths[key] = max(1, math.floor(len(fields[key]) * num_tokens / max(before or 1, 1)))
    lengths.setdefault(longest, len(fields[longest]))
    for _ in range(8):
        fitted = _with_lengths(cut, lengths)
        missing = num_tokens - (measure(fitted) or 0)
        if missing == 0:
            break
        lengths[longest] = max(1, lengths[longest] + missing)
    return fitted


def _companion_lengths(
    cut: DataCut, drivers: list[Field], before: int, num_tokens: int, laws: Mapping[str, FieldLaw]
) -> dict[Field, int]:
    """Lengths for the token fields that the measure doesn't count itself: by their law, else by resemblance."""
    fields = token_fields(cut)
    main = max((len(fields[key]) for key in drivers), default=before)
    lengths = {}
    for key, value in fields.items():
        if key in drivers or _follows_time(key, laws):
            continue
        siblings = [other for other in fields if other[1] == key[1]]
        law = laws.get(key[1])
        if law is not None and len(siblings) == 1:
            lengths[key] = law.length(num_tokens) if law.slope else len(value)
        elif len(value) == main or (len(siblings) > 1 and _per_token(key)):
            lengths[key] = max(1, math.ceil(len(value) * num_tokens / max(before, 1) - 1e-6))
        elif drivers and main / 2 <= len(value) < main and any(len(x) == main - len(value) for x in fields.values()):
            # Two parts that make up the whole, such as a prompt and its answer: the longer part is what varies.
            lengths[key] = max(1, len(value) + num_tokens - before)
    return lengths


def _fit_texts(cut: DataCut, num_tokens: int, before: int, measure: Measure) -> DataCut:
    """Fit the longest text; the others are shortened in proportion where the whole must become shorter."""
    texts = [sup.text for sup in cut.supervisions]
    longest = max(range(len(texts)), key=lambda index: len(texts[index] or ""))
    if num_tokens < before:
        texts = [
            None if text is None else text[: math.floor(len(text) * num_tokens / before)] if i != longest else text
            for i, text in enumerate(texts)
        ]

    def with_longest(text: str) -> DataCut:
        return _with_texts(cut, [text if i == longest else other for i, other in enumerate(texts)])

    def count(text: str) -> int:
        return measure(with_longest(text)) or 0

    return with_longest(_fit_text(texts[longest] or "", num_tokens, count, cut.id))


def _fit_text(text: str, num_tokens: int, count: Callable[[str], int], cut_id: str) -> str:
    seed = text.strip() or "a"
    unit = seed + (" " if seed.isascii() or " " in seed else "")

    def stream(num_chars: int) -> str:
        return (unit * (num_chars // len(unit) + 1))[:num_chars]

    low, high, limit = 0, max(1, len(seed)), _MAX_CHARS_PER_TOKEN * (num_tokens + 10)
    while count(stream(high)) < num_tokens:
        low, high = high, 2 * high
        if high > limit:
            most = count(stream(low))
            if most <= count(stream(1)):
                raise WorstCaseError(
                    f"the number of output tokens of cut {cut_id!r} doesn't follow the length of its text: "
                    f"{low} characters still give {most}, where {num_tokens} are needed; pass make_batch"
                )
            return _fit_text(text, most, count, cut_id)  # the measure stops counting there
    if count(stream(low)) > num_tokens:  # what isn't text (a prompt) already exceeds it
        return stream(low)
    while high - low > 1:
        middle = (low + high) // 2
        if count(stream(middle)) <= num_tokens:
            low = middle
        else:
            high = middle
    for num_chars in (high, low):
        if count(stream(num_chars)) == num_tokens:
            return stream(num_chars)
    alphabet = [*sorted(set(seed)), "a", "e", "1", "."]
    for back in range(min(low, _LOOK_BACK)):
        filled = _fill(stream(low - back), num_tokens, count, alphabet)
        if filled is not None:
            return filled
    return stream(high)


def _fill(text: str, num_tokens: int, count: Callable[[str], int], alphabet: list[str]) -> str | None:
    """Add single characters that add single tokens until the count is exact; None if it can't be."""
    tokens = count(text)
    for _ in range(_FILL_STEPS):
        if tokens == num_tokens:
            return text
        for char in alphabet:
            if tokens < count(text + char) <= num_tokens:
                text += char
                tokens = count(text)
                break
        else:
            return None
    return None


def _follows_time(key: Field, laws: Mapping[str, FieldLaw]) -> bool:
    return key[1] in laws and laws[key[1]].per_second


def _per_token(key: Field) -> bool:
    """Whether the field looks as if it had an entry per token, when there's no sample to learn from."""
    return bool(re.search(r"token|input_ids|label|target|answer|mask|phon", key[1], re.IGNORECASE))


def _with_text_ratio(cut: DataCut, ratio: float) -> DataCut:
    texts = []
    for sup in cut.supervisions:
        texts.append(None if sup.text is None else _cycle_text(sup.text, math.ceil(len(sup.text) * ratio - 1e-6)))
    return _with_texts(cut, texts)


def _with_texts(cut: DataCut, texts: Sequence[str | None]) -> DataCut:
    """Return ``cut`` with these texts; custom strings that are another spelling of the text change in proportion."""
    supervisions, ratios = [], []
    for sup, text in zip(cut.supervisions, texts, strict=True):
        ratio = len(text or "") / max(len(sup.text or ""), 1) if sup.text else 1.0
        ratios.append(ratio)
        new = fastcopy(sup, text=text, custom=_scaled_strings(sup.custom, sup.text, ratio))
        supervisions.append(spread_alignment(new, ratio))
    text = cut.supervisions[0].text if cut.supervisions else None
    custom = _scaled_strings(cut.custom, text, max(ratios, default=1.0))
    return fastcopy(cut, supervisions=supervisions, custom=custom)


def _scaled_strings(custom: dict[str, Any] | None, text: str | None, ratio: float) -> dict[str, Any] | None:
    if custom is None:
        return None
    return {
        name: _cycle_text(value, math.ceil(len(value) * ratio - 1e-6))
        if isinstance(value, str) and ratio != 1.0 and (value == text or _TEXT_LIKE.search(name))
        else value
        for name, value in custom.items()
    }


def _cycle_text(text: str, num_chars: int) -> str:
    if not text or num_chars == len(text):
        return text
    unit = text + (" " if text.isascii() or " " in text else "")
    return (unit * (num_chars // len(unit) + 1))[:num_chars]


def _with_lengths(cut: DataCut, lengths: Mapping[Field, int]) -> DataCut:
    """Return ``cut`` with the named token fields at these lengths, first and last token kept in their places."""
    if not lengths:
        return cut
    custom = dict(cut.custom) if cut.custom is not None else None
    supervisions = [fastcopy(sup, custom=dict(sup.custom) if sup.custom else sup.custom) for sup in cut.supervisions]
    for (owner, name), length in lengths.items():
        holder = custom if owner == CUT else supervisions[owner].custom
        if holder is not None:
            holder[name] = _cycle_tokens(holder[name], length)
    return fastcopy(cut, custom=custom, supervisions=supervisions)


def _cycle_tokens(tokens: Any, length: int) -> Any:
    num = len(tokens)
    if num == length or num == 0:
        return tokens
    if length < 3 or num < 3:
        index = [position % num for position in range(length)]
    else:
        index = [0, *(1 + position % (num - 2) for position in range(length - 2)), num - 1]
    if isinstance(tokens, (np.ndarray, torch.Tensor)):
        return tokens[index]
    return type(tokens)(tokens[position] for position in index)
