"""`lit-effattn export`: write a checkpoint's model for other programs."""

from __future__ import annotations

from pathlib import Path

from lit_effattn.checkpoints.io import read_outline
from lit_effattn.checkpoints.runs import find_checkpoint, output_folder, short
from lit_effattn.interchange import export as exporting
from lit_effattn.settings import parsers
from lit_effattn.tasks.base import Task


def export(args: list[str]) -> None:
    """Export a checkpoint.

    Args:
        args: The arguments of the command.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        FileExistsError: If the file exists, and --overwrite is not given.
        ValueError: If the model can't be exported in this format: see `lit_effattn.interchange.export.export`.
    """
    given = parsers.export().parse_args(args)
    checkpoint = find_checkpoint(given.ckpt_path, Path(given.root))
    target = Path(given.output) if given.output else _target(checkpoint, Path(given.root), given.format)
    done = exporting.export(
        Task.load_from_checkpoint(checkpoint, map_location="cpu", trust=given.trust),
        target,
        format=given.format,
        max_len=given.max_len,
        batch_size=given.batch_size,
        check=given.check,
        overwrite=given.overwrite,
        saved=read_outline(checkpoint),
        dtype=given.dtype,
        normalize=given.normalize,
        operators=given.operators,
    )
    print(f"{given.format}: {short(done.path)}")
    if done.checked:
        program = "onnxruntime" if given.format == "onnx" else "the program"
        print(
            f"{done.checked:,} {done.unit}s compared with PyTorch: largest difference {done.difference:.1e}; {program} "
            f"takes {1e3 * done.seconds:.2f} ms a {done.unit}, the model {1e3 * done.seconds_here:.2f} ms"
        )
    if done.prompt_seconds is not None:
        print(f"all but the last in one call, as a prompt, compared too: {1e3 * done.prompt_seconds:.2f} ms")


def _target(checkpoint: Path, root: Path, format: str) -> Path:
    """Return the default file: in the folder `exported` of a run, or beside a checkpoint outside all runs."""
    folder = output_folder(checkpoint, root)
    folder = checkpoint.parent if folder is None else folder / "exported"
    return folder / (checkpoint.stem + exporting.SUFFIXES[format])
