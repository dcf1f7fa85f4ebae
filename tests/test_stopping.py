import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from lit_effattn import stopping
from lit_effattn.stopping import SIGNALS, Receiver, Stopped, handle, stoppable
from tests.support.commands import command, last, spec


def marked(number: int, frame: object) -> None:
    """A handler that was there before."""
    raise AssertionError("the handler from before was called")


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = [signal.signal(number, marked) for number in SIGNALS]
    yield
    after = [signal.signal(number, handler) for number, handler in zip(SIGNALS, before, strict=True)]
    assert set(after) <= {marked, signal.SIG_IGN}


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_the_first_signal_stops_and_later_ones_do_not(number: signal.Signals, monkeypatch: pytest.MonkeyPatch):
    def stop() -> None:
        try:
            signal.raise_signal(number)
        finally:
            for again in SIGNALS:  # `timeout` sends its signal twice
                signal.raise_signal(again)

    with pytest.raises(Stopped) as caught, stoppable():
        stop()
    assert (caught.value.code, caught.value.name) == (128 + number, number.name)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Stopped(number).code == 0  # else the launcher would kill the first process


def test_a_second_ctrl_c_stops_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stopping, "SAME", -1.0)
    received = Receiver(lambda number: None)
    restore = handle(received)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    restore()
    assert received.number == signal.SIGTERM


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_what_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stoppable():
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_other_threads_handle_no_signals():
    threads = [threading.Thread(target=lambda: handle(Receiver(print))())]
    for thread in threads:
        thread.start()
        thread.join()
    assert {signal.getsignal(number) for number in SIGNALS} == {marked}


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="macOS has no sigwaitinfo")
def test_a_forked_process_is_stopped_by_its_parent_alone(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def echo() -> None:
        for line in iter(there.recv, None):
            there.send(line)

    with stoppable():
        child = context.Process(target=echo)
        child.start()
        here.send("started")
        assert here.recv() == "started"
        for number in SIGNALS:
            subprocess.run(["kill", "-s", number.name, str(child.pid)], check=True)
            here.send(number.name)
            assert here.recv() == number.name
        os.kill(child.pid or 0, signal.SIGTERM)
        child.join()
    assert child.exitcode == 0


@pytest.mark.processes
def test_a_signal_to_the_group_stops_commands_whose_data_other_processes_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`python -m tests.faults --signals` has all commands, moments and signals."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    backbone = spec("Transformer", d_model=8, n_heads=2, n_layers=1, attention="LinearAttention")
    config = {
        "model": spec("PixelModel", backbone=backbone),
        "data": spec("PixelSequences", dataset="digits", batch_size=256, num_workers=2),
        "trainer": {"max_epochs": 2, "enable_progress_bar": False, "logger": False},
    }
    Path("tiny.yaml").write_text(yaml.safe_dump(config))

    def stopped(number: signal.Signals, step: int, *args: str) -> tuple[int, list[str]]:
        to_group = ["--trainer.callbacks", "interruptions.SignalToGroup"]
        to_group += ["--trainer.callbacks.step", str(step), "--trainer.callbacks.number", str(int(number))]
        ended = command(*args, *to_group)
        lines = [line for line in ended.stderr.splitlines() if "topped" in line or "rror" in line]
        return ended.returncode, lines

    assert stopped(signal.SIGUSR1, 3, "fit", "--config", "tiny.yaml") == (138, ["Stopped by SIGUSR1 at step 4."])
    assert torch.load(last("runs"), weights_only=True)["global_step"] == 4
    assert stopped(signal.SIGTERM, 0, "test", "--ckpt_path", "last") == (143, ["Stopped by SIGTERM."])
