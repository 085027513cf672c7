"""Each command runs as a process on real files; what needs hundreds of runs calls it in this process."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from synthetic_profiles import EDGES_2D, make_profile

from lhotse_oomfit import __version__
from lhotse_oomfit.cli import main
from lhotse_oomfit.store import ProfileStore

ROOT = Path(__file__).parent.parent
RUN = "from lhotse_oomfit.cli import main; main(prog_name='oomfit')"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileStore:
    monkeypatch.setenv("OOMFIT_CACHE_DIR", str(tmp_path / "cache"))
    return ProfileStore(None)


def oomfit(*arguments: str | Path, cwd: Path | None = None, columns: int = 80) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, encoding="utf-8")


def one_error(run: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line on standard error of a command that failed as it should."""
    assert run.returncode == code, run.stderr
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert line.startswith("oomfit: ")
    return line


def saved(path: Path, **changes: object) -> Path:
    edges = changes.pop("edges", None)
    assert ProfileStore(path).save(make_profile(edges, **changes)) == path  # type: ignore[arg-type]
    return path


def test_show_prints_the_table_of_a_file(tmp_path: Path, cache: ProfileStore) -> None:
    run = oomfit("show", saved(tmp_path / "a.yaml"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0] == f"{tmp_path / 'a.yaml'} (measured 2026-01-31T12:00:00Z)"
    assert "   4.5    88  859 MiB   90.1%" in run.stdout
    assert "measured on H200; --why prints what else must match" in run.stdout


def test_show_without_arguments_shows_the_latest_of_the_cache(cache: ProfileStore) -> None:
    cache.save(make_profile(sizes=[7, 7, 7], fields={"device": "A"}, created="2026-01-01T00:00:00Z"))
    cache.save(make_profile(sizes=[9, 9, 9], fields={"device": "B"}, created="2026-01-02T00:00:00Z"))
    assert json.loads(oomfit("show", "--json").stdout)["bucket_batch_size"] == [9, 9, 9]
    assert json.loads(oomfit("show", "latest", "--json").stdout)["bucket_batch_size"] == [9, 9, 9]


def test_show_takes_the_first_characters_of_a_name_in_the_cache(cache: ProfileStore) -> None:
    path = cache.save(make_profile())
    assert path is not None
    assert json.loads(oomfit("show", path.stem[:6], "--json").stdout)["path"] == str(path)


def test_show_why_prints_every_field_without_reading_brackets_as_markup(tmp_path: Path, cache: ProfileStore) -> None:
    path = saved(tmp_path / "a.yaml", fields={"device": "H200", "att": "[70, 13]", "flag": "[bold]x[/bold]"})
    run = oomfit("show", path, "--why")
    assert "Used again only where all of this is the same:" in run.stdout
    assert "[70, 13]" in run.stdout
    assert "[bold]x[/bold]" in run.stdout


def test_show_json_is_the_whole_file(tmp_path: Path, cache: ProfileStore) -> None:
    path = saved(tmp_path / "a.yaml")
    assert json.loads(oomfit("show", path, "--json").stdout) == {"path": str(path), **make_profile().as_dict()}


def test_list_shows_one_line_a_profile_and_says_what_cannot_be_read(cache: ProfileStore) -> None:
    cache.save(make_profile(fields={"device": "H200", "model": "Conformer"}))
    assert cache.directory is not None
    (cache.directory / "0123456789abcdef.yaml").write_text("a: [")
    run = oomfit("list")
    assert run.returncode == 0, run.stderr
    assert "2026-01-31 12:00" in run.stdout
    assert "Conformer, H200" in run.stdout
    assert "unreadable" in run.stdout
    listed = json.loads(oomfit("list", "--json").stdout)
    assert [entry["error"] is None for entry in listed] == [True, False]
    assert listed[0]["bucket_batch_size"] == [200, 88, 13]


def test_list_of_an_empty_cache_says_where_it_looked(cache: ProfileStore) -> None:
    run = oomfit("list")
    assert (run.returncode, run.stdout) == (0, f"no profiles in {cache.directory}\n")


def test_diff_shows_sizes_and_fields_side_by_side_and_exits_with_1(tmp_path: Path, cache: ProfileStore) -> None:
    a = saved(tmp_path / "a.yaml", fields={"device": "A100"})
    b = saved(tmp_path / "b.yaml", fields={"device": "H200"}, sizes=[400, 88, 10])
    run = oomfit("diff", a, b)
    assert run.returncode == 1, run.stderr
    assert "     2  200  400  +100.0%" in run.stdout
    assert "device" in run.stdout
    found = json.loads(oomfit("diff", a, b, "--json").stdout)
    assert found["same"] is False
    assert found["sizes"][2] == {"bucket": "<= 30", "a": 13, "b": 10}
    assert found["fingerprint"] == {"device": {"a": "A100", "b": "H200"}}


def test_diff_of_equal_profiles_exits_with_0(tmp_path: Path, cache: ProfileStore) -> None:
    run = oomfit("diff", saved(tmp_path / "a.yaml"), saved(tmp_path / "b.yaml", search_s=99.0))
    assert run.returncode == 0, run.stderr
    assert "measured for the same" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--format", "nemo"],
            [
                "model.train_ds.use_bucketing=true",
                "model.train_ds.bucket_duration_bins=[[2.0,10],[2.0,25],[8.0,40],[8.0,90]]",
                "model.train_ds.bucket_batch_size=[200,200,50,50]",
                "model.train_ds.bucketing_2d_strict_mode=true",
                "model.train_ds.max_tps=25.0",
            ],
        ),
        (
            ["--format", "hydra", "--prefix", "data"],
            [
                "++data.bucket_duration_bins=[[2.0,10],[2.0,25],[8.0,40],[8.0,90]]",
                "++data.bucket_batch_size=[200,200,50,50]",
                "++data.bucketing_2d_strict_mode=true",
                "++data.max_tps=25.0",
            ],
        ),
    ],
    ids=["nemo", "hydra"],
)
def test_export_prints_one_line_that_a_shell_splits_into_overrides(
    tmp_path: Path, cache: ProfileStore, arguments: list[str], words: list[str]
) -> None:
    run = oomfit("export", saved(tmp_path / "a.yaml", edges=EDGES_2D, max_tps=25.0), *arguments)
    assert run.stdout.count("\n") == 1
    assert shlex.split(run.stdout) == words


