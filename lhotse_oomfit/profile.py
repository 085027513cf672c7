"""The result of a calibration: one batch size per bucket, and how it was found. Encoded as YAML, parsed strictly.

The top of the file is a fragment of a NeMo ``train_ds`` section; everything else lies below ``oomfit:`` and ends with
a checksum, so that a file cut off anywhere is recognised. Format version 1::

    bucket_duration_bins: [2.0, 4.0]
    bucket_batch_size: [96, 41]
    oomfit:
      format_version: 1
      ...
      checksum: "0123456789abcdef"

No value in the file is ever executed or expanded: the parser builds its tree from YAML events itself and takes
neither tags, aliases, repeated keys nor numbers that aren't finite.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Any

from lhotse_oomfit.amounts import format_bytes, parse_bytes
from lhotse_oomfit.bins import Bins
from lhotse_oomfit.errors import InvalidArgumentError, InvalidBinsError, ProfileError
from lhotse_oomfit.fingerprint import Fingerprint, one_line
from lhotse_oomfit.strict_yaml import Node, StrictReader, flow, kind_of

__all__ = [
    "FORMAT_VERSION",
    "HEADER",
    "BucketProfile",
    "Profile",
    "format_bytes",
    "parse",
    "parse_bytes",
    "utc_now",
]

FORMAT_VERSION = 1
HEADER = "# Batch sizes measured by lhotse-oomfit. The top is a train_ds fragment; oomfit: says how it was found."
MAX_SIZE = 2**31 - 1  # a batch dimension beyond this is no batch
_MAX_INT = 2**63 - 1
_AGAIN = "measure again with recalibrate='always' or delete the file"


@dataclass(frozen=True, kw_only=True)
class BucketProfile:
    """What was found for one bucket.

    :param size: examples in a batch.
    :param input_len: upper length edge (seconds, or the sampler's unit).
    :param output_len: the number of output tokens that the trial used; None where tokens don't count.
    :param verified: whether a step ran at this size or a slightly larger one; False if the size is only predicted.
    :param peak_bytes: allocated peak of the step at this size, resident memory included; None if not measured.
    :param step_s: seconds of that step; None if not measured.
    :param num_trials: training steps that this bucket took to measure.
    :param num_ooms: how many of them ran out of memory.
    :raises ProfileError: a value out of its range.
    """

    size: int
    input_len: float
    output_len: int | None = None
    verified: bool
    peak_bytes: int | None = None
    step_s: float | None = None
    num_trials: int = 0
    num_ooms: int = 0

    def __post_init__(self) -> None:
        _set_int(self, "size", low=1, high=MAX_SIZE)
        _set_float(self, "input_len", above=0.0)
        for name in ("output_len", "peak_bytes"):
            if getattr(self, name) is not None:
                _set_int(self, name)
        if not isinstance(self.verified, bool):
            raise ProfileError(f"verified must be true or false, is {self.verified!r}")
        if self.step_s is not None:
            _set_float(self, "step_s")
        _set_int(self, "num_trials")
        _set_int(self, "num_ooms")

    @property
    def input_s_per_step(self) -> float:
        """Length units of input in one full batch: seconds of audio where lengths are seconds."""
        return self.size * self.input_len

    @property
    def input_s_per_s(self) -> float | None:
        """Length units of input per second of training step; None where the step wasn't timed."""
        return self.input_s_per_step / self.step_s if self.step_s else None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One batch size per bucket, and how it was measured.

    :param bins: the buckets.
    :param buckets: one entry a bucket, in the order of the bins.
    :param budget_bytes: what a step was allowed to allocate.
    :param fingerprint: what it was measured for.
    :param num_trials: training steps in all, those that belong to no single bucket included.
    :param num_soak_steps: steps of the closing soak, which verifies the sizes in shuffled order; not among the trials.
    :param num_ooms: how many of both ran out of memory.
    :param num_retries: allocator retries (the allocator gave its cache back and tried again).
    :param search_s: seconds from the first trial to the end.
    :param memory_fraction: share of the device that the budget was taken from, over 0, at most 1.
    :param mode: ``verify`` if a step ran at every bucket's size, ``fast`` if most sizes are predicted.
    :param objective: ``memory`` for the largest sizes, ``throughput`` for the smallest that train nearly as fast.
    :param allocator: which allocator ran, say ``expandable_segments``.
    :param created: ISO 8601, UTC (see :func:`utc_now`).
    :param versions: names and versions of the packages involved.
    :raises ProfileError: another number of buckets than bins, or a value out of its range.
    """

    bins: Bins
    buckets: tuple[BucketProfile, ...]
    budget_bytes: int
    fingerprint: Fingerprint
    num_trials: int
    num_soak_steps: int
    num_ooms: int
    num_retries: int
    search_s: float
    memory_fraction: float
    allocator: str
    created: str
    versions: Mapping[str, str]
    mode: str = "verify"
    objective: str = "memory"

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", tuple(self.buckets))
        object.__setattr__(self, "versions", dict(self.versions))
        if len(self.buckets) != len(self.bins):
            raise ProfileError(
                f"a profile must have one batch size a bucket, has {len(self.buckets)} for {len(self.bins)} buckets"
            )
        for name in ("budget_bytes", "num_trials", "num_soak_steps", "num_ooms", "num_retries"):
            _set_int(self, name)
        _set_float(self, "search_s")
        _set_float(self, "memory_fraction", above=0.0, high=1.0)
        _check_text("allocator", self.allocator)
        for name, words in _WORDS.items():
            if getattr(self, name) not in words:
                raise ProfileError(f"{name} must be {' or '.join(words)}, is {getattr(self, name)!r}")
        try:
            zone = datetime.fromisoformat(self.created.replace("Z", "+00:00")).utcoffset()
        except (ValueError, AttributeError):
            zone = None
        if zone is None or zone.total_seconds() != 0:
            raise ProfileError(f"created must be a UTC time like 2026-01-31T12:00:00Z, is {self.created!r}")
        for name, version in self.versions.items():
            _check_text("a name in versions", name)
            _check_text(f"versions[{name!r}]", version)

    def __hash__(self) -> int:
        return hash((self.buckets, self.budget_bytes, self.fingerprint, self.created))

    @property
    def bucket_batch_size(self) -> list[int]:
        """One batch size a bucket, as NeMo and the sampler take it."""
        return [bucket.size for bucket in self.buckets]

    @property
    def bucket_duration_bins(self) -> list[Any]:
        """Upper edges: ``[1.5, 3.0]``, or ``[[1.5, 10], [1.5, 20]]`` in 2D."""
        return self.bins.as_lists()

    def share(self, bucket: BucketProfile) -> float | None:
        """The bucket's peak as a share of the budget; None where it wasn't measured."""
        return bucket.peak_bytes / self.budget_bytes if bucket.peak_bytes is not None and self.budget_bytes else None

    def train_ds(self) -> dict[str, Any]:
        """The top of the file: settings that a NeMo ``train_ds`` section takes as they are."""
        top: dict[str, Any] = {
            "bucket_duration_bins": self.bucket_duration_bins,
            "bucket_batch_size": self.bucket_batch_size,
        }
        if self.bins.is_2d or not self.bins.strict_2d:
            top["bucketing_2d_strict_mode"] = self.bins.strict_2d
        for name in ("min_tps", "max_tps"):
            values = getattr(self.bins, name)
            if (
                values is not None
            ):  # one number where it is the same for every bucket: NeMo's filter takes that anywhere
                top[name] = values[0] if len(set(values)) == 1 else list(values)
        return top

    def as_dict(self) -> dict[str, Any]:
        """The whole profile as plain lists, dicts, strings and numbers, in the file's order, checksum included."""
        buckets = []
        for bucket in self.buckets:
            row = {field.name: getattr(bucket, field.name) for field in fields(bucket)}
            row["share"] = _rounded(self.share(bucket))
            row["input_s_per_s"] = _rounded(bucket.input_s_per_s)
            buckets.append(row)
        section: dict[str, Any] = {"format_version": FORMAT_VERSION, "created": self.created}
        for name in _SCALARS:
            section[name] = getattr(self, name)
        section["versions"] = dict(self.versions)
        section["buckets"] = buckets
        section["fingerprint"] = dict(self.fingerprint.fields)
        document = {**self.train_ds(), "oomfit": section}
        section["checksum"] = _checksum(document)
        return document

    def encode(self) -> str:
        """The profile as YAML: ``parse(profile.encode()) == profile``."""
        document = self.as_dict()
        section = document.pop("oomfit")
        lines = [HEADER]
        lines += [f"{key}: {flow(value)}" for key, value in document.items()]
        lines.append("oomfit:")
        for key, value in section.items():
            if key == "buckets":
                lines.append("  buckets:")
                lines += [f"    - {flow(row)}" for row in value]
            elif isinstance(value, dict) and value:
                lines.append(f"  {key}:")
                lines += [f"    {flow(name)}: {flow(item)}" for name, item in value.items()]
            else:
                lines.append(f"  {key}: {flow(value)}")
        return "\n".join(lines) + "\n"


_WORDS = {"mode": ("verify", "fast"), "objective": ("memory", "throughput")}
_SCALARS = (
    "mode",
    "objective",
    "allocator",
    "memory_fraction",
    "budget_bytes",
    "num_trials",
    "num_soak_steps",
    "num_ooms",
    "num_retries",
    "search_s",
)


def parse(text: str, *, path: str = "<string>") -> Profile:
    """Read a profile.

    :param text: what :meth:`Profile.encode` made. Comments, order and layout are free; values aren't.
    :param path: named in errors.
    :raises ProfileError: one line with the path, the line where there is one, what's wrong and what to do.
    """
    return _Parser(path, remedy=_AGAIN).profile(text)


def utc_now() -> str:
    """The time now, as :attr:`Profile.created` holds it."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class _Parser(StrictReader):
    """Turns a tree into a profile."""

    def profile(self, text: str) -> Profile:
        root = self.tree(text)
        section = self.child(root, "oomfit", dict, "")
        version = self.child(section, "format_version", int, "oomfit")
        if version.value != FORMAT_VERSION:
            self.fail(
                f"oomfit.format_version is {version.value}, this lhotse-oomfit reads {FORMAT_VERSION}",
                version.line,
                f"install the version that wrote it, or {_AGAIN}",
            )
        checksum = self.child(section, "checksum", str, "oomfit", hint=" (the file was cut off)")
        expected = _checksum(root.plain())
        if checksum.value != expected:
            self.fail(
                f"oomfit.checksum is {checksum.value!r}, the content gives {expected!r}: damaged or edited by hand",
                checksum.line,
                f"{_AGAIN}, or pass your own sizes as a list to bucket_batch_size",
            )
        return self.build(root, section)

    def build(self, root: Node, section: Node) -> Profile:
        known = {
            "bucket_duration_bins",
            "bucket_batch_size",
            "bucketing_2d_strict_mode",
            "min_tps",
            "max_tps",
            "oomfit",
        }
        self.only(root, known, "")
        names = {"format_version", "created", "versions", "buckets", "fingerprint", "checksum", *_SCALARS}
        self.only(section, names, "oomfit")
        edges = self.child(root, "bucket_duration_bins", list, "")
        options: dict[str, Any] = {}
        if "bucketing_2d_strict_mode" in root.value:
            options["strict_2d"] = self.child(root, "bucketing_2d_strict_mode", bool, "").value
        for name in ("min_tps", "max_tps"):
            if name in root.value:
                options[name] = root.value[name].plain()
        try:
            bins = Bins.from_edges(edges.plain(), **options)
        except (InvalidBinsError, InvalidArgumentError) as error:
            self.fail(f"bucket_duration_bins don't describe buckets: {error}", edges.line)
        rows = self.child(section, "buckets", list, "oomfit")
        buckets = tuple(self.bucket(row, index) for index, row in enumerate(rows.value))
        sizes = self.child(root, "bucket_batch_size", list, "")
        if not len(buckets) == len(sizes.value) == len(bins):
            self.fail(
                f"bucket_duration_bins, bucket_batch_size and oomfit.buckets must be of one length, are of "
                f"{len(bins)}, {len(sizes.value)} and {len(buckets)}",
                sizes.line,
            )
        if sizes.plain() != [bucket.size for bucket in buckets]:
            self.fail("bucket_batch_size must repeat the sizes in oomfit.buckets, it differs", sizes.line)
        older = {name: " (an older lhotse-oomfit wrote it)" for name in _WORDS}
        values = {
            name: self.child(section, name, _KINDS[name], "oomfit", hint=older.get(name, "")).value for name in _SCALARS
        }
        try:
            profile = Profile(
                bins=bins,
                buckets=buckets,
                fingerprint=Fingerprint(fields=self.strings(section, "fingerprint")),
                versions=self.strings(section, "versions"),
                created=self.child(section, "created", str, "oomfit").value,
                **values,
            )
        except ProfileError as error:
            self.fail(f"oomfit.{error}", section.line)
        if profile.as_dict() != root.plain():
            self.fail("the content isn't what a profile with these values holds (share or input_s_per_s differ)")
        return profile

    def bucket(self, row: Node, index: int) -> BucketProfile:
        where = f"oomfit.buckets[{index}]"
        if not isinstance(row.value, dict):
            self.fail(f"{where} must be a mapping, is {kind_of(row.value)}", row.line)
        self.only(row, {*_BUCKET_KINDS, "share", "input_s_per_s"}, where)
        values = {name: self.child(row, name, kind, where).value for name, kind in _BUCKET_KINDS.items()}
        try:
            return BucketProfile(**values)
        except ProfileError as error:
            self.fail(f"{where}.{error}", row.line)

    def strings(self, section: Node, name: str) -> dict[str, str]:
        node = self.child(section, name, dict, "oomfit")
        return {key: self.child(node, key, str, f"oomfit.{name}").value for key in node.value}


_KINDS: dict[str, Any] = {
    "mode": str,
    "objective": str,
    "allocator": str,
    "memory_fraction": float,
    "budget_bytes": int,
    "num_trials": int,
    "num_soak_steps": int,
    "num_ooms": int,
    "num_retries": int,
    "search_s": float,
}
_BUCKET_KINDS: dict[str, Any] = {
    "size": int,
    "input_len": float,
    "output_len": (int, type(None)),
    "verified": bool,
    "peak_bytes": (int, type(None)),
    "step_s": (float, type(None)),
    "num_trials": int,
    "num_ooms": int,
}


def _set_int(owner: Any, name: str, *, low: int = 0, high: int = _MAX_INT) -> None:
    """Check a whole number (numpy's too) and store it as a plain int."""
    value = getattr(owner, name)
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not low <= number <= high:
        raise ProfileError(f"{name} must be a whole number from {low} to {high}, is {value!r}")
    object.__setattr__(owner, name, number)


def _set_float(owner: Any, name: str, *, above: float | None = None, high: float = math.inf) -> None:
    """Check a finite number (numpy's too) and store it as a plain float."""
    value = getattr(owner, name)
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and 0 <= number <= high and (above is None or number > above)):
        low = "at least 0" if above is None else f"above {above:g}"
        top = "" if math.isinf(high) else f" and at most {high:g}"
        raise ProfileError(f"{name} must be a finite number {low}{top}, is {value!r}")
    object.__setattr__(owner, name, number)


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or value != one_line(value):
        raise ProfileError(f"{name} must be one line of printable text, is {value!r}")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _checksum(document: Mapping[str, Any]) -> str:
    """SHA-256 over the content without the checksum itself; layout, comments and the order of keys don't matter."""
    section = {key: value for key, value in document["oomfit"].items() if key != "checksum"}
    text = json.dumps({**document, "oomfit": section}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
