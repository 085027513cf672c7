"""Readable descriptions of what decides the memory of a training step: model, optimizer, environment, dataset, batch.

Memory can change while no parameter changes shape (hop length, attention context, activation checkpointing, SDPA
backend), so every submodule's plain attributes count as well. What doesn't change memory stays out: learning rates,
seeds, paths, names, counters, training flags, private attributes.

Nothing here depends on the process: no ``id()``, no ``hash()``, no addresses, no order of sets. torch is only
imported inside the functions that need it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lhotse_oomfit.bytecode import code_digest, is_own, moved_attributes
from lhotse_oomfit.digest import clip, short_sha, strip_addresses
from lhotse_oomfit.settings import MAX_ITEMS, as_text, attributes, configurations, counts, flatten, words

if TYPE_CHECKING:
    from torch import nn

__all__ = ["batch_fields", "dataset_fields", "environment_fields", "model_fields", "optimizer_fields"]

_MAX_FIELDS = 300  # settings that get a field of their own; the digest beside them covers every one
_DATA_WORDS = {  # parts of the names of attributes that hold examples
    "cuts", "data", "samples", "examples", "items", "entries", "recordings", "supervisions", "sampler",
    "samplers", "corpus", "loader", "source", "sources", "cache", "random",
}  # fmt: skip
_DATA_MODULES = [["lhotse", part] for part in ("cut", "lazy", "supervision", "audio", "array", "manipulation", "utils")]


def model_fields(model: nn.Module) -> dict[str, str]:
    """Describe everything about a module that decides the memory of its training step.

    :param model: the module as the user wrote it, not wrapped in DDP. Compiled and checkpointed submodules are
        recognised by their classes.
    :return: ``model``, ``model.parameters``, ``model.buffers``, ``model.modules``, ``model.code``,
        ``model.settings`` and one ``model.settings.<Class>.<name>`` for each setting of a class outside
        ``torch.nn``; ``model.config`` and its entries where there is a configuration.

    The same before and after training, and in every process. Shapes of non-persistent buffers stay out, since
    modules may replace them while they train (a growing table of positions, say).
    """
    modules = list(model.named_modules())
    classes = list(dict.fromkeys(type(module) for _, module in modules))
    fields = {"model": type(model).__qualname__, "model.parameters": _parameters(model)}
    buffers = [(name, *_tensor(value)) for path, module in modules for name, value in _persistent_buffers(path, module)]
    if buffers:
        fields["model.buffers"] = f"{len(buffers)} tensors, sha {short_sha(buffers)}"
    tree = [(path, type(m).__qualname__, strip_addresses(m.extra_repr()), _is_compiled(m)) for path, m in modules]
    num_classes = len({name for _, name, _, _ in tree})
    fields["model.modules"] = f"{len(tree)} of {num_classes} classes, sha {short_sha(tree)}"
    kinds: dict[str, Counter[str]] = {}
    for _, name, settings_shown, _ in tree:
        kinds.setdefault(name, Counter())[settings_shown] += 1
    fields.update(_finer("model.modules", {name: _kinds(shown) for name, shown in kinds.items()}))
    compiled = sum(flag for *_, flag in tree)
    if compiled:
        fields["model.compiled"] = f"{compiled} modules"
    code = {cls.__qualname__: code_digest(cls) for cls in classes if is_own(cls)}
    fields["model.code"] = f"forward of {len(code)} classes, sha {short_sha(sorted(code.items()))}"

    settings: list[tuple[str, str, str]] = []  # path, attribute, value
    config: dict[str, str] = {}
    grouped: dict[str, Counter[str]] = {}
    seen: set[int] = set()  # configurations shared by several modules count once; ids never leave this function
    moved = frozenset().union(*(moved_attributes(cls)[1] for cls in classes))
    for path, module in modules:
        for name, value in attributes(module, moved):
            settings.append((path, name, value))
            if is_own(type(module)):
                grouped.setdefault(f"{type(module).__name__}.{name}", Counter())[value] += 1
        for name, holder in configurations(module):
            if id(holder) not in seen:
                seen.add(id(holder))
                where = "" if module is model and not config else f"{path}.{name}.".lstrip(".")
                config.update((where + key, value) for key, value in flatten(holder))
    fields["model.settings"] = f"{len(settings)} values, sha {short_sha(sorted(settings))}"
    fields.update(_finer("model.settings", {name: _counted(values) for name, values in grouped.items()}))
    if config:
        fields["model.config"] = f"{len(config)} values, sha {short_sha(sorted(config.items()))}"
        fields.update(_finer("model.config", config))
    return fields


def optimizer_fields(optimizers: Any) -> dict[str, str]:
    """Describe the optimizers' classes and the flags that decide what they allocate.

    :param optimizers: one optimizer or a sequence of them; Lightning's wrappers are looked through.
    :return: ``optimizer`` or, with several, ``optimizer.0``, ``optimizer.1``, ...: the class, flags (``foreach``,
        ``fused``, ``capturable``, ``amsgrad``, ...), whether there is momentum, and the number of tensors held.

    Learning rates, weight decay and betas stay out.
    """
    several = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    fields = {}
    for index, optimizer in enumerate(several):
        if any(cls.__name__ == "LightningOptimizer" for cls in type(optimizer).__mro__):
            optimizer = optimizer.optimizer
        groups = []
        for group in optimizer.param_groups:
            flags = {key: _optimizer_flag(key, value) for key, value in group.items() if key != "params"}
            groups.append(", ".join(f"{key}={value}" for key, value in sorted(flags.items()) if value is not None))
        tensors = [[(tuple(p.shape), str(p.dtype)) for p in group["params"]] for group in optimizer.param_groups]
        name = "optimizer" if len(several) == 1 else f"optimizer.{index}"
        fields[name] = "; ".join(f"{type(optimizer).__qualname__}({flags})" for flags in dict.fromkeys(groups))
        num_tensors = sum(map(len, tensors))
        fields[f"{name}.tensors"] = f"{num_tensors} in {len(groups)} groups, sha {short_sha(tensors)}"
    return fields


def environment_fields() -> dict[str, str]:
    """Describe the versions and process-wide switches that decide memory: torch, CUDA, cuDNN, allocator, SDPA.

    Autocast and precision are the caller's to add, and so is the device (see the memory backends).
    """
    import torch

    fields = {"torch": str(torch.__version__), "cuda": str(torch.version.cuda or torch.version.hip or "none")}
    cudnn = torch.backends.cudnn
    fields["cudnn"] = (
        f"{cudnn.version() or 'none'}, enabled={cudnn.enabled}, benchmark={cudnn.benchmark}, "
        f"deterministic={cudnn.deterministic}"
    )
    # The names of the allocator's variables: https://pytorch.org/docs/stable/torch_cuda_memory.html
    names = (
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_HIP_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
    )
    chosen = [f"{name}={os.environ[name]}" for name in (*names, "CUBLAS_WORKSPACE_CONFIG") if os.environ.get(name)]
    fields["allocator settings"] = " ".join(chosen) or "default"
    sdpa = torch.backends.cuda
    backends = {
        "flash": sdpa.flash_sdp_enabled(),
        "mem_efficient": sdpa.mem_efficient_sdp_enabled(),
        "math": sdpa.math_sdp_enabled(),
        "cudnn": sdpa.cudnn_sdp_enabled() if hasattr(sdpa, "cudnn_sdp_enabled") else False,
    }
    fields["sdpa backends"] = " ".join(name for name, enabled in backends.items() if enabled) or "none"
    fields["deterministic algorithms"] = str(torch.are_deterministic_algorithms_enabled())
    fields["anomaly detection"] = str(torch.is_anomaly_enabled())
    fields["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"  # bytecode, so model.code, depends on it
    fields["default dtype"] = str(torch.get_default_dtype()).removeprefix("torch.")
    return fields


def dataset_fields(dataset: Any) -> dict[str, str]:
    """Describe what turns cuts into batches: the dataset's class, its parts (input strategy, transforms) and settings.

    :param dataset: a map-style or iterable dataset; its plain attributes are read three objects deep.
    """
    found: dict[str, str] = {}
    _describe(dataset, "", found, depth=3, seen=set())
    fields = {"dataset": f"{type(dataset).__qualname__}, {len(found)} values, sha {short_sha(sorted(found.items()))}"}
    fields.update(_finer("dataset", found))
    return fields


def batch_fields(batch: Any) -> dict[str, str]:
    """Describe a batch: names, dtypes and numbers of dimensions, then all sizes; no values.

    :param batch: of so many examples of such a length that its sizes are the same in every process.
    :return: ``batch`` and ``batch.sizes``, where it has any.
    """
    fields = {"batch": ", ".join(_batch_parts(batch, "", sizes=False)) or type(batch).__qualname__}
    sizes = ", ".join(_batch_parts(batch, "", sizes=True))
    if sizes:
        fields["batch.sizes"] = sizes
    return fields


def _describe(value: Any, name: str, found: dict[str, str], *, depth: int, seen: set[int]) -> None:
    """Collect the plain attributes of an object and of the objects that it holds into `found`; data stays out."""
    if id(value) in seen or not hasattr(value, "__dict__"):
        return
    seen.add(id(value))
    for key, text in attributes(value, only_given_numbers=True):
        found[f"{name}{key}"] = text
    for key, held in sorted(vars(value).items()):
        if not counts(key.lstrip("_"), held, from_init=True) or words(key) & _DATA_WORDS:
            continue
        parts = list(enumerate(held)) if isinstance(held, (list, tuple)) else [(None, held)]
        for index, part in parts[:MAX_ITEMS]:
            if as_text(part) is not None or not hasattr(part, "__dict__") or _is_data(type(part)):
                continue
            label = f"{name}{key}" if index is None else f"{name}{key}.{index}"
            found[label] = type(part).__qualname__
            if depth:
                _describe(part, f"{label}.", found, depth=depth - 1, seen=seen)


def _is_data(cls: type) -> bool:
    """Whether a class holds examples, or belongs to Python itself (locks, generators of random numbers)."""
    parts = cls.__module__.split(".")
    return parts[0] in sys.stdlib_module_names or parts[0] in {"numpy", "torch"} or parts[:2] in _DATA_MODULES


def _batch_parts(value: Any, name: str, *, sizes: bool) -> Iterator[str]:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        if not sizes:
            yield f"{name or 'batch'}: {str(value.dtype).removeprefix('torch.')} {len(value.shape)}d"
        elif len(value.shape):
            yield f"{name or 'batch'}: {'x'.join(map(str, value.shape))}"
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _batch_parts(value[key], f"{name}.{key}".lstrip("."), sizes=sizes)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _batch_parts(item, f"{name}.{index}".lstrip("."), sizes=sizes)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _batch_parts(getattr(value, field.name), f"{name}.{field.name}".lstrip("."), sizes=sizes)
    elif isinstance(value, list) and any(hasattr(item, "dtype") for item in value):
        # A list may have one entry an example, so it is described by what kinds of entries there are.
        yield from dict.fromkeys(part for item in value for part in _batch_parts(item, f"{name}[]", sizes=sizes))
    elif not sizes:
        yield f"{name or 'batch'}: {type(value).__qualname__}"


def _parameters(model: nn.Module) -> str:
    first: dict[int, str] = {}
    rows = []
    total = trainable = 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied = first.setdefault(id(parameter), name)  # the name, not the id, goes into the digest
        shape, dtype = _tensor(parameter)
        rows.append((name, tied, shape, dtype, parameter.requires_grad, parameter.device.type))
        if tied == name and isinstance(shape, tuple):
            total += parameter.numel()
            trainable += parameter.numel() * parameter.requires_grad
    return f"{_short(total)} in {len(first)} tensors, {_short(trainable)} trainable, sha {short_sha(rows)}"


def _persistent_buffers(path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in module._buffers.items():
        if value is not None and name not in module._non_persistent_buffers_set:
            yield f"{path}.{name}".lstrip("."), value


def _tensor(value: Any) -> tuple[Any, str]:
    from torch.nn.parameter import is_lazy

    return ("lazy" if is_lazy(value) else tuple(value.shape)), str(value.dtype).removeprefix("torch.")


def _is_compiled(module: Any) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def _optimizer_flag(key: str, value: Any) -> str | None:
    if value is None or isinstance(value, (bool, str)):
        return str(value)
    if key in {"momentum", "beta1", "alpha_momentum"}:  # only whether there is a state tensor for it
        return "nonzero" if value else "0"
    if isinstance(value, int) and key not in {"lr", "initial_lr", "step", "warmup_steps", "eps", "weight_decay"}:
        return str(value) if key in {"history_size", "rank", "block_size", "max_preconditioner_dim"} else None
    return None


def _finer(prefix: str, values: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{name}": values[name] for name in sorted(values)[:_MAX_FIELDS]}


def _counted(values: Counter[str]) -> str:
    """One value as it is; several as ``64 (2), 128 (22)``, the commonest first."""
    if len(values) == 1:
        return next(iter(values))
    ordered = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    if len(ordered) > MAX_ITEMS:
        return f"{len(ordered)} values, sha {short_sha(ordered)}"
    return clip(", ".join(f"{value} ({count})" for value, count in ordered))


def _kinds(shown: Counter[str]) -> str:
    """How many modules there are of one class, and what they say of themselves: ``12: p=0.1``."""
    if len(shown) > 1:
        return f"{shown.total()} of {len(shown)} kinds, sha {short_sha(sorted(shown.items()))}"
    return clip(f"{shown.total()}: {next(iter(shown))}".rstrip(": "))


def _short(number: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return str(number)
