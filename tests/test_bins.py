from __future__ import annotations

import math
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lhotse_oomfit.bins import Bins, Rejection, estimate_bins, output_length
from lhotse_oomfit.errors import EmptySourceError, InvalidArgumentError, InvalidBinsError, MissingTokensError

lengths = st.floats(min_value=0.0, max_value=100.0)
edges_1d = st.lists(st.floats(min_value=0.01, max_value=60.0), min_size=1, max_size=10, unique=True).map(sorted)
edges_2d = st.lists(
    st.tuples(st.integers(1, 12).map(float), st.integers(0, 40)), min_size=1, max_size=15, unique=True
).map(sorted)


def example(
    duration: float, *token_counts: int | None, text: str | None = None, input_ids: list[int] | None = None
) -> Any:
    supervisions = [
        SimpleNamespace(text=text, custom=None if count is None else {"tokens": list(range(count))})
        for count in token_counts
    ]
    return SimpleNamespace(
        id=f"cut-{duration}", duration=duration, supervisions=supervisions, custom={"input_ids": input_ids}
    )


@pytest.mark.parametrize(
    "bins", [[1.0, 2.5], (1, 2.5), np.array([1.0, 2.5])], ids=["a list", "a tuple", "a numpy array"]
)
def test_bins_come_from_any_sequence_of_numbers(bins: Any) -> None:
    assert Bins.from_edges(bins).as_lists() == [1.0, 2.5]


def test_bins_come_from_pairs_of_any_kind() -> None:
    assert Bins.from_edges(np.array([[1.5, 10], [1.5, 20]])).as_lists() == [[1.5, 10], [1.5, 20]]
    assert Bins.from_edges([(1.5, 10), [1.5, 20]]).edges == ((1.5, 10), (1.5, 20))


@pytest.mark.parametrize(
    ("bins", "message"),
    [
        ([], "must hold at least one edge, they are empty"),
        ([2.0, 1.0], "must be sorted upwards, 1.0 comes after 2.0"),
        ([1.0, 1.0], "must not repeat an edge, 1.0 is there twice"),
        ([1.0, math.nan], "must hold finite numbers, they hold nan"),
        ([1.0, math.inf], "must hold finite numbers, they hold inf"),
        ([0.0, 1.0], "must hold upper edges above 0, they hold 0.0"),
        ([1.0, [2.0, 5]], r"must be all numbers \(1D\) or all pairs of length and tokens \(2D\)"),
        ([[1.0, 5], [1.0, 5]], r"must not repeat an edge, \(1.0, 5\) is there twice"),
        ([[1.0, 5.5]], "the tokens of a 2D bin must be a whole number, they are 5.5"),
        ([[1.0, 5, 6]], "a 2D bin must be a pair of length and tokens"),
        (["one"], "must hold numbers, they hold 'one'"),
        (["1.0"], "must hold numbers, they hold '1.0'"),
        ([True], "must hold numbers, they hold True"),
        (5.0, "must be a sequence of numbers or pairs, it is 5.0"),
        ("auto", "must be a sequence of numbers or pairs, it is 'auto'"),
    ],
)
def test_what_does_not_describe_buckets_is_refused_with_the_edge_that_is_wrong(bins: Any, message: str) -> None:
    with pytest.raises(InvalidBinsError, match=message):
        Bins.from_edges(bins)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_tps": [1.0]}, "max_tps must be one number, or one per bucket: it has 1 numbers for 2 buckets"),
        ({"min_tps": -1.0}, "min_tps must hold finite numbers of at least 0, it holds -1.0"),
        ({"max_tps": math.nan}, "max_tps must hold finite numbers of at least 0, it holds nan"),
        ({"min_tps": 3.0, "max_tps": 2.0}, "min_tps must not exceed max_tps, it is 3.0 where max_tps is 2.0"),
        ({"max_tps": "many"}, "max_tps must be one number, or one per bucket, it is 'many'"),
        ({"max_tps": "25"}, "max_tps must be one number, or one per bucket, it is '25'"),
        ({"min_tps": ["2", "5"]}, r"min_tps must be one number, or one per bucket, it is \['2', '5'\]"),
        ({"max_tps": True}, "max_tps must be one number, or one per bucket, it is True"),
        ({"max_tps": [1.0, None]}, r"max_tps must be one number, or one per bucket, it is \[1.0, None\]"),
    ],
)
def test_density_limits_are_checked(limits: Any, message: str) -> None:
    with pytest.raises(InvalidBinsError, match=message):
        Bins.from_edges([1.0, 2.0], **limits)


