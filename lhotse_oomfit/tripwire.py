"""Turns a collective that would wait for absent ranks into an error.

One rank tries steps while the others wait outside. A collective over a process group of several ranks, which the model
made or was given, would never return. So every operation of such groups raises meanwhile. The methods of torch's
``ProcessGroup`` are replaced, which every function of ``torch.distributed`` calls, whenever its name was bound, and the
lookup of groups by functional collectives, which don't; and groups of several ranks are taken out of the register where
operators and compiled code find them by name.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from lhotse_oomfit.errors import UnsupportedStrategyError

__all__ = ["refuse_collectives"]

_COLLECTIVE = re.compile(r"_?(?:all|broadcast|reduce|gather|scatter|barrier|monitored_barrier|send|recv)")
_RESOLVERS = ("_resolve_group", "_resolve_group_name")
"""How functional collectives find their group: the second alone before torch 2.13."""
_UNKNOWN_GROUP = "resolve the process group"
"""What torch says of a group that isn't in the register."""
_REMEDY = "Pass ranks='lockstep', so that all ranks run every trial together"
_lock = threading.Lock()


@contextmanager
def refuse_collectives() -> Iterator[None]:
    """While inside, collectives over groups of several ranks raise.

    :raises UnsupportedStrategyError: from the collective itself, naming it and its group.
    """
    group_class: Any = dist.ProcessGroup
    methods = {name: method for name, method in vars(group_class).items() if _COLLECTIVE.match(name)}
    functional: Any = import_module("torch.distributed._functional_collectives")
    resolvers = {name: getattr(functional, name) for name in _RESOLVERS if hasattr(functional, name)}
    with _lock, _unregistered():
        for name in methods:
            setattr(group_class, name, _guarded(name, getattr(group_class, name)))
        for name, resolve in resolvers.items():
            setattr(functional, name, _guarded_lookup(resolve))
        try:
            yield
        except RuntimeError as error:
            if _UNKNOWN_GROUP not in str(error):
                raise
            raise UnsupportedStrategyError(
                f"the training step calls an operator over a process group of several ranks, in a trial that this rank "
                f"runs alone, where there is none ({str(error).partition(chr(10))[0]}). {_REMEDY}"
            ) from error
        finally:
            for name, resolve in resolvers.items():
                setattr(functional, name, resolve)
            for name, method in methods.items():
                setattr(group_class, name, method)


@contextmanager
def _unregistered() -> Iterator[None]:
    """While inside, groups of several ranks aren't found by their names."""
    register: Any = getattr(torch._C._distributed_c10d, "_register_process_group", None)
    unregister: Any = getattr(torch._C._distributed_c10d, "_unregister_process_group", None)
    names: dict[Any, str] = vars(dist.distributed_c10d)["_world"].pg_names
    taken = []
    if register is not None and unregister is not None:
        for group, name in list(names.items()):
            if group.size() > 1:
                unregister(name)
                taken.append((name, group))
    try:
        yield
    finally:
        for name, group in taken:
            register(name, group)


def _guarded_lookup(resolve: Callable[..., Any]) -> Callable[..., Any]:
    by_name = vars(dist.distributed_c10d)["_resolve_process_group"]

    def lookup(*args: Any, **kwargs: Any) -> Any:
        found = resolve(*args, **kwargs)
        group = by_name(found) if isinstance(found, str) else found
        if group.size() > 1:
            _refuse("a functional collective", group)
        return found

    return lookup


def _guarded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.size() > 1:
            _refuse(name, group)
        return method(group, *args, **kwargs)

    return collective


def _refuse(name: str, group: Any) -> None:
    raise UnsupportedStrategyError(
        f"the training step calls {name} over a process group of {group.size()} ranks ({_described(group)}), in a "
        f"trial that this rank runs alone: it would wait for the others without end. {_REMEDY}"
    )


def _described(group: Any) -> str:
    return str(getattr(group, "group_desc", "") or getattr(group, "group_name", "") or "without a name")
