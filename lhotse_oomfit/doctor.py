"""What in this environment, or in a training, will hurt: each finding says what, why it hurts and what to do."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lhotse_oomfit.amounts import format_bytes
from lhotse_oomfit.store import ProfileStore

__all__ = ["Finding", "check_environment", "check_training"]

_SUPPORTED = {  # from this version, up to but without that one
    "torch": ("2.4", None),
    "lhotse": ("1.33", "2.0"),
    "lightning": ("2.3", "2.7"),
    "pytorch-lightning": ("2.3", "2.7"),
}
_REQUIRED = ("torch", "lhotse")
_BUSY_SHARE = 0.05
"""A card with more than this share in use by others leaves less than the default memory_fraction promises."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that will hurt, or (``hurts=False``) that is worth knowing."""

    what: str
    why: str
    remedy: str
    hurts: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def check_environment(store: ProfileStore) -> list[Finding]:
    """Versions, allocator, card, cache and the environment's variables."""
    return [*_versions(), *_variables(), *_card(), *_cache(store)]


def _versions() -> Iterator[Finding]:
    for name, (low, high) in _SUPPORTED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            if name in _REQUIRED:
                yield Finding(
                    what=f"{name} isn't installed",
                    why="nothing works without it",
                    remedy=f"pip install '{name}>={low}'",
                )
            continue
        if _numbers(found) < _numbers(low) or (high is not None and _numbers(found) >= _numbers(high)):
            wanted = f">={low}" + (f",<{high}" if high else "")
            yield Finding(
                what=f"{name} {found} is outside the versions that this package is tested with",
                why="its internals may have moved, so calibration or resuming may fail",
                remedy=f"pip install '{name}{wanted}'",
            )
    if importlib.util.find_spec("urllib3") is None:
        yield Finding(
            what="urllib3 isn't installed",
            why="Lhotse 1.33 imports it without declaring it, so 'import lhotse' fails",
            remedy="pip install urllib3",
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _variables() -> Iterator[Finding]:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        value = os.environ.get(name)
        if not value:
            continue
        if re.search(r"backend:(?!native)", value):
            yield Finding(
                what=f"{name}={value} chooses another allocator",
                why="its memory isn't counted the way torch's own allocator counts it, so sizes may be off",
                remedy=f"unset {name}, or {name}=expandable_segments:True",
            )
        elif "expandable_segments:True" not in value.replace(" ", ""):
            yield Finding(
                what=f"{name}={value} leaves expandable segments off",
                why="batches of many shapes fragment memory: 12% of it must be kept free, and steps get slower",
                remedy=f"{name}={value},expandable_segments:True, or unset it: calibration then switches them on",
            )
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        yield Finding(
            what="PYTORCH_NO_CUDA_MEMORY_CACHING is set",
            why="every allocation goes to the driver: training is many times slower, and peaks can't be measured",
            remedy="unset it",
        )
    recalibrate = os.environ.get("OOMFIT_RECALIBRATE")
    if recalibrate and recalibrate != "auto":
        known = recalibrate == "always"
        yield Finding(
            what=f"OOMFIT_RECALIBRATE={recalibrate} is set",
            why="every run measures again" if known else "it must be 'auto' or 'always': calibration refuses it",
            remedy="unset it once a new profile is stored" if known else "unset it",
        )


def _card() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        if importlib.util.find_spec("torch") is not None:
            yield Finding(
                what=f"torch can't be imported ({error})", why="nothing works without it", remedy="install it again"
            )
        return
    if not torch.cuda.is_available():
        yield Finding(
            what="there is no CUDA card here",
            why="a CPU has no memory size of its own to fill",
            remedy="pass memory_limit, such as '600MiB', or run this where the training runs",
            hurts=False,
        )
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        used = total - free - torch.cuda.memory_reserved(index)
        context = 600 * 2**20  # what this process itself takes by asking
        if used - context > _BUSY_SHARE * total:
            yield Finding(
                what=f"card {index} ({torch.cuda.get_device_name(index)}): {format_bytes(used)} of "
                f"{format_bytes(total)} are in use by other processes{_processes(index)}",
                why="sizes are then found for what is left, and are too large if others come later",
                remedy="end those processes, choose another card, or pass memory_limit for your share of it",
            )


def _processes(index: int) -> str:
    """Who is on a card, as nvidia-smi tells."""
    command = ["nvidia-smi", f"--id={index}", "--query-compute-apps=pid,name", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    others = [
        line.strip() for line in run.stdout.splitlines() if line.strip() and not line.startswith(f"{os.getpid()},")
    ]
    return f" (pid {'; '.join(others[:4])})" if others else ""


def _cache(store: ProfileStore) -> Iterator[Finding]:
    where = store.directory
    if where is None:
        return
    try:
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=where) as file:
            file.write(b"\0" * 100_000)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        yield Finding(
            what=f"the cache {where} can't be written ({error.strerror or error})",
            why="no profile is kept, so every run measures again",
            remedy="set OOMFIT_CACHE_DIR to a directory that all nodes can write, or pass cache=",
        )
        return
    import filelock

    try:
        with filelock.FileLock(where / ".doctor.lock", timeout=2.0):
            pass
        (where / ".doctor.lock").unlink(missing_ok=True)
    except (OSError, NotImplementedError) as error:
        yield Finding(
            what=f"files in the cache {where} can't be locked ({error})",
            why="two jobs that store a profile at once each write it whole; the last one stays",
            remedy="nothing, unless that matters; else a file system with locks",
            hurts=False,
        )
    broken = [entry for entry in store.entries() if entry.profile is None]
    if broken:
        yield Finding(
            what=f"{len(broken)} of the profiles in {where} can't be read: {broken[0].error}",
            why="they count as missing, and what they stood for is measured again",
            remedy=f"oomfit clear {broken[0].path}",
            hurts=False,
        )


def check_training(
    sampler: Any, *, trainer: Mapping[str, Any] | None, store: ProfileStore, world_size: int = 1
) -> list[Finding]:
    """The sampler's buffer, its source, and the trainer's arguments where there is one.

    :param trainer: the arguments of Lightning's Trainer; None for a plain loop, or where they aren't known.
    :param world_size: ranks of the job: with map-style data each draws the batches of all.
    """
    return [*_trainer(trainer), *_source(sampler, trainer), *_buffer(sampler, store, world_size)]


def _trainer(trainer: Mapping[str, Any] | None) -> Iterator[Finding]:
    if trainer is not None and trainer.get("use_distributed_sampler", True):
        yield Finding(
            what="the Trainer has use_distributed_sampler=True, which is its default",
            why="on several ranks it wraps the sampler, which splits the data itself: batches repeat or get lost",
            remedy="Trainer(use_distributed_sampler=False)",
        )


def _source(sampler: Any, trainer: Mapping[str, Any] | None) -> Iterator[Finding]:
    from lhotse_oomfit.source import endless, inexact_because

    limited = trainer is not None and (
        trainer.get("max_steps", -1) not in (-1, None) or trainer.get("limit_train_batches") is not None
    )
    if endless(sampler.cuts) and not limited:
        known = trainer is not None
        yield Finding(
            what="the data is infinite" + (" and the Trainer has no max_steps" if known else ""),
            why="an epoch never ends, and neither does training" + ("" if known else ", unless it counts its steps"),
            remedy="Trainer(max_steps=..., limit_train_batches=...)" if known else "limit the number of steps",
            hurts=known,
        )
    reason = inexact_because(sampler.cuts)
    if reason is not None:
        yield Finding(
            what=f"the data can't be read again in the same order: {reason}",
            why="a resumed run repeats some examples and misses others",
            remedy="use whole numbers as seeds, and sources that can be opened again",
            hurts=False,
        )


def _buffer(sampler: Any, store: ProfileStore, world_size: int) -> Iterator[Finding]:
    if sampler.bins is None:
        return
    sizes, origin = sampler.bucket_batch_size, "the sampler's sizes"
    if sizes is None:
        profiles = [entry.profile for entry in store.entries() if entry.profile is not None]
        match = next((p for p in profiles if p.bins.edges == sampler.bins.edges), None)
        if match is None:
            return
        sizes, origin = match.bucket_batch_size, f"the sizes of the profile of {match.created}"
    needed = sum(sizes) * max(world_size, sampler.world_size)
    most = sampler.max_buffer_size
    ranks = f" on {world_size} ranks" if world_size > 1 else ""
    if needed > most:
        yield Finding(
            what=f"a batch of every bucket{ranks} takes {needed:,} examples by {origin}, the buffer holds {most:,}",
            why="the sampler refuses to start: some buckets could never fill",
            remedy=f"max_buffer_size={needed} or more",
        )
    elif needed > sampler.buffer_size:
        yield Finding(
            what=f"a batch of every bucket{ranks} takes {needed:,} examples by {origin}, buffer_size is "
            f"{sampler.buffer_size:,}",
            why="the buffer grows to hold them, which takes memory on the host",
            remedy=f"buffer_size={2 * needed} mixes better, if the host has the memory",
            hurts=False,
        )