@pytest.mark.parametrize("limit", [np.float32(2.0), np.array(2.0), np.array([2, 2]), [2, 2.0], 2])
def test_density_limits_come_as_any_numbers(limit: Any) -> None:
    assert Bins.from_edges([1.0, 2.0], max_tps=limit).max_tps == (2.0, 2.0)


def test_an_edge_belongs_to_its_own_bucket() -> None:
    bins = Bins.from_edges([1.0, 2.0])
    assert [bins.select(x) for x in (0.0, 1.0, 1.5, 2.0)] == [0, 0, 1, 1]
    assert bins.select(2.0001) is Rejection.TOO_LONG


def test_strict_2d_looks_only_below_the_first_length_that_fits() -> None:
    bins = Bins.from_edges([[1.0, 5], [1.0, 10], [2.0, 20]])
    assert bins.select(1.0, 7) == 1
    assert bins.select(1.0, 15) is Rejection.TOO_MANY_TOKENS
    assert bins.select(3.0, 5) is Rejection.TOO_LONG


def test_lenient_2d_takes_the_first_bucket_that_fits_both() -> None:
    bins = Bins.from_edges([[1.0, 5], [1.0, 10], [2.0, 20]], strict_2d=False)
    assert bins.select(1.0, 7) == 1
    assert bins.select(1.0, 15) == 2
    assert bins.select(1.0, 25) is Rejection.TOO_MANY_TOKENS


def test_density_is_tokens_per_unit_of_length_in_one_and_two_dimensions() -> None:
    for edges in ([2.0], [[2.0, 100]]):
        bins = Bins.from_edges(edges, min_tps=1.0, max_tps=10.0)
        assert bins.select(2.0, 20) == 0
        assert bins.select(2.0, 21) is Rejection.TOO_DENSE
        assert bins.select(2.0, 1) is Rejection.TOO_SPARSE
        assert bins.select(2.0) is Rejection.NO_TOKENS


def test_each_bucket_can_have_its_own_density_limit() -> None:
    bins = Bins.from_edges([1.0, 2.0], max_tps=[10.0, 5.0])
    assert bins.select(1.0, 10) == 0
    assert bins.select(2.0, 11) is Rejection.TOO_DENSE


def test_a_length_of_zero_is_infinitely_dense_with_tokens_and_empty_without() -> None:
    bins = Bins.from_edges([1.0], min_tps=0.5, max_tps=10.0)
    assert bins.select(0.0, 1) is Rejection.TOO_DENSE
    assert bins.select(0.0, 0) is Rejection.TOO_SPARSE
    assert Bins.from_edges([1.0], max_tps=10.0).select(0.0, 0) == 0
    assert Bins.from_edges([1.0]).select(0.0) == 0


@pytest.mark.parametrize("length", [-1.0, math.nan])
def test_a_length_that_is_no_length_is_an_error(length: float) -> None:
    with pytest.raises(InvalidArgumentError, match="the length of an example must be a number of at least 0"):
        Bins.from_edges([1.0]).select(length)


@given(edges=edges_1d, length=lengths)
def test_every_length_falls_in_the_first_bin_that_holds_it_or_is_refused(edges: list[float], length: float) -> None:
    bins = Bins.from_edges(edges)
    fitting = [k for k, edge in enumerate(edges) if length <= edge]
    assert bins.select(length) == (fitting[0] if fitting else Rejection.TOO_LONG)


