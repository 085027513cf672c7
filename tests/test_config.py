"""One set of options, however they are written: dataclass, YAML, command line, OmegaConf, Hydra."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from lhotse_oomfit import calibrate, training_commands
from lhotse_oomfit.config import CalibrationConfig, field_kinds, option_help, options_from, parse_option
from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.options import CalibrationOptions
from lhotse_oomfit.targets import instantiate

DEFAULTS = {field.name: field.default for field in dataclasses.fields(CalibrationOptions)}
EXAMPLES: dict[str, Any] = {
    "memory_fraction": 0.8,
    "memory_limit": "600MiB",
    "reserve": 1_000_000,
    "cache": False,
    "recalibrate": "always",
    "verify_on_load": True,
    "max_batch_size": 512,
    "num_sample_cuts": 100,
    "num_soak_steps": 0,
    "mode": "fast",
    "objective": "throughput",
    "throughput_share": 0.05,
    "ranks": "shard",
    "heartbeat_timeout": 30.0,
    "calibration_timeout": 600.0,
    "progress": False,
    "world_size": 8,
}
"""One value for each option, none of them the default."""


def by_command_line(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> CalibrationOptions:
    """The options that `oomfit calibrate` makes of its arguments."""
    made: list[CalibrationOptions] = []

    def use(self: Any, use: Any) -> Any:
        made.append(self.options)
        raise InvalidArgumentError("enough")

    monkeypatch.setattr(training_commands._Target, "use", use)
    from lhotse_oomfit.cli import main

    logger = logging.getLogger("lhotse_oomfit")
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    try:
        result = CliRunner().invoke(main, ["calibrate", "any:thing", *arguments])
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
        logging.getLogger("lhotse_oomfit.fit").filters.clear()
    assert made, result.output + result.stderr
    return made[0]


def flags(values: dict[str, Any]) -> list[str]:
    found = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool) and name != "cache":
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", yaml.safe_dump(value).splitlines()[0].strip("'")]
    return found


def test_every_option_has_an_example_here_and_a_text():
    assert EXAMPLES.keys() == DEFAULTS.keys() == field_kinds().keys() == option_help().keys()
    assert all(EXAMPLES[name] != DEFAULTS[name] for name in DEFAULTS)


def test_the_config_has_the_options_and_their_defaults():
    config = CalibrationConfig()
    assert {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} == DEFAULTS
    assert options_from(config) == CalibrationOptions() == options_from() == options_from(None)


def test_dataclass_yaml_and_command_line_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = CalibrationOptions(**EXAMPLES)
    assert options_from(CalibrationConfig(**EXAMPLES)) == expected
    assert options_from(yaml.safe_load(yaml.safe_dump(EXAMPLES))) == expected
    assert by_command_line(monkeypatch, *flags(EXAMPLES)) == expected
    for text in (yaml.safe_dump(EXAMPLES), yaml.safe_dump({"calibration": EXAMPLES, "model": {"width": 3}})):
        (tmp_path / "options.yaml").write_text(text)
        found = by_command_line(monkeypatch, "--config", str(tmp_path / "options.yaml"), "--world-size", "8")
        assert found == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_option_alone_is_the_same_everywhere(name: str, monkeypatch: pytest.MonkeyPatch):
    values = {"world_size": 1, "cache": "here", name: EXAMPLES[name]}
    expected = CalibrationOptions(**values)
    assert options_from(values) == options_from(CalibrationConfig(**values)) == expected
    assert by_command_line(monkeypatch, *flags(values)) == expected


def test_the_command_line_comes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "options.yaml").write_text("memory_fraction: 0.5\nmax_batch_size: 3\n")
    found = by_command_line(monkeypatch, "--config", str(tmp_path / "options.yaml"), "--memory-fraction", "0.7")
    assert (found.memory_fraction, found.max_batch_size) == (0.7, 3)


def test_the_command_line_keeps_profiles_where_the_group_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("OOMFIT_CACHE_DIR", str(tmp_path))
    assert by_command_line(monkeypatch).cache == str(tmp_path)
    assert by_command_line(monkeypatch, "--cache", "sizes.yaml").cache == "sizes.yaml"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"memory_fractoin": 0.9}, "'memory_fractoin' is no option of a calibration; did you mean 'memory_fraction'?"),
        ({"zzz": 1}, "'zzz' is no option of a calibration; there are memory_fraction, memory_limit"),
        ({"memory_fraction": "much"}, "memory_fraction must be a number, it is 'much'"),
        ({"memory_fraction": None}, "memory_fraction must be a number, it is None"),
        ({"memory_fraction": 1.5}, "memory_fraction must lie above 0 and at most at 1, it is 1.5"),
        ({"max_batch_size": 2.5}, "max_batch_size must be a whole number or null, it is 2.5"),
        ({"num_sample_cuts": True}, "num_sample_cuts must be a whole number, it is True"),
        ({"verify_on_load": "yes"}, "verify_on_load must be true or false, it is 'yes'"),
        ({"mode": "quick"}, "mode must be 'verify' or 'fast', it is 'quick'"),
        ({"objective": "speed"}, "objective must be 'memory' or 'throughput', it is 'speed'"),
        ({"throughput_share": 1}, "throughput_share must be at least 0 and below 1, it is 1.0; pass for instance 0.02"),
        ({"recalibrate": "never"}, "recalibrate must be 'auto' or 'always', it is 'never'"),
        ([1], "the options of a calibration must be a mapping"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, (dict, list)) else "",
)
def test_what_is_wrong_is_named(values: Any, message: str):
    with pytest.raises(InvalidArgumentError) as error:
        options_from(values)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("reserve", ["lots", 0, -1, True, 1.5], "must be bytes or a text such as '600MiB' or '2GB', or None, it is "),
        ("memory_limit", ["x", 0, False, 2.0], "must be bytes or a text such as '600MiB' or '2GB', or None, it is "),
        ("cache", [3, True, 0, ""], "must be a directory, a path ending in .yaml, None (the user's cache) or False"),
        ("verify_on_load", ["yes", 1, None], "must be true or false, it is "),
        ("progress", ["no", 0], "must be true, false or None, it is "),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_a_value_that_no_calibration_could_use_is_refused_when_options_are_made(
    name: str, values: list[Any], message: str
):
    for value in values:
        with pytest.raises(InvalidArgumentError) as error:
            CalibrationOptions(**{name: value})
        assert str(error.value).startswith(f"{name} {message}")
        assert str(error.value).endswith(repr(value))


@pytest.mark.parametrize("value", [None, 10**9, "600MiB", "1.5 GiB", "2GB"])
def test_amounts_of_memory_are_taken_as_before(value: Any):
    assert CalibrationOptions(memory_limit=value, reserve=value).reserve == value


@pytest.mark.parametrize("value", [None, False, "here", "sizes.yaml", Path("here")])
def test_places_for_profiles_are_taken_as_before(value: Any):
    assert CalibrationOptions(cache=value).cache == value


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("modes", "'modes' is no option of a calibration; did you mean 'mode'?"),
        ("schedulers", "'schedulers' is no option of a calibration; did you mean 'scheduler'?"),
        ("zzz", "'zzz' is no option of a calibration; there are memory_fraction, memory_limit"),
    ],
)
def test_calibrate_names_the_option_that_may_have_been_meant(name: str, message: str):
    with pytest.raises(InvalidArgumentError) as error:
        calibrate(None, None, model=None, optimizer=None, training_step=None, **{name: "fast"})  # type: ignore[call-overload]
    assert str(error.value).startswith(message)


def test_calibrate_s_documentation_lists_every_option():
    documented = set(re.findall(r"\w+", inspect.getdoc(calibrate) or ""))
    assert DEFAULTS.keys() <= documented | set(inspect.signature(calibrate).parameters)


def test_the_options_need_no_torch():
    code = "import sys; import lhotse_oomfit.options; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_options_are_keyword_arguments_of_calibrate_too():
    options = options_from(EXAMPLES)
    assert CalibrationOptions(**vars(options)) == options


def test_texts_of_the_command_line_become_values_of_the_option_s_type():
    assert parse_option("memory_limit", "600MiB") == "600MiB"
    assert parse_option("memory_limit", "600") == 600
    assert parse_option("memory_limit", "null") is None
    assert parse_option("cache", "false") is False
    assert parse_option("cache", "null") is None
    assert parse_option("memory_fraction", "1") == 1.0
    with pytest.raises(InvalidArgumentError, match="max_batch_size must be a whole number or null, it is 'x'"):
        parse_option("max_batch_size", "x")


def test_omegaconf_takes_it_as_a_structured_config():
    omegaconf = pytest.importorskip("omegaconf")
    schema = omegaconf.OmegaConf.structured(CalibrationConfig)
    assert options_from(schema) == CalibrationOptions()
    file = omegaconf.OmegaConf.create(yaml.safe_dump(EXAMPLES))
    assert options_from(omegaconf.OmegaConf.merge(schema, file)) == CalibrationOptions(**EXAMPLES)
    words = [f"{name}={yaml.safe_dump(value).splitlines()[0]}" for name, value in EXAMPLES.items()]
    dotted = omegaconf.OmegaConf.merge(schema, omegaconf.OmegaConf.from_dotlist(words))
    assert options_from(dotted) == CalibrationOptions(**EXAMPLES)
    assert options_from(omegaconf.OmegaConf.to_object(dotted)) == CalibrationOptions(**EXAMPLES)
    schema.memory_fraction = 0.7
    assert options_from(schema).memory_fraction == 0.7


def test_omegaconf_refuses_unknown_keys_and_wrong_types():
    omegaconf = pytest.importorskip("omegaconf")
    schema = omegaconf.OmegaConf.structured(CalibrationConfig)
    with pytest.raises(omegaconf.errors.ConfigKeyError, match="memory_fractoin"):
        omegaconf.OmegaConf.merge(schema, {"memory_fractoin": 0.9})
    with pytest.raises(omegaconf.errors.ValidationError):
        omegaconf.OmegaConf.merge(schema, {"max_batch_size": "many"})


def test_an_interpolation_is_resolved_and_a_missing_value_is_an_error():
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"a": 0.6, "c": {"memory_fraction": "${a}"}, "d": {"memory_fraction": "???"}})
    assert options_from(config.c).memory_fraction == 0.6
    with pytest.raises(omegaconf.errors.MissingMandatoryValue):
        options_from(config.d)


def test_hydra_composes_it(tmp_path: Path):
    hydra = pytest.importorskip("hydra")
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="oomfit_schema", group="calibration", node=CalibrationConfig)
    defaults = "defaults:\n  - calibration: oomfit_schema\n  - _self_\n"
    (tmp_path / "main.yaml").write_text(defaults + "calibration:\n  memory_limit: 1GiB\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        config = hydra.compose("main", overrides=["calibration.memory_fraction=0.8", "calibration.cache=false"])
        assert options_from(config.calibration) == CalibrationOptions(
            memory_fraction=0.8, memory_limit="1GiB", cache=False
        )
        with pytest.raises(Exception, match="memory_fractoin"):
            hydra.compose("main", overrides=["calibration.memory_fractoin=0.8"])


def test_a_config_with_targets_is_made_innermost_first():
    node = {"_target_": "fractions.Fraction", "_args_": [{"_target_": "builtins.int", "_args_": ["3"]}, 4]}
    assert instantiate({"x": [node]})["x"][0] == __import__("fractions").Fraction(3, 4)


def test_what_only_hydra_understands_needs_hydra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "hydra.utils", None)
    with pytest.raises(InvalidArgumentError, match="_partial_ in a config needs Hydra; pip install hydra-core"):
        instantiate({"_target_": "builtins.int", "_partial_": True})


def test_a_profile_merges_into_a_train_ds_section(tmp_path: Path):
    omegaconf = pytest.importorskip("omegaconf")
    from synthetic_profiles import EDGES_2D, make_profile

    from lhotse_oomfit.store import ProfileStore

    path = ProfileStore(tmp_path / "p.yaml").save(make_profile(EDGES_2D, max_tps=25.0))
    train_ds = omegaconf.OmegaConf.create({"use_lhotse": True, "bucket_batch_size": None, "max_tps": None})
    merged = omegaconf.OmegaConf.merge(train_ds, omegaconf.OmegaConf.load(path))
    assert merged.use_lhotse is True
    assert merged.bucket_batch_size == [200, 200, 50, 50]
    assert omegaconf.OmegaConf.to_container(merged.bucket_duration_bins) == EDGES_2D
    assert (merged.max_tps, merged.bucketing_2d_strict_mode) == (25.0, True)
    assert merged.oomfit.format_version == 1
