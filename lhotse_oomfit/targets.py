"""Objects by name: ``my_module:make_training``, importable from the working directory, and ``_target_`` in YAML."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lhotse_oomfit.errors import InvalidArgumentError

__all__ = ["import_target", "instantiate", "read_job"]


def import_target(name: str) -> Any:
    """The object that ``module:name`` or ``module.name`` means; modules are looked for in the working directory too.

    :raises InvalidArgumentError: if there is no such module or no such name in it. Errors inside the module are its
        own and pass through.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon:
        module_name, _, attribute = name.rpartition(".")
    if not module_name or not attribute:
        raise InvalidArgumentError(f"{name!r} must name an object as module:name")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise InvalidArgumentError(
                f"{name}: there's no module {error.name!r}, neither installed nor in {here}; check the name, or run "
                f"this in the directory that holds it"
            ) from None
        raise
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InvalidArgumentError(f"{name}: {module_name} has no {attribute!r}; check the name")
        found = getattr(found, part)
    return found


def instantiate(node: Any) -> Any:
    """Make what a config describes: a mapping with ``_target_`` is called with its other entries, innermost first.

    Hydra's own ``instantiate`` is used where it is installed.
    """
    try:
        from hydra.utils import instantiate as by_hydra
    except ImportError:
        return _instantiate(node)
    return by_hydra(node, _convert_="all")


def _instantiate(node: Any) -> Any:
    if isinstance(node, list):
        return [_instantiate(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    values = {key: _instantiate(value) for key, value in node.items()}
    if "_target_" not in values:
        return values
    for key in values:
        if key.startswith("_") and key not in ("_target_", "_args_"):
            raise InvalidArgumentError(f"{key} in a config needs Hydra; pip install hydra-core")
    target, args = values.pop("_target_"), values.pop("_args_", [])
    return import_target(target)(*args, **values)


def read_job(path: Path) -> tuple[Any, Mapping[str, Any]]:
    """The ``training`` and the ``calibration`` section of a YAML file; its other sections are for others.

    With OmegaConf installed, ``${...}`` is resolved.

    :raises InvalidArgumentError: for a file that holds no such sections.
    :raises OSError: for a file that can't be read.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        root = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} isn't YAML: {' '.join(str(error).split())}") from None
    if not isinstance(root, Mapping):
        raise InvalidArgumentError(f"{path} must be a mapping with a training section, it is {str(root)[:40]!r}")
    if "${" in text:
        try:
            from omegaconf import OmegaConf
        except ImportError:
            raise InvalidArgumentError(f"{path} holds ${{...}}, which needs OmegaConf; pip install omegaconf") from None
        root = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    calibration = root.get("calibration") or {}
    if not isinstance(calibration, Mapping):
        raise InvalidArgumentError(f"{path}: calibration must be a mapping of options, it is {calibration!r}")
    return root.get("training"), calibration
