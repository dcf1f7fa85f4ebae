"""`lit-effattn report`: one HTML page about runs that loads nothing when it is opened."""

from __future__ import annotations

import argparse
import contextlib
import csv
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

import lit_effattn.analysis.report.page as html
from lit_effattn.analysis.compare import names_of, results
from lit_effattn.analysis.records import RunRecord, differences, read_config, read_run
from lit_effattn.analysis.report.attention import Drawn, attention_pictures
from lit_effattn.analysis.report.samples import (
    OneSequence,
    filled_rows,
    first_sequence,
    recordings,
    records,
    rows,
    test_data,
    token_bits,
    write_samples,
)
from lit_effattn.analysis.tables import Table
from lit_effattn.checkpoints.files import whole
from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import LAST, PREVIOUS, find_checkpoint, is_checkpoint, output_folder, short
from lit_effattn.checkpoints.shipped import is_model
from lit_effattn.drawing.plots import Line
from lit_effattn.settings.defaults import split
from lit_effattn.settings.own_classes import add_trust
from lit_effattn.settings.parsers import tool_parser
from lit_effattn.settings.run_names import ROOT
from lit_effattn.tasks import Task

_PICTURES_OF_TRAINING = 4
_UNREADABLE = (ValueError, OSError, RuntimeError, TypeError, ModuleNotFoundError, KeyError)
"""Errors of reading a checkpoint or data, or of running the model. The page shows them as remarks."""


class Source(NamedTuple):
    """The folder of a run, and its checkpoint, if any, from which the samples are drawn.

    `folder` is the checkpoint itself if it is outside all runs.
    """

    folder: Path
    checkpoint: Path | None


def _parser() -> argparse.ArgumentParser:
    """Return the parser of `report`."""
    parser = tool_parser(
        "report", "Write one HTML page about runs: configuration, curves, metrics, cost, samples, attention."
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="The folder of a run, a checkpoint, `best` or `last` (of the newest run), a configuration's name (its "
        "newest run), or `model:NAME`, one of `lit-effattn models`.",
    )
    parser.add_argument("--output", metavar="FILE", help="The page, a new file. Default: report.html in the run.")
    parser.add_argument(
        "--samples", type=int, default=8, help="How many test items and drawn samples to show; 0: none. Default: 8."
    )
    parser.add_argument(
        "--length", type=int, default=256, help="Draw attention for at most so many positions. Default: 256."
    )
    add_trust(parser)
    return parser


def report(args: list[str]) -> None:
    """Write a report.

    Args:
        args: The arguments of the command.

    Raises:
        ValueError: If an argument is invalid, or a run can't be read.
        FileNotFoundError: If a run does not exist.
        FileExistsError: If the page that `--output` names exists.
    """
    options = _parser().parse_args(args)
    for name, value, least in (("samples", options.samples, 0), ("length", options.length, 2)):
        if value < least:
            raise ValueError(f"--{name} {value} must be at least {least}")
    sources = [find_run(name) for name in options.runs]
    output = _output(options.output, sources)
    runs = [read_run(source.folder, trust=options.trust) for source in sources]
    names = names_of([source.folder for source in sources])
    sections = []
    for source, name, run in zip(sources, names, runs, strict=True):
        print(printable(f"{name} …"))
        samples = _of_checkpoint(source, run, options.samples, options.length, options.trust)
        sections.append({"name": name, **_of_record(source, run, curves=len(runs) == 1), **samples})
    title = f"{names[0]}: report" if len(names) == 1 else f"Report on {len(names)} runs"
    text = html.macro("page", title, _comparison(names, runs) if len(runs) > 1 else None, sections)
    with whole(output) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
    print(f"report: {short(output)}")


def find_run(name: str) -> Source:
    """Return a run and its checkpoint: the named one, else the best, else the last.

    Args:
        name: A run's folder, a checkpoint, `best` or `last` of the newest run, the folder name of a configuration's
            runs, for the newest of them, or `model:NAME`.

    Raises:
        FileNotFoundError: If the run does not exist.
    """
    path = Path(name)
    if is_checkpoint(path) or name in ("best", "last") or is_model(name):
        checkpoint = find_checkpoint(name, Path(ROOT), option="report")
        folder = checkpoint.parent.parent
        return Source(folder if (folder / "config.yaml").is_file() else checkpoint, checkpoint)
    if not path.is_dir() and (Path(ROOT) / name).is_dir():
        path = find_checkpoint("last", Path(ROOT) / name, option="report").parent.parent
    if not path.is_dir():
        raise FileNotFoundError(
            f"report {name}: there is no such folder, nor runs of that name in {ROOT}; name a run's folder, a "
            "checkpoint, a configuration with runs, best, or last"
        )
    files = (path / "checkpoints" / file for file in ("best.ckpt", LAST, PREVIOUS))
    return Source(path, next((file for file in files if is_checkpoint(file)), None))


