"""The long-term memories of an ∞-former: the density of attention over them, and the loss by an update."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.experiments.recl import load, read_documents
from benchmarks.measuring import add_options
from benchmarks.report import Report, Row
from lit_effattn.attention import InfiniteAttention
from lit_effattn.datamodules import SortingTask
from lit_effattn.sequence import State
from lit_effattn.tasks import LanguageModel

_GRID = 1000  # times of [0, 1], as far apart as the narrowest density is wide
_PARTS = 10  # of [0, 1], in the table

NOTES = [
    "A stream of the test data is read, its last positions one by one. density: N(t; μ, σ²), the mean over these "
    "positions; t = 1 is the newest part of the signal, t = 0 the beginning of the stream.",
    "t .0–.1 …: the share of the attention, in %, on that part of the signal; beyond: outside of [0, 1], where the "
    "signal is 0. before τ: on the signal from before the last segment was written.",
    "old signal lost: ‖X̄' − X̄‖ / ‖X̄‖ over the samples of the last update, X̄ at their old times and X̄' at their new "
    "times on [0, τ]: t → τ t or, if sticky, the order of the quantiles. 0: nothing was lost.",
    "In the picture: on the left the density of each head; on the right the component of the signal that varies most, "
    "before the last update, at the new times of its samples, and after it.",
]


class Reading(NamedTuple):
    """Measurements of one layer while the last positions were read."""

    layer: str  # its name in the model
    attention: InfiniteAttention
    density: Tensor  # (H, _GRID), the mean over the positions
    before: Tensor  # (M, E), the samples of the signal before its last update
    after: Tensor  # (M, E), the signal after it at the new times of these samples
    signal: Tensor  # (_GRID, E), the signal after it at all times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ckpt_path", type=Path, required=True, help="an ∞-former on a TextStream or SortingTask")
    add_options(parser, tokens=(4096, "tokens of a text to read; a sorting task's sequence is read whole"))


@torch.no_grad()
def run(args: argparse.Namespace) -> Report:
    model, data = load(args.ckpt_path, args.device, "source", "n_types")
    if not _memories(model):
        raise ValueError(f"ckpt_path={args.ckpt_path}: no layer has a long-term memory; choose an ∞-former")
    tokens = _stream(data, args.tokens)
    readings = read(model, tokens.to(args.device))
    rows = [row for reading in readings for row in _rows(reading)]
    notes = [*NOTES, f"{len(tokens):,} tokens of the test data of {args.ckpt_path}."]
    return Report("longterm", rows, notes, partial(_plot, readings))


def _memories(model: LanguageModel) -> dict[str, InfiniteAttention]:
    named = model.backbone.named_modules()
    return {name: module for name, module in named if isinstance(module, InfiniteAttention) and module.n_basis}


def _stream(data: dict[str, Any], count: int) -> Tensor:
    """Return a sorting task's first test sequence, or the beginning of the first long enough text: (n,)."""
    if "n_types" in data:
        sequences = SortingTask(**{**data, "num_workers": 0}).sequences("test")
        return torch.cat([sequences[[0], i].inputs[0] for i in range(sequences.n_segments)])
    documents = read_documents(data)
    for document in documents:
        if len(document) >= count:
            return document[:count]
    raise ValueError(f"tokens={count}: the longest test document has {max(map(len, documents))}; read fewer")


class _Watch:
    """Notes the densities and updates of one layer, which reads one position at a time."""

    def __init__(self, attention: InfiniteAttention, like: Tensor) -> None:
        self.attention = attention
        self.times = (torch.arange(_GRID, device=like.device) + 0.5) / _GRID
        self.densities: list[Tensor] = []
        self.state: Any = None
        self.update: tuple[Any, Any] | None = None  # the states before and after the last one

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: tuple[Tensor, State]) -> None:
        before, self.state = self.state, output[1]
        if before is not None and not torch.equal(before.coefficients, self.state.coefficients):
            self.update = before, self.state
        self.densities.append(self.attention.density(args[0], self.state, self.times)[0, :, 0])  # (H, _GRID)

    def reading(self, layer: str, positions: int) -> Reading:
        attention = self.attention
        if self.update is None or not self.update[0].coefficients.any():
            delay = attention.mem_len if attention.writes == "evicted" else 0
            raise ValueError(
                f"the stream is too short to update the signal of {layer}: with mem_len={attention.mem_len} and "
                f"segment_len={attention.segment_len} this needs {delay + 2 * attention.segment_len + 1} tokens"
            )
        before, after = self.update
        old = attention.sample_times(before).reshape(-1)  # sticky ones have a row for each stream, here one
        new = (torch.arange(len(old), device=old.device) + 0.5) / len(old) * attention.tau
        return Reading(
            layer,
            attention,
            torch.stack(self.densities[-positions:]).mean(0),
            attention.signal(before, old)[0],
            attention.signal(after, new)[0],
            attention.signal(after, self.times)[0],
        )


