"""`lit-effattn consolidate`: put the parts of a checkpoint that several processes have written into one file."""

from __future__ import annotations

from pathlib import Path

from lit_effattn.checkpoints.io import AtomicCheckpointIO, read_checkpoint
from lit_effattn.checkpoints.runs import find_checkpoint, short
from lit_effattn.settings import parsers


def consolidate(args: list[str]) -> None:
    """Write a checkpoint as one file, as a run without `save_distributed_checkpoint` does.

    Args:
        args: The arguments of the command.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        FileExistsError: If the file exists.
        ValueError: If the checkpoint is a file, or damaged.
    """
    given = parsers.consolidate().parse_args(args)
    checkpoint, target = find_checkpoint(given.checkpoint, Path(given.root), option="consolidate"), Path(given.file)
    if checkpoint.is_file():
        raise ValueError(f"{short(checkpoint)} is one file: there is nothing to consolidate")
    if target.exists():
        raise FileExistsError(f"{target} exists; name another file")
    AtomicCheckpointIO().save_checkpoint(read_checkpoint(checkpoint), target)
    print(f"{short(checkpoint)} is in one file, {target} ({target.stat().st_size:,} bytes)")
