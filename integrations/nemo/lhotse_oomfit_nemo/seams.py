"""All that reaches into NeMo: the names it stands on, and what it puts in their place.

NeMo's data loading looks the names it uses up in its own module when it is called, so what is replaced there holds
for every model. Each replacement hands a section without ``bucket_batch_size: auto`` to NeMo's own function, as it
came. The names are checked once; if one has moved, a job that asks for ``auto`` ends at once and says which.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from lhotse_oomfit.errors import InvalidArgumentError, OomfitError, UnsupportedStrategyError
from lhotse_oomfit_nemo.request import (
    OPTION_KEYS,
    asks_for_auto,
    check_keys,
    check_word,
    refuse_auto,
    request_from,
    sub_configs,
)
from lhotse_oomfit_nemo.sampling import (
    NemoBucketingSampler,
    common_seed,
    estimated_edges,
    limits_from,
    plain_edges,
    warn_of_top_edge,
)

__all__ = [
    "SUPPORTED",
    "NemoMovedError",
    "forget_auto",
    "install",
    "nemo_models",
    "source_of",
    "was_asked_for_auto",
    "what_moved",
    "without_fallback",
]

logger = logging.getLogger(__name__)

SUPPORTED = ("2.7", "3.0")

_LOADING = "nemo.collections.common.data.lhotse.dataloader"
_MODEL = "nemo.core.classes.modelPT"
_FIELDS = (
    "bucket_batch_size",
    "bucket_duration_bins",
    "bucketing_2d_strict_mode",
    "concurrent_bucketing",
    "max_duration",
    "max_tokens",
    "max_tps",
    "min_tps",
    "num_buckets",
    "num_cuts_for_bins_estimate",
    "pretokenize",
    "seed",
    "shard_seed",
    "use_bucketing",
    "use_multimodal_sampling",
)
_PARAMETERS = {
    "make_structured_with_schema_warnings": ("config",),
    "get_lhotse_dataloader_from_multi_config": ("top_level_config",),
    "get_lhotse_sampler_from_config": ("config", "global_rank", "world_size", "tokenizer"),
    "read_cutset_from_config": ("config",),
    "determine_use_iterable_dataset": ("use_iterable_dataset", "config"),
    "determine_sampling_constraint": ("cuts", "bucket_duration_bins", "config"),
}
_LOOKED_UP = ("DynamicBucketingSampler", "determine_sampling_constraint", "read_cutset_from_config")
"""What ``get_lhotse_sampler_from_config`` must look up by these names when it is called."""

_RANDOM_SEED = "oomfit_seed_is_random"  # carries a fact from one of NeMo's functions to the next
_ASKED = "_oomfit_asked_for_auto"  # on a model, whose config has forgotten it


class NemoMovedError(OomfitError, RuntimeError):
    """NeMo's data loading isn't what this plugin was written for."""


def what_moved(loading: Any, model_class: Any) -> list[str]:
    """What of NeMo isn't where it must be.

    :param loading: the module of NeMo's Lhotse data loading.
    :param model_class: ``ModelPT``.
    """
    moved = []
    config = getattr(loading, "LhotseDataLoadingConfig", None)
    names = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    moved += [f"{_LOADING}.LhotseDataLoadingConfig.{name}" for name in _FIELDS if name not in names]
    for name, expected in _PARAMETERS.items():
        function = getattr(loading, name, None)
        if function is None or not callable(function):
            moved.append(f"{_LOADING}.{name}")
        elif not set(expected) <= set(inspect.signature(function).parameters):
            moved.append(f"{_LOADING}.{name}({', '.join(expected)})")
    function = getattr(loading, "get_lhotse_sampler_from_config", None)
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is not None:
        moved += [f"{_LOADING}.{name}, as looked up there" for name in _LOOKED_UP if name not in code.co_names]
    update = getattr(model_class, "_update_dataset_config", None)
    if update is None or not {"dataset_name", "config"} <= set(inspect.signature(update).parameters):
        moved.append(f"{_MODEL}.ModelPT._update_dataset_config(dataset_name, config)")
    return moved


def install() -> None:
    """Put the replacements in place, once."""
    loading: Any = importlib.import_module(_LOADING)
    model_class = importlib.import_module(_MODEL).ModelPT
    if getattr(loading, "_oomfit_installed", False):
        return
    loading._oomfit_installed = True
    moved = what_moved(loading, model_class)

    def require() -> None:
        if moved:
            raise NemoMovedError(
                f"bucket_batch_size=auto must find NeMo's data loading as in versions {' and '.join(SUPPORTED)}, this "
                f"is {_version()}, without {'; '.join(moved)}; use one of these versions, or set bucket_batch_size to "
                f"a list of sizes"
            )

    for name, wrap in (
        ("make_structured_with_schema_warnings", _structured),
        ("get_lhotse_dataloader_from_multi_config", _multi_config),
        ("get_lhotse_sampler_from_config", _sampler),
    ):
        if callable(getattr(loading, name, None)):
            replacement: Any = wrap(loading, getattr(loading, name), require)
            replacement.__wrapped__ = getattr(loading, name)
            setattr(loading, name, replacement)
    if hasattr(model_class, "_update_dataset_config"):
        model_class._update_dataset_config = _update(model_class._update_dataset_config, require)


def _version() -> str:
    info = importlib.import_module("nemo.package_info")
    return str(getattr(info, "__version__", "unknown"))


def _structured(loading: Any, original: Callable[..., Any], require: Callable[[], None]) -> Callable[..., Any]:
    """``make_structured_with_schema_warnings``: raw section to structured section; the schema learns our keys."""

    def make_structured_with_schema_warnings(config: Any) -> Any:
        if not asks_for_auto(config):
            check_word(config)
            return original(config)
        require()
        schema = loading.LhotseDataLoadingConfig
        check_keys(config.keys(), [_RANDOM_SEED, *(field.name for field in dataclasses.fields(schema))])
        with _replaced(loading, LhotseDataLoadingConfig=_extended(schema)):
            structured = original(config)
        if structured.get(_RANDOM_SEED) is None:
            structured[_RANDOM_SEED] = isinstance(structured.seed, str)
        return structured

    return make_structured_with_schema_warnings


def _extended(schema: type) -> type:
    """NeMo's schema, in which ``bucket_batch_size`` may be a word, and with our keys."""
    keys = [(key, Any, dataclasses.field(default=None)) for key in (*OPTION_KEYS, _RANDOM_SEED)]
    return dataclasses.make_dataclass(
        schema.__name__, [("bucket_batch_size", Any, dataclasses.field(default=None)), *keys], bases=(schema,)
    )