@torch.no_grad()
def read(model: LanguageModel, tokens: Tensor, positions: int | None = None) -> list[Reading]:
    """Read `tokens` (n,), the last of them one by one, and return the measurements of each long-term memory.

    Args:
        model: The model, in evaluation mode.
        tokens: The tokens, enough to update every signal.
        positions: Number of the last positions over which densities are averaged. Default: a segment.

    Raises:
        ValueError: If there are too few tokens.
    """
    memories = _memories(model)
    step = max(attention.segment_len for attention in memories.values())
    positions = positions or step
    # Every signal is updated once in `step` positions; the state before the first of them is needed too.
    near = min(len(tokens), max(positions, step + 1))
    x = model.embedding_scale * model.embedding(tokens[None])  # (1, n, E)
    model.on_validation_start()
    try:
        state = None
        for segment in x[:, : len(tokens) - near].split(step, 1) if near < len(tokens) else ():
            _, state = model.backbone(segment, state)
        watches = {name: _Watch(attention, x) for name, attention in memories.items()}
        hooks = [memories[name].register_forward_hook(watch) for name, watch in watches.items()]
        try:
            for position in x[:, -near:].split(1, 1):
                _, state = model.backbone(position, state)
        finally:
            for hook in hooks:
                hook.remove()
        return [watch.reading(name, positions) for name, watch in watches.items()]
    finally:
        model.on_validation_end()


def _rows(reading: Reading) -> list[Row]:
    shares = reading.density / _GRID  # (H, _GRID), of all attention
    parts = shares.unflatten(1, (_PARTS, -1)).sum(2)  # (H, _PARTS)
    old = torch.arange(_GRID, device=shares.device) + 0.5 < reading.attention.tau * _GRID
    lost = float((reading.after - reading.before).norm() / reading.before.norm())
    return [
        {
            "layer": reading.layer,
            "head": head,
            **{f"t .{i}–{'1' if i + 1 == _PARTS else f'.{i + 1}'}": 100 * float(parts[head, i]) for i in range(_PARTS)},
            "beyond": 100 * max(0.0, 1 - float(shares[head].sum())),
            "before τ": 100 * float(shares[head, old].sum()),
            "old signal lost": lost,
        }
        for head in range(len(shares))
    ]


def _plot(readings: list[Reading], figure: Any) -> None:
    figure.set_size_inches(10, 0.6 + 2.2 * len(readings))
    panels = figure.subplots(len(readings), 2, squeeze=False, sharex=True)
    times = (torch.arange(_GRID) + 0.5) / _GRID
    for (left, right), reading in zip(panels, readings, strict=True):
        for head, density in enumerate(reading.density.cpu()):
            left.plot(times, density, label=f"head {head}")
        left.set_ylabel(reading.layer, fontsize="small")
        left.set_xlim(0, 1)
        number = int(reading.before.var(0).argmax())
        new = (torch.arange(len(reading.before)) + 0.5) / len(reading.before) * reading.attention.tau
        right.plot(times, reading.signal[:, number].cpu(), label="after")
        right.plot(new, reading.before[:, number].cpu(), "k--", linewidth=1, label="before, moved to [0, τ]")
        right.set_ylabel(f"number {number}", fontsize="small")
        for axes in (left, right):
            axes.axvline(reading.attention.tau, color="grey", linestyle=":")
    for column, title in enumerate(("density of attention", "signal, before and after an update")):
        panels[0, column].set_title(title)
        panels[0, column].legend(fontsize="small")
        panels[-1, column].set_xlabel("t")
