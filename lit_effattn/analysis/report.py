"""`lit-effattn report`: one HTML page about a run that loads nothing when it is opened."""

import argparse
import contextlib
import csv
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lit_effattn.analysis import page as html
from lit_effattn.analysis import report_samples
from lit_effattn.analysis.attention_pictures import attention_pictures
from lit_effattn.analysis.charts import charts
from lit_effattn.analysis.compare import names_of
from lit_effattn.analysis.records import RunRecord, read_config, read_run
from lit_effattn.analysis.tables import Table
from lit_effattn.checkpoints.files import whole
from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import LAST, PREVIOUS, find_checkpoint, is_checkpoint, output_folder, run_of, short
from lit_effattn.checkpoints.shipped import is_model
from lit_effattn.datamodules import TextStream
from lit_effattn.settings.defaults import split
from lit_effattn.settings.tools import ROOT, add_trust, tool_parser
from lit_effattn.tasks import Task

_PICTURES_OF_TRAINING = 4
_UNREADABLE = (ValueError, OSError, RuntimeError, TypeError, AttributeError, ModuleNotFoundError, LookupError)
"""Errors of reading a checkpoint or data, or of running the model. The page shows them as remarks."""


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(
        "report", "Write one HTML page about a run: configuration, curves, metrics, cost, samples, attention."
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help="The folder of a run, a checkpoint, `best` or `last` (of the newest run), a configuration's name (its "
        "newest run), or `model:NAME`, one of `lit-effattn models`.",
    )
    parser.add_argument("--output", metavar="FILE", help="The page, a new file. Default: report.html in the run.")
    parser.add_argument(
        "--samples", type=int, default=8, help="How many test items and drawn samples to show; 0: none. Default: 8."
    )
    parser.add_argument("--length", type=int, default=256, help="Most positions of attention pictures. Default: 256.")
    add_trust(parser)
    return parser


def report(args: list[str]) -> None:
    """Write a report.

    Raises:
        ValueError: If an argument is invalid, or the run can't be read.
        FileNotFoundError: If the run does not exist.
        FileExistsError: If the page that `--output` names exists.
    """
    options = _parser().parse_args(args)
    for name, value, least in (("samples", options.samples, 0), ("length", options.length, 2)):
        if value < least:
            raise ValueError(f"--{name} {value} must be at least {least}")
    folder, checkpoint = find_run(options.run)
    output = html_file(options.output, folder)
    run = read_run(folder, trust=options.trust)
    (name,) = names_of([folder])
    print(printable(f"{name} …"))
    parts = _of_record(folder, run)
    samples = _of_checkpoint(folder, checkpoint, run, options.samples, options.length, options.trust)
    with whole(output) as part:
        text = html.page(f"{name}: report", [*parts[0], *samples, *parts[1]])
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
    print(f"report: {short(output)}")


def find_run(name: str) -> tuple[Path, Path | None]:
    """Return the folder of a run, and its checkpoint, if any: the named one, else the best, else the last.

    The folder is the checkpoint itself if that is outside all runs. See `_parser` for the names.

    Raises:
        FileNotFoundError: If the run does not exist.
    """
    path = Path(name)
    if is_checkpoint(path) or name in ("best", "last") or is_model(name):
        checkpoint = find_checkpoint(name, Path(ROOT), option="report")
        return run_of(checkpoint) or checkpoint, checkpoint
    if not path.is_dir() and (Path(ROOT) / name).is_dir():
        path = find_checkpoint("last", Path(ROOT) / name, option="report").parent.parent
    if not path.is_dir():
        raise FileNotFoundError(
            f"report {name}: there is no such folder, nor runs of that name in {ROOT}; name a run's folder, a "
            "checkpoint, a configuration with runs, best, or last"
        )
    files = (path / "checkpoints" / file for file in ("best.ckpt", LAST, PREVIOUS))
    return path, next((file for file in files if is_checkpoint(file)), None)


def html_file(output: str | None, folder: Path) -> Path:
    """Return the file to write, which does not exist: `output`, else a new one in the run's folder."""
    if output is not None:
        if Path(output).exists():
            raise FileExistsError(f"--output {output} exists; name another file, or delete it")
        return Path(output)
    if is_checkpoint(folder):
        folder = output_folder(folder, Path(ROOT)) or folder.parent
    names = (folder / f"report{f'_{i}' if i else ''}.html" for i in count())
    return next(path for path in names if not path.exists())


