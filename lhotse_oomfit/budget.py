"""How many bytes training may use, and what an allocator that fragments costs."""

from __future__ import annotations

import logging

from lhotse_oomfit.memory import MemoryBackend
from lhotse_oomfit.options import CalibrationOptions
from lhotse_oomfit.profile import parse_bytes

__all__ = ["budget_bytes", "fragmenting_bytes"]

logger = logging.getLogger(__name__)

_DEFAULT_ALLOCATOR_SHARE = 0.88
"""Share of the budget used on the default allocator: sizes found on a fresh allocator run out of memory in shuffled
training there (58 times in 70 steps on an H200), 12% smaller ones don't."""


def budget_bytes(memory: MemoryBackend, allocator: str, options: CalibrationOptions) -> int:
    """The peak that no training step may exceed; zero or less where nothing is left.

    :param allocator: what :meth:`MemoryBackend.prepare` said.
    """
    allowed_bytes = memory.budget(options.memory_fraction).bytes
    if options.reserve is not None:
        allowed_bytes -= parse_bytes(options.reserve)
    if _fragments(memory, allocator):
        logger.warning(
            "expandable segments are off, so %.0f%% of the memory budget are kept free against fragmentation; "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True gets them back",
            100 * (1 - _DEFAULT_ALLOCATOR_SHARE),
        )
        allowed_bytes = int(allowed_bytes * _DEFAULT_ALLOCATOR_SHARE)
    return allowed_bytes


def fragmenting_bytes(memory: MemoryBackend, allocator: str, allowed_bytes: int) -> int:
    """What was kept out of the budget `allowed_bytes` against fragmentation."""
    return int(allowed_bytes / _DEFAULT_ALLOCATOR_SHARE) - allowed_bytes if _fragments(memory, allocator) else 0


def _fragments(memory: MemoryBackend, allocator: str) -> bool:
    """Whether the allocator's segments have fixed sizes, so that batches of many shapes fragment them."""
    return allocator == "default" and memory.name == "cuda"
