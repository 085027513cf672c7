"""The options of a calibration as a structured config, for Hydra and OmegaConf, for YAML files and the command line.

:class:`CalibrationConfig` has the fields of :class:`~lhotse_oomfit.options.CalibrationOptions`, with types that
OmegaConf knows: ``OmegaConf.structured(CalibrationConfig)`` and Hydra's ``ConfigStore`` take it as it is. It is made
from the options, so that the two can't differ. OmegaConf is not imported here.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Optional, Union

from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.options import CalibrationOptions, check_option_names

__all__ = ["CalibrationConfig", "field_kinds", "option_help", "options_from", "parse_option"]

_WORDS = {float: "a number", int: "a whole number", bool: "true or false", str: "text", type(None): "null"}


def field_kinds() -> dict[str, tuple[type, ...]]:
    """The plain types that each option takes: float, int, bool, str, NoneType.

    Paths are texts here, and a choice between words is a text.
    """
    hints = typing.get_type_hints(CalibrationOptions)
    return {field.name: tuple(dict.fromkeys(_kinds(hints[field.name]))) for field in dataclasses.fields(_OPTIONS)}


_OPTIONS: Any = CalibrationOptions


def _kinds(hint: Any) -> list[type]:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return [kind for part in typing.get_args(hint) for kind in _kinds(part)]
    if origin is Literal:
        return [type(value) for value in typing.get_args(hint)]
    return [str] if (origin or hint) is os.PathLike else [hint]


def option_help() -> dict[str, str]:
    """What each option means, from the documentation of :class:`CalibrationOptions`."""
    text = inspect.getdoc(CalibrationOptions) or ""
    found = re.findall(r"^:param (\w+): (.*?)(?=^:|\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: " ".join(words.replace("``", "").split()) for name, words in found}


def options_from(*configs: Any, **overrides: Any) -> CalibrationOptions:
    """Options from configs, the later ones over the earlier ones, and `overrides` over all of them.

    :param configs: mappings (OmegaConf's too), :class:`CalibrationConfig`, :class:`CalibrationOptions`, or None.
    :raises InvalidArgumentError: for an unknown key, a value of another type or out of its range.
    """
    kinds = field_kinds()
    values: dict[str, Any] = {}
    for config in (*configs, overrides):
        entries = _entries(config)
        check_option_names(entries, kinds)
        for name, value in entries.items():
            values[name] = _checked(name, value, kinds[name])
    return CalibrationOptions(**values)


def _entries(config: Any) -> Mapping[Any, Any]:
    if config is None:
        return {}
    if type(config).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        config = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if not isinstance(config, Mapping):
        raise InvalidArgumentError(f"the options of a calibration must be a mapping, they are {config!r}")
    return config


def _checked(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    if isinstance(value, os.PathLike) and str in kinds:
        return value
    if type(value) is int and float in kinds:
        return float(value)
    if type(value) not in kinds:
        words = " or ".join(dict.fromkeys(_WORDS[kind] for kind in kinds))
        raise InvalidArgumentError(f"{name} must be {words}, it is {value!r}")
    return value


def parse_option(name: str, text: str) -> Any:
    """The value of an option as the command line gives it: ``null``, ``true`` and numbers mean what YAML has them mean.

    :raises InvalidArgumentError: for a text that isn't of the option's type.
    """
    kinds = field_kinds()[name]
    words: dict[str, Any] = {"null": None, "none": None, "true": True, "false": False}
    word = text.strip().lower()
    if word in words and type(words[word]) in kinds:
        return words[word]
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    return _checked(name, text, kinds)


def _structured(kinds: tuple[type, ...]) -> Any:
    """The type by OmegaConf's rules: one primitive, or a union of primitives, optional or not."""
    plain = [kind for kind in kinds if kind is not type(None)]
    hint: Any = plain[0] if len(plain) == 1 else Union[tuple(plain)]  # noqa: UP007  made at run time
    return Optional[hint] if type(None) in kinds else hint  # noqa: UP045


if TYPE_CHECKING:
    CalibrationConfig = CalibrationOptions
else:
    CalibrationConfig = dataclasses.make_dataclass(
        "CalibrationConfig",
        [
            (field.name, _structured(field_kinds()[field.name]), dataclasses.field(default=field.default))
            for field in dataclasses.fields(CalibrationOptions)
        ],
        kw_only=True,
    )
    CalibrationConfig.__module__ = __name__
    CalibrationConfig.__doc__ = CalibrationOptions.__doc__
