"""Several samplers in a Lightning training: in one of Lhotse's, or in several DataLoaders that share each step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lhotse.dataset.iterable_dataset import IterableDatasetWrapper
from lhotse.dataset.sampling.round_robin import RoundRobinSampler
from lhotse.dataset.sampling.zip import ZipSampler
from tiny_asr import TinyDataset, TinyModel, tiny_cuts, tiny_sampler
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.utilities.combined_loader import CombinedLoader  # noqa: E402

from lhotse_oomfit.errors import UnsupportedStrategyError  # noqa: E402
from lhotse_oomfit.lightning import BucketBatchSizeFinder  # noqa: E402
from lhotse_oomfit.memory import CpuMemory  # noqa: E402

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:::lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*treespec"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec"),
]


class PairDataset(TinyDataset):
    def __getitem__(self, cuts: Any) -> Any:
        return [super(PairDataset, self).__getitem__(each) for each in cuts]


class Recogniser(pl.LightningModule):
    """Sums the losses of whatever batches it gets, and keeps their sizes and what the last step took."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyModel()
        self.sizes: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        several = batch.values() if isinstance(batch, dict) and "features" not in batch else batch
        batches = [batch] if isinstance(batch, dict) and "features" in batch else [b for b in several if b is not None]
        self.sizes.append([len(each["features"]) for each in batches])
        return sum(self.model.loss(each) for each in batches)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def short() -> Any:
    return tiny_sampler(tiny_cuts(30, longest=2.0), duration_bins=[1.0, 2.0])


def long() -> Any:
    return tiny_sampler(tiny_cuts(30), duration_bins=[2.0, 4.0], seed=1)


def loader(sampler: Any, dataset: Any = None) -> DataLoader[Any]:
    return DataLoader(dataset or TinyDataset(), sampler=sampler, batch_size=None)


def fit(loaders: Any, **options: Any) -> tuple[Recogniser, BucketBatchSizeFinder]:
    torch.manual_seed(0)
    settings = {"memory_limit": "6MiB", "cache": False, "progress": False, "num_sample_cuts": 30}
    module, finder = Recogniser(), BucketBatchSizeFinder(**{**settings, **options})
    trainer = pl.Trainer(
        callbacks=[finder],
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, loaders)
    return module, finder


def test_samplers_that_take_turns_are_calibrated_one_after_another(caplog: pytest.LogCaptureFixture) -> None:
    sampler = RoundRobinSampler(short(), long())
    module, finder = fit(loader(sampler))
    assert [member.profile for member in sampler.samplers] == finder.profiles
    assert finder.profile == finder.profiles[0]
    trained = module.sizes[-sum(1 for _ in RoundRobinSampler(*sampler.samplers)) :]
    assert sum(sum(each) for each in trained) == 60
    assert "their positions are not part of checkpoints" in caplog.text


def test_zipped_samplers_share_the_memory_in_iterable_style_too() -> None:
    sampler = ZipSampler(short(), long(), merge_batches=False)
    wrapper = IterableDatasetWrapper(PairDataset(), sampler)
    module, finder = fit(DataLoader(wrapper, batch_size=None))
    assert len(finder.profiles) == 2
    assert all("tuple" in profile.fingerprint.fields["beside"] for profile in finder.profiles)
    assert len(module.sizes[-1]) == 2


@pytest.mark.parametrize("structure", ["list", "dict", "max_size", "min_size"])
def test_loaders_of_which_each_step_gets_a_batch_share_the_memory(structure: str) -> None:
    pair = [short(), long()]
    loaders: Any = [loader(sampler) for sampler in pair]
    if structure != "list":
        loaders = {"short": loaders[0], "long": loaders[1]}
    module, finder = fit(CombinedLoader(loaders, structure) if structure.endswith("size") else loaders)
    assert [sampler.profile for sampler in pair] == finder.profiles
    assert all("apart" in profile.fingerprint.fields["beside"] for profile in finder.profiles)
    assert len(module.sizes[-1]) == (1 if structure == "max_size" else 2)
    sizes = [sampler.bucket_batch_size for sampler in pair]
    budget_bytes = finder.profiles[0].budget_bytes
    states = module.trainer.optimizers[0].state.values()
    resident = [*module.parameters(), *module.buffers(), *(value for state in states for value in state.values())]
    memory = CpuMemory(limit_bytes=1 << 40, resident=lambda: resident)
    parts = [
        TinyDataset()[tiny_cuts(size, shortest=edge, longest=edge, chars_per_s=12)]
        for size, edge in ((sizes[0][1], 2.0), (sizes[1][1], 4.0))
    ]
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with memory.measure() as usage:
        module.training_step(parts, 0).backward()
    assert 0.8 * budget_bytes < usage().allocated_bytes <= budget_bytes


def test_a_loader_of_unknown_size_beside_one_to_calibrate_is_refused() -> None:
    other = DataLoader([1, 2, 3])
    with pytest.raises(UnsupportedStrategyError, match=r"2 training DataLoaders in a list share each step.*Sequential"):
        fit([loader(short()), other])


def test_loaders_one_after_the_other_are_refused_as_lightning_does() -> None:
    with pytest.raises(UnsupportedStrategyError, match="Lightning trains on no CombinedLoader in mode 'sequential'"):
        fit(CombinedLoader([loader(short()), loader(long())], "sequential"))


def test_sizes_found_once_are_known_when_the_loaders_are_made_anew(caplog: pytest.LogCaptureFixture) -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return [loader(short()), loader(long())]

    module, finder = Recogniser(), BucketBatchSizeFinder(memory_limit="6MiB", cache=False, progress=False)
    trainer = pl.Trainer(
        callbacks=[finder],
        max_epochs=2,
        limit_train_batches=1,
        reload_dataloaders_every_n_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with caplog.at_level(logging.INFO, "lhotse_oomfit"):
        trainer.fit(module, Data())
    assert caplog.text.count("are known already: 0 trial steps") == 2
