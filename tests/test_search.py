"""The search against simulated memory: affine beyond a knee within a bucket, a polynomial across buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_card import AED, CTC, GB, Card, grid, noise_for, one_d, two_d

from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.search import BucketShape, Probe, Search


@pytest.mark.parametrize(
    ("shapes", "coefficients"),
    [(one_d(30), CTC), (one_d(30), AED), (two_d(10), AED)],
    ids=["ctc-30-buckets", "aed-30-buckets", "aed-30-buckets-2d"],
)
def test_thirty_buckets_take_at_most_forty_steps_and_none_over_the_budget_by_a_tenth(shapes, coefficients):
    card = Card(shapes=shapes, coefficients=coefficients)
    search, steps = card.run()
    assert len(steps) <= 40
    assert max(peak for _, peak in steps) < 1.1 * card.budget
    for k, size in enumerate(search.sizes):
        assert size <= card.largest(k)
        assert size >= min(math.floor(0.97 * card.largest(k)), card.largest(k) - 1)


@pytest.mark.parametrize("noisy", [False, True], ids=["smooth", "noisy"])
def test_a_grid_of_150_buckets_takes_at_most_1_2_steps_a_bucket_and_none_runs_out_of_memory(noisy):
    shapes = grid()
    card = Card(shapes=shapes, coefficients=AED, headroom=0.1, noise=noise_for(shapes) if noisy else {})
    search, steps = card.run()
    assert len(steps) <= 1.2 * len(shapes)
    assert max(peak for _, peak in steps) <= 1.1 * card.budget
    for k, size in enumerate(search.sizes):
        truth = card.largest(k)
        assert min(math.floor((0.9 if noisy else 0.97) * truth), truth - 1) <= size <= truth


@pytest.mark.parametrize("noisy", [False, True], ids=["smooth", "noisy"])
@pytest.mark.parametrize(
    ("shapes", "coefficients", "most_steps"),
    [(one_d(30), CTC, 16), (one_d(30), AED, 16), (two_d(10), AED, 19), (grid(), AED, 43)],
    ids=["ctc-30-buckets", "aed-30-buckets", "aed-30-buckets-2d", "aed-150-buckets-2d"],
)
def test_a_fast_search_runs_about_a_fifth_of_the_buckets(shapes, coefficients, most_steps, noisy):
    card = Card(shapes=shapes, coefficients=coefficients, headroom=0.1, noise=noise_for(shapes) if noisy else {})
    search, steps = card.run(card.search(mode="fast"))
    assert len(steps) <= most_steps
    assert max(peak for _, peak in steps) <= 1.1 * card.budget
    ran = {probe.bucket for probe, _ in steps}
    assert 2 * sum(map(search.is_predicted, range(len(shapes)))) > len(shapes)
    for k, size in enumerate(search.sizes):
        assert search.is_settled(k)
        assert k in ran or search.is_predicted(k)
        assert card.peak(k, size) <= (1.03 if noisy else 1.0) * card.budget
        assert size >= min(math.floor((0.88 if noisy else 0.95) * card.largest(k)), card.largest(k) - 1)


@st.composite
def cards(draw: st.DrawFn, headrooms: Sequence[float] = (0.0, 0.1, 2.0)) -> Card:
    num = draw(st.integers(1, 24))
    longest = draw(st.floats(5.0, 60.0))
    fractions = sorted({round(draw(st.floats(0.03, 1.0)), 3) for _ in range(num)} | {1.0})
    rate = draw(st.sampled_from([0, 3, 12, 25]))
    shapes = [BucketShape(input_len=longest * f, output_len=int(rate * longest * f)) for f in fractions]
    coefficient = st.floats(0.0, 1.0)
    coefficients = (
        2e5 * draw(coefficient),
        3e6 * (0.2 + draw(coefficient)),
        3e5 * draw(coefficient),
        5e3 * draw(coefficient),
        8e4 * draw(coefficient),
    )
    gradients = int(draw(st.floats(0.001, 0.06)) * 20 * GB)
    return Card(
        shapes=shapes,
        coefficients=coefficients,
        gradients=gradients,
        constant=int(draw(st.floats(0.0, 0.3)) * gradients),
        headroom=draw(st.sampled_from(headrooms)),
    )


@settings(max_examples=150, deadline=None)
@given(card=cards())
def test_sizes_are_never_above_the_truth_and_at_most_three_percent_below(card: Card):
    search, steps = card.run()
    assert len(steps) <= 2 * len(card.shapes) + 6
    for k, size in enumerate(search.sizes):
        truth = card.largest(k)
        assert min(math.floor(0.97 * truth), truth - 1) <= size <= truth


@settings(max_examples=100, deadline=None)
@given(card=cards(), data=st.data())
def test_with_noise_of_three_percent_steps_overshoot_and_gap_stay_in_bounds(card: Card, data: st.DataObject):
    card.noise = {k: data.draw(st.floats(0.97, 1.03)) for k in range(len(card.shapes))}
    search, steps = card.run()
    assert len(steps) <= 3 * len(card.shapes) + 6
    # Predictions between measured lengths are trusted down to 0.8 of the chord, which noise can bend by 3%.
    assert max(peak for _, peak in steps) < 1.5 * card.budget
    for k, size in enumerate(search.sizes):
        assert size <= card.largest(k)
        # Monotone sizes can cost a bucket what its neighbour's noise takes.
        assert size >= min(math.floor(0.90 * card.largest(k)), card.largest(k) - 1)


@st.composite
def grids(draw: st.DrawFn) -> Card:
    card = draw(cards(headrooms=(0.0, 0.1)))
    longest = max(shape.input_len for shape in card.shapes)
    num = draw(st.integers(2, 6))
    rates = draw(st.lists(st.integers(1, 25), min_size=2, max_size=5, unique=True))
    card.shapes = [
        BucketShape(input_len=longest * (k + 1) / num, output_len=int(rate * longest * (k + 1) / num) + 1)
        for k in range(num)
        for rate in sorted(rates)
    ]
    return card


def deviations(data: st.DataObject, card: Card) -> dict[int, float]:
    """Up to 3% a bucket, or none."""
    if not data.draw(st.booleans()):
        return {}
    return {k: data.draw(st.floats(0.97, 1.03)) for k in range(len(card.shapes))}


@settings(max_examples=60, deadline=None)
@given(card=grids(), data=st.data())
def test_in_2d_too_noise_leaves_steps_overshoot_and_gap_in_bounds(card: Card, data: st.DataObject):
    card.noise = deviations(data, card)
    search, steps = card.run()
    assert len(steps) <= 3 * len(card.shapes) + 6
    assert max(peak for _, peak in steps) < 1.5 * card.budget
    for k, size in enumerate(search.sizes):
        truth = card.largest(k)
        assert min(math.floor(0.90 * truth), truth - 1) <= size <= truth


@settings(max_examples=150, deadline=None)
@given(card=st.one_of(cards(headrooms=(0.0, 0.1)), grids()), data=st.data())
def test_a_cautious_search_never_exceeds_what_the_memory_holds(card: Card, data: st.DataObject):
    card.noise = deviations(data, card)
    search, steps = card.run(card.search(cautious=True))
    assert max(peak for _, peak in steps) <= (1.0 + card.headroom) * card.budget
    assert len(steps) <= 2.2 * len(card.shapes) + 8
    for k, size in enumerate(search.sizes):
        truth = card.largest(k)
        # Monotone sizes can cost a bucket what its neighbour's noise takes.
        assert min(math.floor((0.90 if card.noise else 0.97) * truth), truth - 1) <= size <= truth


@settings(max_examples=60, deadline=None)
@given(card=st.one_of(cards(headrooms=(0.0, 0.1)), grids()), data=st.data())
def test_a_cautious_search_allows_for_what_an_allocator_holds_beyond_the_peak(card: Card, data: st.DataObject):
    card.noise = deviations(data, card)
    search = card.search(cautious=True)
    while (probe := search.ask()) is not None:
        peak = card.peak(probe.bucket, probe.size)
        charged = int(1.08 * peak)
        assert charged <= (1.0 + card.headroom) * card.budget
        search.tell(probe, peak_bytes=peak, charged_bytes=charged)
    for k, size in enumerate(search.sizes):
        assert 1.08 * card.peak(k, size) <= card.budget


@pytest.mark.parametrize(("headroom", "steps_a_bucket"), [(0.0, 2.2), (0.1, 1.3)], ids=["tight", "headroom"])
def test_a_cautious_search_takes_two_steps_a_bucket_and_about_one_with_headroom(headroom, steps_a_bucket):
    for shapes, coefficients in ((one_d(30), CTC), (two_d(10), AED)):
        card = Card(shapes=shapes, coefficients=coefficients, headroom=headroom)
        _, steps = card.run(card.search(cautious=True))
        assert len(steps) <= steps_a_bucket * len(shapes)


@settings(max_examples=150, deadline=None)
@given(card=st.one_of(cards(), grids()), data=st.data())
def test_a_predicted_size_is_safe_where_models_hold_and_off_by_no_more_than_noise_where_not(card, data):
    card.noise = deviations(data, card)
    search, _ = card.run(card.search(mode="fast"))
    for k, size in enumerate(search.sizes):
        truth = card.largest(k)
        assert card.peak(k, size) <= (1.07 if card.noise else 1.0) * card.budget
        assert size >= min(math.floor((0.60 if card.noise else 0.75) * truth), truth - 1)


def test_a_fit_that_bent_to_a_deviating_bucket_predicts_no_size_that_other_models_forbid():
    lengths = (0.155, 0.31, 0.47, 0.625, 0.78, 0.86, 0.94, 1.25, 1.875, 2.5, 3.125, 3.75, 5.0)
    outputs = (0, 0, 1, 1, 2, 2, 2, 3, 5, 7, 9, 11, 15)
    card = Card(
        shapes=[BucketShape(input_len=t, output_len=u) for t, u in zip(lengths, outputs, strict=True)],
        coefficients=(0.0, 6e5, 0.0, 0.0, 8e4),
        gradients=625_000_000,
        constant=0,
        noise={7: 0.984375},
    )
    search, _ = card.run(card.search(mode="fast"))
    assert sum(map(search.is_predicted, range(len(lengths)))) > 5
    for k, size in enumerate(search.sizes):
        assert card.peak(k, size) <= card.budget


@settings(max_examples=60, deadline=None)
@given(
    card=st.one_of(cards(headrooms=(0.0, 0.1)), grids()),
    data=st.data(),
    options=st.sampled_from([{}, {"cautious": True}, {"mode": "fast"}, {"cautious": True, "mode": "fast"}]),
)
def test_a_search_that_is_told_the_beginning_of_another_ends_as_that_one(card, data, options):
    card.noise = deviations(data, card)
    card.limit = int((1.0 + card.headroom) * card.budget)
    search, steps = card.run(card.search(**options))
    other = card.search(**options)
    for probe, peak in steps[: data.draw(st.integers(0, len(steps)))]:
        again = Probe(bucket=probe.bucket, size=probe.size, purpose="verify")
        other.tell(again, peak_bytes=None if peak > card.limit else peak)
    card.run(other)
    assert other.sizes == search.sizes
    assert other.num_probes == search.num_probes


def test_a_fast_search_measures_more_where_the_model_does_not_hold():
    shapes = one_d(30)
    odd = {k: 1.0 if k % 2 else 1.4 for k in range(30)}
    smooth = Card(shapes=shapes, coefficients=CTC, headroom=2.0)
    bumpy = Card(shapes=shapes, coefficients=CTC, headroom=2.0, noise=odd)
    num_predicted = [
        sum(map(search.is_predicted, range(30)))
        for search, _ in (card.run(card.search(mode="fast")) for card in (smooth, bumpy))
    ]
    assert num_predicted[0] > 20
    assert num_predicted[1] == 0


def test_a_predicted_size_can_be_taken_back():
    card = Card(shapes=one_d(30), coefficients=CTC)
    search, _ = card.run(card.search(mode="fast"))
    k = next(filter(search.is_predicted, range(30)))
    before = search.sizes[k]
    search.lower(k, before)
    assert search.sizes[k] == before - 1


@settings(max_examples=100, deadline=None)
@given(card=cards())
def test_a_hard_limit_at_the_budget_ends_too_and_sizes_still_fit(card: Card):
    card.limit, card.headroom = card.budget, 0.0
    search, _steps = card.run()
    for k, size in enumerate(search.sizes):
        truth = card.largest(k)
        assert min(math.floor(0.85 * truth), truth - 1) <= size <= truth


@settings(max_examples=100, deadline=None)
@given(card=cards())
def test_sizes_never_grow_with_length_and_never_exceed_one_that_ran(card: Card):
    search, steps = card.run()
    sizes = search.sizes
    for k, shape in enumerate(card.shapes):
        for j, other in enumerate(card.shapes):
            if shape.dominates(other):
                assert sizes[k] <= sizes[j]
        ran = [probe.size for probe, peak in steps if probe.bucket == k and peak <= 1.03 * card.budget]
        assert sizes[k] <= max(ran, default=0)
        assert card.peak(k, max(sizes[k], 1)) <= card.budget or sizes[k] == 0


@settings(max_examples=60, deadline=None)
@given(card=cards())
def test_no_probe_is_run_twice(card: Card):
    _, steps = card.run()
    ran = [(probe.bucket, probe.size) for probe, _ in steps]
    assert len(set(ran)) == len(ran)


def test_a_bucket_that_holds_not_even_one_example_gets_zero_and_the_others_their_sizes():
    card = Card(shapes=one_d(6), coefficients=(0.0, 2.5e8, 0.0, 0.0, 6e7), budget=20 * GB)
    truth = [card.largest(k) for k in range(6)]
    assert truth[-1] == 0 < truth[0]
    search, _ = card.run()
    assert search.sizes == tuple(truth)


def test_when_nothing_fits_every_size_is_zero_and_the_search_ends():
    card = Card(shapes=one_d(4), coefficients=(5e10, 0.0, 0.0, 0.0, 0.0), limit=20 * GB)
    search, steps = card.run()
    assert search.sizes == (0, 0, 0, 0)
    assert len(steps) <= 2 * 4


def test_no_size_is_above_the_largest_allowed():
    card = Card(shapes=one_d(5), coefficients=CTC)
    search = Search(card.shapes, budget_bytes=card.budget, resident_bytes=card.resident, max_size=7)
    card.run(search)
    assert search.sizes == (7, 7, 7, 7, 7)


def test_a_ceiling_that_is_not_memory_only_lowers_its_own_bucket():
    card = Card(shapes=one_d(6), coefficients=CTC)
    search = card.search()
    while (probe := search.ask()) is not None:
        hit = probe.bucket == 0 and probe.size > 50
        search.tell(probe, peak_bytes=None if hit else card.peak(probe.bucket, probe.size))
    assert 40 <= search.sizes[0] <= 50
    assert search.sizes[1] <= search.sizes[0]


def test_what_is_charged_beyond_the_peak_counts_against_the_budget():
    card = Card(shapes=one_d(8), coefficients=CTC)
    search = card.search()
    while (probe := search.ask()) is not None:
        peak = card.peak(probe.bucket, probe.size)
        search.tell(probe, peak_bytes=peak, charged_bytes=int(1.1 * peak))
    for k, size in enumerate(search.sizes):
        assert 1.1 * card.peak(k, size) <= card.budget


def test_a_size_taken_back_is_not_returned_again():
    card = Card(shapes=one_d(4), coefficients=CTC)
    search, _ = card.run()
    before = search.sizes
    search.lower(1, before[1])
    assert search.sizes[1] == before[1] - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": []}, "shapes must name at least one bucket, got none"),
        ({"max_size": 0}, "max_size must be at least 1, got 0"),
        ({"mode": "quick"}, "mode must be 'verify' or 'fast', it is 'quick'"),
        ({"budget_bytes": 5}, "budget_bytes must exceed the 10 bytes that are allocated before a step begins, got 5"),
    ],
    ids=["no-shapes", "no-size", "other-mode", "no-budget"],
)
def test_wrong_arguments_are_refused(arguments, message):
    given_arguments = {"shapes": one_d(2), "budget_bytes": 100, "resident_bytes": 10, **arguments}
    with pytest.raises(InvalidArgumentError, match=message):
        Search(given_arguments.pop("shapes"), **given_arguments)


@settings(max_examples=60, deadline=None)
@given(card=cards(), share=st.floats(0.06, 0.3), limited=st.booleans())
def test_gradients_that_fill_much_of_the_memory_neither_mislead_the_search_nor_keep_it_going(card, share, limited):
    card.gradients = int(share * (card.budget - card.resident))
    card.constant = int(0.1 * card.gradients)
    if limited:
        card.limit, card.headroom = int(1.1 * card.budget), 0.1
    search, steps = card.run()
    assert len(steps) <= 5 * len(card.shapes) + 16
    for k, size in enumerate(search.sizes):
        truth = card.largest(k)
        assert min(math.floor(0.9 * truth), truth - 1) <= size <= truth


def test_linear_growth_is_not_taken_for_quadratic_between_two_measured_lengths():
    shapes = [BucketShape(input_len=length) for length in (0.625, 2.5, 4.92, 5.0)]
    card = Card(shapes=shapes, coefficients=(0.0, 6e5, 0.0, 0.0, 0.0), constant=0, noise={2: 0.984375})
    _, steps = card.run()
    assert max(peak for _, peak in steps) < 1.1 * card.budget


@pytest.mark.parametrize(
    "allows",
    [
        lambda size, shape: size * shape.input_len <= 400,
        lambda size, shape: size * shape.input_len**2 <= 4000,
        lambda size, shape: size <= 64,
    ],
    ids=["total-input", "quadratic", "size"],
)
@pytest.mark.parametrize("options", [{}, {"mode": "fast"}], ids=["verify", "fast"])
def test_a_ceiling_met_in_one_bucket_tells_of_the_others_and_nothing_is_predicted_above_it(allows, options):
    card = Card(shapes=one_d(30), coefficients=CTC, headroom=0.1)
    search = card.search(**options)
    while (probe := search.ask()) is not None:
        hit = not allows(probe.size, card.shapes[probe.bucket])
        search.tell(probe, peak_bytes=None if hit else card.peak(probe.bucket, probe.size), ceiling=hit)
    assert search.num_probes <= 2.5 * 30
    for size, shape in zip(search.sizes, card.shapes, strict=True):
        assert allows(size, shape)
        assert not allows(math.ceil(1.05 * size) + 1, shape)
