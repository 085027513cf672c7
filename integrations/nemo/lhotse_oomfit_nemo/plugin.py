"""What Lightning calls in ``Trainer.__init__``, by the entry point ``lightning.pytorch.callbacks_factory``.

NeMo's scripts make the Trainer before the model and its data, so this is early enough to teach NeMo's data loading
about ``bucket_batch_size=auto``. A job without NeMo pays one look into ``sys.modules``: neither NeMo nor
``lhotse_oomfit`` is imported, and no callback is added.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["callbacks"]

DATA_LOADING = "nemo.collections.common.data.lhotse.dataloader"


def callbacks() -> list[Any]:
    """The callback that waits for ``bucket_batch_size=auto`` in a NeMo job; none in another job."""
    if DATA_LOADING not in sys.modules:
        _watch_import()  # a script may import its model after it made the Trainer
        return []
    from lhotse_oomfit_nemo.finder import NemoBatchSizeFinder
    from lhotse_oomfit_nemo.seams import install

    install()
    return [NemoBatchSizeFinder()]


def _watch_import() -> None:
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Calls ``install`` once NeMo's data loading has been imported, if it ever is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != DATA_LOADING:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _run_after(spec.loader)
        return spec


def _run_after(loader: Loader) -> None:
    execute: Callable[[ModuleType], None] = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        from lhotse_oomfit_nemo.seams import install

        install()

    loader.exec_module = exec_module  # type: ignore[method-assign]
