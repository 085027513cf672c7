"""What the commands of ``oomfit`` share: exit codes, one-line errors, printing, finding a profile by its name."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from lhotse_oomfit.profile import Profile
from lhotse_oomfit.store import ProfileStore, read_profile

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "DIFFERENT",
    "EPILOG",
    "FAILED",
    "NOT_FOUND",
    "UNREADABLE",
    "USAGE",
    "echo",
    "echo_json",
    "fail",
    "find_path",
    "find_profile",
    "json_option",
    "settings_line",
    "width",
]

DIFFERENT, USAGE, NOT_FOUND, UNREADABLE, FAILED = 1, 2, 3, 4, 5

EPILOG = """\b
Exit codes:
  0  it worked (diff: the same sizes and the same fingerprint; doctor: nothing
     that hurts; verify: every size holds)
  1  diff: the profiles differ; doctor: something hurts; verify: a size doesn't
     hold; clear: not confirmed
  2  wrong usage
  3  there's no such profile
  4  a file that holds no usable profile
  5  something else failed: a file that can't be read, written or deleted, a
     calibration that couldn't finish, a missing extra
"""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def fail(message: str, code: int) -> NoReturn:
    """End with one line on standard error."""
    click.echo(f"oomfit: {' '.join(message.split())}", err=True)
    sys.exit(code)


def width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size((80, 24)).columns


def echo(part: RenderableType) -> None:
    """Print a table; into a pipe or file without the blanks that fill its lines."""
    from rich.console import Console

    console = Console(width=width(), highlight=False)
    if console.is_terminal:
        console.print(part)
        return
    with console.capture() as capture:
        console.print(part)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def echo_json(value: Any) -> None:
    """Print plain values."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def find_path(store: ProfileStore, name: str) -> Path:
    """The file that a PROFILE argument means."""
    path = Path(name).expanduser()
    if path.is_dir():
        fail(f"{name} is a directory, a profile is a YAML file; name the file, or pass --cache {name}", NOT_FOUND)
    if path.exists() or path.suffix.lower() in {".yaml", ".yml"} or os.sep in name:
        if not path.exists():
            fail(f"there's no profile {name}; 'oomfit list' names those in the cache", NOT_FOUND)
        return path
    entries = store.entries()
    if name == "latest":
        usable = [entry for entry in entries if entry.profile is not None]
        if not usable:
            fail(f"there's no profile in {store.directory}; calibrate first, or name a file", NOT_FOUND)
        return usable[0].path
    matching = [entry.path for entry in entries if entry.path.stem.startswith(name)]
    if not matching:
        fail(f"there's no profile {name}, neither here nor in {store.directory}; see 'oomfit list'", NOT_FOUND)
    if len(matching) > 1:
        fail(f"{len(matching)} profiles in {store.directory} start with {name}; give more characters", NOT_FOUND)
    return matching[0]


def find_profile(store: ProfileStore, name: str) -> tuple[Path, Profile]:
    """The profile that a PROFILE argument means, and where it is."""
    path = find_path(store, name)
    return path, read_profile(path)


def settings_line(settings: dict[str, Any], style: str, prefix: str | None = None) -> str:
    """Settings of a sampler as one line to paste.

    :param settings: keys as NeMo's ``train_ds`` has them.
    :param style: ``nemo`` (overrides below ``model.train_ds``), ``hydra`` (overrides that may add keys, below
        ``train_ds``), ``lhotse`` (arguments for :class:`CalibratedBucketingSampler`) or ``json``.
    :param prefix: where the overrides live, instead.
    """
    if style == "json":
        return json.dumps(settings)
    if style == "lhotse":
        names = {"bucket_duration_bins": "duration_bins", "bucketing_2d_strict_mode": "strict_2d"}
        return ", ".join(f"{names.get(key, key)}={value!r}" for key, value in settings.items())
    if style == "nemo":
        settings = {"use_bucketing": True, **settings}
    where = prefix or ("model.train_ds" if style == "nemo" else "train_ds")
    mark = "++" if style == "hydra" else ""
    values = {key: json.dumps(value, separators=(",", ":")) for key, value in settings.items()}
    return " ".join(shlex.quote(f"{mark}{where}.{key}={value}") for key, value in values.items())
