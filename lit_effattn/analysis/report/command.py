"""`lit-effattn report`: one HTML page about runs that loads nothing when it is opened."""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lit_effattn.analysis.report.page as html
from lit_effattn.analysis.compare import names_of, results
from lit_effattn.analysis.records import RunRecord, differences, read_config, read_run
from lit_effattn.analysis.report.attention import attention_pictures
from lit_effattn.analysis.report.samples import (
    OneSequence,
    filled_rows,
    first_sequence,
    recordings,
    records,
    rows,
    test_data,
    token_bits,
    write_predictions,
    write_samples,
)
from lit_effattn.analysis.tables import Table
from lit_effattn.checkpoints.printable import printable
from lit_effattn.checkpoints.runs import LAST, PREVIOUS, find_checkpoint, is_checkpoint, short
from lit_effattn.drawing.plots import Line
from lit_effattn.settings.defaults import split
from lit_effattn.settings.own_classes import add_trust
from lit_effattn.settings.run_names import ROOT
from lit_effattn.tasks import Task

_PICTURES_OF_TRAINING = 4
_UNREADABLE = (ValueError, OSError, RuntimeError, TypeError, ModuleNotFoundError, KeyError)
"""What reading a checkpoint or data, or running the model, may fail with: the page says why, and goes on."""


class Source(NamedTuple):
    """A run, and the checkpoint that its samples are of.

    Attributes:
        folder: The run.
        checkpoint: The file; None: it has none.
    """

    folder: Path
    checkpoint: Path | None


def report(args: list[str]) -> None:
    """Write a report.

    Args:
        args: The arguments of the command.

    Raises:
        ValueError: an argument is invalid, or a run can't be read.
        FileNotFoundError: there is no such run.
        FileExistsError: the page that `--output` names exists.
    """
    given = parser().parse_args(args)
    for name, value, least in (("samples", given.samples, 0), ("length", given.length, 2)):
        if value < least:
            raise ValueError(f"--{name} {value} must be at least {least}")
    sources = [find_run(name) for name in given.runs]
    output = _output(given.output, sources)
    runs = [read_run(source.folder, trust=given.trust) for source in sources]
    names = names_of([source.folder for source in sources])
    parts: list[str] = []
    if len(runs) > 1:
        parts += _side_by_side(names, runs)
    for source, name, run in zip(sources, names, runs, strict=True):
        print(printable(f"{name} …"))
        parts += [html.heading(2, name), *_scores(source, run), *(_curves(["run"], [run]) if len(runs) == 1 else [])]
        parts += _of_checkpoint(source, run, given.samples, given.length, given.trust)
        parts += [*_cost(run), *_configuration(source)]
    title = f"{names[0]}: report" if len(names) == 1 else f"Report on {len(names)} runs"
    print(f"report: {short(_write(html.page(title, parts), output))}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    made = argparse.ArgumentParser(
        "lit-effattn report",
        description="Write one HTML page about runs: configuration, curves, metrics, cost, samples, attention.",
        allow_abbrev=False,
    )
    made.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="The folder of a run, a checkpoint in it, `best` or `last` (of the newest run), or a configuration's name "
        "(its newest run).",
    )
    made.add_argument("--output", metavar="FILE", help="The page, a new file. Default: report.html in the run.")
    made.add_argument(
        "--samples", type=int, default=8, help="How many test items and drawn samples to show; 0: none. Default: 8."
    )
    made.add_argument(
        "--length", type=int, default=256, help="The most positions of which attention is drawn. Default: 256."
    )
    add_trust(made)
    return made


def find_run(name: str) -> Source:
    """Return the run that `name` names, and its checkpoint: that named, else the best, else the last.

    Args:
        name: A run's folder, a checkpoint in one, `best` or `last` of the newest run, or the name of the folder of a
            configuration's runs, whose newest is meant.

    Raises:
        ValueError: a checkpoint is in no run.
        FileNotFoundError: there is no such run.
    """
    path = Path(name)
    if is_checkpoint(path) or name in ("best", "last"):
        checkpoint = find_checkpoint(name, Path(ROOT), option="report")
        folder = checkpoint.parent.parent
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"{name} is not in the folder of a run; name a checkpoint in one, or its folder")
        return Source(folder, checkpoint)
    if not path.is_dir() and (Path(ROOT) / name).is_dir():
        path = find_checkpoint("last", Path(ROOT) / name, option="report").parent.parent
    if not path.is_dir():
        raise FileNotFoundError(
            f"report {name}: there is no such folder, nor runs of that name in {ROOT}; name a run's folder, a "
            "checkpoint, a configuration with runs, best, or last"
        )
    files = (path / "checkpoints" / file for file in ("best.ckpt", LAST, PREVIOUS))
    return Source(path, next((file for file in files if is_checkpoint(file)), None))


