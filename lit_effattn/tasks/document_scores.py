"""Scores of the documents of a test: sums over their positions, whatever the rows and segments of the batches."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lit_effattn.checkpoints.printable import table_cell
from lit_effattn.checkpoints.runs import short

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
    """Write a CSV file with a line for each document, and return a message.

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
    counts = np.bincount(index, minlength=n_documents)
    sums = {name: np.bincount(index, columns[name], minlength=n_documents) for name, _ in figures.values()}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["index", *(["title"] if titles else []), "targets", *figures])
        for i, n in enumerate(counts.tolist()):
            made = [f"{figure(sums[name][i] / n):.6g}" if n else "" for name, figure in figures.values()]
            writer.writerow([i, *([table_cell(titles[i])] if titles else []), n, *made])
    return f"scores of {n_documents} documents: {short(path)}"
