from __future__ import annotations

import pickle
import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_profiles import EDGES_1D, EDGES_2D, make_profile

from lhotse_oomfit.bins import Bins
from lhotse_oomfit.errors import InvalidArgumentError, ProfileError
from lhotse_oomfit.fingerprint import Fingerprint
from lhotse_oomfit.profile import BucketProfile, Profile, format_bytes, parse, parse_bytes, utc_now

numbers = st.floats(min_value=0.0, max_value=1e300, allow_nan=False)
positive = st.floats(min_value=1e-6, max_value=1e6, allow_nan=False)
counts = st.integers(min_value=0, max_value=2**63 - 1)
lines = (
    st.text(st.characters(categories=("L", "M", "N", "P", "S")), max_size=40)
    .filter(lambda text: text != "???")
    .map(lambda text: text.replace("${", ""))
)


@st.composite
def all_bins(draw: st.DrawFn) -> Bins:
    lengths = sorted(draw(st.lists(positive, min_size=1, max_size=5, unique=True)))
    edges: list[object] = list(lengths)
    if draw(st.booleans()):
        tokens = sorted(draw(st.lists(st.integers(1, 5000), min_size=1, max_size=3, unique=True)))
        edges = [[length, count] for length in lengths for count in tokens]
    limit = (
        st.none() | st.floats(1.0, 100.0) | st.lists(st.floats(1.0, 100.0), min_size=len(edges), max_size=len(edges))
    )
    return Bins.from_edges(edges, strict_2d=draw(st.booleans()), max_tps=draw(limit))


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    bins = draw(all_bins())
    bucket = st.builds(
        BucketProfile,
        size=st.integers(1, 2**31 - 1),
        input_len=positive,
        output_len=st.none() | counts,
        verified=st.booleans(),
        peak_bytes=st.none() | counts,
        step_s=st.none() | positive,
        num_trials=counts,
        num_ooms=counts,
    )
    return Profile(
        bins=bins,
        buckets=tuple(draw(st.lists(bucket, min_size=len(bins), max_size=len(bins)))),
        budget_bytes=draw(counts),
        fingerprint=Fingerprint(fields=draw(st.dictionaries(st.text(max_size=30), st.text(max_size=60), max_size=6))),
        num_trials=draw(counts),
        num_soak_steps=draw(counts),
        num_ooms=draw(counts),
        num_retries=draw(counts),
        search_s=draw(numbers),
        memory_fraction=draw(st.floats(min_value=0.0, max_value=1.0, exclude_min=True)),
        mode=draw(st.sampled_from(["verify", "fast"])),
        objective=draw(st.sampled_from(["memory", "throughput"])),
        allocator=draw(lines),
        created="2026-01-31T12:00:00+00:00",
        versions=draw(st.dictionaries(lines, lines, max_size=3)),
    )


@given(profiles())
@settings(max_examples=200, deadline=None)
def test_parsing_what_was_encoded_gives_the_same_profile(profile: Profile) -> None:
    assert parse(profile.encode()) == profile


