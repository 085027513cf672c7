"""What the plugin does, and doesn't do, to a process that makes a Trainer."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace


def run(code: str, *, cwd: Path) -> str:
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_a_job_without_nemo_imports_neither_nemo_nor_the_core_and_gets_no_callback(tmp_path: Path) -> None:
    said = run(
        """
        import sys
        import lightning.pytorch as pl
        plain = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        print(sorted(type(callback).__name__ for callback in plain.callbacks))
        print("lhotse_oomfit_nemo.plugin" in sys.modules)  # Lightning did load us
        print([name for name in sys.modules if name.split(".")[0] in ("nemo", "lhotse_oomfit", "lhotse")])
        """,
        cwd=tmp_path,
    )
    assert said.splitlines()[-3:] == ["['ModelSummary', 'TQDMProgressBar']", "True", "[]"]


def test_a_model_that_is_imported_after_the_trainer_was_made_finds_the_replacements(tmp_path: Path) -> None:
    said = run(
        """
        import sys
        import lightning.pytorch as pl
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        from nemo.collections.common.data.lhotse import dataloader
        print(dataloader.get_lhotse_sampler_from_config.__module__)
        print(sum(type(finder).__name__ == "_AfterImport" for finder in sys.meta_path))
        """,
        cwd=tmp_path,
    )
    assert said.splitlines()[-2:] == ["lhotse_oomfit_nemo.seams", "0"]


def test_nothing_of_nemo_has_moved() -> None:
    from lhotse_oomfit_nemo.seams import what_moved
    from nemo.collections.common.data.lhotse import dataloader
    from nemo.core.classes.modelPT import ModelPT

    assert what_moved(dataloader, ModelPT) == []


def test_what_has_moved_is_named() -> None:
    from lhotse_oomfit_nemo.seams import what_moved
    from nemo.collections.common.data.lhotse import dataloader
    from nemo.core.classes.modelPT import ModelPT

    names = {name: getattr(dataloader, name) for name in dir(dataloader) if name != "read_cutset_from_config"}
    names["determine_sampling_constraint"] = lambda cuts, config: (cuts, None)
    names["get_lhotse_sampler_from_config"] = lambda config, global_rank, world_size, tokenizer: None
    module = SimpleNamespace(**names)
    where = "nemo.collections.common.data.lhotse.dataloader"
    assert what_moved(module, object) == [
        f"{where}.read_cutset_from_config",
        f"{where}.determine_sampling_constraint(cuts, bucket_duration_bins, config)",
        f"{where}.DynamicBucketingSampler, as looked up there",
        f"{where}.determine_sampling_constraint, as looked up there",
        f"{where}.read_cutset_from_config, as looked up there",
        "nemo.core.classes.modelPT.ModelPT._update_dataset_config(dataset_name, config)",
    ]
    assert what_moved(ModelPT, ModelPT)  # not a module of data loading at all


def test_a_job_that_asks_for_auto_ends_at_once_where_nemo_has_moved(tmp_path: Path) -> None:
    said = run(
        """
        from nemo.collections.common.data.lhotse import dataloader
        read = dataloader.read_cutset_from_config
        del dataloader.read_cutset_from_config
        from lhotse_oomfit_nemo.seams import NemoMovedError, install
        install()
        plain = dataloader.make_structured_with_schema_warnings({"batch_size": 3})
        print(plain.batch_size)
        try:
            dataloader.make_structured_with_schema_warnings({"bucket_batch_size": "auto"})
        except NemoMovedError as error:
            print(error)
        """,
        cwd=tmp_path,
    )
    size, message = said.splitlines()[-2:]
    assert size == "3"
    assert message.startswith(
        "bucket_batch_size=auto must find NeMo's data loading as in versions 2.7 and 3.0, this is "
    )
    assert message.endswith(
        "without nemo.collections.common.data.lhotse.dataloader.read_cutset_from_config; use one of these versions, or "
        "set bucket_batch_size to a list of sizes"
    )
