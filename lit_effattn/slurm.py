"""Jobs of the SLURM scheduler: what a restarted job goes on with, and requeueing.

SLURM starts a requeued job's script again, with the same job number. A run therefore writes the number of its job into
its folder, and a restarted job's `fit` goes on with the run that has its number.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_effattn.runs import LAST, PREVIOUS, run_of

JOB_FILE = "slurm_job"
"""The file in the folder of a run with the number of the job that trains it."""


def job() -> str | None:
    """Return the number of this process's job, in an array its index too; None: there is no job."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")


def record_job(run: Path) -> None:
    """Write the job's number into the folder of its run."""
    if (number := job()) is not None:
        (run / JOB_FILE).write_text(number)


def interrupted_checkpoint(root: Path) -> str | None:
    """Return the checkpoint from which this job goes on, if SLURM has restarted it; None: there is none."""
    if int(os.environ.get("SLURM_RESTART_COUNT") or 0) == 0:
        return None
    runs = [path.parent for path in root.rglob(JOB_FILE) if path.read_text() == job()]
    for run in sorted(runs, key=lambda run: run.name, reverse=True):
        for name in (LAST, PREVIOUS):
            checkpoint = run / "checkpoints" / name
            if checkpoint.is_file() and run_of(checkpoint):
                return str(checkpoint)
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
