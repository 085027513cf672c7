"""The search against simulated memory: affine beyond a knee within a bucket, a polynomial across buckets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.search import BucketShape, Probe, Search

GB = 10**9


@dataclass(kw_only=True)
class Card:
    """Simulated memory: the peak is the larger of two regimes, the forward pass's end and the backward pass's."""

    shapes: list[BucketShape]
    coefficients: tuple[float, float, float, float, float]
    resident: int = GB
    budget: int = 20 * GB
    gradients: int = GB // 4
    constant: int = GB // 20
    limit: int | None = None  # a hard one: beyond it a step fails without telling its peak
    headroom: float = 0.0  # share of the budget by which a step may exceed it
    noise: dict[int, float] = field(default_factory=dict)

    def peak(self, k: int, size: int) -> int:
        slope = sum(a * b for a, b in zip(self.coefficients, self.shapes[k].features(), strict=True))
        slope *= self.noise.get(k, 1.0)
        backward = 1.5 * self.gradients + 0.3 * slope * size
        return int(self.resident + max(self.constant + slope * size, backward))

    def largest(self, k: int) -> int:
        low, high = 0, 1 << 22
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(k, middle) <= self.budget else (low, middle)
        return low

    def search(self) -> Search:
        return Search(
            self.shapes,
            budget_bytes=self.budget,
            resident_bytes=self.resident,
            gradient_bytes=self.gradients,
            headroom_bytes=int(self.headroom * self.budget),
        )

    def run(self, search: Search | None = None) -> tuple[Search, list[tuple[Probe, int]]]:
        search = search or self.search()
        steps = []
        while (probe := search.ask()) is not None:
            peak = self.peak(probe.bucket, probe.size)
            steps.append((probe, peak))
            failed = self.limit is not None and peak > self.limit
            search.tell(probe, peak_bytes=None if failed else peak)
            assert len(steps) < 20 * len(self.shapes), "the search doesn't end"
        return search, steps


def one_d(num: int, *, longest: float = 30.0, tokens_per_s: int = 12) -> list[BucketShape]:
    return [
        BucketShape(input_len=longest * (k + 1) / num, output_len=int(tokens_per_s * longest * (k + 1) / num))
        for k in range(num)
    ]


def two_d(num: int) -> list[BucketShape]:
    return [
        BucketShape(input_len=3.0 * (k + 1), output_len=int(rate * 3.0 * (k + 1)))
        for k in range(num)
        for rate in (4, 8, 16)
    ]


CTC = (1e5, 4e6, 1e4, 0.0, 3e4)
AED = (1e5, 6e6, 4e5, 3e3, 9e4)


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


@st.composite
def cards(draw: st.DrawFn) -> Card:
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
        headroom=draw(st.sampled_from([0.0, 0.1, 2.0])),
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
        ({"budget_bytes": 5}, "budget_bytes must exceed the 10 bytes that are allocated before a step begins, got 5"),
    ],
    ids=["no-shapes", "no-size", "no-budget"],
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
