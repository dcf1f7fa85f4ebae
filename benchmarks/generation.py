"""Images a second: linear attention's state against softmax with a key/value cache and without one."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import Spread, interleaved, now, seconds_of
from benchmarks.models import IMAGES, Size, add_model_arguments, at_least, build, random_levels, size_for
from benchmarks.report import Report, Row
from lit_effattn import PixelModel
from lit_effattn.generation import draw, generate, room_for
from lit_effattn.sequence import SequenceModule, State, select

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINEAR, CACHED, RECOMPUTED = "linear, state", "softmax, key/value cache", "softmax, no cache"
COMPILED = {f"{method}, compiled": method for method in (LINEAR, CACHED)}

PAPER = {
    784: {LINEAR: 1, CACHED: 142.8 / 7.56, RECOMPUTED: 317},
    3072: {LINEAR: 1, CACHED: 17.85 / 0.32, RECOMPUTED: 4462},
}
"""Images/s of linear attention over the others', from Katharopoulos et al. 2020, tables 1 and 2 and the supplement."""

WINDOW = 16
"""Tokens timed in a window."""

WARM_UP = 2
"""Tokens before a window that are not timed."""

ROWS = 32
"""Images at once without a cache, whose steps are as large as the prefix."""

NOTES = [
    "ms/token: one step, which draws one token of every image of the batch. Figures are median (min–max) over the "
    "rounds, in which the methods take turns; ratios are taken round by round.",
    f"no cache: the whole prefix is computed again for every token, as in the paper's softmax baseline. Of a batch of "
    f"more than {ROWS} images, {ROWS} at a time, and one time is measured.",
    "compiled: a step is one program of torch.compile, on CUDA one graph. What compiling takes, once for a number of "
    "images at once, is not in the figures.",
    "integrated: not run as a whole. The cost of a token was measured at the number of places given, spread evenly "
    "over the sequence, interpolated linearly between them and summed over all tokens; of a cost that grows as the "
    "prefix's square that is too much, by 1 % with 8 places.",
    "key/value cache: on a CPU a token looks at the slots filled so far, on CUDA at all slots of the image, for shapes "
    "are final there: its cost does not rise along the image, and is that of the last token from the first one on. "
    "Compiled, it looks at all slots of a cache with room for 256 tokens at first, and for twice as many when full.",
    "the paper's: this ratio in Katharopoulos et al. 2020, on their GPU, with models of 8 (MNIST) and 16 (CIFAR-10) "
    "layers, 8 heads, E 256, and batches of their choice: another machine, and not a target.",
]


class Curve(NamedTuple):
    """What a token costs, by how many stand before it and itself, and what all of them cost."""

    prefixes: Sequence[float]
    seconds: Sequence[float]
    total: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, lengths=[784, 3072], repeats=3)
    parser.add_argument(
        "--batch_sizes", type=at_least(1), nargs="+", default=[1, 32], help="images at once; default: %(default)s"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="also compiled steps; each takes seconds to a minute to compile"
    )
    parser.add_argument(
        "--windows",
        type=at_least(2),
        help=f"integrate state and cache from this many windows of {WINDOW} tokens; default: whole runs",
    )
    parser.add_argument(
        "--prefixes", type=at_least(2), default=8, help="prefixes at which no cache is measured; default: %(default)s"
    )


def run(args: argparse.Namespace) -> Report:
    rows: list[Row] = []
    curves: dict[str, dict[str, Curve]] = {}
    for length in args.lengths:
        size = size_for(length, args.small)
        methods = _Methods(length, size, args)
        for batch_size in args.batch_sizes:
            title = f"length {length}, batch {batch_size}"
            results = interleaved(f"generation, {title}", methods.measures(batch_size), args.repeats)
            rows += _rows(length, size, batch_size, results, args)
            curves[title] = {method: _median_curve(rounds) for method, rounds in results.items()}
    return Report("generation", rows, NOTES, lambda figure: _plot(figure, curves))


def integrate(prefixes: Sequence[float], seconds: Sequence[float], length: int) -> float:
    """Return the cost of the tokens 1 … `length`, from samples: linear between them, constant beyond the outermost."""
    return float(np.interp(np.arange(1, length + 1), prefixes, seconds).sum())


