"""Manifests as they lie on disk: NeMo's, Lhotse's, lists with weights; whole ones and broken ones."""

from __future__ import annotations

import gzip
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lhotse import CutSet
from synthetic_cuts import make_cut

from lhotse_oomfit.bins import Bins, estimate_bins
from lhotse_oomfit.corpus import Source, find_sources, load_tokenizer, read_source
from lhotse_oomfit.coverage import cover, rounded_up
from lhotse_oomfit.errors import InvalidArgumentError


def nemo(path: Path, durations: list[float], **more: Any) -> Path:
    lines = [{"audio_filepath": f"{d}.wav", "duration": d, "text": "ab" * int(d), **more} for d in durations]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(*paths: str | Path, **options: Any) -> list[Any]:
    return [example for source in find_sources([str(p) for p in paths]) for example in read_source(source, **options)]


def test_a_nemo_manifest(tmp_path: Path) -> None:
    examples = read(nemo(tmp_path / "a.json", [1.5, 2.0]))
    assert [(e.id, e.duration, e.supervisions[0].text) for e in examples] == [
        ("1.5.wav", 1.5, "ab"),
        ("2.0.wav", 2.0, "abab"),
    ]


def test_nemo_s_other_fields(tmp_path: Path) -> None:
    path = nemo(tmp_path / "a.json", [1.0], answer="xyz", tokens=[1, 2, 3])
    (example,) = read(path, text_field="answer")
    assert (example.supervisions[0].text, example.supervisions[0].tokens) == ("xyz", [1, 2, 3])
    assert read(nemo(tmp_path / "b.json", [1.0], _skipme=True)) == []


@pytest.mark.parametrize("name", ["cuts.jsonl", "cuts.jsonl.gz", "cuts.json"])
def test_lhotse_s_cuts_read_like_lhotse_reads_them(tmp_path: Path, name: str) -> None:
    cuts = [make_cut(tmp_path, i, duration=1.0 + i, num_supervisions=1 + i) for i in range(3)]
    cuts.append(cuts[0].append(cuts[1]).with_id("mixed"))
    cuts.append(make_cut(tmp_path, 7, num_channels=2))
    cuts[2].supervisions[0].custom = {"tokens": [4, 5]}
    path = tmp_path / name
    if name.endswith(".json"):
        path.write_text(json.dumps([cut.to_dict() for cut in cuts]))
    else:
        CutSet.from_cuts(cuts).to_file(path)
    examples = read(path)
    assert [e.id for e in examples] == [cut.id for cut in cuts]
    assert [e.duration for e in examples] == pytest.approx([cut.duration for cut in cuts])
    assert [[s.text for s in e.supervisions] for e in examples] == [[s.text for s in c.supervisions] for c in cuts]
    assert examples[2].supervisions[0].tokens == [4, 5]


def test_a_shar_directory_and_shards_in_a_path(tmp_path: Path) -> None:
    for n in range(3):
        CutSet.from_cuts([make_cut(tmp_path, n)]).to_file(tmp_path / f"cuts.{n:06d}.jsonl.gz")
        nemo(tmp_path / f"shard_{n}.json", [float(n + 1)])
    assert len(read(tmp_path)) == 3
    assert [e.duration for e in read(tmp_path / "shard__OP_0..2_CL_.json")] == [1.0, 2.0, 3.0]
    assert [e.duration for e in read(tmp_path / "shard_{1..2}.json")] == [2.0, 3.0]
    assert find_sources(["x{08..10}.json"])[0].paths == ("x08.json", "x09.json", "x10.json")


