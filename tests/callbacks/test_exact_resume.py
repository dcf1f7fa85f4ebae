"""A run that was stopped anywhere and resumed equals the uninterrupted one bit for bit.

`python -m tests.faults` checks the same for the command, with kills and with several processes.
"""

import os
import signal
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import Dataset

from lit_effattn import Transformer
from lit_effattn.attention import LinearAttention
from lit_effattn.callbacks import LastCheckpoint, MemoryCarry, RandomStates, StopOnSignal, Stopped
from lit_effattn.datamodules import ResumableLoader, ShardedBatches, SortingTask
from lit_effattn.datamodules.common.sampling import loader_options
from lit_effattn.tasks import LanguageModel, PixelModel
from lit_effattn.tasks.schedules import WarmupCosine
from tests.callbacks.tiny import trainer
from tests.faults.comparison import BEST, compare_checkpoints, compare_logs, read_log, remains
from tests.support.cases import pairwise

EPOCHS = 3
CELLS = pairwise(
    {
        "task": ("pixels", "sorting"),
        "limits": ("max_steps", "max_epochs", "both", "max_time"),
        "moment": ("mid-epoch", "last step of an epoch", "first step", "during validation"),
        "accumulate": (1, 3),
        "validation": ("each epoch", "within epochs", "across epochs"),
        "schedule": ("warm-up", "plateau", "steps of the run"),
    }
)


# ------------------------------------------------------------------------------------------------ what is trained


class Levels(Dataset):
    """Images of 2×3 levels. An item is a batch."""

    def __init__(self, n: int) -> None:
        self.images = torch.randint(4, (n, 6), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        return self.images[indices]


def images(n: int, batch_size: int, training: bool) -> ResumableLoader:
    sampler = ShardedBatches(n, batch_size, num_replicas=1, rank=0, shuffle=training, seed=0, drop_last=training)
    return ResumableLoader(Levels(n), sampler=sampler, **loader_options(0))


SCHEDULES = {
    "warm-up": partial(WarmupCosine, total_steps=20, warmup_steps=3),
    "steps of the run": partial(WarmupCosine, warmup_steps=0.2),
    "plateau": partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, threshold=10.0, factor=0.5),
}
BATCHES = {"pixels": 7, "sorting": 8}


def parts(task: str, schedule: str) -> tuple[pl.LightningModule, Any, Any]:
    """Return a model with dropout, and its loaders: 7 or 8 batches, of which 3 do not divide the number."""
    pl.seed_everything(3, verbose=False)
    options = {"optimizer": partial(torch.optim.RAdam, lr=0.01), "lr_scheduler": SCHEDULES[schedule]}
    if task == "pixels":
        model = PixelModel(Transformer(8, 2, 1, dropout=0.2), (2, 3, 1), 4, **options)
        return model, images(30, 4, training=True), images(6, 2, training=False)
    data = SortingTask(9, n_types=3, segment_len=3, batch_size=2, n_train=4, n_val=2)
    backbone = Transformer(8, 2, 1, attention=LinearAttention, positions=None, dropout=0.2)
    return LanguageModel(backbone, data.vocab_size, **options), data.train_dataloader(), data.val_dataloader()


# ------------------------------------------------------------------------------------------------ how it is stopped


class At(pl.Callback):
    """Stops the run once: by SIGTERM, or as Lightning's `Timer` does."""

    def __init__(self, timed: bool, epoch: int, batch: int, validating: bool = False) -> None:
        self.timed, self.where, self.validating, self.done = timed, (epoch, batch), validating, False

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if not self.timed and not self.validating and self._now(trainer, batch_idx):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.timed and self._now(trainer, batch_idx):
            trainer.should_stop = True

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if self.validating and self._now(trainer, batch_idx):
            os.kill(os.getpid(), signal.SIGTERM)

    def _now(self, trainer: pl.Trainer, batch_idx: int) -> bool:
        due = not self.done and (trainer.current_epoch, batch_idx) == self.where
        self.done = self.done or due
        return due


