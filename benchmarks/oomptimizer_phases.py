"""What the comparison with OOMptimizer measures: both searches, a soak of both profiles, training on real lengths."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler
from oomptimizer_models import TOKENS_PER_SECOND, Batches, Subject, build_model, librispeech_cuts
from recording import every_trial

from lhotse_oomfit import CalibratedBucketingSampler, calibrate
from lhotse_oomfit.memory import MemoryBackend, backend_for
from lhotse_oomfit.options import CalibrationOptions
from lhotse_oomfit.trial import Verdict, judge

SHIPPED_BATCH_DURATION = 360.0
QUADRATIC_DURATION = 15.0
"""NeMo's examples/asr/conf/speech_multitask/fast-conformer_aed.yaml."""
NUM_HEURISTIC_BUCKETS = 30
TURN_WARM_UP = 3
BUFFER = 20_000
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Run:
    """One model on one device, and how long everything may take."""

    subject: Subject
    config: Path
    device: torch.device
    memory_limit: int | None
    transcripts: Path
    script: Path | None
    search_limit_s: float
    soak_limit_s: float
    train_steps: int

    @property
    def edges(self) -> list[Any]:
        """The buckets as NeMo and the sampler take them."""
        return [list(edge) if isinstance(edge, tuple) else edge for edge in self.subject.bins]


class Loop:
    """A training loop with the memory that a second copy of the model takes, as under DDP, and a hard cap."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.memory: MemoryBackend = backend_for(run.device, memory_limit=run.memory_limit, resident=self._resident)
        with run.device:  # a billion random numbers take their time on the host
            self.model, self.optimizer = build_model(run.subject, run.config, run.device)
        self.model.train()
        self.batches = Batches(run.subject, self.model, run.device)
        self.copy = [torch.empty_like(t) for t in (*self.model.parameters(), *self.model.buffers())]
        self.total_bytes = self.memory.budget(1.0).total_bytes
        self.cap_bytes = int(run.subject.cap * self.total_bytes)

    def _resident(self) -> Iterator[torch.Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from (p.grad for p in self.model.parameters() if p.grad is not None)
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        """The forward pass under autocast, as OOMptimizer and training both run it."""
        with torch.autocast(self.run.device.type, torch.bfloat16):
            loss: torch.Tensor = model.training_step(batch, 0)["loss"].sum()
        return loss

    def step(self, make_batch: Callable[[], Any]) -> dict[str, Any]:
        """One step; running out of memory is counted, everything else is raised."""
        out_of_memory = False
        with self.memory.measure() as usage:
            try:
                batch = make_batch()
                self.optimizer.zero_grad()
                self.loss(self.model, batch).backward()
                self.optimizer.step()
            except RuntimeError as exc:
                if judge(exc) is not Verdict.OOM:
                    raise
                out_of_memory = True
            batch = None
        if out_of_memory:
            self.optimizer.zero_grad()
            gc.collect()
        used = usage()
        return {
            "oom": out_of_memory,
            "retries": used.num_retries,
            "allocated": used.allocated_bytes,
            "reserved": used.reserved_bytes,
            "seconds": used.seconds,
        }

    def wake(self) -> None:
        """Take one small step, so that the optimizer's state is there from the beginning."""
        self.step(lambda: self.batches.worst(0, 2))
        self.memory.release()


def oomptimizer(run: Run) -> dict[str, Any]:
    """Run NeMo's script as it stands, counting the steps that it tries and those that run out of memory."""
    if run.script is None or run.device.type != "cuda":
        return {"skipped": "OOMptimizer needs --oomptimizer and a CUDA card"}
    spec = spec_from_file_location("nemo_oomptimizer", run.script)
    if spec is None or spec.loader is None:
        raise SystemExit(f"--oomptimizer must be NeMo's Python script, it is {run.script}")
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    generator = script.ProfilingBatchGenerator
    make, advance = generator.__call__, generator.advance
    shapes = {(round(s * 16_000), u): k for k, (s, u) in enumerate(map(run.subject.shape, range(len(run.edges))))}
    found: dict[str, Any] = {"steps": 0, "ooms": 0, "sizes": [None] * len(run.edges)}
    started: list[float] = []
    shape: list[int] = []

    class OutOfTime(Exception):
        pass

    def counted_make(self: Any, input_seq_length: int, output_seq_length: int) -> Any:
        if not started:
            torch.cuda.synchronize()
            started.append(time.perf_counter())
        found["steps"] += 1
        shape[:] = [shapes[input_seq_length, output_seq_length]]
        return make(self, input_seq_length, output_seq_length)

    def counted_advance(self: Any, oom: bool) -> bool:
        found["ooms"] += oom
        finished: bool = advance(self, oom)
        found["seconds"] = time.perf_counter() - started[0]
        if finished:
            found["sizes"][shape[0]] = self.max_batch_size
        if found["seconds"] > run.search_limit_s:
            raise OutOfTime
        return finished

    generator.__call__, generator.advance = counted_make, counted_advance
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            script.oomptimizer.main(
                [
                    *("--module-name", run.subject.module),
                    *("--config-path", str(run.config)),
                    *("--buckets", repr(run.edges)),
                    *("--memory-fraction", str(run.subject.cap)),
                    *("--device", "cuda:0"),
                    *("--dtype", "bfloat16"),
                    "--ddp",
                ],
                standalone_mode=False,
            )
        found["finished"] = True
    except OutOfTime:
        found["finished"] = False
    found["num_ooms"] = torch.cuda.memory_stats()["num_ooms"]
    found["buckets_done"] = sum(size is not None for size in found["sizes"])
    torch.cuda.set_per_process_memory_fraction(1.0)
    free()
    found["left_gib"] = torch.cuda.memory_allocated() / GIB
    return found


