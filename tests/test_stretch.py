"""Cuts read into memory and stretched: what must come along."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from lhotse import CutSet, MonoCut, Recording, validate
from lhotse.cut import PaddingCut
from lhotse.features.io import MemoryRawWriter
from synthetic_cuts import make_cut, make_cuts, with_features

from lhotse_oomfit.errors import WorstCaseError
from lhotse_oomfit.stretch import PlainCut, clone, independent, num_samples_at

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning")


@given(
    num=st.integers(1, 40 * 48000),
    sampling_rate=st.sampled_from([8000, 11025, 16000, 22050, 24000, 44100, 48000]),
)
def test_a_length_of_whole_samples_gives_them_back(num: int, sampling_rate: int) -> None:
    assert num_samples_at(num / sampling_rate, sampling_rate) == num


@given(length=st.floats(0.01, 60), sampling_rate=st.sampled_from([8000, 16000, 22050, 44100]))
def test_the_samples_never_last_longer_than_asked(length: float, sampling_rate: int) -> None:
    num = num_samples_at(length, sampling_rate)
    assert num / sampling_rate <= length < (num + 1) / sampling_rate + 1e-9


@pytest.mark.parametrize("length", [1.1, 2.3, 4.35, 7.0, 0.1 + 0.2], ids=str)
def test_decimal_lengths_lose_no_sample(length: float) -> None:
    assert num_samples_at(length, 16000) == round(length * 16000)


@pytest.mark.parametrize("num_samples", [5000, 16000, 100_001], ids=["shorter", "as long", "longer"])
@pytest.mark.parametrize("options", [{}, {"num_channels": 2}, {"sampling_rate": 8000}], ids=["mono", "stereo", "8 kHz"])
def test_audio_keeps_rate_and_channels(tmp_path: Path, options: dict[str, Any], num_samples: int) -> None:
    cut = make_cut(tmp_path, 0, **options)
    stretched = PlainCut.read(cut).stretched(num_samples)
    validate(stretched, read_data=True)
    assert type(stretched) is type(cut)
    assert stretched.channel == cut.channel
    assert stretched.sampling_rate == cut.sampling_rate
    assert stretched.num_samples == num_samples
    assert stretched.recording_id == cut.recording_id
    audio = stretched.load_audio()
    assert audio.shape == (options.get("num_channels", 1), num_samples)
    np.testing.assert_allclose(audio[:, :5000], cut.load_audio()[:, :5000], atol=1e-4)


def test_a_cut_out_of_a_longer_recording_starts_at_zero(tmp_path: Path) -> None:
    whole = make_cut(tmp_path, 0, duration=4.0)
    cut = whole.truncate(offset=1.0, duration=2.0)
    stretched = PlainCut.read(cut).stretched(48000)
    assert (stretched.start, stretched.duration) == (0.0, 3.0)
    np.testing.assert_allclose(stretched.load_audio()[:, :32000], cut.load_audio(), atol=1e-4)


def test_one_channel_of_a_stereo_recording_stays_that_channel(tmp_path: Path) -> None:
    multi = make_cut(tmp_path, 0, num_channels=2)
    cut = MonoCut(id="right", start=0, duration=2.0, channel=1, recording=multi.recording)
    stretched = PlainCut.read(cut).stretched(64000)
    validate(stretched, read_data=True)
    assert stretched.channel == 1
    assert stretched.load_audio().shape == (1, 64000)


def test_transforms_of_the_recording_are_applied_once(tmp_path: Path) -> None:
    cut = make_cut(tmp_path, 0).perturb_speed(0.9).resample(8000)
    stretched = PlainCut.read(cut).stretched(40000)
    assert stretched.recording.transforms is None
    assert stretched.sampling_rate == 8000
    assert stretched.load_audio().shape == (1, 40000)


def test_features_are_stretched_with_the_audio(tmp_path: Path) -> None:
    cut = with_features([make_cut(tmp_path, 0)])[0]
    stretched = PlainCut.read(cut).stretched(16000 * 5)
    validate(stretched, read_data=True)
    assert stretched.load_features().shape == (500, 20)
    assert stretched.load_features().dtype == cut.load_features().dtype
    assert stretched.features.type == cut.features.type


def test_cuts_of_features_alone_are_stretched(tmp_path: Path) -> None:
    cut = with_features([make_cut(tmp_path, 0)])[0].drop_recording()
    stretched = PlainCut.read(cut).stretched(16000 * 3)
    validate(stretched, read_data=True)
    assert not stretched.has_recording
    assert stretched.load_features().shape == (300, 20)


def test_arrays_over_time_are_stretched_and_others_kept(tmp_path: Path) -> None:
    cut = make_cut(tmp_path, 0)
    cut = cut.attach_tensor("codes", np.arange(100).reshape(2, 50), frame_shift=0.04, temporal_dim=1)
    cut = cut.attach_tensor("speaker", np.ones(7, dtype=np.float32))
    stretched = PlainCut.read(cut).stretched(16000 * 6)
    assert stretched.codes.shape == [2, 150]
    assert stretched.codes.frame_shift == 0.04
    np.testing.assert_array_equal(stretched.speaker.load(), np.ones(7))
    assert stretched.load_speaker().dtype == np.float32


def test_an_array_with_a_wrong_frame_shift_grows_in_proportion(tmp_path: Path) -> None:
    cut = make_cut(tmp_path, 0)
    with MemoryRawWriter() as writer:
        cut.codes = writer.store_array("codes", np.arange(30), frame_shift=0.5, temporal_dim=0, start=0)
    plain = PlainCut.read(cut.with_custom("codes", dataclasses.replace(cut.codes, frame_shift=0.02)))
    assert plain.stretched(16000 * 4).codes.shape == [60]


def test_recordings_in_custom_fields_are_stretched_at_their_own_rate(tmp_path: Path) -> None:
    target = make_cut(tmp_path, 1, sampling_rate=8000).recording
    cut = make_cut(tmp_path, 0, custom={"target": target, "note": {"a": 1}})
    stretched = PlainCut.read(cut).stretched(16000 * 5)
    assert stretched.load_target().shape == (1, 40000)
    assert stretched.target.id == target.id
    assert stretched.note == {"a": 1}


def test_a_single_supervision_fills_the_cut_and_several_keep_their_order(tmp_path: Path) -> None:
    one = PlainCut.read(make_cut(tmp_path, 0)).stretched(16000 * 5)
    assert (one.supervisions[0].start, one.supervisions[0].duration) == (0.0, 5.0)
    two = PlainCut.read(make_cut(tmp_path, 1, num_supervisions=2)).stretched(16000 * 5)
    assert [(sup.start, sup.end) for sup in two.supervisions] == [(0.0, 2.5), (2.5, 5.0)]
    validate(two)


def test_a_mix_becomes_one_plain_cut(tmp_path: Path) -> None:
    cuts = make_cuts(tmp_path, 3, custom={"lang": "en"})
    mixed = cuts[2].pad(duration=3.0).append(cuts[0])
    stretched = PlainCut.read(mixed).stretched(16000 * 6)
    validate(stretched, read_data=True)
    assert isinstance(stretched, MonoCut)
    assert len(stretched.supervisions) == 2
    assert stretched.lang == "en"
    assert stretched.load_audio().shape == (1, 96000)


def test_a_mix_of_features_becomes_one_plain_cut(tmp_path: Path) -> None:
    first, second = with_features(make_cuts(tmp_path, 2))
    stretched = PlainCut.read(first.append(second)).stretched(16000 * 6)
    validate(stretched, read_data=True)
    assert stretched.load_features().shape == (600, 20)


def test_silence_becomes_faint_noise(tmp_path: Path) -> None:
    path = tmp_path / "silence.wav"
    soundfile.write(path, np.zeros(8000), 16000)
    audio = PlainCut.read(Recording.from_file(path).to_cut()).stretched(16000).load_audio()
    assert 0 < np.abs(audio).max() < 0.01


def test_copies_have_ids_and_dicts_of_their_own(tmp_path: Path) -> None:
    cut = PlainCut.read(make_cut(tmp_path, 0, custom={"seen": [1]})).stretched(16000)
    copies = [clone(cut, index) for index in range(3)]
    CutSet.from_cuts(copies)
    assert len({copy.id for copy in copies}) == 3
    assert len({copy.supervisions[0].id for copy in copies}) == 3
    assert {copy.recording_id for copy in copies} == {cut.recording_id}
    copies[0].seen.append(2)
    copies[0].custom["new"] = True
    assert copies[1].custom == cut.custom == {"seen": [1]}
    assert copies[0].recording.sources[0].source is copies[1].recording.sources[0].source


def test_distinct_copies_differ_in_text_and_recording_and_in_no_length(tmp_path: Path) -> None:
    cut = with_features([make_cut(tmp_path, 0)])[0]
    copies = [clone(cut, index, distinct=True) for index in range(700)]
    assert len({copy.supervisions[0].text for copy in copies}) == 700
    assert len({copy.recording_id for copy in copies}) == 700
    assert {len(copy.supervisions[0].text) for copy in copies} == {len(cut.supervisions[0].text)}
    validate(copies[0])


def test_distinct_copies_are_spelled_in_the_letters_of_their_text(tmp_path: Path) -> None:
    cut = make_cut(tmp_path, 0)
    text = "XYZ" * 10
    cut = dataclasses.replace(cut, supervisions=[dataclasses.replace(cut.supervisions[0], text=text)])
    copies = [clone(cut, index, distinct=True).supervisions[0].text for index in range(700)]
    assert len(set(copies)) == 700
    assert set("".join(copies)) == set("XYZ")


def test_an_independent_copy_can_be_written_to(tmp_path: Path) -> None:
    cut = make_cut(tmp_path, 0, custom={"a": 1})
    mixed = cut.append(make_cut(tmp_path, 1))
    copy = independent(mixed)
    copy.tracks[0].cut.custom["a"] = 2
    copy.tracks[0].cut.supervisions.clear()
    assert cut.custom == {"a": 1}
    assert len(cut.supervisions) == 1


def test_padding_alone_cannot_be_stretched() -> None:
    padding = PaddingCut(id="p", duration=1.0, sampling_rate=16000, feat_value=0.0, num_samples=16000)
    with pytest.raises(WorstCaseError, match=r"a PaddingCut \('p'\) can't be stretched .* pass make_batch"):
        PlainCut.read(padding)


def test_a_cut_without_data_cannot_be_stretched() -> None:
    with pytest.raises(WorstCaseError, match=r"cut 'bare' has neither audio nor features to stretch"):
        PlainCut.read(MonoCut(id="bare", start=0, duration=1, channel=0))
