"""Speech language models, whose examples are conversations of text and audio."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import nemo
import pytest
import torch
from conftest import Corpus
from hydra import compose, initialize_config_dir
from lhotse import CutSet, Recording
from lhotse.dataset import AudioSamples
from lhotse_oomfit_nemo.conversations import ConversationBatches, are_conversations
from lhotse_oomfit_nemo.finder import NemoBatchSizeFinder
from nemo.collections.common.data.lhotse import NeMoMultimodalConversation
from nemo.collections.common.data.lhotse.text_adapters import (
    AudioTurn,
    TextTurn,
    collate_conversation_audio_fault_tolerant,
)
from omegaconf import OmegaConf
from short_runs import Shapes, short_trainer
from speech import sentences

from lhotse_oomfit.errors import InvalidArgumentError

FRAME_S = 0.08
TAG = "<|audio|>"


def conversation(corpus: Corpus, files: list[int], num_text_tokens: int) -> NeMoMultimodalConversation:
    """As NeMo makes one: turns of audio, a turn of text, and the tokens of both with one for each audio turn."""
    lines = [json.loads(line) for line in corpus.train.read_text().splitlines()]
    turns: list[Any] = []
    for index in files:
        cut = Recording.from_file(lines[index]["audio_filepath"]).to_cut().with_id(f"{index}")
        turns.append(AudioTurn(cut=cut, role="user", audio_locator_tag=TAG))
    turns.append(TextTurn(value="hello", role="assistant"))
    made = NeMoMultimodalConversation(id=str(files), turns=turns, token_equivalent_duration=FRAME_S)
    made.input_ids = torch.arange(num_text_tokens + len(files))
    made.mask = torch.ones(num_text_tokens + len(files), dtype=torch.bool)
    made.context_ids, made.answer_ids = made.input_ids[:-3], made.input_ids[-3:]
    return made


def collate(conversations: CutSet) -> Any:
    reader = [AudioSamples(fault_tolerant=True)]
    if len(inspect.signature(collate_conversation_audio_fault_tolerant).parameters) == 1:
        reader = []  # NeMo 2.7 has one of its own
    audio, lengths, kept = collate_conversation_audio_fault_tolerant(conversations, *reader)
    return audio, lengths, [example.total_length for example in kept]


def batches(examples: list[Any]) -> ConversationBatches:
    return ConversationBatches(collate=collate, examples=examples, measure_length=lambda example: example.total_length)


@pytest.mark.parametrize("num_tokens", [60, 100, 333])
def test_audio_fills_a_bucket_to_its_edge(corpus: Corpus, num_tokens: int) -> None:
    examples = [conversation(corpus, [index], 12 + index) for index in range(6)]
    audio, lengths, totals = batches(examples)(batch_size=3, input_len=num_tokens + 0.5, output_len=None)
    assert totals == [num_tokens] * 3
    least = min(len(example.input_ids) - 1 for example in examples if example.total_length <= num_tokens)
    assert math.ceil(int(lengths.max()) / 16000 / FRAME_S) == num_tokens - least
    assert audio.shape[0] == 3


def test_a_batch_holds_the_most_audio_turns_padded_to_the_longest_turn(corpus: Corpus) -> None:
    examples = [conversation(corpus, [0], 10), conversation(corpus, [1, 2, 3], 20)]
    audio, lengths, totals = batches(examples)(batch_size=4, input_len=300, output_len=None)
    assert totals == [300] * 4
    assert audio.shape[0] == 1 + 3 * 3
    assert math.ceil(int(lengths.max()) / 16000 / FRAME_S) == 290
    assert audio.shape[1] == int(lengths.max())


@pytest.mark.skipif(nemo.__version__.startswith("2."), reason="NeMo 2.7 can't collate these")
def test_conversations_of_text_alone_are_given_more_of_it(corpus: Corpus) -> None:
    (audio, _, totals) = batches([conversation(corpus, [], 20)])(batch_size=2, input_len=50, output_len=None)
    assert audio.numel() == 0
    assert totals == [50, 50]


def test_a_bucket_below_all_conversations_gets_the_shortest_that_can_be_made(corpus: Corpus) -> None:
    _, lengths, totals = batches([conversation(corpus, [0, 1], 30)])(batch_size=1, input_len=10, output_len=None)
    assert totals == [32]
    assert [math.ceil(int(length) / 16000 / FRAME_S) for length in lengths] == [1, 1]


def test_lengths_without_the_answer_are_refused(corpus: Corpus) -> None:
    example = conversation(corpus, [0], 12)
    assert are_conversations([example])
    with pytest.raises(InvalidArgumentError, match=r"train_ds.measure_total_length must be true"):
        ConversationBatches(collate=collate, examples=[example], measure_length=lambda example: example.input_length)


def write_llm(folder: Path) -> None:
    """A language model of a few thousand parameters, and its tokenizer, as Hugging Face keeps them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(sentences(400, seed=7), trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    ).save_pretrained(folder)


def test_salm_trains_in_buckets_of_tokens(corpus: Corpus, shar: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from nemo.collections.asr.models import EncDecCTCModelBPE
    from nemo.collections.speechlm2 import SALM, DataModule, SALMDataset

    write_llm(tmp_path / "llm")
    with initialize_config_dir(str(Path(__file__).parent / "conf"), version_base=None):
        asr = compose("ctc", overrides=[f"record_dir={tmp_path}", f"model.tokenizer.dir={corpus.tokenizer}"])
    OmegaConf.set_struct(asr, False)
    asr.model.train_ds = asr.model.validation_ds = None
    EncDecCTCModelBPE(cfg=asr.model).save_to(str(tmp_path / "asr.nemo"))
    adapter = OmegaConf.to_container(asr.model.encoder, resolve=True)
    adapter.update(feat_in=adapter["d_model"], subsampling_factor=1, n_layers=1)
    model = {
        "pretrained_llm": str(tmp_path / "llm"),
        "pretrained_asr": str(tmp_path / "asr.nemo"),
        "pretrained_weights": True,
        "freeze_params": [r"^llm\..+$", r"^embed_tokens\..+$", r"^perception\.encoder\..+$"],
        "prevent_freeze_params": [],
        "prompt_format": "llama2",
        "audio_locator_tag": TAG,
        "perception": {
            "target": "nemo.collections.speechlm2.modules.perception.AudioPerceptionModule",
            "modality_adapter": adapter,
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3},
    }
    train_ds = OmegaConf.load(Path(__file__).parents[1] / "examples" / "salm.yaml")
    train_ds.input_cfg[0].update(shar_path=shar, audio_locator_tag=TAG)
    train_ds.update(num_buckets=2, num_cuts_for_bins_estimate=80, bucket_buffer_size=60, max_tokens=150)
    train_ds.update(oomfit_memory_limit="250MiB", oomfit_max_batch_size=5, oomfit_cache=False)
    shapes = Shapes("input_ids")
    trainer = short_trainer(3, shapes, use_distributed_sampler=False)
    salm = SALM(model)
    data = DataModule(OmegaConf.create({"train_ds": train_ds}), salm.tokenizer, SALMDataset(tokenizer=salm.tokenizer))
    trainer.fit(salm, data)
    (finder,) = [callback for callback in trainer.callbacks if isinstance(callback, NemoBatchSizeFinder)]
    assert list(finder.profile.bucket_batch_size) == [5, 5]
    assert [size for size, _ in shapes.seen] == [5, 5, 5]
    assert max(length for _, length in shapes.seen) <= finder.profile.bins.edges[-1]
