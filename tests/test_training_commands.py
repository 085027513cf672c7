"""`oomfit calibrate`, `verify` and `doctor` on plain loops: each as a process once, the rest in this one."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from processes import results, run_ranks
from test_cli import one_error, oomfit
from tiny_asr import TinyDataset, TinyModel, tiny_sampler, training_step

from lhotse_oomfit.cli import main
from lhotse_oomfit.profile import Profile
from lhotse_oomfit.store import ProfileStore, read_profile

TESTS = Path(__file__).parent
JOB = """
import torch
from types import SimpleNamespace
from tiny_asr import TinyDataset, TinyModel, tiny_sampler, training_step

def make_training(duration_bins=(2.0, 4.0), width=24):
    torch.manual_seed(0)
    model = TinyModel(width)
    return {
        "sampler": tiny_sampler(duration_bins=list(duration_bins)),
        "dataset": TinyDataset(),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "training_step": training_step,
    }

def as_object():
    return SimpleNamespace(**make_training(), name="mine")

def misspelt():
    return {**make_training(), "optimiser": 1}

def incomplete():
    return {"model": make_training()["model"]}

def nothing():
    return None

def broken():
    return {}["key"]

def bad_step():
    def step(model, batch):
        raise RuntimeError("my own fault")
    return {**make_training(), "training_step": step}

