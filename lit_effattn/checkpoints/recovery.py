"""Reading of the checkpoint from which training goes on, or the one before it if that is damaged."""

from __future__ import annotations

import zipfile
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lit_effattn.checkpoints.files import DamagedError, damage
from lit_effattn.checkpoints.io import read_outline
from lit_effattn.checkpoints.runs import LAST, PREVIOUS, is_checkpoint, short


def read_intact(checkpoint: Path, root: Path, *, training: bool, verify: bool) -> tuple[Path, dict[str, Any]]:
    """Read a checkpoint without its tensors; to go on with training, the one before it if `last.ckpt` is damaged.

    Args:
        checkpoint: The checkpoint.
        root: The folder of the runs, among which the message names others.
        training: Whether training goes on from it.
        verify: Whether all parts are verified. Processes that a command starts get its choice; those that another
            program starts (torchrun) each make it, from the same files.

    Returns:
        The checkpoint that was read, and its content.

    Raises:
        DamagedError: It is damaged; names what else there is.
    """
    previous = checkpoint.with_name(PREVIOUS)
    try:
        content = read_outline(checkpoint, verify=verify)
    except DamagedError as error:
        if training and checkpoint.name == LAST and is_checkpoint(previous):
            with suppress(DamagedError):
                content = read_outline(previous, verify=True)
                rank_zero_warn(f"{error}. {_goes_on_from(previous, content)}")
                return previous, content
        others = [*checkpoint.parent.glob("*.ckpt"), *sorted(root.rglob(f"checkpoints/{LAST}"), reverse=True)]
        others = list(dict.fromkeys(path.resolve() for path in others))
        whole = (path for path in others if _is_whole(path))
        there = ", ".join(short(path) for path in islice(whole, 4))
        there = f"; there are {there}" if there else ""
        raise DamagedError(f"{error}{there}") from error
    if checkpoint.name == PREVIOUS and training and not checkpoint.with_name(LAST).exists():
        rank_zero_warn(f"there is no {short(checkpoint.with_name(LAST))}. {_goes_on_from(checkpoint, content)}")
    return checkpoint, content


def _is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint can be read."""
    if checkpoint.is_dir():
        with suppress(ValueError, OSError):
            return bool(read_outline(checkpoint, verify=True))
        return False
    return zipfile.is_zipfile(checkpoint) and not damage(checkpoint)


def _goes_on_from(previous: Path, content: dict[str, Any]) -> str:
    step = content.get("global_step")
    return f"Training goes on from {short(previous)}, saved at step {step}: what came after it is trained again"
