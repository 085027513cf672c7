"""One job of ``nemo_script.py``: NeMo's script, run as it is, with a stopwatch among the Trainer's callbacks."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recording import every_trial, versions

RATE = 16_000
MAX_DURATION_S = 30.0
MODELS = {
    "ctc": ("asr_ctc/speech_to_text_ctc_bpe.py", "fastconformer", "fast-conformer_ctc_bpe", 0.30),
    "aed": ("speech_multitask/speech_to_text_aed.py", "speech_multitask", "fast-conformer_aed", 0.57),
}
"""Script and configuration below NeMo's ``examples/asr``, and the share of the card, as in ``oomptimizer.py``."""
KINDS = ("auto", "oomptimizer", "shipped")
BATCH_DURATION = 360
"""NeMo's fast-conformer_aed.yaml, which has ``quadratic_duration: 15`` too; the CTC's YAML has neither."""
MAX_TPS = 12
"""OOMptimizer's default ratio, which bounds the tokens of a 1D bucket."""
LANGUAGES = ("en", "de", "es", "fr")
WARM_UP = 8
"""Steps of a training that no rate is made of."""
SAVE_EVERY = 10
TINY_BINS = 4
TINY_MEMORY = "300MiB"
STANDING_BY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model, trained by one kind of batching."""

    name: str
    nemo: Path
    work: Path
    out: Path
    bins: list[Any]
    sizes: list[int]
    train_steps: int
    num_workers: int
    overrides: list[str]
    tiny: bool

    @classmethod
    def of(cls, options: argparse.Namespace) -> Job:
        model = options.child.partition("-")[0]
        theirs = json.loads((options.oomptimizer_results / f"{model}-oomptimizer.json").read_text())
        bins, sizes = theirs["bins"], theirs["sizes"]
        if options.tiny:
            stride = len(bins) // TINY_BINS
            bins, sizes = bins[stride - 1 :: stride], [max(1, size // 60) for size in sizes[stride - 1 :: stride]]
            bins[-1], sizes[-1] = theirs["bins"][-1], max(1, theirs["sizes"][-1] // 60)
        return cls(
            name=options.child,
            nemo=options.nemo.resolve(),
            work=options.work.resolve(),
            out=options.out.resolve(),
            bins=bins,
            sizes=sizes,
            train_steps=options.train_steps,
            num_workers=options.num_workers,
            overrides=options.override,
            tiny=options.tiny,
        )

    @property
    def model(self) -> str:
        return self.name.partition("-")[0]

    @property
    def kind(self) -> str:
        return self.name.partition("-")[2]

    @property
    def cap(self) -> float:
        return MODELS[self.model][3]

    def command(self) -> list[str]:
        """NeMo's script and its arguments."""
        script, folder, config, _ = MODELS[self.model]
        asr = self.nemo / "examples" / "asr"
        return [
            str(asr / script),
            f"--config-path={asr / 'conf' / folder}",
            f"--config-name={config}",
            f"hydra.run.dir={self.work / self.name}",
            f"model.train_ds.manifest_filepath={self.work / 'train.json'}",
            f"model.validation_ds.manifest_filepath={self.work / 'validation.json'}",
            "~model.test_ds",
            f"++model.train_ds.max_duration={MAX_DURATION_S:g}",
            f"++model.train_ds.num_workers={self.num_workers}",
            "trainer.devices=1",
            "trainer.precision=bf16-mixed",
            "trainer.max_steps=100000",
            "trainer.num_sanity_val_steps=0",
            "++trainer.limit_val_batches=0",
            "trainer.enable_progress_bar=false",
            "++trainer.use_distributed_sampler=false",
            "exp_manager=null",
            *(self._ctc() if self.model == "ctc" else self._aed()),
            *self._batching(),
            *(self._tiny() if self.tiny else []),
            *self.overrides,
        ]

    def _ctc(self) -> list[str]:
        """Size L is of 17 layers, by the table in the YAML, which has 18."""
        data = "++model.train_ds"
        lhotse = [f"{data}.use_lhotse=true", f"{data}.use_bucketing=true", f"{data}.batch_size=null"]
        return [f"model.tokenizer.dir={self.work / 'bpe'}", "model.encoder.n_layers=17", *lhotse]

    def _aed(self) -> list[str]:
        """The YAML is that of Canary-1B already: 24 layers each, width 1024."""
        tokenizers = [
            override
            for language in LANGUAGES
            for override in (
                f"++model.tokenizer.langs.{language}.dir={self.work / 'bpe'}",
                f"++model.tokenizer.langs.{language}.type=bpe",
            )
        ]
        return ["model.prompt_format=canary", f"spl_tokens.model_dir={self.work / self.name}-special", *tokenizers]

    def _batching(self) -> list[str]:
        data = "++model.train_ds"
        if self.kind == "shipped":
            return [f"{data}.batch_duration={BATCH_DURATION}"]
        bins = [f"{data}.bucket_duration_bins={json.dumps(self.bins).replace(' ', '')}"]
        bins.append(f"{data}.max_tps={MAX_TPS}" if self.model == "ctc" else f"{data}.prompt_format=canary")
        if self.kind == "oomptimizer":
            return [*bins, f"{data}.bucket_batch_size={json.dumps(self.sizes).replace(' ', '')}"]
        memory = f"oomfit_memory_limit={TINY_MEMORY}" if self.tiny else f"oomfit_memory_fraction={self.cap}"
        cache = f"{data}.oomfit_cache={self.work / self.name}-profiles"
        return [*bins, f"{data}.bucket_batch_size=auto", f"{data}.{memory}", cache, f"{data}.oomfit_recalibrate=always"]

    def _tiny(self) -> list[str]:
        encoder = ["n_layers=2", "n_heads=2", "subsampling_conv_channels=16"]
        encoder += ["d_model=32"] if self.model == "ctc" else []
        decoder = ["num_layers=2", "num_attention_heads=2"] if self.model == "aed" else []
        defaults = ["asr_enc_hidden=32", "lm_dec_hidden=32"] if self.model == "aed" else []
        return [
            *("trainer.accelerator=cpu", "trainer.sync_batchnorm=false"),
            *(f"model.encoder.{setting}" for setting in encoder),
            *(f"model.transf_decoder.config_dict.{setting}" for setting in decoder),
            *(f"model.model_defaults.{setting}" for setting in defaults),
        ]


