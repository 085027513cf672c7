"""Which attributes and configuration entries may change memory, and their values as text that no process changes."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import numbers
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from lhotse_oomfit.bytecode import init_names, moved_attributes
from lhotse_oomfit.digest import clip, short_sha, strip_addresses

__all__ = ["MAX_ITEMS", "as_text", "attributes", "configurations", "counts", "flatten", "words"]

MAX_ITEMS = 16  # elements of a sequence that are written out
_MAX_SETTING_ITEMS = 256
_IGNORED_NAMES = {
    "training", "dump_patches", "call_super_init", "T_destination", "max_audio_length", "num_batches_tracked",
    "prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices", "batch_size", "num_workers",
    "pin_memory", "prefetch_factor", "persistent_workers", "run_id", "job_id", "resume", "global_rank", "local_rank",
    "rank", "world_size", "exp_manager", "start_time", "end_time", "num_nodes",
}  # fmt: skip
_IGNORED_WORDS = {
    "lr", "seed", "seeds", "rng", "logs", "logging", "logger", "loggers", "verbose", "debug", "wandb", "tensorboard",
    "comet", "warmup", "betas", "scheduler", "sched", "optim", "optimizer", "callbacks", "uuid", "guid", "timestamp",
}  # fmt: skip
_IGNORED_TEXT_WORDS = {  # for anything but numbers: drop_path=0.1 counts, model_path="/a" doesn't
    "path", "paths", "dir", "dirs", "directory", "file", "filename", "filepath", "files", "manifest", "manifests",
    "url", "uri", "date", "hostname", "host", "user", "port", "experiment", "project", "version", "comment",
    "description", "notes", "labels", "vocabulary", "vocab",
}  # fmt: skip
_IGNORED_TEXTS = {
    "name", "names", "run_name", "exp_name", "job_name", "model_name", "group_name", "task_name", "tokenizer_name",
}  # fmt: skip
_IGNORED_PHRASES = ("learning_rate", "weight_decay", "max_epochs", "max_steps", "total_steps", "training_steps")
_COUNTER_WORDS = {
    "step", "steps", "epoch", "epochs", "count", "counts", "counter", "iter", "iters", "iteration", "iterations",
    "seen", "updates", "calls", "idx", "index", "initialized", "initialised", "inited", "built", "last", "prev",
    "previous", "current", "cur", "curr", "elapsed", "progress", "done", "finished", "started", "first", "running",
    "loss", "losses", "metric", "metrics", "wer", "cer", "accuracy", "acc", "best", "patience",
}  # fmt: skip
_CONFIG_NAMES = ("hparams", "cfg", "_cfg", "config", "args", "conf", "hp", "opt", "params", "options")


def counts(name: str, value: Any, *, from_init: bool) -> bool:
    """Whether a setting of this name may change memory. Counters count only if the constructor takes them."""
    if name.startswith("_") or name.endswith("_ds") or name in _IGNORED_NAMES:
        return False
    parts = words(name)
    if not isinstance(value, numbers.Number) and (name.lower() in _IGNORED_TEXTS or parts & _IGNORED_TEXT_WORDS):
        return False
    ignored = parts & _IGNORED_WORDS or any(phrase in name for phrase in _IGNORED_PHRASES)
    return not ignored and (from_init or not parts & _COUNTER_WORDS)


def attributes(
    module: Any, moved: frozenset[str] = frozenset(), *, only_given_numbers: bool = False
) -> Iterator[tuple[str, str]]:
    """The plain attributes of an object that count, as text.

    What its own code assigns while it runs is no setting (see :func:`moved_attributes`), nor are the names in `moved`.
    Floats, None, empty containers and private names count only if the constructor takes an argument of that name,
    since others are likely to fill up or to move while training runs. With `only_given_numbers` the same goes for whole
    numbers: in a dataset, others are likely to count examples. Long sequences are data, not settings.
    """
    taken = init_names(type(module))
    moved = moved | moved_attributes(type(module))[0]
    for name, value in sorted(vars(module).items()):
        bare = name.lstrip("_")
        given = bare in taken
        private = name != bare and (not given or bool(words(bare) & _COUNTER_WORDS))
        if private or name in moved or not counts(bare, value, from_init=given):
            continue
        if isinstance(value, (list, tuple, set, frozenset)) and len(value) > _MAX_SETTING_ITEMS:
            continue
        if only_given_numbers and not given and _is_numeric(value):
            continue
        text = as_text(value)
        fills = value is None or isinstance(value, float) or (isinstance(value, (list, dict, set)) and not value)
        fills = fills or (isinstance(value, list) and any(isinstance(item, float) for item in value))
        if text is not None and (given or not fills):
            yield name, text


def as_text(value: Any) -> str | None:
    """A plain value as text that is the same in every process; None for anything else (tensors, modules, ...)."""
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, numbers.Integral):  # numpy's too
        return repr(int(value))
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, str):
        return None if _is_path(value) else clip(strip_addresses(value))
    if isinstance(value, (tuple, list, set, frozenset)):
        parts = [as_text(item) for item in value]
        if any(part is None for part in parts):
            return None
        texts = [str(part) for part in parts]
        if isinstance(value, (set, frozenset)):
            texts.sort()
        if len(texts) > MAX_ITEMS:
            return f"{len(texts)} values, sha {short_sha(texts)}"
        return clip("[" + ", ".join(texts) + "]")
    if isinstance(value, functools.partial):
        named = [f"{key}={as_text(item)}" for key, item in sorted(value.keywords.items())]
        return clip(f"partial {as_text(value.func)}({', '.join([*map(str, map(as_text, value.args)), *named])})")
    if inspect.isroutine(value) or isinstance(value, type):
        return strip_addresses(str(getattr(value, "__qualname__", type(value).__qualname__)))
    if type(value).__module__ == "torch" and type(value).__name__ in {"dtype", "memory_format", "layout"}:
        return str(value).removeprefix("torch.")
    return None


def configurations(module: Any) -> Iterator[tuple[str, Any]]:
    """The objects that hold a module's configuration: NeMo's cfg, Hugging Face's config, args, else Lightning's hparams
    (which in NeMo hold the cfg once more)."""
    held = vars(module)
    found = [(name.lstrip("_"), held[name]) for name in _CONFIG_NAMES if _as_mapping(held.get(name)) is not None]
    yield from found or ([("hparams", held["_hparams"])] if held.get("_hparams") else [])


def flatten(config: Any, prefix: str = "", depth: int = 8) -> Iterator[tuple[str, str]]:
    """The plain values of a nested configuration that count, with dotted names."""
    mapping = _as_mapping(config)
    for key, value in sorted((mapping or {}).items(), key=lambda item: str(item[0])):
        name = str(key)
        if not counts(name, value, from_init=True):
            continue
        text = as_text(value)
        if text == "???":  # OmegaConf's mark of a missing value
            continue
        if text is not None:
            yield prefix + name, text
        elif depth and _as_mapping(value) is not None:
            yield from flatten(value, f"{prefix}{name}.", depth - 1)
        elif depth and isinstance(value, (list, tuple)):
            yield from flatten({str(i).zfill(3): item for i, item in enumerate(value)}, f"{prefix}{name}.", depth - 1)


def words(name: str) -> set[str]:
    """The parts of a name, in lower case: ``numLayers`` and ``num_layers`` give ``num`` and ``layers``."""
    return set(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_"))


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


def _is_numeric(value: Any) -> bool:
    return isinstance(value, (numbers.Number, list)) and not isinstance(value, bool)


def _is_path(text: str) -> bool:
    return bool(re.match(r"^(~|\.{0,2}/|[A-Za-z]:\\|[a-z][a-z0-9+.-]*://)", text)) or text.count("/") > 1
