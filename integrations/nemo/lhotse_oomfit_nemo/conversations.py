"""Worst-case batches of NeMo's multimodal conversations, in which turns of text and of audio alternate."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from lhotse import CutSet
from lhotse.utils import fastcopy

from lhotse_oomfit.errors import InvalidArgumentError, WorstCaseError
from lhotse_oomfit.stretch import PlainCut, num_samples_at

__all__ = ["ConversationBatches", "are_conversations"]

_PER_TOKEN = ("input_ids", "mask")
"""What a conversation without audio is made longer by: the arrays with one element a token."""


def are_conversations(examples: Sequence[Any]) -> bool:
    """Whether all of them are conversations, with turns and, once a prompt format was applied, tokens."""
    return bool(examples) and all(
        hasattr(example, "turns") and getattr(example, "input_ids", None) is not None for example in examples
    )


class ConversationBatches:
    """``make_batch`` for a calibration: real conversations whose audio is stretched until they fill a bucket.

    The text stays as it is and audio makes up the rest of the length, as audio runs through an encoder first. Audio
    turns of a batch are padded to the longest of them. So all conversations of a batch but one are like the one with
    the most audio turns that fits the bucket, and one is like that with the longest audio turn.

    :param collate: what the DataLoader applies to a sampled batch.
    :param examples: a sample of the conversations.
    :param measure_length: their length in the unit of the bins, which must be all their tokens, those of audio
        included.
    :raises InvalidArgumentError: for lengths that leave the answer out.
    """

    def __init__(
        self, *, collate: Callable[[Any], Any], examples: Sequence[Any], measure_length: Callable[[Any], float]
    ) -> None:
        if any(measure_length(example) != _num_text_tokens(example) + sum(_frames(example)) for example in examples):
            raise InvalidArgumentError(
                "train_ds.measure_total_length must be true with bucket_batch_size=auto and conversations: else "
                "nothing bounds their answers, which take memory too"
            )
        self._collate = collate
        self._examples = list(examples)
        self._measure_length = measure_length
        self._plain: dict[str, PlainCut] = {}

    def __call__(self, *, batch_size: int, input_len: float, output_len: int | None) -> Any:
        """A batch of `batch_size` conversations of `input_len` tokens; `output_len` is no part of their measure."""
        num_tokens = math.floor(input_len)
        near = [example for example in self._examples if self._measure_length(example) <= num_tokens]
        near = near or [min(self._examples, key=self._measure_length)]
        near = [example for example in near if _audio_turns(example)] or near
        most = self._stretched(max(near, key=lambda example: len(_audio_turns(example))), num_tokens)
        longest = max((self._stretched(example, num_tokens) for example in _distinct(near)), key=_longest_turn)
        batch = [longest, *[most] * (batch_size - 1)]
        return self._collate(CutSet([_clone(example, index) for index, example in enumerate(batch)]))

    def _stretched(self, example: Any, num_tokens: int) -> Any:
        """The conversation with as much audio as makes it `num_tokens` long; with more text where it has no audio."""
        frames = _frames(example)
        if not frames:
            return _with_tokens(example, num_tokens)
        room = max(num_tokens - _num_text_tokens(example), len(frames))
        wanted = [max(1, room * own // sum(frames)) for own in frames]
        longest = wanted.index(max(wanted))
        wanted[longest] = max(1, wanted[longest] + room - sum(wanted))
        lengths = iter(wanted)
        turns = [
            fastcopy(turn, cut=self._lasting(turn.cut, next(lengths), example.token_equivalent_duration))
            if hasattr(turn, "cut")
            else turn
            for turn in example.turns
        ]
        return _with_turns(example, turns)

    def _lasting(self, cut: Any, num_frames: int, frame_s: float) -> Any:
        if cut.id not in self._plain:
            self._plain[cut.id] = PlainCut.read(cut)
        plain = self._plain[cut.id]
        num_samples = num_samples_at(num_frames * frame_s, plain.sampling_rate)
        while num_samples > 1 and math.ceil(num_samples / plain.sampling_rate / frame_s) > num_frames:
            num_samples -= 1
        return plain.stretched(num_samples)


def _audio_turns(example: Any) -> list[Any]:
    return [turn for turn in example.turns if hasattr(turn, "cut")]


def _frames(example: Any) -> list[int]:
    """The tokens that each audio turn stands for, as NeMo counts them."""
    return [math.ceil(turn.cut.duration / example.token_equivalent_duration) for turn in _audio_turns(example)]


def _num_text_tokens(example: Any) -> int:
    return len(example.input_ids) - len(_audio_turns(example))  # each audio turn has one token that it replaces


def _longest_turn(example: Any) -> float:
    return max((turn.cut.duration for turn in _audio_turns(example)), default=0.0)


def _distinct(examples: Sequence[Any]) -> list[Any]:
    """Those that can hold the longest single turn: for each number of audio turns the one with the least text, and
    the one whose longest turn has the largest share."""
    found: dict[int, list[Any]] = {}
    for example in examples:
        found.setdefault(len(_audio_turns(example)), []).append(example)
    least = [min(group, key=_num_text_tokens) for group in found.values()]
    return [*least, *(max(group, key=_share_of_longest) for group in found.values())]


def _share_of_longest(example: Any) -> float:
    frames = _frames(example)
    return max(frames) / sum(frames) if frames else 0.0


def _with_turns(example: Any, turns: list[Any]) -> Any:
    changed = copy.copy(example)  # tokens are attributes that dataclasses.replace() would leave behind
    changed.turns = turns
    return changed


def _with_tokens(example: Any, num_tokens: int) -> Any:
    changed = copy.copy(example)
    for name in _PER_TOKEN:
        values = getattr(example, name, None)
        if values is None or len(values) == 0:
            continue
        repeats = -(-num_tokens // len(values))
        changed.__dict__[name] = values.repeat(repeats)[:num_tokens]
    if len(changed.input_ids) != num_tokens:
        raise WorstCaseError(f"the conversation {example.id!r} has no tokens to repeat")
    return changed


def _clone(example: Any, index: int) -> Any:
    """A copy with ids of its own, by which NeMo's collation finds a turn's audio."""
    suffix = f"-worst{index}"
    turns = []
    for number, turn in enumerate(example.turns):
        if hasattr(turn, "cut"):
            turn = dataclasses.replace(turn, cut=fastcopy(turn.cut, id=f"{turn.cut.id}{suffix}-{number}"))
        turns.append(turn)
    changed = _with_turns(example, turns)
    changed.id = f"{example.id}{suffix}"
    return changed
