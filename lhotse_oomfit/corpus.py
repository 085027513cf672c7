"""Lengths and tokens of a corpus, straight from its manifests: NeMo's, Lhotse's cuts, and NeMo's ``input_cfg`` lists.

Only text is read, no audio, and neither Lhotse nor torch is imported: a line of a manifest has all that bins need.
"""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lhotse_oomfit.errors import InvalidArgumentError

__all__ = ["Example", "Segment", "Source", "find_sources", "load_tokenizer", "read_source"]

_MAX_GROUPS = 16  # nested input_cfg lists
_PATHS = ("manifest_filepath", "cuts_path", "shar_path")


@dataclass(frozen=True, slots=True)
class Segment:
    """A supervision: its text and, where the manifest has them, its tokens."""

    text: str | None
    tokens: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """What a manifest says of one example, in the shape that :func:`lhotse_oomfit.bins.output_length` reads."""

    id: str
    duration: float
    supervisions: tuple[Segment, ...] = ()
    input_ids: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Source:
    """One manifest (or the shards of one), and how often it is drawn from relative to the others."""

    paths: tuple[str, ...]
    weight: float | None = None


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """The manifests that command-line arguments name.

    :param inputs: paths of NeMo manifests or Lhotse cut manifests (``.json``, ``.jsonl``, with or without ``.gz``),
        Shar directories, ``input_cfg`` YAML files, and lists like ``[[a.json,2.0],[b.json,1.0]]`` as NeMo's scripts
        take them. ``_OP_0..7_CL_`` and ``{0..7}`` in a path stand for the shards of one manifest.
    :raises InvalidArgumentError: for an input that names nothing, or weights that some sources have and others lack.
    """
    sources: list[Source] = []
    for text in inputs:
        if text.lstrip().startswith("["):
            sources += _listed(_yaml(text, text), None, text)
        elif text.lower().endswith((".yaml", ".yml")):
            sources += _config(Path(text))
        else:
            sources.append(Source(paths=_shards(text)))
    if not sources:
        raise InvalidArgumentError(f"{', '.join(inputs)}: there is no manifest in it; name at least one")
    with_weight = [source for source in sources if source.weight is not None]
    if with_weight and len(with_weight) < len(sources):
        without = next(source for source in sources if source.weight is None)
        raise InvalidArgumentError(
            f"every source must have a weight, or none: {without.paths[0]} has none, {with_weight[0].paths[0]} has one"
        )
    return sources