def ours(loop: Loop, *, mode: str = "verify", num_soak_steps: int | None = None) -> dict[str, Any]:
    """Calibrate through the public entry point, under the same cap; its own soak comes after the search."""
    run = loop.run
    sampler = CalibratedBucketingSampler(
        librispeech_cuts(run.subject, run.transcripts, run.config.parent / "bpe", num=5_000),
        bucket_batch_size="auto",
        duration_bins=run.edges,
        max_tps=None if run.subject.is_2d else TOKENS_PER_SECOND,
        shuffle=True,
        rank=0,
        world_size=1,
    )
    options: dict[str, Any] = {"num_soak_steps": num_soak_steps}
    if "mode" in {field.name for field in fields(CalibrationOptions)}:
        options["mode"] = mode
    elif mode != "verify":
        return {"skipped": "this version has no mode='fast'"}
    begun = time.perf_counter()
    with every_trial() as trials, loop.memory.cap(loop.cap_bytes):
        profile = calibrate(
            sampler,
            _Lengths(loop.batches),
            model=loop.model,
            optimizer=loop.optimizer,
            training_step=loop.loss,
            make_batch=loop.batches.make,
            memory_fraction=run.subject.cap,
            memory_limit=run.memory_limit,
            cache=False,
            precision="bf16",
            **options,
        )
    searched_s = trials[profile.num_trials - 1]["until_s"]
    return {
        "steps": profile.num_trials,
        "soak_steps": profile.num_soak_steps,
        "ooms": profile.num_ooms,
        "retries": profile.num_retries,
        "seconds": searched_s,
        "soak_seconds": trials[-1]["until_s"] - searched_s,
        "wall_seconds": time.perf_counter() - begun,
        "sizes": profile.bucket_batch_size,
        "peaks": [bucket.peak_bytes for bucket in profile.buckets],
        "step_s": [bucket.step_s for bucket in profile.buckets],
        "verified": [bucket.verified for bucket in profile.buckets],
        "bucket_steps": [bucket.num_trials for bucket in profile.buckets],
        "budget": profile.budget_bytes,
        "cap": loop.cap_bytes,
        "allocator": profile.allocator,
        "parameters": sum(p.numel() for p in loop.model.parameters()),
        "trials": trials,
    }