def test_weights_of_groups_are_shared_out_by_the_weights_inside(tmp_path: Path) -> None:
    config = tmp_path / "input_cfg.yaml"
    config.write_text(
        "- {type: nemo, manifest_filepath: a.json, weight: 1}\n"
        "- type: group\n  weight: 3\n  input_cfg:\n"
        "  - {type: lhotse, cuts_path: b.jsonl.gz, weight: 2}\n"
        "  - {type: nemo_tarred, manifest_filepath: 'c_{0..1}.json', tarred_audio_filepaths: x, weight: 4}\n"
    )
    assert find_sources([str(config)]) == [
        Source(paths=("a.json",), weight=0.25),
        Source(paths=("b.jsonl.gz",), weight=0.25),
        Source(paths=("c_0.json", "c_1.json"), weight=0.5),
    ]


def test_a_group_without_weights_inside_is_one_source(tmp_path: Path) -> None:
    (tmp_path / "inner.yaml").write_text("- {manifest_filepath: a.json}\n- {manifest_filepath: b.json}\n")
    config = tmp_path / "outer.yaml"
    config.write_text(
        f"model:\n  train_ds:\n    input_cfg:\n    - {{input_cfg: {tmp_path}/inner.yaml, weight: 1}}\n"
        "    - {shar_path: {cuts: [c.jsonl], recording: [r.tar]}, weight: 1}\n"
    )
    assert find_sources([str(config)]) == [
        Source(paths=("a.json", "b.json"), weight=0.5),
        Source(paths=("c.jsonl",), weight=0.5),
    ]


def test_nemo_s_lists_on_the_command_line() -> None:
    assert find_sources(["[[a.json,2.0],[b.json,1.0]]"]) == [
        Source(paths=("a.json",), weight=2.0),
        Source(paths=("b.json",), weight=1.0),
    ]
    assert find_sources(["[[a.json],[b.json]]"]) == [Source(paths=("a.json",)), Source(paths=("b.json",))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {manifest_filepath: a.json, weight: 1}\n- {manifest_filepath: b.json}", "must have a weight, or none"),
        ("- {type: txt, paths: a.txt}", "a source must have manifest_filepath, cuts_path, shar_path or input_cfg"),
        ("- {manifest_filepath: a.json, weight: -1}", "a weight must be a number of at least 0, it is -1"),
        ("- {manifest_filepath: a.json, weight: .nan}", "a weight must be a number of at least 0, it is nan"),
        ("- {manifest_filepath: '${oc.env:X}/a.json'}", "refers to another value; write the path itself"),
        ("- {manifest_filepath: a.json, weight: 0}", "the weights of a list must not all be 0"),
        ("just text", "must hold a list of sources"),
        ("a: [", "isn't YAML"),
        ("[]", "there is no manifest in it"),
        ("- {manifest_filepath: [[1, 2]]}", "a source must be a path, or a path and a weight, it is [1, 2]"),
    ],
)
def test_an_input_cfg_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "i.yaml").write_text(text)
    with pytest.raises(InvalidArgumentError) as error:
        find_sources([str(tmp_path / "i.yaml")])
    assert message in str(error.value)


