import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.utils.data import DataLoader

from lit_effattn.callbacks import LastCheckpoint, StopOnSignal, Stopped
from lit_effattn.checkpoints.io import AtomicCheckpointIO, read_checkpoint
from lit_effattn.distributed.sharding import ShardedStrategy
from tests.callbacks.tiny import Tiny, loader, trainer
from tests.faults.comparison import compare_checkpoints

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


def test_steps_are_counted_and_not_batches(tmp_path: Path):
    """Nothing is saved between the batches of one step, since a checkpoint has no gradients."""
    watch = Watch()
    run = trainer(tmp_path, [watch, LastCheckpoint(2)], max_epochs=1, accumulate_grad_batches=3)
    run.fit(Tiny(), loader(12))
    assert [step for step, _ in watch.saved_at] == [2, 4]  # the last one at the epoch's end
    assert watch.steps[:7] == [None] * 6 + [2]


def test_a_resumed_run_does_not_save_within_its_first_step(tmp_path: Path):
    trainer(tmp_path, [LastCheckpoint(2)], max_steps=2, accumulate_grad_batches=3).fit(Tiny(), loader(12))
    path = tmp_path / "checkpoints" / "last.ckpt"
    watch = Watch()
    run = trainer(tmp_path, [watch, LastCheckpoint(2)], max_steps=4, accumulate_grad_batches=3)
    run.fit(Tiny(), loader(12), ckpt_path=path, weights_only=True)
    assert run.global_step == 4
    assert {step for step, _ in watch.saved_at} == {4}