not_a_function = 3
"""
LIMIT = ("--memory-limit", "16MiB", "--no-progress")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the jobs in it, as the working directory; its cache is in it too."""
    (tmp_path / "oomfit_job.py").write_text(JOB)
    (tmp_path / "tiny_asr.py").symlink_to(TESTS / "tiny_asr.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OOMFIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    logger = logging.getLogger("lhotse_oomfit")
    handlers, propagate, level = list(logger.handlers), logger.propagate, logger.level
    yield tmp_path
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
    logging.getLogger("lhotse_oomfit.fit").filters.clear()
    sys.modules.pop("oomfit_job", None)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def calibrated(*arguments: str) -> Profile:
    result = run("calibrate", *LIMIT, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return read_profile(json.loads(result.stdout)["path"])


def failed(code: int, *arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    line = result.stderr.splitlines()[-1]
    assert line.startswith("oomfit: ")
    return line


# As processes


def test_calibrate_then_verify_as_processes(here: Path) -> None:
    first = oomfit("calibrate", "oomfit_job:make_training", *LIMIT, cwd=here)
    assert first.returncode == 0, first.stderr
    assert "0 OOMs" in first.stdout
    assert "kept at " in first.stdout
    assert "calibrating: no profile yet at" in first.stderr
    again = oomfit("calibrate", "oomfit_job:make_training", *LIMIT, "--json", cwd=here)
    assert "loaded from" in again.stderr
    assert ": 0 trial steps" in again.stderr
    stored = json.loads(again.stdout)
    assert len(stored["bucket_batch_size"]) == 2
    verified = oomfit("verify", "latest", "oomfit_job:make_training", *LIMIT, cwd=here)
    assert verified.returncode == 0, verified.stderr
    assert [line.split()[0] for line in verified.stdout.splitlines()] == ["holds", "holds"]


def test_doctor_as_a_process(here: Path) -> None:
    run = oomfit("doctor", "--json", cwd=here)
    assert run.returncode in (0, 1), run.stderr
    assert run.stderr == ""
    assert json.loads(run.stdout)["hurts"] == (run.returncode == 1)


def test_a_target_that_is_not_there_gives_one_line_as_a_process(here: Path) -> None:
    line = one_error(oomfit("calibrate", "no_such_module:f", *LIMIT, cwd=here), 5)
    assert "there's no module 'no_such_module', neither installed nor in" in line


# calibrate


def test_a_profile_found_offline_is_a_hit_in_the_job(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    from lhotse_oomfit import calibrate

    stored = calibrated("oomfit_job:make_training")
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    logging.getLogger("lhotse_oomfit").propagate = True
    with caplog.at_level(logging.INFO, logger="lhotse_oomfit"):
        found = calibrate(
            tiny_sampler(duration_bins=[2.0, 4.0]),
            TinyDataset(),
            model=model,
            optimizer=optimizer,
            training_step=training_step,
            memory_limit="16MiB",
            progress=False,
        )
    assert found == stored
    assert ": 0 trial steps" in caplog.text


def rank_of_the_job(rank: int, cache: str) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    from lhotse_oomfit import calibrate

    torch.manual_seed(0)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    profile = calibrate(
        tiny_sampler(duration_bins=[2.0, 4.0]),
        TinyDataset(),
        model=DistributedDataParallel(model),
        optimizer=optimizer,
        training_step=training_step,
        memory_limit="16MiB",
        cache=cache,
        progress=False,
    )
    return {"created": profile.created, "sizes": profile.bucket_batch_size, "steps": len(model.seen)}


def test_a_profile_found_offline_with_ddp_is_a_hit_on_every_rank_of_the_job(here: Path) -> None:
    stored = calibrated("oomfit_job:make_training", "--ddp")
    found = results(run_ranks(rank_of_the_job, os.environ["OOMFIT_CACHE_DIR"]))
    assert found == [{"created": stored.created, "sizes": stored.bucket_batch_size, "steps": 0}] * 2


def test_ddp_counts_a_copy_of_the_gradients(here: Path) -> None:
    wide = ("oomfit_job:make_training", "--set", "width=256", "--bins", "[0.5]", "--memory-limit", "40MiB")
    alone, ddp = calibrated(*wide), calibrated(*wide, "--ddp")
    gradient_bytes = sum(4 * p.numel() for p in TinyModel(256).parameters())
    (a,), (b,) = alone.buckets, ddp.buckets
    assert a.peak_bytes is not None
    assert a.size - b.size >= 0.5 * gradient_bytes / (a.peak_bytes / a.size) > 0.5
    assert ddp.fingerprint.fields["strategy"] == "DistributedDataParallel"
    assert (alone.fingerprint.fields["ranks"], ddp.fingerprint.fields["ranks"]) == ("one", "several")


def test_world_size_decides_only_whether_there_are_several(here: Path) -> None:
    assert calibrated("oomfit_job:make_training", "--world-size", "2") == calibrated(
        "oomfit_job:make_training", "--world-size", "64"
    )
    one = calibrated("oomfit_job:make_training", "--ddp", "--world-size", "1")
    assert one.fingerprint.fields["ranks"] == "one"


def test_bins_and_settings_reach_the_function(here: Path) -> None:
    profile = calibrated("oomfit_job:make_training", "--bins", "[1.0, 2.0, 4.0]", "--set", "width=16")
    assert profile.bucket_duration_bins == [1.0, 2.0, 4.0]
    line = failed(5, "calibrate", "oomfit_job:as_object", "--bins", "[1.0]", *LIMIT)
    assert "oomfit_job:as_object takes no argument 'duration_bins'; add it, or leave out --bins" in line
    assert "--set must be name=value, it is 'x'" in run("calibrate", "oomfit_job:make_training", "--set", "x").stderr


def test_an_object_with_the_parts_will_do(here: Path) -> None:
    assert calibrated("oomfit_job:as_object") == calibrated("oomfit_job:make_training")


def test_the_profile_goes_where_cache_says(here: Path) -> None:
    profile = calibrated("oomfit_job:make_training", "--cache", "sizes.yaml")
    assert read_profile(here / "sizes.yaml") == profile
    result = run("calibrate", "oomfit_job:make_training", *LIMIT, "--cache", "false", "--json")
    assert json.loads(result.stdout)["path"] is None
    assert ProfileStore(None).entries() == []


def test_recalibrate_always_measures_again(here: Path) -> None:
    calibrated("oomfit_job:make_training")
    result = run("calibrate", "oomfit_job:make_training", *LIMIT, "--recalibrate", "always")
    assert "calibrating: asked to (recalibrate='always')" in result.stderr


def test_a_yaml_file_with_targets_is_a_training(here: Path) -> None:
    (here / "job.yaml").write_text(
        "base: [2.0, 4.0]\n"
        "training: {_target_: oomfit_job.make_training, duration_bins: '${base}', width: 16}\n"
        "calibration: {memory_limit: 16MiB, progress: false, max_batch_size: 7}\n"
    )
    result = run("calibrate", "job.yaml", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["bucket_batch_size"] == [7, 7]
    (here / "bad.yaml").write_text(
        "training: {_target_: oomfit_job.make_training}\ncalibration: {memory_fractoin: 1}\n"
    )
    assert "'memory_fractoin' is no option of a calibration" in failed(5, "calibrate", "bad.yaml")
    (here / "none.yaml").write_text("calibration: {}\n")
    assert "must have a training section with _target_, it has none" in failed(5, "calibrate", "none.yaml")
    (here / "binary.yaml").write_bytes(bytes(range(256)))
    assert "isn't YAML" in failed(5, "calibrate", "binary.yaml")
    assert "No such file" in failed(5, "calibrate", "nowhere.yaml")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("misspelt", "make_training returned 'optimiser', which means nothing here"),
        ("incomplete", "sampler, dataset, optimizer, training_step isn't there"),
        ("nothing", "it returned None"),
        ("broken", "oomfit_job:broken raised KeyError: 'key'"),
        ("bad_step", "oomfit_job:bad_step raised RuntimeError: my own fault"),
        ("not_a_function", "oomfit_job:not_a_function must be a function, it is 3"),
        ("missing", "oomfit_job has no 'missing'; check the name"),
    ],
)
def test_what_a_function_does_wrong_is_said_in_one_line(here: Path, name: str, message: str) -> None:
    assert message in failed(5, "calibrate", f"oomfit_job:{name}", *LIMIT)


def test_traceback_shows_how_an_error_came_about(here: Path) -> None:
    result = run("calibrate", "oomfit_job:broken", *LIMIT, "--traceback")
    assert 'return {}["key"]' in result.stderr


def test_what_cannot_be_calibrated_is_said_in_one_line(here: Path) -> None:
    assert "memory_limit must be given on a CPU" in failed(5, "calibrate", "oomfit_job:make_training")
    line = failed(5, "calibrate", "oomfit_job:make_training", "--memory-limit", "300KiB")
    assert "exceeds the budget of" in line or "leaves nothing of the budget" in line or "optimizer" in line
    assert "memory_fraction must be a number, it is 'x'" in failed(
        5, "calibrate", "oomfit_job:make_training", "--memory-fraction", "x"
    )


# verify


def test_verify_fails_where_a_size_no_longer_holds(here: Path) -> None:
    calibrated("oomfit_job:make_training", "--cache", "sizes.yaml")
    result = run("verify", "sizes.yaml", "oomfit_job:make_training", "--set", "width=96", *LIMIT, "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert found["holds"] is False
    assert any(not check["holds"] and "out of memory" in check["reason"] for check in found["checks"])
    assert "the profile was measured for something else, its sizes are tried all the same: " in result.stderr
    result = run("verify", "sizes.yaml", "oomfit_job:make_training", "--set", "width=96", *LIMIT, "-n", "1")
    assert result.stdout.startswith("FAILS  bucket ")
    assert "measure again: oomfit calibrate with --recalibrate always" in result.stdout


def test_verify_needs_a_usable_profile_for_the_same_bins(here: Path) -> None:
    calibrated("oomfit_job:make_training", "--cache", "sizes.yaml")
    arguments = ("oomfit_job:make_training", *LIMIT)
    assert "there's no profile nowhere.yaml" in failed(3, "verify", "nowhere.yaml", *arguments)
    (here / "broken.yaml").write_text("a: [")
    assert "isn't YAML" in failed(4, "verify", "broken.yaml", *arguments)
    assert "measured for the bins" in failed(4, "verify", "sizes.yaml", *arguments, "--bins", "[4.0]")
