"""Readable descriptions of what decides the memory of a training step: model, optimizer, environment, dataset, batch.

Memory can change while no parameter changes shape (hop length, attention context, activation checkpointing, SDPA
backend), so every submodule's plain attributes count as well. What doesn't change memory stays out: learning rates,
seeds, paths, names, counters, training flags, private attributes.

Nothing here depends on the process: no ``id()``, no ``hash()``, no addresses, no order of sets. torch is only
imported inside the functions that need it.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import CodeType

    from torch import nn

__all__ = ["batch_fields", "dataset_fields", "environment_fields", "model_fields", "optimizer_fields", "short_sha"]

_MAX_FIELDS = 300  # settings that get a field of their own; the digest beside them covers every one
_MAX_ITEMS = 16  # elements of a sequence that are written out
_MAX_CHARS = 120  # characters of a value that are written out


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
    fields = {"model": type(model).__qualname__, "model.parameters": _parameters(model)}
    buffers = [(name, *_tensor(value)) for path, module in modules for name, value in _persistent_buffers(path, module)]
    if buffers:
        fields["model.buffers"] = f"{len(buffers)} tensors, sha {short_sha(buffers)}"
    tree = [(path, type(m).__qualname__, _strip(m.extra_repr()), _is_compiled(m)) for path, m in modules]
    num_classes = len({name for _, name, _, _ in tree})
    fields["model.modules"] = f"{len(tree)} of {num_classes} classes, sha {short_sha(tree)}"
    compiled = sum(flag for *_, flag in tree)
    if compiled:
        fields["model.compiled"] = f"{compiled} modules"
    code = {cls.__qualname__: _class_code(cls) for cls in dict.fromkeys(type(m) for _, m in modules) if _is_own(cls)}
    fields["model.code"] = f"forward of {len(code)} classes, sha {short_sha(sorted(code.items()))}"

    settings: list[tuple[str, str, str]] = []  # path, attribute, value
    config: dict[str, str] = {}
    grouped: dict[str, Counter[str]] = {}
    seen: set[int] = set()  # configurations shared by several modules count once; ids never leave this function
    for path, module in modules:
        for name, value in _attributes(module):
            settings.append((path, name, value))
            if _is_own(type(module)):
                grouped.setdefault(f"{type(module).__name__}.{name}", Counter())[value] += 1
        for name, holder in _configurations(module):
            if id(holder) not in seen:
                seen.add(id(holder))
                where = (
                    "" if name in {"hparams", "cfg", "config"} and module is model else f"{path}.{name}.".lstrip(".")
                )
                config.update((where + key, value) for key, value in _flatten(holder))
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
    """Describe a batch: names, dtypes and numbers of dimensions, no sizes and no values."""
    return {"batch": ", ".join(_batch_parts(batch, "")) or type(batch).__qualname__}


# What counts and what doesn't. Words are the parts of a name split at underscores and dots.

_IGNORED_NAMES = {
    "training", "dump_patches", "call_super_init", "T_destination", "max_audio_length", "num_batches_tracked",
    "prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices", "batch_size", "num_workers",
    "pin_memory", "prefetch_factor", "persistent_workers", "run_id", "job_id", "resume", "global_rank", "local_rank",
    "rank", "world_size", "exp_manager",
}  # fmt: skip
_IGNORED_WORDS = {
    "lr", "seed", "seeds", "rng", "path", "paths", "dir", "dirs", "directory", "file", "filename", "filepath", "files",
    "manifest", "manifests", "url", "uri", "uuid", "name", "names", "date", "time", "timestamp", "hostname", "host",
    "user", "nodes", "port", "logs", "logging", "logger", "verbose", "debug", "wandb", "tensorboard", "comet",
    "experiment", "project", "version", "comment", "description", "notes", "warmup", "betas", "scheduler", "sched",
    "optim", "optimizer", "callbacks", "labels", "vocabulary",
}  # fmt: skip
_IGNORED_PHRASES = ("learning_rate", "weight_decay", "max_epochs", "max_steps", "total_steps", "training_steps")
_COUNTER_WORDS = {
    "step", "steps", "epoch", "epochs", "count", "counts", "counter", "iter", "iters", "iteration", "iterations",
    "seen", "updates", "calls", "idx", "index", "initialized", "initialised", "inited", "built", "last", "prev",
    "previous", "current", "cur", "curr", "elapsed", "progress", "done", "finished", "started", "first", "running",
    "loss", "losses", "metric", "metrics", "wer", "cer", "accuracy", "acc", "best", "patience",
}  # fmt: skip
_CONFIG_NAMES = ("hparams", "cfg", "_cfg", "config", "args", "conf", "hp", "opt", "params", "options")


def _counts(name: str, *, from_init: bool) -> bool:
    """Whether a setting of this name may change memory. Counters count only if the constructor takes them."""
    if (
        name.startswith("_")
        or name.endswith("_ds")
        or name in _IGNORED_NAMES
        or any(phrase in name for phrase in _IGNORED_PHRASES)
    ):
        return False
    words = set(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_"))
    return not words & _IGNORED_WORDS and (from_init or not words & _COUNTER_WORDS)


def _attributes(module: Any) -> Iterator[tuple[str, str]]:
    """The plain attributes of an object that count, as text. Floats and lists of them only if `__init__` takes them."""
    taken = _init_names(type(module))
    for name, value in sorted(vars(module).items()):
        if not _counts(name, from_init=name in taken):
            continue
        text = _plain(value)
        numbers = isinstance(value, float) or (isinstance(value, list) and any(isinstance(v, float) for v in value))
        empty = isinstance(value, (list, dict, set)) and not value  # most likely something that fills up
        if text is not None and (name in taken or not (numbers or empty)):
            yield name, text


def _init_names(cls: type) -> frozenset[str]:
    names: set[str] = set()
    for base in cls.__mro__:
        if "__init__" in vars(base) and inspect.isfunction(vars(base)["__init__"]):
            code = vars(base)["__init__"].__code__
            names.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return frozenset(names)


def _plain(value: Any) -> str | None:
    """A plain value as text that is the same in every process; None for anything else (tensors, modules, ...)."""
    if value is None or isinstance(value, (bool, int)):
        return value.name if isinstance(value, enum.Enum) else repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, str):
        return None if _is_path(value) else _clip(_strip(value))
    if isinstance(value, (tuple, list, set, frozenset)):
        parts = [_plain(item) for item in value]
        if any(part is None for part in parts):
            return None
        texts = [str(part) for part in parts]
        if isinstance(value, (set, frozenset)):
            texts.sort()
        if len(texts) > _MAX_ITEMS:
            return f"{len(texts)} values, sha {short_sha(texts)}"
        return _clip("[" + ", ".join(texts) + "]")
    if isinstance(value, functools.partial):
        named = [f"{key}={_plain(item)}" for key, item in sorted(value.keywords.items())]
        return _clip(f"partial {_plain(value.func)}({', '.join([*map(str, map(_plain, value.args)), *named])})")
    if inspect.isroutine(value) or isinstance(value, type):
        return _strip(str(getattr(value, "__qualname__", type(value).__qualname__)))
    if type(value).__module__ == "torch" and type(value).__name__ in {"dtype", "memory_format", "layout"}:
        return str(value).removeprefix("torch.")
    return None


def _configurations(module: Any) -> Iterator[tuple[str, Any]]:
    """The objects that hold a module's configuration: Lightning's hparams, NeMo's cfg, Hugging Face's config, args."""
    held = vars(module)
    if held.get("_hparams"):
        yield "hparams", held["_hparams"]
    for name in _CONFIG_NAMES:
        value = held.get(name)
        if value is not None and _as_mapping(value) is not None:
            yield name.lstrip("_"), value


def _as_mapping(value: Any) -> Mapping[Any, Any] | None:
    """A configuration as a mapping; None for anything that isn't one."""
    omegaconf = sys.modules.get("omegaconf")  # whoever made a DictConfig has imported it
    if omegaconf is not None and isinstance(value, (omegaconf.DictConfig, omegaconf.ListConfig)):
        try:
            value = omegaconf.OmegaConf.to_container(value, resolve=True)
        except omegaconf.errors.OmegaConfBaseException:  # an interpolation that only works elsewhere
            value = omegaconf.OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Mapping):
        return value
    if isinstance(value, type):
        return None
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):
        made = to_dict()
        return made if isinstance(made, Mapping) else None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return dict(vars(value)) if type(value).__name__ in {"Namespace", "SimpleNamespace"} else None


