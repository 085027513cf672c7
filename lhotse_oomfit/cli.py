"""The ``oomfit`` command. Its group, and the commands that look at profiles, compare them and move them; nothing here
imports torch. The commands that need data or a training are in modules of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from lhotse_oomfit.bins_command import bins_command
from lhotse_oomfit.errors import OomfitError, ProfileError
from lhotse_oomfit.store import Entry, ProfileStore
from lhotse_oomfit.terminal import (
    DIFFERENT,
    EPILOG,
    FAILED,
    UNREADABLE,
    echo,
    echo_json,
    fail,
    find_path,
    find_profile,
    json_option,
    settings_line,
    width,
)
from lhotse_oomfit.training_commands import calibrate_command, doctor_command, verify_command
from lhotse_oomfit.version import __version__

__all__ = ["main"]


class _Group(click.Group):
    """Turns the errors of this package, and of the file system, into one line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ProfileError as error:
            fail(str(error), UNREADABLE)
        except OomfitError as error:
            fail(str(error), FAILED)
        except BrokenPipeError:  # the reader of a pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except OSError as error:
            fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), FAILED)


@click.group(cls=_Group, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="oomfit", message="%(prog)s %(version)s")
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Cache directory [default: $OOMFIT_CACHE_DIR, else the user's cache].",
)
@click.pass_context
def main(ctx: click.Context, cache: Path | None) -> None:
    """Batch sizes per length bucket, measured by lhotse-oomfit: find, show, compare and move them.

    PROFILE is the path of a YAML file, "latest" (the latest in the cache), or the first characters of a name that
    "oomfit list" prints.
    """
    ctx.obj = ProfileStore(cache)


@main.command(epilog=EPILOG)
@click.argument("profile", default="latest")
@click.option("--why", is_flag=True, help="Print what the profile was measured for: every field that must match.")
@json_option
@click.pass_obj
def show(store: ProfileStore, profile: str, why: bool, as_json: bool) -> None:
    """Show a profile as a table. Without PROFILE: the latest in the cache."""
    path, found = find_profile(store, profile)
    if as_json:
        echo_json({"path": str(path), **found.as_dict()})
        return
    from lhotse_oomfit.report import fields_table, profile_table

    click.echo(f"{path} (measured {found.created})")
    echo(profile_table(found, width=width()))
    if why:
        click.echo("\nUsed again only where all of this is the same:")
        echo(fields_table(found.fingerprint.fields))
    else:
        device = found.fingerprint.fields.get("device")
        click.echo(
            f"measured on {device}; --why prints what else must match" if device else "--why prints what must match"
        )


@main.command("list", epilog=EPILOG)
@json_option
@click.pass_obj
def list_(store: ProfileStore, as_json: bool) -> None:
    """List the profiles in the cache, the latest first."""
    entries = store.entries()
    if as_json:
        echo_json([_entry(entry) for entry in entries])
        return
    if not entries:
        click.echo(f"no profiles in {store.directory}")
        return
    from lhotse_oomfit.report import entries_table

    click.echo(f"profiles in {store.directory}")
    echo(entries_table([(entry.path.stem, entry.profile, _short(entry)) for entry in entries], width=width()))


@main.command(epilog=EPILOG)
@click.argument("a")
@click.argument("b")
@json_option
@click.pass_obj
def diff(store: ProfileStore, a: str, b: str, as_json: bool) -> None:
    """Compare two profiles side by side.

    Sizes bucket by bucket, and what the profiles were measured for where that differs.
    """
    (path_a, left), (path_b, right) = find_profile(store, a), find_profile(store, b)
    from lhotse_oomfit.report import diff_fields, diff_sizes, diff_tables

    sizes, fields = diff_sizes(left, right), diff_fields(left, right)
    same = not fields and all(x == y for _, x, y in sizes)
    if as_json:
        rows = [{"bucket": label, "a": x, "b": y} for label, x, y in sizes]
        changed = {name: {"a": x, "b": y} for name, x, y in fields}
        echo_json({"a": str(path_a), "b": str(path_b), "same": same, "sizes": rows, "fingerprint": changed})
    else:
        click.echo(f"a: {path_a} (measured {left.created})\nb: {path_b} (measured {right.created})")
        for table in diff_tables(sizes, fields):
            echo(table)
    if not same:
        sys.exit(DIFFERENT)


@main.command(epilog=EPILOG)
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
@click.option("--merge", is_flag=True, help="Make neighbouring buckets of one size a single bucket (1D only).")
@click.option("--prefix", help="Where the settings live [default: model.train_ds; hydra: train_ds].")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.pass_obj
def export(store: ProfileStore, profile: str, style: str, merge: bool, prefix: str | None, as_json: bool) -> None:
    """Print a profile's bins and sizes as one line to paste."""
    _, found = find_profile(store, profile)
    style = "json" if as_json else style
    if prefix is not None and style in {"lhotse", "json"}:
        raise click.UsageError(f"--prefix has no meaning with --format {style}; leave it out")
    if merge and found.bins.is_2d:
        raise click.UsageError("--merge is for 1D buckets, this profile's are 2D; leave it out")
    settings = _merged(found.train_ds()) if merge else found.train_ds()
    click.echo(settings_line(settings, style, prefix))


def _merged(settings: dict[str, Any]) -> dict[str, Any]:
    """Neighbouring 1D buckets of one size (and one limit of tokens) as one bucket, up to the last one's edge."""
    lists = {key: value for key, value in settings.items() if isinstance(value, list)}
    edges = lists.pop("bucket_duration_bins")
    rows = list(zip(*lists.values(), strict=True))
    kept = [k for k in range(len(edges)) if k + 1 == len(edges) or rows[k] != rows[k + 1]]
    return {key: [value[k] for k in kept] if isinstance(value, list) else value for key, value in settings.items()}


@main.command(epilog=EPILOG)
@click.argument("profile", required=False)
@click.option("--yes", is_flag=True, help="Don't ask.")
@json_option
@click.pass_obj
def clear(store: ProfileStore, profile: str | None, yes: bool, as_json: bool) -> None:
    """Delete PROFILE, or every profile in the cache.

    The next run then measures again.
    """
    if as_json and not yes:
        raise click.UsageError("--json can't ask before it deletes; pass --yes too")
    if profile is not None:
        paths = [find_path(store, profile)]
        if not yes:
            click.confirm(f"delete {paths[0]}?", abort=True, err=True)
        paths[0].unlink()
    else:
        entries = store.entries()
        if entries and not yes:
            click.confirm(f"delete {len(entries)} profiles in {store.directory}?", abort=True, err=True)
        paths = store.clear()
    if as_json:
        echo_json({"removed": [str(path) for path in paths]})
    else:
        click.echo(f"deleted {len(paths)} profile{'' if len(paths) == 1 else 's'}")


@main.command(epilog=EPILOG)
@click.argument("profile")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help=".svg, .png or .html"
)
@click.option(
    "--style",
    type=click.Choice(["light", "dark", "auto"]),
    help="Colours [default: light; html: auto, which follows the reader's setting].",
)
@json_option
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
    _, found = find_profile(store, profile)
    try:
        from lhotse_oomfit.plots import save_plot
    except ImportError as error:
        fail(f"plot needs matplotlib, which isn't installed ({error}); pip install 'lhotse-oomfit[plot]'", FAILED)
    save_plot(found, output, style=style or ("auto" if kind == "html" else "light"))
    if as_json:
        echo_json({"written": str(output)})
    else:
        click.echo(f"wrote {output}")


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


for _command in (bins_command, calibrate_command, verify_command, doctor_command):
    main.add_command(_command)