@given(profiles(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_file_cut_off_anywhere_is_never_used(profile: Profile, data: st.DataObject) -> None:
    text = profile.encode()
    end = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(ProfileError):
        parse(text[:end])


@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda data: data.decode("latin-1")))
@settings(max_examples=200, deadline=None)
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ProfileError) as caught:
        parse(text, path="x.yaml")
    assert str(caught.value).startswith("profile x.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("edges", [EDGES_1D, EDGES_2D], ids=["1D", "2D"])
def test_a_small_file_cut_off_at_every_character_is_refused_in_one_line(edges: list[object]) -> None:
    text = make_profile(edges, max_tps=25.0).encode()
    for end in range(len(text)):
        with pytest.raises(ProfileError) as caught:
            parse(text[:end])
        assert "\n" not in str(caught.value)


def test_the_top_of_a_1d_file_is_a_train_ds_fragment() -> None:
    document = yaml.safe_load(make_profile(max_tps=25.0).encode())
    assert list(document) == ["bucket_duration_bins", "bucket_batch_size", "max_tps", "oomfit"]
    assert document["bucket_duration_bins"] == EDGES_1D
    assert document["bucket_batch_size"] == [200, 88, 13]
    assert document["max_tps"] == 25.0


def test_the_top_of_a_2d_file_keeps_the_mode_and_limits_that_differ() -> None:
    profile = make_profile(EDGES_2D, strict_2d=False, max_tps=[10.0, 20.0, 20.0, 20.0], min_tps=1.0)
    document = yaml.safe_load(profile.encode())
    assert document["bucketing_2d_strict_mode"] is False
    assert document["max_tps"] == [10.0, 20.0, 20.0, 20.0]
    assert document["min_tps"] == 1.0
    assert parse(profile.encode()) == profile


def test_a_file_holds_what_follows_from_its_numbers() -> None:
    bucket = yaml.safe_load(make_profile().encode())["oomfit"]["buckets"][0]
    assert bucket["share"] == 0.9
    assert bucket["input_s_per_s"] == 200 * 2.0 / 0.25


def test_omegaconf_merges_a_profile_and_what_it_saves_is_still_a_profile() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    profile = make_profile(EDGES_2D, fields={"model.cfg": "a ${b.c} in it", "missing": "???", "list": "[1, 2]"})
    loaded = omegaconf.OmegaConf.create(profile.encode())
    train_ds = omegaconf.OmegaConf.create({"use_bucketing": True, "bucket_batch_size": None})
    merged = omegaconf.OmegaConf.merge(train_ds, loaded)
    plain = omegaconf.OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    assert plain["bucket_batch_size"] == profile.bucket_batch_size
    assert parse(omegaconf.OmegaConf.to_yaml(loaded)) == profile


def test_another_layout_with_comments_and_other_order_is_the_same_profile() -> None:
    profile = make_profile()
    assert parse("# mine\n" + yaml.safe_dump(yaml.safe_load(profile.encode()), sort_keys=True)) == profile


def test_a_profile_can_be_pickled_and_hashed() -> None:
    profile = make_profile()
    again = pickle.loads(pickle.dumps(profile))
    assert again == profile
    assert hash(again) == hash(profile)


def replaced(old: str, new: str) -> str:
    text = make_profile().encode()
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "must be a YAML mapping, the file is empty", id="empty"),
        pytest.param("[1, 2]\n", "line 1: must be a YAML mapping, is a list", id="a list"),
        pytest.param("a: 1\n", "the file must have 'oomfit', has none", id="something else"),
        pytest.param("oomfit: 3\n", "line 1: oomfit must be a mapping, is 3", id="not a section"),
        pytest.param("\x00\x01\n", "isn't YAML", id="control characters"),
        pytest.param("a: 'b\n", "line 2: isn't YAML: found unexpected end of stream", id="open quote"),
        pytest.param("a: 1\na: 2\n", "line 2: key 'a' appears twice", id="repeated key"),
        pytest.param("a: &x 1\nb: *x\n", "line 1: YAML anchors and aliases are refused", id="anchor"),
        pytest.param("a: *x\n", "line 1: YAML anchors and aliases are refused", id="alias"),
        pytest.param("a: !!python/name:os.system x\n", "line 1: YAML tags are refused", id="python tag"),
        pytest.param("a: !!str 5\n", "line 1: YAML tags are refused", id="plain tag"),
        pytest.param("a: 1\n---\nb: 2\n", "line 2: must hold one document, here starts another", id="two documents"),
        pytest.param("[" * 9 + "]" * 9 + "\n", "must be nested at most 8 deep", id="deep lists"),
        pytest.param("[" * 5000 + "\n", "nest", id="deeper lists than libyaml takes"),
        pytest.param("[a]: 1\n", "line 1: a key must be a string, is a collection", id="a list as key"),
        pytest.param("a: .nan\n", "line 1: a number must be finite, is .nan", id="nan"),
        pytest.param("a: -.INF\n", "line 1: a number must be finite, is -.INF", id="infinity"),
        pytest.param("a: 1.0e+999\n", "line 1: a number must be finite, is 1.0e+999", id="overflow"),
        pytest.param(f"a: {2**63}\n", f"line 1: a whole number must be below 2^63, is {2**63}", id="2^63"),
        pytest.param("x" * 1_000_001, "must be at most 1000000 characters, has 1000001", id="too long"),
        pytest.param(
            replaced("format_version: 1", "format_version: 2"),
            "oomfit.format_version is 2, this lhotse-oomfit reads 1; install the version that wrote it",
            id="newer version",
        ),
        pytest.param(replaced("size: 200", "size: 201"), "damaged or edited by hand", id="edited by hand"),
        pytest.param(
            re.sub(r"  checksum: .*\n", "", make_profile().encode()),
            "oomfit must have 'checksum', has none (the file was cut off)",
            id="cut off at a line",
        ),
        pytest.param(make_profile().encode().rstrip("\n"), "the last line has no end", id="cut off by one"),
    ],
)
@pytest.mark.parametrize("loader", ["with libyaml", "without"])
def test_a_broken_file_is_refused_with_line_and_reason(
    text: str, message: str, loader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loader == "without":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    with pytest.raises(ProfileError, match=re.escape(message)) as caught:
        parse(text, path="some/profile.yaml")
    assert str(caught.value).startswith("profile some/profile.yaml")
    assert str(caught.value).count("some/profile.yaml") == 1
    assert str(caught.value).count("recalibrate='always'") == 1
    assert "\n" not in str(caught.value)


def resealed(**changes: object) -> str:
    """A file whose checksum is right and whose content is wrong."""
    from lhotse_oomfit.profile import _checksum

    document = make_profile().as_dict()
    for name, value in changes.items():
        holder = document["oomfit"]["buckets"][1] if name.startswith("bucket__") else document
        holder = document["oomfit"] if name.startswith("oomfit__") else holder
        holder[name.removeprefix("bucket__").removeprefix("oomfit__")] = value
    document["oomfit"]["checksum"] = _checksum(document)
    return yaml.safe_dump(document, sort_keys=False)


@pytest.mark.parametrize("name", ["mode", "objective"])
def test_a_file_of_an_older_version_is_to_be_measured_again(name: str) -> None:
    from lhotse_oomfit.profile import _checksum

    document = make_profile().as_dict()
    del document["oomfit"][name]
    document["oomfit"]["checksum"] = _checksum(document)
    message = f"oomfit must have {name!r}, has none (an older lhotse-oomfit wrote it)"
    with pytest.raises(ProfileError, match=re.escape(message)) as caught:
        parse(yaml.safe_dump(document, sort_keys=False))
    assert "measure again with recalibrate='always'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            resealed(bucket_batch_size=[1, 2]),
            "bucket_duration_bins, bucket_batch_size and oomfit.buckets must be of one length, are of 3, 2 and 3",
            id="unequal lengths",
        ),
        pytest.param(
            resealed(bucket_batch_size=[200, 88, 14]), "bucket_batch_size must repeat the sizes", id="other sizes"
        ),
        pytest.param(resealed(bucket_duration_bins=[3.0, 2.0, 4.0]), "don't describe buckets", id="unsorted bins"),
        pytest.param(resealed(bucket_duration_bins=[1.0, "x", 4.0]), "don't describe buckets", id="text as bin"),
        pytest.param(resealed(mystery=1), "the file has an unknown key 'mystery'", id="unknown key at the top"),
        pytest.param(resealed(oomfit__mystery=1), "oomfit has an unknown key 'mystery'", id="unknown key"),
        pytest.param(
            resealed(bucket__size=0),
            "oomfit.buckets[1].size must be a whole number from 1 to 2147483647, is 0",
            id="zero",
        ),
        pytest.param(resealed(bucket__size=2**40), "oomfit.buckets[1].size must be a whole number from 1", id="huge"),
        pytest.param(resealed(bucket__size=True), "oomfit.buckets[1].size must be a whole number, is True", id="bool"),
        pytest.param(
            resealed(bucket__size=7.0), "oomfit.buckets[1].size must be a whole number, is 7.0", id="float size"
        ),
        pytest.param(
            resealed(bucket__verified="yes"), "oomfit.buckets[1].verified must be true or false, is 'yes'", id="text"
        ),
        pytest.param(resealed(bucket__share=0.5), "share or input_s_per_s differ", id="a share that doesn't follow"),
        pytest.param(resealed(oomfit__memory_fraction=1.5), "oomfit.memory_fraction must be a finite number", id="1.5"),
        pytest.param(
            resealed(oomfit__budget_bytes=None), "oomfit.budget_bytes must be a whole number, is null", id="null"
        ),
        pytest.param(resealed(oomfit__mode="quick"), "oomfit.mode must be verify or fast, is 'quick'", id="mode"),
        pytest.param(resealed(oomfit__objective=1), "oomfit.objective must be text, is 1", id="objective"),
        pytest.param(resealed(oomfit__created="today"), "oomfit.created must be a UTC time", id="date"),
        pytest.param(
            resealed(oomfit__fingerprint={"torch": 2.11}), "oomfit.fingerprint.torch must be text", id="number"
        ),
    ],
)
def test_a_file_whose_content_makes_no_sense_is_refused_with_line_and_reason(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(message)) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_a_billion_laughs_is_refused_at_its_first_anchor() -> None:
    text = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True):
        text += f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    with pytest.raises(ProfileError, match="line 1: YAML anchors and aliases are refused"):
        parse(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_bytes": -1}, "budget_bytes must be a whole number from 0"),
        ({"search_s": float("nan")}, "search_s must be a finite number at least 0, is nan"),
        ({"memory_fraction": 0.0}, "memory_fraction must be a finite number above 0 and at most 1, is 0.0"),
        ({"created": "2026-01-31T12:00:00+02:00"}, "created must be a UTC time like 2026-01-31T12:00:00Z"),
        ({"allocator": "two\nlines"}, "allocator must be one line of printable text"),
        ({"versions": {"torch": 2}}, "versions['torch'] must be one line of printable text, is 2"),
        ({"sizes": [4, 2]}, "a profile must have one batch size a bucket, has 2 for 3 buckets"),
        ({"sizes": [4, 2, 0]}, "size must be a whole number from 1 to 2147483647, is 0"),
    ],
)
def test_a_profile_with_a_value_out_of_range_cannot_be_made(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ProfileError, match=re.escape(message)):
        make_profile(**changes)


