"""A strict reader and a writer for small YAML files: plain data with line numbers, nothing that expands or executes.

The tree is built from parser events, so that the first forbidden thing ends the reading: tags, anchors and aliases,
repeated keys, several documents, deep nesting, numbers that aren't finite or don't fit 64 bits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import yaml

from lhotse_oomfit.errors import ProfileError

__all__ = ["MAX_CHARS", "Node", "StrictReader", "flow", "kind_of"]

MAX_CHARS = 1_000_000  # a profile with 150 buckets and 300 settings takes 60 kB
_MAX_INT = 2**63 - 1
_MAX_DEPTH = 8
_WORDS = {
    dict: "a mapping",
    list: "a list",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
}


class Node:
    """A piece of a YAML document and the line where it starts. `value` is a scalar, a list or a dict of nodes."""

    __slots__ = ("line", "value")

    def __init__(self, value: Any, line: int) -> None:
        self.value = value
        self.line = line

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


class StrictReader:
    """Reads one document, and raises errors that name the file and the line.

    :param path: named in errors.
    :param remedy: what to do about a file that can't be read; ends every error.
    """

    def __init__(self, path: str, *, remedy: str) -> None:
        self.path = path
        self.remedy = remedy

    def fail(self, reason: str, line: int | None = None, remedy: str | None = None) -> NoReturn:
        """Raise the error for one fault.

        :raises ProfileError: always.
        """
        where = f"profile {self.path}" if line is None else f"profile {self.path}, line {line}"
        raise ProfileError(" ".join(f"{where}: {reason}; {remedy or self.remedy}".split()))

    def child(self, node: Node, name: str, kind: Any, where: str, hint: str = "") -> Node:
        """The node below a key, of a given type (or tuple of types; a whole number passes for a float)."""
        label = f"{where}.{name}" if where else name
        if name not in node.value:
            self.fail(f"{where or 'the file'} must have {name!r}, has none{hint}", node.line if where else None)
        found: Node = node.value[name]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(found.value) not in kinds and not (float in kinds and type(found.value) is int):
            self.fail(f"{label} must be {_WORDS[kinds[0]]}, is {kind_of(found.value)}", found.line)
        return found

    def only(self, node: Node, known: set[str], where: str) -> None:
        """Refuse keys that aren't known."""
        for name, child in node.value.items():
            if name not in known:
                self.fail(
                    f"{where or 'the file'} has an unknown key {name!r}", child.line, f"remove it, or {self.remedy}"
                )

    def tree(self, text: str) -> Node:
        """Build the tree from YAML events, so that nothing is expanded and the first forbidden thing ends it."""
        if len(text) > MAX_CHARS:
            self.fail(f"must be at most {MAX_CHARS} characters, has {len(text)}")
        if not text.strip():
            self.fail("must be a YAML mapping, the file is empty")
        try:
            root = self.grow(self.events(text))
        except ProfileError:
            raise
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self.fail(f"isn't YAML: {error.problem or error.context}", mark.line + 1 if mark else None)
        except yaml.YAMLError as error:  # characters that YAML doesn't allow: a binary file, say
            self.fail(f"isn't YAML: {' '.join(str(error).split())}")
        except (ValueError, RecursionError) as error:  # libyaml on lone surrogates
            self.fail(f"isn't YAML: {error}")
        if not isinstance(root.value, dict):
            self.fail(f"must be a YAML mapping, is {kind_of(root.value)}", root.line)
        if not text.endswith("\n"):
            self.fail("the last line has no end (the file was cut off)", text.count("\n") + 1)
        return root

    def events(self, text: str) -> Iterator[Any]:
        # libyaml's parser, where PyYAML has it, is an order of magnitude faster than the one in Python.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        documents = 0
        for event in yaml.parse(text, Loader=loader):
            line = _line(event)
            documents += isinstance(event, yaml.DocumentStartEvent)
            if documents > 1:
                self.fail("must hold one document, here starts another", line)
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                self.fail("YAML anchors and aliases are refused", line)
            tag = getattr(event, "tag", None) if isinstance(event, yaml.NodeEvent) else None
            if tag is not None:
                self.fail(f"YAML tags are refused, here is {tag!r}", line)
            yield event

    def grow(self, events: Iterator[Any]) -> Node:
        """Put nodes together with a stack of open collections; the key that waits for its value lies beside each."""
        root = Node(None, 1)
        stack: list[tuple[Node, list[str]]] = []
        for event in events:
            if isinstance(event, yaml.CollectionEndEvent):
                stack.pop()
                continue
            if not isinstance(event, yaml.NodeEvent):
                continue
            line = _line(event)
            if isinstance(event, yaml.ScalarEvent):
                node = Node(event.value, line)
            else:
                node = Node({} if isinstance(event, yaml.MappingStartEvent) else [], line)
            plain = isinstance(event, yaml.ScalarEvent) and event.implicit[0] and event.style in (None, "")
            if stack and isinstance(stack[-1][0].value, dict) and not stack[-1][1]:
                if not isinstance(event, yaml.ScalarEvent):
                    self.fail("a key must be a string, is a collection", line)
                if node.value in stack[-1][0].value:
                    self.fail(f"key {node.value!r} appears twice", line)
                stack[-1][1].append(node.value)
                continue
            if plain:
                node.value = self.scalar(node.value, line)
            if not stack:
                root = node
            elif isinstance(stack[-1][0].value, dict):
                stack[-1][0].value[stack[-1][1].pop()] = node
            else:
                stack[-1][0].value.append(node)
            if not isinstance(event, yaml.ScalarEvent):
                if len(stack) >= _MAX_DEPTH:
                    self.fail(f"must be nested at most {_MAX_DEPTH} deep, is deeper", line)
                stack.append((node, []))
        return root

    def scalar(self, text: str, line: int) -> Any:
        """A scalar without quotes: a JSON-like number, true, false or null; other text stays text."""
        if text in ("null", "~", ""):
            return None
        if text in ("true", "false"):
            return text == "true"
        if re.fullmatch(r"[-+]?[0-9]{1,40}", text):
            value: float = int(text)
            if abs(value) > _MAX_INT:
                self.fail(f"a whole number must be below 2^63, is {text}", line)
            return value
        if re.fullmatch(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text):
            value = float(text)
            if not math.isfinite(value):
                self.fail(f"a number must be finite, is {text[:40]}", line)
            return value
        if re.fullmatch(r"[-+]?\.?(inf|infinity|nan)", text.lower()):
            self.fail(f"a number must be finite, is {text}", line)
        return text


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


def kind_of(value: Any) -> str:
    """A value, named shortly for an error."""
    if isinstance(value, (dict, list)):
        return _WORDS[type(value)]
    return "null" if value is None else repr(value)[:60]


def flow(value: Any) -> str:
    """A value on one line of YAML. Strings are double-quoted: the escapes of JSON are a part of YAML's."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(value)