def test_an_input_cfg_that_contains_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "i.yaml").write_text(f"- {{input_cfg: {tmp_path}/i.yaml}}\n")
    with pytest.raises(InvalidArgumentError, match="groups must be nested at most 16 deep"):
        find_sources([str(tmp_path / "i.yaml")])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"duration": 1}\n{"dur', "line 2: isn't JSON"),
        (
            b'{"audio_filepath": "x"}\n',
            "line 1: must be an entry of a NeMo manifest or a Lhotse cut: has no",
        ),
        (b'{"duration": "1"}\n', "its duration must be a number of seconds, it is '1'"),
        (b'{"duration": NaN}\n', "its duration must be a number of seconds, it is nan"),
        (b'{"duration": -1}\n', "its duration must be a number of seconds, it is -1"),
        (b"[1, 2]", "line 1: must be an entry"),
        (b"3\n", "it is '3'"),
        (b"\xff\xfe\n", "isn't JSON"),
        (b'{"id": "r", "sources": [], "num_samples": 3}\n', "it is a recording or a supervision; make cuts of them"),
        (b'{"type": "MonoCut", "id": "x"}\n', "has no 'duration'"),
        (b'{"type": "MixedCut", "id": "x", "tracks": [3]}\n', "line 1: must be an entry"),
    ],
)
def test_a_broken_manifest_names_file_and_line(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(data)
    with pytest.raises(InvalidArgumentError) as error:
        read(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_a_cut_off_gzip_file_is_named(tmp_path: Path) -> None:
    data = gzip.compress(b'{"duration": 1.0}\n' * 1000)
    for end in (5, len(data) // 2, len(data) - 3):
        (tmp_path / "m.json.gz").write_bytes(data[:end])
        with pytest.raises(InvalidArgumentError, match=r"isn't a whole gzip file|isn't JSON"):
            read(tmp_path / "m.json.gz")


def test_tokenizers_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert [len(load_tokenizer(name)("ab é")) for name in ("chars", "bytes", "words")] == [4, 5, 2]
    assert load_tokenizer("textwrap:wrap")("a b") == ["a b"]
    fake = types.ModuleType("sentencepiece")
    fake.SentencePieceProcessor = lambda model_file: types.SimpleNamespace(encode=lambda text: [1] * len(text))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentencepiece", fake)
    (tmp_path / "t.model").touch()
    assert load_tokenizer(str(tmp_path / "t.model"))("abc") == [1, 1, 1]
    with pytest.raises(InvalidArgumentError, match="there's no such file"):
        load_tokenizer("none.model")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(InvalidArgumentError, match="needs sentencepiece; pip install sentencepiece"):
        load_tokenizer("t.model")
    with pytest.raises(InvalidArgumentError, match="must be chars, bytes, words"):
        load_tokenizer("bpe")


lengths = st.floats(0.01, 100.0)


@given(st.floats(0.0, 1e6), st.sampled_from([2, 3]))
def test_rounding_up_never_goes_down_nor_far(value: float, digits: int) -> None:
    rounded = rounded_up(value, digits)
    assert value <= rounded <= value + 1.0001 * 10.0**-digits
    assert rounded_up(rounded, digits) == rounded


@given(st.lists(st.tuples(lengths, st.integers(0, 500)), min_size=1, max_size=40), st.booleans())
def test_bins_of_rounded_lengths_hold_every_example(examples: list[tuple[float, int]], two: bool) -> None:
    bins = estimate_bins(
        examples,
        5,
        num_subbuckets=3 if two else None,
        measure_length=lambda e: rounded_up(e[0], 3),
        measure_tokens=lambda e: e[1],
    )
    coverage = cover(bins, [examples])
    assert (coverage.num_examples, coverage.left_out) == (len(examples), {})
    assert math.isclose(sum(bucket.share for bucket in coverage.buckets), 1.0)
    assert all(0.0 <= bucket.padding <= 1.0 for bucket in coverage.buckets)


@given(st.lists(lengths, min_size=1, max_size=20), st.integers(1, 30))
def test_a_suggested_limit_keeps_examples_of_one_density(durations: list[float], density: int) -> None:
    examples = [(d, density * d) for d in durations]
    bins = estimate_bins(examples, 3, measure_length=lambda e: e[0], measure_tokens=lambda e: e[1], max_tps="suggest")
    assert cover(bins, [examples]).left_out == {}


def test_padding_and_shares_by_hand() -> None:
    bins = Bins.from_edges([2.0, 4.0])
    coverage = cover(bins, [[(1.0, None), (2.0, None), (3.0, None)], [(4.0, None), (9.0, None)]], [0.75, 0.25])
    first, second = coverage.buckets
    assert (first.num_examples, second.num_examples, coverage.left_out) == (2, 2, {"too long": 1})
    assert first.padding == pytest.approx(1 - (0.25 + 0.5) / 1.0)
    assert second.padding == pytest.approx(1 - (0.75 + 0.5) / (1.0 + 0.5))
    assert first.length_share == pytest.approx(0.75 / 2.0)
