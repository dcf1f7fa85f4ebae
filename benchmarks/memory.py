"""What generation has to remember: bytes of the state and the process's peak, by length."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from benchmarks.measuring import MIB, Spread, in_fresh_process, interleaved, reset_peak, resident_peak
from benchmarks.models import KINDS, MNIST, SMALL, Size, add_model_arguments, at_least, build
from benchmarks.report import Report, Row
from lit_effattn.generation import generate
from lit_effattn.sequence import SequenceModule, State, nbytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTES = [
    "state: bytes of all tensors of the state after the last token was drawn, counted, not computed by formula.",
    "peak: of resident memory (CUDA: of the allocator) in a fresh process while it draws; grown: above what it held "
    "before the first token, weights and libraries included. Median (min–max) over the rounds, in which the "
    "attentions take turns; ratios are taken round by round.",
]


class Probe(NamedTuple):
    """What drawing one batch took, in bytes; None where the system does not tell."""

    state: int
    before: int | None
    peak: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, lengths=[256, 512, 1024, 2048, 4096], repeats=3)
    parser.add_argument("--batch_size", type=at_least(1), default=1, help="images at once; default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    size = SMALL if args.small else MNIST  # the same at every length: it is the length that is varied
    lengths = sorted(args.lengths)
    probes = {length: _probes(length, size, args) for length in lengths}
    rows = [
        _row(length, kind, size, probes[length], shortest=probes[lengths[0]]) for length in lengths for kind in KINDS
    ]
    return Report("memory", rows, NOTES, lambda figure: _plot(figure, probes))


def _probes(length: int, size: Size, args: argparse.Namespace) -> dict[str, list[Probe]]:
    def probed(kind: str) -> Probe:
        return in_fresh_process(partial(probe, kind, length, size, args.batch_size, args.device), __name__)

    measures = {kind: partial(probed, kind) for kind in KINDS}
    return interleaved(f"memory, length {length}", measures, args.repeats)


def probe(kind: str, length: int, size: Size, batch_size: int, device: torch.device) -> Probe:
    """Draw `batch_size` images of `length` tokens, and say what it took."""
    model = build(kind, length, size, device).eval()
    prompt = torch.full((batch_size, 1), model.n_levels, device=device)
    generate(model.backbone, model.embedding, model.head, prompt, 4)  # what is allocated once, whatever the length
    watched = Watched(model.backbone)
    before = reset_peak(device)
    generate(watched, model.embedding, model.head, prompt, length)
    return Probe(nbytes(watched.state), before, None if before is None else resident_peak(device))


class Watched(SequenceModule):
    """A backbone that shows the state after its last call."""

    def __init__(self, backbone: SequenceModule) -> None:
        super().__init__()
        self.d_input, self.d_model, self.causal = backbone.d_input, backbone.d_model, backbone.causal
        self.backbone = backbone
        self.state: State = None

    def forward(self, x: Tensor, state: State = None, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """See `SequenceModule.forward`."""
        y, self.state = self.backbone(x, state, lengths)
        return y, self.state

    def initial_state(
        self,
        batch_size: int,
        *,
        max_len: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """Return the backbone's: see `SequenceModule.initial_state`."""
        return self.backbone.initial_state(batch_size, max_len=max_len, device=device, dtype=dtype)


def _row(length: int, kind: str, size: Size, probes: dict[str, list[Probe]], shortest: dict[str, list[Probe]]) -> Row:
    state = probes[kind][0].state
    peak, linear_peak = _spread(probes[kind], "peak"), _spread(probes["linear"], "peak")
    return {
        "length": length,
        "model": str(size),
        "attention": kind,
        "state, bytes": state,
        "÷ at the shortest length": state / shortest[kind][0].state,
        "÷ linear's": state / probes["linear"][0].state,
        "grown, MiB": _spread(probes[kind], "grown"),
        "peak, MiB": peak,
        "peak ÷ linear's": None if peak is None or linear_peak is None else peak / linear_peak,
    }


def _spread(probes: list[Probe], what: str) -> Spread | None:
    samples = [(p.peak if what == "peak" else p.peak - p.before) / MIB for p in probes if p.peak and p.before]
    return Spread(tuple(samples)) if len(samples) == len(probes) else None


def _plot(figure: Figure, probes: dict[int, dict[str, list[Probe]]]) -> None:
    axes = figure.subplots()
    for kind in KINDS:
        axes.loglog(list(probes), [of[kind][0].state for of in probes.values()], "o-", label=kind, base=2)
    axes.set(xlabel="tokens drawn", ylabel="state, bytes")
    axes.legend()
