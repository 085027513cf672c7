"""Train a small Conformer-CTC with Lightning, on batches as large as the memory allows.

    python examples/train_asr.py                                  # on a corpus that it makes itself
    python examples/train_asr.py --manifest train.jsonl --bins 2d # on a NeMo manifest, with 2D buckets

The first run measures a batch size for every bucket; the next ones load it.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from asr import recipe
from asr.dataset import SpeechDataset
from asr.model import ConformerCTC, greedy_tokens
from asr.scoring import edit_distance
from asr.tokenizer import CharTokenizer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lhotse_oomfit.lightning import BucketBatchSizeFinder


class Recogniser(pl.LightningModule):
    """Training and scoring of a :class:`ConformerCTC`; it knows nothing of batch sizes."""

    def __init__(self, model: ConformerCTC, tokenizer: CharTokenizer, *, lr: float, max_steps: int) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.lr = lr
        self.max_steps = max_steps
        self.edits = self.characters = 0
        self.sample = ("", "")
        self.cer: float | None = None

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = self.model.loss(batch)
        self.log("loss", loss, prog_bar=True, batch_size=len(batch["ids"]))
        return loss

    def on_validation_epoch_start(self) -> None:
        self.edits = self.characters = 0

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        log_probs, lens = self.model(batch["audio"], batch["audio_lens"])
        for tokens, text in zip(greedy_tokens(log_probs, lens), batch["texts"], strict=True):
            self.sample = (text, self.tokenizer.decode(tokens))
            self.edits += edit_distance(*self.sample)
            self.characters += len(text)

    def on_validation_epoch_end(self) -> None:
        counts = torch.tensor([self.edits, self.characters], dtype=torch.float32, device=self.device)
        edits, characters = self.trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        self.cer = edits / max(1.0, characters)
        self.log("cer", self.cer, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=(0.9, 0.98), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: recipe.lr_factor(step, max_steps=self.max_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SpeechData(pl.LightningDataModule):
    """Makes the loaders, once the processes of the job know each other."""

    def __init__(self, args: argparse.Namespace, speech: recipe.Speech) -> None:
        super().__init__()
        self.args = args
        self.speech = speech

    def train_dataloader(self) -> torch.utils.data.DataLoader[dict[str, Any]]:
        return recipe.training_loader(
            self.args,
            recipe.training_sampler(self.args, self.speech),
            SpeechDataset(self.speech.tokenizer),
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
        )

    def val_dataloader(self) -> torch.utils.data.DataLoader[dict[str, Any]]:
        return recipe.held_out_loader(self.speech)


class ProgressLines(pl.Callback):
    """A line at each validation, where no terminal shows a progress bar."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Recogniser) -> None:
        loss = trainer.callback_metrics.get("loss")
        if trainer.is_global_zero and loss is not None:
            print(f"step {trainer.global_step}: loss {loss.item():.3f}, CER {pl_module.cer:.1%}", flush=True)


def main() -> None:
    parser = recipe.parser(__doc__.splitlines()[0])
    parser.add_argument("--precision", help="Lightning's, e.g. bf16-mixed (the default on CUDA) or 32-true (on CPU)")
    parser.add_argument("--devices", type=int, default=1, help="processes, one per card on CUDA")
    parser.add_argument("--strategy", default="auto", help="Lightning's, e.g. ddp")
    args = parser.parse_args()
    checkpoint = recipe.check_arguments(parser, args, checkpoint="checkpoints/last.ckpt")
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # Lightning 2.6 still asks torch 2.13 in the old way.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
    # A new run takes the place of the last one's checkpoint.
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")

    speech = recipe.load_speech(args)
    model = recipe.build_model(args, speech.tokenizer)
    recogniser = Recogniser(model, speech.tokenizer, lr=recipe.peak_lr(args), max_steps=args.max_steps)
    finder = BucketBatchSizeFinder(
        memory_fraction=args.memory_fraction,
        memory_limit=args.memory_limit,
        cache=args.cache,
        recalibrate=args.recalibrate,
    )
    trainer = pl.Trainer(
        accelerator=args.device,
        devices=args.devices,
        strategy=args.strategy,
        precision=args.precision or ("bf16-mixed" if args.device == "cuda" else "32-true"),
        max_steps=args.max_steps,
        max_epochs=-1,
        max_time=timedelta(minutes=args.max_minutes) if args.max_minutes else None,
        val_check_interval=args.valid_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        use_distributed_sampler=False,  # Lhotse's samplers split the work over ranks themselves
        callbacks=[
            finder,
            *([] if sys.stderr.isatty() else [ProgressLines()]),
            ModelCheckpoint(checkpoint.parent, "last", enable_version_counter=False),  # after each validation
        ],
        logger=CSVLogger(args.output, name="logs"),
        enable_progress_bar=sys.stderr.isatty(),
        enable_model_summary=False,
    )
    data = SpeechData(args, speech)
    trainer.fit(recogniser, data, ckpt_path=checkpoint if args.resume else None)
    trainer.save_checkpoint(checkpoint)
    if trainer.global_step % args.valid_every:
        trainer.validate(recogniser, data, verbose=False)
    if trainer.is_global_zero:
        print(f"reference:  {recogniser.sample[0]}\nrecognised: {recogniser.sample[1]}")
        print(
            f"CER on {len(speech.held_out)} held-out utterances after {trainer.global_step} steps: {recogniser.cer:.1%}"
        )


if __name__ == "__main__":
    main()
