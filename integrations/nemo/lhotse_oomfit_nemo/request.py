"""What a NeMo data section asks for: ``bucket_batch_size: auto``, and the flat options ``oomfit_*`` beside it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lhotse_oomfit.config import field_kinds, options_from
from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.fit import CalibrationOptions

__all__ = [
    "OPTION_KEYS",
    "PREFIX",
    "Request",
    "asks_for_auto",
    "check_keys",
    "check_word",
    "refuse_auto",
    "request_from",
    "section_of",
]

PREFIX = "oomfit_"

OPTION_KEYS = (*(PREFIX + name for name in field_kinds() if name != "world_size"), PREFIX + "batches")
"""The options of a calibration as flat keys of ``train_ds``, and where its batches come from."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """How to calibrate.

    :param batches: ``"dataset"``: worst-case batches come from the training's own data and dataset class;
        ``"schema"``: from the model's ``oomptimizer_schema``.
    """

    options: CalibrationOptions
    batches: Literal["dataset", "schema"] = "dataset"


def asks_for_auto(config: Any) -> bool:
    """Whether a data section, or one of its sub-sections under ``multi_config``, says ``bucket_batch_size: auto``."""
    if not _is_mapping(config):
        return False
    if isinstance(config.get("bucket_batch_size"), str):
        return bool(config["bucket_batch_size"] == "auto")
    return bool(config.get("multi_config", False)) and any(asks_for_auto(part) for part in sub_configs(config).values())


def section_of(config: Any, name: str) -> Any:
    """A section of a config, None where there is none: a module's ``cfg`` may be anything."""
    return config.get(name) if _is_mapping(config) and not _is_missing(config, name) else None


def sub_configs(config: Any) -> dict[str, Any]:
    """The sub-sections of a ``multi_config`` section, as NeMo finds them."""
    names = [name for name in config if name != "sampler_weights"]
    return {name: config[name] for name in names if not _is_missing(config, name) and _is_mapping(config[name])}


def _is_missing(config: Any, name: str) -> bool:
    from omegaconf import DictConfig, OmegaConf

    return isinstance(config, DictConfig) and (
        name not in config or OmegaConf.is_missing(config, name) or config[name] is None
    )


def _is_mapping(config: Any) -> bool:
    return isinstance(config, Mapping) or (hasattr(config, "get") and hasattr(config, "keys"))


def request_from(get: Callable[[str], Any]) -> Request:
    """The request that a section's flat keys make; `get` returns a key's value, or None where it isn't set.

    :raises InvalidArgumentError: for a value of another type or out of its range.
    """
    values = {key: get(key) for key in OPTION_KEYS}
    batches = values.pop(PREFIX + "batches")
    if batches not in (None, "dataset", "schema"):
        raise InvalidArgumentError(f"{PREFIX}batches must be 'dataset' or 'schema', it is {batches!r}")
    given = {key.removeprefix(PREFIX): value for key, value in values.items() if value is not None}
    try:
        options = options_from(given)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{PREFIX}{error}") from error
    return Request(options=options, batches=batches or "dataset")


def check_keys(keys: Iterable[Any], known: Iterable[str]) -> None:
    """Refuse what looks like an option of ours and is none.

    :param known: NeMo's own keys.
    :raises InvalidArgumentError: naming the key, and the nearest that there is.
    """
    known = set(known)
    for key in map(str, keys):
        if key in OPTION_KEYS or key in known:
            continue
        if key.startswith(PREFIX):
            names = [known_key.removeprefix(PREFIX) for known_key in OPTION_KEYS]
            near = [PREFIX + name for name in difflib.get_close_matches(key.removeprefix(PREFIX), names, n=1)]
        else:
            near = difflib.get_close_matches(key, OPTION_KEYS, n=1, cutoff=0.9)
        if near or key.startswith(PREFIX):
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(OPTION_KEYS)}"
            raise InvalidArgumentError(f"train_ds.{key} is no option of a calibration; {hint}")


def check_word(config: Any) -> None:
    """Refuse another word than ``auto``, of which NeMo would say that an AnyNode is no ListConfig.

    :raises InvalidArgumentError: with the word.
    """
    value = config.get("bucket_batch_size") if _is_mapping(config) else None
    if isinstance(value, str):
        raise InvalidArgumentError(f"bucket_batch_size must be 'auto', a list of sizes or null, it is {value!r}")


def refuse_auto(config: Any, section: str) -> None:
    """Refuse ``auto`` where no training batches are made.

    :raises InvalidArgumentError: saying what to set.
    """
    if asks_for_auto(config):
        raise InvalidArgumentError(
            f"{section}.bucket_batch_size must be a list of sizes or null, it is 'auto': sizes are measured for "
            f"training steps only; set {section}.batch_size, or {section}.batch_duration, and {section}.use_bucketing="
            f"false"
        )
    for name, part in _as_written(config).items():  # speechlm2 has several sets in a section
        if isinstance(part, Mapping):
            refuse_auto(part, f"{section}.{name}")


def _as_written(config: Any) -> Mapping[Any, Any]:
    """A section without its interpolations resolved, which may lead to nowhere."""
    from omegaconf import DictConfig, OmegaConf

    if isinstance(config, DictConfig):
        plain: Any = OmegaConf.to_container(config, resolve=False)
        return plain if isinstance(plain, Mapping) else {}
    return config if isinstance(config, Mapping) else {}
