"""Training scripts like NeMo's, run as NeMo's are: Hydra overrides, one and two ranks, every kind of model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Corpus

SCRIPT = Path(__file__).parent / "train.py"

FEW = "++model.train_ds.oomfit_max_batch_size=8"
SHORT = ["model.train_ds.max_duration=2.5", "++model.train_ds.num_buckets=2", FEW]
"""For transducers, whose loss takes seconds on a CPU."""


def run(
    folder: Path, corpus: Corpus, config: str, *overrides: str, launcher: tuple[str, ...] = (), fails: bool = False
) -> tuple[list[dict[str, Any]], str]:
    """What each rank wrote down, and the log."""
    tokenizer = [f"model.tokenizer.dir={corpus.tokenizer}"]
    if config == "aed":
        special = folder / "special_tokens"
        tokenizer = [f"model.tokenizer.langs.en.dir={corpus.tokenizer}", f"spl_tokens.model_dir={special}"]
    command = [
        *(sys.executable, *launcher, str(SCRIPT), "--config-name", config),
        f"record_dir={folder}",
        f"hydra.run.dir={folder}/hydra",
        f"model.train_ds.manifest_filepath={corpus.train}",
        f"model.validation_ds.manifest_filepath={corpus.validation}",
        *tokenizer,
        "++model.train_ds.use_bucketing=true",
        "++model.train_ds.bucket_batch_size=auto",
        "++model.train_ds.oomfit_memory_limit=250MiB",
        f"++model.train_ds.oomfit_cache={folder}/profiles",
        *overrides,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "NODE_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OOMFIT_RECALIBRATE"):
        environment.pop(name, None)
    for old in folder.glob("record.rank*.json"):
        old.unlink()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that a hanging job goes with all its ranks
    )
    try:
        printed, _ = process.communicate(timeout=500)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{overrides} hung:\n{process.communicate()[0]}")
    assert (process.returncode != 0) is fails, printed
    return [json.loads(path.read_text()) for path in sorted(folder.glob("record.rank*.json"))], printed


def check_config(record: dict[str, Any]) -> None:
    """The model's config, which goes into checkpoints and .nemo files, knows nothing of us."""
    assert record["train_ds"]["bucket_batch_size"] is None
    assert not [key for key in record["train_ds"] if "oomfit" in key]


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("ctc", ["++model.train_ds.num_buckets=4", "trainer.log_every_n_steps=1"]),
        ("rnnt", SHORT),
        ("hybrid", [*SHORT, "trainer.log_every_n_steps=1"]),
        ("aed", ["++model.train_ds.num_buckets=3", "model.train_ds.max_duration=5"]),
    ],
)
def test_a_training_loses_nothing_by_being_calibrated(
    tmp_path: Path, corpus: Corpus, config: str, overrides: list[str]
) -> None:
    (record,), log = run(tmp_path, corpus, config, "++compare=true", *overrides)
    assert record["num_trials"] > 0
    assert "0 OOMs" in log
    assert record["global_step"] == 6
    with_list = record["with_list"]
    assert with_list["num_trials"] is None
    assert record["losses"] == with_list["losses"]
    assert all(loss > 0 for loss in record["losses"])
    assert record["shapes"] == with_list["shapes"]
    assert record["parameters"] == with_list["parameters"]
    check_config(record)


def test_two_ranks_train_alike_and_a_second_run_tries_nothing(tmp_path: Path, corpus: Corpus) -> None:
    # Validation without Lhotse, as in NeMo's YAML, needs the distributed sampler that Lhotse's training must not get.
    overrides = ["trainer.devices=2", "trainer.strategy=ddp", "trainer.max_steps=3", "++model.train_ds.num_buckets=3"]
    overrides += ["model.validation_ds.use_lhotse=false"]
    (first, second), log = run(tmp_path, corpus, "ctc", *overrides, "++compare=true", "model.train_ds.num_workers=2")
    assert "trial steps, 0 OOMs" in log
    assert first["num_trials"] > 0
    assert first["sizes"] == second["sizes"]
    assert first["parameters"] == second["parameters"]
    for record in (first, second):
        assert record["losses"] == record["with_list"]["losses"]
        assert record["distributed_sampler"] is True  # as NeMo's YAML has it; left out of account for training alone
        check_config(record)
    (again, _), log = run(tmp_path, corpus, "ctc", *overrides)
    assert "0 trial steps" in log
    assert again["losses"] == first["losses"]


