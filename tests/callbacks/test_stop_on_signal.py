import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lit_effattn import stopping
from lit_effattn.callbacks import LastCheckpoint, StopOnSignal, Stopped
from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.stopping import SIGNALS
from tests.callbacks.tiny import Tiny, loader, trainer


def marked(number: int, frame: object) -> None:
    """A handler that was there before."""
    raise AssertionError("the handler from before was called")


@pytest.fixture(autouse=True)
def _handlers():
    before = [signal.signal(number, marked) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


class Send(pl.Callback):
    """Sends this process signals in a hook of the batch that follows `step` steps."""

    def __init__(self, step: int, *numbers: int, hook: str = "on_before_optimizer_step") -> None:
        def send(trainer: pl.Trainer, *_: object, **__: object) -> None:
            if trainer.global_step == step:
                for number in numbers:
                    signal.raise_signal(number)

        setattr(self, hook, send)


def stopped(folder: Path, *callbacks: pl.Callback, validation: tuple = (), **options) -> tuple[SystemExit, pl.Trainer]:
    """Train for two epochs of 4 steps, or until stopped."""
    run = trainer(folder, [StopOnSignal(), *callbacks, LastCheckpoint()], max_epochs=2, **options)
    with pytest.raises(SystemExit) as caught:
        run.fit(Tiny(), loader(4), *validation)
    return caught.value, run


def last(folder: Path) -> dict:
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 138)])
def test_the_run_ends_after_the_step_with_everything_saved(number: int, code: int, tmp_path: Path):
    """Another signal in the same step, or while it is saved, changes nothing."""
    while_saving = Send(6, signal.SIGHUP, hook="on_save_checkpoint")
    exit_, run = stopped(tmp_path, Send(5, number, signal.SIGTERM), while_saving)
    assert isinstance(exit_, Stopped)
    assert exit_.code == code
    assert len(run.lightning_module.drawn) == run.global_step == 6  # the step at work was finished, and none begun
    saved = last(tmp_path)
    assert saved["global_step"] == 6
    assert saved["state_dict"]["weight"].item() == run.lightning_module.weight.item()
    assert {signal.getsignal(n) for n in SIGNALS} == {marked}


def test_a_stop_within_an_accumulation_is_put_off(tmp_path: Path):
    class OutOfTime(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            trainer.should_stop = trainer.should_stop or batch_idx == 0

    model = Tiny()
    run = trainer(tmp_path, [OutOfTime(), LastCheckpoint()], max_epochs=1, accumulate_grad_batches=3)
    run.fit(model, loader(7))
    assert (run.global_step, len(model.drawn), last(tmp_path)["global_step"]) == (1, 3, 1)


def test_a_slurm_job_is_requeued_when_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def requeue(number: str) -> None:
        asked.append((number, last(tmp_path)["global_step"]))

    monkeypatch.setattr("lit_effattn.checkpoints.slurm.requeue", requeue)
    environment = {"JOB_ID": "77", "NTASKS": "1", "NTASKS_PER_NODE": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert stopped(tmp_path, Send(5, signal.SIGUSR1))[0].code == 138
    assert asked == [("77", 6)]
    stopped(tmp_path, Send(5, signal.SIGTERM))
    assert len(asked) == 1


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stopping, "SAME", -1.0)
    exit_, run = stopped(tmp_path, Send(5, signal.SIGINT, signal.SIGINT))
    assert exit_.code != 0
    assert run.global_step == 5  # the step was not finished
    assert last(tmp_path)["global_step"] == 4  # and nothing of it saved: that of the epoch before is there


def test_a_validation_is_not_waited_for(tmp_path: Path):
    """Which may be long: of its 50 batches the first is the last. Training goes on after it as if it had been whole."""
    seen = []

    class Count(pl.Callback):
        def on_validation_batch_end(self, *_, **__):
            seen.append(1)

    send = Send(4, signal.SIGTERM, hook="on_validation_batch_start")
    exit_, run = stopped(tmp_path, send, Count(), validation=(loader(50),))
    assert exit_.code == 143
    assert len(seen) <= 1
    assert run.global_step == last(tmp_path)["global_step"] == 4

    resumed, whole = Tiny(), Tiny()
    path = tmp_path / "checkpoints" / "last.ckpt"
    trainer(tmp_path, [LastCheckpoint()], max_epochs=3).fit(resumed, loader(4), loader(50), ckpt_path=path)
    trainer(tmp_path / "whole", [LastCheckpoint()], max_epochs=3).fit(whole, loader(4), loader(50))
    assert torch.equal(resumed.weight, whole.weight)


def test_a_signal_after_the_last_step_is_not_lost(tmp_path: Path):
    exit_, _ = stopped(tmp_path, Send(8, signal.SIGTERM, hook="on_train_epoch_end"))
    assert exit_.code == 143
    assert last(tmp_path)["global_step"] == 8


def test_other_processes_are_stopped_with_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Outside the training, where they would wait for it."""
    run, killed = trainer(tmp_path, [StopOnSignal()]), []
    launcher = type("Launcher", (), {"kill": lambda self, number: killed.append(number)})()
    monkeypatch.setattr(run.strategy, "_launcher", launcher)
    run.callbacks[0].on_exception(run, Tiny(), Stopped(signal.SIGUSR1))
    assert killed == [signal.SIGTERM]


@pytest.mark.parametrize("crashes", [True, False])
def test_handlers_are_restored_when_training_ends_or_crashes(tmp_path: Path, crashes: bool):
    during: list[Callable] = []

    class Look(pl.Callback):
        def on_train_batch_start(self, *_):
            during.extend(signal.getsignal(n) for n in SIGNALS)
            if crashes:
                raise RuntimeError("crashed")

    with pytest.raises(RuntimeError, match="crashed") if crashes else nullcontext():
        trainer(tmp_path, [StopOnSignal(), Look()], max_epochs=1).fit(Tiny(), loader(2))
    assert marked not in during
    assert {signal.getsignal(n) for n in SIGNALS} == {marked}
    assert not stopping._handled


def test_the_next_run_is_not_stopped_by_an_old_signal(tmp_path: Path):
    callback = StopOnSignal()
    with pytest.raises(Stopped):
        trainer(tmp_path, [callback, Send(1, signal.SIGTERM)], max_epochs=1).fit(Tiny(), loader(4))
    again = trainer(tmp_path, [callback], max_epochs=1)
    again.fit(Tiny(), loader(4))
    assert again.global_step == 4


def test_checkpoints_that_no_signal_saves_are_announced(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    saving = [StopOnSignal(), pl.callbacks.ModelCheckpoint()]
    trainer(tmp_path, saving, fast_dev_run=True).fit(Tiny(), loader(1))
    assert not any("StopOnSignal" in str(warned.message) for warned in recwarn)
    with pytest.warns(UserWarning, match="StopOnSignal saves nothing without the callback LastCheckpoint"):
        trainer(tmp_path, saving, max_epochs=1).fit(Tiny(), loader(1))
