from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lit_effattn.callbacks import LastCheckpoint
from lit_effattn.checkpoints import read_checkpoint
from tests.callbacks.tiny import Tiny, loader, trainer

# --------------------------------------------------------------------------------------------------- LastCheckpoint


class Watch(pl.Callback):
    """Takes down what `last.ckpt` holds when a batch begins, and whether validation was over when it was saved."""

    def __init__(self) -> None:
        self.steps: list[int | None] = []
        self.saved_at: list[tuple[int, int]] = []
        self.validations = 0

    def on_validation_end(self, trainer, pl_module):
        self.validations += 1

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.saved_at.append((trainer.global_step, self.validations))

    def on_train_batch_start(self, trainer, *_):
        path = Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"
        self.steps.append(torch.load(path, weights_only=True)["global_step"] if path.exists() else None)


def test_every_so_many_steps_and_at_the_end_of_an_epoch(tmp_path: Path):
    watch = Watch()
    trainer(tmp_path, [watch, LastCheckpoint(every_n_train_steps=2)], max_epochs=2).fit(Tiny(), loader(5))
    assert watch.steps == [None, None, 2, 2, 4, 5, 6, 6, 8, 8]  # before steps 1 … 10
    assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 10
    assert read_checkpoint(tmp_path / "checkpoints" / "previous.ckpt")["global_step"] == 8
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["last.ckpt", "previous.ckpt"]


def test_at_the_end_of_an_epoch_only_and_after_its_validation(tmp_path: Path):
    watch = Watch()
    trainer(tmp_path, [watch, LastCheckpoint()], max_epochs=3).fit(Tiny(), loader(3), loader(1))
    assert watch.saved_at == [(3, 1), (6, 2), (9, 3)]


@pytest.mark.parametrize("every", [1, 2])
def test_steps_are_counted_and_not_batches(every: int, tmp_path: Path):
    """Between the batches of one step there is nothing to go on from: their gradients are not in the checkpoint."""
    watch = Watch()
    run = trainer(tmp_path, [watch, LastCheckpoint(every)], max_epochs=1, accumulate_grad_batches=3)
    run.fit(Tiny(), loader(12))
    assert [step for step, _ in watch.saved_at] == [*range(every, 5, every)]  # the last one at the epoch's end
    first_batch_after = [None] * 3 * every + [every]
    assert watch.steps[: len(first_batch_after)] == first_batch_after


def test_a_resumed_run_does_not_save_within_its_first_step(tmp_path: Path):
    trainer(tmp_path, [LastCheckpoint(2)], max_steps=2, accumulate_grad_batches=3).fit(Tiny(), loader(12))
    path = tmp_path / "checkpoints" / "last.ckpt"
    watch = Watch()
    run = trainer(tmp_path, [watch, LastCheckpoint(2)], max_steps=4, accumulate_grad_batches=3)
    run.fit(Tiny(), loader(12), ckpt_path=path, weights_only=True)
    assert run.global_step == 4
    assert {step for step, _ in watch.saved_at} == {4}


def test_a_crash_leaves_the_one_before(tmp_path: Path):
    class Crash(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 5:
                raise RuntimeError("crashed")

    with pytest.raises(RuntimeError, match="crashed"):
        trainer(tmp_path, [Crash(), LastCheckpoint()], max_epochs=2).fit(Tiny(), loader(3))
    assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 3


def test_nothing_is_saved_in_a_trial(tmp_path: Path):
    trainer(tmp_path, [LastCheckpoint(1)], fast_dev_run=2).fit(Tiny(), loader(3), loader(1))
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("every", [0, -4])
def test_a_number_of_steps_that_never_comes(every: int):
    with pytest.raises(ValueError, match=f"every_n_train_steps={every} is not positive"):
        LastCheckpoint(every)