def test_exported_overrides_are_what_omegaconf_reads(tmp_path: Path, cache: ProfileStore) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    run = oomfit("export", saved(tmp_path / "a.yaml", edges=EDGES_2D))
    config = omegaconf.OmegaConf.from_dotlist(shlex.split(run.stdout))
    assert omegaconf.OmegaConf.to_container(config)["model"]["train_ds"]["bucket_duration_bins"] == EDGES_2D


def test_export_for_lhotse_is_python(tmp_path: Path, cache: ProfileStore) -> None:
    run = oomfit("export", saved(tmp_path / "a.yaml"), "--format", "lhotse")
    assert run.stdout == "duration_bins=[2.0, 4.5, 30.0], bucket_batch_size=[200, 88, 13]\n"


def test_export_json_is_one_line(tmp_path: Path, cache: ProfileStore) -> None:
    path = saved(tmp_path / "a.yaml")
    run = oomfit("export", path, "--json")
    assert run.stdout.count("\n") == 1
    assert json.loads(run.stdout) == make_profile().train_ds()
    assert oomfit("export", path, "--format", "json").stdout == run.stdout


def test_export_merges_neighbours_of_one_size_up_to_the_last_edge(tmp_path: Path, cache: ProfileStore) -> None:
    path = saved(tmp_path / "a.yaml", edges=[1.0, 2.0, 3.0, 4.0, 5.0], sizes=[9, 9, 5, 4, 4], max_tps=25.0)
    run = oomfit("export", path, "--merge", "--json")
    assert json.loads(run.stdout) == {
        "bucket_duration_bins": [2.0, 3.0, 5.0],
        "bucket_batch_size": [9, 5, 4],
        "max_tps": 25.0,
    }
    per_bucket = saved(tmp_path / "b.yaml", edges=[1.0, 2.0], sizes=[9, 9], max_tps=[20.0, 30.0])
    assert json.loads(oomfit("export", per_bucket, "--merge", "--json").stdout)["bucket_duration_bins"] == [1.0, 2.0]
    refused = oomfit("export", saved(tmp_path / "c.yaml", edges=EDGES_2D), "--merge")
    assert refused.returncode == 2
    assert "--merge is for 1D buckets, this profile's are 2D; leave it out" in refused.stderr


