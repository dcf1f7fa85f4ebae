"""The files of `lit-effattn predict`: what `predict_step` returned, as lines of JSON or CSV, with pictures beside them.

The functions named `write_…` are the methods `write_predictions` of tasks. Each writes the results of all batches into
a folder, and returns a message for the user.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lit_effattn.checkpoints.printable import table_cell
from lit_effattn.checkpoints.runs import short
from lit_effattn.drawing.images import attention_map, confusion_matrix, recognised

PICTURES = 4
"""Number of items of the first batch for which `predict` draws a picture."""

PICTURED_CLASSES = 64
"""Maximum number of classes of a confusion matrix: the picture has 20 pixels a class."""

_SHOWN = 10
"""Number of translations that `predict` prints."""


def write_lines(path: Path, entries: Iterable[Any]) -> Path:
    """Write a line of JSON for each entry."""
    # A file's name may not be UTF-8. JSON's escapes \udc… then encode the same name.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    return path


def write_table(path: Path, header: Iterable[str], rows: Iterable[Iterable[Any]]) -> Path:
    """Write a CSV file. Texts are changed by `table_cell`, so that a spreadsheet does not calculate them."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows([table_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    return path


def write_items(task: Any, predictions: list[Any], folder: Path) -> str:
    """Write `predictions.csv`, a row for each item, from dictionaries of tensors (B,): see `_files`."""
    rows = [row for batch in predictions for row in zip(*(v.tolist() for v in batch.values()), strict=True)]
    header, files = ["index", *predictions[0]], _files(task)
    path = folder / "predictions.csv"
    write_table(path, header + ["file"] * bool(files), ((i, *r, *files[i : i + 1]) for i, r in enumerate(rows)))
    return f"scores of {len(rows)} items: {short(path)}"


def _files(task: Any) -> list[str]:
    """Return the files of the items in their order, the last column, if the trainer's data module knows them."""
    return getattr(getattr(task._trainer, "datamodule", None), "test_files", [])


# Documents

Figure = Callable[[float], float]
"""Makes a figure of the mean of what is summed."""


def of_positions(scored: Tensor, offsets: Tensor | None, **values: Tensor) -> dict[str, np.ndarray]:
    """Return what `write_documents` needs of a batch.

    Args:
        scored: (B, N), True at the positions that are scored.
        offsets: (B, N): see `TokenBatch`.
        values: (T,) each, a value for each scored position.
    """
    columns = {**values, "row": scored.nonzero()[:, 0]}
    if offsets is not None:
        columns["offset"] = offsets[scored]
    return {name: c.detach().cpu().numpy() for name, c in columns.items()} | {"rows": np.array([len(scored)])}


def write_documents(predictions: list[Any], path: Path, trainer: Any, figures: Mapping[str, tuple[str, Figure]]) -> str:
    """Write a CSV file with a line for each document, whatever the rows and segments of the batches.

    A line has the document's index, its title in the data, if any (the header in FASTA), the number of its scored
    positions, and the figures. Without offsets in the batches, or data that know them, a row counts as a document.

    Args:
        predictions: What `of_positions` returned of each batch.
        path: The file.
        trainer: The trainer, whose data module may know the documents: `documents_at`; or None.
        figures: Names, each with the name of the values that are averaged, and a function of the mean.
    """
    columns = {name: np.concatenate([batch[name] for batch in predictions]) for name in predictions[0]}
    rows, titles = columns["rows"], list[str]()
    index = columns["row"] + np.repeat(np.cumsum(rows) - rows, [len(batch["row"]) for batch in predictions])
    n_documents = int(rows.sum())
    documents_at = getattr(getattr(trainer, "datamodule", None), "documents_at", None)
    if "offset" in columns and documents_at is not None:
        index, n_documents, titles = documents_at("test", columns["offset"])
    counts = np.bincount(index, minlength=n_documents).tolist()
    sums = {name: np.bincount(index, columns[name], minlength=n_documents) for name, _ in figures.values()}

    def made(i: int, n: int) -> list[Any]:
        values = (f"{figure(sums[name][i] / n):.6g}" if n else "" for name, figure in figures.values())
        return [i, *titles[i : i + 1], n, *values]

    header = ["index", *(["title"] if titles else []), "targets", *figures]
    write_table(path, header, (made(i, n) for i, n in enumerate(counts)))
    return f"scores of {n_documents} documents: {short(path)}"


# Classes


