"""Jobs of the SLURM scheduler: what a restarted job goes on with, and requeueing.

SLURM starts a requeued job's script again, with the same job number. A run therefore writes the number of its job and
the arguments of its command into its folder, and the same command in the restarted job goes on with that run.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_effattn.runs import LAST, PREVIOUS, run_of

JOB_FILE = "slurm_job"
"""The file in the folder of a run with the number of the job that trains it, and the command's arguments."""


def job() -> str | None:
    """Return the number of this process's job, in an array its index too; None: there is no job."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")


def record_job(run: Path, args: list[str]) -> None:
    """Write the job's number and the arguments of the command into the folder of its run."""
    if job() is not None:
        (run / JOB_FILE).write_text(json.dumps([job(), args]))


def interrupted_checkpoint(root: Path, args: list[str]) -> Path | None:
    """Return the checkpoint from which a command goes on, if SLURM has restarted its job; None: there is none."""
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0) == 0:
        return None
    runs = [path.parent for path in root.rglob(JOB_FILE) if _read(path) == [job(), args]]
    for run in sorted(runs, key=lambda run: run.name, reverse=True):
        for name in (LAST, PREVIOUS):
            checkpoint = run / "checkpoints" / name
            if checkpoint.is_file() and run_of(checkpoint):
                return checkpoint.resolve()
    return None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def requeue(number: str) -> None:
    """Ask SLURM to run a job again; a failure is a warning, since the run is saved."""
    try:
        done = subprocess.run(["scontrol", "requeue", number], capture_output=True, text=True, check=False)
        failure = "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
    except OSError as error:
        failure = str(error)
    if failure:
        rank_zero_warn(f"SLURM did not requeue job {number} ({failure}): resume with --ckpt_path last")
    else:
        rank_zero_info(f"Requeued job {number}.")
