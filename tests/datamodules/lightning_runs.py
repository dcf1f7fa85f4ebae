"""Training runs that record their batches, to check that an interrupted epoch resumes exactly."""

from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn


class Recorder(LightningModule):
    """Records of every training batch what `record` returns."""

    def __init__(self, record):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.record = record
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(self.record(batch))
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch, batch_idx):
        pass

    def predict_step(self, batch, batch_idx):
        return getattr(batch, "sources", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _StopAfter(Callback):
    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "a.ckpt")
            trainer.should_stop = True


def fit(folder, data, record, *, stop_after=None, resume=False, max_epochs=3, **options):
    """Train, and return the records of the batches. After `stop_after` steps a.ckpt is written; `resume` loads it."""
    model = Recorder(record)
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        max_epochs=max_epochs,
        callbacks=[] if stop_after is None else [_StopAfter(stop_after)],
        **options,
    )
    trainer.fit(model, data, ckpt_path=folder / "a.ckpt" if resume else None, weights_only=resume or None)
    return model.seen
