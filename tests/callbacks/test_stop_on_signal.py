import os
import signal
from contextlib import nullcontext
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lit_effattn.callbacks import LastCheckpoint, StopOnSignal, Stopped
from lit_effattn.checkpoints.io import read_checkpoint
from tests.callbacks.tiny import Tiny, loader, trainer

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _leave_handlers_alone():
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def marked(number: int, frame: object) -> None:
    """A handler that was there before."""
    raise AssertionError("the handler from before was called")


class Send(pl.Callback):
    """Sends this process a signal while the batch that follows `step` steps is at work."""

    def __init__(self, step: int, *numbers: int, hook: str = "on_before_optimizer_step") -> None:
        self.step, self.numbers, self.hook = step, numbers, hook

    def _send(self, trainer: pl.Trainer, hook: str) -> None:
        if trainer.global_step == self.step and hook == self.hook:
            for number in self.numbers:
                os.kill(os.getpid(), number)

    def on_before_optimizer_step(self, trainer, *_):
        self._send(trainer, "on_before_optimizer_step")

    def on_train_batch_start(self, trainer, *_):
        self._send(trainer, "on_train_batch_start")

    def on_validation_batch_start(self, trainer, *_):
        self._send(trainer, "on_validation_batch_start")


def stopped(folder: Path, send: Send, *validation, **options) -> tuple[SystemExit, Tiny, pl.Trainer]:
    """Train for two epochs of 4 steps, or until stopped."""
    for number in SIGNALS:
        signal.signal(number, marked)
    model = Tiny()
    run = trainer(folder, [StopOnSignal(), send, LastCheckpoint()], max_epochs=2, **options)
    with pytest.raises(SystemExit) as caught:
        run.fit(model, loader(4), *validation)
    return caught.value, model, run


def last(folder: Path) -> dict:
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 138), (signal.SIGHUP, 129)],
)
def test_the_run_ends_after_the_step_with_everything_saved(number: int, code: int, tmp_path: Path):
    exit_, model, run = stopped(tmp_path, Send(5, number))
    assert isinstance(exit_, Stopped)
    assert exit_.code == code
    assert len(model.drawn) == run.global_step == 6  # the step at work was finished, and none begun
    saved = last(tmp_path)
    assert saved["global_step"] == 6
    assert saved["state_dict"]["weight"].item() == model.weight.item()
    assert {signal.getsignal(n) for n in SIGNALS} == {marked}


def test_a_signal_that_was_ignored_stays_ignored(tmp_path: Path):
    """As under nohup."""

    class Hang(pl.Callback):
        def on_train_batch_start(self, *_):
            os.kill(os.getpid(), signal.SIGHUP)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = trainer(tmp_path, [StopOnSignal(), Hang()], max_epochs=1)
    run.fit(Tiny(), loader(4))
    assert run.global_step == 4
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_stop_within_an_accumulation_is_put_off(tmp_path: Path):
    class OutOfTime(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            trainer.should_stop = trainer.should_stop or batch_idx == 0

    model = Tiny()
    run = trainer(tmp_path, [OutOfTime(), LastCheckpoint()], max_epochs=1, accumulate_grad_batches=3)
    run.fit(model, loader(7))
    assert (run.global_step, len(model.drawn), last(tmp_path)["global_step"]) == (1, 3, 1)


def test_another_signal_in_the_same_step_or_while_it_is_saved_changes_nothing(tmp_path: Path):
    class Again(pl.Callback):
        def on_save_checkpoint(self, trainer, *_):
            if trainer.global_step == 6:
                os.kill(os.getpid(), signal.SIGHUP)

    for n in SIGNALS:
        signal.signal(n, marked)
    send = Send(5, signal.SIGTERM, signal.SIGTERM)
    run = trainer(tmp_path, [StopOnSignal(), send, Again(), LastCheckpoint()], max_epochs=2)
    with pytest.raises(Stopped):
        run.fit(Tiny(), loader(4))
    assert last(tmp_path)["global_step"] == 6
    assert {signal.getsignal(n) for n in SIGNALS} == {marked}


def test_a_slurm_job_is_requeued_when_it_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def requeue(number: str) -> None:
        asked.append((number, last(tmp_path)["global_step"]))

    monkeypatch.setattr("lit_effattn.checkpoints.slurm.requeue", requeue)
    environment = {"JOB_ID": "77", "NTASKS": "1", "NTASKS_PER_NODE": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    exit_, _, _ = stopped(tmp_path, Send(5, signal.SIGUSR1))
    assert (exit_.code, asked) == (138, [("77", 6)])
    asked.clear()
    stopped(tmp_path, Send(5, signal.SIGTERM))
    assert asked == []


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path):
    exit_, _, run = stopped(tmp_path, Send(5, signal.SIGINT, signal.SIGINT))
    assert exit_.code != 0
    assert run.global_step == 5  # the step was not finished
    assert last(tmp_path)["global_step"] == 4  # and nothing of it saved: that of the epoch before is there


def test_a_validation_is_not_waited_for(tmp_path: Path):
    """Which may be long: of its 50 batches the first is the last. Training goes on after it as if it had been whole."""
    seen = []

    class Count(Send):
        def on_validation_batch_end(self, *_, **__):
            seen.append(1)

    send = Count(4, signal.SIGTERM, hook="on_validation_batch_start")
    exit_, _, run = stopped(tmp_path, send, loader(50))
    assert exit_.code == 143
    assert len(seen) <= 1
    assert run.global_step == 4
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 4

    resumed, whole = Tiny(), Tiny()
    trainer(tmp_path, [LastCheckpoint()], max_epochs=3).fit(resumed, loader(4), loader(50), ckpt_path=last)
    trainer(tmp_path / "whole", [LastCheckpoint()], max_epochs=3).fit(whole, loader(4), loader(50))
    assert torch.equal(resumed.weight, whole.weight)


@pytest.mark.parametrize("crashes", [True, False])
def test_handlers_are_restored_when_training_ends_or_crashes(tmp_path: Path, crashes: bool):
    for number in SIGNALS:
        signal.signal(number, marked)
    during = []

    class Look(pl.Callback):
        def on_train_batch_start(self, *_):
            during.append([signal.getsignal(n) for n in SIGNALS])
            if crashes:
                raise RuntimeError("crashed")

    with pytest.raises(RuntimeError, match="crashed") if crashes else nullcontext():
        trainer(tmp_path, [StopOnSignal(), Look()], max_epochs=1).fit(Tiny(), loader(2))
    assert all(handler != marked for handlers in during for handler in handlers)
    assert {signal.getsignal(n) for n in SIGNALS} == {marked}


def test_the_next_run_is_not_stopped_by_an_old_signal(tmp_path: Path):
    callback = StopOnSignal()
    with pytest.raises(Stopped):
        trainer(tmp_path, [callback, Send(1, signal.SIGTERM)], max_epochs=1).fit(Tiny(), loader(4))
    again = trainer(tmp_path, [callback], max_epochs=1)
    again.fit(Tiny(), loader(4))
    assert again.global_step == 4
