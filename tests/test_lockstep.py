"""All ranks run every trial together, as real processes over gloo: FSDP, a static graph, collectives in the model."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lhotse import CutSet
from processes import results, run_apart, run_ranks
from tiny_asr import TinyDataset, TinyModel, tiny_cuts, tiny_sampler
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lhotse_oomfit import Profile, calibrate
from lhotse_oomfit.fingerprint import Fingerprint
from lhotse_oomfit.journal import Journal, Observation
from lhotse_oomfit.memory import backend_for

pytestmark = pytest.mark.timeout(240)


class Meeting(TinyModel):
    """A model whose forward pass meets all ranks, through a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.group: Any = dist.new_group([0, 1], group_desc="experts")

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        longest = torch.tensor(batch["features"].shape[1])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.group)
        return super().loss(batch)


class HiddenMeeting(Meeting):
    """The same, with the group where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["group"] = _Holder(self.__dict__.pop("group"))

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        longest = torch.tensor(batch["features"].shape[1])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self.group.inner)
        return TinyModel.loss(self, batch)


class _Holder:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = TinyModel()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.set_reshard_after_forward(True)
        register = torch.distributed.fsdp.register_fsdp_forward_method
        register(model, "loss")
        return model
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = TinyModel()

            def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
                return self.model.loss(batch)

        return FullyShardedDataParallel(Loss(), device_id=torch.device("cpu"), use_orig_params=True)
    if kind == "static":
        return DistributedDataParallel(_Losing(), static_graph=True)
    if kind == "ddp":
        return DistributedDataParallel(_Losing())
    return Meeting() if kind == "meeting" else HiddenMeeting()


class _Losing(TinyModel):
    def forward(self, batch: Any) -> torch.Tensor:
        return TinyModel.loss(self, batch) if isinstance(batch, dict) else super().forward(batch)


def loss_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model.loss(batch) if hasattr(type(model), "loss") else model(batch)


def calibrated(model: nn.Module, **options: Any) -> Profile:
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), lr=1e-3)
    defaults: dict[str, Any] = {
        "training_step": loss_step,
        "memory_limit": "24MiB",
        "cache": False,
        "num_sample_cuts": 40,
        "heartbeat_timeout": 8,
    }
    sampler = tiny_sampler(tiny_cuts(60), **options.pop("sampler", {}))
    return calibrate(sampler, TinyDataset(), model=model, optimizer=optimizer, **{**defaults, **options})


def _sizes(rank: int, kind: str, options: dict[str, Any]) -> list[int]:
    return calibrated(made(kind), **options).bucket_batch_size


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "static", "meeting"])
def test_what_one_rank_cannot_run_alone_is_measured_by_all_together(kind: str):
    first, second = results(run_ranks(_sizes, kind, {}, timeout_s=150))
    assert first == second
    assert all(size > 1 for size in first)
    assert first == sorted(first, reverse=True)


LAYERS, WIDTH = 6, 512


def _gathered(rank: int) -> tuple[float, float]:
    """Peaks of a forward pass, and of a whole step, of a batch that takes nearly nothing, in layers of the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    memory = backend_for("cpu", memory_limit="600MiB", resident=lambda: list(model.parameters()))
    with memory.measure() as usage:
        outputs = model(torch.randn(2, WIDTH))
        forward_bytes = usage().allocated_bytes
        outputs.sum().backward()
    layer_bytes = WIDTH * WIDTH * 4
    return forward_bytes / layer_bytes, usage().allocated_bytes / layer_bytes


def test_the_tracked_peak_of_fsdp_is_that_of_its_all_gathers():
    for forward, whole in results(run_ranks(_gathered, timeout_s=100)):
        # Half of each layer is resident; while a layer runs it is whole, beside the buffer that it was gathered into
        # and the one of the layer before, which lives until the next copy is made.
        assert LAYERS / 2 + 3 <= forward <= LAYERS / 2 + 3.1
        # Backward adds the halves of the gradients, but for those of the layer that is running.
        assert forward + (LAYERS - 1) / 2 <= whole <= forward + (LAYERS + 2) / 2


