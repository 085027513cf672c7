"""A training script in icefall's style: a Lhotse data module, `run` on every rank, one loop written out.

    python train.py --cuts train_cuts.jsonl.gz --memory-limit 300MiB         # on a CPU
    python train.py --cuts train_cuts.jsonl.gz --world-size 4                # four cards

Where icefall's recipes call ``scan_pessimistic_batches_for_oom``, this one calls ``calibrate``.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lhotse import CutSet, Fbank, FbankConfig
from lhotse.dataset import K2SpeechRecognitionDataset, SpecAugment
from lhotse.dataset.input_strategies import OnTheFlyFeatures, PrecomputedFeatures
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lhotse_oomfit import CalibratedBucketingSampler, calibrate

logger = logging.getLogger("train")

LETTERS = " abcdefghijklmnopqrstuvwxyz'"


def encode(text: str) -> list[int]:
    """Letters as tokens, 0 being CTC's blank."""
    return [1 + LETTERS.index(letter) for letter in text.lower() if letter in LETTERS]


class AsrDataModule:
    """The data side of a recipe; sampler and dataset are made apart, as ``calibrate`` takes them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.cuts = CutSet.from_file(args.cuts)

    def train_sampler(self) -> CalibratedBucketingSampler:
        # In place of DynamicBucketingSampler(cuts, max_duration=args.max_duration, num_buckets=...).
        return CalibratedBucketingSampler(
            self.cuts,
            bucket_batch_size="auto",
            num_buckets=self.args.num_buckets,
            max_tps=self.args.max_tps,
            tokenizer=encode,
            shuffle=True,
            drop_last=True,
        )

    def train_dataset(self) -> K2SpeechRecognitionDataset:
        has_features = next(iter(self.cuts)).has_features
        strategy = PrecomputedFeatures() if has_features else OnTheFlyFeatures(Fbank(FbankConfig(num_mel_bins=80)))
        return K2SpeechRecognitionDataset(input_transforms=[SpecAugment()], input_strategy=strategy)

    def train_dataloader(self, sampler: Any, dataset: Any) -> DataLoader[Any]:
        return DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=self.args.num_workers)


class Encoder(nn.Module):
    """Stands for the recipe's model: subsampling by four, two recurrent layers, CTC output."""

    def __init__(self, dim: int = 128) -> None:
        super().__init__()
        self.subsampling = nn.Sequential(
            nn.Conv1d(80, dim, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv1d(dim, dim, 3, stride=2, padding=1),
            nn.ReLU(),
        )
        self.rnn = nn.LSTM(dim, dim, num_layers=2, bidirectional=True, batch_first=True)
        self.output = nn.Linear(2 * dim, 1 + len(LETTERS))

    def forward(self, features: torch.Tensor, lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, frames, 80) to (batch, frames / 4, tokens), log-probabilities, and their lengths."""
        hidden = self.subsampling(features.transpose(1, 2)).transpose(1, 2)
        hidden, _ = self.rnn(hidden)
        return self.output(hidden).log_softmax(dim=-1), (lens + 3) // 4


def compute_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """The loss of a batch, summed as in icefall and divided by its frames."""
    device = next(model.parameters()).device
    supervisions = batch["supervisions"]
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        log_probs, lens = model(batch["inputs"].to(device), supervisions["num_frames"].to(device))
    targets = [torch.tensor(encode(text)) for text in supervisions["text"]]
    loss = nn.functional.ctc_loss(
        log_probs.float().transpose(0, 1),
        torch.cat(targets).to(device),
        lens,
        torch.tensor([len(target) for target in targets], device=device),
        reduction="sum",
        zero_infinity=True,
    )
    return loss / lens.sum()


def train_one_epoch(model: nn.Module, optimizer: Any, scheduler: Any, loader: DataLoader[Any], rank: int) -> int:
    num_batches = 0
    for batch in loader:
        loss = compute_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        num_batches += 1
        if rank == 0 and num_batches % 5 == 1:
            logger.info("batch %d, %d cuts, loss %.4f", num_batches, len(batch["supervisions"]["text"]), loss.item())
    return num_batches


def run(rank: int, world_size: int, args: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    if world_size > 1:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(args.master_port))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", rank=rank, world_size=world_size)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(42)
    model: nn.Module = Encoder().to(device)
    if world_size > 1:
        model = DistributedDataParallel(model, device_ids=[rank] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))

    data = AsrDataModule(args)
    sampler, dataset = data.train_sampler(), data.train_dataset()

    # In place of scan_pessimistic_batches_for_oom(model, loader, optimizer, ...): after DDP, before the first batch.
    calibrate(
        sampler,
        dataset,
        model=model,
        optimizer=optimizer,
        training_step=compute_loss,
        scheduler=scheduler,
        memory_limit=args.memory_limit,
        cache=args.cache,
        precision="bf16" if device.type == "cuda" else "",
    )

    loader = data.train_dataloader(sampler, dataset)
    for epoch in range(args.num_epochs):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  Lhotse's samplers have it
        num_batches = train_one_epoch(model, optimizer, scheduler, loader, rank)
        if rank == 0:
            logger.info("epoch %d: %d batches, sizes %s", epoch, num_batches, sampler.bucket_batch_size)
    if world_size > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=Path, required=True, help="a Lhotse cut manifest, with features or without")
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--master-port", type=int, default=12354)
    parser.add_argument("--num-epochs", type=int, default=2)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--num-buckets", type=int, default=6)
    parser.add_argument("--max-tps", type=float, default=30.0, help="skip cuts with more letters a second")
    parser.add_argument("--memory-limit", help="e.g. 300MiB; needed on a CPU")
    parser.add_argument("--cache", help="where the profile is kept")
    args = parser.parse_args()
    if args.world_size > 1:
        mp.spawn(run, args=(args.world_size, args), nprocs=args.world_size, join=True)
    else:
        run(0, 1, args)


if __name__ == "__main__":
    main()
