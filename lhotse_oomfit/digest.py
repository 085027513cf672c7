"""Text and digests that are the same in every process: no addresses, no hash seeds."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

__all__ = ["clip", "short_sha", "strip_addresses"]

_MAX_CHARS = 120  # characters of a value that are written out


def short_sha(value: Iterable[Any], *, chars: int = 8) -> str:
    """The first characters of a SHA-256 over plain values, the same in every process."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:chars]


def clip(text: str) -> str:
    """Text of at most 120 characters or so; what is cut off is told by a digest."""
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 20]}..., sha {short_sha([text])}"


def strip_addresses(text: str) -> str:
    """Text without memory addresses (``<function f at 0x7f...>``)."""
    return re.sub(r"\bat 0x[0-9a-fA-F]+|\b0x[0-9a-fA-F]{6,}", "", text)