def _forced(rank: int) -> tuple[list[int], list[int]]:
    """The sizes found, and the true ones, by a bisection of single steps."""
    model = made("fsdp2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sizes = calibrated(model, optimizer=optimizer).bucket_batch_size
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    state = [v for each in optimizer.state.values() for v in each.values() if isinstance(v, torch.Tensor)]
    memory = backend_for("cpu", memory_limit="1GiB", resident=lambda: [*model.parameters(), *model.buffers(), *state])

    def peak_bytes(seconds: int, size: int) -> int:
        with memory.measure() as usage:
            batch = {
                "features": torch.randn(size, 100 * seconds, 16),
                "feature_lens": torch.full((size,), 100 * seconds),
                "tokens": torch.ones(size, 12 * seconds, dtype=torch.long),
                "token_lens": torch.full((size,), 12 * seconds),
            }
            loss_step(model, batch).backward()
        model.zero_grad()
        most = torch.tensor(usage().allocated_bytes)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    true = []
    for seconds in range(1, 5):
        low, high = 1, 2 * sizes[seconds - 1]
        while high - low > 1:
            middle = (low + high) // 2
            fits = peak_bytes(seconds, middle) <= 0.9 * 24 * 2**20
            low, high = (middle, high) if fits else (low, middle)
        true.append(low)
    return sizes, true


def test_sizes_under_fsdp_are_those_of_brute_force():
    (sizes, true), (again, _) = results(run_ranks(_forced, timeout_s=150))
    assert sizes == again
    for found, largest in zip(sizes, true, strict=True):
        assert 0.97 * largest - 1 <= found <= largest


def _trained(rank: int, kind: str, calibrates: bool) -> dict[str, Any]:
    model = made(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if calibrates:
        calibrated(model, optimizer=optimizer)
    torch.manual_seed(1 + rank)
    cuts = list(tiny_cuts(24))
    for step in range(4):
        optimizer.zero_grad()
        loss_step(model, TinyDataset()[CutSet.from_cuts(cuts[step + 12 * rank : step + 12 * rank + 6])]).backward()
        optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return {str(index): p.detach().numpy().tobytes() for index, p in enumerate(whole)}


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "static"])
def test_training_after_a_calibration_in_lockstep_is_the_same_to_the_last_bit(kind: str):
    with_it = results(run_ranks(_trained, kind, True, timeout_s=150))
    without = results(run_ranks(_trained, kind, False, timeout_s=100))
    assert with_it == without
    assert with_it[0] == with_it[1] or kind == "fsdp1"  # which shows each rank its shard


# What goes wrong


