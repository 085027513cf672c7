"""A Lhotse-style dataset: a mini-batch of cuts in, tensors out."""

from __future__ import annotations

from typing import Any

import torch
from lhotse import CutSet

from asr.sources import transcript
from asr.tokenizer import CharTokenizer


class SpeechDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Reads and pads audio and tokens; the sampler decides which cuts make a batch."""

    def __init__(self, tokenizer: CharTokenizer) -> None:
        self.tokenizer = tokenizer

    def __getitem__(self, cuts: CutSet) -> dict[str, Any]:
        """
        :return: ``audio`` (B, S) float32 and ``tokens`` (B, U) int64, padded with zeros; their ``audio_lens`` and
            ``token_lens`` (B,) int64; ``texts`` and ``ids``, lists of B strings.
        """
        # Channels are averaged; cuts may be mono or not.
        audio = [torch.from_numpy(cut.load_audio()).mean(dim=0) for cut in cuts]
        texts = [transcript(cut) for cut in cuts]
        tokens = [torch.tensor(self.tokenizer(text), dtype=torch.int64) for text in texts]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "audio": pad(audio, batch_first=True),
            "audio_lens": torch.tensor([len(samples) for samples in audio]),
            "tokens": pad(tokens, batch_first=True),
            "token_lens": torch.tensor([len(ids) for ids in tokens]),
            "texts": texts,
            "ids": [cut.id for cut in cuts],
        }
