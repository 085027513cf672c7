"""Largest batch size per length bucket for Lhotse samplers, measured inside the training job.

Public names load on first use, so that ``import lhotse_oomfit`` costs nothing and the light commands of the
command line never import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lhotse_oomfit.version import __version__

_HOME = {
    "Bins": "bins",
    "CalibratedBucketingSampler": "sampler",
    "Profile": "profile",
    "calibrate": "fit",
    "errors": "errors",
    "estimate_bins": "bins",
}

__all__ = ["Bins", "CalibratedBucketingSampler", "Profile", "__version__", "calibrate", "errors", "estimate_bins"]

if TYPE_CHECKING:
    from lhotse_oomfit import errors as errors
    from lhotse_oomfit.bins import Bins as Bins
    from lhotse_oomfit.bins import estimate_bins as estimate_bins
    from lhotse_oomfit.fit import calibrate as calibrate
    from lhotse_oomfit.profile import Profile as Profile
    from lhotse_oomfit.sampler import CalibratedBucketingSampler as CalibratedBucketingSampler


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOME[name]}")
    return module if name == _HOME[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