def _multi_config(loading: Any, original: Callable[..., Any], require: Callable[[], None]) -> Callable[..., Any]:
    """``get_lhotse_dataloader_from_multi_config``: what the top level says of us holds for its sub-sections."""

    def get_lhotse_dataloader_from_multi_config(top_level_config: Any, *args: Any, **kwargs: Any) -> Any:
        if not asks_for_auto(top_level_config):
            check_word(top_level_config)
            return original(top_level_config, *args, **kwargs)
        require()
        top = copy.deepcopy(top_level_config)
        names = [field.name for field in dataclasses.fields(loading.LhotseDataLoadingConfig)]
        check_keys(top.keys(), names)
        shared = {key: top[key] for key in top if key in OPTION_KEYS}
        is_auto = isinstance(top.get("bucket_batch_size"), str)
        for name, part in sub_configs(top).items():
            with open_dict(part):
                if is_auto and part.get("bucket_batch_size") is None and part.get("use_bucketing", True):
                    part.bucket_batch_size = "auto"
                if not asks_for_auto(part):
                    continue
                part[_RANDOM_SEED] = isinstance(top.get("seed"), str)
                for key, value in shared.items():
                    if part.get(key, value) != value:
                        raise InvalidArgumentError(
                            f"train_ds.{key} is {value!r} and train_ds.{name}.{key} is {part[key]!r}, and the samplers "
                            f"of one training are calibrated alike; set it once, at the top"
                        )
                    part[key] = value
        return original(top, *args, **kwargs)

    return get_lhotse_dataloader_from_multi_config


