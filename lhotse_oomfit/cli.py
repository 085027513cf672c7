"""The ``oomfit`` command: look at profiles, compare them, move them. Nothing here imports torch."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from lhotse_oomfit import __version__
from lhotse_oomfit.errors import OomfitError, ProfileError
from lhotse_oomfit.profile import Profile
from lhotse_oomfit.store import Entry, ProfileStore, read_profile

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["main"]

DIFFERENT, USAGE, NOT_FOUND, UNREADABLE, FAILED = 1, 2, 3, 4, 5

_EPILOG = """\b
Exit codes:
  0  it worked (diff: the same sizes and the same fingerprint)
  1  diff: the profiles differ; clear: not confirmed
  2  wrong usage
  3  there's no such profile
  4  a file that holds no usable profile
  5  something else failed: a file that can't be written or deleted, a missing extra
"""


def _fail(message: str, code: int) -> NoReturn:
    """End with one line on standard error."""
    click.echo(f"oomfit: {' '.join(message.split())}", err=True)
    sys.exit(code)


class _Group(click.Group):
    """Turns the errors of this package, and of the file system, into one line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ProfileError as error:
            _fail(str(error), UNREADABLE)
        except OomfitError as error:
            _fail(str(error), FAILED)
        except BrokenPipeError:  # the reader of a pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except OSError as error:
            _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), FAILED)


@click.group(cls=_Group, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="oomfit", message="%(prog)s %(version)s")
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Cache directory [default: $OOMFIT_CACHE_DIR, else the user's cache].",
)
@click.pass_context
def main(ctx: click.Context, cache: Path | None) -> None:
    """Batch sizes per length bucket, measured by lhotse-oomfit: show, compare and move profiles.

    PROFILE is the path of a YAML file, "latest" (the latest in the cache), or the first characters of a name that
    "oomfit list" prints.
    """
    ctx.obj = ProfileStore(cache)


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@main.command(epilog=_EPILOG)
@click.argument("profile", default="latest")
@click.option("--why", is_flag=True, help="Print what the profile was measured for: every field that must match.")
@_json
@click.pass_obj
def show(store: ProfileStore, profile: str, why: bool, as_json: bool) -> None:
    """Show a profile as a table. Without PROFILE: the latest in the cache."""
    path, found = _find(store, profile)
    if as_json:
        _echo_json({"path": str(path), **found.as_dict()})
        return
    from lhotse_oomfit.report import fields_table, profile_table

    width = _width()
    click.echo(f"{path} (measured {found.created})")
    _echo(profile_table(found, width=width))
    if why:
        click.echo("\nUsed again only where all of this is the same:")
        _echo(fields_table(found.fingerprint.fields))
    else:
        device = found.fingerprint.fields.get("device")
        click.echo(
            f"measured on {device}; --why prints what else must match" if device else "--why prints what must match"
        )


@main.command("list", epilog=_EPILOG)
@_json
@click.pass_obj
def list_(store: ProfileStore, as_json: bool) -> None:
    """List the profiles in the cache, the latest first."""
    entries = store.entries()
    if as_json:
        _echo_json([_entry(entry) for entry in entries])
        return
    if not entries:
        click.echo(f"no profiles in {store.directory}")
        return
    from lhotse_oomfit.report import entries_table

    click.echo(f"profiles in {store.directory}")
    _echo(entries_table([(entry.path.stem, entry.profile, _short(entry)) for entry in entries], width=_width()))


@main.command(epilog=_EPILOG)
@click.argument("a")
@click.argument("b")
@_json
@click.pass_obj
def diff(store: ProfileStore, a: str, b: str, as_json: bool) -> None:
    """Compare two profiles side by side.

    Sizes bucket by bucket, and what the profiles were measured for where that differs.
    """
    (path_a, left), (path_b, right) = _find(store, a), _find(store, b)
    from lhotse_oomfit.report import diff_fields, diff_sizes, diff_tables

    sizes, fields = diff_sizes(left, right), diff_fields(left, right)
    same = not fields and all(x == y for _, x, y in sizes)
    if as_json:
        rows = [{"bucket": label, "a": x, "b": y} for label, x, y in sizes]
        changed = {name: {"a": x, "b": y} for name, x, y in fields}
        _echo_json({"a": str(path_a), "b": str(path_b), "same": same, "sizes": rows, "fingerprint": changed})
    else:
        click.echo(f"a: {path_a} (measured {left.created})\nb: {path_b} (measured {right.created})")
        for table in diff_tables(sizes, fields):
            _echo(table)
    if not same:
        sys.exit(DIFFERENT)