def _output(given: str | None, sources: Sequence[Source]) -> Path:
    """Return the file to write, which does not exist."""
    if given is not None:
        if Path(given).exists():
            raise FileExistsError(f"--output {given} exists; name another file, or delete it")
        return Path(given)
    folder = sources[0].folder if len(sources) == 1 else Path()
    names = (folder / f"report{f'_{i}' if i else ''}.html" for i in count())
    return next(path for path in names if not path.exists())


def _write(text: str, path: Path) -> Path:
    """Write a page beside its place, then move it there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


# --------------------------------------------------------------------------------------------- what was written of it


def _side_by_side(names: Sequence[str], runs: Sequence[RunRecord]) -> list[str]:
    settings = [
        [setting, *(None if value is None else _plain(value) for value in values)]
        for setting, values in differences(runs).items()
    ]
    differing = [html.heading(3, "Settings that differ"), html.table(Table("", ["setting", *names], settings))]
    return [
        html.heading(2, "Side by side"),
        html.table(results(names, runs)),
        *_curves(names, runs),
        *(differing if settings else []),
    ]


def _scores(source: Source, run: RunRecord) -> list[str]:
    """Return the last value of each metric: of test first, then of validation and training."""
    stages = ("test", "val", "train")
    final = sorted(run.final.items(), key=lambda entry: stages.index(entry[0].partition("/")[0]))
    parts = [html.paragraph(f"{source.folder.resolve().name}{f'; {run.remark}' if run.remark else ''}")]
    return [*parts, html.scores(dict(final)) if final else html.paragraph("No metrics were recorded.")]


def _configuration(source: Source) -> list[str]:
    changed, others = split(read_config(source.folder))
    titles = "setting", "value"
    values = [{name: _plain(value) for name, value in settings.items()} for settings in (changed, others)]
    parts = [html.heading(3, "Configuration"), html.paragraph("What differs from the defaults:")]
    parts += [html.pairs(values[0], titles)]
    if others:
        parts.append(html.details(f"{len(others)} settings as by default", html.pairs(values[1], titles)))
    return parts


def _cost(run: RunRecord) -> list[str]:
    length = "at any length" if run.state_length is None else f"after {run.state_length:,} positions"
    cost = {
        "parameters": run.parameters,
        f"bytes of state, {length}": run.state_bytes,
        "seconds a step, median": run.seconds_per_step,
        **run.peak_memory,
    }
    known = {name: value for name, value in cost.items() if value is not None}
    costs = html.pairs(known, ("cost", "value")) if known else html.paragraph("Not recorded.")
    return [html.heading(3, "Cost"), costs]


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _curves(names: Sequence[str], runs: Sequence[RunRecord]) -> list[str]:
    """Return a chart for each metric that changes, of training and validation together."""
    charts: dict[str, dict[str, Line]] = {}
    for name, run in zip(names, runs, strict=True):
        for metric, curve in run.curves.items():
            stage, _, of = metric.partition("/")
            if stage in ("train", "val") and (len(set(curve.values())) > 1 or len(curve) == 1):
                label = stage if len(runs) == 1 else f"{name} {stage}"
                charts.setdefault(of, {})[label] = (sorted(curve), [curve[step] for step in sorted(curve)])
    figures = [html.chart(metric, "step", lines) for metric, lines in charts.items()]
    return [html.heading(3, "Curves"), html.cards(figures, least="22rem")] if figures else []


# ------------------------------------------------------------------------------------------------------ what it can do


def _of_checkpoint(source: Source, run: RunRecord, n: int, length: int, trust: Sequence[str]) -> list[str]:
    """Return samples and attention pictures. What can't be had is a remark."""
    samples, attention = _while_training(source.folder) if n else [], []
    remarks: list[str] = []
    if source.checkpoint is None:
        remarks.append("The run has no checkpoint.")
    else:
        try:
            model = Task.load_from_checkpoint(source.checkpoint, map_location="cpu", trust=trust).eval()
        except _UNREADABLE as error:
            remarks.append(f"The checkpoint can't be read: {_first_line(error)}")
        else:
            data = None
            try:
                data = test_data(source.checkpoint, trust)
                carried = "MemoryCarry" in run.settings.values()
                sequence = first_sequence(model, data, length, carried=carried)
            except _UNREADABLE as error:
                remarks.append(f"No test data: {_first_line(error)}")
            else:
                attention = _attention(model, sequence)
            if n:
                samples += _samples(model, data, n, remarks)
                if data is not None:
                    samples += _tokens(model, sequence)
    parts = [html.heading(3, "Samples"), *samples, *map(html.paragraph, remarks)] if samples or remarks else []
    if source.checkpoint is not None and parts:
        parts.insert(1, html.paragraph(f"Of {source.checkpoint.name}."))
    return [*parts, *attention]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