def run_job(job: Job) -> None:
    """Run NeMo's script; its Trainer waits for its turn before it fits, and is watched while it does."""
    import nemo.collections.asr  # noqa: F401  (takes most of a minute, so before the turn)
    from lightning.pytorch import Trainer

    fit = Trainer.fit
    record = Record(job)

    def fit_in_turn(trainer: Any, *arguments: Any, **settings: Any) -> None:
        (job.work / f"{job.name}.ready").touch()
        trainer.callbacks.append(stopwatch(record, train_s=float(read_when_there(job.work / f"{job.name}.gate"))))
        record.begin(arguments[0] if arguments else settings["model"])
        with every_trial() as record.trials:
            fit(trainer, *arguments, **settings)

    Trainer.fit = fit_in_turn
    read_when_there(job.work / "prepared")
    sys.argv = job.command()
    sys.path[0] = str(Path(sys.argv[0]).parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        record.values["finished"] = True
    finally:
        if not record.values["finished"]:
            traceback.print_exc()
        record.save()
        sys.stdout.flush()
        os._exit(0 if record.values["finished"] else 1)  # waits for no worker, and for no process group


def read_when_there(path: Path) -> str:
    while not path.exists():
        time.sleep(STANDING_BY_S)
    return path.read_text()


class Record:
    """What is known of a job, in a file that is there as soon as there is anything."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.values: dict[str, Any] = {"job": job.name, "finished": False, "tiny": job.tiny, "bins": job.bins}
        self.steps: list[dict[str, Any]] = []
        self.trials: list[dict[str, Any]] = []
        self.begun = time.perf_counter()
        self.cap_bytes = 0

    def begin(self, model: Any) -> None:
        """The hard cap, and what is known before the fit."""
        import torch

        self.values |= {"versions": versions(), "overrides": self.job.command()[1:]}
        self.values["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        if torch.cuda.is_available() and not self.job.tiny:
            self.cap_bytes = int(self.job.cap * torch.cuda.get_device_properties(0).total_memory)
            torch.cuda.set_per_process_memory_fraction(self.job.cap)
        if self.job.kind == "oomptimizer":
            self.values["sizes"] = self.job.sizes
        self.begun = time.perf_counter()
        self.save()

    def calibrated(self, trainer: Any) -> None:
        """What the plugin's callback found, once training starts."""
        self.values["until_training_s"] = time.perf_counter() - self.begun
        finder = next((each for each in trainer.callbacks if type(each).__name__ == "NemoBatchSizeFinder"), None)
        profile = getattr(finder, "profile", None)
        self.values["strategy"] = type(trainer.strategy).__name__
        if profile is not None:
            search_s = self.trials[min(profile.num_trials, len(self.trials)) - 1]["until_s"] if self.trials else None
            self.values |= {
                "sizes": list(profile.bucket_batch_size),
                "trial_steps": profile.num_trials,
                "trial_ooms": profile.num_ooms,
                "trial_retries": profile.num_retries,
                "soak_steps": profile.num_soak_steps,
                "search_s": search_s,
                "search_and_soak_s": profile.search_s,
                "budget_bytes": profile.budget_bytes,
                "allocator": profile.allocator,
                "buckets": [asdict(bucket) for bucket in profile.buckets],
            }
        self.save()

    def save(self) -> None:
        values = self.values | summary(self.steps, self.cap_bytes) | {"steps": self.steps, "trials": self.trials}
        part = self.job.out / f".{self.job.name}.part"
        part.write_text(json.dumps(values))
        part.rename(self.job.out / f"{self.job.name}.json")


def stopwatch(record: Record, *, train_s: float) -> Any:
    """A callback that times each step between synchronisations, and ends the training after `train_s` seconds."""
    import torch
    from lightning.pytorch import Callback

    on_cuda = bool(record.cap_bytes) or (torch.cuda.is_available() and not record.job.tiny)

    def memory() -> dict[str, int]:
        if not on_cuda:
            return {"allocated": 0, "reserved": 0, "retries": 0, "ooms": 0}
        stats = torch.cuda.memory_stats()
        return {
            "allocated": stats["allocated_bytes.all.peak"],
            "reserved": stats["reserved_bytes.all.peak"],
            "retries": stats["num_alloc_retries"],
            "ooms": stats["num_ooms"],
        }

    def now() -> float:
        if on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    class Stopwatch(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            record.calibrated(trainer)
            self.ended = self.started = now()

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            lengths = batch[1] if isinstance(batch, (tuple, list)) else batch.audio_lens
            audio = batch[0] if isinstance(batch, (tuple, list)) else batch.audio
            seconds = {"audio_s": float(lengths.sum()) / RATE, "longest_s": audio.shape[1] / RATE}
            self.row: dict[str, Any] = {"size": len(lengths), **seconds}
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
            self.before = memory()
            self.begun = now()
            self.row["wait_s"] = self.begun - self.ended

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            ended = now()
            used = memory()
            for name in ("retries", "ooms"):
                used[name] -= self.before[name]
            record.steps.append({**self.row, **used, "seconds": ended - self.begun})
            if len(record.steps) == 1:
                self.started = ended  # the first batch waits for the data loading
            if len(record.steps) % SAVE_EVERY == 0:
                record.save()
            if len(record.steps) >= record.job.train_steps or ended - self.started > train_s:
                trainer.should_stop = True
            self.ended = time.perf_counter()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            record.values["error"] = f"{type(exception).__name__}: {exception}"[:500]
            record.values["ran_out_of_memory"] = isinstance(exception, torch.OutOfMemoryError)
            record.save()

    return Stopwatch()


def summary(steps: list[dict[str, Any]], cap_bytes: int) -> dict[str, Any]:
    """Figures of a training; its first steps count for memory only."""
    warm = steps[WARM_UP:] or steps[-1:]
    if not warm:
        return {"num_steps": 0}
    audio_s, seconds = sum(row["audio_s"] for row in warm), sum(row["seconds"] for row in warm)
    found = {
        "num_steps": len(steps),
        "audio_s_per_s": audio_s / seconds,
        "median_audio_s_per_s": statistics.median(row["audio_s"] / row["seconds"] for row in warm),
        "audio_s_per_s_with_waiting": audio_s / (seconds + sum(row["wait_s"] for row in warm)),
        "audio_s_per_step": audio_s / len(warm),
        "median_step_s": statistics.median(row["seconds"] for row in warm),
        "mean_wait_s": statistics.mean(row["wait_s"] for row in warm),
        "first_wait_s": steps[0]["wait_s"],
        "retries": sum(row["retries"] for row in steps),
        "ooms": sum(row["ooms"] for row in steps),
    }
    if cap_bytes:
        found |= {
            "mean_peak": statistics.mean(row["allocated"] for row in steps) / cap_bytes,
            "max_peak": max(row["allocated"] for row in steps) / cap_bytes,
            "max_reserved": max(row["reserved"] for row in steps) / cap_bytes,
        }
    return found
