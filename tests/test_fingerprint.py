from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lhotse_oomfit.fingerprint import (
    Fingerprint,
    batch_fields,
    dataset_fields,
    environment_fields,
    model_fields,
    one_line,
    optimizer_fields,
)

HERE = Path(__file__).parent


class Fbank(nn.Module):
    def __init__(self, hop_length: int = 160, dither: float = 1e-5, path: str = "/data/cmvn.json") -> None:
        super().__init__()
        self.hop_length = hop_length
        self.dither = dither
        self.path = path

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        return audio.unfold(-1, 400, self.hop_length)[..., :8]


class Layer(nn.Module):
    def __init__(self, att_context_size: tuple[int, int] = (70, 13), activation: Any = nn.functional.relu) -> None:
        super().__init__()
        self.att_context_size = list(att_context_size)
        self.activation = activation
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)
        self.use_checkpoint = False
        self.max_audio_length = 100

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(self.norm(x.transpose(-1, -2)).transpose(-1, -2)))


class Model(nn.Module):
    """Holds about everything that must count, and about everything that mustn't."""

    def __init__(self, hop_length: int = 160, lr: float = 1e-3, seed: int = 0, num_layers: int = 2) -> None:
        super().__init__()
        self.lr = lr
        self.seed = seed
        self.global_step = 0
        self.num_updates = 0
        self.running_loss = 0.0
        self.warmup_steps = 100
        self.outputs: list[torch.Tensor] = []
        self.first_batch = True
        self._cache: dict[str, int] = {}
        self._calls = 0
        self.previous_output: torch.Tensor | None = None
        self.state: int | None = None
        self.fbank = Fbank(hop_length)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.register_buffer("positions", torch.zeros(1, 8), persistent=False)

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        x = self.fbank(audio)
        for layer in self.layers:
            x = layer(x)
        self.global_step += 1
        self.num_updates += 1
        self.running_loss = 0.9 * self.running_loss + float(x.detach().mean())
        self.first_batch = False
        self._calls += 1
        self.previous_output = x.detach()
        self.state = self.global_step
        self.outputs.append(x.detach())
        self._cache["calls"] = self.global_step
        self.positions = torch.zeros(2 * self.global_step, 8)
        for layer in self.layers:
            layer.max_audio_length = 100 + self.global_step
        return x


def fingerprint(model: nn.Module) -> Fingerprint:
    return Fingerprint(fields=model_fields(model))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    model.train()
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(2, 4000)).pow(2).mean().backward()
        optimizer.step()


