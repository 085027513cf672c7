"""Worst-case batches over real dataset classes: Lhotse's own, and the kinds that break tiling."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lhotse import CutSet, Fbank, FbankConfig
from lhotse.cut import Cut, PaddingCut
from lhotse.dataset import AudioSamples, K2SpeechRecognitionDataset, OnTheFlyFeatures, PrecomputedFeatures, SpecAugment
from lhotse.dataset.collation import TokenCollater, collate_audio
from lhotse.dataset.cut_transforms import PerturbSpeed
from lhotse.dataset.speech_synthesis import SpeechSynthesisDataset
from lhotse.dataset.unsupervised import UnsupervisedDataset, UnsupervisedWaveformDataset
from lhotse.dataset.vad import VadDataset
from synthetic_cuts import make_cut, make_cuts, num_characters, seconds, with_features
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from lhotse_oomfit.batch_shape import compare, shape_of
from lhotse_oomfit.errors import EmptySourceError, InvalidArgumentError, WorstCaseError
from lhotse_oomfit.memory import CpuMemory
from lhotse_oomfit.stretch import clone, num_samples_at
from lhotse_oomfit.template import Examples
from lhotse_oomfit.worst_case import WorstCaseBatches, stretch_cut

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning")

EDGES: list[tuple[float, int]] = [(1.5, 30), (3.3, 80), (7.0, 160)]


@pytest.fixture(scope="module")
def audio_cuts(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return make_cuts(tmp_path_factory.mktemp("audio"))


@pytest.fixture(scope="module")
def feature_cuts(audio_cuts: list[Any]) -> list[Any]:
    return with_features(audio_cuts)


def worst(collate: Callable[[CutSet], Any], cuts: list[Any], **options: Any) -> WorstCaseBatches:
    options = {"measure_length": seconds, "measure_tokens": num_characters, **options}
    return WorstCaseBatches(collate=collate, cuts=cuts, **options)


def collated_copies(
    collate: Callable[[CutSet], Any], cuts: list[Any], edges: tuple[float, int | None], size: int, *, full: bool = False
) -> Any:
    """What the dataset makes of copies of the stretched cut, the last a shorter one or not, without any tiling."""
    examples = Examples(cuts, measure_length=seconds, measure_tokens=num_characters)
    examples.use_kind(0)
    chosen = [examples.at(edges)] * (size - 1) + [examples.at(edges) if full else examples.shorter(edges)]
    return collate(CutSet.from_cuts([clone(example, index) for index, example in enumerate(chosen)]))


def tokenize(text: str) -> list[int]:
    return [ord(char) for char in text]


def padded(cuts: CutSet) -> dict[str, Any]:
    """A hand-made ASR collation that tokenizes the text itself."""
    audio, audio_lens = collate_audio(cuts)
    tokens = [torch.tensor(tokenize(cut.supervisions[0].text)) for cut in cuts]
    return {
        "audio": audio,
        "audio_lens": audio_lens,
        "tokens": pad_sequence(tokens, batch_first=True),
        "token_lens": torch.tensor([len(x) for x in tokens]),
    }


STRATEGIES = {
    "precomputed features": PrecomputedFeatures,
    "audio samples": AudioSamples,
    "on-the-fly features": lambda: OnTheFlyFeatures(Fbank(FbankConfig(num_mel_bins=20))),
}


@pytest.mark.parametrize("return_cuts", [False, True], ids=["tensors only", "with cuts"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_k2_datasets_are_tiled_to_what_they_would_collate(
    strategy: str, return_cuts: bool, feature_cuts: list[Any]
) -> None:
    dataset = K2SpeechRecognitionDataset(input_strategy=STRATEGIES[strategy](), return_cuts=return_cuts)
    batches = worst(dataset.__getitem__, feature_cuts)
    assert (batches.how, batches.reason) == ("tiled", None)
    for input_len, output_len in EDGES:
        tiled = batches.batch(input_len=input_len, output_len=output_len, size=7)
        real = collated_copies(dataset.__getitem__, feature_cuts, (input_len, output_len), 7)
        assert compare(tiled, real) is None
        assert tiled["supervisions"]["sequence_idx"].tolist() == list(range(7))
        assert [len(text) for text in tiled["supervisions"]["text"]] == [output_len] * 6 + [output_len - 1]
        assert batches.reached(input_len=input_len, output_len=output_len) == (input_len, output_len)


def test_words_with_alignments_grow_with_the_text(audio_cuts: list[Any]) -> None:
    from lhotse.supervision import AlignmentItem

    cuts = []
    for cut in audio_cuts:
        words = cut.supervisions[0].text.split()
        step = cut.duration / len(words)
        items = [AlignmentItem(symbol=word, start=i * step, duration=step) for i, word in enumerate(words)]
        aligned = dataclasses.replace(cut.supervisions[0], alignment={"word": items})
        cuts.append(dataclasses.replace(cut, supervisions=[aligned]))
    extractor = Fbank(FbankConfig(num_mel_bins=20))
    dataset = K2SpeechRecognitionDataset(input_strategy=OnTheFlyFeatures(extractor))
    batch = worst(dataset.__getitem__, cuts).batch(input_len=6.0, output_len=120, size=3)
    starts = batch["supervisions"]["word_start"][0]
    assert len(starts) > len(cuts[-1].supervisions[0].text.split())
    assert 0 <= starts[0] < starts[-1] < 600


def test_tts_datasets_are_tiled(feature_cuts: list[Any]) -> None:
    cuts = []
    for cut in feature_cuts:
        sup = dataclasses.replace(cut.supervisions[0], custom={"normalized_text": cut.supervisions[0].text.upper()})
        cuts.append(dataclasses.replace(cut, supervisions=[sup], custom={"tokens": list(sup.text.replace(" ", "_"))}))
    dataset = SpeechSynthesisDataset(return_tokens=True, return_spk_ids=True, return_cuts=True)
    batches = worst(dataset.__getitem__, cuts)
    assert batches.how == "tiled"
    batch = batches.batch(input_len=4.0, output_len=100, size=6)
    assert batch["audio"].shape == (6, 64000)
    assert batch["features"].shape == (6, 400, 20)
    assert [len(tokens) for tokens in batch["tokens"]] == [100] * 5 + [99]
    assert [len(text) for text in batch["text"]] == [100] * 5 + [99]


@pytest.mark.parametrize(
    "dataset",
    [UnsupervisedDataset(), UnsupervisedWaveformDataset(), UnsupervisedWaveformDataset(collate=False), VadDataset()],
    ids=["features", "waveforms", "waveforms as a list", "voice activity"],
)
def test_datasets_without_text_are_tiled(dataset: Any, feature_cuts: list[Any]) -> None:
    batches = worst(dataset.__getitem__, feature_cuts)
    assert batches.how == "tiled"
    tiled = batches.batch(input_len=4.5, output_len=None, size=6)
    real = collated_copies(dataset.__getitem__, feature_cuts, (4.5, None), 6)
    assert compare(tiled, real) is None


def test_text_that_the_dataset_tokenizes_reaches_the_token_edge(audio_cuts: list[Any]) -> None:
    batches = worst(padded, audio_cuts)
    assert batches.how == "tiled"
    batch = batches.batch(input_len=3.3, output_len=77, size=9)
    assert batch["tokens"].shape == (9, 77)
    assert batch["token_lens"].tolist() == [77] * 8 + [76]
    assert batch["audio"].shape == (9, 52800)


def test_a_token_collater_with_a_closed_alphabet_still_works(audio_cuts: list[Any]) -> None:
    collater = TokenCollater(CutSet.from_cuts(audio_cuts))
    batches = worst(lambda cuts: collater(cuts), audio_cuts)
    tokens, _ = batches.batch(input_len=3.0, output_len=50, size=4)
    assert batches.how == "tiled"
    assert tokens.shape == (4, 52)


@pytest.mark.parametrize("output_len", [50, None], ids=["to a token edge", "with the length"])
def test_a_vocabulary_without_a_space_is_respected(output_len: int | None, audio_cuts: list[Any]) -> None:
    letters = "\u4eca\u5929\u6c14\u5f88\u597d"
    vocabulary = {char: index for index, char in enumerate(letters)}
    cuts = [with_text(cut, letters[: 2 + index % 4]) for index, cut in enumerate(audio_cuts)]

    def collate(cuts: CutSet) -> Any:
        tokens = [torch.tensor([vocabulary[char] for char in cut.supervisions[0].text]) for cut in cuts]
        return {"audio": collate_audio(cuts)[0], "tokens": pad_sequence(tokens, batch_first=True)}

    batch = worst(collate, cuts).batch(input_len=3.0, output_len=output_len, size=4)
    assert batch["tokens"].shape[0] == 4
    assert batch["tokens"].shape[1] == output_len or output_len is None


@pytest.mark.parametrize("duration", [0.0, 0.01])
def test_cuts_without_a_length_are_no_template_however_dense(
    duration: float, audio_cuts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    odd = [dataclasses.replace(cut, id=f"odd-{index}", duration=duration) for index, cut in enumerate(audio_cuts[:3])]
    with caplog.at_level(logging.WARNING):
        batches = worst(padded, [*odd, *audio_cuts])
        batch = batches.batch(input_len=2.0, output_len=None, size=3)
    assert batches.how == "tiled"
    assert batch["audio"].shape == (3, 32000)
    assert batch["tokens"].shape[1] < 100
    told = f"3 of 11 sampled cuts are too short to be measured, and are passed over: odd-0 ({duration:g} s)"
    assert told in caplog.text


def test_a_sample_of_nothing_but_cuts_without_a_length_is_refused(audio_cuts: list[Any]) -> None:
    odd = [dataclasses.replace(cut, duration=0.0) for cut in audio_cuts]
    with pytest.raises(WorstCaseError, match=r"but of 8 sampled cuts none could be \(cut-0: lasts 0 s\)"):
        worst(padded, odd).batch(input_len=2.0, output_len=30, size=2)


def test_two_supervisions_stay_two(tmp_path: Path) -> None:
    cuts = make_cuts(tmp_path, 6, num_supervisions=2)
    dataset = K2SpeechRecognitionDataset(input_strategy=AudioSamples())
    batches = worst(dataset.__getitem__, cuts)
    assert batches.how == "tiled"
    batch = batches.batch(input_len=4.0, output_len=90, size=5)
    assert batch["supervisions"]["sequence_idx"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert len(batch["supervisions"]["text"]) == 10
    assert sum(len(text) for text in batch["supervisions"]["text"]) == 5 * 90 - 1
    ends = batch["supervisions"]["start_sample"] + batch["supervisions"]["num_samples"]
    assert ends.max() == 64000


def test_the_sampling_rate_is_kept(tmp_path: Path) -> None:
    cuts = make_cuts(tmp_path, 5, sampling_rate=8000)
    batch = worst(padded, cuts).batch(input_len=4.0, output_len=60, size=3)
    assert batch["audio"].shape == (3, 32000)


def test_channels_are_kept(tmp_path: Path) -> None:
    cuts = make_cuts(tmp_path, 5, num_channels=2)
    batch = worst(padded, cuts).batch(input_len=2.0, output_len=60, size=3)
    assert batch["audio"].shape == (3, 2, 32000)


def test_mixed_cuts_are_measured_as_what_they_sound_like(audio_cuts: list[Any]) -> None:
    mixed = [cut.mix(audio_cuts[0], snr=10) for cut in audio_cuts[1:6]]
    batches = worst(padded_any, mixed)
    batch = batches.batch(input_len=4.0, output_len=None, size=3)
    assert batches.how == "tiled"
    assert batch["audio"].shape == (3, 64000)


def padded_any(cuts: CutSet) -> dict[str, Any]:
    audio, audio_lens = collate_audio(cuts)
    return {"audio": audio, "audio_lens": audio_lens, "text": [sup.text for cut in cuts for sup in cut.supervisions]}


def prompted_cuts(cuts: list[Any]) -> list[Any]:
    """Cuts with a prompt of nine tokens and an answer in custom fields, as a prompted encoder-decoder reads them."""
    prompted = []
    for cut in cuts:
        answer = np.array(tokenize(cut.supervisions[0].text))
        context = np.arange(9)
        fields = {"context_ids": context, "answer_ids": answer, "input_ids": np.concatenate([context, answer])}
        prompted.append(dataclasses.replace(cut, custom=fields))
    return prompted


def test_prompts_are_not_stretched_and_answers_are(audio_cuts: list[Any]) -> None:
    def collate(cuts: CutSet) -> Any:
        names = ("context_ids", "answer_ids", "input_ids")
        fields = {n: pad_sequence([torch.from_numpy(cut.custom[n]) for cut in cuts], batch_first=True) for n in names}
        return {**padded(cuts), **fields}

    batches = worst(collate, prompted_cuts(audio_cuts), measure_tokens=lambda cut: len(cut.input_ids))
    assert batches.how == "tiled"
    batch = batches.batch(input_len=3.0, output_len=50, size=4)
    assert batch["context_ids"].shape == (4, 9)
    assert batch["answer_ids"].shape == (4, 41)
    assert batch["input_ids"].shape == (4, 50)
    assert batch["tokens"].shape[1] >= 41, "the text that the answer was made of grows, too"


def with_text(cut: Any, text: str | None) -> Any:
    return dataclasses.replace(cut, supervisions=[dataclasses.replace(cut.supervisions[0], text=text)])


ODD_FIRST_CUTS: dict[str, Callable[[Any], Any]] = {
    "no supervision": lambda cut: dataclasses.replace(cut, supervisions=[]),
    "no text": lambda cut: with_text(cut, None),
    "empty text": lambda cut: with_text(cut, ""),
    "padding": lambda cut: PaddingCut(id="p", duration=1.0, sampling_rate=16000, feat_value=0.0, num_samples=16000),
    "another rate": lambda cut: cut.resample(8000),
}


@pytest.mark.parametrize("oddity", ODD_FIRST_CUTS)
def test_an_odd_first_cut_is_no_template(oddity: str, audio_cuts: list[Any]) -> None:
    def usual_only(cuts: CutSet) -> Any:
        return padded(CutSet.from_cuts([cut for cut in cuts if cut.supervisions and cut.supervisions[0].text]))

    batches = worst(usual_only, [ODD_FIRST_CUTS[oddity](audio_cuts[7]), *audio_cuts])
    batch = batches.batch(input_len=2.0, output_len=30, size=3)
    assert batches.how == "tiled"
    assert batch["audio"].shape == (3, 32000)
    assert batch["tokens"].shape == (3, 30)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(input_len=st.floats(0.1, 12.0), output_len=st.integers(1, 250), size=st.integers(1, 9))
def test_every_example_is_at_the_edges_whatever_they_are(
    input_len: float, output_len: int, size: int, audio_batches: WorstCaseBatches
) -> None:
    batch = audio_batches.batch(input_len=input_len, output_len=output_len, size=size)
    assert batch["audio"].shape == (size, num_samples_at(input_len, 16000))
    assert batch["tokens"].shape == (size, output_len)
    length, tokens = audio_batches.reached(input_len=input_len, output_len=output_len)
    assert input_len - 1 / 16000 < length <= input_len
    assert tokens == output_len


@pytest.fixture(scope="module")
def audio_batches(audio_cuts: list[Any]) -> WorstCaseBatches:
    return worst(padded, audio_cuts)


def test_making_a_batch_is_no_part_of_a_measurement(audio_cuts: list[Any]) -> None:
    memory = CpuMemory(limit_bytes=1 << 30)
    batches = worst(packed_with_offsets, audio_cuts)
    with memory.measure() as usage:
        batch = batches.batch(input_len=2.0, output_len=30, size=4)
        assert usage().allocated_bytes == 0
        batch["audio"].sum()
        assert usage().allocated_bytes >= batch["audio"].nbytes


class Level(Enum):
    LOW = 1


def test_a_class_that_refuses_to_be_built_is_collated_for_real(audio_cuts: list[Any]) -> None:
    @dataclasses.dataclass
    class Picky:
        audio: torch.Tensor
        made_by: str = "hand"

        def __post_init__(self) -> None:
            if self.made_by != "hand":
                raise ValueError("machines can't make this")
            self.made_by = "machine"

    batches = worst(lambda cuts: Picky(collate_audio(cuts)[0]), audio_cuts)
    assert batches.how == "collated"
    assert batches.reason == "the batch can't be taken apart (ValueError: machines can't make this)"
    assert batches.batch(input_len=2.0, output_len=None, size=3).audio.shape == (3, 32000)


def test_enumerations_are_constants(audio_cuts: list[Any]) -> None:
    batches = worst(lambda cuts: {**padded(cuts), "level": Level.LOW}, audio_cuts)
    assert batches.how == "tiled"
    assert batches.batch(input_len=2.0, output_len=30, size=3)["level"] is Level.LOW


class Batch(NamedTuple):
    audio: torch.Tensor
    lens: torch.Tensor
    ids: list[str]


@dataclasses.dataclass
class Item:
    audio: torch.Tensor
    count: int
    array: np.ndarray
    note: str | None = None


def time_first(cuts: CutSet) -> Any:
    audio, lens = collate_audio(cuts)
    return audio.t().contiguous(), lens


def as_named_tuple(cuts: CutSet) -> Any:
    audio, lens = collate_audio(cuts)
    return Batch(audio=audio, lens=lens, ids=[cut.id for cut in cuts])


def as_dataclass(cuts: CutSet) -> Any:
    audio, lens = collate_audio(cuts)
    return Item(audio=audio, count=len(list(cuts)), array=lens.numpy())


def with_total(cuts: CutSet) -> Any:
    batch = padded(cuts)
    return {**batch, "total": int(batch["audio_lens"].sum()), "totals": batch["audio_lens"].sum()}


def with_pairs(cuts: CutSet) -> Any:
    batch = padded(cuts)
    return {**batch, "pairs": [(cut.id, torch.ones(4)) for cut in cuts], "index": list(range(len(list(cuts))))}


def packed_with_lengths(cuts: CutSet) -> Any:
    return {
        "packed": torch.cat([torch.from_numpy(cut.load_audio()[0]) for cut in cuts]),
        "lens": torch.tensor([cut.num_samples for cut in cuts]),
    }


@pytest.mark.parametrize(
    "collate",
    [time_first, as_named_tuple, as_dataclass, with_total, with_pairs, packed_with_lengths],
    ids=lambda function: function.__name__.replace("_", " "),
)
def test_other_layouts_are_tiled_to_what_they_would_collate(
    collate: Callable[[CutSet], Any], audio_cuts: list[Any]
) -> None:
    batches = worst(collate, audio_cuts)
    assert (batches.how, batches.reason) == ("tiled", None)
    tiled = batches.batch(input_len=2.5, output_len=40, size=11)
    full = collate is packed_with_lengths
    assert compare(tiled, collated_copies(collate, audio_cuts, (2.5, 40), 11, full=full)) is None


def packed_with_offsets(cuts: CutSet) -> Any:
    lens = torch.tensor([cut.num_samples for cut in cuts])
    audio = torch.cat([torch.from_numpy(cut.load_audio()[0]) for cut in cuts])
    return {"audio": audio, "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])}


def packed_sequence(cuts: CutSet) -> Any:
    return {"audio": pack_sequence([torch.from_numpy(cut.load_audio()[0]) for cut in cuts], enforce_sorted=False)}


def jagged(cuts: CutSet) -> Any:
    return {
        "audio": torch.nested.nested_tensor([torch.from_numpy(c.load_audio()[0]) for c in cuts], layout=torch.jagged)
    }


def batch_by_batch_mask(cuts: CutSet) -> Any:
    batch = padded(cuts)
    return {**batch, "mask": torch.eye(len(batch["audio"]), dtype=torch.bool)}


def rounded_up_to(multiple: int) -> Callable[[CutSet], Any]:
    def collate(cuts: CutSet) -> Any:
        batch = padded(cuts)
        num = len(batch["audio"])
        missing = -num % multiple
        return {"audio": torch.zeros(num + missing, batch["audio"].shape[1]), "real": batch["audio_lens"]}

    return collate


def averaged(cuts: CutSet) -> Any:
    batch = padded(cuts)
    num = len(batch["audio"])
    return {**batch, "weight": torch.full((num,), 1 / num)}


def averaged_once(cuts: CutSet) -> Any:
    batch = padded(cuts)
    return {**batch, "weight": 1 / len(batch["audio"])}


def keyed_by_id(cuts: CutSet) -> Any:
    return {cut.id: torch.from_numpy(cut.load_audio()[0]) for cut in cuts}


def shuffled(cuts: CutSet) -> Any:
    batch = padded(cuts)
    return {**batch, "order": torch.randperm(len(batch["audio"]))}


def counted_in_fours(cuts: CutSet) -> Any:
    batch = padded(cuts)
    return {**batch, "turn": torch.arange(len(batch["audio"])) % 4}


def generated(cuts: CutSet) -> Any:
    return (torch.from_numpy(cut.load_audio()) for cut in cuts)


class Unknown:
    def __init__(self, audio: torch.Tensor) -> None:
        self.audio = audio


def wrapped(cuts: CutSet) -> Any:
    return Unknown(padded(cuts)["audio"])


REFUSED: list[tuple[Callable[[CutSet], Any], str]] = [
    (packed_with_offsets, "batch['cu_seqlens'] has 3 entries along dimension 0 for two examples and 4 for three"),
    (packed_sequence, "batch['audio'] is a torch.nn.utils.rnn.PackedSequence, whose structure isn't known"),
    (jagged, "batch['audio'] is a NestedTensor, not a plain tensor"),
    (batch_by_batch_mask, "batch['mask'] changes with the number of examples in 2 dimensions: (2, 2) for two"),
    (rounded_up_to(2), "batch['audio'] has 2 entries along dimension 0 for two examples and 4 for three"),
    (rounded_up_to(4), "at 5 examples, batch['audio'] has shape (4,"),
    (rounded_up_to(64), "at 131 examples, batch['audio'] has shape (64,"),
    (averaged, "batch['weight'] differs between examples that are the same, and doesn't number them"),
    (averaged_once, "at 5 examples, batch['weight']: "),
    (keyed_by_id, "batch has other keys for two examples than for three"),
    (shuffled, "batch['order'] "),
    (counted_in_fours, "at 5 examples, batch['turn'] holds other integers tiled than collated"),
    (generated, "batch is a builtins.generator, whose structure isn't known"),
    (wrapped, "batch is a test_worst_case.Unknown, whose structure isn't known"),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize(("collate", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_tiled_is_collated_for_real(
    collate: Callable[[CutSet], Any], reason: str, audio_cuts: list[Any]
) -> None:
    batches = worst(collate, audio_cuts)
    assert batches.how == "collated"
    assert batches.reason is not None
    assert reason in batches.reason
    batch = batches.batch(input_len=2.0, output_len=30, size=6)
    full = collate in (packed_with_offsets, packed_sequence, jagged, keyed_by_id)
    real = collated_copies(collate, audio_cuts, (2.0, 30), 6, full=full)
    assert type(batch) is type(real)
    if not isinstance(batch, (dict, Unknown)):
        return
    assert shape_of(batch) == shape_of(real)


def ascending(cuts: CutSet) -> Any:
    return padded(cuts.sort_by_duration(ascending=True))


def stacked(cuts: CutSet) -> Any:
    return {"audio": torch.stack([torch.from_numpy(cut.load_audio()[0]) for cut in cuts])}


def descending_with_mask(cuts: CutSet) -> Any:
    batch = padded(cuts.sort_by_duration(ascending=False))
    return {**batch, "mask": torch.arange(batch["audio"].shape[1]) < batch["audio_lens"][:, None]}


def lists_of_waves(cuts: CutSet) -> Any:
    waves = [torch.from_numpy(cut.load_audio()[0]) for cut in cuts]
    return {"waves": waves, "lens": [len(wave) for wave in waves], "index": list(range(len(waves)))}


@pytest.mark.parametrize("collate", [padded, descending_with_mask, batch_by_batch_mask])
def test_the_last_of_several_examples_is_shorter_and_no_padded_size_is(
    collate: Callable[[CutSet], Any], audio_cuts: list[Any]
) -> None:
    batches = worst(collate, audio_cuts)
    for size in (2, 5, 9):
        batch = batches.batch(input_len=3.0, output_len=40, size=size)
        assert batch["audio"].shape == (size, 48000)
        assert batch["tokens"].shape == (size, 40)
        assert batch["audio_lens"].tolist() == [48000] * (size - 1) + [48000 - 3200]
        assert batch["token_lens"].tolist() == [40] * (size - 1) + [39]
        assert batch["audio"][-1, 44800:].abs().max() == 0
        assert batch["audio"][-2, 44800:].abs().max() > 0
        if "mask" in batch and collate is descending_with_mask:
            assert batch["mask"].sum(1).tolist() == batch["audio_lens"].tolist()
    one = batches.batch(input_len=3.0, output_len=40, size=1)
    assert one["audio_lens"].tolist() == [48000]
    assert one["token_lens"].tolist() == [40]


def test_very_short_examples_are_shorter_by_a_fifth(audio_cuts: list[Any]) -> None:
    batch = worst(padded, audio_cuts).batch(input_len=0.4, output_len=1, size=3)
    assert batch["audio_lens"].tolist() == [6400, 6400, 5120]
    assert batch["token_lens"].tolist() == [1, 1, 1]


def test_unpadded_lists_end_in_a_shorter_example(audio_cuts: list[Any]) -> None:
    batches = worst(lists_of_waves, audio_cuts)
    batch = batches.batch(input_len=3.0, output_len=None, size=4)
    assert batches.how == "tiled"
    assert [len(wave) for wave in batch["waves"]] == batch["lens"] == [48000] * 3 + [44800]
    assert batch["index"] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize(
    ("collate", "how"),
    [
        (ascending, "tiled"),
        (stacked, "tiled"),
        (packed_with_lengths, "tiled"),
        (packed_with_offsets, "collated"),
        (jagged, "collated"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_all_examples_are_full_where_a_shorter_one_cannot_be_or_would_shrink_the_batch(
    collate: Callable[[CutSet], Any], how: str, audio_cuts: list[Any]
) -> None:
    batches = worst(collate, audio_cuts)
    batch = batches.batch(input_len=3.0, output_len=40, size=6)
    assert batches.how == how
    audio = batch["packed" if "packed" in batch else "audio"]
    assert (audio.values() if audio.is_nested else audio).numel() == 6 * 48000
    for name in ("audio_lens", "lens"):
        if name in batch:
            assert batch[name].tolist() == [48000] * 6


def without_repeated_texts(cuts: CutSet) -> Any:
    distinct = {cut.supervisions[0].text: cut for cut in cuts}
    return padded(CutSet.from_cuts(list(distinct.values())))


def without_repeated_recordings(cuts: CutSet) -> Any:
    distinct = {cut.recording_id: cut for cut in cuts}
    return padded(CutSet.from_cuts(list(distinct.values())))


@pytest.mark.parametrize("collate", [without_repeated_texts, without_repeated_recordings])
def test_datasets_that_drop_repetitions_get_distinct_copies(
    collate: Callable[[CutSet], Any], audio_cuts: list[Any]
) -> None:
    batches = worst(collate, audio_cuts)
    assert batches.how == "collated"
    assert "copies of one cut make a smaller batch than distinct cuts" in (batches.reason or "")
    batch = batches.batch(input_len=2.0, output_len=30, size=40)
    assert batch["audio"].shape == (40, 32000)
    assert batch["tokens"].shape == (40, 30)


def test_speed_perturbation_is_measured_at_its_longest(audio_cuts: list[Any]) -> None:
    dataset = K2SpeechRecognitionDataset(
        input_strategy=AudioSamples(), cut_transforms=[PerturbSpeed(factors=[0.9, 1.1], p=2 / 3)]
    )
    batches = worst(dataset.__getitem__, audio_cuts)
    for size in (1, 3, 32):
        batch = batches.batch(input_len=7.0, output_len=90, size=size)
        assert batch["inputs"].shape == (size, 124444)
        assert batch["supervisions"]["sequence_idx"].tolist() == list(range(size))
    assert batches.how == "tiled"
    *full, last = batch["supervisions"]["num_samples"].tolist()
    assert full == [124444] * 31
    assert 98_000 < last <= 120_889


def test_lengths_drawn_from_a_continuum_are_taken_near_their_longest(audio_cuts: list[Any]) -> None:
    def collate(cuts: CutSet) -> Any:
        audio, lens = collate_audio(cuts)
        return {"audio": torch.nn.functional.pad(audio, (0, random.randint(0, 8000))), "lens": lens}

    batch = worst(collate, audio_cuts).batch(input_len=2.0, output_len=30, size=4)
    assert batch["audio"].shape[1] > 32000 + 6000


def test_lengths_drawn_for_each_example_are_collated_for_real(audio_cuts: list[Any]) -> None:
    def collate(cuts: CutSet) -> Any:
        lens = [cut.num_samples + int(8000 * np.random.rand()) for cut in cuts]
        return {"audio": torch.zeros(len(lens), max(lens)), "lens": torch.tensor(lens)}

    batches = worst(collate, audio_cuts)
    batch = batches.batch(input_len=2.0, output_len=30, size=8)
    assert batches.how == "collated"
    assert batch["audio"].shape[1] > 32000 + 7000
    assert batch["lens"].max() == batch["audio"].shape[1]


def test_spec_augment_changes_values_only(feature_cuts: list[Any]) -> None:
    dataset = K2SpeechRecognitionDataset(input_transforms=[SpecAugment(p=0.5)])
    batches = worst(dataset.__getitem__, feature_cuts)
    assert batches.how == "tiled"
    assert batches.batch(input_len=3.0, output_len=30, size=8)["inputs"].shape == (8, 300, 20)


def test_generators_are_left_as_they_were(feature_cuts: list[Any]) -> None:
    own, own_numpy, own_torch = random.Random(7), np.random.default_rng(7), torch.Generator().manual_seed(7)

    class Dataset:
        def __init__(self) -> None:
            self.calls = 0
            self.seen: list[str] = []
            self.transforms = [PerturbSpeed(factors=[0.9, 1.1], p=0.5), PerturbSpeed([0.9], p=0.5, randgen=own)]

        def __getitem__(self, cuts: CutSet) -> Any:
            self.calls += 1
            self.seen.append("x")
            self.last = cuts
            for transform in self.transforms:
                cuts = transform(cuts)
            batch = padded_any(cuts)
            noise = random.random() + np.random.rand() + own_numpy.random() + float(torch.rand(1, generator=own_torch))
            return {**batch, "noise": torch.randn(len(batch["audio"])) + noise}

    dataset = Dataset()

    def states() -> Any:
        return [
            random.getstate(),
            str(np.random.get_state()),
            torch.get_rng_state().tolist(),
            own.getstate(),
            str(own_numpy.bit_generator.state),
            own_torch.get_state().tolist(),
            dataset.transforms[0].random,
            {name: value for name, value in vars(dataset).items() if name != "transforms"},
            list(dataset.seen),
        ]

    before = states()
    batches = worst(dataset.__getitem__, feature_cuts)
    batches.batch(input_len=3.0, output_len=40, size=4)
    assert states() == before
    assert all(cut.has_features for cut in feature_cuts), "perturbing speed drops the features of the cut it is given"


def test_the_same_batch_is_made_again(audio_cuts: list[Any]) -> None:
    batches = worst(padded, audio_cuts)
    first = batches.batch(input_len=2.0, output_len=30, size=4)
    again = batches.batch(input_len=2.0, output_len=30, size=4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert first["audio"].data_ptr() != again["audio"].data_ptr()


def test_the_length_may_be_measured_in_frames(audio_cuts: list[Any]) -> None:
    def frames(cut: Cut) -> float:
        return cut.num_samples // 160

    batches = worst(padded, audio_cuts, measure_length=frames)
    batch = batches.batch(input_len=300, output_len=40, size=2)
    assert batch["audio"].shape == (2, 300 * 160 + 159)
    assert batches.reached(input_len=300, output_len=40) == (300, 40)


def test_the_commonest_kind_of_cut_is_taken_and_others_are_told_of(
    tmp_path: Path, audio_cuts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    odd = make_cut(tmp_path, 90, sampling_rate=8000, duration=1.0)
    with caplog.at_level(logging.WARNING):
        batches = worst(padded, [odd, *audio_cuts])
        batch = batches.batch(input_len=2.0, output_len=30, size=2)
    assert batch["audio"].shape == (2, 32000)
    assert "the sampled cuts are of 2 kinds: 8 x MonoCut, 16000 Hz" in caplog.text
    assert "worst-case batches are made of this kind of cut: MonoCut, 16000 Hz" in caplog.text


def test_a_rarer_kind_of_cut_is_taken_where_it_is_heavier(tmp_path: Path) -> None:
    low = make_cuts(tmp_path, 5, sampling_rate=8000)
    high = [make_cut(tmp_path, 10 + index, duration=2.25, sampling_rate=16000) for index in range(3)]
    batch = worst(padded, [*low, *high]).batch(input_len=2.0, output_len=30, size=2)
    assert batch["audio"].shape == (2, 32000)


def test_real_batches_that_are_heavier_are_warned_of(audio_cuts: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    cuts = [dataclasses.replace(c, custom={"facts": {"size": 10 + 5 * i}}) for i, c in enumerate(audio_cuts)]

    def collate(cuts: CutSet) -> Any:
        extra = [torch.ones(cut.facts["size"]) for cut in cuts]
        return {**padded(cuts), "extra": pad_sequence(extra, batch_first=True)}

    with caplog.at_level(logging.WARNING):
        batches = worst(collate, sorted(cuts, key=lambda cut: -len(cut.supervisions[0].text) / cut.duration))
        batches.batch(input_len=2.0, output_len=30, size=2)
    assert "a batch of real cuts is larger than the worst case" in caplog.text
    assert "batch['extra'] has shape" in caplog.text


@pytest.mark.parametrize(("num_more", "warns"), [(1, False), (1000, True)])
def test_a_file_with_a_sample_more_than_its_manifest_says_is_no_heavier(
    audio_cuts: list[Any], caplog: pytest.LogCaptureFixture, num_more: int, warns: bool
) -> None:
    def collate(cuts: CutSet) -> Any:
        batch = padded(cuts)
        if all("-worst" not in cut.id for cut in cuts):
            batch["audio"] = torch.nn.functional.pad(batch["audio"], (0, num_more))
        return batch

    with caplog.at_level(logging.WARNING):
        worst(collate, audio_cuts).batch(input_len=2.0, output_len=30, size=2)
    assert ("a batch of real cuts is larger than the worst case" in caplog.text) is warns


def test_unreadable_cuts_are_passed_over(audio_cuts: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    missing = dataclasses.replace(audio_cuts[0].recording.sources[0], source="/nowhere/a.wav")
    broken = dataclasses.replace(
        audio_cuts[0],
        id="broken",
        recording=dataclasses.replace(audio_cuts[0].recording, sources=[missing]),
        supervisions=[dataclasses.replace(audio_cuts[0].supervisions[0], text="x" * 400)],
    )
    with caplog.at_level(logging.WARNING):
        batch = worst(padded, [broken, *audio_cuts]).batch(input_len=2.0, output_len=30, size=2)
    assert batch["audio"].shape == (2, 32000)
    assert "a sampled cut can't be read and is passed over: broken: " in caplog.text
    with pytest.raises(
        WorstCaseError, match=r"needs one cut that can be read and stretched, but of 1 sampled cuts none"
    ):
        worst(padded, [broken]).batch(input_len=2.0, output_len=30, size=2)


def test_features_are_enough_where_audio_cannot_be_read(feature_cuts: list[Any]) -> None:
    missing = dataclasses.replace(feature_cuts[0].recording.sources[0], source="/nowhere/a.wav")
    cuts = [
        dataclasses.replace(cut, recording=dataclasses.replace(cut.recording, sources=[missing]))
        for cut in feature_cuts
    ]
    batches = worst(K2SpeechRecognitionDataset().__getitem__, cuts)
    assert batches.batch(input_len=3.0, output_len=30, size=8)["inputs"].shape == (8, 300, 20)


def test_a_dataset_that_pads_to_a_fixed_length_is_told_of(
    audio_cuts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def collate(cuts: CutSet) -> Any:
        audio, _ = collate_audio(cuts)
        return {"audio": torch.nn.functional.pad(audio, (0, 160000 - audio.shape[1]))}

    with caplog.at_level(logging.INFO):
        assert worst(collate, audio_cuts).how == "tiled"
    assert "examples of twice the length give batches of the same shape" in caplog.text
    assert "examples of twice the number of tokens give batches of the same shape" in caplog.text


def test_a_number_of_tokens_that_no_text_has_is_told_of(
    audio_cuts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def even(cut: Cut) -> int:
        return 2 * (len(cut.supervisions[0].text) // 2)

    with caplog.at_level(logging.WARNING):
        batches = worst(padded, audio_cuts, measure_tokens=even)
        batches.batch(input_len=2.0, output_len=31, size=2)
    assert batches.reached(input_len=2.0, output_len=31) == (2.0, 32)
    assert "the bucket of length 2 and 31 tokens is measured with 32 tokens, the nearest" in caplog.text


def test_a_dataset_that_raises_is_named(audio_cuts: list[Any]) -> None:
    def collate(cuts: CutSet) -> Any:
        raise KeyError("speaker_id")

    with pytest.raises(
        WorstCaseError, match=r"the dataset must collate .* raised KeyError on .*'speaker_id'.*make_batch"
    ):
        worst(collate, audio_cuts).batch(input_len=2.0, output_len=30, size=2)


def test_a_dataset_that_returns_nothing_is_told_of(audio_cuts: list[Any]) -> None:
    with pytest.raises(
        WorstCaseError,
        match=r"must return a batch .* but returned None for \d+ .*; return the batch from its __getitem",
    ):
        worst(lambda cuts: None, audio_cuts).batch(input_len=2.0, output_len=30, size=2)


def test_running_out_of_host_memory_is_passed_on(audio_cuts: list[Any]) -> None:
    def collate(cuts: CutSet) -> Any:
        if len(list(cuts)) > 200:
            raise MemoryError
        return packed_with_offsets(cuts)

    with pytest.raises(MemoryError):
        worst(collate, audio_cuts).batch(input_len=2.0, output_len=30, size=300)


def test_tiling_can_be_switched_off(audio_cuts: list[Any]) -> None:
    batches = worst(padded, audio_cuts, tile=False)
    assert (batches.how, batches.reason) == ("collated", "tiling was switched off")
    assert batches.batch(input_len=2.0, output_len=30, size=6)["audio"].shape == (6, 32000)


def test_without_cuts_there_is_no_worst_case() -> None:
    with pytest.raises(EmptySourceError, match=r"the sample of cuts .* must hold at least one cut, but is empty"):
        worst(padded, [])


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ({"input_len": 0.0, "output_len": 3, "size": 1}, r"input_len must be a finite length above 0, but is 0\.0"),
        ({"input_len": float("nan"), "output_len": 3, "size": 1}, r"input_len must be a finite length above 0"),
        ({"input_len": 1.0, "output_len": -1, "size": 1}, r"output_len must be None or a number of tokens .* is -1"),
        ({"input_len": 1.0, "output_len": 3, "size": 0}, r"size must be at least 1 example, but is 0"),
    ],
    ids=["no length", "length not a number", "negative tokens", "no examples"],
)
def test_edges_that_are_none_are_refused(edges: dict[str, Any], message: str, audio_cuts: list[Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        worst(padded, audio_cuts).batch(**edges)


def test_a_cut_can_be_stretched_by_itself(audio_cuts: list[Any]) -> None:
    cut = stretch_cut(
        audio_cuts[2], input_len=5.5, output_len=70, measure_length=seconds, measure_tokens=num_characters, index=3
    )
    assert (cut.duration, cut.num_samples, num_characters(cut)) == (5.5, 88000, 70)
    assert cut.id == "cut-2-worst3"
    assert cut.load_audio().shape == (1, 88000)


def test_real_cuts_that_cannot_be_collated_together_are_told_of(
    audio_cuts: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def equal_lengths_only(cuts: CutSet) -> Any:
        return {"audio": torch.stack([torch.from_numpy(cut.load_audio()[0]) for cut in cuts])}

    with caplog.at_level(logging.WARNING):
        batches = worst(equal_lengths_only, audio_cuts)
        assert batches.how == "tiled"
    assert "worst-case batches can't be compared with real ones: the dataset must collate" in caplog.text


def test_long_cuts_that_become_several_rows_are_tiled(audio_cuts: list[Any]) -> None:
    def windows(cuts: CutSet) -> Any:
        rows = [row for cut in cuts for row in torch.from_numpy(cut.load_audio()[0]).split(16000) if len(row) == 16000]
        return {"audio": torch.stack(rows), "lens": torch.tensor([cut.num_samples for cut in cuts])}

    batches = worst(windows, audio_cuts)
    assert batches.batch(input_len=6.5, output_len=90, size=np.int64(7))["audio"].shape == (42, 16000)
    assert batches.how == "tiled"
