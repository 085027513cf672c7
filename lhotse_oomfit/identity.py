"""What a profile is for: everything that decides the memory of a training step, by name."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from lhotse_oomfit.bytecode import callable_digest
from lhotse_oomfit.fingerprint import Fingerprint
from lhotse_oomfit.memory import MemoryBackend
from lhotse_oomfit.options import CalibrationOptions
from lhotse_oomfit.sampler import CalibratedBucketingSampler
from lhotse_oomfit.shapes import WorstCases, shape_label
from lhotse_oomfit.training import Training
from lhotse_oomfit.traits import dataset_fields, environment_fields, model_fields, optimizer_fields
from lhotse_oomfit.version import __version__

__all__ = ["fingerprint_of", "versions"]


def fingerprint_of(
    training: Training,
    sampler: CalibratedBucketingSampler,
    options: CalibrationOptions,
    *,
    memory: MemoryBackend,
    allocator: str,
    cases: WorstCases,
    world_size: int,
    lockstep: bool,
) -> Fingerprint:
    """The fingerprint of a calibration.

    :param allocator: what :meth:`MemoryBackend.prepare` said.
    :param cases: the worst case of each bucket.
    :param world_size: the job's number of ranks; only whether there are several counts, but in lock-step, where it
        decides how much of the parameters each rank holds.
    """
    shapes = ", ".join(shape_label(shape) for shape in cases.shapes)
    fields = {
        **memory.fields(),
        "memory_fraction": f"{options.memory_fraction:g}",
        "reserve": str(options.reserve or "-"),
        "max_batch_size": str(options.max_batch_size or "-"),
        "mode": options.mode,
        "objective": options.objective
        + (f" within {options.throughput_share:g}" if options.objective == "throughput" else ""),
        "buckets": shapes,
        "accumulated gradients": str(training.accumulate_grad_batches > 1),
        "ranks": _ranks_field(world_size, lockstep),
        **training.settings,
        **{
            f"code.{name}": callable_digest(function)
            for name, function in {**training.functions, **sampler.functions}.items()
            if function is not None
        },
        **model_fields(training.module),
        **optimizer_fields(list(training.optimizers)),
        **environment_fields(),
        "allocator": allocator,
        **dataset_fields(training.dataset),
        **cases.batch_fields(),
        "lhotse-oomfit": __version__.rpartition(".")[0],
    }
    return Fingerprint(fields=fields)


def _ranks_field(world_size: int, lockstep: bool) -> str:
    if world_size == 1:
        return "one"
    return f"{world_size} in lock-step" if lockstep else "several"


def versions() -> dict[str, str]:
    """The packages that a profile was measured with."""
    found = {"python": ".".join(map(str, sys.version_info[:3])), "lhotse-oomfit": __version__}
    for name in ("torch", "lhotse", "lightning", "pytorch-lightning", "nemo-toolkit"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
