"""Worst-case batches from a model's ``oomptimizer_schema``, for ``oomfit_batches: schema``."""

from __future__ import annotations

import math
from typing import Any

import torch

from lhotse_oomfit.errors import InvalidArgumentError

__all__ = ["SchemaBatches"]

_TOKENS_PER_SECOND = 12.0
"""Output tokens per second where nothing says how many there are: OOMptimizer's own default for ``--ratio``."""


class SchemaBatches:
    """``make_batch`` for a calibration: random values in the shapes that a NeMo model says it takes.

    :param model: its ``oomptimizer_schema`` is a dict: ``cls`` makes a batch of ``inputs``, each of which has a
        NeuralType or says that it is a placeholder, or a constant.
    :param sampling_rate: of the audio, in Hz.
    :raises InvalidArgumentError: for a model without a schema, or with one that isn't understood.
    """

    def __init__(self, model: Any, *, sampling_rate: int) -> None:
        schema = getattr(model, "oomptimizer_schema", None)
        if not isinstance(schema, dict) or "inputs" not in schema or "cls" not in schema:
            raise InvalidArgumentError(
                f"oomfit_batches=schema must find an oomptimizer_schema on the model, {type(model).__name__} has none; "
                f"leave oomfit_batches out, batches then come from the training data and its dataset"
            )
        self._schema = schema
        self._model_name = type(model).__name__
        self._sampling_rate = sampling_rate
        for item in schema["inputs"]:
            self._values(item, 1, 1, 1)

    def __call__(self, *, batch_size: int, input_len: float, output_len: int | None) -> Any:
        """A batch of `batch_size` examples of `input_len` seconds and `output_len` tokens."""
        num_samples = math.floor(input_len * self._sampling_rate)
        num_tokens = math.ceil(input_len * _TOKENS_PER_SECOND) if output_len is None else int(output_len)
        named: dict[str, Any] = {}
        unnamed: list[Any] = []
        for item in self._schema["inputs"]:
            values = self._values(item, batch_size, num_samples, num_tokens)
            if item.get("name") is None:
                unnamed.append(values)
            else:
                named[item["name"]] = values
        if self._schema["cls"] is tuple and not named:
            return tuple(unnamed)
        return self._schema["cls"](*unnamed, **named)

    def _values(self, item: Any, batch_size: int, num_samples: int, num_tokens: int) -> torch.Tensor:
        kind = item["type"]
        if isinstance(kind, str) and kind == "constant":
            return torch.tensor([batch_size if item["value"] == "batch" else item["value"]])
        if isinstance(kind, str):
            return torch.tensor([])
        length = num_samples if item["seq_length"] == "input" else num_tokens
        name = type(kind.elements_type).__name__
        if name == "AudioSignal":
            return torch.randn(batch_size, length)
        if name == "LengthsType":
            return torch.full((batch_size,), length)
        if name == "LabelsType":
            return torch.randint(0, item["vocab_size"], (batch_size, length))
        if name == "MaskType":
            return torch.ones(batch_size, length)
        raise InvalidArgumentError(
            f"the oomptimizer_schema of {self._model_name} holds a {name}, which isn't known here; leave "
            f"oomfit_batches out, batches then come from the training data and its dataset"
        )
