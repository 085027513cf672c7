"""`NemoBatchSizeFinder`: calibrates a NeMo training whose data section asks for ``bucket_batch_size: auto``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.fit import CalibrationOptions
from lhotse_oomfit.lightning import BucketBatchSizeFinder
from lhotse_oomfit.lightning_loaders import members_of
from lhotse_oomfit.training import Training
from lhotse_oomfit_nemo.conversations import ConversationBatches, are_conversations
from lhotse_oomfit_nemo.request import Request, asks_for_auto, refuse_auto, request_from, section_of
from lhotse_oomfit_nemo.sampling import samplers_of
from lhotse_oomfit_nemo.schema import SchemaBatches
from lhotse_oomfit_nemo.seams import forget_auto, nemo_models, source_of, was_asked_for_auto, without_fallback

__all__ = ["NemoBatchSizeFinder"]

logger = logging.getLogger(__name__)


class NemoBatchSizeFinder(BucketBatchSizeFinder):
    """A :class:`BucketBatchSizeFinder` whose options come with the data.

    It is part of every Trainer that is made in a NeMo job, and leaves it when a fit begins without anything to
    calibrate.
    """

    def __init__(self) -> None:
        self._request: Request | None = None
        super().__init__()

    @property
    def options(self) -> CalibrationOptions:
        """Those of the data section; the defaults before it was read."""
        return CalibrationOptions() if self._request is None else self._request.options

    @options.setter
    def options(self, value: CalibrationOptions) -> None:
        """The base class sets its defaults here; the data section decides."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Look whether there is anything to do; if not, leave the trainer as if this had never been there."""
        if stage != "fit":
            return
        datamodule = getattr(trainer, "datamodule", None)
        data_config = getattr(datamodule, "cfg", None)
        for section in ("validation_ds", "test_ds", "predict_ds"):
            refuse_auto(section_of(data_config, section), section)
        self._request = self._find_request(trainer, pl_module, data_config)
        if self._request is None:
            trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]
            return
        if trainer.strategy.root_device.type == "cpu" and self._request.options.memory_limit is None:
            raise InvalidArgumentError(
                "train_ds.oomfit_memory_limit must be given on a CPU, whose memory has no size of its own to fill; add "
                "for instance ++model.train_ds.oomfit_memory_limit=600MiB"
            )
        for model in nemo_models(pl_module):
            train_ds = section_of(model.cfg, "train_ds")
            if train_ds is not None and asks_for_auto(train_ds) and not train_ds.get("defer_setup", False):
                forget_auto(train_ds)  # a model that doesn't keep its config by NeMo's own method
        if self._request.batches == "schema":
            config = data_config if data_config is not None else pl_module.cfg
            rate = (section_of(config, "train_ds") or {}).get("sample_rate") or 16000
            self.make_batch = SchemaBatches(pl_module, sampling_rate=int(rate))
        super().setup(trainer, pl_module, stage)
        loop, setup_data = trainer.fit_loop, trainer.fit_loop.setup_data

        def setup_undistributed() -> None:
            with _sampler_left_alone(trainer):
                setup_data()

        loop.setup_data = setup_undistributed

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse to train with other batch sizes than were asked for."""
        if self._sampler is None:
            raise _not_from_lhotse(pl_module)
        if any(getattr(member, "starts_anew", False) for member in members_of(self._sampler)) and _is_limited(trainer):
            logger.warning(
                "train_ds has no end, and begins anew after each epoch of trainer.limit_train_batches=%s: what lies "
                "behind is never reached; leave limit_train_batches out, with trainer.max_steps and "
                "trainer.val_check_interval instead, or set train_ds.force_finite=true",
                trainer.limit_train_batches,
            )
        super().on_train_start(trainer, pl_module)

    def _prepare_loader(self, trainer: Any, dataloader: Any) -> None:
        super()._prepare_loader(trainer, source_of(dataloader) if self._request is not None else dataloader)

    def _training(self, trainer: Any, dataloader: Any, sampler: Any) -> Training:
        training = super()._training(trainer, dataloader, sampler)
        dataset, collate_fn = without_fallback(training.dataset), dataloader.collate_fn
        if dataset is not training.dataset:
            training = replace(training, dataset=dataset, collate=lambda cuts: collate_fn(dataset[cuts]))
        members = members_of(sampler)
        if training.make_batch is None and are_conversations([cut for each in members for cut in each.sample_cuts(1)]):
            make_batch = ConversationBatches(
                collate=training.collate,
                examples=[cut for each in members for cut in each.sample_cuts(self.options.num_sample_cuts)],
                measure_length=members[0].measure_length,
            )
            functions = {**training.functions, "make_batch": make_batch}
            training = replace(training, make_batch=make_batch, functions=functions)
        return training

    def _find_request(self, trainer: Any, pl_module: Any, data_config: Any) -> Request | None:
        requests = [sampler.request for sampler in samplers_of(getattr(pl_module, "_train_dl", None))]
        if any(request != requests[0] for request in requests):
            raise InvalidArgumentError("the samplers of one training must be calibrated with the same oomfit_ options")
        if requests:
            return requests[0]
        configs = [data_config, getattr(pl_module, "cfg", None)]
        for config in configs:
            train_ds = section_of(config, "train_ds")
            if train_ds is not None and asks_for_auto(train_ds):
                return request_from(train_ds.get)
        if was_asked_for_auto(pl_module):
            raise _not_from_lhotse(pl_module)
        return None


def _is_limited(trainer: Any) -> bool:
    """Whether an epoch ends before the data do."""
    limit = trainer.limit_train_batches
    return limit is not None and not (isinstance(limit, float) and limit == 1.0)


def _not_from_lhotse(module: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"train_ds.bucket_batch_size is 'auto', but the training data of this {type(module).__name__} don't come from "
        f"Lhotse; set ++model.train_ds.use_lhotse=true where the model has it, else give batch_size and leave "
        f"bucket_batch_size out"
    )


@contextmanager
def _sampler_left_alone(trainer: Any) -> Iterator[None]:
    """No DistributedSampler of Lightning's around the training sampler, which splits the data over ranks by itself."""
    connector = trainer._accelerator_connector
    before = connector.use_distributed_sampler
    if before and trainer.world_size > 1:
        logger.info("trainer.use_distributed_sampler is left out of account for the training data")
    connector.use_distributed_sampler = False
    try:
        yield
    finally:
        connector.use_distributed_sampler = before
