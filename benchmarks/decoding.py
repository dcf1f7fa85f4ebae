"""Decoding from long sources: what a generated token costs and copies, by the kind of cross-attention."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.generation import Stopwatch
from benchmarks.measuring import Spread, interleaved, mean_of, now, seconds_of
from benchmarks.models import SMALL, Size, at_least
from benchmarks.report import Report, Row
from lit_effattn import EncoderDecoder, Transformer
from lit_effattn.attention import (
    LinearAttention,
    LinearCrossAttention,
    PerformerCrossAttention,
    SoftmaxAttention,
    SoftmaxCrossAttention,
)
from lit_effattn.attention.cross import sources
from lit_effattn.beam import beam_search
from lit_effattn.generation import generate
from lit_effattn.sequence import State, nbytes, reorder, select, tensors
from lit_effattn.tasks import SequenceToSequence

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SOFTMAX, LINEAR, PERFORMER, PLAIN = "softmax", "linear", "Performer", "softmax everywhere"
CROSS = {
    SOFTMAX: SoftmaxCrossAttention,
    LINEAR: LinearCrossAttention,
    PERFORMER: PerformerCrossAttention,
    PLAIN: SoftmaxCrossAttention,
}

N_TOKENS = 256
"""Size of both vocabularies."""

WARM_UP = 2
"""Tokens that are generated before the clock starts."""

SENTENCES = 100
"""Sources, of 1 to as many tokens, of which the shapes of the states are counted."""

NOTES = [
    f"cross-attention: the kind by which the decoder reads the source. Encoder and decoder have linear attention, in "
    f"“{PLAIN}” softmax attention: the plain Transformer, whose encoder costs O(S²). The models have random weights, a "
    f"vocabulary of {N_TOKENS}, and as many layers in the encoder as in the decoder.",
    "remember: seconds to encode the sources and to make the decoder's state from them, once a source.",
    f"ms/token: one step of greedy generation, of all sentences of the batch, {WARM_UP} tokens after the start. Beam: "
    "one step of beam search, whose hypotheses of one sentence share its source.",
    "Figures are median (min–max) over the rounds, in which the kinds take turns; ratios are taken round by round.",
    "state, bytes: of one sentence, counted, not computed by formula. Of the source: what `remember` made of it. Of "
    "the target: what the decoder itself remembers; that of softmax attention has room for all tokens that are drawn.",
    "reorder: how a step of beam search moves the hypotheses' states; bytes are those of the tensors that it makes. "
    "select would move them with copies of the source. Neither counts what the start of a search copies: the source "
    "once for each hypothesis.",
]


class Decoded(NamedTuple):
    """What one round found of one model: all in seconds, a step's for all sentences of the batch."""

    remember: float
    token: float
    beam_token: float
    reorder: float
    select: float


