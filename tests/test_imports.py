from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_profiles import make_profile

from lhotse_oomfit.store import ProfileStore

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "lhotse", "lightning", "nemo", "omegaconf", "scipy", "numpy")


def imported(code: str, cache: Path) -> set[str]:
    """Which of the heavy packages a fresh process has imported after running `code`."""
    report = f"\nimport sys; print('imported:', *(name for name in {HEAVY!r} if name in sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code + report],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OOMFIT_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(run.stdout.splitlines()[-1].removeprefix("imported:").split())


def command(arguments: list[str]) -> str:
    return f"from lhotse_oomfit.cli import main; main({arguments!r}, standalone_mode=False)"


def test_importing_the_package_imports_nothing_heavy(tmp_path: Path) -> None:
    assert imported("import lhotse_oomfit", tmp_path) == set()


def test_the_check_sees_an_import_that_should_not_be_there(tmp_path: Path) -> None:
    assert imported("import lhotse_oomfit; import numpy", tmp_path) == {"numpy"}


def test_the_check_sees_an_import_inside_a_command(tmp_path: Path) -> None:
    patch = "import lhotse_oomfit.report as report; report.summary = lambda p: str(__import__('numpy'))"
    ProfileStore(tmp_path).save(make_profile())
    assert imported(f"{patch}\n{command(['show'])}", tmp_path) == {"numpy"}


@pytest.mark.parametrize(
    "arguments", [["show"], ["list"], ["export", "latest"], ["diff", "latest", "latest"], ["clear", "--yes"]]
)
def test_light_commands_import_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    ProfileStore(tmp_path).save(make_profile())
    assert imported(command(arguments), tmp_path) == set()


def test_bins_from_manifests_need_nothing_heavy(tmp_path: Path) -> None:
    manifest = tmp_path / "a.json"
    manifest.write_text('{"audio_filepath": "a", "duration": 1.5, "text": "ab"}\n')
    assert imported(command(["bins", str(manifest), "-s", "2", "-t", "chars"]), tmp_path) == set()


@pytest.mark.parametrize(
    "module", ["bins", "fingerprint", "profile", "search", "store", "report", "errors", "cli", "config", "corpus"]
)
def test_light_modules_import_neither_torch_nor_lhotse(tmp_path: Path, module: str) -> None:
    assert imported(f"import lhotse_oomfit.{module}", tmp_path) & {"torch", "lhotse", "lightning", "omegaconf"} == set()