def _while_training(folder: Path) -> list[str]:
    """Return some of the pictures that the run wrote while it was trained, the last among them."""
    # A link could lead to any file of the user, whose content would be in the page.
    found = sorted(path for path in (folder / "samples").glob("*.png") if not path.is_symlink())
    chosen = sorted({round(i * (len(found) - 1) / (_PICTURES_OF_TRAINING - 1)) for i in range(_PICTURES_OF_TRAINING)})
    figures = [html.figure([html.image(found[i].read_bytes(), found[i].stem)], found[i].stem) for i in chosen if found]
    return [html.heading(4, "Drawn while it was trained"), html.cards(figures, least="14rem")] if figures else []


def _samples(model: Task, data: Any, n: int, remarks: list[str]) -> list[str]:
    parts: list[str] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        if data is not None:
            try:
                batch = next(iter(data.test_dataloader()))
                batch = rows(batch, filled_rows(batch, n))
                write_predictions(model, batch, folder / "predicted")
                figures = [*_files(folder / "predicted", _heard(data, batch, remarks))]
                parts += [html.heading(4, "Test items"), html.cards(figures)]
            except _UNREADABLE as error:
                remarks.append(f"No predictions: {_first_line(error)}")
        try:
            remarks += write_samples(model, data, n, folder)
        except _UNREADABLE as error:
            remarks.append(f"Nothing drawn: {_first_line(error)}")
        figures = [figure for made in sorted(folder.glob("drawn_*")) for figure in _files(made, {})]
        if figures:
            parts += [html.heading(4, "Drawn from the model"), html.cards(figures)]
    return parts


def _heard(data: Any, batch: Any, remarks: list[str]) -> dict[str, bytes]:
    try:
        return recordings(data, batch)
    except _UNREADABLE as error:
        remarks.append(f"No recordings: {_first_line(error)}")
        return {}


def _files(folder: Path, heard: Mapping[str, bytes]) -> Iterator[str]:
    """Yield figures of what a task wrote: entries of predictions, with their pictures and recordings; tables; others.

    Args:
        folder: Where it wrote.
        heard: Recordings by the ids of entries.
    """
    shown = set()
    for path in sorted(folder.glob("*.jsonl")):
        for entry in records(path):
            picture, name = folder / entry.pop("picture", ""), next(iter(entry.values()), "")
            parts = [html.audio(heard[entry["id"]])] if entry.get("id") in heard else []
            parts.append(html.pairs(entry, ("", "")))
            if picture.is_file() and picture.parent == folder:
                shown.add(picture)
                parts.append(html.image(picture.read_bytes(), name))
            yield html.figure(parts)
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            header, *rows = csv.reader(file)
        yield html.figure([html.table(Table("", header, [list(map(_number, row)) for row in rows]))])
    for path in sorted(folder.glob("*.png")):
        if path not in shown:
            yield html.figure([html.image(path.read_bytes(), path.stem)], path.stem)
    for path in sorted(folder.glob("*.txt")):
        yield html.figure([html.text(path.read_text(encoding="utf-8"))], path.stem)


def _number(value: str) -> Any:
    with contextlib.suppress(ValueError):
        return int(value) if value.isdecimal() else float(value)
    return value


def _tokens(model: Any, sequence: OneSequence) -> list[str]:
    found = token_bits(model, sequence)
    if not found:
        return []
    mean = sum(bits for _, bits in found) / len(found)
    caption = f"−log₂ p of each: the stronger the colour, the less expected; {mean:.2f} bits on average"
    spaced = getattr(model, "tokenizer", None) is None
    return [html.heading(4, "Tokens of a test sequence"), html.figure([html.tokens(found, spaced=spaced)], caption)]


def _attention(model: Any, sequence: OneSequence) -> list[str]:
    parts = [html.heading(3, "Attention")]
    try:
        drawn = attention_pictures(model, lambda: model.objective(sequence.batch, sequence.memory))
    except _UNREADABLE as error:
        return [*parts, html.paragraph(f"Not drawn: {_first_line(error)}")]
    if not drawn:
        backbone = type(getattr(model, "backbone", model)).__name__
        return [*parts, html.paragraph(f"{backbone} has no attention weights to show.")]
    parts += [
        html.paragraph("Of the first test sequence, the first heads."),
        html.scale("Weights, in each row from 0", "to its largest"),
    ]
    for part in drawn:
        parts += [html.heading(4, f"{part.kind}, {part.name}"), html.paragraph(part.note)]
        figures = [
            html.figure([html.image(picture.png, picture.caption, exact=True)], picture.caption, kind="fill")
            for picture in part.pictures
        ]
        parts += [html.small_cards(figures)] if figures else []
    return parts