def _yaml(text: str, name: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidArgumentError(f"{name} isn't YAML: {' '.join(str(error).split())}") from None


def _config(path: Path, depth: int = _MAX_GROUPS) -> list[Source]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidArgumentError(f"{path} must be UTF-8 text, it isn't; name an input_cfg") from None
    root = _yaml(text, str(path))
    for key in ("model", "train_ds"):
        if isinstance(root, Mapping) and key in root:
            root = root[key]
    return _entries([root] if isinstance(root, Mapping) else root, 1.0, str(path), depth)


def _entries(entries: Any, scale: float, where: str, depth: int) -> list[Source]:
    """The leaves of an ``input_cfg`` list. In a group, its own weight is shared out by the weights inside."""
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise InvalidArgumentError(
            f"{where} must hold a list of sources (an input_cfg: each a mapping with type and a path), or a mapping "
            f"with input_cfg or manifest_filepath; it holds {str(entries)[:60]!r}"
        )
    if depth == 0:
        raise InvalidArgumentError(f"{where}: groups must be nested at most {_MAX_GROUPS} deep, they are deeper")
    weights = [_weight(entry.get("weight"), where) for entry in entries]
    if any(weight is None for weight in weights) and any(weight is not None for weight in weights):
        missing = next(entry for entry, weight in zip(entries, weights, strict=True) if weight is None)
        raise InvalidArgumentError(
            f"{where}: every source of a list must have a weight, or none; {dict(missing)!r:.120} has none"
        )
    total = sum(weight or 0.0 for weight in weights)
    if total == 0.0 and weights and weights[0] is not None:
        raise InvalidArgumentError(f"{where}: the weights of a list must not all be 0; leave them out, or raise one")
    found: list[Source] = []
    for entry, weight in zip(entries, weights, strict=True):
        share = None if weight is None else scale * weight / total
        inner = entry.get("input_cfg")
        if inner is not None:
            if isinstance(inner, str):
                leaves = _config(Path(_plain(inner, where)), depth - 1)
            else:
                leaves = _entries(inner, 1.0, where, depth - 1)
        else:
            leaves = _leaf(entry, where)
        found += _scaled(leaves, share)
    return found


def _leaf(entry: Mapping[str, Any], where: str) -> list[Source]:
    for key in _PATHS:
        value = entry.get(key)
        if value is None:
            continue
        if isinstance(value, Mapping):  # Shar by field
            value = value.get("cuts")
        if isinstance(value, str):
            return [Source(paths=_shards(_plain(value, where)))]
        if isinstance(value, list) and value:
            return _listed(value, None, where)
    raise InvalidArgumentError(
        f"{where}: a source must have {', '.join(_PATHS)} or input_cfg, {dict(entry)!r:.120} has none; bins are made "
        f"from audio manifests and cuts"
    )


def _listed(value: Any, weight: float | None, where: str) -> list[Source]:
    """NeMo's lists: ``[[a.json], [b.json]]``, ``[[a.json, 2.0], [b.json, 1.0]]``, or plain paths."""
    sources = []
    for item in value if isinstance(value, list) else []:
        parts = item if isinstance(item, list) else [item]
        if not (1 <= len(parts) <= 2 and isinstance(parts[0], str)):
            raise InvalidArgumentError(f"{where}: a source must be a path, or a path and a weight, it is {item!r}")
        own = _weight(parts[1], where) if len(parts) == 2 else weight
        sources.append(Source(paths=_shards(_plain(parts[0], where)), weight=own))
    return sources


def _scaled(leaves: list[Source], share: float | None) -> list[Source]:
    if share is None:
        return leaves
    total = sum(leaf.weight or 0.0 for leaf in leaves)
    if total > 0.0:
        return [Source(paths=leaf.paths, weight=share * (leaf.weight or 0.0) / total) for leaf in leaves]
    # Without weights inside, the sources of a group are one.
    return [Source(paths=tuple(path for leaf in leaves for path in leaf.paths), weight=share)]


def _weight(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise InvalidArgumentError(f"{where}: a weight must be a number of at least 0, it is {value!r}")
    return float(value)


def _plain(text: str, where: str) -> str:
    if "${" in text:
        raise InvalidArgumentError(f"{where}: {text!r} refers to another value; write the path itself")
    return text


def _shards(text: str) -> tuple[str, ...]:
    """The files that a path stands for."""
    path = Path(text).expanduser()
    if path.is_dir():
        found = sorted(str(p) for p in path.glob("cuts.*.jsonl*"))
        if not found:
            raise InvalidArgumentError(f"{text} is a directory without cuts.*.jsonl files; name a manifest or a Shar")
        return tuple(found)
    pattern = re.compile(r"_OP_(\d+)\.\.(\d+)_CL_|\{(\d+)\.\.(\d+)\}")
    parts: list[list[str]] = []
    last = 0
    for match in pattern.finditer(str(path)):
        first, stop = (g for g in match.groups() if g is not None)
        digits = len(first) if first.startswith("0") else 0
        parts += [[str(path)[last : match.start()]], [f"{n:0{digits}}" for n in range(int(first), int(stop) + 1)]]
        last = match.end()
    parts.append([str(path)[last:]])
    return tuple("".join(choice) for choice in itertools.product(*parts))


def read_source(source: Source, *, text_field: str = "text") -> Iterator[Example]:
    """The examples of a source, in order.

    :param text_field: the key of the text in NeMo manifests.
    :raises InvalidArgumentError: with path and line, for what is no example of a known kind.
    :raises OSError: for a file that can't be read.
    """
    for path in source.paths:
        for number, record in _records(path):
            try:
                example = _example(record, text_field)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                what = f"has no {error}" if isinstance(error, KeyError) else str(error)
                raise InvalidArgumentError(
                    f"{path}, line {number}: must be an entry of a NeMo manifest or a Lhotse cut: {what}"
                ) from None
            if example is not None:
                yield example


def _records(path: str) -> Iterator[tuple[int, Any]]:
    opened: Any = gzip.open if path.endswith(".gz") else open
    number = 0
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            start = file.read(1)
            if start == "[":  # one list instead of a line for each
                yield from ((index + 1, item) for index, item in enumerate(json.loads(start + file.read())))
                return
            for number, line in enumerate(file, 1):
                text = start + line if number == 1 else line
                if text.strip():
                    yield number, json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"{path}, line {max(1, number)}: isn't JSON: {error}") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidArgumentError(f"{path}: isn't a whole gzip file: {error}") from None


def _example(record: Any, text_field: str) -> Example | None:
    if not isinstance(record, dict):
        raise TypeError(f"it is {str(record)[:40]!r}")
    kind = record.get("type")
    if isinstance(kind, str) and kind.endswith("Cut"):
        duration, segments = _cut(record)
        return Example(record["id"], _length(duration), segments, (record.get("custom") or {}).get("input_ids"))
    if "duration" not in record and ("recording_id" in record or "sources" in record or "num_samples" in record):
        raise ValueError("it is a recording or a supervision; make cuts of them first")
    if record.get("_skipme"):
        return None
    text = record.get(text_field)
    tokens = record.get("tokens")
    name = str(record.get("audio_filepath", record.get("id", "")))
    return Example(name, _length(record["duration"]), (Segment(text, tokens),) if text is not None else ())


def _cut(cut: dict[str, Any]) -> tuple[float, tuple[Segment, ...]]:
    if cut["type"] != "MixedCut":
        segments = tuple(
            Segment(part.get("text"), (part.get("custom") or {}).get("tokens"))
            for part in cut.get("supervisions") or ()
        )
        return cut["duration"], segments
    ends: list[float] = []
    found: list[Segment] = []
    for track in cut["tracks"]:
        inner = {"type": track.get("type", "MonoCut"), **track["cut"]}
        duration, segments = _cut(inner)
        ends.append(float(track.get("offset", 0.0)) + duration)
        found += segments
    return max(ends), tuple(found)


def _length(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"its duration must be a number of seconds, it is {value!r}")
    return float(value)


def load_tokenizer(name: str) -> Callable[[str], Sequence[Any]]:
    """What counts the tokens of a text.

    :param name: ``chars``, ``bytes`` or ``words``; the path of a SentencePiece ``.model`` or of a Hugging Face
        ``tokenizer.json`` (each needs its package); or ``module:function``, a callable from text to tokens.
    :raises InvalidArgumentError: for anything else, or a missing package.
    """
    simple: dict[str, Callable[[str], Sequence[Any]]] = {"chars": list, "bytes": str.encode, "words": str.split}
    if name in simple:
        return simple[name]
    package = {".model": "sentencepiece", ".json": "tokenizers"}.get(Path(name).suffix)
    if package is not None:
        try:
            module: Any = importlib.import_module(package)
        except ImportError:
            raise InvalidArgumentError(f"--tokenizer {name} needs {package}; pip install {package}") from None
        if not Path(name).is_file():
            raise InvalidArgumentError(f"--tokenizer {name}: there's no such file")
        if package == "sentencepiece":
            processor = module.SentencePieceProcessor(model_file=name)
            return lambda text: processor.encode(text)
        hugging_face = module.Tokenizer.from_file(name)
        return lambda text: hugging_face.encode(text, add_special_tokens=False).ids
    if ":" in name:
        from lhotse_oomfit.targets import import_target

        return import_target(name)  # type: ignore[no-any-return]
    raise InvalidArgumentError(
        f"--tokenizer must be chars, bytes, words, a .model or tokenizer.json file, or module:function, it is {name!r}"
    )