@dataclass
class Case:
    """A configuration of the run."""

    task: str
    accumulate: int = 1
    validation: str = "each epoch"
    schedule: str = "warm-up"

    @property
    def batches(self) -> int:
        return BATCHES[self.task]

    @property
    def steps(self) -> int:
        return -(-self.batches // self.accumulate)

    def fit(self, folder: Path, at: At | None = None, **limits: int) -> Path:
        """Train in `folder`, from its last checkpoint if it has one; return it."""
        model, train, val = parts(self.task, self.schedule)
        callbacks = [
            *([MemoryCarry()] if self.task == "sorting" else []),
            *([at] if at else []),
            StopOnSignal(),
            RandomStates(),
            LearningRateMonitor("step"),
            LastCheckpoint(),
            ModelCheckpoint(folder / "checkpoints", "best", model.monitor, save_on_train_epoch_end=False),
        ]
        run = trainer(
            folder,
            callbacks,
            logger=CSVLogger(folder, name="csv"),
            log_every_n_steps=1,
            accumulate_grad_batches=self.accumulate,
            val_check_interval={"each epoch": 1.0, "within epochs": 4, "across epochs": 11}[self.validation],
            check_val_every_n_epoch=None if self.validation == "across epochs" else 1,
            **limits,
        )
        last = folder / "checkpoints" / "last.ckpt"
        run.fit(model, train, val, ckpt_path=last if last.exists() else None, weights_only=True)
        assert len(train) == self.batches
        return folder


def differences(whole: Path, resumed: Path, may_add: int | None = None) -> list[str]:
    """Return the first difference of the checkpoints, of the logs and of the files."""
    a, b = (folder / "checkpoints" / "last.ckpt" for folder in (whole, resumed))
    logs = compare_logs(read_log(whole), read_log(resumed), may_add=may_add)
    kept = compare_checkpoints(a, b, but=frozenset() if may_add is None else BEST)
    return [found for found in (kept, logs, remains(resumed)) if found]


def where(moment: str, case: Case, timed: bool) -> dict[str, Any]:
    """Return where to stop. A time limit that expires in a validation stops the run after the next batch."""
    if moment == "during validation" and not timed:
        return {"epoch": 1, "batch": 1, "validating": True}
    validated = {"each epoch": (2, 0), "within epochs": (1, 4), "across epochs": (1, 10 % case.batches)}
    epoch, batch = {
        "first step": (0, case.accumulate - 1),
        "mid-epoch": (1, 4),  # within a window of three batches
        "last step of an epoch": (1, case.batches - 1),
        "during validation": validated[case.validation],
    }[moment]
    return {"epoch": epoch, "batch": batch}


# ------------------------------------------------------------------------------------------------ the tests


@pytest.mark.parametrize("task", ["sorting", pytest.param("pixels", marks=pytest.mark.exhaustive)])
def test_a_stopped_run_equals_the_uninterrupted_one(task: str, tmp_path: Path):
    for number, cell in enumerate(cell for cell in CELLS if cell["task"] == task):
        moment, kind = cell["moment"], cell["limits"]
        case = Case(task, *(cell[name] for name in ("accumulate", "validation", "schedule")))
        timed = kind == "max_time"
        limits = {
            "max_steps": {"max_steps": (EPOCHS - 1) * case.steps + case.steps // 2, "max_epochs": -1},
            "both": {"max_steps": EPOCHS * case.steps, "max_epochs": EPOCHS},
        }.get(kind, {"max_epochs": EPOCHS})
        at = At(timed, **where(moment, case, timed))
        whole, stopped = case.fit(tmp_path / f"whole-{number}", **limits), tmp_path / f"stopped-{number}"
        with nullcontext() if timed else pytest.raises(Stopped):
            case.fit(stopped, at, **limits)
        assert at.done
        values = [max(steps) for name, steps in read_log(stopped).items() if name.startswith("val/")]
        resumed = case.fit(stopped, **limits)
        assert not differences(whole, resumed, may_add=max(values) if timed else None), cell


def test_a_run_that_reached_its_limit_goes_on_to_a_higher_one(tmp_path: Path):
    for number, (task, accumulate, kind) in enumerate(
        [("pixels", 3, "mid-epoch"), ("sorting", 1, "epoch-end"), ("sorting", 1, "max_epochs"), ("pixels", 3, "both")]
    ):
        case = Case(task, accumulate)
        end, half = EPOCHS * case.steps, case.steps // 2
        first, then = {
            "mid-epoch": ({"max_steps": case.steps + half}, {"max_steps": end}),
            "epoch-end": ({"max_steps": case.steps}, {"max_steps": end}),
            "max_epochs": ({"max_epochs": 1}, {"max_epochs": EPOCHS}),
            "both": ({"max_steps": half, "max_epochs": EPOCHS}, {"max_steps": end, "max_epochs": EPOCHS}),
        }[kind]
        whole = case.fit(tmp_path / f"whole-{number}", **then)
        case.fit(tmp_path / f"parts-{number}", **first)
        assert not differences(whole, case.fit(tmp_path / f"parts-{number}", **then)), kind


def test_an_uninterrupted_run_repeats_itself(tmp_path: Path):
    """The tests above rest on this; and the comparison sees what differs."""
    for task in BATCHES:
        a, b = (Case(task).fit(tmp_path / task / name, max_epochs=2) for name in "ab")
        assert not differences(a, b)
        other = Case(task).fit(tmp_path / task / "other", max_epochs=1)
        assert len(differences(a, other)) == 2
