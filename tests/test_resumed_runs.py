"""Runs that go on from a checkpoint: calibrated with the optimizer's state there, with sizes that may be new."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lhotse.dataset.iterable_dataset import IterableDatasetWrapper
from processes import results, run_ranks
from tiny_asr import TinyDataset, TinyModel, tiny_cuts, tiny_sampler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lhotse_oomfit import calibrate, rehearsal

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

CUTS = tiny_cuts(90)
SECONDS = {cut.id: cut.duration for cut in CUTS}
ORDERS = ["load, calibrate", "calibrate, load"]
LIMITS = {"a large card": "4MiB", "a small card": "2MiB"}


class IdsDataset(TinyDataset):
    def __getitem__(self, cuts: Any) -> Any:
        return {**super().__getitem__(cuts), "ids": [cut.id for cut in cuts]}


class Loss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = TinyModel()

    def forward(self, batch: Any) -> torch.Tensor:
        return self.model.loss(batch)


def check_sizes(batches: list[list[str]], sizes: list[int], *, every: bool = True) -> None:
    """No batch is larger than its bucket's size, and most buckets have a batch of just that size."""
    largest = dict.fromkeys(range(4), 0)
    for ids in batches:
        bucket = math.ceil(max(SECONDS[i] for i in ids)) - 1
        largest[bucket] = max(largest[bucket], len(ids))
    assert all(largest[k] <= sizes[k] for k in largest)
    assert not every or sum(largest[k] == sizes[k] for k in largest) >= 2


