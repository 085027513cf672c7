"""What makes a profile valid here, and what differs where it isn't.

A :class:`Fingerprint` is an ordered mapping of readable strings; :mod:`lhotse_oomfit.traits` collects them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lhotse_oomfit.digest import short_sha
from lhotse_oomfit.traits import (
    batch_fields,
    dataset_fields,
    environment_fields,
    model_fields,
    optimizer_fields,
)

__all__ = [
    "Fingerprint",
    "batch_fields",
    "dataset_fields",
    "environment_fields",
    "model_fields",
    "one_line",
    "optimizer_fields",
]

_ABSENT = "(absent)"
_MAX_NAME = 300  # YAML allows keys of up to 1,024 characters
_SUMMARY = re.compile(r"\bsha [0-9a-f]+$")


def one_line(text: str) -> str:
    """Make `text` one line of printable characters that OmegaConf takes literally.

    Whitespace runs and unprintable characters become one space; ``${`` (an interpolation) becomes ``$(`` and a
    lone ``???`` (a missing value) becomes ``?``.
    """
    text = " ".join("".join(ch if ch.isprintable() else " " for ch in text).split()).replace("${", "$(")
    return "?" if text == "???" else text


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What a profile was measured for, field by field.

    :param fields: names and values, kept in this order. Values pass through :func:`one_line`.
    :raises TypeError: a name or value that isn't a string.
    """

    fields: Mapping[str, str]

    def __post_init__(self) -> None:
        clean = {}
        for name, value in self.fields.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"fingerprint fields must map str to str, got {name!r}: {value!r}; convert with str()")
            clean[one_line(name)[:_MAX_NAME]] = one_line(value)
        object.__setattr__(self, "fields", clean)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.fields.items())))

    @property
    def digest(self) -> str:
        """The first 16 characters of the SHA-256 of all fields, in whatever order they were collected."""
        return short_sha(sorted(self.fields.items()), chars=16)

    def differences(self, other: Fingerprint) -> list[str]:
        """Say how `other` (what is here now) differs from this fingerprint (what was measured).

        :return: lines like ``device: A100-SXM4-80GB -> H200``, in this fingerprint's order, then what only `other`
            has. A summary (``..., sha 1a2b3c4d``) is left out where the finer fields below it say what changed.
        """
        names = [*self.fields, *(name for name in other.fields if name not in self.fields)]
        changed = [name for name in names if self.fields.get(name) != other.fields.get(name)]
        lines = []
        for name in changed:
            old, new = self.fields.get(name, _ABSENT), other.fields.get(name, _ABSENT)
            summary = all(value == _ABSENT or _SUMMARY.search(value) for value in (old, new))
            if not (summary and any(finer.startswith(f"{name}.") for finer in changed)):
                lines.append(f"{name}: {old} -> {new}")
        return lines

    def is_near(self, other: Fingerprint) -> bool:
        """Whether `other` differs in nothing but torch's patch version (2.11.0 and 2.11.1, same build)."""
        names = self.fields.keys() | other.fields.keys()
        if {name for name in names if self.fields.get(name) != other.fields.get(name)} != {"torch"}:
            return False
        versions = [re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", f.fields.get("torch", "")) for f in (self, other)]
        return all(versions) and len({(m[1], m[2]) for m in versions if m}) == 1
