"""Texts and token fields fitted to a number of output tokens, by the user's own measure.

What counts as an output token is the user's business (characters, a BPE, a prompt plus an answer), so this module
never tokenizes: it changes the text or the token fields of a cut until the measure says what was asked for. Texts use
no characters that the sampled texts don't have.
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
from lhotse_oomfit.script import Script, cycle_text, fit_text, learn_script

__all__ = ["fit_output", "scale_output", "scale_time_fields", "spread_alignment"]

Measure = Callable[[Cut], "int | None"]
_TEXT_LIKE = re.compile(r"text|transcri|phon|ipa|caption|answer|target", re.IGNORECASE)
_LABEL_LIKE = re.compile(r"lang|locale|speaker|gender|task|type|audio|path|file|url|(^|_)id$", re.IGNORECASE)


def scale_time_fields(cut: DataCut, ratio: float, laws: Mapping[str, FieldLaw]) -> DataCut:
    """Return ``cut`` with the custom fields that follow the time (codes, pitch, ...) ``ratio`` times as long."""
    lengths = {
        key: max(1, math.ceil(len(value) * ratio - 1e-6))
        for key, value in sequence_fields(cut).items()
        if _follows_time(key, laws)
    }
    return _with_lengths(cut, lengths)


def scale_output(cut: DataCut, ratio: float, laws: Mapping[str, FieldLaw], *, script: Script | None = None) -> DataCut:
    """Return ``cut`` with texts, alignments and token fields ``ratio`` times as long; for cuts without a measure.

    :param script: of the sampled texts; that of the cut's own where it's None.
    """
    cut = _with_text_ratio(cut, ratio, script or _own_script(cut))
    lengths = {
        key: max(1, math.ceil(len(value) * ratio - 1e-6))
        for key, value in token_fields(cut).items()
        if _per_token(key) and not _follows_time(key, laws)
    }
    return _with_lengths(cut, lengths)


def fit_output(
    cut: DataCut, num_tokens: int, measure: Measure, laws: Mapping[str, FieldLaw], *, script: Script | None = None
) -> DataCut:
    """Return ``cut`` with texts and token fields such that ``measure`` says ``num_tokens``.

    Where the measure can't say so (a tokenizer that skips the number), the nearest number above is taken.

    :param script: of the sampled texts; that of the cut's own where it's None.
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
    script = script or _own_script(cut)
    drivers = [key for key, value in token_fields(cut).items() if _follows(cut, key, len(value), measure, before)]
    ratio = num_tokens / max(before, 1)
    if drivers:
        num_chars = sum(len(sup.text or "") for sup in cut.supervisions)
        if TEXT in laws and not laws[TEXT].per_second and num_chars:
            ratio = laws[TEXT].length(num_tokens) / num_chars
        fitted = _fit_fields(_with_text_ratio(cut, ratio, script), drivers, num_tokens, measure, laws)
    elif any(sup.text is not None for sup in cut.supervisions):
        fitted = _fit_texts(cut, num_tokens, before, measure, script)
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


def _fit_texts(cut: DataCut, num_tokens: int, before: int, measure: Measure, script: Script) -> DataCut:
    """Fit the longest text; the others are shortened in proportion where the whole must become shorter."""
    texts = [sup.text for sup in cut.supervisions]
    longest = max(range(len(texts)), key=lambda index: len(texts[index] or ""))
    if num_tokens < before:
        texts = [
            None if text is None else text[: math.floor(len(text) * num_tokens / before)] if i != longest else text
            for i, text in enumerate(texts)
        ]

    def with_longest(text: str) -> DataCut:
        return _with_texts(cut, [text if i == longest else other for i, other in enumerate(texts)], script)

    def count(text: str) -> int:
        return measure(with_longest(text)) or 0

    return with_longest(fit_text(texts[longest] or "", num_tokens, count, script, cut.id))


def _follows_time(key: Field, laws: Mapping[str, FieldLaw]) -> bool:
    return key[1] in laws and laws[key[1]].per_second


def _per_token(key: Field) -> bool:
    """Whether the field looks as if it had an entry per token, when there's no sample to learn from."""
    return bool(re.search(r"token|input_ids|label|target|answer|mask|phon", key[1], re.IGNORECASE))


def _own_script(cut: DataCut) -> Script:
    return learn_script(sup.text for sup in cut.supervisions)


def _with_text_ratio(cut: DataCut, ratio: float, script: Script) -> DataCut:
    texts = []
    for sup in cut.supervisions:
        length = math.ceil(len(sup.text or "") * ratio - 1e-6)
        texts.append(None if sup.text is None else cycle_text(sup.text, length, script.separator))
    return _with_texts(cut, texts, script)


def _with_texts(cut: DataCut, texts: Sequence[str | None], script: Script) -> DataCut:
    """Return ``cut`` with these texts; custom strings that are another spelling of the text change in proportion."""
    supervisions, ratios = [], []
    for sup, text in zip(cut.supervisions, texts, strict=True):
        ratio = len(text or "") / max(len(sup.text or ""), 1) if sup.text else 1.0
        ratios.append(ratio)
        new = fastcopy(sup, text=text, custom=_scaled_strings(sup.custom, sup.text, ratio, script))
        supervisions.append(spread_alignment(new, ratio))
    text = cut.supervisions[0].text if cut.supervisions else None
    custom = _scaled_strings(cut.custom, text, max(ratios, default=1.0), script)
    return fastcopy(cut, supervisions=supervisions, custom=custom)


def _scaled_strings(
    custom: dict[str, Any] | None, text: str | None, ratio: float, script: Script
) -> dict[str, Any] | None:
    if custom is None or ratio == 1.0:
        return custom
    scaled = dict(custom)
    for name, value in custom.items():
        if isinstance(value, str) and (value == text or _names_text(name)):
            separator = script.separator if value == text else learn_script([value]).separator
            scaled[name] = cycle_text(value, math.ceil(len(value) * ratio - 1e-6), separator)
    return scaled


def _names_text(name: str) -> bool:
    """Whether a custom field seems to hold a text, and not a label of it such as ``target_lang``."""
    return bool(_TEXT_LIKE.search(name)) and not _LABEL_LIKE.search(name)


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
