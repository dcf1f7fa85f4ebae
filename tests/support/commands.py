"""Running the `lit-effattn` command in tests: in this process, or in others."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.cli import main
from lit_effattn.ops.runtime import cpp_build
from tests.support.processes import run_command

REPOSITORY = Path(__file__).parent.parent.parent
TWO = ["--trainer.devices", "2", "--trainer.accelerator", "cpu", "--trainer.strategy", "ddp"]


def fails(capsys: pytest.CaptureFixture[str], *args: str, code: int = 1) -> str:
    """Run a command that must fail; return what it says, which must be short."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(list(args))
    output = capsys.readouterr().err
    message = output[output.index("lit-effattn: error: ") :]
    assert stopped.value.code == code
    assert len(message.splitlines()) <= 3
    assert len(message) < 1000
    assert "Traceback" not in output
    return message


def command(*args: str, two: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, or in two."""
    return run_command(list(args), 2 if two or "ddp" in args else 1)


def launched(*args: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user does: Lightning starts the second process."""
    return subprocess.run(
        [sys.executable, "-m", "lit_effattn.cli", *args],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(cpp_build.private_folder("kernels").parent.parent),
        },
        check=False,
    )


def ends(*args: str, two: bool = False) -> str:
    """Run a command to its end, in this process if it needs no other; return what it says."""
    if not two and "ddp" not in args:
        with redirect_stdout(io.StringIO()) as output:
            main(list(args))
        return output.getvalue()
    done = command(*args, two=two)
    assert done.returncode == 0, done.stderr
    return done.stdout


def last(root: str) -> Path:
    """Find the last checkpoint of the only run under `root`."""
    (path,) = Path(root).rglob("last.ckpt")
    return path


def weights(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["state_dict"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_same_end(a: Path, b: Path) -> None:
    """Compare all that training has made, bit for bit."""
    a, b = (read_checkpoint(path) if path.is_dir() else torch.load(path, weights_only=True) for path in (a, b))
    assert a["global_step"] == b["global_step"]
    assert same(a["state_dict"], b["state_dict"])
    assert a["lr_schedulers"] == b["lr_schedulers"]
    for p, q in zip(*(c["optimizer_states"][0]["state"].values() for c in (a, b)), strict=True):
        assert same(p, q)


def spec(class_path: str, **init_args: Any) -> dict[str, Any]:
    """Return what YAML says of an object: its class and arguments."""
    return {"class_path": class_path, "init_args": init_args}
