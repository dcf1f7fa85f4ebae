"""Samples of a report: predictions for a few test items, and samples drawn from the model."""

import contextlib
import io
import json
import math
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor

from lit_effattn.checkpoints.own_runs import own_config
from lit_effattn.checkpoints.runs import short
from lit_effattn.datamodules import IGNORE, LabelledBatch, PairBatch, SpeechBatch, TokenBatch
from lit_effattn.datamodules.text.tokenizers import Tokenizer
from lit_effattn.sequence import State
from lit_effattn.settings.building import build_data
from lit_effattn.tasks import Task
from lit_effattn.tasks.options import ImageOptions, TextOptions

N_TEXTS, N_TOKENS = 2, 300  # largest number of texts that are drawn, and the tokens of each
N_SCORED = 600  # largest number of tokens that are shown with their bits


class OneSequence(NamedTuple):
    """One sequence of the test data."""

    whole: Any  # a batch of this sequence only
    batch: Any  # the same, without padding and cut to the positions that are drawn
    memory: State | None  # the state after the preceding segments, if the run carried memory; else None


def test_data(checkpoint: Path) -> pl.LightningDataModule:
    """Build the data of the run of a checkpoint, ready for test.

    Raises:
        ValueError: If the run is not the user's or has no data, or the data are invalid.
        OSError: If the data are missing.
    """
    config = own_config(checkpoint)
    if config is None or not config.get("data"):
        raise ValueError(f"{short(checkpoint)} is not of a run of yours, which would name its data")
    data = build_data(config["data"])
    data.prepare_data()
    data.setup("test")
    return data


def rows(batch: Any, indices: Sequence[int]) -> Any:
    """Return rows of a batch: a tensor, or a tuple, list or NamedTuple of tensors and lists."""
    if batch is None or isinstance(batch, Tensor):
        return batch if batch is None else batch[list(indices)]
    fields = [[field[i] for i in indices] if isinstance(field, list) else rows(field, indices) for field in batch]
    return type(batch)(*fields) if hasattr(batch, "_fields") else type(batch)(fields)


def filled_rows(batch: Any, n: int | None = None) -> list[int]:
    """Return the first `n` rows that have a position. A short text leaves rows of a stream's batch empty."""
    if (lengths := getattr(batch, "lengths", None)) is not None:
        return [i for i, length in enumerate(lengths) if length > 0][:n]
    fields = batch if isinstance(batch, (tuple, list)) else [batch]
    return list(range(len(next(field for field in fields if field is not None))))[:n]


@torch.no_grad()
def first_sequence(model: Task, data: Any, length: int, *, carried: bool) -> OneSequence:
    """Return the first sequence of `test_data`, cut to `length` positions of the model.

    If evaluations of the run `carried` memory over the segments of a stream, it is the first segment with at least
    `length` positions before it, or the last.

    Raises:
        ValueError: If all rows of the first batch are empty.
    """
    loader = iter(data.test_dataloader())
    first = next(loader)
    if not (row := filled_rows(first, 1)):
        raise ValueError("the first test batch has no positions")
    batches = (rows(batch, row) for batch in chain([first], loader))
    batch, memory, seen = next(batches), None, 0
    if carried and isinstance(batch, TokenBatch):
        task: Any = model
        backbone = task.active_backbone  # with `eval_window`, a `SlidingWindow`
        memory = backbone.initial_state(1)
        for following in batches:
            if seen >= length or not filled_rows(following):  # the stream has ended
                break
            memory = task.hidden(batch, memory)[1]
            seen += batch.inputs.size(1)
            batch = following
            if batch.fresh is not None and bool(batch.fresh[0]):
                memory = backbone.initial_state(1)
        if batch.starts is not None and bool(batch.starts[0, 0]):  # the cut sequence is read without `starts`
            memory = backbone.initial_state(1)
    factor = int(getattr(getattr(model, "front_end", None), "factor", 1))  # feature vectors per position
    return OneSequence(batch, _cut(batch, length * factor), memory)


