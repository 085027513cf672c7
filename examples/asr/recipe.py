"""What both recipes share: their arguments, the data they ask for, and loaders over it."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from lhotse import CutSet
from lhotse.dataset import IterableDatasetWrapper, SimpleCutSampler, make_worker_init_fn
from torch.utils.data import DataLoader

from asr.corpus import ChordCorpus
from asr.dataset import SpeechDataset
from asr.model import SIZES, ConformerConfig, ConformerCTC
from asr.sources import SAMPLING_RATE, hold_out, load_cuts, load_manifest, transcript
from asr.tokenizer import CharTokenizer
from lhotse_oomfit import CalibratedBucketingSampler, estimate_bins

CPU_MEMORY_LIMIT = "256MiB"
"""What a training step may use on a CPU: enough for batches of 3 minutes of audio with the tiny model, which learns
the corpus of chords faster from many such steps than from few larger ones."""


def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the arguments of both recipes."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = result.add_argument_group("data").add_argument
    add("--manifest", type=Path, help="train on a NeMo JSONL manifest")
    add("--cuts", type=Path, help="train on a Lhotse cut manifest")
    add("--valid-manifest", type=Path, help="held-out utterances, a NeMo JSONL manifest (else a tenth of the data)")
    add("--valid-cuts", type=Path, help="held-out utterances, a Lhotse cut manifest (else a tenth of the data)")
    add("--utterances", type=int, default=1200, help="size of the corpus that's made when no data is named")
    add("--max-utterance-s", type=float, default=8.0, help="its longest utterance, in seconds")
    add("--num-workers", type=int, default=0, help="processes that load data")
    add("--loader", choices=["map", "iterable"], default="map", help="style of the training dataset")

    add = result.add_argument_group("bucketing and batch sizes").add_argument
    add("--bins", choices=["1d", "2d"], default="1d", help="buckets by length, or by length and number of characters")
    add("--num-buckets", type=int, default=8, help="buckets by length")
    add("--num-subbuckets", type=int, default=2, help="buckets by number of characters in each (with --bins 2d)")
    add("--max-tps", type=float, default=25.0, help="skip utterances with more characters a second than this")
    add("--buffer-size", type=int, default=5000, help="utterances that the sampler chooses from")
    add("--memory-fraction", type=float, default=0.9, help="share of the memory that a training step may fill")
    add("--memory-limit", help=f"how much memory there is, e.g. 600MiB ({CPU_MEMORY_LIMIT} on a CPU, the card on CUDA)")
    add("--cache", help="folder or YAML file for profiles (else the user's cache folder)")
    add("--recalibrate", choices=["auto", "always"], default="auto", help="always: measure, though a profile fits")

    add = result.add_argument_group("model and training").add_argument
    add("--model", choices=list(SIZES), default="tiny", help="size of the Conformer")
    add("--lr", type=float, help="peak learning rate (else 0.045 over the root of the model's width)")
    add("--max-steps", type=int, default=80, help="optimizer steps")
    add("--max-minutes", type=float, help="stop after so many minutes of training, too")
    add("--valid-every", type=int, help="steps between validations (else a quarter of them all)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to train")
    add("--seed", type=int, default=0, help="for initial weights, order of data and the corpus")
    add("--output", type=Path, default=Path("asr_output"), help="folder for the corpus and checkpoints")
    add("--resume", action="store_true", help="go on from the last checkpoint in --output")
    return result


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace, *, checkpoint: str) -> Path:
    """Fills in what depends on other arguments, and ends the program where they contradict each other.

    :param checkpoint: the checkpoint's name in ``--output``.
    :return: its path; it exists if ``--resume`` was asked for.
    """
    if args.manifest and args.cuts:
        parser.error("--manifest and --cuts must not be given both, name one")
    if args.valid_manifest and args.valid_cuts:
        parser.error("--valid-manifest and --valid-cuts must not be given both, name one")
    if (args.valid_manifest or args.valid_cuts) and not (args.manifest or args.cuts):
        parser.error("--valid-manifest and --valid-cuts need --manifest or --cuts to train on")
    if args.max_steps < 1:
        parser.error(f"--max-steps must be at least 1, it is {args.max_steps}")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and args.memory_limit is None:
        args.memory_limit = CPU_MEMORY_LIMIT
    if args.valid_every is None:
        args.valid_every = max(1, args.max_steps // 4)
    path = args.output / checkpoint
    if args.resume and not path.is_file():
        parser.error(f"--resume needs a checkpoint, there is no {path}; leave it out to start from the beginning")
    return path


@dataclass(frozen=True, kw_only=True)
class Speech:
    """Utterances to train on and to score, and the characters in them."""

    train: CutSet
    held_out: CutSet
    tokenizer: CharTokenizer


def load_speech(args: argparse.Namespace) -> Speech:
    """The data that the arguments name; the corpus of chords is made in ``--output`` when they name none."""
    if args.manifest or args.cuts:
        cuts = load_manifest(args.manifest) if args.manifest else load_cuts(args.cuts)
    else:
        corpus = ChordCorpus(num_utterances=args.utterances, max_s=args.max_utterance_s, seed=args.seed)
        args.output.mkdir(parents=True, exist_ok=True)
        with FileLock(args.output / "corpus.lock"):  # processes of one job start at the same time
            cuts = load_manifest(corpus.write(args.output / "corpus"))
    if args.valid_manifest or args.valid_cuts:
        train, held_out = (
            cuts,
            load_manifest(args.valid_manifest) if args.valid_manifest else load_cuts(args.valid_cuts),
        )
    else:
        train, held_out = hold_out(cuts)
    return Speech(train=train, held_out=held_out, tokenizer=CharTokenizer.from_texts(transcript(cut) for cut in train))


def build_model(args: argparse.Namespace, tokenizer: CharTokenizer) -> ConformerCTC:
    """The model that ``--model`` names, on the CPU, with weights that follow from ``--seed``."""
    torch.manual_seed(args.seed)
    return ConformerCTC(ConformerConfig(vocab_size=tokenizer.vocab_size, **SIZES[args.model]))


def peak_lr(args: argparse.Namespace) -> float:
    """``--lr``, or one that falls with the root of the model's width, as in Vaswani et al. (2017)."""
    return args.lr if args.lr is not None else 0.045 * SIZES[args.model]["dim"] ** -0.5