@given(edges=edges_2d, length=lengths, tokens=st.integers(0, 60), strict=st.booleans())
def test_every_pair_falls_in_a_bin_that_holds_it_or_is_refused(
    edges: list[tuple[float, int]], length: float, tokens: int, strict: bool
) -> None:
    bins = Bins.from_edges(edges, strict_2d=strict)
    long_enough = [k for k, (upper, _) in enumerate(edges) if length <= upper]
    if strict and long_enough:
        long_enough = [k for k in long_enough if edges[k][0] == edges[long_enough[0]][0]]
    fitting = [k for k in long_enough if tokens <= edges[k][1]]
    found = bins.select(length, tokens)
    if fitting:
        assert found == fitting[0]
    else:
        assert found is (Rejection.TOO_MANY_TOKENS if long_enough else Rejection.TOO_LONG)


@given(edges=edges_2d, length=lengths, tokens=st.integers(0, 60), max_tps=st.floats(0.1, 30.0), strict=st.booleans())
def test_no_bucket_holds_more_tokens_than_it_says(
    edges: list[tuple[float, int]], length: float, tokens: int, max_tps: float, strict: bool
) -> None:
    bins = Bins.from_edges(edges, strict_2d=strict, max_tps=max_tps)
    found = bins.select(length, tokens)
    if not isinstance(found, str):
        largest = bins.max_output_len(found)
        assert largest is not None
        assert tokens <= largest
        assert length <= bins.input_len(found)


def test_bins_and_rejections_survive_pickling() -> None:
    bins = Bins.from_edges([[1.0, 5], [2.0, 20]], max_tps=12)
    again = pickle.loads(pickle.dumps(bins))
    assert again == bins
    assert again.select(2.0, 20) == 1
    assert pickle.loads(pickle.dumps(Rejection.TOO_LONG)) is Rejection.TOO_LONG
    assert str(Rejection.TOO_LONG) == "too long"


def test_output_tokens_are_counted_as_nemo_counts_them() -> None:
    assert output_length(example(1.0, 3, 4)) == 7
    assert output_length(example(1.0, 3, input_ids=[1, 2, 3, 4, 5])) == 5
    assert output_length(example(1.0, None, text="abc")) is None
    assert output_length(example(1.0, None, text="abc"), tokenizer=list) == 3
    assert output_length(example(1.0, None, text="")) == 0
    assert output_length(example(1.0)) is None


def test_output_tokens_are_found_in_lhotse_cuts() -> None:
    from lhotse import SupervisionSegment
    from lhotse.testing.dummies import dummy_cut

    supervision = SupervisionSegment("s", "r", 0.0, 1.0, text="hello")
    cut = dummy_cut(0, supervisions=[supervision])
    assert output_length(cut) is None
    assert output_length(cut, tokenizer=list) == 5
    supervision.tokens = np.arange(3)
    assert output_length(cut) == 3
    assert output_length(cut.append(cut)) == 6
    cut.input_ids = np.arange(9)
    assert output_length(cut) == 9


def test_estimated_bins_hold_equal_total_lengths_and_end_with_the_longest_example() -> None:
    rng = np.random.default_rng(0)
    durations = rng.lognormal(2.0, 0.6, size=2000)
    bins = estimate_bins([example(d) for d in durations], 5)
    assert bins.edges[-1] == durations.max()
    totals = np.zeros(5)
    for duration in durations:
        found = bins.select(duration)
        assert isinstance(found, int)
        totals[found] += duration
    assert totals.max() < 1.05 * totals.min()


@given(durations=st.lists(st.floats(0.1, 30.0), min_size=1, max_size=60), num=st.integers(1, 10))
def test_estimated_bins_cover_whatever_they_were_made_from(durations: list[float], num: int) -> None:
    bins = estimate_bins([example(d) for d in durations], num)
    assert len(bins) <= num
    assert all(bins.select(d) is not Rejection.TOO_LONG for d in durations)


@given(
    pairs=st.lists(st.tuples(st.floats(0.1, 30.0), st.integers(0, 200)), min_size=1, max_size=60),
    strict=st.booleans(),
)
def test_estimated_2d_bins_cover_whatever_they_were_made_from(pairs: list[tuple[float, int]], strict: bool) -> None:
    bins = estimate_bins([example(d, n) for d, n in pairs], 4, num_subbuckets=3, strict_2d=strict)
    assert bins.is_2d
    assert all(not isinstance(bins.select(d, n), str) for d, n in pairs)


