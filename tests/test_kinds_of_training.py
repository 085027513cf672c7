"""One tiny real run of each kind of training: calibrated under a memory limit, then trained with the sizes found."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from lhotse import CutSet, Recording
from lhotse.audio import AudioSource
from lhotse.cut.text import TextExample, TextPairExample
from lhotse.dataset.collation import collate_audio
from lhotse.dataset.sampling.base import TokenConstraint
from test_lightning import Recogniser, finder, loader_for, pl, trainer_for  # skips without Lightning
from tiny_asr import RATE, TinyDataset, TinyModel, fingerprint_of_state, tiny_cuts, tiny_sampler, training_step
from torch import nn
from torch.utils.data import DataLoader

from lhotse_oomfit import CalibratedBucketingSampler, calibrate
from lhotse_oomfit.errors import InvalidArgumentError, WorstCaseError
from lhotse_oomfit.memory import CpuMemory, live_tensors

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


def trains_inside(
    sampler: Any, dataset: Any, model: Any, step: Any, *, scaler: Any = None, clip: float | None = None, **options: Any
) -> Any:
    """Calibrate, check that nothing changed, train an epoch with every step inside the budget; returns the profile."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def state() -> Any:
        holders = [model, optimizer, *([] if scaler is None else [scaler])]
        return fingerprint_of_state(*holders), torch.get_rng_state().numpy().tobytes()

    before = state()
    profile = calibrate(
        sampler,
        dataset,
        model=model,
        optimizer=optimizer,
        training_step=step,
        scaler=scaler,
        **{"memory_limit": "3MiB", "cache": False, "progress": False, **options},
    )
    assert state() == before
    memory = CpuMemory(limit_bytes=profile.budget_bytes, resident=lambda: live_tensors(model, [optimizer]))
    losses = []
    for batch in DataLoader(dataset, sampler=sampler, batch_size=None):
        with memory.measure():
            loss = step(model, batch)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        (optimizer.step if scaler is None else lambda: scaler.step(optimizer))()
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert np.isfinite(losses).all()
    assert profile.bucket_batch_size == sorted(profile.bucket_batch_size, reverse=True)
    assert profile.bucket_batch_size[0] > profile.bucket_batch_size[-1] >= 1
    return profile


# Precisions


class Translator(nn.Module):
    """An encoder over frames and a decoder over characters, with cross-attention."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.subsample = nn.Conv1d(16, width, 5, stride=4, padding=2)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.embedding = nn.Embedding(20, width)
        self.decoder = nn.TransformerDecoderLayer(width, 4, 2 * width, batch_first=True)
        self.head = nn.Linear(width, 20)

    def loss(self, batch: Any) -> torch.Tensor:
        dtype = self.head.weight.dtype
        memory = self.encoder(self.subsample(batch["features"].transpose(1, 2).to(dtype)).transpose(1, 2))
        tokens = batch["tokens"]
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=dtype)
        hidden = self.decoder(self.embedding(tokens), memory, tgt_mask=causal, tgt_is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).transpose(1, 2).float(), tokens)


def test_a_sequence_to_sequence_model_in_bf16_true_gets_sizes_over_both_lengths():
    torch.manual_seed(0)
    bins = [(1.0, 6), (1.0, 12), (2.0, 12), (2.0, 24), (4.0, 24), (4.0, 48)]
    sizes = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = Translator().to(dtype)
        sampler = tiny_sampler(duration_bins=bins, max_tps=None)
        profile = trains_inside(sampler, TinyDataset(), model, training_step, precision=str(dtype))
        assert [bucket.output_len for bucket in profile.buckets] == [6, 12, 12, 24, 24, 48]
        assert {state.dtype for state in model.parameters()} == {dtype}
        sizes[dtype] = sum(profile.bucket_batch_size)
    assert sizes[torch.bfloat16] > 1.2 * sizes[torch.float32]


def test_fp16_mixed_with_a_scaler_and_clipping():
    torch.manual_seed(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def step(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            hidden = model.block(model.subsample(batch["features"].transpose(1, 2)).transpose(1, 2))
        return hidden.float().square().mean()

    profile = trains_inside(tiny_sampler(), TinyDataset(), TinyModel(), step, scaler=scaler, clip=1.0)
    assert profile.num_trials > 0
    assert scaler.get_scale() == 256.0


@pytest.mark.parametrize(("precision", "clip"), [("bf16-mixed", 0.5), ("bf16-true", None), ("32-true", 0.5)])
def test_lightning_s_precisions_with_and_without_clipping(precision, clip):
    class Half(Recogniser):
        def training_step(self, batch, batch_idx):
            features = batch["features"].to(self.model.head.weight.dtype)
            log_probs = self.model(features)
            self.losses.append(float(log_probs.detach().float().mean()))
            return log_probs.float().square().mean()

    pl.seed_everything(1, verbose=False)
    callback, module = finder(), Half()
    trainer = trainer_for(callback, precision=precision, gradient_clip_val=clip, max_steps=3)
    trainer.fit(module, loader_for())
    assert len(module.losses) == 3
    assert np.isfinite(module.losses).all()
    fields = callback.profile.fingerprint.fields
    assert fields["precision"] == precision
    assert fields["gradient clipping"] == str(clip is not None)


# Audio to audio


class EnhancementDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Noisy audio and the clean recording that a custom field refers to."""

    def __getitem__(self, cuts: CutSet) -> dict[str, torch.Tensor]:
        noisy, lens = collate_audio(cuts)
        clean, _ = collate_audio(cuts, recording_field="target_recording")
        return {"noisy": noisy, "clean": clean, "lens": lens}


