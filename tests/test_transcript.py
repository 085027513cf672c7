"""Fitting texts and token fields to a number of tokens by the user's own measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lhotse import MonoCut, SupervisionSegment
from lhotse.cut import Cut
from lhotse.supervision import AlignmentItem
from synthetic_cuts import WORDS, make_cuts, num_characters

from lhotse_oomfit.errors import WorstCaseError
from lhotse_oomfit.field_laws import FieldLaw, learn_laws, token_fields
from lhotse_oomfit.script import Script, learn_script
from lhotse_oomfit.transcript import fit_output, scale_output, scale_time_fields, spread_alignment

PIECES = sorted(
    {word[:n] for word in WORDS for n in (2, 3, 4, 5)} | {" " + word for word in WORDS} | {"ing", "tion", "er"},
    key=len,
    reverse=True,
)


def pieces(text: str) -> list[str]:
    """Greedy longest match, as subword tokenizers do: several characters a token, and spaces belong to words."""
    found = []
    while text:
        piece = next((p for p in PIECES if text.startswith(p)), text[0])
        found.append(piece)
        text = text[len(piece) :]
    return found


def cut_with(*texts: str | None, custom: dict[str, Any] | None = None, sup_custom: dict[str, Any] | None = None) -> Any:
    supervisions = [
        SupervisionSegment(id=f"s{i}", recording_id="r", start=float(i), duration=1.0, text=text, custom=sup_custom)
        for i, text in enumerate(texts)
    ]
    return MonoCut(id="c", start=0, duration=float(len(texts)), channel=0, supervisions=supervisions, custom=custom)


def subwords(cut: Cut) -> int:
    return sum(len(pieces(sup.text or "")) for sup in cut.supervisions)


def words(cut: Cut) -> int:
    return sum(len((sup.text or "").split()) for sup in cut.supervisions)


@pytest.mark.parametrize("measure", [num_characters, subwords, words], ids=["characters", "subwords", "words"])
@settings(deadline=None, max_examples=60)
@given(num_tokens=st.integers(1, 180), text=st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map(" ".join))
def test_every_number_of_tokens_is_reached_exactly(measure: Callable[[Cut], int], num_tokens: int, text: str) -> None:
    fitted = fit_output(cut_with(text), num_tokens, measure, {})
    assert measure(fitted) == num_tokens


def test_a_text_without_spaces_stays_without_spaces() -> None:
    fitted = fit_output(cut_with("今天天气很好"), 25, num_characters, {})
    assert num_characters(fitted) == 25
    assert " " not in fitted.supervisions[0].text


LATIN = Script(separator=" ", letters=tuple("etaoin"))


@pytest.mark.parametrize("num_tokens", [3, 25, 140])
@pytest.mark.parametrize("measure", [num_characters, subwords], ids=["characters", "subwords"])
def test_a_stretched_text_has_no_other_characters_than_the_sample(
    measure: Callable[[Cut], int], num_tokens: int
) -> None:
    script = learn_script(["foxjumps", "lazydog", None])
    fitted = fit_output(
        cut_with("foxjumps", sup_custom={"normalized_text": "FOX"}), num_tokens, measure, {}, script=script
    )
    assert measure(fitted) == num_tokens
    assert set(fitted.supervisions[0].text) <= set("foxjumpslazydog")
    assert set(fitted.supervisions[0].normalized_text) <= set("FOX")


def test_a_single_word_is_repeated_with_the_space_that_other_texts_have() -> None:
    assert fit_output(cut_with("fox"), 9, num_characters, {}, script=LATIN).supervisions[0].text == "fox fox f"
    assert scale_output(cut_with("fox"), 3.0, {}, script=LATIN).supervisions[0].text == "fox fox f"
    assert scale_output(cut_with("fox"), 3.0, {}).supervisions[0].text == "foxfoxfox"


def test_an_empty_text_grows_in_the_letters_of_the_sample() -> None:
    assert (
        fit_output(cut_with(""), 3, num_characters, {}, script=learn_script(["\u5929\u6c14\u5929"]))
        .supervisions[0]
        .text
        == "\u5929" * 3
    )


def test_the_script_of_texts_is_their_characters_the_commonest_first() -> None:
    assert learn_script(["ab a\tb a", None, ""]) == Script(separator=" ", letters=("a", "b"))
    assert learn_script(["\u3000x\u3000"]).separator == "\u3000"
    assert learn_script([]) == Script(separator="", letters=())


def test_a_number_that_no_text_has_is_exceeded_by_as_little_as_can_be() -> None:
    def in_threes(cut: Cut) -> int:
        return 3 * (len(cut.supervisions[0].text) // 2)

    fitted = fit_output(cut_with("some text"), 31, in_threes, {})
    assert in_threes(fitted) == 33


def test_a_measure_that_stops_counting_is_taken_to_where_it_stops() -> None:
    def capped(cut: Cut) -> int:
        return min(50, len(cut.supervisions[0].text))

    fitted = fit_output(cut_with("some text"), 80, capped, {})
    assert 50 <= len(fitted.supervisions[0].text) < 100


def test_a_measure_that_follows_nothing_is_refused() -> None:
    with pytest.raises(WorstCaseError, match=r"cut 'c' follows neither its text nor any of its custom fields"):
        fit_output(cut_with(None), 80, lambda cut: 7, {})
    with pytest.raises(WorstCaseError, match=r"cut 'c' doesn't follow the length of its text: .* pass make_batch"):
        fit_output(cut_with("text"), 80, lambda cut: 7, {})


def test_a_cut_that_cannot_be_measured_is_refused() -> None:
    with pytest.raises(WorstCaseError, match=r"cut 'c' can't be measured, .* 80 tokens; give the sampler a tokenizer"):
        fit_output(cut_with("text"), 80, lambda cut: None, {})


@pytest.mark.parametrize("num_tokens", [3, 10, 41, 200])
def test_the_longest_of_several_texts_takes_the_tokens(num_tokens: int) -> None:
    fitted = fit_output(cut_with("a short one", "a rather longer one"), num_tokens, num_characters, {})
    assert num_characters(fitted) == num_tokens
    assert len(fitted.supervisions) == 2


@pytest.mark.parametrize(
    "tokens",
    [[1, 7, 8, 2], (1, 7, 8, 2), np.array([1, 7, 8, 2], dtype=np.int32), torch.tensor([1, 7, 8, 2])],
    ids=["list", "tuple", "array", "tensor"],
)
@pytest.mark.parametrize("num_tokens", [2, 3, 9])
def test_token_fields_keep_their_class_and_their_ends(tokens: Any, num_tokens: int) -> None:
    cut = cut_with("hi ho", sup_custom={"tokens": tokens})
    fitted = fit_output(cut, num_tokens, lambda c: len(c.supervisions[0].tokens), {})
    new = fitted.supervisions[0].tokens
    assert type(new) is type(tokens)
    assert len(new) == num_tokens
    assert new[0] == 1
    assert getattr(new, "dtype", None) == getattr(tokens, "dtype", None)
    if num_tokens > 2:
        assert [int(x) for x in new][-1] == 2
    assert len(cut.supervisions[0].tokens) == 4, "the original is untouched"


def prompted(length: int) -> Any:
    """A prompt of nine tokens, then an answer, as for a prompted encoder-decoder."""
    answer = list(range(100, 100 + length))
    context = list(range(9))
    return cut_with(
        "x" * length,
        custom={
            "context_ids": np.array(context),
            "answer_ids": np.array(answer),
            "input_ids": np.array(context + answer),
            "mask": [0] * 9 + [1] * length,
            "voice": [1, 2, 3],
        },
    )


@pytest.mark.parametrize("sample", [[12, 20, 31], [12]], ids=["learned from the sample", "one cut only"])
def test_a_prompt_keeps_its_length_and_the_answer_takes_the_tokens(sample: list[int]) -> None:
    def measure(cut: Cut) -> int:
        return len(cut.input_ids)

    cuts = [prompted(length) for length in sample]
    laws = learn_laws(cuts, measure)
    fitted = fit_output(cuts[0], 50, measure, laws)
    lengths = {name: len(value) for name, value in fitted.custom.items()}
    assert lengths == {"context_ids": 9, "answer_ids": 41, "input_ids": 50, "mask": 50, "voice": 3}


def test_the_law_of_a_field_is_learned_from_real_cuts() -> None:
    laws = learn_laws([prompted(length) for length in (5, 11, 23)], lambda cut: len(cut.input_ids))
    assert laws["context_ids"] == FieldLaw(slope=0.0, offset=9.0)
    assert laws["answer_ids"] == FieldLaw(slope=1.0, offset=-9.0)
    assert laws["voice"] == FieldLaw(slope=0.0, offset=3.0)


def test_a_field_that_follows_no_line_takes_its_steepest_proportion() -> None:
    cuts = [cut_with("x" * n, custom={"phones": list(range(m))}) for n, m in [(10, 20), (20, 30), (30, 70)]]
    laws = learn_laws(cuts, num_characters)
    assert laws["phones"].length(30) == 70


def timed(duration: float, length: int, tokens: int) -> Any:
    custom = {"codes": list(range(length)), "pitch": np.ones((2 * length, 3)), "face": np.ones(16)}
    return dataclasses.replace(cut_with("x" * tokens, custom=custom), duration=duration)


def test_fields_that_follow_the_time_are_stretched_by_it() -> None:
    cuts = [timed(2.0, 50, 30), timed(4.0, 101, 33), timed(1.0, 25, 7)]
    laws = learn_laws(cuts, num_characters)
    assert laws["codes"] == FieldLaw(slope=25.0, per_second=True)
    scaled = scale_time_fields(cuts[0], 3.0, laws)
    fitted = fit_output(scaled, 90, num_characters, laws)
    assert len(fitted.codes) == 150
    assert fitted.pitch.shape == (300, 3)
    assert fitted.face.shape == (16,)


def test_two_cuts_teach_no_line() -> None:
    cuts = [cut_with("x" * n, custom={"phones": list(range(m))}) for n, m in [(10, 40), (20, 30)]]
    laws = learn_laws([*cuts, cuts[0]], num_characters)
    assert laws["phones"] == FieldLaw(slope=4.0)


def test_fields_that_the_measure_does_not_count_follow_the_text() -> None:
    cuts = [cut_with("x" * n, custom={"phones": list("ab" * n)}) for n in (10, 20, 30)]
    fitted = fit_output(cuts[0], 55, num_characters, learn_laws(cuts, num_characters))
    assert len(fitted.phones) == 110


def test_labels_of_a_text_stay_as_they_are() -> None:
    labels = {"target_lang": "en", "text_id": "t1", "target_audio": "/data/a.wav", "source_lang": "de"}
    cut = cut_with("hello there", sup_custom=labels | {"target_text": "hallo du"})
    custom = scale_output(cut, 2.0, {}).supervisions[0].custom
    assert len(custom.pop("target_text")) == 16
    assert custom == labels


def test_other_spellings_of_the_text_follow_it() -> None:
    cut = cut_with("hello there", sup_custom={"normalized_text": "HELLO THERE", "corpus": "digits"})
    fitted = fit_output(cut, 44, num_characters, {})
    assert len(fitted.supervisions[0].normalized_text) == 44
    assert fitted.supervisions[0].corpus == "digits"


def test_without_a_measure_texts_and_tokens_grow_in_proportion() -> None:
    cut = cut_with("hello there", custom={"tokens": [1, 2, 3, 4], "speakers": [3, 4]})
    scaled = scale_output(cut, 3.0, {})
    assert len(scaled.supervisions[0].text) == 33
    assert len(scaled.tokens) == 12
    assert scaled.speakers == [3, 4]


def test_integers_and_strings_are_tokens_and_embeddings_are_not(tmp_path: Path) -> None:
    cut = make_cuts(tmp_path, 1, custom={"ids": np.arange(3), "xvector": np.ones(5), "names": ["a"], "grid": [[1]]})[0]
    assert {name for (_, name) in token_fields(cut)} == {"ids", "names"}


def test_alignments_are_spread_over_their_supervision() -> None:
    sup = dataclasses.replace(
        cut_with("a b").supervisions[0],
        start=2.0,
        duration=3.0,
        alignment={"word": [AlignmentItem("a", 2.0, 0.5), AlignmentItem("b", 2.5, 0.5)]},
    )
    items = spread_alignment(sup, 3.0).alignment["word"]
    assert [item.symbol for item in items] == ["a", "b"] * 3
    assert items[0].start == 2.0
    assert items[-1].end == pytest.approx(5.0)
