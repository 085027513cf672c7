"""How a training is spread over ranks, and so how its trials must run.

Plain and DistributedDataParallel models are tried by one rank alone, on the module inside the wrapper. Where a step
can't be run by one rank, because parameters or the step itself are spread over ranks, all ranks run every trial
together, in lock-step. What neither way can measure is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lhotse_oomfit.errors import UnsupportedStrategyError

__all__ = ["ReducerBuckets", "local_bytes", "lockstep_reason", "refuse_strategy", "unwrap_model"]


def unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside a DistributedDataParallel wrapper, or `model` itself."""
    if isinstance(model, DistributedDataParallel):
        inner: torch.nn.Module = model.module
        return inner
    return model


def lockstep_reason(model: torch.nn.Module) -> str | None:
    """Why all ranks must run the trials of `model` together; None if one rank can run them alone.

    :param model: as training calls it, wrapped.
    """
    if isinstance(model, DistributedDataParallel) and model.static_graph:
        return "DistributedDataParallel with static_graph=True learns its graph from the first step of all ranks"
    for name, module in model.named_modules():
        where = name or "the model"
        if _is_fsdp1(module):
            return f"{where} is wrapped in {type(module).__name__}, which spreads parameters over ranks"
        if module is not model and isinstance(module, DistributedDataParallel):
            return f"{where} is a DistributedDataParallel inside the model"
        if _own_groups(module) and not isinstance(module, DistributedDataParallel):
            return f"{where} ({type(module).__name__}) talks to other ranks through a process group of its own"
    for name, parameter in model.named_parameters():
        if _is_dtensor(parameter):
            return f"parameter {name} is a DTensor, spread over ranks (FSDP2 or tensor parallel)"
    return None


def refuse_strategy(model: torch.nn.Module, optimizers: Sequence[Any]) -> None:
    """Refuse what can't be measured, alone or in lock-step.

    :raises UnsupportedStrategyError: naming what it is.
    """
    for name, module in model.named_modules():
        if "DeepSpeed" in type(module).__name__ or "PipelineStage" in type(module).__name__:
            raise UnsupportedStrategyError(
                f"{name or 'the model'} is a {type(module).__name__}, whose engine runs the backward pass and the "
                f"optimizer itself, so that single steps can't be tried; set bucket_batch_size to a list of sizes"
            )
    for index, optimizer in enumerate(optimizers):
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer" or _own_groups(optimizer):
            raise UnsupportedStrategyError(
                f"optimizer {index} ({type(optimizer).__name__}) spreads its state over ranks through a process group "
                f"of its own, so that a trial can't leave it as it was; set bucket_batch_size to a list of sizes"
            )


class ReducerBuckets(torch.nn.Module):
    """The memory that DistributedDataParallel adds to `module`: a copy of all gradients, in its reducer's buckets.

    Source: torch/csrc/distributed/c10d/reducer.cpp, which allocates the buckets when the wrapper is made.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        for index, parameter in enumerate(p for p in module.parameters() if p.requires_grad):
            self.register_buffer(f"bucket_{index}", torch.zeros_like(parameter, requires_grad=False))


def local_bytes(tensors: Iterator[torch.Tensor]) -> int:
    """The bytes that these tensors take on this rank."""
    return sum(_local(tensor).numel() * tensor.element_size() for tensor in tensors)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor._local_tensor if _is_dtensor(tensor) else tensor
    return local


def _is_fsdp1(module: torch.nn.Module) -> bool:
    return any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "DTensor"


def _own_groups(holder: Any) -> list[Any]:
    """The process groups of several ranks that an object holds in its attributes."""
    if not torch.distributed.is_available():
        return []
    held = [value for value in vars(holder).values() if isinstance(value, torch.distributed.ProcessGroup)]
    return [group for group in held if group.size() > 1]