def _ends(rank: int, kind: str, how: str, cache: str) -> list[int]:
    """Calibrate, with something going wrong in the fifth trial of the last rank (or of the first)."""
    model = made(kind)
    culprit = 0 if how == "first-killed" else 1
    trials = 0

    def step(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal trials
        trials += 1
        if rank == culprit and trials == 5:
            if how == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if how == "bug":
                raise ValueError("there is a bug in the model")
            os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        return loss_step(module, batch)

    return calibrated(model, training_step=step, cache=cache or False).bucket_batch_size


def _end_of(tmp_path: Path, kind: str, how: str, *, cache: str = "") -> tuple[str, list[int | None]]:
    """What all ranks of a job wrote, and their exit codes."""
    return run_apart("test_lockstep:_ends", kind, how, cache, folder=tmp_path, timeout_s=60)


@pytest.mark.parametrize("kind", ["fsdp2", "meeting"])
def test_a_rank_that_runs_out_of_memory_in_lockstep_ends_all_with_the_reason(tmp_path: Path, kind: str):
    said, codes = _end_of(tmp_path, kind, "memory")
    assert all(codes)
    assert all("rank 1 can't finish a trial step that all ranks run together" in text for text in said)
    assert all("Tried to allocate 2.00 GiB" in text for text in said)


def _fails_once(rank: int, folder: str) -> list[int]:
    """The fifth trial runs out of memory on the last rank, in the first job alone."""
    ran: list[tuple[int, int]] = []
    failed, tried = Path(folder, "failed"), Path(folder, f"tried{rank}")

    def step(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        ran.append((round(batch["features"].shape[1] / 100), len(batch["features"])))
        if rank == 1 and len(ran) == 5 and not failed.exists():
            failed.touch()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss_step(module, batch)

    sizes = calibrated(made("static"), training_step=step, cache=f"{folder}/cache").bucket_batch_size
    tried.write_text(json.dumps([ran, sizes]))
    return sizes


def test_the_job_started_again_goes_on_below_the_size_that_failed(tmp_path: Path):
    _, codes = run_apart("test_lockstep:_fails_once", str(tmp_path), folder=tmp_path, timeout_s=60)
    assert all(codes)
    (partial,) = (tmp_path / "cache").glob("*.partial.jsonl")
    lines = [json.loads(line) for line in partial.read_text().splitlines()]
    (failed,) = [line for line in lines[1:] if line["peak_bytes"] is None]
    assert len(lines) == 1 + 5  # which trials, four that fitted, the one that didn't
    said, codes = run_apart("test_lockstep:_fails_once", str(tmp_path), folder=tmp_path, timeout_s=60)
    assert codes == [0, 0], said
    ran, sizes = json.loads((tmp_path / "tried0").read_text())
    # Buckets are as long, in seconds, as their index and one; nothing is tried twice.
    assert not {(line["bucket"] + 1, line["size"]) for line in lines[1:]} & {tuple(each) for each in ran}
    assert sizes[failed["bucket"]] < failed["size"]
    assert not partial.exists()


def test_an_error_of_one_rank_in_lockstep_ends_all_with_its_text(tmp_path: Path):
    said, codes = _end_of(tmp_path, "meeting", "bug")
    assert all(codes)
    assert all("ValueError: there is a bug in the model" in text for text in said)


@pytest.mark.parametrize("how", ["killed", "first-killed", "stopped"])
def test_a_rank_that_dies_or_stops_in_lockstep_ends_the_others(tmp_path: Path, how: str):
    said, codes = _end_of(tmp_path, "static", how)
    survivor = 1 if how == "first-killed" else 0
    assert codes[survivor]
    assert re.search(r"rank \d+ failed in a trial|another rank than \d died|lost the connection", said[survivor])


def _dies_early(rank: int, how: str) -> list[int]:
    """The second rank dies while the group for the votes is made."""
    make, num = dist.new_group, [0]

    def new_group(*args: Any, **kwargs: Any) -> Any:
        num[0] += kwargs.get("backend") == "gloo"
        if rank == 1 and num[0]:
            os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
        return make(*args, **kwargs)

    dist.new_group = new_group
    return calibrated(made("static"), heartbeat_timeout=5).bucket_batch_size


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_dies_while_all_meet_for_the_first_time_ends_the_others(tmp_path: Path, how: str):
    said, codes = run_apart("test_lockstep:_dies_early", how, folder=tmp_path, timeout_s=60)
    assert codes[0]
    assert re.search(r"rank 1 failed|rank 1 was silent|another rank than 0 died|Connection closed by peer", said[0])


def _unlucky(rank: int) -> list[int]:
    def step(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if rank == 1:
            raise RuntimeError("connection refused by the tokenizer server")
        return loss_step(module, batch)

    return calibrated(made("static"), training_step=step).bucket_batch_size


def test_an_error_that_only_sounds_like_a_lost_peer_is_told_as_it_is(tmp_path: Path):
    said, codes = run_apart("test_lockstep:_unlucky", folder=tmp_path, timeout_s=60)
    assert all(codes)
    assert all("RuntimeError: connection refused by the tokenizer server" in text for text in said)


def test_a_journal_whose_last_line_was_cut_off_is_read_without_it(tmp_path: Path):
    fingerprint = Fingerprint(fields={"device": "cpu"})
    journal = Journal(tmp_path / "profile.yaml", fingerprint=fingerprint, budget_bytes=100)
    seen = [Observation(bucket=0, size=2, peak_bytes=50), Observation(bucket=1, size=9, peak_bytes=None)]
    journal.start(seen[:1])
    journal.add(seen[1])
    assert journal.read() == seen
    with journal.path.open("a") as file:
        file.write('{"bucket": 2, "si')
    assert journal.read() == seen
    assert Journal(tmp_path / "profile.yaml", fingerprint=fingerprint, budget_bytes=200).read() == seen[:1]
    other = Journal(tmp_path / "profile.yaml", fingerprint=Fingerprint(fields={"device": "H200"}), budget_bytes=100)
    assert other.read() == []
    assert not journal.path.exists()


def _builds(rank: int) -> list[int]:
    """One rank can't build batches of over 20 examples."""

    def make_batch(batch_size: int, input_len: float, output_len: int | None) -> dict[str, torch.Tensor]:
        if rank == 1 and batch_size > 20:
            raise MemoryError("no room for the batch")
        frames = int(input_len * 100)
        return {
            "features": torch.zeros(batch_size, frames, 16),
            "feature_lens": torch.full((batch_size,), frames),
            "tokens": torch.ones(batch_size, output_len or 1, dtype=torch.long),
            "token_lens": torch.full((batch_size,), output_len or 1),
        }

    return calibrated(made("static"), make_batch=make_batch).bucket_batch_size


def test_a_batch_that_one_rank_cannot_build_is_too_large_for_all():
    first, second = results(run_ranks(_builds, timeout_s=100))
    assert first == second
    assert max(first) == 20


def _slow(rank: int, ranks: str) -> list[int]:
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    slept = []

    def step(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not slept and rank == 0:
            slept.append(time.sleep(6))
        return loss_step(module, batch)

    return calibrated(made("ddp"), training_step=step, ranks=ranks, heartbeat_timeout=20).bucket_batch_size


@pytest.mark.parametrize("ranks", ["rank0", "shard", "each"])
def test_a_trial_longer_than_the_groups_own_timeout_is_no_failure(ranks: str):
    first, second = results(run_ranks(_slow, ranks, timeout_s=100))
    assert first == second
