"""Generation: images per second and state size by attention, or time per token by cross-attention.

Without sources it draws images, by linear attention, and by softmax attention with and without a key/value cache. With
sources it decodes from them, greedily and with beam search.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.measuring import Spread, add_options, at_least, interleaved, now, seconds_of
from benchmarks.models import IMAGES, LSH, SMALL, Size, build, random_levels, size_for
from benchmarks.report import Report, Row
from lit_effattn import EncoderDecoder, PixelModel, Transformer
from lit_effattn import attention as attentions
from lit_effattn.attention.cross import sources
from lit_effattn.generation.beam import beam_search
from lit_effattn.generation.sampling import draw, generate
from lit_effattn.sequence import State, nbytes, reorder, select, tensors
from lit_effattn.tasks import SequenceToSequence

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

SOFTMAX, PLAIN = "softmax", "softmax everywhere"
CROSS = {
    SOFTMAX: attentions.SoftmaxCrossAttention,
    "linear": attentions.LinearCrossAttention,
    "Performer": attentions.PerformerCrossAttention,
    PLAIN: attentions.SoftmaxCrossAttention,
}
N_TOKENS = 256
"""Size of both vocabularies of a decoder."""

IMAGE_NOTES = [
    "ms/token: one step, which draws one token of every image of the batch.",
    "no cache: the whole prefix is computed again for every token, as in the paper's baselines (softmax; LSH with one "
    "round, 64 buckets and chunks of 32). A larger batch than `--uncached` is computed so many images at a time, and "
    "one of these calls is measured.",
    "compiled: a step is one program, on CUDA one graph. The time of tracing and compiling, once for each "
    "number of images, is not included.",
    "integrated: not run as a whole. The cost of a token was measured at the given number of positions, spread evenly "
    "over the sequence, interpolated linearly between them and summed over all tokens. For a quadratic cost this is "
    "1 % too much with 8 positions.",
    "key/value cache: on a CPU a token attends to the slots filled so far, on CUDA to all slots of the image, since "
    "shapes are fixed there. Compiled, it attends to all slots of a cache for 256 tokens at first, which doubles when "
    "full.",
    "state: bytes for one image, counted, with room for all its tokens.",
    "the paper's: this ratio in Katharopoulos et al. 2020, on their GPU, with larger models: not a target.",
]
SOURCE_NOTES = [
    f"cross-attention: the kind with which the decoder reads the source. Encoder and decoder have linear attention; in "
    f"“{PLAIN}” softmax attention: the plain Transformer, whose encoder costs O(S²). Weights are random.",
    "remember: seconds to encode the sources and to make the decoder's state from them, once a source.",
    f"ms/token: one step of greedy generation, of all sentences of the batch, {WARM_UP} tokens after the start. Beam: "
    "one step of beam search. The hypotheses of one sentence share its source.",
    "source's state: bytes for one sentence, counted. reorder: bytes that a step of beam search copies; select would "
    "copy the sources too.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, 3, lengths=([784, 3072], "tokens of an image"))
    add_options(parser, repeats=(3, "rounds"), batch_sizes=([1, 32], "images or sentences at once"))
    parser.add_argument("--small", action="store_true", help=f"images by {SMALL} instead of the paper's sizes")
    parser.add_argument("--compiled", action="store_true", help="also compiled steps, which takes up to a minute each")
    about = f"integrate state and cache from this many windows of {WINDOW} tokens; default: whole runs"
    parser.add_argument("--windows", type=at_least(2), help=about)
    add_options(parser, 2, prefixes=(8, "at which no cache is measured"), beam=(4, "hypotheses of a search"))
    add_options(parser, uncached=(32, "images at once without a cache, since each token then needs the whole prefix"))
    about = "decode from sources of so many tokens instead"
    parser.add_argument("--sources", type=at_least(1), nargs="+", default=[], help=about)
    add_options(parser, most=(8192, f"longest source of “{PLAIN}”"), tokens=(32, "decoded in a round"))


def run(args: argparse.Namespace) -> Report:
    rows: list[Row] = []
    for batch_size in args.batch_sizes if args.sources else ():
        rows += _decoded(batch_size, args)
    if args.sources:
        return Report("generation", rows, SOURCE_NOTES)
    for length in args.lengths:
        methods = _Methods(length, size_for(length, args.small), args)
        for batch_size in args.batch_sizes:
            title = f"generation, length {length}, batch {batch_size}"
            seconds = interleaved(title, methods.measures(batch_size), args.repeats)
            rows += _rows(methods, batch_size, {name: Spread(tuple(samples)) for name, samples in seconds.items()})
    return Report("generation", rows, IMAGE_NOTES)


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
        self.starts = [] if args.windows is None else _evenly(0, length - WARM_UP - self.window, args.windows)
        self.prefixes = _evenly(1, length, args.prefixes)

    @torch.no_grad()
    def after(self, method: str, start: int) -> State:
        """Return the state after the first `start` tokens, with room for the whole image."""
        model = self.models[method]
        state = model.backbone.initial_state(1, max_len=self.length + 1)
        return model.backbone(model.embedding(self.tokens[:, :start]), state)[1] if start else state

    def measures(self, batch_size: int) -> dict[str, Callable[[], float]]:
        """Return a function for each method that measures it once."""
        drawn = self._windows if self.starts else partial(self._draw, marks=[0, self.length])
        for method in (LINEAR, CACHED):  # the first calls are slow
            self._draw(method, batch_size, [0, WARM_UP])
        if self.args.compiled:
            for method in COMPILED:  # each size of the cache is compiled
                drawn(method, batch_size)
        half = self.tokens[:, : (self.length + 1) // 2].expand(min(self.args.uncached, batch_size), -1)
        for model in self.uncached.values():
            _draw_one(model, half)
        measures = {method: partial(drawn, method, batch_size) for method in self.models}
        return measures | {name: partial(self._recomputed, model, batch_size) for name, model in self.uncached.items()}

    def how(self, method: str) -> str:
        """Return how a method was measured."""
        if method in self.uncached:
            return f"integrated from {len(self.prefixes)} prefixes"
        return f"integrated from {len(self.starts)} windows" if self.starts else "whole run"

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
            "measured": methods.how(method),
            "ms/token": own.map(lambda s: 1000 * s / length),
            "images/s": own.map(lambda s: batch_size / s),
            "linear's images/s ÷ this": own / seconds[LINEAR],
            **({} if compiled is None else {"compiled linear's ÷ this": own / seconds[compiled]}),
            "state, bytes": nbytes(methods.after(method, 0)) if method in methods.models else "—",
            "the paper's": PAPER.get(length, {}).get(method, "—"),
        }
        for method, own in seconds.items()
    ]


class Decoded(NamedTuple):
    """Seconds of one round of one model; of a step for all sentences of the batch."""

    remember: float
    token: float
    beam_token: float


class Sizes(NamedTuple):
    """Bytes of the source's state of one sentence, and bytes that a step of beam search copies for all sentences."""

    source: int
    reordered: int
    selected: int


