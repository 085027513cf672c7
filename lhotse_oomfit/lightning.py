"""`BucketBatchSizeFinder`: calibrates the buckets of a Lightning training before its first batch.

The callback turns Lightning's hooks into one call of :func:`~lhotse_oomfit.fit.calibrate_training` and decides
nothing itself. The moment matters. At ``on_fit_start`` a resumed optimizer has no state yet; at ``on_train_start``
several batches are drawn already and the workers are forked. In between, Lightning makes the training DataLoader and
hands it to ``Strategy.process_dataloader`` in the main process of every rank, after the checkpoint is restored and
before the loader is iterated. No callback hook lies there, so while a fit runs this callback stands in for that
method of its own trainer's strategy.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch

from lhotse_oomfit.agreement import Agreement, new_agreement
from lhotse_oomfit.errors import InvalidArgumentError
from lhotse_oomfit.fit import (
    CalibrationOptions,
    Member,
    calibrate_several,
    calibrate_together,
    calibrate_training,
)
from lhotse_oomfit.late_memory import LateMemory
from lhotse_oomfit.lightning_loaders import (
    RequestedLoaders,
    find_composite,
    find_sampler,
    members_of,
    watch_request,
)
from lhotse_oomfit.lightning_step import (
    LightningStep,
    TrainingStepFunction,
    check_trainer,
    largest_accumulation,
    pl,
    silenced,
)
from lhotse_oomfit.profile import Profile
from lhotse_oomfit.sampler import CalibratedBucketingSampler
from lhotse_oomfit.training import MakeBatch, Training, unwrap_dataset

__all__ = ["BucketBatchSizeFinder", "find_sampler"]

logger = logging.getLogger(__name__)


class BucketBatchSizeFinder(pl.Callback):
    """Finds the batch sizes of a :class:`CalibratedBucketingSampler` made with ``bucket_batch_size="auto"``.

    The sampler may sit in a DataLoader given to ``Trainer.fit``, or returned by a module or a datamodule, map-style
    or in Lhotse's ``IterableDatasetWrapper``. The user's module needs no change: trials run its ``training_step`` and
    ``backward`` under the trainer's precision, with ``self.log`` and the loggers silenced, and leave no trace in the
    module, the optimizers, the schedulers or the trainer.

    :param training_step: ``training_step(module, batch)`` stands in for the module's own in trials; it must be given
        for manual optimization. It gets the batch on the device, runs under the trainer's precision, and returns the
        loss, or None if it ran its backward passes itself (``module.manual_backward``). It does what the module's own
        does in the same order, ``zero_grad`` included, but steps neither optimizers nor schedulers.
    :param make_batch: ``make_batch(batch_size=..., input_len=..., output_len=...)`` makes the worst-case batch, where
        the dataset can't collate one.
    :param memory_fraction, memory_limit, reserve, cache, recalibrate, verify_on_load, max_batch_size, num_sample_cuts,
        num_soak_steps, mode, objective, throughput_share, ranks, heartbeat_timeout, calibration_timeout, progress: see
        :class:`~lhotse_oomfit.fit.CalibrationOptions`.
    :raises InvalidArgumentError: for a value out of its range.

    After calibration, :attr:`profile` is what was found or loaded. There may be several samplers: in a
    RoundRobinSampler or a ZipSampler, or in several DataLoaders (a list, a dict, a CombinedLoader) of which each step
    gets a batch. Then :attr:`profiles` has one for each, in order, and positions are left out of checkpoints.

    The callback also makes the sampler's position part of Lightning's checkpoints (whether its sizes were calibrated
    or given): the batches that training has finished, not those that workers have prefetched. A resumed ``fit``
    continues with the very next batch; see :meth:`CalibratedBucketingSampler.load_state_dict` for what can't be
    continued. DataLoaders that keep a state of their own (torchdata's ``StatefulDataLoader``) are left to it.
    """

    def __init__(
        self,
        *,
        memory_fraction: float = 0.9,
        memory_limit: str | int | None = None,
        reserve: str | int | None = None,
        cache: str | os.PathLike[str] | Literal[False] | None = None,
        recalibrate: Literal["auto", "always"] = "auto",
        verify_on_load: bool = False,
        training_step: TrainingStepFunction | None = None,
        make_batch: MakeBatch | None = None,
        max_batch_size: int | None = None,
        num_sample_cuts: int = 1000,
        num_soak_steps: int | None = None,
        mode: Literal["verify", "fast"] = "verify",
        objective: Literal["memory", "throughput"] = "memory",
        throughput_share: float = 0.02,
        ranks: Literal["rank0", "shard", "each", "lockstep"] = "rank0",
        heartbeat_timeout: float = 60.0,
        calibration_timeout: float = 7200.0,
        progress: bool | None = None,
    ) -> None:
        self.options = CalibrationOptions(
            memory_fraction=memory_fraction,
            memory_limit=memory_limit,
            reserve=reserve,
            cache=cache,
            recalibrate=recalibrate,
            verify_on_load=verify_on_load,
            max_batch_size=max_batch_size,
            num_sample_cuts=num_sample_cuts,
            num_soak_steps=num_soak_steps,
            mode=mode,
            objective=objective,
            throughput_share=throughput_share,
            ranks=ranks,
            heartbeat_timeout=heartbeat_timeout,
            calibration_timeout=calibration_timeout,
            progress=progress,
        )
        for name, function in (("training_step", training_step), ("make_batch", make_batch)):
            if function is not None and not callable(function):
                raise InvalidArgumentError(f"{name} must be a function, it is {function!r}")
        self.training_step = training_step
        self.make_batch = make_batch
        self.profiles: list[Profile] = []
        self._sampler: CalibratedBucketingSampler | None = None
        self._num_workers = 0  # of an iterable-style loader
        self._num_resumed = 0  # batches of this epoch that lie before a loaded position
        self._num_processed_before: int | None = None  # Lightning's count when this epoch's first batch began
        self._set_epoch: Callable[[int], None] | None = None
        self._found: list[CalibratedBucketingSampler] = []  # in the training loaders
        self._requested = RequestedLoaders()
        self._holds_position = True
        self._loaded: dict[str, Any] | None = None
        self._next_epoch = 0
        self._agreement: Agreement | None = None
        self._num_checks = 0  # in this fit
        self._trainer: Any = None
        self._is_early = False  # whether there is no optimizer yet
        self._was_set_up_early = False
        self._uninstall: Callable[[], None] | None = None
        self._late_memory: LateMemory | None = None
        self._first_step: int | None = None  # Lightning's count of steps when training started

    @property
    def profile(self) -> Profile | None:
        """What was found or loaded, the first of several; None before calibration."""
        return self.profiles[0] if self.profiles else None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stand in for the strategy's ``process_dataloader`` while training data is set up.

        That can be before there is an optimizer to measure with: a module that reads
        ``trainer.estimated_stepping_batches`` in ``configure_optimizers`` has Lightning make and iterate the training
        data. The sampler then stands in with batches of one, and the data is set up again when training starts.
        """
        if stage != "fit":
            return
        self._is_early = True
        self._sampler = None
        self._holds_position = True
        self._trainer = trainer
        self._agreement = None
        self._num_checks = 0
        self._found = []
        self._late_memory = None
        self._first_step = None
        self._remove()
        loop, strategy = trainer.fit_loop, trainer.strategy
        setup_data, process_dataloader = loop.setup_data, strategy.process_dataloader

        def process(dataloader: Any) -> Any:
            dataloader = process_dataloader(dataloader)
            self._prepare_loader(trainer, dataloader)
            return dataloader

        def setup() -> None:
            if self._was_set_up_early and not self._is_early:
                loop._combined_loader = None  # made before there was an optimizer: make it anew
                self._was_set_up_early = False
            # Validation loaders go through process_dataloader too, but not from here.
            strategy.process_dataloader = process
            found, self._found = self._found, []
            try:
                with watch_request(loop) as self._requested:
                    setup_data()
            finally:
                del strategy.process_dataloader
            self._found = self._found or found  # Lightning asks every epoch, and makes loaders anew only at times

        loop.setup_data = setup

        def uninstall() -> None:
            del loop.setup_data

        self._uninstall = uninstall

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """From here on there are optimizers."""
        self._is_early = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See that all ranks have the same sizes; say so if there was nothing to do."""
        self._check_ranks(trainer)  # an epoch that is resumed in its middle doesn't start anew for Lightning
        if self._sampler is None and trainer.is_global_zero:
            logger.warning(
                "BucketBatchSizeFinder found no CalibratedBucketingSampler in the training data; remove the callback, "
                "or put the sampler in place of Lhotse's DynamicBucketingSampler"
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Tell an iterable dataset the epoch, as Lightning tells a sampler; see that all ranks have the same sizes."""
        self._num_processed_before = None
        self._check_ranks(trainer)
        if self._set_epoch is not None:
            self._set_epoch(trainer.fit_loop.epoch_progress.current.processed)

    def _check_ranks(self, trainer: Any) -> None:
        if trainer.world_size == 1:
            return
        if self._agreement is None:
            self._agreement = new_agreement()
        self._num_checks += 1
        for index, sampler in enumerate(self._found):
            parts = sampler.shared_by_ranks()
            if parts and self._agreement is not None:
                when = f"when epoch {trainer.current_epoch} starts"
                self._agreement.check(f"{self._num_checks}/{index}", when, parts)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *args: Any) -> None:
        """Note where Lightning's count of batches stands when the epoch begins; look for memory that appeared late."""
        starts_epoch = self._num_processed_before is None
        if starts_epoch:
            self._num_processed_before = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if self._first_step is None:
            self._first_step = trainer.global_step
        if self._late_memory is not None:
            if starts_epoch:  # other callbacks unfreeze when an epoch starts
                self._late_memory.check_frozen()
            self._late_memory.after(trainer.global_step - self._first_step, batch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Only the first epoch after a resume begins in its middle."""
        self._num_resumed = 0

    def state_dict(self) -> dict[str, Any]:
        """The sampler's position, for the checkpoint; between epochs, only which one is next."""
        if self._sampler is None or not self._holds_position:
            return {}
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        if progress.is_last_batch:
            return {"next_epoch": self._sampler.epoch + 1}
        # Lightning counts a batch as processed before any callback hears of it, this one or one that saves.
        num_finished = self._num_resumed
        if self._num_processed_before is not None:
            num_finished += progress.current.processed - self._num_processed_before
        try:
            return {"sampler": self._sampler.state_dict_at(num_finished, num_workers=self._num_workers)}
        except InvalidArgumentError as error:  # its epoch was changed in the middle, say; no reason to end a training
            logger.warning("the sampler's position isn't part of this checkpoint: %s", error)
            return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the position until the sampler is there."""
        self._loaded = state_dict.get("sampler")
        self._next_epoch = int(state_dict.get("next_epoch", 0))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the trainer its own methods back."""
        self._remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the trainer its own methods back."""
        self._remove()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the trainer its own methods back."""
        self._remove()
        self._late_memory = None

    def _remove(self) -> None:
        if self._uninstall is not None:
            self._uninstall()
            self._uninstall = None

    def _prepare_loader(self, trainer: Any, dataloader: Any) -> None:
        composite = find_composite(dataloader)
        sampler: Any = composite or find_sampler(dataloader)
        if sampler is None:
            return
        members = members_of(sampler)
        if self._is_early:
            self._was_set_up_early = True
            for member in members:
                if member.needs_calibration and member.bins is not None:
                    member.apply([1] * len(member.bins))
            return
        self._found += members
        requested = self._requested
        if requested.are_together:
            requested.ready.append((dataloader, sampler))
            if len(requested.ready) == requested.num:
                self._calibrate_together(trainer)
        elif composite is not None or (sampler.is_auto and sampler is not self._sampler):
            self._calibrate(trainer, sampler, self._training(trainer, dataloader, sampler))
        is_iterable = isinstance(dataloader.dataset, torch.utils.data.IterableDataset)
        set_epoch = getattr(dataloader.dataset, "set_epoch", None) if is_iterable else None
        num_before = len(self._found) - len(members)
        if composite is not None or requested.are_together or num_before:
            if num_before <= 1 and (composite is not None or num_before == 1):
                logger.warning(
                    "there are several CalibratedBucketingSamplers in the training data: their positions are not part "
                    "of checkpoints, a resumed epoch starts anew"
                )
            self._sampler = self._found[0]
            self._holds_position = False
            self._set_epoch = _both(self._set_epoch if num_before else None, set_epoch)
            (set_epoch or sampler.set_epoch)(trainer.fit_loop.epoch_progress.current.processed)
            return
        self._sampler = sampler
        self._num_workers = dataloader.num_workers if is_iterable else 0
        self._set_epoch = set_epoch
        self._holds_position = not hasattr(dataloader, "load_state_dict")
        # Lightning creates the first iterator before it tells the sampler which epoch it resumes in.
        # Where it resumes at the end of an epoch, it counts that epoch only later; older versions never do.
        epoch = trainer.fit_loop.epoch_progress.current.processed
        if hasattr(trainer.fit_loop, "restarted_on_epoch_end"):
            epoch = max(epoch, self._next_epoch)
        self._next_epoch = 0
        (self._set_epoch or sampler.set_epoch)(epoch)
        loaded, self._loaded = self._loaded, None
        if loaded is not None and self._holds_position:
            sampler.load_state_dict(copy.deepcopy(loaded))
            self._num_resumed = sampler.num_batches_drawn

    def _calibrate_together(self, trainer: Any) -> None:
        ready = self._requested.ready
        members = [Member(sampler=s, training=self._training(trainer, loader, s)) for loader, s in ready]
        self._calibrate(trainer, members, members[0].training)

    def _training(self, trainer: Any, dataloader: Any, sampler: Any) -> Training:
        module = trainer.lightning_module
        check_trainer(trainer, own_step=self.training_step is not None, reserved=self.options.reserve is not None)
        dataset, wrapper = unwrap_dataset(dataloader.dataset, sampler)
        collate_fn = dataloader.collate_fn
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return Training(
            module=module,
            step=LightningStep(trainer, scaler, self.training_step),
            model=trainer.strategy.model,
            step_together=LightningStep(trainer, scaler, self.training_step, together=True),
            collate=lambda cuts: collate_fn(dataset[cuts]),
            dataset=dataset,
            optimizers=list(trainer.strategy.optimizers),
            schedulers=[config.scheduler for config in trainer.strategy.lr_scheduler_configs],
            scalers=[] if scaler is None else [scaler],
            extras=[] if wrapper is None else [wrapper],
            holders=[callback for callback in trainer.callbacks if callback is not self],
            make_batch=self.make_batch,
            accumulate_grad_batches=largest_accumulation(trainer),
            forward_gradients=True,  # Lightning sets them to None between forward and backward
            functions={
                "training_step": self.training_step,
                "collate_fn": collate_fn,
                "make_batch": self.make_batch,
            },
            settings={
                "strategy": type(trainer.strategy).__name__,
                "precision": str(trainer.precision),
                "gradient clipping": str(bool(trainer.gradient_clip_val)),
            },
        )

    def _calibrate(self, trainer: Any, sampler: Any, training: Training) -> None:
        with silenced(trainer, training.module):
            try:
                self.profiles = self._find(sampler, training)
            except AttributeError as error:
                if sys.version_info >= (3, 11):
                    error.add_note(
                        "trial steps run before on_train_start: what training_step needs must exist by then, make it "
                        "in __init__, setup or on_fit_start"
                    )
                raise
        if self._late_memory is None:
            self._late_memory = LateMemory(
                training, budget_bytes=self.profiles[0].budget_bytes, reserve=self.options.reserve
            )

    def _find(self, sampler: Any, training: Training) -> list[Profile]:
        """:param sampler: one of ours, or one made of several; or a list of several that share a step."""
        if isinstance(sampler, list):
            return calibrate_together(sampler, self._requested.assemble, self.options, known=self.profiles)
        if not isinstance(sampler, CalibratedBucketingSampler):
            return calibrate_several(sampler, training, self.options, known=self.profiles)
        return [calibrate_training(sampler, training, self.options, known=self.profile)]


def _both(first: Callable[[int], None] | None, second: Callable[[int], None] | None) -> Callable[[int], None] | None:
    if first is None or second is None:
        return first or second

    def call(epoch: int) -> None:
        first(epoch)
        second(epoch)

    return call