def lr_factor(step: int, *, max_steps: int) -> float:
    """Share of the peak learning rate at a step: linear warm-up over a sixth of all steps, then half a cosine."""
    warmup = max(1, max_steps // 6)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step - warmup) / max(1, max_steps - warmup)))


def training_sampler(args: argparse.Namespace, speech: Speech) -> CalibratedBucketingSampler:
    """Endless shuffled batches from buckets whose sizes are still to be calibrated."""
    bins = estimate_bins(
        speech.train,
        args.num_buckets,
        num_subbuckets=args.num_subbuckets if args.bins == "2d" else None,
        measure_tokens=lambda cut: len(speech.tokenizer(transcript(cut))),
        max_tps=args.max_tps,
    )
    split: dict[str, Any] = {"seed": args.seed}
    if args.loader == "iterable" and args.num_workers > 0:  # each worker draws from all data, in its own order
        split = {"seed": "randomized", "rank": 0, "world_size": 1}
    return CalibratedBucketingSampler(
        speech.train.repeat(),
        bucket_batch_size="auto",
        duration_bins=bins.as_lists(),
        max_tps=args.max_tps,
        tokenizer=speech.tokenizer,
        shuffle=True,
        buffer_size=args.buffer_size,
        on_resume="new_epoch",  # where the old order can't go on, with other bins or ranks, a new one will do
        **split,
    )


def training_loader(
    args: argparse.Namespace,
    sampler: CalibratedBucketingSampler,
    dataset: SpeechDataset,
    *,
    rank: int,
    world_size: int,
) -> DataLoader[dict[str, Any]]:
    """A loader over the sampler, in the style that ``--loader`` names."""
    return DataLoader(
        dataset if args.loader == "map" else IterableDatasetWrapper(dataset, sampler),
        sampler=sampler if args.loader == "map" else None,
        batch_size=None,
        num_workers=args.num_workers,
        persistent_workers=args.num_workers > 0,
        worker_init_fn=make_worker_init_fn(rank=rank, world_size=world_size, seed=args.seed),
    )


def held_out_loader(speech: Speech) -> DataLoader[dict[str, Any]]:
    """Held-out utterances in order of length, up to two minutes of audio a batch."""
    sampler = SimpleCutSampler(speech.held_out.sort_by_duration(), max_duration=120.0, shuffle=False)
    return DataLoader(SpeechDataset(speech.tokenizer), sampler=sampler, batch_size=None)


__all__ = [
    "SAMPLING_RATE",
    "Speech",
    "build_model",
    "check_arguments",
    "held_out_loader",
    "load_speech",
    "lr_factor",
    "parser",
    "peak_lr",
    "training_loader",
    "training_sampler",
]