def _decoded(batch_size: int, args: argparse.Namespace) -> list[Row]:
    """Return a row for each source and kind of cross-attention."""
    decoders = {kind: Decoder(build_decoder(kind, SMALL, args.device), args.beam, args.tokens) for kind in CROSS}
    rows: list[Row] = []
    for length in sorted(args.sources):
        source = random_levels(batch_size, length, args.device)
        measured = {kind: decoder for kind, decoder in decoders.items() if kind != PLAIN or length <= args.most}
        for decoder in measured.values():
            decoder.measure(source[:, :1])  # the first calls are slow
        measures = {kind: partial(decoder.measure, source) for kind, decoder in measured.items()}
        rounds = interleaved(f"generation, source of {length}", measures, args.repeats)
        sizes = {kind: decoder.sizes(source) for kind, decoder in measured.items()}
        times = {kind: [Spread(s) for s in zip(*samples, strict=True)] for kind, samples in rounds.items()}
        for kind in measured:
            (remember, token, beam_token), (_, plain_token, plain_beam) = times[kind], times[SOFTMAX]
            rows.append(
                {
                    "source": length,
                    "model": str(SMALL),
                    "batch": batch_size,
                    "cross-attention": kind,
                    "remember, s": remember,
                    "ms/token": token.map(lambda s: 1000 * s),
                    "softmax's ms/token ÷ this": plain_token / token,
                    f"beam of {args.beam}, ms/token": beam_token.map(lambda s: 1000 * s),
                    f"beam of {args.beam}, softmax's ms/token ÷ this": plain_beam / beam_token,
                    "source's state, bytes": sizes[kind].source,
                    "softmax's source's state ÷ this": sizes[SOFTMAX].source / sizes[kind].source,
                    "reorder copies, bytes/token": sizes[kind].reordered,
                    "select would copy": sizes[kind].selected,
                }
            )
    return rows