def _output(output: str | None, sources: Sequence[Source]) -> Path:
    """Return the file to write, which does not exist."""
    if output is not None:
        if Path(output).exists():
            raise FileExistsError(f"--output {output} exists; name another file, or delete it")
        return Path(output)
    folder = sources[0].folder if len(sources) == 1 else Path()
    if folder.is_file():
        folder = output_folder(folder, Path(ROOT)) or folder.parent
    names = (folder / f"report{f'_{i}' if i else ''}.html" for i in count())
    return next(path for path in names if not path.exists())


# ---------------------------------------------------------------------------------------------------------- the record


def _comparison(names: Sequence[str], runs: Sequence[RunRecord]) -> dict[str, Any]:
    settings = [
        [setting, *(None if value is None else _plain(value) for value in values)]
        for setting, values in differences(runs).items()
    ]
    return {
        "results": results(names, runs),
        "charts": _charts(names, runs),
        "settings": Table("", ["setting", *names], settings),
    }


def _of_record(source: Source, run: RunRecord, *, curves: bool) -> dict[str, Any]:
    """Return the parts of the page that need no model. Scores are ordered: test, validation, training."""
    stages = ("test", "val", "train")
    changed, defaults = (
        html.pairs({name: _plain(value) for name, value in settings.items()}, "setting", "value")
        for settings in split(read_config(source.folder))
    )
    length = "at any length" if run.state_length is None else f"after {run.state_length:,} positions"
    cost = {
        "parameters": run.parameters,
        f"bytes of state, {length}": run.state_bytes,
        "seconds a step, median": run.seconds_per_step,
        **run.peak_memory,
    }
    return {
        "folder": Path(short(source.folder.resolve())).name,
        "remark": run.remark,
        "scores": dict(sorted(run.final.items(), key=lambda entry: stages.index(entry[0].partition("/")[0]))),
        "charts": _charts(["run"], [run]) if curves else [],
        "cost": html.pairs({name: value for name, value in cost.items() if value is not None}, "cost", "value"),
        "changed": changed,
        "defaults": defaults,
    }


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _charts(names: Sequence[str], runs: Sequence[RunRecord]) -> list[html.Chart]:
    """Return a chart for each metric that changes, of training and validation together."""
    lines: dict[str, dict[str, Line]] = {}
    for name, run in zip(names, runs, strict=True):
        for metric, curve in run.curves.items():
            stage, _, quantity = metric.partition("/")
            if stage in ("train", "val") and (len(set(curve.values())) > 1 or len(curve) == 1):
                label = stage if len(runs) == 1 else f"{name} {stage}"
                lines.setdefault(quantity, {})[label] = (sorted(curve), [curve[step] for step in sorted(curve)])
    charts = (html.chart(quantity, "step", of_quantity) for quantity, of_quantity in lines.items())
    return [chart for chart in charts if chart is not None]


# ------------------------------------------------------------------------------------------------------- the checkpoint


def _of_checkpoint(source: Source, run: RunRecord, n: int, length: int, trust: Sequence[str]) -> dict[str, Any]:
    """Return samples and attention pictures, and a remark for each that is missing."""
    remarks: list[str] = []
    section: dict[str, Any] = {
        "checkpoint": source.checkpoint and source.checkpoint.name,
        "training": _training_pictures(source.folder) if n else [],
        **dict.fromkeys(("predictions", "samples", "tokens", "attention")),
        "remarks": remarks,
    }
    if source.checkpoint is None:
        remarks.append("The run has no checkpoint.")
        return section
    model = data = sequence = None
    with _remark(remarks, "The checkpoint can't be read"):
        model = Task.load_from_checkpoint(source.checkpoint, map_location="cpu", trust=trust).eval()
    if model is None:
        return section
    with _remark(remarks, "No test data"):
        data = test_data(source.checkpoint)
        sequence = first_sequence(model, data, length, carried="MemoryCarry" in run.settings.values())
    if n:
        section |= _samples(model, data, n, remarks)
    if sequence is not None:
        section["attention"] = _attention(model, sequence)
        section["tokens"] = _tokens(model, sequence) if n else None
    return section


