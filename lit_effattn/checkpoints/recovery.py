"""Reading the checkpoint from which training resumes, or the previous one if it is damaged."""

from __future__ import annotations

import zipfile
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_effattn.checkpoints.files import DamagedError, damage
from lit_effattn.checkpoints.io import read_outline
from lit_effattn.checkpoints.runs import LAST, PREVIOUS, is_checkpoint, run_folders, short


def read_intact(checkpoint: Path, root: Path, *, training: bool, verify: bool) -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint without its tensors; if training resumes from a damaged `last.ckpt`, read `previous.ckpt`.

    Args:
        checkpoint: The checkpoint.
        root: The folder of the runs, whose intact checkpoints the message names.
        training: Whether training resumes from the checkpoint.
        verify: Whether all parts are verified. Processes that a command starts use the checkpoint that the command has
            read; processes that another program starts (torchrun) each verify the same files.

    Returns:
        The path of the checkpoint that was read, and its content.

    Raises:
        DamagedError: If the checkpoint is damaged. The message names intact ones.
    """
    previous = checkpoint.with_name(PREVIOUS)
    try:
        content = read_outline(checkpoint, verify=verify)
    except DamagedError as error:
        if training and checkpoint.name == LAST and is_checkpoint(previous):
            with suppress(DamagedError):
                content = read_outline(previous, verify=True)
                rank_zero_warn(f"{error}. {_resuming_from(previous, content)}")
                return previous, content
        candidates = [
            *checkpoint.parent.glob("*.ckpt"),
            *sorted((run / "checkpoints" / LAST for run in run_folders(root)), reverse=True),
        ]
        intact = filter(_is_intact, dict.fromkeys(path.resolve() for path in candidates))
        names = ", ".join(short(path) for path in islice(intact, 4))
        raise DamagedError(f"{error}; there are {names}" if names else str(error)) from error
    if checkpoint.name == PREVIOUS and training and not checkpoint.with_name(LAST).exists():
        rank_zero_warn(f"there is no {short(checkpoint.with_name(LAST))}. {_resuming_from(checkpoint, content)}")
    return checkpoint, content


def _is_intact(checkpoint: Path) -> bool:
    """Return whether a checkpoint can be read."""
    if checkpoint.is_dir():
        with suppress(ValueError, OSError):
            return bool(read_outline(checkpoint, verify=True))
        return False
    return zipfile.is_zipfile(checkpoint) and not damage(checkpoint)


def _resuming_from(previous: Path, content: dict[str, Any]) -> str:
    step = content.get("global_step")
    return f"Training goes on from {short(previous)}, saved at step {step}: later steps are trained again"