def _of_record(folder: Path, run: RunRecord) -> tuple[list[str], list[str]]:
    """Return the parts of the page that need no model, before and after the samples."""
    stages = ("test", "val", "train")
    scores = sorted(run.final.items(), key=lambda entry: stages.index(entry[0].partition("/")[0]))
    remark = f"; {run.remark}" if run.remark else ""
    before = [html.note(Path(short(folder.resolve())).name + remark)]
    before.append(html.pairs(dict(scores), "metric", "last value") if scores else html.note("No metrics recorded."))
    before += charts(["run"], [run])
    length = "at any length" if run.state_length is None else f"after {run.state_length:,} positions"
    cost = {
        "parameters": run.parameters,
        f"bytes of state, {length}": run.state_bytes,
        "seconds a step, median": run.seconds_per_step,
        **run.peak_memory,
    }
    known = {name: value for name, value in cost.items() if value is not None}
    changed, defaults = (
        html.pairs({name: _plain(value) for name, value in settings.items()}, "setting", "value")
        for settings in split(read_config(folder))
    )
    return before, [
        html.heading("Cost"),
        html.pairs(known, "cost", "value") if known else html.note("Not recorded."),
        html.heading("Configuration"),
        html.note("What differs from the defaults:"),
        changed,
        f"<details><summary>settings as by default</summary>{defaults}</details>",
    ]


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _of_checkpoint(
    folder: Path, checkpoint: Path | None, run: RunRecord, n: int, length: int, trust: Sequence[str]
) -> list[str]:
    """Return samples and attention pictures, and a remark for each that is missing."""
    remarks: list[str] = []
    parts = html.cards("Drawn while it was trained", _training_pictures(folder) if n else [])
    attention: list[str] = []
    model = data = sequence = None
    if checkpoint is None:
        remarks.append("The run has no checkpoint.")
    else:
        with _remark(remarks, "The checkpoint can't be read"):
            model = Task.load_from_checkpoint(checkpoint, map_location="cpu", trust=trust)
    if checkpoint is not None and model is not None:
        with model.in_evaluation():
            with _remark(remarks, "No test data"):
                data = report_samples.test_data(checkpoint)
                callbacks = [name for name, value in run.settings.items() if value == "MemoryCarry"]
                carried = any(run.settings.get(f"{name}.evaluation", True) for name in callbacks)
                sequence = report_samples.first_sequence(model, data, length, carried=carried)
            if n:
                parts += _samples(model, data, n, remarks)
            if sequence is not None:
                if n and (scored := report_samples.token_bits(model, sequence)):
                    tokens = html.token_bits(scored, spaced=getattr(model, "tokenizer", None) is None)
                    parts += [html.heading("Tokens of a test sequence", 3), tokens]
                attention = _attention(model, sequence)
    of = [html.note(f"Of {checkpoint.name}.")] if checkpoint is not None else []
    return [html.heading("Samples"), *of, *parts, *map(html.note, remarks), *attention]


@contextlib.contextmanager
def _remark(remarks: list[str], subject: str) -> Iterator[None]:
    """Add the first line of an error to `remarks` in place of raising it."""
    try:
        yield
    except _UNREADABLE as error:
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        remarks.append(f"{subject}: {reason}")


def _training_pictures(folder: Path) -> list[str]:
    """Return some of the pictures that the run wrote during training, including the last."""
    paths = sorted((folder / "samples").glob("*.png"))  # `read_run` has refused links to files elsewhere
    chosen = sorted({round(i * (len(paths) - 1) / (_PICTURES_OF_TRAINING - 1)) for i in range(_PICTURES_OF_TRAINING)})
    return [html.image(paths[i].read_bytes(), paths[i].stem) for i in chosen if paths]


def _samples(model: Task, data: Any, n: int, remarks: list[str]) -> list[str]:
    """Return what the model predicts for the first test items, and samples drawn from it."""
    parts: list[str] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        if data is not None:
            with _remark(remarks, "No predictions"):
                batch = next(iter(data.test_dataloader()))
                batch = report_samples.rows(batch, report_samples.filled_rows(batch, n))
                (folder / "predicted").mkdir()
                with torch.no_grad():
                    predicted = model.predict_step(batch)
                # A row of a text is a part of a document, or has several; `predict` scores whole ones.
                if not isinstance(data, TextStream) or "offset" not in predicted:
                    model.write_predictions([predicted], folder / "predicted")
                    parts += html.cards("Test items", list(output_figures(folder / "predicted")))
        with _remark(remarks, "Nothing drawn"):
            remarks += report_samples.write_samples(model, data, n, folder)
        samples = [figure for drawn in sorted(folder.glob("drawn_*")) for figure in output_figures(drawn)]
        return parts + html.cards("Drawn from the model", samples)


def output_figures(folder: Path) -> Iterator[str]:
    """Yield figures of what a task wrote into `folder`: predictions with their pictures, tables, pictures, texts."""
    shown = set()
    for path in sorted(folder.glob("*.jsonl")):
        for entry in report_samples.records(path):
            picture, name = folder / entry.pop("picture", ""), next(iter(entry.values()), "")
            values = html.pairs(entry, "", "")
            is_file = picture.is_file() and picture.parent == folder
            yield html.image(picture.read_bytes(), name, values) if is_file else html.figure(values)
            shown.add(picture)
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            header, *lines = csv.reader(file)
        yield html.figure(html.table(Table("", header, [list(map(_number, line)) for line in lines])))
    yield from (html.image(path.read_bytes(), path.stem) for path in sorted(folder.glob("*.png")) if path not in shown)
    for path in sorted(folder.glob("*.txt")):
        yield html.figure(f"<pre>{html.text(path.read_text(encoding='utf-8'))}</pre>", caption=path.stem)


def _number(value: str) -> Any:
    with contextlib.suppress(ValueError):
        return int(value) if value.isdecimal() else float(value)
    return value


def _attention(model: Any, sequence: report_samples.OneSequence) -> list[str]:
    remarks: list[str] = []
    parts = [html.heading("Attention")]
    with _remark(remarks, "Not drawn"):
        drawn = attention_pictures(model, lambda: model.hidden(sequence.batch, sequence.memory))
        scale = '<p class="quiet">Weights, in each row from 0 <span class="scale"></span> to its largest</p>'
        parts += [html.note("Of the first test sequence, the first heads."), scale] if drawn else []
        for module in drawn:
            figures = [html.image(picture.png, picture.caption) for picture in module.pictures]
            parts += html.cards(f"{module.kind}, {module.name}", figures, "small") or [html.note(module.kind)]
            parts.append(html.note(module.note))
        if not drawn:
            remarks.append(f"{type(getattr(model, 'backbone', model)).__name__} has no attention weights to show.")
    return parts + list(map(html.note, remarks))
