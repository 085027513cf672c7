"""The state of torch's CUDA allocator: expandable segments, on whenever that is still possible.

With segments of fixed sizes, batches of many shapes fragment the reservation, and a size that fits on a fresh allocator
can fail hours later. Switching to expandable segments works at run time too, if the cache is emptied afterwards; torch
has only private functions for it, whose names changed, so every use of them is here.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

__all__ = ["prefer_expandable_segments"]

logger = logging.getLogger(__name__)

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def prefer_expandable_segments(device: torch.device) -> str:
    """Switch on expandable segments unless the user configured the allocator; then empty the cache.

    :return: ``"expandable_segments"``, ``"default"``, or the name of another allocator backend
        (``"cudaMallocAsync"``, ``"pluggable"``), which is left alone.
    """
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return str(backend)
    if _expandable_segments():
        return "expandable_segments"
    variable = next((name for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), None)
    if variable is not None:
        logger.warning(
            "%s=%s is kept as it is, without expandable segments, so memory may fragment over many batch shapes; "
            "add expandable_segments:True to it",
            variable,
            os.environ[variable],
        )
        return "default"
    reason = _switch_on_expandable_segments()
    if reason is None:
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
        logger.info("switched on the CUDA allocator's expandable segments")
        return "expandable_segments"
    logger.warning(
        "the CUDA allocator's expandable segments can't be switched on (%s), so memory may fragment over many "
        "batch shapes; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before the program starts",
        reason,
    )
    return "default"


def _expandable_segments() -> bool | None:
    """Whether the allocator now uses expandable segments; None where this torch can't tell."""
    try:
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        return bool(settings["expandable_segments"])
    except (AttributeError, KeyError, TypeError):
        return None


_SETTERS: tuple[tuple[Any, str], ...] = (
    (torch._C, "_accelerator_setAllocatorSettings"),  # the newest name first: the others warn there
    (torch._C, "_cuda_cudaCachingAllocator_set_allocator_settings"),
    (torch.cuda.memory, "_set_allocator_settings"),
)


def _switch_on_expandable_segments() -> str | None:
    """Switch them on through whichever private name this torch has; None on success, else the reason."""
    for owner, name in _SETTERS:
        setter = getattr(owner, name, None)
        if setter is None:
            continue
        try:
            setter("expandable_segments:True")
        except (RuntimeError, ValueError, TypeError) as error:
            return str(error).strip().partition("\n")[0] or type(error).__name__
        return "the allocator took the setting and ignored it" if _expandable_segments() is False else None
    return f"torch {torch.__version__} has no function for it"