def test_a_prefix_that_would_do_nothing_is_refused(tmp_path: Path, cache: ProfileStore) -> None:
    run = oomfit("export", saved(tmp_path / "a.yaml"), "--format", "json", "--prefix", "x")
    assert run.returncode == 2
    assert "--prefix has no meaning with --format json; leave it out" in run.stderr


def test_clear_deletes_the_cache_after_asking(cache: ProfileStore) -> None:
    cache.save(make_profile())
    runner = CliRunner()
    assert runner.invoke(main, ["clear"], input="n\n").exit_code == 1
    assert len(cache.entries()) == 1
    run = oomfit("clear", "--yes")
    assert (run.returncode, run.stdout) == (0, "deleted 1 profile\n")
    assert cache.entries() == []
    assert json.loads(oomfit("clear", "--json", "--yes").stdout) == {"removed": []}


def test_clear_deletes_one_profile_and_leaves_the_others(cache: ProfileStore) -> None:
    path = cache.save(make_profile(fields={"device": "A"}))
    cache.save(make_profile(fields={"device": "B"}))
    assert path is not None
    assert json.loads(oomfit("clear", path.stem, "--yes", "--json").stdout) == {"removed": [str(path)]}
    assert [entry.profile for entry in cache.entries()] == [make_profile(fields={"device": "B"})]


def test_clear_that_cannot_ask_deletes_nothing(cache: ProfileStore) -> None:
    cache.save(make_profile())
    run = oomfit("clear", "--json")
    assert run.returncode == 2
    assert "--json can't ask before it deletes; pass --yes too" in run.stderr
    assert len(cache.entries()) == 1


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!doctype html>")])
def test_plot_writes_a_picture(tmp_path: Path, cache: ProfileStore, kind: str, start: bytes) -> None:
    pytest.importorskip("matplotlib")
    edges = EDGES_2D if kind == "svg" else None
    target = tmp_path / f"plot.{kind}"
    run = oomfit("plot", saved(tmp_path / "a.yaml", edges=edges), "-o", target, "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"written": str(target)}
    data = target.read_bytes()
    assert data.startswith(start)
    if kind == "svg":
        assert b"batch size" in data
        assert "≤40".encode() in data
        ElementTree.fromstring(data)
    if kind == "html":
        assert data.count(b"<svg") == 2
        assert b"prefers-color-scheme: dark" in data
        assert b"http-equiv" not in data
        assert b"<script" not in data


def test_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, cache: ProfileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "lhotse_oomfit.plots", raising=False)
    result = CliRunner().invoke(main, ["plot", str(saved(tmp_path / "a.yaml")), "-o", str(tmp_path / "a.png")])
    assert result.exit_code == 5
    assert result.stderr.startswith("oomfit: plot needs matplotlib, which isn't installed")
    assert result.stderr.endswith("pip install 'lhotse-oomfit[plot]'\n")


