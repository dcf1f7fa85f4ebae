"""`lit-effattn export`: write a checkpoint's model for other programs."""

import argparse
from pathlib import Path

from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.checkpoints.loading import load_model
from lit_effattn.checkpoints.runs import find_checkpoint, output_folder, short
from lit_effattn.interchange import export as exporting
from lit_effattn.settings.tools import add_root, add_trust, tool_parser
from lit_effattn.tasks.base import Task


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(
        "export",
        "Write a checkpoint's model for other programs. onnx and torch: a streaming step, whose state is an input and "
        "an output. safetensors: the weights and the model, which all commands read as a checkpoint.",
    )
    parser.add_argument(
        "--ckpt_path",
        default="best",
        help="A checkpoint: its path, last or best of the newest run, or model:NAME. Default: best.",
    )
    parser.add_argument("--format", choices=exporting.SUFFIXES, default="onnx", help="Default: onnx.")
    parser.add_argument("--output", metavar="FILE", help="Default: in the folder `exported` of the run.")
    parser.add_argument("--max_len", type=int, help="Most positions of a stream, for attention that keeps them all.")
    parser.add_argument("--batch_size", type=int, default=1, help="Rows of a step. Default: 1.")
    parser.add_argument(
        "--check",
        type=int,
        default=exporting.CHECKED,
        metavar="N",
        help="Steps to compare with PyTorch before the file is written. Default: %(default)s.",
    )
    parser.add_argument(
        "--dtype",
        choices=exporting.DTYPES,
        help="safetensors: type of the floating-point weights. Default: as they are. float16 halves the file.",
    )
    parser.add_argument(
        "--normalize",
        choices=["running"],
        help="running: the step of a recogniser normalises by mean and variance of the sound so far, for one that was "
        "trained with normalize: utterance or speaker. Default: as in training.",
    )
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing file.")
    add_root(parser)
    add_trust(parser)
    return parser


def export(args: list[str]) -> None:
    """Export a checkpoint.

    Raises:
        FileNotFoundError: If there is no such checkpoint.
        FileExistsError: If the file exists, and --overwrite is not given.
        ValueError: If the model can't be exported in this format: see `lit_effattn.interchange.export.export`.
    """
    given = _parser().parse_args(args)
    checkpoint = find_checkpoint(given.ckpt_path, Path(given.root))
    target = Path(given.output) if given.output else _target(checkpoint, Path(given.root), given.format)
    content = read_checkpoint(checkpoint)
    done = exporting.export(
        load_model(Task, checkpoint, map_location="cpu", trust=given.trust, content=content),
        target,
        format=given.format,
        max_len=given.max_len,
        batch_size=given.batch_size,
        check=given.check,
        overwrite=given.overwrite,
        saved=content,
        dtype=given.dtype,
        normalize=given.normalize,
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
