"""`lit-effattn data`: the folders of a run's data, their content, and a few samples, before hours of training."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile
from lightning.pytorch import LightningDataModule
from torch import Tensor

from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import named_or_new, short
from lit_effattn.cli.parser import Parser
from lit_effattn.datamodules import IGNORE, LabelledBatch, PairBatch, SpeechBatch, TokenBatch
from lit_effattn.datamodules.common.files import walk
from lit_effattn.datamodules.text.tokenizers import Tokenizer
from lit_effattn.drawing import images as pictures
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.building import build_data
from lit_effattn.settings.resume import SECTIONS
from lit_effattn.settings.tools import ROOT, TRUST

N_SAMPLES = 3
N_IMAGES = 16
_SHOWN = 300  # characters of a text


def show_data(arguments: Arguments, parser: Parser) -> None:
    """Print a description of the data of a configuration. Other sections of files are ignored.

    Raises:
        UsageError: If a setting is invalid.
        ValueError: If no data are named, or they are invalid.
        FileNotFoundError: If they are missing.
    """
    parser.add_argument("--config", action=ActionConfigFile)
    parser.add_subclass_arguments(LightningDataModule, "data")
    parser.add_argument("--output", type=str | None, default=None, help="Folder for the pictures. Default: a new one.")
    parser.add_argument("--trust", type=list[str] | None, default=None, metavar="NAME", help=TRUST)
    parser.ignore(["name", "ckpt_path", *sorted(SECTIONS - {"data"})])
    config = parser.parse(arguments.for_parser(root=None)[1:], arguments)
    if not config.get("data"):
        raise ValueError("no data are named: give --config NAME_OR_FILE, or --data CLASS")
    for line in describe(build_data(config.data), None if config.output is None else Path(config.output)):
        print(printable(line))


def describe(data: LightningDataModule, output: Path | None) -> Iterator[str]:
    """Prepare the data and yield lines about them. They print the sizes of their splits themselves."""
    for path in getattr(data, "places", ()):
        yield f"{path.resolve()}: {_content(path)}"
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    yield "the first training batch: " + ", ".join(_shapes(batch))
    yield from _samples(data, batch, output)
    data.setup("test")


def _content(path: Path) -> str:
    if not path.exists():
        return "missing"
    files = walk(path).files if path.is_dir() else [path]
    size = sum(p.stat().st_size for p in files)
    return f"{len(files):,} file{'s' * (len(files) != 1)}, {size / 1e6:,.1f} MB"


def _shapes(batch: Any) -> Iterator[str]:
    named = batch._asdict() if hasattr(batch, "_asdict") else {type(batch).__name__: batch}
    for name, value in named.items():
        if isinstance(value, Tensor):
            yield f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _samples(data: Any, batch: Any, output: Path | None) -> Iterator[str]:
    if isinstance(batch, PairBatch):
        for source, references in list(zip(batch.sources, batch.references, strict=True))[:N_SAMPLES]:
            yield f"{_quoted(source)} -> {' | '.join(_quoted(target) for target in references)}"
    elif isinstance(batch, SpeechBatch):
        folder = named_or_new(output, Path(ROOT), "data")
        for i in range(min(N_SAMPLES, len(batch.ids))):
            features = batch.features[i, : batch.lengths[i]]  # (B, T, F) -> (T, F)
            phones = " ".join(data.phones[label - 1] for label in batch.phones[i, : batch.phone_lengths[i]].tolist())
            path = pictures.filterbank(features, phones, folder / f"utterance_{i + 1}.png")
            yield f"{batch.ids[i]}: {len(features) * data.frame_seconds:.2f} s: {phones}: {short(path)}"
    elif isinstance(batch, TokenBatch):
        spec = getattr(data, "tokenizer", None)
        tokenizer = None if spec is None else Tokenizer.from_spec(spec)
        for i, row in enumerate(batch.targets[:N_SAMPLES]):
            ids = row[row != IGNORE].tolist()
            inputs = batch.inputs[i] if batch.lengths is None else batch.inputs[i, : batch.lengths[i]]
            numbers = [" ".join(map(str, tokens))[:_SHOWN] for tokens in (inputs.tolist(), ids)]
            yield " -> ".join(numbers) if tokenizer is None else _quoted(tokenizer.decode(ids))
    elif isinstance(batch, Tensor | LabelledBatch) and hasattr(data, "to_images"):
        levels, labels = (batch.x, batch.labels) if isinstance(batch, LabelledBatch) else (batch, None)
        folder = named_or_new(output, Path(ROOT), "data")
        path = pictures.save_png(pictures.grid(data.to_images(levels[:N_IMAGES])), folder / "images.png")
        names = "" if labels is None else f" of {', '.join(data.classes[i] for i in labels[:N_IMAGES].tolist())}"
        yield f"{min(len(levels), N_IMAGES)} images{names}: {short(path)}"
    elif isinstance(batch, LabelledBatch) and batch.labels is not None and hasattr(data, "decode"):
        for tokens, label in zip(_sequences(batch), batch.labels[:N_SAMPLES].tolist(), strict=False):
            yield f"{_quoted(data.decode(tokens))} -> {_quoted(data.classes[label])}"


def _sequences(batch: LabelledBatch) -> Iterator[Tensor]:
    """Yield the sequences of a batch, of which a row may hold several."""
    for i, row in enumerate(batch.x):
        valid = row if batch.lengths is None else row[: batch.lengths[i]]
        starts = [] if batch.starts is None else batch.starts[i].nonzero()[1:, 0].tolist()
        yield from valid.tensor_split(starts)


def _quoted(text: str) -> str:
    """Return a text in quotes, with escapes for control characters."""
    shown = json.dumps(text[:_SHOWN], ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in shown)
