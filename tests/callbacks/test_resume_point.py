"""`test_exact_resume` compares whole runs; here is what these can't show."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lit_effattn.callbacks import LastCheckpoint, RandomStates, StopOnSignal, Stopped
from lit_effattn.checkpoints.io import read_checkpoint
from tests.callbacks.tiny import Tiny, loader, trainer


class Drawing(Tiny):
    """A model whose validation draws random numbers, as a sampling attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[float] = []

    def on_validation_start(self) -> None:
        self.validated = []

    def validation_step(self, batch: torch.Tensor) -> None:
        self.validated.append(torch.rand(()).item())


class Signal(pl.Callback):
    """Sends SIGTERM at a batch of training or of validation of epoch 1."""

    def __init__(self, batch: int, validation: bool = False) -> None:
        self.batch, self.validation = batch, validation

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if not self.validation and (trainer.current_epoch, batch_idx) == (1, self.batch):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
        if self.validation and (trainer.current_epoch, batch_idx) == (1, self.batch):
            os.kill(os.getpid(), signal.SIGTERM)


class Take(pl.Callback):
    """Takes down what each validation drew."""

    def __init__(self) -> None:
        self.validations: list[list[float]] = []

    def on_validation_end(self, trainer, pl_module) -> None:
        self.validations.append(pl_module.validated)


def last(folder: Path) -> Path:
    return folder / "checkpoints" / "last.ckpt"


def fit(folder: Path, model: Tiny, *callbacks: pl.Callback, validation: Any = None, **options: Any) -> pl.Trainer:
    run = trainer(folder, [StopOnSignal(), RandomStates(), *callbacks, LastCheckpoint()], max_epochs=3)
    torch.manual_seed(5)
    run.fit(model, loader(4), validation, **options)
    return run


def test_validations_do_not_change_the_random_states_of_training(tmp_path: Path):
    with_it, without = Drawing(), Drawing()
    fit(tmp_path / "a", with_it, validation=loader(2))
    fit(tmp_path / "b", without)
    assert len(with_it.validated) == 2
    assert with_it.drawn == without.drawn


def test_an_interrupted_validation_is_repeated_with_its_random_states(tmp_path: Path):
    whole, stopped, resumed = Drawing(), Drawing(), Drawing()
    expected, found = Take(), Take()
    fit(tmp_path / "whole", whole, expected, validation=loader(3))
    with pytest.raises(Stopped):
        fit(tmp_path, stopped, Signal(1, validation=True), validation=loader(3))
    assert len(stopped.validated) == 2
    fit(tmp_path, resumed, found, validation=loader(3), ckpt_path=last(tmp_path))
    assert found.validations == expected.validations[1:]
    assert resumed.drawn == whole.drawn[8:]


