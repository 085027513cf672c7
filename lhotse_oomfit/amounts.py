"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from lhotse_oomfit.errors import InvalidArgumentError

__all__ = ["format_bytes", "parse_bytes"]

_MAX_INT = 2**63 - 1
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def format_bytes(num_bytes: float) -> str:
    """Bytes in binary units with three digits: ``600 MiB``, ``1.50 GiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= scale:
            value = num_bytes / scale
            return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f} {unit}"
    return f"{num_bytes:.0f} B"


def parse_bytes(amount: str | int) -> int:
    """Read an amount of memory: ``"600MiB"``, ``"1.5 GiB"``, ``"2GB"`` (decimal), or a number of bytes.

    :raises InvalidArgumentError: anything else, or less than one byte.
    """
    number: float = -1
    if isinstance(amount, int) and not isinstance(amount, bool):
        number = amount
    elif isinstance(amount, str):
        match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([kmgt]?)(i?)b?\s*", amount.lower())
        if match and not (match[3] and not match[2]):
            number = float(match[1]) * (_BINARY if match[3] else _DECIMAL)[match[2]]
    if not 1 <= number <= _MAX_INT:
        raise InvalidArgumentError(
            f'an amount of memory must be bytes or a string like "600MiB" or "2GB", is {amount!r}; write it that way'
        )
    return int(number)
