"""A NeMo training script as NeMo's own are, except that it writes down what happened, in ``record.rank<k>.json``.

The model's class comes from the config. With ``given_sizes`` in the config, the sampler is made with these sizes
instead of ``auto``, so that nothing is calibrated.
"""

import json
import os
from pathlib import Path

import lightning.pytorch as pl
from nemo.core.config import hydra_runner
from nemo.utils.exp_manager import exp_manager
from nemo.utils.model_utils import import_class_by_path
from nemo.utils.trainer_utils import resolve_trainer_cfg
from omegaconf import OmegaConf


class Recorder(pl.Callback):
    def __init__(self, folder):
        self.folder = Path(folder)
        self.losses, self.shapes = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        first = batch[0] if isinstance(batch, (tuple, list)) else batch.audio
        self.shapes.append(list(first.shape))

    def on_train_end(self, trainer, pl_module):
        finder = next((c for c in trainer.callbacks if type(c).__name__ == "NemoBatchSizeFinder"), None)
        profile = None if finder is None else finder.profile
        bins = None if profile is None else [list(e) if isinstance(e, tuple) else e for e in profile.bins.edges]
        train_ds = OmegaConf.to_container(pl_module.cfg.train_ds, resolve=True)
        record = {
            "losses": self.losses,
            "shapes": self.shapes,
            "callbacks": [type(c).__name__ for c in trainer.callbacks],
            "sizes": None if profile is None else list(profile.bucket_batch_size),
            "bins": bins,
            "num_trials": None if profile is None else profile.num_trials,
            "options": None if finder is None else repr(finder.options),
            "sampler": type(trainer.train_dataloader.sampler).__name__,
            "train_ds": train_ds,
            "global_step": trainer.global_step,
        }
        (self.folder / f"record.rank{trainer.global_rank}.json").write_text(json.dumps(record))


def give_sizes(sizes):
    from lhotse_oomfit_nemo import sampling

    make = sampling.NemoBucketingSampler.__init__

    def with_sizes(self, *cuts, **settings):
        make(self, *cuts, **settings | {"bucket_batch_size": list(sizes)})

    sampling.NemoBucketingSampler.__init__ = with_sizes


@hydra_runner(config_path="conf", config_name="ctc")
def main(cfg):
    pl.seed_everything(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    recorder = Recorder(cfg.record_dir)
    trainer = pl.Trainer(**resolve_trainer_cfg(cfg.trainer), callbacks=[recorder])
    if cfg.get("given_sizes"):
        give_sizes(cfg.given_sizes)
    exp_manager(trainer, cfg.get("exp_manager", None))
    model = import_class_by_path(cfg.model_class)(cfg=cfg.model, trainer=trainer)
    model.maybe_init_from_pretrained_checkpoint(cfg)
    trainer.fit(model)
    if cfg.get("save_to"):
        model.save_to(cfg.save_to)


if __name__ == "__main__":
    main()
