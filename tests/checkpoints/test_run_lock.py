"""The lock on a run's folder: one holder at a time, whose end is noticed."""

import errno
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from lit_effattn.checkpoints.run_lock import HOLDER, RunLock, RunLockedError
from lit_effattn.checkpoints.runs import LOCK, discard_if_empty


@contextmanager
def held(run: Path) -> Iterator[BaseProcess]:
    """Let another process hold the lock, and kill it at the end."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def hold() -> None:
        lock = RunLock(run)
        there.send("locked")
        there.recv()
        lock.release()

    process = context.Process(target=hold)
    process.start()
    try:
        assert here.poll(60)
        yield process
    finally:
        process.kill()
        process.join()


def assert_held(run: Path, holder: str):
    with pytest.raises(RunLockedError, match=rf"another fit writes into .*: {holder}\. Wait for its end or stop it"):
        RunLock(run)


def test_a_process_holds_it_until_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with held(tmp_path) as process:
        assert_held(tmp_path, rf"process {process.pid} on \S+, job 7")
        (tmp_path / HOLDER).unlink()
        assert_held(tmp_path, "an unknown process")
    for _ in range(2):
        lock = RunLock(tmp_path)
        assert str(os.getpid()) in (tmp_path / HOLDER).read_text()
        lock.release()
        assert not (tmp_path / HOLDER).exists()
    discard_if_empty(tmp_path)
    assert not tmp_path.exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_a_warning(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="a file system without locks"):
        RunLock(tmp_path).release()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_to(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        RunLock(tmp_path)


def test_the_target_of_a_link_keeps_its_content(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("model: X")
    (tmp_path / LOCK).symlink_to("config.yaml")
    (tmp_path / HOLDER).symlink_to("config.yaml")
    with pytest.raises(OSError):  # noqa: PT011 (of the operating system)
        RunLock(tmp_path)
    (tmp_path / LOCK).unlink()
    RunLock(tmp_path).release()
    assert (tmp_path / "config.yaml").read_text() == "model: X"
