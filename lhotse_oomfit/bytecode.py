"""What a class's code says about it: its constructor's arguments, what it assigns while it runs, a digest of it."""

from __future__ import annotations

import dis
import inspect
from types import CodeType, FunctionType
from typing import Any

from lhotse_oomfit.digest import short_sha

__all__ = ["code_digest", "init_names", "is_own", "moved_attributes"]

_ENTRIES = {"forward", "__call__", "__getitem__", "__iter__"}  # where code begins that runs during training
_MUTATORS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft", "remove", "setdefault",
    "update",
}  # fmt: skip
_FRAMEWORKS = {"torch", "torchmetrics", "lightning", "pytorch_lightning"}


def init_names(cls: type) -> frozenset[str]:
    """The names of all arguments that the constructors of a class and its bases take."""
    names: set[str] = set()
    for base in cls.__mro__:
        if "__init__" in vars(base) and inspect.isfunction(vars(base)["__init__"]):
            code = vars(base)["__init__"].__code__
            names.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return frozenset(names)


def moved_attributes(cls: type) -> tuple[frozenset[str], frozenset[str]]:
    """The attributes that a class assigns or fills while it runs: on itself, and on other objects.

    Read from the bytecode of ``forward``, steps and hooks, and of the methods of the class that these name. So
    counters, annealed temperatures and grown tables are told from settings whatever they are called.
    """
    entries = [n for n in dir(cls) if n in _ENTRIES or n.endswith("_step") or n.startswith(("on_train", "on_before_"))]
    waiting, seen = entries, set(entries)
    own: set[str] = set()
    others: set[str] = set()
    while waiting:
        function = _function(cls, waiting.pop())
        codes = (
            [] if function is None or (function.__module__ or "").split(".")[0] in _FRAMEWORKS else [function.__code__]
        )
        while codes:
            code = codes.pop()
            codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
            called = [n for n in code.co_names if n not in seen and _function(cls, n) is not None]
            seen.update(called)
            waiting += called
            steps = list(dis.get_instructions(code))
            for index, step in enumerate(steps):
                if step.opname == "STORE_ATTR":
                    (own if _is_of_self(steps, index) else others).add(str(step.argval))
                elif step.argval in _MUTATORS and step.opname in {"LOAD_METHOD", "LOAD_ATTR"}:
                    mutated, holder = steps[index - 1], steps[index - 2].argrepr.split(", ")
                    if mutated.opname == "LOAD_ATTR" and "self" in holder:  # self.seen.append(...)
                        own.add(str(mutated.argval))
    return frozenset(own), frozenset(others)


def _is_of_self(steps: list[dis.Instruction], store: int) -> bool:
    """Whether the attribute that is stored there is one of ``self``.

    A plain assignment loads the object just before it stores. An augmented one (``self.n += 1``) loads it, copies it,
    loads the attribute, and at the end swaps value and object.
    """
    if steps[store - 1].opname not in {"SWAP", "ROT_TWO"}:
        return "self" in steps[store - 1].argrepr.split(", ")
    for index in range(store - 1, 1, -1):
        if steps[index].argval == steps[store].argval and steps[index - 1].opname in {"COPY", "DUP_TOP"}:
            return "self" in steps[index - 2].argrepr.split(", ")
    return False


def is_own(cls: type) -> bool:
    """Whether a class is the user's or a toolkit's, and not one of torch's, whose ``extra_repr`` says everything."""
    return cls.__module__.split(".")[0] not in {"torch", "torchmetrics"}


def code_digest(cls: type) -> str:
    """A digest of what ``forward`` and ``training_step`` do: bytecode, names, constants; no comments, no positions."""
    functions = [_function(cls, name) for name in ("forward", "training_step")]
    return short_sha([_code(function.__code__) for function in functions if function is not None])


def _function(cls: type, name: str) -> FunctionType | None:
    """A method as the plain function below its decorators, looked up without running any descriptor."""
    for base in cls.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            found = inspect.unwrap(getattr(found, "__func__", found))
            return found if inspect.isfunction(found) else None
    return None


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