class Enhancer(nn.Module):
    """Strided convolutions down and up again, with a mask between."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.Conv1d(1, width, 64, stride=32)
        self.mask = nn.Conv1d(width, width, 9, padding=4)
        self.up = nn.ConvTranspose1d(width, 1, 64, stride=32)

    def loss(self, batch: Any) -> torch.Tensor:
        encoded = self.down(batch["noisy"][:, None]).relu()
        masked = encoded * self.mask(encoded).sigmoid()
        enhanced = self.up(masked)[:, 0]
        return (enhanced - batch["clean"][:, : enhanced.shape[1]]).abs().mean()


def with_targets(cuts: CutSet) -> CutSet:
    made = []
    for index, cut in enumerate(cuts):
        file = io.BytesIO()
        samples = 0.1 * np.random.default_rng(1000 + index).standard_normal(cut.num_samples)
        soundfile.write(file, samples, RATE, format="WAV")
        cut.target_recording = Recording(
            id=f"target-{index}",
            sources=[AudioSource(type="memory", channels=[0], source=file.getvalue())],
            sampling_rate=RATE,
            num_samples=cut.num_samples,
            duration=cut.duration,
        )
        made.append(cut)
    return CutSet.from_cuts(made)


def test_audio_to_audio_measures_inputs_and_targets_of_the_same_length():
    torch.manual_seed(0)
    longest = []

    def step(model: Any, batch: Any) -> torch.Tensor:
        assert batch["noisy"].shape == batch["clean"].shape
        assert not torch.equal(batch["noisy"], batch["clean"])
        longest.append(batch["noisy"].shape[1])
        return model.loss(batch)

    sampler = tiny_sampler(with_targets(tiny_cuts(30)), max_tps=12)
    trains_inside(sampler, EnhancementDataset(), Enhancer(), step, memory_limit="4MiB")
    assert {1 * RATE, 2 * RATE, 3 * RATE, 4 * RATE} <= set(longest)


# Text


class TextDataset(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Tokens of text examples, padded; of pairs, both sides."""

    def __getitem__(self, examples: Any) -> dict[str, torch.Tensor]:
        if isinstance(next(iter(examples)), TextPairExample):
            sides = {"source": [e.source.tokens for e in examples], "target": [e.target.tokens for e in examples]}
        else:
            sides = {"source": [e.tokens for e in examples]}
        batch = {
            name: nn.utils.rnn.pad_sequence([torch.as_tensor(t) for t in tokens], batch_first=True)
            for name, tokens in sides.items()
        }
        return {**batch, "lens": torch.tensor([len(tokens) for tokens in sides["source"]])}