def build_decoder(kind: str, size: Size, device: torch.device) -> SequenceToSequence:
    """Make a model with cross-attention of this kind. All kinds have the same parameters and initial weights."""
    torch.manual_seed(0)
    attention: Any = attentions.SoftmaxAttention if kind == PLAIN else attentions.LinearAttention
    options: dict[str, Any] = {"attention": attention, "activation": "relu"}
    stack = (size.d_model, size.n_heads, size.n_layers)
    backbone = EncoderDecoder(
        Transformer(*stack, causal=False, **options), Transformer(*stack, cross_attention=CROSS[kind], **options)
    )
    return SequenceToSequence(backbone, N_TOKENS, N_TOKENS, metrics=()).to(device).eval()


class Decoder:
    """Generates from sources with one model.

    Args:
        model: In evaluation mode.
        beam: Hypotheses of a search.
        tokens: Number of tokens that are timed, after `WARM_UP`.
    """

    def __init__(self, model: SequenceToSequence, beam: int, tokens: int) -> None:
        self.model, self.beam, self.tokens = model, beam, tokens
        self.marks = [WARM_UP, WARM_UP + tokens]

    @torch.no_grad()
    def measure(self, source: Tensor) -> Decoded:
        """Time one round from `source` (B, S)."""
        start = now(source.device)
        state = self._remember(source)
        remember = now(source.device) - start
        greedy = self._timed(generate, source, state, temperature=0.0)
        # Without an end token no search ends early.
        return Decoded(remember, greedy, self._timed(beam_search, source, state, beam=self.beam))

    @torch.no_grad()
    def sizes(self, source: Tensor) -> Sizes:
        """Count the bytes of the states from `source` (B, S)."""
        state = self._remember(source)
        _, after = self.model.backbone(self.model.target_embedding(source[:, :1]), state)
        sentences = torch.arange(len(source)).repeat_interleave(self.beam)
        rows = torch.arange(len(sentences)).view(-1, self.beam).flip(1).flatten().to(source.device)
        hypotheses = select(state, sentences.to(source.device))  # `rows` exchanges those of one sentence
        copied = [copied_bytes(hypotheses, move(hypotheses, rows)) for move in (reorder, select)]
        return Sizes(sum(nbytes(part) for part in sources(after)) // len(source), *copied)

    def _remember(self, source: Tensor) -> State:
        return self.model.remember(source, max_len=self.marks[-1] + 1)

    def _timed(self, decode: Callable[..., Any], source: Tensor, state: State, **options: Any) -> float:
        """Return the seconds of a token."""
        model, watch = self.model, Stopwatch(self.marks, self.model.device)
        modules = (model.backbone, model.target_embedding, model.head)
        decode(*modules, source[:, :1], self.marks[-1] + 1, state=state, progress=watch, **options)
        return watch.seconds / self.tokens


def copied_bytes(before: State, after: State) -> int:
    """Count the bytes of the tensors in `after` that are not in `before`."""
    shared = {t.data_ptr() for t in tensors(before)}
    return sum(nbytes(t) for t in tensors(after) if t.data_ptr() not in shared)
