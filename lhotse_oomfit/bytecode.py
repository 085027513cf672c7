"""What a class's code says about it: its constructor's arguments, what it assigns while it runs, a digest of it."""

from __future__ import annotations

import dis
import functools
import inspect
from types import CodeType, FunctionType
from typing import Any

from lhotse_oomfit.digest import short_sha

__all__ = ["callable_digest", "code_digest", "init_names", "is_own", "moved_attributes"]

_ENTRIES = {"forward", "__call__", "__getitem__", "__iter__"}  # where code begins that runs during training
_MUTATORS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft", "remove", "setdefault",
    "update",
}  # fmt: skip
_MAX_CALLS = 4  # how deep calls of the user's functions are followed
_LIBRARIES = {"lhotse", "nemo", "numpy", "transformers", "torchaudio", "lhotse_oomfit", "functools", "contextlib"}
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
    """A digest of what ``forward`` and ``training_step`` do: bytecode, names, constants; no comments, no positions.

    The module-level functions of the user's that they call count too, see :func:`callable_digest`.
    """
    functions = [_function(cls, name) for name in ("forward", "training_step")]
    return short_sha([_callable(function, _MAX_CALLS, set()) for function in functions if function is not None])


def callable_digest(value: Any) -> str:
    """A digest of what a function does, a method, a lambda, a partial, or an object with ``__call__``.

    Its own bytecode, plain values that it closes over, module-level constants in capitals, and likewise the functions
    of the user's that it calls, a few calls deep. Functions of frameworks count by their names.
    """
    return short_sha(_callable(value, _MAX_CALLS, set()))


def _callable(value: Any, depth: int, seen: set[int]) -> list[Any]:
    if isinstance(value, functools.partial):
        given = [(str(index), item) for index, item in enumerate(value.args)] + sorted(value.keywords.items())
        plain = [(name, repr(item)) for name, item in given if _is_plain(item)]
        return ["partial", _callable(value.func, depth, seen), plain]
    function = inspect.unwrap(getattr(value, "__func__", value)) if inspect.isroutine(value) else value
    if not isinstance(function, FunctionType):
        if isinstance(value, type) or inspect.isroutine(value):
            return [getattr(value, "__qualname__", type(value).__qualname__)]
        call = _function(type(value), "__call__")
        plain = sorted((name, repr(item)) for name, item in getattr(value, "__dict__", {}).items() if _is_plain(item))
        return [type(value).__qualname__, plain, _callable(call, depth, seen) if call is not None else None]
    name = f"{function.__module__}.{function.__qualname__}"
    if depth == 0 or id(function.__code__) in seen or _is_framework(function):
        return [function.__qualname__ if function.__qualname__.endswith("<lambda>") else name.rpartition(".")[2]]
    seen.add(id(function.__code__))
    codes = [function.__code__]
    names: set[str] = set()
    stored: set[str] = set()
    for code in codes:
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
        names.update(code.co_names)
        stored.update(str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_DEREF")
    used: list[tuple[str, Any]] = []
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if free not in stored:
            used.append((free, content))
    used += [(n, function.__globals__[n]) for n in sorted(names) if n in function.__globals__]
    parts: list[Any] = [_code(function.__code__), repr([d for d in function.__defaults__ or () if _is_plain(d)])]
    for name, content in used:
        if _is_plain(content) and (name in function.__code__.co_freevars or name.isupper()):
            parts.append((name, repr(content)))
        elif isinstance(content, (FunctionType, functools.partial)):
            parts.append((name, _callable(content, depth - 1, seen)))
    return parts


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str)) or type(value).__name__ == "dtype"


def _is_framework(function: FunctionType) -> bool:
    return (function.__module__ or "").split(".")[0] in _FRAMEWORKS | _LIBRARIES


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