class Sizes(NamedTuple):
    """Bytes: of the state of one sentence, and of what a step of beam search copies of all sentences."""

    source: int
    target: int
    reordered: int
    selected: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        type=at_least(1),
        nargs="+",
        default=[512, 2048, 8192, 32768],
        help="tokens of a source; default: %(default)s",
    )
    parser.add_argument(
        "--most", type=at_least(0), default=8192, help=f"longest source of “{PLAIN}”; default: %(default)s"
    )
    for name, default in SMALL._asdict().items():
        parser.add_argument(f"--{name}", type=at_least(1), default=default, help="default: %(default)s")
    parser.add_argument("--batch_size", type=at_least(1), default=1, help="sentences at once; default: %(default)s")
    parser.add_argument("--beam", type=at_least(2), default=4, help="hypotheses of a search; default: %(default)s")
    parser.add_argument(
        "--tokens", type=at_least(1), default=32, help="tokens of which the mean is taken; default: %(default)s"
    )
    parser.add_argument("--repeats", type=at_least(1), default=3, help="rounds; default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    size = Size(args.n_layers, args.n_heads, args.d_model)
    decoders = {kind: Decoder(build(kind, size, args.device), args.beam, args.tokens) for kind in CROSS}
    rows: list[Row] = []
    measured: dict[int, dict[str, tuple[Sizes, list[Decoded]]]] = {}
    for length in sorted(args.lengths):
        source = random_source(args.batch_size, length, args.device)
        present = {kind: of for kind, of in decoders.items() if kind != PLAIN or length <= args.most}
        for decoder in present.values():
            decoder.measure(source[:, :1])  # the first calls are slow
        measures = {kind: partial(decoder.measure, source) for kind, decoder in present.items()}
        rounds = interleaved(f"decoding, source of {length}", measures, args.repeats)
        measured[length] = {kind: (present[kind].sizes(source), rounds[kind]) for kind in present}
        rows += [_row(length, kind, size, args, measured[length]) for kind in present]
    shapes = {kind: n_shapes(decoders[kind].model) for kind in (SOFTMAX, LINEAR, PERFORMER)}
    return Report("decoding", rows, [*NOTES, _said(shapes)], lambda figure: _plot(figure, measured))


def build(kind: str, size: Size, device: torch.device) -> SequenceToSequence:
    """Make a model with cross-attention of this kind; equal weights whatever the kind, for all have the same."""
    torch.manual_seed(0)
    attention: Any = SoftmaxAttention if kind == PLAIN else LinearAttention
    options: dict[str, Any] = {"attention": attention, "activation": "relu"}
    stack = (size.d_model, size.n_heads, size.n_layers)
    backbone = EncoderDecoder(
        Transformer(*stack, causal=False, **options), Transformer(*stack, cross_attention=CROSS[kind], **options)
    )
    return SequenceToSequence(backbone, N_TOKENS, N_TOKENS, metrics=()).to(device).eval()


def random_source(rows: int, length: int, device: torch.device) -> Tensor:
    """Return (rows, length) tokens; what a source says does not change what it costs."""
    return torch.randint(N_TOKENS, (rows, length), generator=torch.Generator().manual_seed(0)).to(device)


class Decoder:
    """Generates from sources with one model.

    Args:
        model: In evaluation mode.
        beam: Hypotheses of a search.
        tokens: Tokens that are timed, after `WARM_UP`.
    """

    def __init__(self, model: SequenceToSequence, beam: int, tokens: int) -> None:
        self.model = model
        self.beam = beam
        self.tokens = tokens
        self.marks = [WARM_UP, WARM_UP + tokens]

    @torch.no_grad()
    def measure(self, source: Tensor) -> Decoded:
        """Time one round from `source` (B, S)."""
        device = source.device
        start = now(device)
        state = self._remember(source)
        remember = now(device) - start
        token = self._timed(partial(self._generate, source, state))
        beam_token = self._timed(partial(self._search, source, state))
        hypotheses, rows = self._hypotheses(state)
        clock = partial(seconds_of, device=device)
        moved = (mean_of(clock, partial(move, hypotheses, rows)) for move in (reorder, select))
        return Decoded(remember, token, beam_token, *moved)

    @torch.no_grad()
    def sizes(self, source: Tensor) -> Sizes:
        """Count the bytes of the states from `source` (B, S)."""
        state = self._remember(source)
        _, after = self.model.backbone(self.model.target_embedding(source[:, :1]), state)
        of_source = sum(nbytes(part) for part in sources(after))
        hypotheses, rows = self._hypotheses(state)
        copied = [copied_bytes(hypotheses, move(hypotheses, rows)) for move in (reorder, select)]
        return Sizes(of_source // len(source), (nbytes(after) - of_source) // len(source), *copied)

    def _remember(self, source: Tensor) -> State:
        return self.model.remember(source, max_len=self.marks[-1] + 1)

    def _hypotheses(self, state: State) -> tuple[State, Tensor]:
        """Return the state of all hypotheses, and rows that exchange those of one sentence."""
        sentences = torch.arange(len(state.length)).repeat_interleave(self.beam)
        rows = torch.arange(len(sentences)).view(-1, self.beam).flip(1).flatten()
        device = state.length.device
        return select(state, sentences.to(device)), rows.to(device)

    def _timed(self, decode: Callable[[Stopwatch], None]) -> float:
        """Return the seconds of a token."""
        watch = Stopwatch(self.marks, self.model.device)
        decode(watch)
        (seconds,) = watch.seconds
        return seconds / self.tokens

    def _generate(self, source: Tensor, state: State, watch: Stopwatch) -> None:
        model, n = self.model, self.marks[-1] + 1
        generate(
            model.backbone,
            model.target_embedding,
            model.head,
            source[:, :1],
            n,
            temperature=0.0,
            state=state,
            progress=watch,
        )

    def _search(self, source: Tensor, state: State, watch: Stopwatch) -> None:
        model, n = self.model, self.marks[-1] + 1  # without an end token, so that all steps are taken
        beam_search(
            model.backbone,
            model.target_embedding,
            model.head,
            source[:, :1],
            n,
            beam=self.beam,
            state=state,
            progress=watch,
        )


def copied_bytes(before: State, after: State) -> int:
    """Count the bytes of the tensors in `after` that are not in `before`."""
    shared = {t.data_ptr() for t in tensors(before)}
    return sum(nbytes(t) for t in tensors(after) if t.data_ptr() not in shared)


@torch.no_grad()
def n_shapes(model: SequenceToSequence) -> int:
    """Count the different shapes of the states of sources of 1, 2, … `SENTENCES` tokens."""
    device = model.device
    states: Iterator[State] = (
        model.remember(random_source(1, length, device), max_len=1) for length in range(1, SENTENCES + 1)
    )
    return len({tuple(t.shape for t in tensors(state)) for state in states})


def _said(shapes: dict[str, int]) -> str:
    counts = ", ".join(f"{kind} {n}" for kind, n in shapes.items())
    return (
        f"{SENTENCES} sources of 1 to {SENTENCES} tokens, one at a time, give states of this many different shapes: "
        f"{counts}. Compiled generation compiles one program for each."
    )


def _row(
    length: int, kind: str, size: Size, args: argparse.Namespace, measured: dict[str, tuple[Sizes, list[Decoded]]]
) -> Row:
    sizes, rounds = measured[kind]
    softmax_sizes, softmax_rounds = measured[SOFTMAX]
    times = {name: _spread(rounds, name) for name in Decoded._fields}
    ratios = {name: _spread(softmax_rounds, name) / times[name] for name in Decoded._fields}
    beam = f"beam of {args.beam}"
    return {
        "source": length,
        "model": str(size),
        "batch": args.batch_size,
        "cross-attention": kind,
        "remember, s": times["remember"],
        "ms/token": times["token"].map(_ms),
        "softmax's ms/token ÷ this": ratios["token"],
        f"{beam}, ms/token": times["beam_token"].map(_ms),
        f"{beam}, softmax's ms/token ÷ this": ratios["beam_token"],
        "source's state, bytes": sizes.source,
        "softmax's source's state ÷ this": softmax_sizes.source / sizes.source,
        "target's state, bytes": sizes.target,
        "reorder copies, bytes/token": sizes.reordered,
        "select would copy": sizes.selected,
        "reorder, ms/token": times["reorder"].map(_ms),
        "select, ms/token": times["select"].map(_ms),
    }


def _spread(rounds: list[Decoded], name: str) -> Spread:
    return Spread(tuple(getattr(of_round, name) for of_round in rounds))


def _ms(seconds: float) -> float:
    return 1000 * seconds


def _plot(figure: Figure, measured: dict[int, dict[str, tuple[Sizes, list[Decoded]]]]) -> None:
    figure.set_size_inches(9, 4)
    times, states = figure.subplots(1, 2)
    for kind in CROSS:
        of_kind = {length: kinds[kind] for length, kinds in measured.items() if kind in kinds}
        tokens = [_spread(rounds, "token").map(_ms).median for _, rounds in of_kind.values()]
        times.loglog(list(of_kind), tokens, "o-", markersize=3, label=kind)
        if kind != PLAIN:  # its source is that of softmax
            states.loglog(list(of_kind), [sizes.source for sizes, _ in of_kind.values()], "o-", markersize=3)
    times.set(xlabel="tokens of the source", ylabel="ms/token")
    times.legend()
    states.set(xlabel="tokens of the source", ylabel="source's state, bytes")