class Stateful(DataLoader[torch.Tensor]):
    """A loader that has a state, which is of use within its epoch only."""

    def state_dict(self) -> dict[str, int]:
        return {"position": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_the_state_of_a_loader_that_has_ended_is_not_saved(tmp_path: Path):
    data = Stateful(torch.ones(4), generator=torch.Generator())
    run = trainer(tmp_path, [LastCheckpoint(3)], max_epochs=2)
    run.fit(Tiny(), data)
    for name, there in (("previous", True), ("last", False)):  # of steps 6 and 8
        saved = read_checkpoint(last(tmp_path).with_stem(name))
        assert ("combined_loader" in saved["loops"]["fit_loop"]["state_dict"]) == there


def test_a_validation_that_ends_a_stopped_run_is_not_due_for_the_resumed_one(tmp_path: Path):
    class StopAt(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            trainer.should_stop = trainer.should_stop or batch_idx == 1

        def on_validation_start(self, trainer, pl_module) -> None:
            shutil.copy(last(tmp_path), tmp_path / "killed.ckpt")  # as if the run were killed now

    run = trainer(tmp_path, [StopAt(), LastCheckpoint(1)], max_epochs=1)
    run.fit(Tiny(), loader(4), loader(1))
    resumed = trainer(tmp_path, [LastCheckpoint()], max_epochs=1)
    resumed.fit(Tiny(), loader(4), loader(1), ckpt_path=tmp_path / "killed.ckpt")
    assert resumed.global_step == resumed.fit_loop.epoch_loop._batches_that_stepped == 4


def test_later_checkpoints_do_not_tell_of_a_repeated_validation(tmp_path: Path):
    options = {"max_epochs": 2, "val_check_interval": 2}
    run = trainer(tmp_path, [StopOnSignal(), Signal(0, validation=True), LastCheckpoint()], **options)
    with pytest.raises(Stopped):
        run.fit(Tiny(), loader(4), loader(2))
    run = trainer(tmp_path, [LastCheckpoint()], max_steps=7, **options)  # in the same epoch
    run.fit(Tiny(), loader(4), loader(2), ckpt_path=last(tmp_path))
    whole = trainer(tmp_path / "whole", [LastCheckpoint()], max_steps=7, **options)
    whole.fit(Tiny(), loader(4), loader(2))
    loops = [read_checkpoint(last(folder))["loops"]["fit_loop"] for folder in (tmp_path, tmp_path / "whole")]
    assert loops[0]["epoch_loop.val_loop.batch_progress"] == loops[1]["epoch_loop.val_loop.batch_progress"]


def test_a_validation_that_stops_the_run_within_an_accumulation(tmp_path: Path):
    class Enough(pl.Callback):
        def on_validation_end(self, trainer, pl_module) -> None:
            trainer.should_stop = True

    model = Tiny()
    options = {"accumulate_grad_batches": 3, "val_check_interval": 2}
    run = trainer(tmp_path, [Enough(), LastCheckpoint()], max_epochs=1, **options)
    run.fit(model, loader(8), loader(1))
    assert (run.global_step, len(model.drawn)) == (1, 3)


def test_a_used_trainer_goes_on_too(tmp_path: Path):
    with pytest.raises(Stopped):
        fit(tmp_path, Tiny(), Signal(0, validation=True), validation=loader(2))
    run = trainer(tmp_path / "used", [LastCheckpoint()], max_epochs=3)
    run.fit(Tiny(), loader(4), loader(2))
    resumed = Tiny()
    run.fit(resumed, loader(4), loader(2), ckpt_path=last(tmp_path))
    assert (run.global_step, len(resumed.drawn)) == (12, 4)


@pytest.mark.parametrize("stop", [2, 4], ids=["mid-epoch", "epoch-end"])
def test_a_checkpoint_saved_after_training_goes_on_in_its_epoch(tmp_path: Path, stop: int):
    whole, part, rest = Tiny(), Tiny(), Tiny()
    fit(tmp_path / "whole", whole)
    run = trainer(tmp_path, [LastCheckpoint()], max_steps=stop)
    torch.manual_seed(5)
    run.fit(part, loader(4))
    run.save_checkpoint(tmp_path / "after.ckpt")
    resumed = trainer(tmp_path, [LastCheckpoint()], max_epochs=3)
    resumed.fit(rest, loader(4), ckpt_path=tmp_path / "after.ckpt")
    assert (resumed.global_step, resumed.current_epoch) == (12, 3)
    assert resumed.fit_loop.epoch_loop._batches_that_stepped == resumed.global_step


def test_a_validation_by_the_clock_is_left_to_it(tmp_path: Path):
    run = trainer(
        tmp_path, [StopOnSignal(), Signal(1), LastCheckpoint()], max_epochs=2, val_check_interval="00:00:00:00"
    )
    with pytest.raises(Stopped):
        run.fit(Tiny(), loader(4), loader(1))
    resumed = trainer(tmp_path, [LastCheckpoint()], max_epochs=2, val_check_interval="01:00:00:00")
    resumed.fit(Tiny(), loader(4), loader(1), ckpt_path=last(tmp_path))
    assert resumed.fit_loop.epoch_loop._batches_that_stepped == resumed.global_step


def test_values_of_a_run_s_last_epoch_are_logged_by_the_resumed_run(tmp_path: Path):
    """Which has nothing left to train: the process was killed when its last checkpoint was saved."""

    class Counting(Tiny):
        def on_train_epoch_end(self) -> None:
            self.log("train/count", 7.0)

    def run(**options: Any) -> None:
        logger = CSVLogger(tmp_path, name="csv", version="")
        made = trainer(tmp_path, [LastCheckpoint()], max_epochs=1, logger=logger, log_every_n_steps=1)
        made.fit(Counting(), loader(2), **options)

    run()
    shutil.rmtree(tmp_path / "csv")
    run(ckpt_path=last(tmp_path))
    assert (tmp_path / "csv" / "metrics.csv").read_text().splitlines() == ["step,train/count", "1,7.0"]


def test_logged_values_that_are_no_numbers_are_refused(tmp_path: Path):
    fit(tmp_path, Tiny())
    saved = torch.load(last(tmp_path), weights_only=True)
    for wrong in ([1], {"metrics": {"a": "b"}}, {"of_step": [1], "step": 1}, {"step": "1"}):
        torch.save({**saved, "logged": wrong}, tmp_path / "x.ckpt")
        with pytest.raises(ValueError, match="'logged' are not numbers by name"):
            trainer(tmp_path, [LastCheckpoint()], max_epochs=4).fit(Tiny(), loader(4), ckpt_path=tmp_path / "x.ckpt")