def _sampler(loading: Any, original: Callable[..., Any], require: Callable[[], None]) -> Callable[..., Any]:
    """``get_lhotse_sampler_from_config``: ours instead of Lhotse's, from the same cuts."""

    def get_lhotse_sampler_from_config(config: Any, global_rank: int, world_size: int, tokenizer: Any = None) -> Any:
        if not asks_for_auto(config):
            return original(config, global_rank, world_size, tokenizer)
        require()
        request = request_from(config.get)
        if not config.use_bucketing:
            logger.info("use_bucketing is set, as bucket_batch_size=auto means buckets")
            config.use_bucketing = True
        if config.concatenate_samples and config.concatenate_duration_factor > 1:
            raise InvalidArgumentError(
                f"train_ds.concatenate_duration_factor must be 1 with bucket_batch_size=auto, it is "
                f"{config.concatenate_duration_factor:g}: longer cuts than those of their bucket would be made of them "
                f"after they were counted; set it to 1, or bucket_batch_size to a list of sizes"
            )
        measure = _measure(loading, config)
        if config.bucket_duration_bins is None:
            cuts = _cuts_of(loading, original, config, global_rank, world_size, tokenizer)
            config.bucket_duration_bins = estimated_edges(
                cuts,
                num_buckets=config.num_buckets,
                num_cuts=config.num_cuts_for_bins_estimate,
                max_length=_finite_or_inf(config.max_tokens if measure else config.max_duration),
                measure_length=measure,
            )
        elif measure is None:
            warn_of_top_edge(plain_edges(config.bucket_duration_bins), _finite_or_inf(config.max_duration))
        limits = limits_from(
            config.min_tps, config.max_tps, counts_tokens=tokenizer is not None and bool(config.pretokenize)
        )

        def make(*cuts: Any, constraint: Any, duration_bins: Any, **settings: Any) -> NemoBucketingSampler:
            return NemoBucketingSampler(
                *cuts,
                request=request,
                bucket_batch_size="auto",
                duration_bins=plain_edges(duration_bins),
                strict_2d=config.bucketing_2d_strict_mode,
                measure_length=measure,
                **limits,
                **settings,
            )

        with _auto_loading(loading, world_size, make):
            sampler, is_iterable = original(config, global_rank, world_size, tokenizer)
        if not is_iterable:
            sampler.vary_by_epoch()
        return sampler, is_iterable

    return get_lhotse_sampler_from_config


@contextmanager
def _auto_loading(loading: Any, world_size: int, make: Callable[..., Any]) -> Iterator[None]:
    """NeMo's data loading without its own idea of batch sizes, and with one order of the data for all ranks."""
    read = loading.read_cutset_from_config
    replacements: dict[str, Any] = {
        "DynamicBucketingSampler": make,
        "determine_sampling_constraint": lambda cuts, bins, config: (cuts, None),
        "read_cutset_from_config": lambda config: _read(loading, read, config, world_size),
    }
    if hasattr(loading, "_auto_detect_bucketing_and_validate_batch_size"):  # from 3.0 on
        replacements["_auto_detect_bucketing_and_validate_batch_size"] = lambda config: None
    with _replaced(loading, **replacements):
        yield


def _read(loading: Any, read: Callable[..., Any], config: Any, world_size: int) -> Any:
    cuts, is_iterable = read(config)
    if loading.determine_use_iterable_dataset(is_iterable, config) or isinstance(config.shard_seed, int):
        return cuts, is_iterable
    seed = common_seed(
        config.shard_seed, config.seed, seed_is_random=bool(config.get(_RANDOM_SEED)), world_size=world_size
    )
    logger.info(
        "map-style data: shard_seed=%s becomes %d, so that all ranks draw from one order of the data, and "
        "concurrent_bucketing reads ahead in that order",
        config.shard_seed,
        seed,
    )
    config.shard_seed = seed
    return read(config)


class _Stopped(Exception):
    """Carries the cuts out of NeMo's function where it would make a sampler of them."""


def _cuts_of(loading: Any, original: Callable[..., Any], config: Any, *arguments: Any) -> Any:
    """The cuts as they come to the sampler, in an order that is the same in all processes and in each run."""

    def stop(cuts: Any, **settings: Any) -> None:
        raise _Stopped(cuts)

    fixed = copy.deepcopy(config)
    fixed.shard_seed = 0
    try:
        with _auto_loading(loading, 1, stop):
            original(fixed, *arguments)
    except _Stopped as stopped:
        return stopped.args[0]
    raise NemoMovedError("get_lhotse_sampler_from_config must make a DynamicBucketingSampler, and it made none")