class TextModel(nn.Module):
    """A language model, or a translator where there are targets."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, 4, 2 * width, batch_first=True)
        self.head = nn.Linear(width, 32)

    def loss(self, batch: Any) -> torch.Tensor:
        hidden, target = self.encoder(self.embedding(batch["source"])), batch["source"]
        if "target" in batch:
            target = batch["target"]
            hidden = self.decoder(self.embedding(target), hidden)
        return nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), target) + 0.0 * sum(
            p.sum() for p in self.decoder.parameters()
        )


def text(num_tokens: int) -> TextExample:
    tokens = np.random.default_rng(num_tokens).integers(1, 32, num_tokens)
    return TextExample(text="".join(chr(96 + token) for token in tokens), tokens=tokens)


def texts(num: int = 90) -> list[TextExample]:
    return [text(int(n)) for n in np.random.default_rng(0).permutation(np.linspace(4, 64, num))]


def text_sampler(examples: Any, **options: Any) -> CalibratedBucketingSampler:
    return CalibratedBucketingSampler(
        CutSet(examples),
        bucket_batch_size="auto",
        shuffle=True,
        **{"duration_bins": [16, 32, 48, 64], "measure_length": lambda example: example.num_tokens, **options},
    )


def test_texts_alone_are_bucketed_by_tokens_and_measured_at_the_edges():
    torch.manual_seed(0)
    shapes = []

    def step(model: Any, batch: Any) -> torch.Tensor:
        shapes.append(tuple(batch["source"].shape))
        return model.loss(batch)

    profile = trains_inside(text_sampler(texts()), TextDataset(), TextModel(), step)
    assert {(bucket.size, length) for bucket, length in zip(profile.buckets, (16, 32, 48, 64), strict=True)} <= {
        *shapes
    }
    assert all(bucket.output_len is None for bucket in profile.buckets)


def test_texts_with_estimated_bins_or_measured_in_characters_work():
    torch.manual_seed(0)
    sampler = text_sampler(texts(), duration_bins=None, num_buckets=4)
    trains_inside(sampler, TextDataset(), TextModel(), training_step)
    sampler = text_sampler(texts(), measure_length=lambda example: len(example.text))
    trains_inside(sampler, TextDataset(), TextModel(), training_step)


def test_of_pairs_of_texts_targets_grow_with_sources_as_in_the_data():
    torch.manual_seed(0)
    pairs = [TextPairExample(source=example, target=text(2 * example.num_tokens)) for example in texts()]
    shapes = []

    def step(model: Any, batch: Any) -> torch.Tensor:
        shapes.append((batch["source"].shape[1], batch["target"].shape[1]))
        return model.loss(batch)

    trains_inside(text_sampler(pairs), TextDataset(), TextModel(), step)
    assert {(16, 32), (32, 64), (48, 96), (64, 128)} <= set(shapes)


def test_make_batch_does_for_texts_too():
    torch.manual_seed(0)

    def make_batch(*, batch_size: int, input_len: float, output_len: int | None) -> dict[str, torch.Tensor]:
        assert output_len is None
        return {"source": torch.ones(batch_size, int(input_len), dtype=torch.int64)}

    own = trains_inside(text_sampler(texts()), TextDataset(), TextModel(), training_step, make_batch=make_batch)
    torch.manual_seed(0)
    found = trains_inside(text_sampler(texts()), TextDataset(), TextModel(), training_step)
    for size, other in zip(own.bucket_batch_size, found.bucket_batch_size, strict=True):
        assert size == pytest.approx(other, rel=0.03, abs=1)


def test_texts_that_count_their_tokens_need_no_duration():
    torch.manual_seed(0)
    counted = texts()
    for example in counted:
        example.custom = {"input_ids": list(range(example.num_tokens))}
    profile = trains_inside(text_sampler(counted), TextDataset(), TextModel(), training_step)
    assert all(bucket.output_len is None for bucket in profile.buckets)


def refused(sampler: Any, error: type[Exception], match: str, dataset: Any = None) -> None:
    model = TextModel()
    with pytest.raises(error, match=match):
        calibrate(
            sampler,
            dataset or TextDataset(),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            training_step=training_step,
            memory_limit="3MiB",
            cache=False,
            progress=False,
        )


def test_what_can_not_be_brought_to_an_edge_is_refused_with_the_remedy():
    constant = text_sampler(texts(), measure_length=lambda example: 10)
    refused(constant, WorstCaseError, "the length of a text example must grow with its tokens to reach 16")
    mixed = text_sampler([*texts(20), Other()], duration_bins=[80])
    refused(mixed, WorstCaseError, "examples must be cuts, or text examples alone.*Other, TextExample; pass make_batch")
    counted = texts()
    for example in counted:
        example.custom = {"input_ids": list(range(example.num_tokens))}
    two_edges = text_sampler(counted, duration_bins=[(32, 32), (64, 64)])
    refused(two_edges, WorstCaseError, "can't be brought to a bucket's edge; pass make_batch")


class Other:
    """An example of some other package's."""

    id = "other"
    num_tokens = 5


def test_a_token_constraint_beside_sizes_is_refused_when_the_sampler_is_made():
    with pytest.raises(InvalidArgumentError, match="bucket_batch_size must be the only limit on batches, constraint"):
        text_sampler(texts(), constraint=TokenConstraint(max_tokens=1000))
