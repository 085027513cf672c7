"""`oomfit bins` as a process, on manifests on disk."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_cli import one_error, oomfit
from test_corpus import nemo

from lhotse_oomfit.bins import Bins
from lhotse_oomfit.cli import main

DURATIONS = [0.5 + 0.25 * i for i in range(40)]


def found(*arguments: str | Path) -> dict:
    result = CliRunner().invoke(main, ["bins", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_bins_prints_a_histogram_and_a_line_to_paste(tmp_path: Path) -> None:
    run = oomfit("bins", nemo(tmp_path / "a.json", DURATIONS), "--buckets", "4")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert "up to  examples  of input  padding" in run.stdout
    assert "█" in run.stdout
    assert "40 examples, 0.1 h" in lines
    assert any(line.startswith("padding of full batches: at most ") for line in lines)
    words = shlex.split(lines[-1])
    assert words[0] == "model.train_ds.use_bucketing=true"
    edges = json.loads(words[1].removeprefix("model.train_ds.bucket_duration_bins="))
    assert len(edges) == 4
    assert edges[-1] == max(DURATIONS)  # the longest example belongs to the last bucket


def test_quiet_prints_nothing_but_the_line(tmp_path: Path) -> None:
    path = nemo(tmp_path / "a.json", DURATIONS)
    run = oomfit("bins", path, "-b", "2", "-q", "--format", "lhotse")
    assert run.stdout.count("\n") == 1
    assert run.stdout.startswith("duration_bins=[")
    hydra = oomfit("bins", path, "-b", "2", "-q", "--format", "hydra", "--prefix", "data")
    assert hydra.stdout.startswith("'++data.bucket_duration_bins=[")


def test_two_dimensions_with_a_tokenizer_and_a_suggested_limit(tmp_path: Path) -> None:
    path = nemo(tmp_path / "a.json", DURATIONS)
    run = oomfit("bins", path, "-b", "3", "-s", "2", "-t", "chars", "--max-tps", "suggest", "--json")
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    bins = Bins.from_edges(result["bucket_duration_bins"], max_tps=result["max_tps"])
    assert bins.is_2d
    assert len(bins) == len(result["buckets"]) <= 6
    assert result["bucketing_2d_strict_mode"] is True
    assert result["num_examples"] + sum(result["left_out"].values()) == len(DURATIONS)
    assert 0.0 <= result["token_padding"] < 1.0


def test_weights_decide_what_the_bins_are_made_for(tmp_path: Path) -> None:
    short, long = nemo(tmp_path / "short.json", [1.0, 2.0] * 50), nemo(tmp_path / "long.json", [9.0, 10.0])
    edges = {}
    for weights in ((1.0, 0.0), (1.0, 1.0), (0.001, 1.0)):
        config = tmp_path / "i.yaml"
        config.write_text(
            f"- {{type: nemo, manifest_filepath: {short}, weight: {weights[0]}}}\n"
            f"- {{type: nemo, manifest_filepath: {long}, weight: {weights[1]}}}\n"
        )
        edges[weights] = found(config, "-b", "2")["bucket_duration_bins"]
    assert edges[1.0, 0.0] == [2.0] or edges[1.0, 0.0] == [1.0, 2.0]
    assert edges[1.0, 1.0][-1] == 10.0
    assert edges[0.001, 1.0] == [9.0, 10.0] or edges[0.001, 1.0] == [10.0]


def test_without_weights_each_example_counts_once(tmp_path: Path) -> None:
    a, b = nemo(tmp_path / "a.json", DURATIONS[:30]), nemo(tmp_path / "b.json", DURATIONS[30:])
    whole = found(nemo(tmp_path / "c.json", DURATIONS), "-b", "5")["bucket_duration_bins"]
    assert found(a, b, "-b", "5")["bucket_duration_bins"] == whole
    assert found(f"[[{a}],[{b}]]", "-b", "5")["bucket_duration_bins"] == whole


def test_what_is_left_out_is_counted_by_reason(tmp_path: Path) -> None:
    path = nemo(tmp_path / "a.json", DURATIONS)
    result = found(path, "-b", "2", "-l", "1.0", "-u", "5.0")
    assert result["left_out"] == {"too long": sum(d > 5 for d in DURATIONS), "too short": sum(d < 1 for d in DURATIONS)}
    assert found(path, "-b", "2", "-n", "7")["num_examples"] == 7
    dense = found(path, "-b", "2", "-t", "chars", "--max-tps", "1.5")
    assert dense["left_out"]["too dense"] > 0
    run = oomfit("bins", path, "-b", "2", "-u", "5")
    assert "left out: 21 too long" in run.stdout


def test_texts_without_a_tokenizer_are_an_error_that_names_the_option(tmp_path: Path) -> None:
    path = nemo(tmp_path / "a.json", DURATIONS)
    line = one_error(oomfit("bins", path, "-s", "2"), 5)
    assert "it has only text; pass --tokenizer" in line
    assert "0.5.wav" not in line or "example" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lenient"], "--lenient is for 2D bins"),
        (["-t", "chars"], "--tokenizer has no say in 1D bins"),
        (["--prefix", "x", "--format", "json"], "--prefix has no meaning with --format json"),
        (["-b", "0"], "0 is not in the range"),
    ],
)
def test_options_that_would_do_nothing_are_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["bins", str(nemo(tmp_path / "a.json", DURATIONS)), *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_broken_input_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "empty.json").write_text("")
    for name, message in (
        ("broken.json", "isn't JSON"),
        ("empty.json", "at least one example"),
        ("none.json", "No such file or directory"),
        ("none.yaml", "No such file or directory"),
    ):
        assert message in one_error(oomfit("bins", tmp_path / name), 5)
    line = one_error(oomfit("bins", nemo(tmp_path / "a.json", DURATIONS), "-t", "chars", "--max-tps", "x"), 5)
    assert "--max-tps must be tokens a second above 0, or 'suggest', it is 'x'" in line