@contextlib.contextmanager
def _remark(remarks: list[str], subject: str) -> Iterator[None]:
    """Add the first line of an error to `remarks` in place of raising it."""
    try:
        yield
    except _UNREADABLE as error:
        reason = (str(error).strip() or type(error).__name__).partition("\n")[0]
        remarks.append(f"{subject}: {reason}")


def _training_pictures(folder: Path) -> list[html.Figure]:
    """Return some of the pictures that the run wrote during training, including the last."""
    # A link could lead to any file of the user, whose content would be in the page.
    paths = sorted(path for path in (folder / "samples").glob("*.png") if not path.is_symlink())
    chosen = sorted({round(i * (len(paths) - 1) / (_PICTURES_OF_TRAINING - 1)) for i in range(_PICTURES_OF_TRAINING)})
    return [_picture(paths[i]) for i in chosen if paths]


def _picture(path: Path) -> html.Figure:
    return html.Figure(image=path.read_bytes(), description=path.stem, caption=path.stem)


def _samples(model: Task, data: Any, n: int, remarks: list[str]) -> dict[str, Any]:
    predictions: list[html.Figure] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        if data is not None:
            with _remark(remarks, "No predictions"):
                batch = next(iter(data.test_dataloader()))
                batch = rows(batch, filled_rows(batch, n))
                (folder / "predicted").mkdir()
                with torch.no_grad():
                    model.write_predictions([model.predict_step(batch)], folder / "predicted")
                audio: dict[str, bytes] = {}
                with _remark(remarks, "No recordings"):
                    audio = recordings(data, batch)
                predictions = list(_figures(folder / "predicted", audio))
        with _remark(remarks, "Nothing drawn"):
            remarks += write_samples(model, data, n, folder)
        samples = [figure for drawn in sorted(folder.glob("drawn_*")) for figure in _figures(drawn, {})]
    return {"predictions": predictions, "samples": samples}


def _figures(folder: Path, audio: Mapping[str, bytes]) -> Iterator[html.Figure]:
    """Yield figures of a task's output: predictions with their pictures and recordings, tables, pictures, texts.

    Args:
        folder: The folder to which the task wrote.
        audio: Recordings by the ids of predictions.
    """
    shown = set()
    for path in sorted(folder.glob("*.jsonl")):
        for entry in records(path):
            picture, name = folder / entry.pop("picture", ""), next(iter(entry.values()), "")
            image = picture.read_bytes() if picture.is_file() and picture.parent == folder else None
            shown.add(picture)
            yield html.Figure(audio.get(entry.get("id", "")), html.pairs(entry, "", ""), image, name)
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            header, *lines = csv.reader(file)
        yield html.Figure(table=Table("", header, [list(map(_number, line)) for line in lines]))
    yield from (_picture(path) for path in sorted(folder.glob("*.png")) if path not in shown)
    for path in sorted(folder.glob("*.txt")):
        yield html.Figure(text=path.read_text(encoding="utf-8"), caption=path.stem)


def _number(value: str) -> Any:
    with contextlib.suppress(ValueError):
        return int(value) if value.isdecimal() else float(value)
    return value


def _tokens(model: Any, sequence: OneSequence) -> dict[str, Any] | None:
    scored = token_bits(model, sequence)
    if not scored:
        return None
    mean = sum(token.bits for token in scored) / len(scored)
    caption = f"−log₂ p of each: the stronger the colour, the less expected; {mean:.2f} bits on average"
    return {"scored": scored, "caption": caption, "spaced": getattr(model, "tokenizer", None) is None}


def _attention(model: Any, sequence: OneSequence) -> dict[str, Any]:
    remarks: list[str] = []
    drawn: list[Drawn] = []
    with _remark(remarks, "Not drawn"):
        drawn = attention_pictures(model, lambda: model.objective(sequence.batch, sequence.memory))
    if not drawn and not remarks:
        remarks.append(f"{type(getattr(model, 'backbone', model)).__name__} has no attention weights to show.")
    return {"drawn": drawn, "remark": "".join(remarks)}