class _Lengths:
    """A dataset that turns cuts into noise of their lengths."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, cuts: Any) -> Any:
        return self._batches.of_cuts(cuts)


def soak(loop: Loop, sizes: list[int], *, steps: int, seed: int = 1) -> dict[str, Any]:
    """Shuffled steps at full sizes under the hard cap, each pass over all buckets in another order."""
    run, memory = loop.run, loop.memory
    memory.prepare()
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    begun = time.perf_counter()
    with loop.memory.cap(loop.cap_bytes):
        loop.wake()
        while len(rows) < steps and time.perf_counter() - begun < run.soak_limit_s:
            order = [k for k in range(len(sizes)) if sizes[k]]
            rng.shuffle(order)
            for k in order[: steps - len(rows)]:
                row = loop.step(lambda k=k: loop.batches.worst(k, sizes[k]))
                rows.append(row | {"bucket": k, "audio_s": sizes[k] * run.subject.shape(k)[0], "warm": True})
                if time.perf_counter() - begun > run.soak_limit_s:
                    break
    for row in rows[: min(len(sizes), len(rows) // 2)]:  # a shape's first steps are slow
        row["warm"] = False
    return _summary(rows, loop) | {"rows": rows}


def _summary(rows: list[dict[str, Any]], loop: Loop) -> dict[str, Any]:
    """Figures of a series of steps; speed is that of the warm steps, those that failed included."""
    warm = [row for row in rows if row["warm"]]
    return {
        "steps": len(rows),
        "ooms": sum(row["oom"] for row in rows),
        "retries": sum(row["retries"] for row in rows),
        "audio_s_per_s": sum(row["audio_s"] for row in warm if not row["oom"]) / sum(row["seconds"] for row in warm),
        "mean_peak": statistics.mean(row["allocated"] for row in rows) / loop.cap_bytes,
        "max_peak": max(row["allocated"] for row in rows) / loop.cap_bytes,
        "max_reserved": max(row["reserved"] for row in rows) / loop.cap_bytes,
    }


# Training on LibriSpeech's lengths


def train(loop: Loop, profiles: dict[str, list[int]], save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Training by up to four kinds of batching: two profiles, the shipped heuristic, and the same tuned.

    They take turns, twice and the second time in the opposite order, as the first steps of a process are slow.
    """
    run, memory = loop.run, loop.memory
    memory.prepare()
    cuts = librispeech_cuts(run.subject, run.transcripts, run.config.parent / "bpe", num=40_000)
    batches = {name: iter(_by_profile(run, cuts, sizes)) for name, sizes in profiles.items()}
    batches["shipped"] = iter(_by_duration(cuts, SHIPPED_BATCH_DURATION))
    about: dict[str, dict[str, Any]] = {name: {} for name in batches}
    about["shipped"] = {"batch_duration": SHIPPED_BATCH_DURATION}
    rows: dict[str, list[dict[str, Any]]] = {}
    with memory.cap(loop.cap_bytes):
        loop.wake()
        if "ours" in profiles:
            tuned, tried = _tune(loop, cuts, profiles["ours"])
            batches["tuned"] = iter(_by_duration(cuts, tuned))
            about["tuned"] = {"batch_duration": tuned, "tried": tried}
        for names in (list(batches), list(batches)[::-1]):
            for name in names:
                turn = list(_steps(loop, batches[name], run.train_steps // 2))
                rows.setdefault(name, []).extend(
                    row | {"warm": n >= TURN_WARM_UP or n == len(turn) - 1} for n, row in enumerate(turn)
                )
                memory.release()
            save({name: _summary(rows[name], loop) | about[name] | {"rows": rows[name]} for name in rows})
    return {name: _summary(rows[name], loop) | about[name] | {"rows": rows[name]} for name in rows}


def _steps(loop: Loop, batches: Iterator[Any], num: int) -> Iterator[dict[str, Any]]:
    for _, cuts in zip(range(num), batches, strict=False):
        cuts = list(cuts)
        row = loop.step(lambda cuts=cuts: loop.batches.of_cuts(cuts))
        yield row | {"size": len(cuts), "audio_s": sum(cut.duration for cut in cuts)}


def _by_profile(run: Run, cuts: list[Any], sizes: list[int]) -> CalibratedBucketingSampler:
    return CalibratedBucketingSampler(
        cuts,
        bucket_batch_size=sizes,
        duration_bins=run.edges,
        shuffle=True,
        buffer_size=BUFFER,
        seed=0,
        rank=0,
        world_size=1,
    )


def _by_duration(cuts: list[Any], batch_duration: float) -> DynamicBucketingSampler:
    return DynamicBucketingSampler(
        cuts,
        max_duration=batch_duration,
        quadratic_duration=QUADRATIC_DURATION,
        num_buckets=NUM_HEURISTIC_BUCKETS,
        shuffle=True,
        buffer_size=BUFFER,
        seed=0,
        rank=0,
        world_size=1,
    )


def _tune(loop: Loop, cuts: list[Any], sizes: list[int]) -> tuple[float, dict[str, int]]:
    """The largest batch_duration whose eight heaviest batches of 60 don't run out of memory, by bisection.

    It starts from the largest that keeps every bucket within the calibrated sizes.
    """
    shape = loop.run.subject.shape
    start = min(
        size * (shape(k)[0] + shape(k)[0] ** 2 / QUADRATIC_DURATION) for k, size in enumerate(sizes) if shape(k)[0] > 3
    )
    factors = [0.65, 0.8, 0.9, 1.0, 1.08, 1.16, 1.25, 1.35, 1.5]
    tried: dict[str, int] = {}
    low, high = 0, len(factors)
    while high - low > 1:
        middle = (low + high) // 2
        batches = [
            list(batch) for _, batch in zip(range(60), _by_duration(cuts, start * factors[middle]), strict=False)
        ]
        heaviest: list[Any] = []
        for power in (1, 2):
            batches.sort(key=lambda batch, p=power: -len(batch) * max(cut.duration for cut in batch) ** p)
            heaviest += [batches.pop(0) for _ in range(min(4, len(batches)))]
        ooms = sum(row["oom"] for row in _steps(loop, iter(heaviest), len(heaviest)))
        tried[f"{start * factors[middle]:.0f}"] = ooms
        low, high = (low, middle) if ooms else (middle, high)
        loop.memory.release()
    return round(start * factors[low]), tried


def free() -> None:
    """Give back what a phase held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def default_allocator() -> Iterator[None]:
    """Keep the calibration from switching on expandable segments, as a user's own setting does."""
    before = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTORCH_CUDA_ALLOC_CONF"]
        else:
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = before


def quiet() -> None:
    """Only errors from NeMo and Lightning."""
    import logging
    import warnings

    warnings.simplefilter("ignore")
    from nemo.utils import logging as nemo_logging

    nemo_logging.setLevel(nemo_logging.ERROR)
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning", "numba", "nv_one_logger"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
