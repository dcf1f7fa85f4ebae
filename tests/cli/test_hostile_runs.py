"""Folders of runs that somebody else made: nothing outside of them is written, shown or waited for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_effattn.analysis import sweep
from lit_effattn.datamodules import SpeechData
from tests.support.commands import fails, spec
from tests.support.small_runs import checkpoint

RUN = Path("runs/received/2026-01-01_00-00-00")
LAST = RUN / "checkpoints" / "last.ckpt"


@pytest.fixture
def received(empty_folder: None) -> None:
    shutil.copytree(checkpoint("pixels").parents[1], RUN)


# ------------------------------------------------------------------------------------------------ what is in a folder


@pytest.mark.usefixtures("received")
def test_a_link_out_of_a_run_is_neither_read_nor_written_to(capsys: pytest.CaptureFixture[str]):
    secret = Path("secret.yaml")
    secret.write_text("token: hidden\n")
    (RUN / "config.yaml").unlink()
    (RUN / "config.yaml").symlink_to(secret.resolve())
    for command in ("fit", "test"):
        assert "this account did not write" in fails(capsys, command, "--ckpt_path", str(LAST))
    for command in (
        ["generate", "--ckpt_path", str(RUN)],
        ["report", str(RUN)],
        ["compare", str(RUN)],
    ):
        assert f"{RUN}/config.yaml is a link to {secret.resolve()}, outside of the run" in fails(capsys, *command)
    assert secret.read_text() == "token: hidden\n"
    assert not list(Path().rglob("*.html"))


@pytest.mark.usefixtures("received")
def test_a_lock_that_is_a_fifo_is_not_waited_for(capsys: pytest.CaptureFixture[str]):
    (RUN / "fit.lock").unlink(missing_ok=True)
    os.mkfifo(RUN / "fit.lock")
    assert f"{RUN}/fit.lock is not a file" in fails(capsys, "fit", "--ckpt_path", str(LAST))


def test_a_sweep_does_not_append_to_a_file_elsewhere(capsys: pytest.CaptureFixture[str]):
    cell, diary = Path("runs/sweep/LinearAttention_lr0.001_seed0"), Path("diary.txt")
    cell.mkdir(parents=True)
    diary.write_text("dear diary")
    (cell / "output.txt").symlink_to(diary.resolve())
    arguments = ["sweep", "--config", "digits_linear", "--kinds", "LinearAttention", "--output", "runs/sweep"]
    assert "output.txt is a link to" in fails(capsys, *arguments)
    assert diary.read_text() == "dear diary"


# ------------------------------------------------------------------------------------------ what a checkpoint's data do


def test_lightnings_way_to_build_data_is_closed():
    content = torch.load(checkpoint("speech"), weights_only=True)
    content["datamodule_hyper_parameters"]["corpus"] = spec("pathlib.Path.touch", self="pwned")
    torch.save(content, "it.ckpt")
    with pytest.raises(NotImplementedError, match="would build any class that the file names"):
        SpeechData.load_from_checkpoint("it.ckpt")


# --------------------------------------------------------------------------------------- modules of the current folder


@pytest.mark.exhaustive
@pytest.mark.processes
def test_modules_of_the_current_folder_do_not_hide_those_of_python():
    """In the processes that a sweep starts."""
    for name in ("argparse", "json", "opt_einsum", "pynvml", "select"):
        Path(f"{name}.py").write_text(f"open('imported_{name}', 'w').close()\n")
    command = [sys.executable, str(sweep.COMMAND), "kinds"]
    subprocess.run(command, check=True, capture_output=True)
    assert not list(Path().glob("imported_*"))


# -------------------------------------------------------------------------------------------------------------- memory


def test_too_little_memory_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("Unable to allocate 2.00 TiB")

    monkeypatch.setattr("lit_effattn.analysis.compare.read_run", fail)
    assert "there is too little memory. Unable to allocate 2.00 TiB" in fails(capsys, "compare", "model:digits")


BOMBS = """
import sys
from pathlib import Path
from lit_effattn.checkpoints.files import read
from lit_effattn.checkpoints.runs import small_text

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

before = peak()
for name in sys.argv[1:]:
    try:
        small_text(Path(name)) if name.endswith("yaml") else read(Path(name))
    except ValueError as error:
        print(name, peak() - before, error)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_small_files_that_claim_much_take_no_memory():
    """Each is refused, and the process at no time takes 64 MiB for it."""
    write_pickle("bytes.ckpt", b"cbuiltins\nbytearray\n(I1900000000\ntR.")
    doubled = b"c_codecs\nencode\n(" * 30 + b"c_codecs\nencode\n(V" + b"a" * 100 + b"\nVlatin1\ntR" + b"Vhex\ntR" * 30
    write_pickle("doubled.ckpt", doubled + b".")
    write_pickle("tensor.ckpt", b"ctorch\nTensor\n(I1900000000\ntR.")
    overlapping("overlapping.ckpt")
    with Path("config.yaml").open("wb") as file:
        file.truncate(2**30)
    names = ["bytes.ckpt", "doubled.ckpt", "tensor.ckpt", "overlapping.ckpt", "config.yaml"]
    done = subprocess.run(
        [sys.executable, "-c", BOMBS, *names], check=True, capture_output=True, text=True, timeout=120
    )
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert [name for name, *_ in lines] == names, done.stdout
    assert max(int(megabytes) for _, megabytes, _ in lines) < 64, done.stdout


def write_pickle(name: str, pickled: bytes) -> None:
    """Write a file of torch with this pickle."""
    import zipfile

    torch.save({"state_dict": {}}, name)
    with zipfile.ZipFile(name) as before:
        entries = {entry: before.read(entry) for entry in before.namelist()}
    with zipfile.ZipFile(name, "w", zipfile.ZIP_STORED) as after:
        for entry, content in entries.items():
            info = zipfile.ZipInfo(entry)
            after.writestr(info, b"\x80\x02" + pickled if entry.endswith("data.pkl") else content)
            info.external_attr = 0


def overlapping(name: str) -> None:
    """Write a file of 100 tensors of 8 MB whose records all lead to the bytes of the first."""
    import zipfile

    torch.save({"state_dict": {str(i): torch.zeros(2_000_000 if i == 0 else 1) + i for i in range(100)}}, name)
    with zipfile.ZipFile(name) as before:
        entries = {entry: before.read(entry) for entry in before.namelist()}
        pickled = before.read(next(entry for entry in entries if entry.endswith("data.pkl")))
    large = next(entry for entry, content in entries.items() if len(content) == 8_000_000)
    with zipfile.ZipFile(name, "w", zipfile.ZIP_STORED) as after:
        for entry, content in entries.items():
            if "/data/" not in entry or entry == large:
                after.writestr(zipfile.ZipInfo(entry), pickled if entry.endswith("data.pkl") else content)
        first = after.getinfo(large)
        for entry in entries:
            if "/data/" in entry and entry != large:
                copied = zipfile.ZipInfo(entry)
                copied.CRC, copied.compress_size, copied.file_size = first.CRC, first.compress_size, first.file_size
                copied.header_offset = first.header_offset
                after.filelist.append(copied)
                after.NameToInfo[entry] = copied
        for info in after.filelist:
            info.external_attr = 0
        after._didModify = True
