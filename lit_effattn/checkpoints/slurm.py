"""Jobs of the SLURM scheduler and launches of torchrun: finding the run of a restarted job, and requeueing.

SLURM starts a requeued job's script again, with the same job number. torchrun starts all processes again when one has
failed (`--max-restarts`), with the same `--rdzv-id`. A run therefore writes the job's number, the launch's id and the
command's arguments into its folder, and the same command in the restarted job resumes that run.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_effattn.checkpoints.files import whole
from lit_effattn.checkpoints.runs import LAST, PREVIOUS, is_checkpoint, run_folders, run_of, small_text

JOB_FILE = "slurm_job"
"""The file in the folder of a run with the job that trains it, the command's arguments, and torchrun's id."""


def job() -> str | None:
    """Return the number of this process's job, with its index in a job array; None without a job."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID")


def launch() -> str | None:
    """Return the id of the torchrun launch of this process (`--rdzv-id`); None if none was given."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if name == "none" else name  # torchrun's default


def record_job(run: Path, args: list[str]) -> None:
    """Write the job's number, the arguments of the command and torchrun's id into the folder of its run."""
    if job() is not None or launch() is not None:
        with whole(run / JOB_FILE) as part:
            part.write_text(json.dumps([job(), args, launch()]), encoding="utf-8")


def interrupted_checkpoint(root: Path, args: list[str]) -> Path | None:
    """Return the checkpoint from which a restarted command resumes; None if there is none.

    Its run was begun by the same command, in the same SLURM job if that was restarted, or in a torchrun launch with the
    same id. torchrun's count of restarts is not used: each machine counts only the failures of its own processes.
    """
    number = job() if int(os.environ.get("SLURM_RESTART_COUNT") or 0) else None
    if number is None and launch() is None:
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0):
            rank_zero_warn(
                "torchrun restarted this command without an id that names its run, so a new run begins: give "
                "torchrun --standalone or --rdzv-id"
            )
        return None

    def is_of_this_job(recorded: Any) -> bool:
        if not isinstance(recorded, list) or len(recorded) != 3 or recorded[1] != args:
            return False
        return (number is not None and recorded[0] == number) or (launch() is not None and recorded[2] == launch())

    runs = [run for run in run_folders(root) if is_of_this_job(_read(run / JOB_FILE))]
    for run in sorted(runs, key=lambda run: run.name, reverse=True):
        for name in (LAST, PREVIOUS):
            checkpoint = run / "checkpoints" / name
            if is_checkpoint(checkpoint) and run_of(checkpoint):
                return checkpoint.resolve()
    return None


def _read(path: Path) -> Any:
    try:
        return json.loads(small_text(path))
    except (OSError, ValueError, RecursionError):
        return None


def requeue(number: str) -> None:
    """Ask SLURM to run a job again. A failure is a warning, because the run is saved."""
    try:
        done = subprocess.run(["scontrol", "requeue", number], capture_output=True, text=True, check=False)
        failure = "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
    except OSError as error:
        failure = str(error)
    if failure:
        rank_zero_warn(f"SLURM did not requeue job {number} ({failure}): resume with --ckpt_path last")
    else:
        rank_zero_info(f"Requeued job {number}.")
