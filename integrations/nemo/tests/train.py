"""A NeMo training script as NeMo's own are, except that it writes down what happened, in ``record.rank<k>.json``.

The model's class comes from the config. With ``compare`` in the config, the same training runs a second time with the
sizes that were found given to the sampler as a list, so that nothing is calibrated.
"""

import copy
import json
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager
from nemo.utils.model_utils import import_class_by_path
from nemo.utils.trainer_utils import resolve_trainer_cfg
from omegaconf import OmegaConf


class Recorder(pl.Callback):
    def __init__(self):
        self.losses, self.shapes, self.said = [], [], {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        first = batch[0] if isinstance(batch, (tuple, list)) else batch.audio
        self.shapes.append(list(first.shape))

    def on_train_end(self, trainer, pl_module):
        finder = next((c for c in trainer.callbacks if type(c).__name__ == "NemoBatchSizeFinder"), None)
        profile = None if finder is None else finder.profile
        self.said = {
            "losses": self.losses,
            "shapes": self.shapes,
            "callbacks": [type(c).__name__ for c in trainer.callbacks],
            "sizes": None if profile is None else list(profile.bucket_batch_size),
            "bins": None if profile is None else [list(e) if isinstance(e, tuple) else e for e in profile.bins.edges],
            "num_trials": None if profile is None else profile.num_trials,
            "train_ds": OmegaConf.to_container(pl_module.cfg.train_ds, resolve=True),
            "distributed_sampler": trainer._accelerator_connector.use_distributed_sampler,
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "parameters": sum(float(p.detach().double().sum()) for p in pl_module.parameters()),
        }


def train(cfg):
    pl.seed_everything(1)
    recorder = Recorder()
    trainer = pl.Trainer(**resolve_trainer_cfg(cfg.trainer), callbacks=[recorder])
    exp_manager(trainer, cfg.get("exp_manager", None))
    if cfg.get("spl_tokens"):
        spl_cfg = cfg["spl_tokens"]
        tokenizer_class = import_class_by_path(cfg.model.tokenizer.custom_tokenizer["_target_"])
        tokenizer_class.build_special_tokenizer(
            spl_cfg["tokens"], spl_cfg["model_dir"], force_rebuild=spl_cfg["force_rebuild"]
        )
        cfg.model.tokenizer.langs.spl_tokens.dir = spl_cfg["model_dir"]
    model = import_class_by_path(cfg.model_class)(cfg=cfg.model, trainer=trainer)
    model.maybe_init_from_pretrained_checkpoint(cfg)
    trainer.fit(model)
    if cfg.get("save_to"):
        model.save_to(cfg.save_to)
    return trainer.global_rank, recorder.said


@contextmanager
def given(sizes):
    from lhotse_oomfit_nemo import sampling

    make = sampling.NemoBucketingSampler.__init__

    def with_sizes(self, *cuts, **settings):
        make(self, *cuts, **settings | {"bucket_batch_size": list(sizes)})

    sampling.NemoBucketingSampler.__init__ = with_sizes
    try:
        yield
    finally:
        sampling.NemoBucketingSampler.__init__ = make


@hydra_runner(config_path="conf", config_name="ctc")
def main(cfg):
    untouched = copy.deepcopy(cfg)
    rank, said = train(cfg)
    if untouched.get("compare"):
        with given(said["sizes"]):
            said["with_list"] = train(untouched)[1]
    (Path(cfg.record_dir) / f"record.rank{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
