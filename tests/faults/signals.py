"""Send signals to commands at named moments and check how they end.

Every signal is sent at every moment of every command, in a cover of all pairs of the number of loader processes, the
target (the process or its group) and the environment (a shell, or a SLURM job). A cell is right if the exit code is 128
+ the signal's number, one line names the signal, there is no other error, `last.ckpt` is of the step at which a
training run stopped, and the job is requeued by SIGUSR1 in the training, once.
"""

import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from lit_effattn.settings import trainer as settings_of_trainer
from tests.faults.cases import TRUST, Settings, newest, start
from tests.faults.moments import RELEASED, hold
from tests.faults.processes import Run, in_fork
from tests.support.cases import pairwise

MOMENTS: dict[tuple[str, str], tuple[dict[str, object], int | None]] = {
    ("fit", "sanity check"): ({"moment": "sanity_check"}, None),
    ("fit", "step"): ({"moment": "train_batch_start", "epoch": 1, "batch": 4}, 15),
    ("fit", "validation"): ({"moment": "validation_batch_start", "epoch": 1, "batch": 1}, 20),
    ("fit", "between epochs"): ({"moment": "train_epoch_end", "epoch": 1}, 20),
    ("fit", "end of the last epoch"): ({"moment": "train_epoch_end", "epoch": 2}, 30),
    ("validate", "validation"): ({"moment": "validation_batch_start", "batch": 1}, None),
    ("test", "test"): ({"moment": "test_batch_start", "batch": 1}, None),
    ("predict", "prediction"): ({"moment": "predict_batch_start", "batch": 1}, None),
    ("generate", "drawing"): ({"moment": "drawing"}, None),
}
"""When the signal comes, by command and moment, and the step of the `last.ckpt` that the command saves then."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
DIMENSIONS = {"workers": (0, 2), "target": ("process", "group"), "environment": ("shell", "SLURM")}
JOB = {"JOB_ID": "77", "JOB_NAME": "fit", "NTASKS": "1", "NTASKS_PER_NODE": "1", "PROCID": "0", "LOCALID": "0"}
JOB |= {"NODEID": "0", "NODELIST": "127.0.0.1"}


@dataclass(frozen=True)
class Cell:
    """A command, the moment and the number of a signal, and how it is run and sent."""

    command: str
    moment: str
    number: signal.Signals
    workers: int = 0
    target: str = "process"
    environment: str = "shell"


def cells() -> Iterator[Cell]:
    """Yield all cells. Drawing starts no loader process."""
    for (command, moment), number, cell in product(MOMENTS, SIGNALS, pairwise(DIMENSIONS)):
        yield Cell(command, moment, number, **(cell | {"workers": 0} if command == "generate" else cell))


def trial(cell: Cell, folder: Path, trained: Path) -> tuple[str, str | None]:
    """Run a command and send it the signal.

    Args:
        cell: What to run and to send.
        folder: A new folder.
        trained: The folder of a finished run.

    Returns:
        What happened, as cells of a table, and the first thing that is wrong, or None.
    """
    plan, step = MOMENTS[cell.command, cell.moment]
    args = start(Settings(), folder)
    if cell.command != "fit":
        args = [cell.command, "--ckpt_path", str(newest(trained) / "checkpoints" / "last.ckpt"), *TRUST]
    if cell.command == "generate":
        args += ["--n", "1", "--compile", "false"]
    else:
        args += ["--data.num_workers", str(cell.workers)]
    if cell.command in ("validate", "test", "predict"):
        args += ["--trainer.callbacks", "tests.faults.moments.Fault"]
    run = Run(args, 1, folder, Path("cache"), {"act": "hold", **plan}, _environment(cell, folder), _prepare)
    if not run.holds():
        return "", f"the moment did not come: {run.output.read_text()[-300:]}"
    (os.killpg if cell.target == "group" else os.kill)(run.pid, cell.number)
    (folder / RELEASED).touch()
    return _judged(cell, run, folder, step)


def _judged(cell: Cell, run: Run, folder: Path, step: int | None) -> tuple[str, str | None]:
    code = run.wait()
    lines = [line.strip() for line in run.output.read_text().splitlines() if line.strip()]
    asked = (folder / "asked").read_text() if (folder / "asked").exists() else ""
    checkpoints = sorted(path.name for path in folder.rglob("*.ckpt"))
    saved = in_fork(_step, folder) if "last.ckpt" in checkpoints else None
    said = [line for line in lines if line.startswith("Stopped by ")]
    trains = cell.command == "fit" and cell.moment not in ("sanity check", "end of the last epoch")
    requeued = "requeue 77\n" * (cell.environment == "SLURM" and cell.number == signal.SIGUSR1 and trains)
    right = {
        "exit code": (code, 128 + cell.number),
        "last.ckpt of step": (saved, step),
        "lines that name the signal": (len(said), 1),
        "errors": ([line for line in lines if "error" in line.lower() or "Traceback" in line], []),
        "scontrol": (asked, requeued),
        "other checkpoints": ([name for name in checkpoints if name.startswith("hpc")], []),
        "unfinished files": ([path.name for path in folder.rglob("*.part")], []),
    }
    wrong = [f"{name} {value!r}, not {due!r}" for name, (value, due) in right.items() if value != due]
    about = f"{code} | {'' if saved is None else f'step {saved}'} | {'; '.join(said)}{' Requeued.' * bool(asked)}"
    return about, wrong[0] if wrong else None


def _step(folder: Path) -> int:
    return torch.load(next(folder.rglob("last.ckpt")), weights_only=True)["global_step"]


def _environment(cell: Cell, folder: Path) -> dict[str, str]:
    if cell.environment == "shell":
        return {}
    scontrol = folder / "bin" / "scontrol"
    scontrol.parent.mkdir(parents=True)
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {(folder / "asked").resolve()}\n')
    scontrol.chmod(0o755)
    job = {f"SLURM_{name}": value for name, value in JOB.items()}
    return {**job, "PATH": f"{scontrol.parent.resolve()}:{os.environ['PATH']}"}


def _prepare(plan: Path) -> None:
    """Hold a command that draws samples, which calls no callbacks, when it begins to draw."""

    def track(steps: Sequence[int]) -> Iterable[int]:
        hold(plan)
        return steps

    settings_of_trainer._track = track


def table(selected: Iterable[Cell]) -> int:
    """Run the cells and print a table of them; return the number of those that are wrong."""
    settings, trained, failed = Settings(), Path("trained"), 0
    run = Run(start(settings, trained), 1, trained, Path("cache"))
    if run.wait() != 0:
        raise RuntimeError(f"the run without a signal failed\n{run.output.read_text()}")
    print("| command | moment | signal | workers | target | in | exit code | last.ckpt | output | |")
    print("|---|---|---|--:|---|---|--:|---|---|---|")
    begun = time.monotonic()
    for number, cell in enumerate(selected):
        about, wrong = trial(cell, Path(f"signal-{number}"), trained)
        failed += wrong is not None
        name = f"{cell.command} | {cell.moment} | {cell.number.name} | {cell.workers} | {cell.target}"
        print(f"| {name} | {cell.environment} | {about} | {wrong or 'right'} |", flush=True)
    print(f"\n{number + 1} signals in {time.monotonic() - begun:.0f} s; {failed} cells are wrong")
    return failed
