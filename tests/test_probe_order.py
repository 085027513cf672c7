from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lhotse_oomfit.peak_model import BucketShape
from lhotse_oomfit.probe_order import anchors, corners, heaviest_first, is_2d, spread_out

shape_lists = st.lists(
    st.builds(BucketShape, input_len=st.integers(1, 40).map(float), output_len=st.integers(0, 60)),
    min_size=1,
    max_size=40,
    unique=True,
)

LINE = [BucketShape(input_len=float(k + 1)) for k in range(17)]
GRID = [BucketShape(input_len=float(length), output_len=rate * length) for length in (1, 2, 3, 4) for rate in (1, 2, 3)]


@given(shape_lists)
def test_every_bucket_comes_once_the_corners_first(shapes):
    order = spread_out(shapes)
    assert sorted(order) == list(range(len(shapes)))
    assert order[: len(corners(shapes))] == corners(shapes)


@given(shape_lists)
def test_the_first_anchor_is_the_heaviest_and_no_other_bucket_holds_all_of_its_examples(shapes):
    first = anchors(shapes)[0]
    assert first == heaviest_first(shapes)[0]
    assert not any(shape.dominates(shapes[first]) for k, shape in enumerate(shapes) if k != first)


def test_on_a_line_halves_come_before_quarters():
    assert spread_out(LINE)[:5] == [16, 0, 8, 4, 12]
    assert anchors(LINE) == [16, 0, 8]
    assert not is_2d(LINE)


def test_a_grid_has_four_corners():
    assert is_2d(GRID)
    assert {(GRID[k].input_len, GRID[k].output_len) for k in corners(GRID)} == {(4, 12), (1, 1), (4, 4), (1, 3)}
