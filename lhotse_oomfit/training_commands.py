"""The commands that need a training: ``oomfit calibrate``, ``oomfit verify``, ``oomfit doctor``."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
import yaml

from lhotse_oomfit.config import field_kinds, option_help, options_from, parse_option
from lhotse_oomfit.errors import InvalidArgumentError, OomfitError
from lhotse_oomfit.store import ProfileStore
from lhotse_oomfit.targets import import_target, instantiate, read_job
from lhotse_oomfit.terminal import DIFFERENT, EPILOG, FAILED, echo, echo_json, fail, find_profile, json_option, width

if TYPE_CHECKING:
    from lhotse_oomfit.doctor import Finding
    from lhotse_oomfit.options import CalibrationOptions
    from lhotse_oomfit.verification import Check

__all__ = ["calibrate_command", "doctor_command", "verify_command"]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
_YAML = (".yaml", ".yml")


def _calibration_options(command: F) -> F:
    """One command-line option for each option of a calibration, made from the options themselves."""
    texts = option_help()
    for name, kinds in reversed(field_kinds().items()):
        if name == "world_size":  # has an option with a meaning of its own
            continue
        flag = name.replace("_", "-")
        if bool in kinds and str not in kinds:
            option = click.option(f"--{flag}/--no-{flag}", name, default=None, help=texts[name])
        else:
            option = click.option(f"--{flag}", name, metavar="VALUE", help=texts[name])
        command = option(command)
    return command


def _training_options(command: F) -> F:
    for option in reversed(
        (
            click.option(
                "--ddp",
                is_flag=True,
                help="For one rank of a job with DistributedDataParallel, whose reducer keeps a copy of all gradients.",
            ),
            click.option(
                "--world-size",
                type=click.IntRange(min=1),
                help="Ranks of the job that the profile is for [default: 1; with --ddp: 2; more make no difference].",
            ),
            click.option(
                "--bins", help="Passed to make_training as duration_bins: [2.0,4.5,30.0], or [[2.0,10],...] in 2D."
            ),
            click.option(
                "--set", "settings", multiple=True, metavar="NAME=VALUE", help="An argument for make_training."
            ),
            click.option(
                "--config",
                "config_path",
                type=click.Path(path_type=Path, dir_okay=False),
                help="YAML file of options; those on the command line come before it.",
            ),
            click.option(
                "--traceback", "show_traceback", is_flag=True, help="Show where in your code an error was raised."
            ),
        )
    ):
        command = option(command)
    return command


_TARGET_HELP = """
    TARGET is module:function, importable from here, or a YAML file with a training section (with _target_) and a
    calibration section. The function returns what lhotse_oomfit.calibrate takes: a mapping or an object with
    sampler, dataset, model, optimizer, training_step and so on; or, with Lightning, (module, datamodule or
    DataLoader), or a mapping with module, data and trainer (the Trainer's arguments).
"""


class _Target:
    """A training that isn't made yet, and the options for it."""

    def __init__(self, target: str, store: ProfileStore, given: dict[str, Any]) -> None:
        self.ddp: bool = given.pop("ddp")
        self.show_traceback: bool = given.pop("show_traceback")
        self.world_size: int = given.pop("world_size") or (2 if self.ddp else 1)
        self.arguments = dict(_setting(text) for text in given.pop("settings"))
        bins, config_path = given.pop("bins"), given.pop("config_path")
        if bins is not None:
            self.arguments["duration_bins"] = _value(bins, "--bins")
        self.node: Any = None
        section: Mapping[str, Any] = {}
        if target.lower().endswith(_YAML):
            node, section = read_job(Path(target))
            if node is None:
                raise InvalidArgumentError(f"{target} must have a training section with _target_, it has none")
            if self.arguments:
                if not isinstance(node, Mapping):
                    raise InvalidArgumentError(f"{target}: training must be a mapping, it is {node!r:.60}")
                node = {**node, **self.arguments}
            self.node = node
        self.target = target
        texts = {name: value for name, value in given.items() if value is not None}
        values = {name: parse_option(name, value) if isinstance(value, str) else value for name, value in texts.items()}
        file = _read_config(config_path) if config_path is not None else {}
        base = {"cache": str(store.directory)} if store.directory is not None else {}
        self.options: CalibrationOptions = options_from(base, section, file, values, world_size=self.world_size)

    def use(self, use: Callable[[Any, Any, Any], T]) -> T:
        """Make the training, and do something with it."""
        from lhotse_oomfit.offline import use_training

        try:
            return use_training(self.make(), use, self.options, ddp=self.ddp)
        except (OomfitError, OSError, click.ClickException):
            raise
        except Exception as error:  # noqa: BLE001  whatever the user's own code raises ends the command with one line
            _blame(self.target, error, self.show_traceback)

    def make(self) -> Any:
        """What the user's function returns."""
        if self.node is not None:
            return instantiate(self.node)
        function = import_target(self.target)
        if not callable(function):
            raise InvalidArgumentError(f"{self.target} must be a function, it is {function!r:.60}")
        try:
            return function(**self.arguments)
        except TypeError as error:
            unexpected = [name for name in self.arguments if f"unexpected keyword argument '{name}'" in str(error)]
            if unexpected:
                raise InvalidArgumentError(
                    f"{self.target} takes no argument {unexpected[0]!r}; add it, or leave out "
                    f"{'--bins' if unexpected[0] == 'duration_bins' else '--set'}"
                ) from None
            raise


def _blame(target: str, error: Exception, show_traceback: bool) -> NoReturn:
    if show_traceback:
        traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    hint = "" if show_traceback else "; --traceback shows how it came there"
    fail(f"{target} raised {type(error).__name__}: {error!s:.300}{where}{hint}", FAILED)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise click.UsageError(f"--set must be name=value, it is {text!r}")
    return name, _value(value, f"--set {name}")


def _value(text: str, name: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise click.UsageError(f"{name} isn't a value: {' '.join(str(error).split())}") from None


def _read_config(path: Path) -> Mapping[str, Any]:
    """Options in a YAML file: at its top, or in a calibration section."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        root = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} isn't YAML: {' '.join(str(error).split())}") from None
    if root is None:
        return {}
    if not isinstance(root, Mapping):
        raise InvalidArgumentError(f"{path} must be a mapping of options, it is {str(root)[:40]!r}")
    section = root.get("calibration", root)
    return section if section is not None else {}


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("lhotse_oomfit")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


@click.command("calibrate", epilog=EPILOG)
@click.argument("target")
@_training_options
@_calibration_options
@json_option
@click.pass_obj
def calibrate_command(
    store: ProfileStore,
    /,
    target: str,
    as_json: bool,
    **given: Any,
) -> None:
    """Measure batch sizes ahead of a job, on one card like those of the job.

    The job then finds the profile in the cache and tries nothing.
    """
    job = _Target(target, store, given)
    from lhotse_oomfit.fit import calibrate_training
    from lhotse_oomfit.report import profile_table

    _log_to_stderr()
    logging.getLogger("lhotse_oomfit.fit").addFilter(lambda record: not record.getMessage().startswith("calibrated "))
    profile = job.use(calibrate_training)
    path = ProfileStore(job.options.cache).path(profile.fingerprint)
    if path is not None and not path.exists():
        path = None
    if as_json:
        echo_json({"path": None if path is None else str(path), **profile.as_dict()})
        return
    echo(profile_table(profile, width=width()))
    click.echo(f"\nkept at {path}" if path is not None else "\nthe profile isn't kept")


@click.command("verify", epilog=EPILOG)
@click.argument("profile")
@click.argument("target")
@click.option(
    "-n",
    "--num-buckets",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Buckets to run again, those with the highest share of the budget first.",
)
@_training_options
@_calibration_options
@json_option
@click.pass_obj
def verify_command(
    store: ProfileStore,
    /,
    profile: str,
    target: str,
    num_buckets: int,
    as_json: bool,
    **given: Any,
) -> None:
    """Run the tightest buckets of PROFILE again, one training step each.

    Exits with 0 if every size stays inside the profile's budget, with 1 if one doesn't. The profile stays as it is.
    """
    path, found = find_profile(store, profile)
    job = _Target(target, store, given)
    from lhotse_oomfit.fit import verify_training

    _log_to_stderr()

    def verify(sampler: Any, training: Any, options: CalibrationOptions) -> list[Check]:
        return verify_training(sampler, training, options, found, num_buckets=num_buckets)

    checks = job.use(verify)
    holds = all(check.holds for check in checks)
    if as_json:
        echo_json({"path": str(path), "holds": holds, "checks": [check.as_dict() for check in checks]})
    else:
        for check in checks:
            click.echo(f"{'holds' if check.holds else 'FAILS'}  {check}")
        if not holds:
            click.echo("measure again: oomfit calibrate with --recalibrate always, or OOMFIT_RECALIBRATE=always")
    if not holds:
        raise SystemExit(DIFFERENT)


@click.command("doctor", epilog=EPILOG)
@click.argument("target", required=False)
@_training_options
@_calibration_options
@json_option
@click.pass_obj
def doctor_command(
    store: ProfileStore,
    /,
    target: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Say what in this environment will hurt, and with TARGET what in that training will.

    Nothing is trained and nothing is measured. Exits with 1 if something hurts.
    """
    from lhotse_oomfit.doctor import check_environment, check_training

    job = None
    if target is not None:
        job = _Target(target, store, given)
        store = ProfileStore(job.options.cache)
    findings = check_environment(store)
    if job is not None:
        from lhotse_oomfit.offline import describe

        sampler, trainer = describe(job.make())
        findings += check_training(sampler, trainer=trainer, store=store, world_size=job.world_size)
    hurts = any(finding.hurts for finding in findings)
    if as_json:
        echo_json({"hurts": hurts, "findings": [finding.as_dict() for finding in findings]})
    else:
        _print_findings(findings)
    if hurts:
        raise SystemExit(DIFFERENT)


def _print_findings(findings: list[Finding]) -> None:
    for finding in sorted(findings, key=lambda finding: not finding.hurts):
        click.echo(f"{'HURTS' if finding.hurts else 'note '}  {finding.what}")
        click.echo(f"       why: {finding.why}")
        click.echo(f"       do:  {finding.remedy}")
    if not any(finding.hurts for finding in findings):
        click.echo("nothing here will hurt")


for _command in (calibrate_command, verify_command, doctor_command):
    _command.help = f"{_command.help}\n{_TARGET_HELP}"