def test_a_suggested_density_limit_leaves_outliers_out() -> None:
    cuts = [example(10.0, 100 + i % 10) for i in range(500)] + [example(1.0, 400)]
    bins = estimate_bins(cuts, 2, num_subbuckets=2, max_tps="suggest")
    assert bins.max_tps is not None
    assert 11.0 < bins.max_tps[0] < 100.0
    assert isinstance(bins.select(1.0, 400), Rejection)
    assert bins.edges[-1] == (10.0, 109)


def test_sources_are_weighted_per_draw() -> None:
    short, long = [example(1.0)] * 10 + [example(2.0)] * 10, [example(20.0)] * 1000
    assert estimate_bins([short, long], 2, weights=[0.5, 0.5]).edges == (20.0,)
    assert estimate_bins([short, long], 2, weights=[0.99, 0.01]).edges == (2.0, 20.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], 3), EmptySourceError, "at least one example with a length, there is none"),
        (([example(1.0)], 0), InvalidArgumentError, "num_buckets must be at least 1, it is 0"),
    ],
)
def test_bins_need_examples_and_a_number(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        estimate_bins(*arguments)


@pytest.mark.parametrize("length", [math.nan, -1e6, math.inf, None, "3", [1.0]])
@pytest.mark.parametrize("options", [{}, {"num_subbuckets": 2}, {"max_tps": "suggest"}], ids=["1D", "2D", "density"])
def test_one_length_that_is_none_is_an_error_that_names_its_cut(length: Any, options: dict[str, Any]) -> None:
    cuts = [example(float(d), 5) for d in range(1, 40)]
    cuts[7].duration = length
    message = re.escape(
        f"cut 'cut-8.0': the length of an example must be a finite number of at least 0, it is {length!r}"
    )
    with pytest.raises(InvalidArgumentError, match=message):
        estimate_bins(cuts, 4, **options)
    measured = [example(float(d), 5) for d in range(1, 40)]
    with pytest.raises(InvalidArgumentError, match=message):
        estimate_bins(
            measured, 4, measure_length=lambda cut: length if cut.duration == 8.0 else cut.duration, **options
        )


@pytest.mark.parametrize("tokens", [math.nan, -1, "3"])
def test_one_number_of_tokens_that_is_none_is_an_error_that_names_its_cut(tokens: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match=f"cut 'cut-2.0': the tokens of an example must be .* they are {tokens!r}"
    ):
        estimate_bins(
            [example(1.0), example(2.0)],
            1,
            num_subbuckets=1,
            measure_tokens=lambda cut: tokens if cut.duration == 2.0 else 5,
        )


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_tps": "25"}, "max_tps must be a finite number of at least 0, or 'suggest', it is '25'"),
        ({"max_tps": True}, "max_tps must be a finite number of at least 0, or 'suggest', it is True"),
        ({"min_tps": "suggest"}, "min_tps must be a finite number of at least 0, it is 'suggest'"),
        ({"min_tps": math.nan}, "min_tps must be a finite number of at least 0, it is nan"),
    ],
)
def test_estimation_refuses_density_limits_that_are_no_numbers(limits: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        estimate_bins([example(1.0, 3)], 1, **limits)


def test_2d_bins_need_tokens_or_a_tokenizer_and_say_which_cut_has_none() -> None:
    cut = example(1.0, None, text="abc")
    with pytest.raises(MissingTokensError, match=r"cut 'cut-1.0' must have tokens, .* or pass tokenizer="):
        estimate_bins([cut], 1, num_subbuckets=1)


def test_weights_must_match_the_sources() -> None:
    with pytest.raises(InvalidArgumentError, match="there are 1 weights for 2 sources"):
        estimate_bins([[example(1.0)], [example(2.0)]], 1, weights=[1.0])
    with pytest.raises(InvalidArgumentError, match="at least 0 and not all 0"):
        estimate_bins([[example(1.0)], [example(2.0)]], 1, weights=[0.0, 0.0])


def test_bins_import_neither_torch_nor_lhotse() -> None:
    program = (
        "import sys, lhotse_oomfit.bins; sys.exit(any(m.split('.')[0] in ('torch', 'lhotse') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