def test_plot_refuses_what_it_cannot_write(tmp_path: Path, cache: ProfileStore) -> None:
    pytest.importorskip("matplotlib")
    path = saved(tmp_path / "a.yaml")
    run = oomfit("plot", path, "-o", tmp_path / "plot.gif")
    assert run.returncode == 2
    assert "--output must end in .svg, .png or .html" in run.stderr
    run = oomfit("plot", path, "-o", tmp_path / "plot.png", "--style", "auto")
    assert run.returncode == 2
    assert "--style auto needs an .html output" in run.stderr
    assert "No such file or directory" in one_error(oomfit("plot", path, "-o", tmp_path / "none" / "a.svg"), 5)


def test_what_is_not_there_exits_with_3(tmp_path: Path, cache: ProfileStore) -> None:
    assert "there's no profile in" in one_error(oomfit("show"), 3)
    assert "there's no profile x.yaml; 'oomfit list'" in one_error(oomfit("show", "x.yaml", cwd=tmp_path), 3)
    assert "there's no profile beef, neither here nor in" in one_error(oomfit("show", "beef"), 3)
    assert f"{tmp_path} is a directory" in one_error(oomfit("export", tmp_path), 3)


BROKEN = {
    "empty": b"",
    "binary": bytes(range(256)) * 40,
    "zeros": b"\x00" * 100,
    "another version": make_profile().encode().replace("format_version: 1", "format_version: 7").encode(),
    "2^63": make_profile().encode().replace("size: 200", f"size: {2**63}").encode(),
    "NaN": make_profile().encode().replace("search_s: 12.5", "search_s: .nan").encode(),
    "repeated keys": make_profile().encode().replace("  num_ooms: 0\n", "  num_ooms: 0\n  num_ooms: 0\n").encode(),
    "50 MB": b"#" * 50_000_000,
    "billion laughs": b"a: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n",
    "edited": make_profile().encode().replace("200", "201").encode(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_gives_one_clear_line_and_exit_code_4(tmp_path: Path, cache: ProfileStore, name: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(BROKEN[name])
    line = one_error(oomfit("show", path), 4)
    assert line.startswith(f"oomfit: profile {path}")
    assert "Traceback" not in line


def test_a_file_cut_off_at_every_byte_is_never_used(tmp_path: Path, cache: ProfileStore) -> None:
    data = make_profile().encode().encode("utf-8")
    path = tmp_path / "cut.yaml"
    runner = CliRunner()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        result = runner.invoke(main, ["export", str(path)])
        assert result.exit_code == 4, end
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1


def test_help_names_the_commands_and_exit_codes_and_needs_no_cache() -> None:
    run = oomfit("--help")
    assert run.returncode == 0
    commands = ("show", "list", "diff", "export", "clear", "plot", "bins", "calibrate", "verify", "doctor")
    for word in (*commands, "Exit codes:"):
        assert word in run.stdout
    for command in commands:
        result = CliRunner().invoke(main, [command, "--help"])
        assert "Exit codes:" in result.stdout
        assert "--json" in result.stdout


def test_the_version_is_the_package_s() -> None:
    assert oomfit("--version").stdout == f"oomfit {__version__}\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    assert oomfit("calibrrate").returncode == 2


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, cache: ProfileStore, columns: int) -> None:
    fields = {"device": "NVIDIA H200, 139.8 GiB", "model.settings.ConformerEncoder.att_context_size": "[70, 13]"}
    a = saved(tmp_path / "a.yaml", edges=EDGES_2D, fields=fields)
    b = saved(tmp_path / "b.yaml", edges=EDGES_2D, fields={"device": "A100"})
    cache.save(make_profile(EDGES_2D, fields=fields))
    for arguments in (["show", a.name, "--why"], ["diff", a.name, b.name]):
        run = oomfit(*arguments, cwd=tmp_path, columns=columns)
        table = [line for line in run.stdout.splitlines() if "measured" not in line and "Used again" not in line]
        assert max(map(len, table)) <= columns
