import errno
import io
import os
import pickle
import re
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_effattn.callbacks import LastCheckpoint
from lit_effattn.checkpoints import io as checkpoints
from lit_effattn.checkpoints.files import DamagedError, remove_parts
from lit_effattn.checkpoints.io import (
    AtomicCheckpointIO,
    own_folders,
    read_checkpoint,
)
from tests.callbacks.tiny import Tiny, loader, trainer

# ------------------------------------------------------------------------------------------------ AtomicCheckpointIO


def content(value: float, n: int = 100_000) -> dict:
    return {"state_dict": {"weight": torch.full((n,), value)}, "global_step": int(value)}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint that is there already."""
    path = tmp_path / "checkpoints" / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(content(1), path)
    return path


def intact(path: Path) -> bool:
    loaded = AtomicCheckpointIO().load_checkpoint(path)
    return not set(files(path.parent)) - {"last.ckpt", "previous.ckpt"} and torch.equal(
        loaded["state_dict"]["weight"], content(1)["state_dict"]["weight"]
    )


def test_what_is_saved_is_loaded(saved: Path):
    assert intact(saved)
    AtomicCheckpointIO().save_checkpoint(content(2), str(saved))
    assert AtomicCheckpointIO().load_checkpoint(str(saved))["global_step"] == 2
    assert AtomicCheckpointIO().load_checkpoint(saved.with_name("previous.ckpt"))["global_step"] == 1
    assert files(saved.parent) == ["last.ckpt", "previous.ckpt"]


def test_the_name_never_means_half_a_file(saved: Path, monkeypatch: pytest.MonkeyPatch):
    """Until all bytes are on the disk, the name means the checkpoint from before."""
    seen = []

    def look(real):
        def wrapped(*args, **kwargs):
            seen.append(torch.load(saved, weights_only=True)["global_step"])
            return real(*args, **kwargs)

        return wrapped

    monkeypatch.setattr("lit_effattn.checkpoints.files.os.fsync", look(__import__("os").fsync))
    monkeypatch.setattr(Path, "replace", look(Path.replace))
    AtomicCheckpointIO().save_checkpoint(content(2), saved)
    assert seen == [1, 1]  # synchronised, then moved
    assert torch.load(saved, weights_only=True)["global_step"] == 2


class Unpicklable:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self):
        raise self.error


def test_what_cannot_be_pickled(saved: Path):
    """Says so itself; and leaves things as they were."""
    for error in [
        TypeError("no pickle"),
        pickle.PicklingError("no pickle"),
        AttributeError("no pickle"),
        RuntimeError("no pickle"),
        KeyboardInterrupt("no pickle"),
    ]:
        with pytest.raises(type(error), match="no pickle"):
            AtomicCheckpointIO().save_checkpoint({**content(2), "x": Unpicklable(error)}, saved)
        assert intact(saved)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch):
    """No file of this process may grow beyond 50 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_at_first(tmp_path: Path):
    path = tmp_path / "last.ckpt"
    with pytest.raises(OSError, match="could not be written") as caught:
        AtomicCheckpointIO().save_checkpoint(content(2), path)
    assert str(path) in str(caught.value)
    assert "saved before" not in str(caught.value)  # there is none
    assert files(tmp_path) == []


def test_a_full_disk_later(saved: Path, request: pytest.FixtureRequest):
    request.getfixturevalue("full_disk")
    with pytest.raises(OSError, match="could not be written") as caught:
        AtomicCheckpointIO().save_checkpoint(content(2), saved)
    output = str(caught.value)
    assert str(saved) in output
    assert "File too large" in output  # what the operating system says of EFBIG
    assert "saved before, still intact" in output
    assert "\n" not in output
    assert intact(saved)


def test_no_space_left(saved: Path, monkeypatch: pytest.MonkeyPatch):
    """Some file systems notice only when they are asked to write for good."""
    for where in ["write", "fsync", "replace"]:

        def full(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        if where == "write":
            monkeypatch.setattr(
                "lit_effattn.checkpoints.files.torch.save", lambda c, file: (file.write(b"begun"), full())
            )
        elif where == "fsync":
            monkeypatch.setattr("lit_effattn.checkpoints.files.os.fsync", full)
        else:
            monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match=r"last\.ckpt could not be written: No space left on device") as caught:
            AtomicCheckpointIO().save_checkpoint(content(2), saved)
        assert isinstance(caught.value.__cause__, OSError)
        monkeypatch.undo()
        assert intact(saved)