@main.command(epilog=_EPILOG)
@click.argument("profile")
@click.option(
    "--format",
    "style",
    type=click.Choice(["nemo", "hydra", "lhotse", "json"]),
    default="nemo",
    show_default=True,
    help="nemo: overrides for a NeMo training script. hydra: overrides that may add keys, below --prefix. "
    "lhotse: arguments for CalibratedBucketingSampler. json: the same settings as JSON.",
)
@click.option("--prefix", help="Where the settings live [default: model.train_ds; hydra: train_ds].")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.pass_obj
def export(store: ProfileStore, profile: str, style: str, prefix: str | None, as_json: bool) -> None:
    """Print a profile's bins and sizes as one line to paste."""
    _, found = _find(store, profile)
    style = "json" if as_json else style
    if prefix is not None and style in {"lhotse", "json"}:
        raise click.UsageError(f"--prefix has no meaning with --format {style}; leave it out")
    settings = found.train_ds()
    if style == "json":
        click.echo(json.dumps(settings))
    elif style == "lhotse":
        names = {"bucket_duration_bins": "duration_bins", "bucketing_2d_strict_mode": "strict_2d"}
        click.echo(", ".join(f"{names.get(key, key)}={value!r}" for key, value in settings.items()))
    else:
        if style == "nemo":
            settings = {"use_bucketing": True, **settings}
        where = prefix or ("model.train_ds" if style == "nemo" else "train_ds")
        mark = "++" if style == "hydra" else ""
        values = {key: json.dumps(value, separators=(",", ":")) for key, value in settings.items()}
        click.echo(" ".join(shlex.quote(f"{mark}{where}.{key}={value}") for key, value in values.items()))


@main.command(epilog=_EPILOG)
@click.argument("profile", required=False)
@click.option("--yes", is_flag=True, help="Don't ask.")
@_json
@click.pass_obj
def clear(store: ProfileStore, profile: str | None, yes: bool, as_json: bool) -> None:
    """Delete PROFILE, or every profile in the cache.

    The next run then measures again.
    """
    if as_json and not yes:
        raise click.UsageError("--json can't ask before it deletes; pass --yes too")
    if profile is not None:
        paths = [_path(store, profile)]
        if not yes:
            click.confirm(f"delete {paths[0]}?", abort=True, err=True)
        paths[0].unlink()
    else:
        entries = store.entries()
        if entries and not yes:
            click.confirm(f"delete {len(entries)} profiles in {store.directory}?", abort=True, err=True)
        paths = store.clear()
    if as_json:
        _echo_json({"removed": [str(path) for path in paths]})
    else:
        click.echo(f"deleted {len(paths)} profile{'' if len(paths) == 1 else 's'}")


@main.command(epilog=_EPILOG)
@click.argument("profile")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help=".svg, .png or .html"
)
@click.option(
    "--style",
    type=click.Choice(["light", "dark", "auto"]),
    help="Colours [default: light; html: auto, which follows the reader's setting].",
)
@_json
@click.pass_obj
def plot(store: ProfileStore, profile: str, output: Path, style: str | None, as_json: bool) -> None:
    """Plot a profile (needs the extra "plot").

    Sizes, peaks against the budget, and throughput, bucket by bucket; 2D buckets as a grid.
    """
    kind = output.suffix.lower().lstrip(".")
    if kind not in {"svg", "png", "html"}:
        raise click.UsageError(f"--output must end in .svg, .png or .html, is {output}; rename it")
    if style == "auto" and kind != "html":
        raise click.UsageError(f"--style auto needs an .html output, is {output}; choose light or dark")
    _, found = _find(store, profile)
    try:
        from lhotse_oomfit.plots import save_plot
    except ImportError as error:
        _fail(f"plot needs matplotlib, which isn't installed ({error}); pip install 'lhotse-oomfit[plot]'", FAILED)
    save_plot(found, output, style=style or ("auto" if kind == "html" else "light"))
    if as_json:
        _echo_json({"written": str(output)})
    else:
        click.echo(f"wrote {output}")


def _path(store: ProfileStore, name: str) -> Path:
    """The file that a PROFILE argument means."""
    path = Path(name).expanduser()
    if path.is_dir():
        _fail(f"{name} is a directory, a profile is a YAML file; name the file, or pass --cache {name}", NOT_FOUND)
    if path.exists() or path.suffix.lower() in {".yaml", ".yml"} or os.sep in name:
        if not path.exists():
            _fail(f"there's no profile {name}; 'oomfit list' names those in the cache", NOT_FOUND)
        return path
    entries = store.entries()
    if name == "latest":
        usable = [entry for entry in entries if entry.profile is not None]
        if not usable:
            _fail(f"there's no profile in {store.directory}; calibrate first, or name a file", NOT_FOUND)
        return usable[0].path
    matching = [entry.path for entry in entries if entry.path.stem.startswith(name)]
    if not matching:
        _fail(f"there's no profile {name}, neither here nor in {store.directory}; see 'oomfit list'", NOT_FOUND)
    if len(matching) > 1:
        _fail(f"{len(matching)} profiles in {store.directory} start with {name}; give more characters", NOT_FOUND)
    return matching[0]


def _find(store: ProfileStore, name: str) -> tuple[Path, Profile]:
    path = _path(store, name)
    return path, read_profile(path)


def _entry(entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = {"path": str(entry.path), "error": entry.error}
    if entry.profile is not None:
        found.update(created=entry.profile.created, fingerprint=dict(entry.profile.fingerprint.fields))
        found.update(entry.profile.train_ds())
    return found


def _short(entry: Entry) -> str | None:
    """The error of an entry without its path, which the table shows, and without what to do about it."""
    if entry.error is None:
        return None
    return entry.error.removeprefix(f"profile {entry.path}").lstrip(",: ").split(";")[0]


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def _echo(part: RenderableType) -> None:
    """Print a table; into a pipe or file without the blanks that fill its lines."""
    from rich.console import Console

    console = Console(width=_width(), highlight=False)
    if console.is_terminal:
        console.print(part)
        return
    with console.capture() as capture:
        console.print(part)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _echo_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
