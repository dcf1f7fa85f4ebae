"""The lock on a run's folder: one holder at a time, whose end is noticed."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lit_effattn.checkpoints import run_lock
from lit_effattn.checkpoints.run_lock import LOCK, STALE_AFTER, RunLock, RunLockedError


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def held(run: Path, **about: Any) -> Path:
    """Write the file of another holder."""
    (run / LOCK).write_text(json.dumps({**run_lock._me(), "token": "another", **about}))
    return run / LOCK


def of(process: subprocess.Popen) -> dict[str, Any]:
    return {"pid": process.pid, "started": run_lock._started(process.pid)}


def assert_free(run: Path):
    lock = RunLock(run)
    lock.verify()
    lock.release()
    assert not list(run.iterdir())


def assert_held(run: Path, *output: str):
    with pytest.raises(RunLockedError, match=r"another fit writes into .*Wait for its end or stop it") as caught:
        RunLock(run)
    assert all(text in str(caught.value) for text in output)
    assert [path.name for path in run.iterdir()] == [LOCK]


def test_a_process_that_runs_holds_it_until_it_is_killed(process: subprocess.Popen, tmp_path: Path):
    file = held(tmp_path, **of(process))
    os.utime(file, (0, 0))  # stopped for long: it may go on
    assert_held(tmp_path, f"process {process.pid} on {run_lock._me()['host']}")
    process.kill()
    while run_lock._started(process.pid):
        time.sleep(0.01)
    assert Path(f"/proc/{process.pid}").exists() or sys.platform != "linux"  # nobody has waited for it yet
    assert_free(tmp_path)


def test_another_process_of_the_same_number_does_not_hold_it(process: subprocess.Popen, tmp_path: Path):
    held(tmp_path, **{**of(process), "started": "1"})
    assert_free(tmp_path)


@pytest.mark.parametrize("name", ["host", "system"])
def test_one_elsewhere_holds_it_while_it_renews_the_file(name: str, tmp_path: Path):
    file = held(tmp_path, **{name: "elsewhere"})
    assert_held(tmp_path, *(["on elsewhere"] if name == "host" else []))
    now = time.time()
    os.utime(file, (now, now - STALE_AFTER + 20))
    assert_held(tmp_path)
    os.utime(file, (now, now - STALE_AFTER - 20))
    assert_free(tmp_path)


@pytest.mark.parametrize("count", ["0", "1"])
def test_a_requeued_job_supersedes_itself_on_another_host(count: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    held(tmp_path, host="elsewhere")
    monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    (assert_held if count == "0" else assert_free)(tmp_path)


def test_a_launch_of_torchrun_supersedes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    held(tmp_path, host="elsewhere")
    assert_free(tmp_path)


def test_a_file_that_says_nothing_is_that_of_an_unknown_process(tmp_path: Path):
    for content in ["", "[]", "{", '{"pid": "x"}', '{"host": 3, "pid": -1}']:
        (tmp_path / LOCK).write_text(content)
        assert_held(tmp_path, "process")
        os.utime(tmp_path / LOCK, (0, 0))
        assert_free(tmp_path)


def test_the_holder_notices_that_it_was_superseded(tmp_path: Path):
    lock = RunLock(tmp_path)
    held(tmp_path, host="elsewhere")
    with pytest.raises(RunLockedError, match=r"held by process .* on elsewhere"):
        lock.verify()
    lock.release()
    assert (tmp_path / LOCK).exists()
    (tmp_path / LOCK).unlink()
    with pytest.raises(RunLockedError, match="held by nobody"):
        lock.verify()


def test_the_holder_renews_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_lock, "RENEWED_EVERY", 0.01)
    lock = RunLock(tmp_path)
    os.utime(lock.path, (0, 0))
    end = time.monotonic() + 10
    while lock.path.stat().st_mtime == 0 and time.monotonic() < end:
        time.sleep(0.01)
    assert lock.path.stat().st_mtime > 0
    lock.release()


@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_supersede_at_once_one_holds_it(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if not links:

        def refuse(*_):
            raise OSError("no links here")

        monkeypatch.setattr(run_lock.os, "link", refuse)
    begin, locks = threading.Barrier(8), []
    me = run_lock._me()
    monkeypatch.setattr(run_lock, "_me", lambda: {**me, "host": f"host {threading.get_ident()}"})
    os.utime(held(tmp_path), (0, 0))

    def take():
        begin.wait()
        with suppress(RunLockedError):
            locks.append(RunLock(tmp_path))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(locks) == 1
    locks[0].verify()
    locks[0].release()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(**_):
        raise OSError(run_lock.errno.EROFS, "Read-only file system")

    monkeypatch.setattr(run_lock.tempfile, "mkstemp", refuse)
    with pytest.raises(PermissionError, match=r"can't be written to \(Read-only file system\).*--init_weights"):
        RunLock(tmp_path)
