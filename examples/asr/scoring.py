"""Character error rate."""

from __future__ import annotations

from collections.abc import Sequence


def edit_distance(reference: Sequence[object], hypothesis: Sequence[object]) -> int:
    """Levenshtein distance: the fewest insertions, deletions and substitutions from one to the other."""
    row = list(range(len(hypothesis) + 1))
    for i, expected in enumerate(reference, start=1):
        diagonal, row[0] = row[0], i
        for j, actual in enumerate(hypothesis, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (expected != actual))
    return row[-1]


def character_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """Edits over reference characters, summed over all pairs; 0.0 is perfect.

    :raises ValueError: when the two differ in length, or no reference has a character.
    """
    edits = sum(edit_distance(ref, hyp) for ref, hyp in zip(references, hypotheses, strict=True))
    total = sum(map(len, references))
    if total == 0:
        raise ValueError("an error rate needs at least one reference character, got none")
    return edits / total