class Continued(SequenceModule):
    """A backbone whose every stream begins behind a prefix.

    So `generate` can draw tokens deep in an image without drawing all before them. A prefix is computed once, for one
    row, which `initial_state` copies. One module for all prefixes, so that it is compiled for all of them.

    Args:
        backbone: Does the work.
    """

    def __init__(self, backbone: SequenceModule) -> None:
        super().__init__()
        self.d_input, self.d_model, self.causal = backbone.d_input, backbone.d_model, backbone.causal
        self.backbone = backbone
        self.state: State = None

    @torch.no_grad()
    def behind(self, prefix: Tensor, max_len: int) -> State:
        """Return what `state` has to be to begin behind `prefix` (1, P, d_input), P may be 0.

        Args:
            prefix: Embedded.
            max_len: The most positions that will ever be fed, the prefix included.
        """
        state = self.backbone.initial_state(1, max_len=max_len)
        return self.backbone(prefix, state)[1] if prefix.size(1) else state

    def forward(self, x: Tensor, state: State = None, lengths: Tensor | None = None) -> tuple[Tensor, State]:
        """See `SequenceModule.forward`."""
        return self.backbone(x, state, lengths)

    def initial_state(
        self,
        batch_size: int,
        *,
        max_len: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """Return copies of the state after the prefix, which already has its room."""
        return select(self.state, torch.zeros(batch_size, dtype=torch.long))


class Stopwatch:
    """Wraps the steps of `generate`, notes the time before those in `marks` (ascending), and ends it at the last."""

    def __init__(self, marks: list[int], device: torch.device) -> None:
        self.marks = marks
        self.device = device
        self.times: list[float] = []

    def __call__(self, steps: Iterable[int]) -> Iterator[int]:
        """Yield the steps before the last mark."""
        for step in steps:
            self._note(step)
            if step == self.marks[-1]:
                return
            yield step
        self._note(self.marks[-1])

    def _note(self, step: int) -> None:
        if step in self.marks:
            self.times.append(now(self.device))

    @property
    def seconds(self) -> list[float]:
        """Between each two marks."""
        return np.diff(self.times).tolist()


class _Methods:
    """The three ways to draw images of one size, each on models that are made once."""

    def __init__(self, length: int, size: Size, args: argparse.Namespace) -> None:
        self.length = length
        self.args = args
        self.models = {
            LINEAR: build("linear", length, size, args.device).eval(),
            CACHED: build("softmax", length, size, args.device).eval(),
        }
        self.tokens = random_levels(1, length, args.device)
        self.window = min(WINDOW, length - WARM_UP)
        if args.compiled:
            self.models |= {compiled: self.models[method] for compiled, method in COMPILED.items()}
        self.continued = {method: Continued(model.backbone) for method, model in self.models.items()}
        starts = [] if args.windows is None else _evenly(0, length - WARM_UP - self.window, args.windows)
        self.states = {method: [self._state(method, start) for start in starts] for method in self.models}

    def _state(self, method: str, start: int) -> State:
        """Return the state of an image's first `start` tokens, with the room that it has there."""
        end = start + WARM_UP + self.window
        room = room_for(end, self.length + 1) if method in COMPILED else self.length + 1
        return self.continued[method].behind(self.models[method].embedding(self.tokens[:, :start]), room)

    def measures(self, batch_size: int) -> dict[str, Callable[[], Curve]]:
        """Return what measures each method once."""
        drawn = self._whole if self.args.windows is None else self._windows
        softmax, middle = self.models[CACHED], self.tokens[:, : (self.length + 1) // 2]
        for method in (LINEAR, CACHED):  # the first calls are slow
            self._draw(method, self.models[method].backbone, batch_size, [0, WARM_UP])
        if self.args.compiled:
            for method in COMPILED:  # for each room by itself
                drawn(method, batch_size)
        _draw_one(softmax, middle.expand(min(ROWS, batch_size), -1))
        measures = {method: partial(drawn, method, batch_size) for method in self.models}
        return measures | {RECOMPUTED: lambda: self._recomputed(softmax, batch_size)}

    def _whole(self, method: str, batch_size: int) -> Curve:
        marks = _evenly(0, self.length, 33)
        seconds = self._draw(method, self.models[method].backbone, batch_size, marks)
        tokens = np.diff(marks)
        centres = marks[:-1] + (tokens + 1) / 2  # step 0 has a prefix of 1
        return Curve(centres.tolist(), (np.array(seconds) / tokens).tolist(), sum(seconds))

    def _windows(self, method: str, batch_size: int) -> Curve:
        prefixes, costs, continued = [], [], self.continued[method]
        for state in self.states[method]:
            continued.state = state
            marks = [WARM_UP, WARM_UP + self.window]
            (seconds,) = self._draw(method, continued, batch_size, marks)
            # (B,) positions, all equal, and the middle of the window behind them
            prefixes.append(int(state.length[0]) + WARM_UP + (self.window + 1) / 2)
            costs.append(seconds / self.window)
        return Curve(prefixes, costs, integrate(prefixes, costs, self.length))

    def _recomputed(self, model: PixelModel, batch_size: int) -> Curve:
        prefixes, costs = _evenly(1, self.length, self.args.prefixes), []
        rows = min(ROWS, batch_size)
        for prefix in prefixes:
            tokens = self.tokens[:, :prefix].repeat(rows, 1)  # (1, P) -> (B, P)
            costs.append(seconds_of(partial(_draw_one, model, tokens), self.args.device) * batch_size / rows)
        return Curve(prefixes, costs, integrate(prefixes, costs, self.length))

    def _draw(self, method: str, backbone: SequenceModule, batch_size: int, marks: list[int]) -> list[float]:
        """Return the seconds between the steps `marks` of drawing images, from one prompt token on."""
        model, watch, compiled = self.models[method], Stopwatch(marks, self.args.device), method in COMPILED
        prompt = self.tokens[:, :1].repeat(batch_size, 1)  # (1, 1) -> (B, 1)
        # All steps of an image, for the cache has to be as large as for the whole of it; the watch ends them.
        generate(backbone, model.embedding, model.head, prompt, self.length, compile=compiled, progress=watch)
        return watch.seconds


@torch.no_grad()
def _draw_one(model: PixelModel, tokens: Tensor) -> Tensor:
    """Draw the token after `tokens` (B, P) without remembering anything: as `generate`, but for the state."""
    y, _ = model.backbone(model.embedding(tokens))
    return draw(model.head.log_probs(y[:, -1]), torch.full(tokens.shape[:1], 0.5, device=tokens.device))


def _rows(
    length: int, size: Size, batch_size: int, results: dict[str, list[Curve]], args: argparse.Namespace
) -> list[Row]:
    totals = {method: Spread(tuple(curve.total for curve in rounds)) for method, rounds in results.items()}
    compiled = next((method for method in COMPILED if method in totals), None)
    return [
        {
            "length": IMAGES.get(length, str(length)),
            "model": str(size),
            "batch": batch_size,
            "method": method,
            "measured": _how(method, rounds[0], args),
            "ms/token": totals[method].map(lambda s: 1000 * s / length),
            "images/s": totals[method].map(lambda s: batch_size / s),
            "linear's images/s ÷ this": totals[method] / totals[LINEAR],
            **({} if compiled is None else {"compiled linear's ÷ this": totals[method] / totals[compiled]}),
            "the paper's": PAPER.get(length, {}).get(method, "—"),
        }
        for method, rounds in results.items()
    ]


def _how(method: str, curve: Curve, args: argparse.Namespace) -> str:
    if method == RECOMPUTED:
        return f"integrated from {len(curve.prefixes)} prefixes"
    return "whole run" if args.windows is None else f"integrated from {len(curve.prefixes)} windows"


def _median_curve(rounds: list[Curve]) -> Curve:
    seconds = [statistics.median(costs) for costs in zip(*(curve.seconds for curve in rounds), strict=True)]
    return rounds[0]._replace(seconds=seconds)


def _evenly(first: int, last: int, count: int) -> list[int]:
    """Return up to `count` different integers, both ends included."""
    return sorted({round(x) for x in np.linspace(first, last, count)})


def _plot(figure: Figure, curves: dict[str, dict[str, Curve]]) -> None:
    figure.set_size_inches(4.5 * len(curves), 4)
    for axes, (title, methods) in zip(np.ravel(figure.subplots(1, len(curves))), curves.items(), strict=True):
        for method, curve in methods.items():
            axes.loglog(curve.prefixes, [1000 * s for s in curve.seconds], "o-", markersize=3, label=method)
        axes.set(title=title, xlabel="tokens so far", ylabel="ms/token")
        axes.legend()