def write_classes(task: Any, predictions: list[Any], folder: Path) -> str:
    """Write `predictions.csv` and, if the labels are known, `confusion.png`: see `Task.write_predictions`.

    A line has the sequence's index, the likeliest class, its probability, and the label and the file, if they are
    known. The picture is drawn for at most `PICTURED_CLASSES` classes.
    """
    columns = {name: torch.cat([batch[name].cpu() for batch in predictions]) for name in predictions[0]}
    classes, labels = columns["class"], columns.get("label")
    indices = columns.get("index", torch.arange(len(classes)))
    names = {"class": classes} if labels is None else {"class": classes, "label": labels}
    files = _files(task)

    def row(i: int) -> list[Any]:
        predicted, *label = (task.classes[int(numbers[i])] for numbers in names.values())
        index = int(indices[i])
        return [index, predicted, round(float(columns["probability"][i]), 6), *label, *files[index : index + 1]]

    header = ["index", "class", "probability", *[*names][1:], *["file"] * bool(files)]
    path = write_table(folder / "predictions.csv", header, map(row, indices.argsort().tolist()))
    message = f"classes of {len(classes)} sequences: {short(path)}"
    if labels is None or len(task.classes) > PICTURED_CLASSES:
        return message
    counts = torch.zeros(len(task.classes), len(task.classes), dtype=torch.long)
    counts.index_put_((labels.long(), classes), torch.ones_like(classes), accumulate=True)
    picture = confusion_matrix(counts, list(task.classes), folder / "confusion.png")
    return f"{message}\nconfusion matrix (rows: labels; columns: the model's classes): {short(picture)}"


# Texts


class Translation(NamedTuple):
    """The outputs for a source.

    Attributes:
        number: The index of the source in the file or the split.
        entry: The line of `translations.jsonl`: see `SequenceToSequence.predict_step`.
        weights: (N, S), the attention of the best output to the source, to be drawn. None: not drawn.
        outputs: N tokens of the best output.
        sources: S tokens of the source.
    """

    number: int
    entry: dict[str, Any]
    weights: Tensor | None
    outputs: list[str]
    sources: list[str]


def write_translations(task: Any, predictions: list[Any], folder: Path) -> str:
    """Write `translations.jsonl`, a line a source in the order of the file, and pictures of the first batch.

    See `Task.write_predictions`. The message begins with the first translations.
    """
    translations: list[Translation] = sorted((t for batch in predictions for t in batch), key=lambda t: t.number)
    shown = [
        f"{t.entry['source']}: {output['text']}" for t in translations[:_SHOWN] for output in t.entry["outputs"][:1]
    ]
    return "\n".join([*shown, write_outputs(translations, folder)])


def write_outputs(translations: Sequence[Translation], folder: Path) -> str:
    """Write translations and their pictures, and return a message."""
    drawn = [t for t in translations if t.weights is not None]
    for i, (_, entry, weights, outputs, sources) in enumerate(drawn, 1):
        assert weights is not None
        entry["picture"] = f"attention_{i}.png"
        attention_map(weights, outputs, sources, folder / entry["picture"])
    path = write_lines(folder / "translations.jsonl", (t.entry for t in translations))
    return f"{len(translations)} translations: {short(path)}\npictures beside them: {len(drawn)}"


def write_responses(predictions: Iterable[Sequence[Any]], folder: Path) -> str:
    """Write `responses.jsonl`, a line a response in the order of the split, from pairs of a `Response` and a text."""
    written = sorted((pair for batch in predictions for pair in batch), key=lambda pair: pair[0].number)
    entries = ({"number": r.number, "response": text, "reference": r.text} for r, text in written)
    return f"{len(written)} responses: {short(write_lines(folder / 'responses.jsonl', entries))}"


# Speech


class Transcript(NamedTuple):
    """The phones recognised in an utterance.

    Attributes:
        entry: The line of `transcripts.jsonl`: see `SpeechRecognizer.predict_step`.
        features: (T, F), to be drawn. None: not drawn.
        probabilities: (T', V), of the labels at each frame, to be drawn. None: not drawn.
    """

    entry: dict[str, Any]
    features: Tensor | None = None
    probabilities: Tensor | None = None


def write_transcripts(task: Any, predictions: list[Any], folder: Path) -> str:
    """Write `transcripts.jsonl`, a line an utterance, sorted by id, and pictures: see `Task.write_predictions`.

    The pictures are of the first batch, which has the longest utterances; their names are in the lines.
    """
    transcripts: list[Transcript] = [transcript for batch in predictions for transcript in batch]
    transcripts.sort(key=lambda transcript: transcript.entry["id"])
    labels, pictures = ["blank", *task.phones], 0
    how: Any = {"factor": task.front_end.factor, "frame_seconds": task.frame_seconds}
    for entry, features, probabilities in transcripts:
        if features is not None and probabilities is not None:
            pictures += 1
            entry["picture"] = f"utterance_{pictures}.png"
            recognised(features, probabilities, labels, folder / entry["picture"], **how)
    path = write_lines(folder / "transcripts.jsonl", (transcript.entry for transcript in transcripts))
    return f"transcripts of {len(transcripts)} utterances: {short(path)}\npictures beside them: {pictures}"