def _cut(batch: Any, length: int) -> Any:
    """Return a batch of one row without padding, cut to `length` positions."""
    if isinstance(batch, Tensor):
        return batch[:, :length]
    if isinstance(batch, SpeechBatch):
        n = min(length, int(batch.lengths[0]))
        return batch._replace(features=batch.features[:, :n], lengths=torch.tensor([n]))
    if isinstance(batch, PairBatch):
        m, n = min(length, int(batch.source_lengths[0])), min(length, int(batch.lengths[0]))
        source, lengths = batch.source[:, :m], torch.tensor([n])
        cut = batch._replace(source=source, source_lengths=torch.tensor([m]), lengths=lengths)
        return cut._replace(inputs=batch.inputs[:, :n], targets=batch.targets[:, :n])
    one: Any = batch if isinstance(batch, TokenBatch | LabelledBatch) else LabelledBatch(*batch)
    names = ("inputs", "targets", "offsets") if isinstance(one, TokenBatch) else ("x",)
    fields: dict[str, Tensor] = {name: field for name in names if (field := getattr(one, name)) is not None}
    n = min(length, fields[names[0]].size(1) if one.lengths is None else int(one.lengths[0]))
    if one.starts is not None:  # to the next sequence of the row
        n = min([n, *(int(i) for i in one.starts[0].nonzero()[:, 0] if i > 0)])
    return one._replace(**{name: field[:, :n] for name, field in fields.items()}, lengths=None, starts=None)


@torch.no_grad()
def token_bits(model: Any, sequence: OneSequence) -> list[tuple[str, float]]:
    """Return the scored tokens of a sequence, each with its bits; empty unless the sequence has tokens."""
    batch = sequence.whole
    if not isinstance(batch, TokenBatch) or not hasattr(model, "sample"):
        return []
    bits = model(batch, sequence.memory)[0] / math.log(2)  # (N,)
    spec = getattr(model, "tokenizer", None)
    tokenizer = None if spec is None else Tokenizer.from_spec(spec)
    scored = batch.targets[0] != IGNORE
    pairs = zip(batch.targets[0, scored].tolist(), bits[scored].tolist(), strict=True)
    return [
        (str(token) if tokenizer is None else tokenizer.decode([token]), value)
        for token, value in islice(pairs, N_SCORED)
    ]


@torch.no_grad()
def write_samples(model: Any, data: Any, n: int, folder: Path) -> list[str]:
    """Write unconditional samples, and completed images of `test_data`, as `generate` does, into new folders.

    Nothing is written if the model needs more than its data to generate.

    Returns:
        A remark for each kind of sample that could not be drawn.
    """
    kind = model.generation
    if kind not in (TextOptions, ImageOptions):
        return []
    options: list[Any] = [
        TextOptions(n=min(n, N_TEXTS), n_tokens=N_TOKENS) if kind is TextOptions else ImageOptions(n=n)
    ]
    if kind is ImageOptions and data is not None:
        options.append(ImageOptions(n=n, complete=0.5))
    remarks = []
    for i, own in enumerate(options):
        target = folder / f"drawn_{i}"
        target.mkdir()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                model.write_samples(lambda target=target: target, own, datamodule=data)
        except ValueError as error:
            remarks.append(f"Not drawn: {error}")
    return remarks


def records(path: Path) -> list[dict[str, str]]:
    """Return the first 50 entries of a `.jsonl` file of predictions, as texts by their names.

    Lists are joined by spaces. An object is represented by its first value.
    """
    with path.open(encoding="utf-8") as file:  # `splitlines` would also divide a line at U+2028, which JSON may hold
        return [{name: _plain(value) for name, value in json.loads(line).items()} for line in islice(file, 50)]


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return _plain(next(iter(value.values()), ""))
    return " ".join(map(_plain, value)) if isinstance(value, list) else str(value)
