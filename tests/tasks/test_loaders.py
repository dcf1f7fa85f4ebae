"""Loaders of a user's own."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lit_effattn import PixelModel, Transformer
from lit_effattn.callbacks import GlobalLossNormalization, LastCheckpoint, StopOnSignal, Stopped
from lit_effattn.cli.failures import explained
from lit_effattn.datamodules import ShardedBatches
from lit_effattn.tasks import loaders
from tests.callbacks.tiny import trainer

IMAGES = [torch.full((6,), i % 4) for i in range(26)]


class Stream(IterableDataset):
    """13 batches without a length."""

    def __iter__(self):
        return iter(IMAGES)


def model() -> PixelModel:
    return PixelModel(Transformer(8, 2, 1), (2, 3, 1), 4)


def loader(data: Any = IMAGES) -> DataLoader:
    return DataLoader(data, batch_size=2)


@pytest.mark.parametrize("several", [{"a": loader(), "b": loader()}, [loader(), loader()]], ids=["dict", "list"])
def test_several_loaders_to_train_on_are_refused(several: Any, tmp_path: Path):
    with pytest.raises(ValueError, match=r"train_dataloader returned a (dict|list) of 2 loaders.*ConcatDataset"):
        trainer(tmp_path, [], max_epochs=1).fit(model(), several)


@pytest.mark.parametrize("stage", ["val", "test", "predict"])
def test_several_loaders_to_score_are_refused(stage: str, tmp_path: Path):
    run = trainer(tmp_path, [])
    score = {"val": run.validate, "test": run.test, "predict": run.predict}[stage]
    with pytest.raises(RuntimeError) as refused:
        score(model(), [loader(), loader()])
    said = explained(refused.value, stage)
    assert f"You provided multiple `{stage}_dataloader`" in str(said)


@pytest.mark.parametrize(("normalise", "n_batches"), [(False, 13), (True, 13), (False, 12)])
def test_the_smaller_last_step_of_an_epoch_is_announced(normalise: bool, n_batches: int, tmp_path: Path, recwarn):
    callbacks = [GlobalLossNormalization()] if normalise else []
    options = {"max_epochs": 1, "accumulate_grad_batches": 4, "limit_train_batches": n_batches}
    trainer(tmp_path, callbacks, **options).fit(model(), loader())
    announced = [str(w.message) for w in recwarn if "GlobalLossNormalization" in str(w.message)]
    assert len(announced) == (not normalise and n_batches == 13)
    assert all("has 1 of its 13 batches" in text and "accumulate_grad_batches=4" in text for text in announced)


def test_data_that_come_again_are_announced(tmp_path: Path):
    class StopAt(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 4:
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Stopped):
        trainer(tmp_path, [StopOnSignal(), StopAt(), LastCheckpoint()], max_epochs=1).fit(model(), loader(Stream()))
    last = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.warns(UserWarning, match="the interrupted epoch's 5 batches come again: the DataLoader .*state_dict"):
        trainer(tmp_path, [LastCheckpoint()], max_epochs=1).fit(model(), loader(Stream()), ckpt_path=last)


def test_processes_with_different_numbers_of_batches_are_named(monkeypatch: pytest.MonkeyPatch):
    """Before training if loaders have lengths, else at the last batch of the shorter one."""
    epoch_loop = SimpleNamespace(batch_idx=8, batch_progress=SimpleNamespace(is_last_batch=True))
    sampler = SimpleNamespace(num_replicas=2, rank=1)
    run: Any = SimpleNamespace(world_size=2, num_training_batches=13, num_val_batches=[3, 2])
    run.train_dataloader = SimpleNamespace(sampler=sampler)
    run.distributed_sampler_kwargs = {"num_replicas": 2, "rank": 1}
    run.fit_loop = SimpleNamespace(epoch_loop=epoch_loop)
    of_both: list[list[float]] = []
    run.strategy = SimpleNamespace(
        root_device="cpu", all_gather=lambda own: torch.tensor([own.tolist(), of_both.pop(0)])
    )
    of_both += [[13.0], [3.0, 2.0], [12.0], [13.0], [3.0, 3.0]]
    loaders.check_even(run)
    with pytest.raises(ValueError, match="numbers of training batches: process 0 has 13, process 1 has 12"):
        loaders.check_even(run)
    with pytest.raises(ValueError, match=r"numbers of validation batches: process 0 has 3 \+ 2, process 1 has 3 \+ 3"):
        loaders.check_even(run)
    sampler.rank = 0
    with pytest.raises(ValueError, match="train_dataloader has rank=0, but the trainer needs 1"):
        loaders.check_even(run)
    loaders.check_end(run)  # its loaders have lengths
    run.num_training_batches = float("inf")
    of_both += [[1.0], [0.0]]
    loaders.check_end(run)
    with pytest.raises(ValueError, match="of process 0 ended after 9 batches"):
        loaders.check_end(run)
    run.world_size = 1
    loaders.check_even(run)
    loaders.check_end(run)
    assert not of_both


def test_items_that_a_validation_scores_twice_are_announced(recwarn):
    """Lightning warns of them in `validate` and `test` alone."""
    of_two: Any = {"num_replicas": 2, "rank": 0}
    own = ShardedBatches(5, 1, shuffle=False, seed=0, drop_last=False, **of_two)
    for sampler in (DistributedSampler(range(6), **of_two), own, SequentialSampler(range(5))):  # type: ignore[arg-type]
        loaders.warn_of_repeated_items(SimpleNamespace(val_dataloaders=SimpleNamespace(sampler=sampler)))  # type: ignore[arg-type]
    loaders.warn_of_repeated_items(SimpleNamespace(val_dataloaders=None))  # type: ignore[arg-type]
    assert not recwarn
    sampler = DistributedSampler(range(5), **of_two)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="validation scores 6 items in place of 5"):
        loaders.warn_of_repeated_items(SimpleNamespace(val_dataloaders=SimpleNamespace(sampler=sampler)))  # type: ignore[arg-type]
