"""Generation: images per second and state size of linear attention, and of softmax with and without a cache."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import Spread, add_options, interleaved, now, seconds_of
from benchmarks.models import IMAGES, LSH, SMALL, Size, build, random_levels, size_for
from benchmarks.report import Report, Row
from lit_effattn import PixelModel
from lit_effattn.generation.sampling import draw, generate
from lit_effattn.sequence import State, nbytes, select

LINEAR, CACHED, RECOMPUTED = "linear, state", "softmax, key/value cache", "softmax, no cache"
RECOMPUTED_LSH = "LSH-1, no cache"
COMPILED = {f"{method}, compiled": method for method in (LINEAR, CACHED)}
PAPER = {
    784: {LINEAR: 1, CACHED: 142.8 / 7.56, RECOMPUTED: 317, RECOMPUTED_LSH: 142.8 / 0.68},
    3072: {LINEAR: 1, CACHED: 17.85 / 0.32, RECOMPUTED: 4462, RECOMPUTED_LSH: 17.85 / 0.015},
}
"""Images/s of linear attention over the others', from Katharopoulos et al. 2020, tables 1 and 2 and the supplement."""

WINDOW = 16
"""Tokens timed in a window."""

WARM_UP = 2
"""Tokens that are generated before the clock starts."""

NOTES = [
    "ms/token: one step, which draws one token of every image of the batch.",
    "no cache: the whole prefix is computed again for every token, as in the paper's baselines (softmax; LSH with one "
    "round, 64 buckets and chunks of 32). A larger batch than `--uncached` is computed so many images at a time, and "
    "one of these calls is measured.",
    "compiled: a step is one program, on CUDA one graph. The time of tracing and compiling, once for each "
    "number of images, is not included.",
    "No image is drawn as a whole. The cost of a token is measured in `--windows` places (no cache: after `--prefixes` "
    "prefixes), spread evenly over the image, interpolated linearly between them and summed over all tokens. For a "
    "quadratic cost this is 1 % too much with 8 places.",
    "key/value cache: on a CPU a token attends to the slots filled so far, on CUDA to all slots of the image, since "
    "shapes are fixed there. Compiled, it attends to all slots of a cache for 256 tokens at first, which doubles when "
    "full.",
    "state: bytes for one image, counted, with room for all its tokens.",
    "the paper's: this ratio in Katharopoulos et al. 2020, on their GPU, with larger models: not a target.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, 3, lengths=([784, 3072], "tokens of an image"))
    add_options(parser, repeats=(3, "rounds"), batch_sizes=([1, 32], "images at once"))
    parser.add_argument("--small", action="store_true", help=f"images by {SMALL} instead of the paper's sizes")
    parser.add_argument("--compiled", action="store_true", help="also compiled steps, which takes up to a minute each")
    about = f"of {WINDOW} tokens, at which state and cache are measured"
    add_options(parser, 2, windows=(4, about), prefixes=(8, "at which no cache is measured"))
    add_options(parser, uncached=(32, "images at once without a cache, since each token then needs the whole prefix"))


def run(args: argparse.Namespace) -> Report:
    rows: list[Row] = []
    for length in args.lengths:
        methods = _Methods(length, size_for(length, args.small), args)
        for batch_size in args.batch_sizes:
            title = f"generation, length {length}, batch {batch_size}"
            seconds = interleaved(title, methods.measures(batch_size), args.repeats)
            rows += _rows(methods, batch_size, {name: Spread(tuple(samples)) for name, samples in seconds.items()})
    return Report("generation", rows, NOTES)


class Stopwatch:
    """Wraps the steps of `generate`: notes the time at the steps in `marks` (ascending), and ends at the last."""

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
    def seconds(self) -> float:
        """Time from the first mark to the last."""
        return self.times[-1] - self.times[0]


def integrate(prefixes: Sequence[float], seconds: Sequence[float], length: int) -> float:
    """Return the cost of the tokens 1 … `length`, from samples: linear between them, constant beyond the outermost."""
    return float(np.interp(np.arange(1, length + 1), prefixes, seconds).sum())


class _Methods:
    """Methods to draw images of one size. The models are made once; each method returns the seconds of a batch."""

    def __init__(self, length: int, size: Size, args: argparse.Namespace) -> None:
        self.length, self.size, self.args = length, size, args
        linear, softmax, lsh = (build(kind, length, size, args.device).eval() for kind in ("linear", "softmax", LSH))
        self.models = {LINEAR: linear, CACHED: softmax}
        if args.compiled:
            self.models |= {compiled: self.models[method] for compiled, method in COMPILED.items()}
        self.uncached = {RECOMPUTED: softmax} | ({} if args.small else {RECOMPUTED_LSH: lsh})
        self.tokens = random_levels(1, length, args.device)
        self.window = min(WINDOW, length - WARM_UP)
        self.starts = _evenly(0, length - WARM_UP - self.window, args.windows)
        self.prefixes = _evenly(1, length, args.prefixes)

    @torch.no_grad()
    def after(self, method: str, start: int) -> State:
        """Return the state after the first `start` tokens, with room for the whole image."""
        model = self.models[method]
        state = model.backbone.initial_state(1, max_len=self.length + 1)
        return model.backbone(model.embedding(self.tokens[:, :start]), state)[1] if start else state

    def measures(self, batch_size: int) -> dict[str, Callable[[], float]]:
        """Return a function for each method that measures it once."""
        for method in (LINEAR, CACHED):  # the first calls are slow
            self._draw(method, batch_size, [0, WARM_UP])
        for method in COMPILED.keys() & self.models.keys():  # each size of the cache is compiled
            self._windows(method, batch_size)
        half = self.tokens[:, : (self.length + 1) // 2].expand(min(self.args.uncached, batch_size), -1)
        for model in self.uncached.values():
            _draw_one(model, half)
        measures = {method: partial(self._windows, method, batch_size) for method in self.models}
        return measures | {name: partial(self._recomputed, model, batch_size) for name, model in self.uncached.items()}

    def _windows(self, method: str, batch_size: int) -> float:
        marks = [WARM_UP, WARM_UP + self.window]
        costs = [self._draw(method, batch_size, marks, start) / self.window for start in self.starts]
        centres = [start + WARM_UP + (self.window + 1) / 2 for start in self.starts]
        return integrate(centres, costs, self.length)

    def _recomputed(self, model: PixelModel, batch_size: int) -> float:
        costs, rows = [], min(self.args.uncached, batch_size)
        for prefix in self.prefixes:
            tokens = self.tokens[:, :prefix].repeat(rows, 1)  # (1, P) -> (B, P)
            costs.append(seconds_of(partial(_draw_one, model, tokens), self.args.device) * batch_size / rows)
        return integrate(self.prefixes, costs, self.length)

    def _draw(self, method: str, batch_size: int, marks: list[int], start: int = 0) -> float:
        """Return the seconds between the steps `marks` of drawing images, from the token `start` on."""
        model, watch = self.models[method], Stopwatch(marks, self.args.device)
        prompt = self.tokens[:, :1].repeat(batch_size, 1)  # (1, 1) -> (B, 1)
        rows = torch.zeros(batch_size, dtype=torch.long, device=self.args.device)
        state = select(self.after(method, start), rows) if start else None
        # All steps of an image, since the cache must have room for all of it; the watch ends them.
        options = {"state": state, "compile": method in COMPILED, "progress": watch}
        generate(model.backbone, model.embedding, model.head, prompt, self.length - start, **options)
        return watch.seconds


@torch.no_grad()
def _draw_one(model: PixelModel, tokens: Tensor) -> Tensor:
    """Draw the token after `tokens` (B, P) like `generate`, but without a state."""
    y, _ = model.backbone(model.embedding(tokens))
    return draw(model.head.log_probs(y[:, -1]), torch.full(tokens.shape[:1], 0.5, device=tokens.device))


def _evenly(first: int, last: int, count: int) -> list[int]:
    """Return up to `count` different integers, both ends included."""
    return sorted({round(x) for x in np.linspace(first, last, count)})


def _rows(methods: _Methods, batch_size: int, seconds: dict[str, Spread]) -> list[Row]:
    length = methods.length
    compiled = next((method for method in COMPILED if method in seconds), None)
    return [
        {
            "length": IMAGES.get(length, str(length)),
            "model": str(methods.size),
            "batch": batch_size,
            "method": method,
            "ms/token": own.map(lambda s: 1000 * s / length),
            "images/s": own.map(lambda s: batch_size / s),
            "linear's images/s ÷ this": own / seconds[LINEAR],
            **({} if compiled is None else {"compiled linear's ÷ this": own / seconds[compiled]}),
            "state, bytes": nbytes(methods.after(method, 0)) if method in methods.models else "—",
            "the paper's": PAPER.get(length, {}).get(method, "—"),
        }
        for method, own in seconds.items()
    ]