def _flatten(config: Any, prefix: str = "", depth: int = 8) -> Iterator[tuple[str, str]]:
    """The plain values of a nested configuration that count, with dotted names."""
    mapping = _as_mapping(config)
    for key, value in sorted((mapping or {}).items(), key=lambda item: str(item[0])):
        name = str(key)
        if not _counts(name, from_init=True):
            continue
        text = _plain(value)
        if text == "???":  # OmegaConf's mark of a missing value
            continue
        if text is not None:
            yield prefix + name, text
        elif depth and _as_mapping(value) is not None:
            yield from _flatten(value, f"{prefix}{name}.", depth - 1)
        elif depth and isinstance(value, (list, tuple)):
            yield from _flatten({str(i).zfill(3): item for i, item in enumerate(value)}, f"{prefix}{name}.", depth - 1)


def _describe(value: Any, name: str, found: dict[str, str], *, depth: int, seen: set[int]) -> None:
    """Collect the plain attributes of an object and of the objects that it holds into `found`."""
    if id(value) in seen or not hasattr(value, "__dict__"):
        return
    seen.add(id(value))
    for key, text in _attributes(value):
        found[f"{name}{key}"] = text
    for key, held in sorted(vars(value).items()):
        parts = list(enumerate(held)) if isinstance(held, (list, tuple)) else [(None, held)]
        for index, part in parts[:_MAX_ITEMS]:
            plain = _plain(part) is not None or type(part).__module__ in {"builtins", "numpy", "torch"}
            if plain or not hasattr(part, "__dict__") or not _counts(key.lstrip("_"), from_init=True):
                continue
            label = f"{name}{key}" if index is None else f"{name}{key}.{index}"
            found[label] = type(part).__qualname__
            if depth:
                _describe(part, f"{label}.", found, depth=depth - 1, seen=seen)