def schedule_of(state: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    return [(list(starts), list(sizes)) for starts, sizes in state["oomfit"]["schedule"]]


def epoch(
    card: str,
    *,
    order: str = "load, calibrate",
    style: str = "map",
    checkpoint: dict[str, Any] | None = None,
    stop: int | None = None,
    **options: Any,
) -> tuple[list[list[str]], list[int], dict[str, Any]]:
    """A plain loop over the (rest of the) first epoch: what it trained on, with which sizes, and its checkpoint."""
    model: torch.nn.Module = Loss()
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler, dataset = tiny_sampler(CUTS), IdsDataset()
    position = None if checkpoint is None else dict(checkpoint["sampler"])
    if checkpoint is not None:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    if position is not None and order == "load, calibrate":
        sampler.load_state_dict(position)
    calibrate(
        sampler,
        dataset,
        model=model,
        optimizer=optimizer,
        training_step=lambda model, batch: model(batch),
        memory_limit=LIMITS[card],
        **{"cache": False, "progress": False, **options},
    )
    if position is not None and order == "calibrate, load":
        sampler.load_state_dict(position)
    num_workers = 2 if style == "iterable" else 0
    num_resumed = sampler.num_batches_drawn
    batches: Iterator[Any]
    if style == "iterable":
        wrapped = IterableDatasetWrapper(dataset, sampler)
        batches = iter(DataLoader(wrapped, batch_size=None, num_workers=num_workers))
    else:
        batches = ahead(sampler, dataset)
    seen = []
    for batch in islice(batches, stop):
        seen.append(batch["ids"])
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    position = sampler.state_dict_at(num_resumed + len(seen), num_workers=num_workers)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sampler": position}
    sizes = sampler.bucket_batch_size
    assert sizes is not None
    return seen, sizes, state


def ahead(sampler: Any, dataset: Any, num: int = 3) -> Iterator[Any]:
    """Batches as a loader gives them, some batches behind what it has drawn."""
    drawn: list[Any] = []
    for cuts in sampler:
        drawn.append(cuts)
        if len(drawn) > num:
            yield dataset[drawn.pop(0)]
    yield from (dataset[cuts] for cuts in drawn)


@pytest.mark.parametrize("style", ["map", "iterable"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_run_resumed_on_another_card_goes_on_with_sizes_of_its_own(order: str, style: str) -> None:
    num = 5
    before, old, checkpoint = epoch("a large card", style=style, stop=num)
    after, new, _ = epoch("a small card", order=order, style=style, checkpoint=checkpoint)
    assert all(small < large for small, large in zip(new, old, strict=True))
    check_sizes(before, old, every=False)
    check_sizes(after, new)
    times = 2 if style == "iterable" else 1  # each worker has a stream of its own
    assert Counter(i for ids in before + after for i in ids) == dict.fromkeys(SECONDS, times)

    # Once more: the state that is saved now tells both, and each at its place.
    first, _, later = epoch("a small card", order=order, style=style, checkpoint=checkpoint, stop=3)
    starts, sizes = zip(*schedule_of(later["sampler"]), strict=True)
    assert list(sizes) == [old, new]
    assert list(starts) == ([[0], [num]] if style == "map" else [[0], [3, 2]])
    rest, again, _ = epoch("a small card", order=order, style=style, checkpoint=later)
    assert again == new
    assert first + rest == after


def test_a_resumed_run_that_calibrates_always_goes_on_exactly(tmp_path: Path) -> None:
    whole, old, _ = epoch("a large card", cache=tmp_path)
    before, _, checkpoint = epoch("a large card", cache=tmp_path, stop=5)
    after, new, state = epoch("a large card", cache=tmp_path, recalibrate="always", checkpoint=checkpoint)
    assert new == old
    assert before + after == whole
    assert [sizes for _, sizes in schedule_of(state["sampler"])] == [old]


@pytest.fixture
def wakes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps that calibrations took to make an optimizer allocate its state."""
    taken: list[Any] = []
    wake = rehearsal.wake_optimizers

    def noted(*args: Any) -> Any:
        taken.append(args)
        return wake(*args)

    monkeypatch.setattr(rehearsal, "wake_optimizers", noted)
    return taken


def test_the_loaded_optimizer_state_is_there_in_the_trials_of_a_plain_loop(wakes: list[Any]) -> None:
    _, fresh, checkpoint = epoch("a large card", stop=2)
    assert len(wakes) == 1
    _, resumed, _ = epoch("a large card", checkpoint=checkpoint, stop=1)
    assert len(wakes) == 1
    assert resumed == fresh


# Two ranks


def _plain_on_two_ranks(rank: int) -> Any:
    before, old, checkpoint = epoch("a large card", stop=3)
    found = []
    for order in ORDERS:
        after, new, state = epoch("a small card", order=order, checkpoint=checkpoint)
        found.append((before, old, after, new, schedule_of(state["sampler"])))
    return found


def test_all_ranks_change_to_new_sizes_at_the_same_batch_in_either_order() -> None:
    by_rank = results(run_ranks(_plain_on_two_ranks))
    for first, second in zip(*by_rank, strict=True):
        assert first[4] == second[4] == [([0], first[1]), ([3], first[3])]
        check_two_ranks(first, second)


def check_two_ranks(first: Any, second: Any) -> None:
    """Both changed sizes alike, draw from the same bucket at each step, and lost and repeated nothing."""
    assert [first[1], first[3]] == [second[1], second[3]]
    assert len(first[2]) == len(second[2])
    for mine, others in zip(first[2], second[2], strict=True):
        assert abs(len(mine) - len(others)) <= 1
    for each in (first, second):
        check_sizes(each[2], each[3])
    seen = Counter(i.split("_dup")[0] for each in (first, second) for ids in each[0] + each[2] for i in ids)
    assert set(seen) == set(SECONDS)
    assert sum(seen.values()) - len(SECONDS) <= 1  # a rank without an example left repeats one


# Lightning


def lightning_epoch(
    card: str,
    *,
    style: str = "map",
    checkpoint: Path | None = None,
    stop: tuple[int, Path] | None = None,
    **options: Any,
) -> tuple[list[list[str]], list[int]]:
    """The same in Lightning, which may be stopped, as jobs are, after a step and a checkpoint."""
    pl = pytest.importorskip("lightning.pytorch")
    from lhotse_oomfit.lightning import BucketBatchSizeFinder

    class Recogniser(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.loss = Loss()
            self.ids: list[list[str]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.ids.append(batch["ids"])
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class StopAfter(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if stop is not None and trainer.global_step == stop[0]:
                trainer.save_checkpoint(stop[1])
                raise KeyboardInterrupt

    sampler, dataset = tiny_sampler(CUTS), IdsDataset()
    finder = BucketBatchSizeFinder(
        **{"memory_limit": LIMITS[card], "cache": False, "progress": False, **options},
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy="ddp" if dist.is_initialized() else "auto",
        use_distributed_sampler=False,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[finder, StopAfter()],
    )
    module = Recogniser()
    loader = (
        DataLoader(dataset, sampler=sampler, batch_size=None)
        if style == "map"
        else DataLoader(IterableDatasetWrapper(dataset, sampler), batch_size=None, num_workers=2)
    )
    with warnings.catch_warnings(), contextlib.suppress(KeyboardInterrupt, SystemExit):
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, ckpt_path=checkpoint)
    sizes = sampler.bucket_batch_size
    assert sizes is not None
    return module.ids, sizes


def saved_schedule(path: Path) -> list[tuple[list[int], list[int]]]:
    (state,) = (state for name, state in torch.load(path, weights_only=False)["callbacks"].items() if "Finder" in name)
    return schedule_of(state["sampler"])


@pytest.mark.parametrize("style", ["map", "iterable"])
def test_a_lightning_run_resumed_on_another_card_goes_on_with_sizes_of_its_own(
    tmp_path: Path, style: str, wakes: list[Any]
) -> None:
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    before, old = lightning_epoch("a large card", style=style, stop=(5, first))
    assert len(wakes) == 1
    after, new = lightning_epoch("a small card", style=style, checkpoint=first)
    assert len(wakes) == 1  # the loaded state of the optimizer was there
    assert all(small < large for small, large in zip(new, old, strict=True))
    check_sizes(after, new)
    times = 2 if style == "iterable" else 1
    assert Counter(i for ids in before + after for i in ids) == dict.fromkeys(SECONDS, times)
    between, _ = lightning_epoch("a small card", style=style, checkpoint=first, stop=(8, second))
    assert [sizes for _, sizes in saved_schedule(second)] == [old, new]
    rest, _ = lightning_epoch("a small card", style=style, checkpoint=second)
    assert between + rest == after


def test_a_resumed_lightning_run_finds_the_sizes_that_a_fresh_one_finds(tmp_path: Path, wakes: list[Any]) -> None:
    path = tmp_path / "first.ckpt"
    whole, sizes = lightning_epoch("a large card", recalibrate="always")
    before, fresh = lightning_epoch("a large card", stop=(4, path))
    after, resumed = lightning_epoch("a large card", checkpoint=path, recalibrate="always")
    assert len(wakes) == 2
    assert sizes == fresh == resumed
    assert before + after == whole


def _lightning_on_two_ranks(rank: int, folder: Path) -> Any:
    before, old = lightning_epoch("a large card", stop=(3, folder / "first.ckpt"))
    after, new = lightning_epoch("a small card", checkpoint=folder / "first.ckpt", stop=(6, folder / "second.ckpt"))
    rest, _ = lightning_epoch("a small card", checkpoint=folder / "second.ckpt")
    return before, old, after + rest, new


@pytest.mark.slow
def test_all_ranks_of_a_lightning_run_change_to_new_sizes_at_the_same_batch(tmp_path: Path) -> None:
    first, second = results(run_ranks(_lightning_on_two_ranks, tmp_path))
    assert saved_schedule(tmp_path / "second.ckpt") == [([0], first[1]), ([3], first[3])]
    check_two_ranks(first, second)
