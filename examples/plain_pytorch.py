"""Train the same Conformer-CTC with a hand-written loop, in one process or several.

    python examples/plain_pytorch.py
    torchrun --nproc-per-node 2 examples/plain_pytorch.py        # gloo on CPUs, NCCL on cards
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/plain_pytorch.py

``calibrate`` is called once, before the loader is iterated; the rest is an ordinary training loop.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from asr import recipe
from asr.dataset import SpeechDataset
from asr.model import ConformerCTC, greedy_tokens, move_to
from asr.scoring import edit_distance
from torch.nn.parallel import DistributedDataParallel

from lhotse_oomfit import calibrate


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on a card, full precision on a CPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


class TrainingLoss(torch.nn.Module):
    """A training step as a module: DistributedDataParallel synchronises what goes through ``forward``."""

    def __init__(self, model: ConformerCTC) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of a batch as the loader yields it."""
        device = next(self.parameters()).device
        with autocast(device):
            return self.model.loss(move_to(batch, device))


def training_step(compute_loss: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """What ``calibrate`` tries out."""
    loss: torch.Tensor = compute_loss(batch)
    return loss


@torch.no_grad()
def score(model: ConformerCTC, speech: recipe.Speech, device: torch.device) -> float:
    """CER over the held-out utterances of all ranks."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in recipe.held_out_loader(speech):
        with autocast(device):
            log_probs, lens = model(batch["audio"].to(device), batch["audio_lens"].to(device))
        for tokens, text in zip(greedy_tokens(log_probs, lens), batch["texts"], strict=True):
            counts += torch.tensor([edit_distance(text, speech.tokenizer.decode(tokens)), len(text)], device=device)
    if dist.is_initialized():
        dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1].clamp(min=1.0))


def train(args: argparse.Namespace, checkpoint: Path, *, rank: int, world_size: int, device: torch.device) -> None:
    speech = recipe.load_speech(args)
    model = recipe.build_model(args, speech.tokenizer).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.peak_lr(args), betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: recipe.lr_factor(step, max_steps=args.max_steps)
    )
    torch.manual_seed(args.seed + rank)  # from here on, dropout and SpecAugment differ between ranks
    compute_loss: torch.nn.Module = TrainingLoss(model)
    if world_size > 1:
        # Before calibrating, so that the memory of its buckets is there.
        compute_loss = DistributedDataParallel(compute_loss, device_ids=[device] if device.type == "cuda" else None)
    sampler = recipe.training_sampler(args, speech)
    dataset = SpeechDataset(speech.tokenizer)

    step = 0
    if args.resume:
        state = torch.load(checkpoint, map_location=device, weights_only=False)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        sampler.load_state_dict(state["sampler"])
        step = state["step"]

    first_step, num_resumed = step, sampler.num_batches_drawn

    calibrate(
        sampler,
        dataset,
        model=compute_loss,
        optimizer=optimizer,
        training_step=training_step,
        scheduler=scheduler,
        memory_fraction=args.memory_fraction,
        memory_limit=args.memory_limit,
        cache=args.cache,
        recalibrate=args.recalibrate,
        precision="bf16" if device.type == "cuda" else "",
    )

    loader = recipe.training_loader(args, sampler, dataset, rank=rank, world_size=world_size)
    model.train()
    deadline = time.monotonic() + 60.0 * args.max_minutes if args.max_minutes else float("inf")
    audio_s, started = 0.0, time.monotonic()
    batches = iter(loader)
    done = step >= args.max_steps
    while not done:
        batch = next(batches)
        loss = training_step(compute_loss, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        step += 1
        done = step >= args.max_steps or out_of_time(deadline, device)
        audio_s += float(batch["audio_lens"].sum()) / recipe.SAMPLING_RATE
        if rank == 0 and step % 10 == 0:
            rate = audio_s / (time.monotonic() - started)
            print(f"step {step}: loss {loss.item():.3f}, {rate:.0f} seconds of audio a second", flush=True)
        if done or step % args.valid_every == 0:
            cer = score(model, speech, device)
            if rank == 0:
                print(f"step {step}: CER on {len(speech.held_out)} held-out utterances {cer:.1%}", flush=True)
                parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
                state = {name: part.state_dict() for name, part in parts.items()}
                # Not state_dict(): a loader's workers are ahead of training.
                position = sampler.state_dict_at(
                    num_resumed + step - first_step, num_workers=args.num_workers if args.loader == "iterable" else 0
                )
                torch.save({**state, "sampler": position, "step": step}, checkpoint.with_suffix(".tmp"))
                checkpoint.with_suffix(".tmp").replace(checkpoint)


def out_of_time(deadline: float, device: torch.device) -> bool:
    """Whether the deadline has passed on any rank: all of them stop after the same step."""
    late = torch.tensor(float(time.monotonic() > deadline), device=device)
    if dist.is_initialized() and deadline != float("inf"):
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
    return bool(late)


def main() -> None:
    parser = recipe.parser(__doc__.splitlines()[0])
    args = parser.parse_args()
    checkpoint = recipe.check_arguments(parser, args, checkpoint="checkpoint.pt")
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(name)s: %(message)s")
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    try:
        train(args, checkpoint, rank=rank, world_size=world_size, device=device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