def test_training_evaluating_and_resuming_change_nothing(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
    before = Fingerprint(fields={**model_fields(model), **optimizer_fields(optimizer)})
    train(model, optimizer, 3)
    scheduler.step()
    model.eval()
    assert before.differences(Fingerprint(fields={**model_fields(model), **optimizer_fields(optimizer)})) == []
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")

    resumed = Model()
    again = torch.optim.AdamW(resumed.parameters(), lr=5e-2)
    state = torch.load(tmp_path / "checkpoint.pt")
    resumed.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    train(resumed, again, 1)
    after = Fingerprint(fields={**model_fields(resumed), **optimizer_fields(again)})
    assert before.differences(after) == []
    assert before.digest == after.digest


def test_another_process_with_another_hash_seed_finds_the_same() -> None:
    code = """
import json, torch
from test_fingerprint import Model, Fbank, a_dataset
from lhotse_oomfit.fingerprint import *
model = Model()
model.handler = print
model.kinds = {"b", "a", "c"}
model.hook = Fbank.forward
fields = {**model_fields(model), **environment_fields(), **dataset_fields(a_dataset())}
print(json.dumps(fields))
"""
    seen = []
    for seed in ("1", "2"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
        }
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        seen.append(json.loads(run.stdout))
    assert seen[0] == seen[1]
    assert "0x" not in json.dumps(seen[0])


def test_a_halved_hop_length_is_found_and_named() -> None:
    assert fingerprint(Model()).differences(fingerprint(Model(hop_length=80))) == [
        "model.settings.Fbank.hop_length: 160 -> 80"
    ]


def test_checkpointing_toggled_in_one_layer_is_found_and_named() -> None:
    model = Model()
    model.layers[1].use_checkpoint = True
    assert fingerprint(Model()).differences(fingerprint(model)) == [
        "model.settings.Layer.use_checkpoint: False -> False (1), True (1)"
    ]


def test_another_attention_context_is_found_and_named() -> None:
    model = Model()
    for layer in model.layers:
        layer.att_context_size = [140, 13]
    assert fingerprint(Model()).differences(fingerprint(model)) == [
        "model.settings.Layer.att_context_size: [70, 13] -> [140, 13]"
    ]


def test_a_wrapped_layer_is_found() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Model()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    lines = fingerprint(Model()).differences(fingerprint(model))
    assert "model.modules.CheckpointWrapper: (absent) -> 1" in lines


def test_a_replaced_forward_is_found() -> None:
    model = Model()
    model.layers[0].forward = functools.partial(torch.utils.checkpoint.checkpoint, model.layers[0].forward)
    assert fingerprint(Model()).differences(fingerprint(model)) == [
        "model.settings.Layer.forward: (absent) -> partial checkpoint(Layer.forward)"
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing torch's compiler
def test_a_compiled_module_is_found() -> None:
    model = Model()
    model.layers[0].compile()
    assert "model.compiled: (absent) -> 1 modules" in fingerprint(Model()).differences(fingerprint(model))


CHANGES = {
    "another layer": lambda m: m.layers.append(Layer()),
    "another width": lambda m: setattr(m.layers[0], "linear", nn.Linear(8, 8, bias=False)),
    "another dtype": lambda m: m.layers[0].bfloat16(),
    "frozen": lambda m: m.layers[0].requires_grad_(False),
    "tied": lambda m: setattr(m.layers[0].linear, "weight", m.layers[1].linear.weight),
    "another activation": lambda m: setattr(m.layers[0], "activation", nn.functional.gelu),
    "no more norm": lambda m: setattr(m.layers[0], "norm", nn.Identity()),
    "dropout instead": lambda m: setattr(m.layers[0], "norm", nn.Dropout(0.1)),
    "another buffer": lambda m: m.register_buffer("window", torch.ones(5)),
    "an int that the constructor doesn't take": lambda m: setattr(m, "chunk_frames", 40),
    "a flag": lambda m: setattr(m, "fused_kernel", True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_memory_changes_the_fingerprint(name: str) -> None:
    model = Model()
    CHANGES[name](model)
    before, after = fingerprint(Model()), fingerprint(model)
    assert before.digest != after.digest
    assert before.differences(after) != []


SAME = {
    "learning rate": lambda m: setattr(m, "lr", 5.0),
    "seed": lambda m: setattr(m, "seed", 5),
    "an identifier of the process": lambda m: setattr(m, "model_guid", "6e85fb6f-940f-46ba"),  # NeMo's models
    "path": lambda m: setattr(m.fbank, "path", "/other/cmvn.json"),
    "a new path": lambda m: setattr(m, "decoder_dir", "/other"),
    "a path by its look": lambda m: setattr(m, "vocab", "/other/vocab.txt"),
    "counter": lambda m: setattr(m, "global_step", 99),
    "training flag": lambda m: m.eval(),
    "weights": lambda m: nn.init.normal_(m.layers[0].linear.weight),
    "a private attribute": lambda m: setattr(m, "_calls", 7),
    "an object": lambda m: setattr(m, "tracker", object()),
    "gradients": lambda m: setattr(m.layers[0].linear.weight, "grad", torch.zeros(8, 8)),
    "a growing table of positions": lambda m: setattr(m, "positions", torch.zeros(50, 8)),
}


@pytest.mark.parametrize("name", SAME)
def test_what_does_not_change_memory_leaves_the_fingerprint(name: str) -> None:
    model = Model()
    SAME[name](model)
    assert fingerprint(Model()).differences(fingerprint(model)) == []


def test_the_code_of_forward_counts_and_its_comments_do_not() -> None:
    def made(source: str) -> nn.Module:
        space: dict[str, Any] = {"nn": nn}
        exec(f"class Net(nn.Module):\n  def forward(self, x):\n{source}", space)
        net: nn.Module = space["Net"]()
        return net

    plain = made("    return x.relu()")
    commented = made('    """Says something."""\n    # and more\n\n    return x.relu()')
    other = made("    return x.relu().relu()")
    assert fingerprint(plain).differences(fingerprint(commented)) == []
    (line,) = fingerprint(plain).differences(fingerprint(other))
    assert line.startswith("model.code: ")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchScript is on its way out
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_scripted_module_has_a_fingerprint() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    fields = model_fields(nn.ModuleList([scripted]))
    assert "in 4 tensors" in fields["model.parameters"]
    assert fields == model_fields(nn.ModuleList([scripted]))


def test_a_lazy_module_has_a_fingerprint_before_its_first_batch() -> None:
    assert "in 2 tensors" in model_fields(nn.LazyLinear(4))["model.parameters"]


@dataclasses.dataclass
class Config:
    hop_length: int = 160
    lr: float = 0.1
    nested: dict[str, Any] = dataclasses.field(default_factory=lambda: {"att": [70, 13], "seed": 3, "d_model": 8})


def with_config(name: str, config: object) -> nn.Module:
    model = nn.Linear(2, 2)
    setattr(model, name, config)
    return model


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("cfg", dataclasses.asdict(Config())),
        ("cfg", Config()),
        ("config", types.SimpleNamespace(to_dict=lambda: dataclasses.asdict(Config()))),
        ("hparams", argparse.Namespace(**dataclasses.asdict(Config()))),
    ],
    ids=["dict", "dataclass", "to_dict", "namespace"],
)
def test_a_configuration_counts_but_for_what_does_not_change_memory(name: str, config: object) -> None:
    fields = model_fields(with_config(name, config))
    found = {key: value for key, value in fields.items() if key.startswith("model.config.")}
    assert found == {
        "model.config.hop_length": "160",
        "model.config.nested.att": "[70, 13]",
        "model.config.nested.d_model": "8",
    }


def test_an_omegaconf_configuration_counts_like_the_dict_it_was_made_from() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    made = omegaconf.OmegaConf.create({**dataclasses.asdict(Config()), "copied": "${hop_length}", "todo": "???"})
    fields = model_fields(with_config("_cfg", made))
    assert fields["model.config.nested.att"] == "[70, 13]"
    assert fields["model.config.copied"] == "160"
    assert "model.config.todo" not in fields


def test_data_sections_and_optimizers_of_a_configuration_stay_out() -> None:
    config = {
        "train_ds": {"manifest_filepath": "/a", "batch_size": 3},
        "optim": {"name": "adamw", "lr": 1.0},
        "encoder": {"_target_": "a.b.Encoder", "d_model": 8, "layers": [{"kernel": 3}, {"kernel": 5}]},
        "joint": {"fused_batch_size": 4, "fuse_loss_wer": True},
    }
    found = [key for key in model_fields(with_config("cfg", config)) if key.startswith("model.config.")]
    assert found == [
        "model.config.encoder.d_model",
        "model.config.encoder.layers.000.kernel",
        "model.config.encoder.layers.001.kernel",
        "model.config.joint.fuse_loss_wer",
        "model.config.joint.fused_batch_size",
    ]


def test_numbers_count_whatever_their_names_remind_of() -> None:
    config = {"drop_path": 0.1, "num_time_masks": 2, "loss_name": "rnnt", "model_path": "x.pt", "name": "x", "seed": 1}
    found = [key for key in model_fields(with_config("cfg", config)) if key.startswith("model.config.")]
    assert found == ["model.config.drop_path", "model.config.loss_name", "model.config.num_time_masks"]


@pytest.mark.filterwarnings("ignore")  # Lightning's own, about torch's pytree and its number of workers
def test_a_lightning_module_is_the_same_before_and_after_fitting(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int = 4, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.linear = nn.Linear(width, width)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.linear(batch).pow(2).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    model = Lit()
    before = fingerprint(model)
    assert before.fields["model.config.width"] == "4"
    assert "model.config.lr" not in before.fields
    trainer = lightning.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=2))
    assert before.differences(fingerprint(model)) == []
    assert before.differences(fingerprint(Lit(lr=0.5))) == []
    assert "model.config.width: 4 -> 6" in before.differences(fingerprint(Lit(width=6)))


def test_optimizer_flags_that_allocate_count_and_rates_do_not() -> None:
    def flags(cls: type[torch.optim.Optimizer], **options: Any) -> Fingerprint:
        return Fingerprint(fields=optimizer_fields(cls([nn.Parameter(torch.zeros(3))], **options)))

    base = flags(torch.optim.AdamW, lr=0.1)
    assert base == flags(torch.optim.AdamW, lr=0.2, weight_decay=0.5, betas=(0.5, 0.6), eps=1e-3)
    for options in ({"amsgrad": True}, {"foreach": False}, {"fused": True}):
        assert base != flags(torch.optim.AdamW, **options)
    assert flags(torch.optim.SGD, lr=0.1) != flags(torch.optim.SGD, lr=0.1, momentum=0.9)
    assert flags(torch.optim.SGD, lr=0.1, momentum=0.8) == flags(torch.optim.SGD, lr=0.1, momentum=0.9)
    assert flags(torch.optim.LBFGS) != flags(torch.optim.LBFGS, history_size=5)


def test_several_optimizers_are_told_apart() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    both = [torch.optim.SGD(parameters, lr=0.1), torch.optim.Adam(parameters)]
    fields = optimizer_fields(both)
    assert list(fields) == ["optimizer.0", "optimizer.0.tensors", "optimizer.1", "optimizer.1.tensors"]
    assert fields["optimizer.0"].startswith("SGD(")


def test_the_environment_names_versions_allocator_and_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    before = Fingerprint(fields=environment_fields())
    assert before.fields["torch"] == torch.__version__
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    enabled = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        lines = before.differences(Fingerprint(fields=environment_fields()))
    finally:
        torch.backends.cuda.enable_flash_sdp(enabled)
    assert "allocator settings: default -> PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in lines
    assert any(line.startswith("sdpa backends: flash ") for line in lines)


class FbankStrategy:
    def __init__(self, num_mel_bins: int = 80) -> None:
        self.num_mel_bins = num_mel_bins
        self.num_calls = 0


class SpecAugment:
    def __init__(self, num_masks: int = 2) -> None:
        self.num_masks = num_masks


class Dataset:
    def __init__(self, strategy: FbankStrategy, transforms: list[object]) -> None:
        self.input_strategy = strategy
        self.input_transforms = transforms
        self.return_cuts = True


def a_dataset(num_mel_bins: int = 80, num_masks: int = 2) -> Dataset:
    return Dataset(FbankStrategy(num_mel_bins), [SpecAugment(num_masks)])


def test_a_dataset_is_described_with_its_parts() -> None:
    fields = dataset_fields(a_dataset())
    assert fields["dataset"].startswith("Dataset, ")
    assert fields["dataset.input_strategy"] == "FbankStrategy"
    assert fields["dataset.input_strategy.num_mel_bins"] == "80"
    assert fields["dataset.input_transforms.0.num_masks"] == "2"
    before = Fingerprint(fields=fields)
    assert before.differences(Fingerprint(fields=dataset_fields(a_dataset(num_mel_bins=40)))) == [
        "dataset.input_strategy.num_mel_bins: 80 -> 40"
    ]


def test_the_data_that_a_dataset_holds_stays_out() -> None:
    cut_module = pytest.importorskip("lhotse.cut")
    random_module = pytest.importorskip("random")
    lhotse = pytest.importorskip("lhotse.testing.dummies")
    dataset = a_dataset()
    dataset.cuts = cut_module.CutSet.from_cuts([lhotse.dummy_cut(0)])  # type: ignore[attr-defined]
    dataset.mixer = types.SimpleNamespace(noise=cut_module.CutSet.from_cuts([lhotse.dummy_cut(1)]))  # type: ignore[attr-defined]
    dataset.num_examples = 9  # type: ignore[attr-defined]
    dataset.durations = [1, 2, 3]  # type: ignore[attr-defined]
    dataset.ids = tuple(map(str, range(1000)))  # type: ignore[attr-defined]
    dataset.generator = random_module.Random(3)  # type: ignore[attr-defined]
    assert dataset_fields(dataset) == dataset_fields(a_dataset())


def test_a_private_attribute_counts_where_the_constructor_takes_it() -> None:
    class Joint(nn.Module):
        def __init__(self, fused_batch_size: int = 4) -> None:
            super().__init__()
            self._fused_batch_size = fused_batch_size

    assert fingerprint(Joint()).differences(fingerprint(Joint(8))) == ["model.settings.Joint._fused_batch_size: 4 -> 8"]


def test_a_real_lhotse_dataset_is_described_the_same_after_use() -> None:
    dataset_module = pytest.importorskip("lhotse.dataset")
    dataset = dataset_module.K2SpeechRecognitionDataset(return_cuts=True)
    fields = dataset_fields(dataset)
    assert fields["dataset.input_strategy"] == "PrecomputedFeatures"
    assert fields == dataset_fields(dataset_module.K2SpeechRecognitionDataset(return_cuts=True))


def test_a_batch_is_described_by_names_dtypes_and_dimensions() -> None:
    batch = {
        "inputs": torch.zeros(3, 4, 5),
        "supervisions": {"text": ["a"], "num_frames": torch.zeros(3, dtype=torch.int32)},
    }
    assert batch_fields(batch) == {
        "batch": "inputs: float32 3d, supervisions.num_frames: int32 1d, supervisions.text: list",
        "batch.sizes": "inputs: 3x4x5, supervisions.num_frames: 3",
    }
    assert (
        batch_fields([torch.zeros(2, 3), torch.zeros(2), torch.zeros(4)])["batch"] == "[]: float32 2d, []: float32 1d"
    )
    assert batch_fields(tuple(batch.values()))["batch"].startswith("0: float32 3d, 1.num_frames: int32 1d")
    assert batch_fields([torch.zeros(2, 3), torch.zeros(4)])["batch.sizes"] == "[]: 2x3, []: 4"
    assert batch_fields("text") == {"batch": "batch: str"}


names = st.dictionaries(st.text(min_size=1, max_size=20), st.text(max_size=50), max_size=8)


@given(names)
def test_a_fingerprint_never_differs_from_itself_in_whatever_order(fields: dict[str, str]) -> None:
    one = Fingerprint(fields=fields)
    other = Fingerprint(fields=dict(reversed(one.fields.items())))
    assert one.differences(other) == []
    assert (one, hash(one), one.digest) == (other, hash(other), other.digest)
    assert pickle.loads(pickle.dumps(one)) == one


@given(names, names)
def test_fingerprints_differ_exactly_when_there_is_a_difference_to_name(a: dict[str, str], b: dict[str, str]) -> None:
    one, other = Fingerprint(fields=a), Fingerprint(fields=b)
    assert (one == other) == (one.differences(other) == [])
    assert (one == other) == (one.digest == other.digest)


@given(st.text())
def test_one_line_is_one_printable_line_and_stays_as_it_is(text: str) -> None:
    line = one_line(text)
    assert line == one_line(line)
    assert line.isprintable()
    assert "${" not in line


def test_a_summary_is_left_out_where_a_finer_field_says_more() -> None:
    one = Fingerprint(fields={"model.settings": "2 values, sha 0a", "model.settings.A.x": "1"})
    other = Fingerprint(fields={"model.settings": "2 values, sha 0b", "model.settings.A.x": "2"})
    assert one.differences(other) == ["model.settings.A.x: 1 -> 2"]


def test_fields_that_are_not_text_are_refused() -> None:
    with pytest.raises(TypeError, match=r"fingerprint fields must map str to str, got 'a': 1; convert with str\(\)"):
        Fingerprint(fields={"a": 1})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("old", "new", "near"),
    [
        ("2.11.0", "2.11.1", True),
        ("2.11.0+cu128", "2.11.2+cu128", True),
        ("2.11.0+cu128", "2.11.1+cu130", False),
        ("2.11.0", "2.12.0", False),
        ("2.11.0", "2.11.0", False),
        ("2.11.0a0+git123", "2.11.1", False),
    ],
)
def test_only_another_patch_version_of_torch_is_near(old: str, new: str, near: bool) -> None:
    one = Fingerprint(fields={"device": "H200", "torch": old})
    assert one.is_near(Fingerprint(fields={"device": "H200", "torch": new})) is near
    assert not one.is_near(Fingerprint(fields={"device": "A100", "torch": new}))