def _measure(loading: Any, config: Any) -> Callable[[Any], float] | None:
    """How long an example is in tokens, with ``use_multimodal_sampling``; None where seconds count."""
    if not config.use_multimodal_sampling:
        return None
    bins = config.bucket_duration_bins
    if bins is not None and not isinstance(bins[0], (int, float)):
        raise InvalidArgumentError(
            "bucket_duration_bins must be numbers with use_multimodal_sampling and bucket_batch_size=auto, they are "
            "pairs; merge the pairs of each length, or set bucket_batch_size to a list of sizes"
        )
    constraint = loading.MultimodalSamplingConstraint(
        token_equivalent_duration=config.token_equivalent_duration, measure_total_length=config.measure_total_length
    )
    measure: Callable[[Any], float] = constraint.measure_length
    return measure


def _finite_or_inf(value: Any) -> float:
    return float("inf") if value is None else float(value)


def _update(original: Callable[..., Any], require: Callable[[], None]) -> Callable[..., Any]:
    """``ModelPT._update_dataset_config``: the model's own config, which is saved, never hears of us."""

    def _update_dataset_config(self: Any, dataset_name: str, config: Any) -> Any:
        if dataset_name != "train":
            refuse_auto(config, f"{dataset_name}_ds")
        elif asks_for_auto(config):
            require()
            self.__dict__[_ASKED] = True
            _ensure_finder(getattr(self, "_trainer", None))
            config = copy.deepcopy(config if isinstance(config, DictConfig) else OmegaConf.create(config))
            forget_auto(config)
        else:
            check_word(config)
            self.__dict__.pop(_ASKED, None)
        return original(self, dataset_name, config)

    return _update_dataset_config


def _ensure_finder(trainer: Any) -> None:
    """For a script that imported its model only after it made the Trainer."""
    from lhotse_oomfit_nemo.finder import NemoBatchSizeFinder

    if trainer is not None and not any(isinstance(callback, NemoBatchSizeFinder) for callback in trainer.callbacks):
        trainer.callbacks.insert(0, NemoBatchSizeFinder())


def forget_auto(config: Any) -> None:
    """Take ``auto`` and our keys out of a data section, in place."""
    with open_dict(config):
        for key in [key for key in config if key in OPTION_KEYS or key == _RANDOM_SEED]:
            del config[key]
        if isinstance(config.get("bucket_batch_size"), str):
            config.bucket_batch_size = None
    if config.get("multi_config", False):
        for part in sub_configs(config).values():
            forget_auto(part)


def source_of(dataloader: Any) -> Any:
    """The DataLoader inside speechlm2's BroadcastingDataLoader; any other as it is.

    :raises UnsupportedStrategyError: where ranks share one source of data, under tensor or context parallelism.
    """
    if type(dataloader).__name__ != "BroadcastingDataLoader":
        return dataloader
    source = getattr(dataloader, "_source", None)
    mesh: Any = getattr(dataloader, "_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if source is None or any(name in ("cp", "tp") and mesh[name].size() > 1 for name in names):
        raise UnsupportedStrategyError(
            "bucket_batch_size=auto needs a rank of its own for each source of data, with tensor or context "
            "parallelism several ranks share one; set bucket_batch_size to a list of sizes"
        )
    return source


def without_fallback(dataset: Any) -> Any:
    """The dataset inside NeMo's FallbackDataset, which hands out the last batch again where one can't be read."""
    return dataset.dataset if type(dataset).__name__ == "FallbackDataset" else dataset


def was_asked_for_auto(module: Any) -> bool:
    """Whether a NeMo model was given a section of training data that says ``auto``."""
    return any(vars(model).get(_ASKED, False) for model in nemo_models(module))


def nemo_models(module: Any) -> list[Any]:
    """The NeMo models in a module, itself and nested ones."""
    model_class = importlib.import_module(_MODEL).ModelPT
    return [child for child in module.modules() if isinstance(child, model_class)]


@contextmanager
def _replaced(module: Any, **names: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