def test_where_the_file_system_has_no_links_the_one_before_is_kept_too(saved: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    AtomicCheckpointIO().save_checkpoint(content(2), saved)
    AtomicCheckpointIO().save_checkpoint(content(3), saved)
    steps = [read_checkpoint(saved.with_name(name))["global_step"] for name in ("previous.ckpt", "last.ckpt")]
    assert steps == [2, 3]


def test_only_unfinished_files_of_dead_processes_are_removed(tmp_path: Path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    same_number, gone, other = (tmp_path / f".last.ckpt.{n}.part" for n in (os.getpid(), ended.pid, "of-somebody"))
    running = tmp_path / ".best.ckpt.1.part"
    for path in (same_number, gone, other, running):
        path.touch()
    remove_parts(tmp_path)
    assert files(tmp_path) == sorted(path.name for path in (other, running))
    remove_parts(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_made(tmp_path: Path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(OSError, match=r"checkpoints/last\.ckpt could not be written: (File exists|Not a directory)"):
        AtomicCheckpointIO().save_checkpoint(content(2), tmp_path / "checkpoints" / "last.ckpt")


def test_a_full_disk_in_training_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Fill(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 3:
                monkeypatch.setattr("lit_effattn.checkpoints.files.os.fsync", no_space)

    def no_space(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        trainer(tmp_path, [Fill(), LastCheckpoint()], max_epochs=2).fit(Tiny(), loader(3))
    monkeypatch.undo()
    assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 3
    assert files(tmp_path) == ["last.ckpt"]


# --------------------------------------------------------------------------------------------------- what can't be read


def test_a_file_that_was_cut_off(saved: Path):
    whole = saved.read_bytes()
    for kept in (0, 1, 100, 5_000, 200_000, -1):
        saved.write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=rf"{re.escape(str(saved))} .*cut off") as caught:
            AtomicCheckpointIO().load_checkpoint(saved)
        assert "\n" not in str(caught.value)


def tar_of_nothing() -> bytes:
    return b"PK\x05\x06" + 18 * b"\0"  # a zip archive without any file


OTHER_FILES = {
    "text": b"# a README\n",
    "yaml": b"model:\n  class_path: PixelModel\n",
    "png": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4,
    "zeros": bytes(10_000),
    "numbers": bytes(i * 7 % 256 for i in range(10_000)),
    "pickle": pickle.dumps({"state_dict": {}, "x": io.BytesIO}),
    "empty zip": tar_of_nothing(),
    "json": b'{"state_dict": {}}',
    "an opcode of pickle": b"cab\n1\n.(]}u.\x80\x02" + bytes(100),
    "numpy": b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }\n" + bytes(24),
}


def test_a_file_of_another_program(tmp_path: Path):
    for name in OTHER_FILES:
        path = tmp_path / "model.ckpt"
        path.write_bytes(OTHER_FILES[name])
        with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
            AtomicCheckpointIO().load_checkpoint(path)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500


def test_a_file_of_torch_that_is_no_checkpoint(tmp_path: Path):
    for content in [{"weight": torch.zeros(1)}, [1, 2], torch.zeros(3), None]:
        torch.save(content, tmp_path / "weights.pt")
        with pytest.raises(ValueError, match=r"weights\.pt is not a Lightning checkpoint.*state_dict"):
            AtomicCheckpointIO().load_checkpoint(tmp_path / "weights.pt")


def test_a_file_that_is_not_there(tmp_path: Path):
    for path in (tmp_path / "missing.ckpt", tmp_path):
        with pytest.raises(FileNotFoundError, match=re.escape(str(path))):
            AtomicCheckpointIO().load_checkpoint(path)


def test_code_is_not_run_on_loading(saved: Path, tmp_path: Path):
    """However it is asked for: a checkpoint may come from anywhere."""

    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "pwned",))

    AtomicCheckpointIO().save_checkpoint({**content(2, 1), "x": Evil()}, saved)
    for weights_only in (None, True):
        with pytest.raises(DamagedError, match="which no checkpoint does"):
            AtomicCheckpointIO().load_checkpoint(saved, weights_only=weights_only)
    with pytest.raises(ValueError, match="weights_only=False would run code"):
        AtomicCheckpointIO().load_checkpoint(saved, weights_only=False)
    assert not (tmp_path / "pwned").exists()


# ------------------------------------------------------------------------------------------ what callbacks remember


def remembered(trainer: pl.Trainer, **state: Any) -> dict[str, Any]:
    """A checkpoint in which the trainer's ModelCheckpoint remembers `state`, once it is read."""
    (callback,) = trainer.checkpoint_callbacks
    checkpoint = {"callbacks": {callback.state_key: {"dirpath": "checkpoints", **state}, "other": dict(state)}}
    own_folders(checkpoint, trainer)
    assert not any(checkpoint["callbacks"]["other"].values())  # nothing here reads it, so nothing is kept
    return checkpoint["callbacks"][callback.state_key]


@pytest.fixture
def resuming(tmp_path: Path) -> pl.Trainer:
    made = pl.Trainer(default_root_dir=tmp_path, callbacks=[ModelCheckpoint(tmp_path / "checkpoints")], logger=False)
    made.ckpt_path = str(tmp_path / "checkpoints" / "last.ckpt")
    return made


def test_files_of_the_run_are_found_again(resuming: pl.Trainer, tmp_path: Path):
    folder = tmp_path / "checkpoints"
    result = remembered(resuming, best_model_path="a.ckpt", kth_best_model_path="b.ckpt", best_k_models={"b.ckpt": 1.0})
    assert result == {
        "dirpath": str(folder),
        "best_model_path": str(folder / "a.ckpt"),
        "kth_best_model_path": str(folder / "b.ckpt"),
        "best_k_models": {str(folder / "b.ckpt"): 1.0},
    }


def test_another_runs_files_are_not(resuming: pl.Trainer, tmp_path: Path):
    resuming.ckpt_path = "/elsewhere/checkpoints/best.ckpt"
    result = remembered(resuming, best_model_path="/elsewhere/checkpoints/best.ckpt")
    assert result == {"dirpath": "checkpoints", "best_model_path": ""}  # Lightning then takes nothing of it


def test_a_path_that_leads_elsewhere_is_dropped(resuming: pl.Trainer):
    for path in ["/etc", "../../x", ".", "", "a/../..", 7, None, ["a.ckpt"]]:
        scores = {path: 1.0} if isinstance(path, str) else path
        result = remembered(resuming, kth_best_model_path=path, last_model_path=path, best_k_models=scores)
        assert not any(result[name] for name in ("kth_best_model_path", "last_model_path", "best_k_models"))


def test_the_worst_of_the_best_is_one_of_them(resuming: pl.Trainer):
    """Lightning would look for it in vain."""
    assert remembered(resuming, kth_best_model_path="/x", best_k_models={"a": 1.0})["best_k_models"] == {}
    assert len(remembered(resuming, kth_best_model_path="", best_k_models={"a": 1.0})["best_k_models"]) == 1


# -------------------------------------------------------------------------------- AtomicCheckpointIO(asynchronous=True)


class Disk:
    """Writes when it is allowed to, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed, self.error, self.written = threading.Semaphore(0), None, []
        self._write = checkpoints.write
        monkeypatch.setattr(checkpoints, "write", self.write)

    def write(self, content: dict, path: Path) -> None:
        assert self.allowed.acquire(timeout=10)
        self.written.append(threading.current_thread() is not threading.main_thread())
        if self.error is not None:
            raise self.error
        self._write(content, path)


@pytest.fixture
def disk(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_what_is_written_is_of_the_time_of_the_call(saved: Path, disk: Disk):
    """Training goes on in the same tensors; those that share memory are written once."""
    checkpoint_io, checkpoint = AtomicCheckpointIO(asynchronous=True), content(2)
    state = checkpoint["state_dict"]
    state["tied"], state["row"] = state["weight"], state["weight"].view(10, -1)[3]
    checkpoint["counts"] = {"steps": [2]}
    checkpoint_io.save_checkpoint(checkpoint, saved)
    state["weight"].fill_(7)
    checkpoint["counts"]["steps"].append(3)
    assert intact(saved)  # the one before
    disk.allowed.release()
    checkpoint_io.finish()
    result = read_checkpoint(saved)
    assert result["counts"] == {"steps": [2]}
    assert result["state_dict"].keys() == state.keys()
    assert all(bool((t == 2).all()) for t in result["state_dict"].values())
    assert result["state_dict"]["row"].shape == (10_000,)
    assert saved.stat().st_size < 1.1 * saved.with_name("previous.ckpt").stat().st_size
    assert disk.written == [True]
    checkpoint_io.teardown()


def test_two_at_most_are_unfinished(saved: Path, disk: Disk):
    checkpoint_io = AtomicCheckpointIO(asynchronous=True)
    for step in (2, 3):
        checkpoint_io.save_checkpoint(content(step), saved)
    threading.Timer(0.2, disk.allowed.release).start()
    checkpoint_io.save_checkpoint(content(4), saved)
    assert disk.written == [True]
    for _ in range(2):
        disk.allowed.release()
    assert checkpoint_io.load_checkpoint(saved)["global_step"] == 4  # waits
    checkpoint_io.teardown()


def test_deletions_wait_for_what_was_asked_before(saved: Path, disk: Disk):
    checkpoint_io, old = AtomicCheckpointIO(asynchronous=True), saved.with_name("best.ckpt")
    old.write_bytes(saved.read_bytes())
    checkpoint_io.save_checkpoint(content(2), saved)
    checkpoint_io.remove_checkpoint(old)
    time.sleep(0.05)
    assert old.exists()
    disk.allowed.release()
    checkpoint_io.teardown()
    assert files(saved.parent) == ["last.ckpt", "previous.ckpt"]


def test_an_error_is_raised_by_the_next_call_and_stops_deletions(saved: Path, disk: Disk):
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    checkpoint_io, old = AtomicCheckpointIO(asynchronous=True), saved.with_name("best.ckpt")
    old.write_bytes(saved.read_bytes())
    checkpoint_io.save_checkpoint(content(2), saved.with_name("new.ckpt"))
    checkpoint_io.remove_checkpoint(old)
    disk.allowed.release()
    for call in (
        checkpoint_io.finish,
        lambda: checkpoint_io.save_checkpoint(content(3), saved),
        checkpoint_io.teardown,
    ):
        with pytest.raises(OSError, match=r"new.ckpt could not be written: No space left on device"):
            call()
    assert files(saved.parent) == ["best.ckpt", "last.ckpt"]
    checkpoint_io.save_checkpoint(content(3), saved)  # of the next run
    disk.error = None
    disk.allowed.release()
    checkpoint_io.teardown()
    assert read_checkpoint(saved)["global_step"] == 3