def _batch_parts(value: Any, name: str) -> Iterator[str]:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        yield f"{name or 'batch'}: {str(value.dtype).removeprefix('torch.')} {len(value.shape)}d"
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _batch_parts(value[key], f"{name}.{key}".lstrip("."))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _batch_parts(item, f"{name}.{index}".lstrip("."))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _batch_parts(getattr(value, field.name), f"{name}.{field.name}".lstrip("."))
    else:  # a list has one entry an example
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


def _is_own(cls: type) -> bool:
    """Whether a class is the user's or a toolkit's, and not one of torch's, whose ``extra_repr`` says everything."""
    return cls.__module__.split(".")[0] not in {"torch", "torchmetrics"}


def _class_code(cls: type) -> str:
    """A digest of what ``forward`` and ``training_step`` do: bytecode, names, constants; no comments, no positions."""
    parts = []
    for name in ("forward", "training_step"):
        function = inspect.unwrap(getattr(cls, name, None) or _class_code)
        code = getattr(function, "__code__", None)
        if code is not None and function is not _class_code:
            parts.append(_code(code))
    return short_sha(parts)


def _code(code: CodeType) -> list[Any]:
    parts: list[Any] = []
    for step in dis.get_instructions(code):
        value = step.argval
        if step.opcode not in dis.hasconst:
            parts.append((step.opname, step.argrepr))
        elif inspect.iscode(value):
            parts.append((step.opname, _code(value)))
        else:  # a docstring is no constant that any instruction loads
            parts.append((step.opname, sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)))
    return parts


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
    if len(ordered) > _MAX_ITEMS:
        return f"{len(ordered)} values, sha {short_sha(ordered)}"
    return _clip(", ".join(f"{value} ({count})" for value, count in ordered))


def _is_path(text: str) -> bool:
    return bool(re.match(r"^(~|\.{0,2}/|[A-Za-z]:\\|[a-z][a-z0-9+.-]*://)", text)) or text.count("/") > 1


def _strip(text: str) -> str:
    return re.sub(r"\bat 0x[0-9a-fA-F]+|\b0x[0-9a-fA-F]{6,}", "", text)


def _clip(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 20]}..., sha {short_sha([text])}"


def _short(number: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return str(number)


def short_sha(value: Iterable[Any], *, chars: int = 8) -> str:
    """The first characters of a SHA-256 over plain values, the same in every process."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:chars]