def test_metrics_of_a_checkpoint_do_not_reach_a_later_run(tmp_path: Path):
    class Record(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            seen.append(dict(trainer.callback_metrics))

    seen: list[dict[str, Any]] = []
    callbacks = [LastCheckpoint(), Record()]
    trainer(tmp_path, callbacks, max_epochs=1).fit(Tiny(), loader(1), loader())
    path = tmp_path / "checkpoints" / "last.ckpt"
    trainer(tmp_path, callbacks, max_epochs=1).fit(Tiny(), loader(1), loader(), ckpt_path=path)  # no step is left
    trainer(tmp_path, callbacks, max_epochs=1).fit(Tiny(), loader(1), loader())
    assert seen == [{}, {}]


def test_nothing_is_saved_in_a_trial(tmp_path: Path):
    trainer(tmp_path, [LastCheckpoint(1)], fast_dev_run=2).fit(Tiny(), loader(3), loader(1))
    assert not list(tmp_path.rglob("*.ckpt"))


# ------------------------------------------------------------------------------------------------ LastCheckpoint(keep)


def kept(folder: Path) -> dict[int, float]:
    """Return what is kept: the steps in the files' names, and the weights."""
    paths = sorted((folder / "checkpoints").glob("step_*"))
    contents = [read_checkpoint(path) for path in paths]
    assert [int(path.name[5:13]) for path in paths] == [content["global_step"] for content in contents]
    return {content["global_step"]: content["state_dict"]["weight"].item() for content in contents}


class Weights(pl.Callback):
    """Takes down the weight after each step."""

    def __init__(self) -> None:
        self.after: dict[int, float] = {}

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.after[trainer.global_step] = pl_module.weight.item()


def test_the_last_ones_are_kept(tmp_path: Path):
    for number, (options, limits, steps) in enumerate(
        [
            ({"keep": 2}, {}, [8, 12]),
            ({"keep": 2}, {"max_steps": 11}, [4, 8]),  # the third epoch is not whole
            ({"keep": 3, "keep_every_n_train_steps": 3}, {}, [6, 9, 12]),
            ({"keep": 9, "keep_every_n_train_steps": 2}, {"max_steps": 7}, [2, 4, 6]),
            ({"keep": 9, "keep_every_n_train_steps": 4}, {}, [4, 8, 12]),  # an epoch's last step
            ({"keep": 9, "keep_every_n_train_steps": 1}, {"accumulate_grad_batches": 2}, [1, 2, 3, 4, 5, 6]),
            ({"keep": 2, "asynchronous": True}, {}, [8, 12]),
        ]
    ):
        for validation in (None, loader(1)):
            folder, weights = tmp_path / f"{number}-{validation is None}", Weights()
            run = trainer(folder, [weights, LastCheckpoint(**options)], max_epochs=3, **limits)
            run.fit(Tiny(), loader(4), validation)
            assert kept(folder) == {step: weights.after[step] for step in steps}
            assert read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"] == run.global_step


class KilledError(Exception):
    """Instead of SIGKILL."""


class KilledIO(AtomicCheckpointIO):
    """Writes so many checkpoints, and no more."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.writes = writes

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if self.writes == 0:
            raise KilledError
        self.writes -= 1
        super().save_checkpoint(checkpoint, path, storage_options)


class SignalAt(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"keep": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"keep": 2, "keep_every_n_train_steps": 2}, marks=pytest.mark.exhaustive),
        {"keep": 3, "keep_every_n_train_steps": 3, "every_n_train_steps": 2},
    ],
    ids=str,
)
def test_a_run_that_is_killed_or_stopped_ends_with_the_same_ones(options: dict[str, int], tmp_path: Path):
    """Killed before each write of a file in turn, or stopped at each step, then resumed, with a validation."""

    def fit(folder: Path, *callbacks: pl.Callback, writes: int = -1) -> None:
        run = trainer(folder, [StopOnSignal(), *callbacks, LastCheckpoint(**options)], max_epochs=3)
        run.strategy.checkpoint_io = KilledIO(writes)
        last = folder / "checkpoints" / "last.ckpt"
        equal = DataLoader(torch.ones(3), batch_size=1)  # so that a resumed epoch has no batch twice
        run.fit(Tiny(), equal, loader(1), ckpt_path=last if last.exists() else None, weights_only=True)

    whole, writes = tmp_path / "whole", 0
    fit(whole)
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert names[0] == "last.ckpt"
    assert len(names) == 2 + options["keep"]
    stops = []
    while True:
        folder = tmp_path / f"killed_{writes}"
        try:
            fit(folder, writes=writes)
        except KilledError:
            stops.append(folder)
            writes += 1
        else:
            break
    assert writes >= 6
    for step in range(9):
        with pytest.raises(Stopped):
            fit(tmp_path / f"stopped_{step}", SignalAt(step))
        stops.append(tmp_path / f"stopped_{step}")
    for folder in stops:
        fit(folder)
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == names, folder.name
        for name in names:
            if name != "previous.ckpt":
                files = (run / "checkpoints" / name for run in (whole, folder))
                assert compare_checkpoints(*files) is None, (folder.name, name)


class Written(AtomicCheckpointIO):
    """Takes down the names of the files that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        self.names.append(Path(path).name)
        super().save_checkpoint(checkpoint, path, storage_options)


def test_each_is_written_once(tmp_path: Path):
    """Though the epoch ends at its step, and a validation before that is interrupted."""

    class Signal(pl.Callback):
        def on_validation_batch_start(self, *_):
            signal.raise_signal(signal.SIGTERM)

    names = []
    for callbacks in ([Signal()], []):
        keep = LastCheckpoint(keep=2, keep_every_n_train_steps=3)
        run = trainer(tmp_path, [StopOnSignal(), *callbacks, keep], max_epochs=1)
        run.strategy.checkpoint_io = written = Written()
        last = tmp_path / "checkpoints" / "last.ckpt"
        try:
            run.fit(Tiny(), loader(3), loader(2), ckpt_path=last if last.exists() else None, weights_only=True)
        except Stopped:
            names.append(written.names)
    assert names == [["step_00000003.ckpt", "last.ckpt", "last.ckpt"]]  # after the step, in the validation
    assert written.names == ["last.ckpt"]


def test_those_of_steps_that_are_trained_again_are_replaced(tmp_path: Path):
    trainer(tmp_path, [LastCheckpoint(keep=5, keep_every_n_train_steps=2)], max_steps=8).fit(Tiny(), loader(20))
    assert [*kept(tmp_path)] == [2, 4, 6, 8]
    (tmp_path / "checkpoints" / "step_00000004.ckpt").rename(tmp_path / "checkpoints" / "last.ckpt")
    run = trainer(tmp_path, [LastCheckpoint(keep=5, keep_every_n_train_steps=2)], max_steps=6)
    model = Tiny()
    run.fit(model, loader(20), ckpt_path=tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert [*kept(tmp_path)] == [2, 6]
    assert kept(tmp_path)[6] == model.weight.item()


def test_wrong_options_are_named():
    for words, options in {
        "every_n_train_steps=0 must be at least 1": {"every_n_train_steps": 0},
        "keep=-1 must be at least 0": {"keep": -1},
        "keep_every_n_train_steps=0 must be at least 1": {"keep": 2, "keep_every_n_train_steps": 0},
        "save_top_k=0 must be at least 1": {"save_top_k": 0},
        "keep_every_n_train_steps=7 needs keep, such as keep=5": {"keep_every_n_train_steps": 7},
    }.items():
        with pytest.raises(ValueError, match=words):
            LastCheckpoint(**options)


# ---------------------------------------------------------------------------------------- LastCheckpoint(asynchronous)


class Slow(AtomicCheckpointIO):
    """Takes its time."""

    def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
        time.sleep(0.2)
        super()._write(checkpoint, path)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path):
    """It ends when the last is whole."""
    watch = Watch()
    run = trainer(tmp_path, [watch, LastCheckpoint(every_n_train_steps=2, asynchronous=True)], max_steps=4)
    run.strategy.checkpoint_io = Slow()
    run.fit(Tiny(), loader(4))
    assert watch.steps == [None] * 4
    assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 4


def test_a_kept_checkpoint_is_deleted_when_the_next_is_whole(tmp_path: Path):
    class Looks(Slow):
        there: ClassVar[dict[int, set[int]]] = {}

        def _write(self, checkpoint: dict[str, Any], path: Path) -> None:
            if path.name.startswith("step"):
                time.sleep(0.1)
                self.there[checkpoint["global_step"]] = kept(tmp_path).keys()
            super()._write(checkpoint, path)

    run = trainer(tmp_path, [LastCheckpoint(keep=1, asynchronous=True)], max_epochs=3)
    run.strategy.checkpoint_io = Looks()
    run.fit(Tiny(), loader(4))
    assert Looks.there == {4: set(), 8: {4}, 12: {8}}
    assert kept(tmp_path).keys() == {12}


def test_a_stop_waits_for_the_checkpoint_before_a_job_is_requeued(tmp_path: Path):
    class Signal(pl.Callback):
        def on_train_batch_start(self, *_):
            signal.raise_signal(signal.SIGTERM)

        def on_exception(self, *_):  # after that of StopOnSignal
            self.step = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"]

    stop = Signal()
    run = trainer(tmp_path, [StopOnSignal(), stop, LastCheckpoint(asynchronous=True)], max_steps=4)
    run.strategy.checkpoint_io = Slow()
    with pytest.raises(Stopped):
        run.fit(Tiny(), loader(4))
    assert stop.step == 1


def test_runs_that_cannot_save_so_are_refused(tmp_path: Path):
    divided: Any = SimpleNamespace(strategy=ShardedStrategy(save_distributed_checkpoint=True))
    with pytest.raises(ValueError, match=r"asynchronous=True with save_distributed_checkpoint is not supported"):
        LastCheckpoint(asynchronous=True).setup(divided, Tiny(), "fit")
    run = trainer(tmp_path, [LastCheckpoint(asynchronous=True)], max_steps=4)
    run.strategy.checkpoint_io = TorchCheckpointIO()
    with pytest.raises(ValueError, match=r"asynchronous=True needs Trainer\(plugins=\[.*AtomicCheckpointIO"):
        run.fit(Tiny(), loader(4))


def test_files_of_other_names_stay(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    names = ["step_.ckpt", "step_00000001.ckpt.bak", ".step_00000001.ckpt.0.part", "my_step_00000001.ckpt"]
    for name in names:
        (folder / name).touch()
    trainer(tmp_path, [LastCheckpoint(keep=1)], max_epochs=2).fit(Tiny(), loader(2))
    assert {path.name for path in folder.iterdir()} - set(names) == {"last.ckpt", "previous.ckpt", "step_00000004.ckpt"}
    assert all((folder / name).exists() for name in names)


def test_the_best_are_kept_without_the_command_too(tmp_path: Path):
    class Scored(Tiny):
        monitor = "val/loss"

        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("val/loss", (3.0, 1.0, 2.0, 4.0)[self.current_epoch])

    keep = LastCheckpoint(save_top_k=2)
    run = trainer(tmp_path, [keep], max_epochs=3)
    run.fit(Scored(), loader(2), loader(1))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == sorted(
        ["last.ckpt", "previous.ckpt", "best.ckpt", "top_00000004.ckpt", "top_00000006.ckpt"]
    )
    assert read_checkpoint(tmp_path / "checkpoints" / "best.ckpt")["global_step"] == 4
    run.validate(Scored(), loader(1), ckpt_path="best", verbose=False)
    assert run.ckpt_path == str(tmp_path / "checkpoints" / "best.ckpt")
    last = tmp_path / "checkpoints" / "last.ckpt"
    trainer(tmp_path, [keep], max_epochs=4).fit(Scored(), loader(2), loader(1), ckpt_path=last)
    assert read_checkpoint(tmp_path / "checkpoints" / "best.ckpt")["global_step"] == 4
    with pytest.warns(UserWarning, match=r"last\.ckpt of an earlier run will be replaced; .* ckpt_path='.*last\.ckpt'"):
        trainer(tmp_path, [LastCheckpoint()], max_epochs=1).fit(Scored(), loader(2))
    with pytest.raises(ValueError, match="save_top_k=2 needs a validation"):
        trainer(tmp_path, [LastCheckpoint(save_top_k=2)], limit_val_batches=0).fit(Scored(), loader(2))
