"""The folder that a command writes to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only

from lit_effattn.checkpoints.runs import LAST, PREVIOUS, check_contained, new_run, output_folder, short
from lit_effattn.settings.resume import is_child
from lit_effattn.settings.run_names import ROOT

RUN = "LIT_EFFATTN_RUN"
"""Environment variable with the folder of the run, set for the processes that DDP starts."""


def run_folder(command: str, checkpoint: Path | None, root: Path) -> tuple[Path, bool]:
    """Return the folder that this process writes to, and whether it was created for a new run.

    Training from the last checkpoint of a run resumes that run, and scoring and sampling write into the run of their
    checkpoint. Otherwise a new run begins.
    """
    if RUN in os.environ and is_child():
        return Path(os.environ[RUN]), False
    folder = output_folder(checkpoint, root) if checkpoint else None
    is_new = checkpoint is None or folder is None or (command == "fit" and checkpoint.name not in (LAST, PREVIOUS))
    if folder is None or is_new:
        # If another program (torchrun) started all processes, the first creates the folder; only it writes.
        folder = new_run(root, Path(ROOT)) if is_first() else root / "of another process"
    elif command != "fit":
        folder.mkdir(parents=True, exist_ok=True)  # of a shipped model
        folder = _writable(check_contained(folder))
    else:
        check_contained(folder)
    os.environ[RUN] = str(folder)
    return folder, is_new and is_first()


def is_first() -> bool:
    """Return whether this is process 0: Lightning sets it from what launchers put in the environment."""
    return getattr(rank_zero_only, "rank", 0) == 0


def _writable(run: Path) -> Path:
    """Return the folder of a run if it is writable, else one in the current folder with the run's name."""
    try:
        with tempfile.TemporaryFile(dir=run):
            return run
    except OSError as error:
        other = Path.cwd() / f"{run.parent.name}_{run.name}"
        other.mkdir(exist_ok=True)
        rank_zero_info(f"{short(run)} can't be written to ({error.strerror}): results go to {short(other)}")
        return other