def test_numpy_numbers_become_plain_ones() -> None:
    numpy = pytest.importorskip("numpy")
    bucket = BucketProfile(size=numpy.int64(4), input_len=numpy.float32(2.5), verified=True, peak_bytes=numpy.int64(9))
    assert type(bucket.size) is int
    assert type(bucket.input_len) is float
    assert type(bucket.peak_bytes) is int


def test_now_is_a_time_that_a_profile_takes() -> None:
    make_profile(created=utc_now())


@pytest.mark.parametrize(
    ("amount", "num_bytes"),
    [
        ("600MiB", 600 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("4kib", 4096),
        ("512", 512),
        ("1g", 10**9),
        (7, 7),
    ],
)
def test_amounts_of_memory_are_read(amount: str | int, num_bytes: int) -> None:
    assert parse_bytes(amount) == num_bytes


@pytest.mark.parametrize("amount", ["", "MiB", "-5MiB", "5 miles", "1e9", "0", 0, -1, True, None, 2.5, "9" * 30, "5iB"])
def test_anything_else_is_no_amount_of_memory(amount: object) -> None:
    with pytest.raises(InvalidArgumentError, match='must be bytes or a string like "600MiB" or "2GB"'):
        parse_bytes(amount)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (600 * 2**20, "600 MiB"), (3 * 2**29, "1.50 GiB"), (75 * 10**9, "69.8 GiB")],
)
def test_bytes_are_written_with_three_digits(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@given(st.integers(1, 2**50))
def test_what_is_written_is_read_back_within_half_a_percent(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006)