@pytest.mark.parametrize("kind", ["tarred", "shar"])
def test_iterable_data_train_with_workers(
    tmp_path: Path, request: pytest.FixtureRequest, corpus: Corpus, kind: str
) -> None:
    source = request.getfixturevalue(kind)
    where = (
        [f"++model.train_ds.shar_path={source}", "model.train_ds.manifest_filepath=null"]
        if kind == "shar"
        else [f"model.train_ds.{key}={value}" for key, value in source.items()]
    )
    (record,), log = run(
        tmp_path,
        corpus,
        "ctc",
        *where,
        "model.train_ds.num_workers=2",
        "++model.train_ds.num_buckets=2",
        "++model.train_ds.num_cuts_for_bins_estimate=80",
        "++model.train_ds.bucket_buffer_size=60",
        "++model.train_ds.oomfit_max_batch_size=10",
        "++trainer.limit_train_batches=6",
    )
    assert record["sizes"][0] == 10
    assert max(shape[0] for shape in record["shapes"]) == 10
    assert record["global_step"] == 6
    assert "map-style data" not in log
    check_config(record)


def managed(folder: Path, more: str) -> str:
    """An override for NeMo's exp_manager, which saves every second step."""
    checkpoints = "monitor: step, mode: max, every_n_train_steps: 2, every_n_epochs: null, save_top_k: 1"
    return (
        f"exp_manager={{exp_dir: {folder}/exp, name: ctc, create_tensorboard_logger: false, "
        "use_datetime_version: false, create_checkpoint_callback: true, create_preemption_callback: true, "
        f"checkpoint_callback_params: {{{checkpoints}, save_last: true, always_save_nemo: false}}, {more}}}"
    )


def test_a_resumed_training_goes_on_where_it_stopped(tmp_path: Path, corpus: Corpus) -> None:
    manager = managed(tmp_path, "resume_if_exists: true, resume_ignore_no_checkpoint: true")
    overrides = ["++model.train_ds.num_buckets=3", FEW, "model.train_ds.num_workers=2"]
    overrides += ["trainer.limit_val_batches=0"]
    (through,), _ = run(tmp_path, corpus, "ctc", *overrides, "trainer.max_steps=5")
    (first,), _ = run(tmp_path, corpus, "ctc", *overrides, manager, "trainer.max_steps=2")
    (path,) = (tmp_path / "exp").rglob("*-last.ckpt")
    checkpoint = torch.load(path, weights_only=False, map_location="cpu")
    assert "oomfit" not in str(checkpoint["hyper_parameters"])
    assert checkpoint["callbacks"]["NemoBatchSizeFinder"]["sampler"]["epoch"] == 0
    (second,), log = run(tmp_path, corpus, "ctc", *overrides, manager, "trainer.max_steps=5")
    assert "0 trial steps" in log
    assert first["shapes"] + second["shapes"] == through["shapes"]


def test_an_average_of_the_parameters_is_none_of_the_trials(tmp_path: Path, corpus: Corpus) -> None:
    manager = managed(tmp_path, "ema: {enable: true, decay: 0.5, cpu_offload: true}")
    overrides = ["++model.train_ds.num_buckets=2", FEW, "trainer.max_steps=2", "trainer.limit_val_batches=0"]
    (record,), _ = run(tmp_path, corpus, "ctc", *overrides, manager)
    assert record["num_trials"] > 0
    (path,) = (tmp_path / "exp").rglob("*-last-EMA.ckpt")
    (plain,) = (tmp_path / "exp").rglob("*-last.ckpt")
    averaged = torch.load(path, weights_only=False, map_location="cpu")
    state = averaged["optimizer_states"][0]
    assert state["current_step"] == 2
    trained = torch.load(plain, weights_only=False, map_location="cpu")["state_dict"]
    assert any(not torch.equal(averaged["state_dict"][name], trained[name]) for name in trained)


def test_the_launcher_reaches_all_ranks_where_the_plugin_is_not_installed(tmp_path: Path, corpus: Corpus) -> None:
    hide = tmp_path / "hide"
    hide.mkdir()
    # Stands for an environment without our metadata.
    (hide / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\n"
        "find = metadata.MetadataPathFinder.find_distributions\n"
        "def others(*arguments, **settings):\n"
        "    for found in find(*arguments, **settings):\n"
        "        path = str(getattr(found, '_path', ''))\n"
        "        if 'lhotse_oomfit_nemo' not in path or '/lhotse_oomfit_nemo_' in path:\n"
        "            yield found\n"
        "metadata.MetadataPathFinder.find_distributions = others\n"
    )
    before = os.environ.get("PYTHONPATH", "")
    overrides = ["++model.train_ds.num_buckets=2", FEW, "trainer.max_steps=2", "model.validation_ds.use_lhotse=false"]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(hide), before] if before else [str(hide)])
    try:
        _, log = run(tmp_path, corpus, "ctc", *overrides, fails=True)
        assert "bucket_batch_size" in log  # NeMo alone refuses the word
        records, _ = run(
            tmp_path,
            corpus,
            "ctc",
            *overrides,
            "trainer.devices=2",
            "trainer.strategy=ddp",
            launcher=("-m", "lhotse_oomfit_nemo"),
        )
    finally:
        os.environ["PYTHONPATH"] = before
    assert [record["sizes"] for record in records] == [[8, 8], [8, 8]]
