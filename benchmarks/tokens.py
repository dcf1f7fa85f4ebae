"""A token of generation: in Python, compiled and in onnxruntime, beside its matrix products and its bytes."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.generation import Stopwatch
from benchmarks.measuring import Spread, add_options, interleaved
from benchmarks.models import CIFAR, MNIST, SMALL, Size
from benchmarks.report import Report, Row
from lit_effattn import LSTM, LanguageModel, Transformer
from lit_effattn import attention as attentions
from lit_effattn.generation import draw
from lit_effattn.interchange.export import export
from lit_effattn.sequence import SequenceModule, nbytes, tensors

SIZES = {"small": SMALL, "mnist": MNIST, "cifar": CIFAR}
VOCABULARY = 256
ROOM = 512
"""Positions that a state has room for in onnxruntime."""

KINDS: dict[str, Callable[..., SequenceModule] | None] = {
    "linear": attentions.LinearAttention,
    "Performer": attentions.PerformerAttention,
    "retention": attentions.RetentionAttention,
    "GLA": attentions.GatedLinearAttention,
    "Mamba-2": attentions.Mamba2Attention,
    "DeltaNet": attentions.DeltaNetAttention,
    "Gated DeltaNet": attentions.GatedDeltaNetAttention,
    "KDA": attentions.KimiDeltaAttention,
    "LSTM": None,
    "Transformer-XL": partial(attentions.TransformerXLAttention, mem_len=64, same_length=True),
    "Compressive": partial(attentions.CompressiveAttention, mem_len=64, compressed_len=64, compression_rate=4),
    "∞-former": partial(attentions.InfiniteAttention, mem_len=64, segment_len=64),
    "windowed linear": partial(attentions.WindowedLinearAttention, window=64),
    "softmax, window": partial(attentions.SoftmaxAttention, window=64),
    "softmax": attentions.SoftmaxAttention,
    "Shaw": partial(attentions.ShawAttention, max_distance=16),
    "sparse": partial(attentions.SparseAttention, stride=16),
    "LSH": partial(attentions.LSHAttention, n_buckets=8, chunk_size=16),
}

NOTES = [
    f"A language model of {VOCABULARY} tokens with random weights; small: {SMALL}; mnist: {MNIST}; cifar: {CIFAR} (the "
    "sizes of Katharopoulos et al. 2020). Windows and memories have 64 positions.",
    "ms: one token of every row, with its draw, after `n_read` tokens. Python, compiled: `generate`, without the "
    f"time of tracing and compiling. onnxruntime: the exported step, in a state for {ROOM} positions.",
    "products: the step's matrix products with weights alone. bytes: the weights, read once, and the state, read and "
    "written once, at the speed with which a tensor of 256 MiB is copied in the same round.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, repeats=(3, "rounds"), rows=([1], "sequences at once"), n_tokens=(48, "timed tokens"))
    add_options(parser, n_read=(192, "tokens before the clock starts"))
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=["small"], help="default: small")
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS), help="default: all")
    parser.add_argument("--no-onnx", action="store_true", help="leave onnxruntime out")


def run(args: argparse.Namespace) -> Report:
    cases = itertools.product(args.sizes, args.rows, args.kinds)
    return Report("tokens", [_row(size, rows, kind, args) for size, rows, kind in cases], NOTES)


def model(kind: str, size: Size) -> LanguageModel:
    """Make a language model with random weights."""
    torch.manual_seed(0)
    n_layers, n_heads, d_model = size
    attention = KINDS[kind]
    backbone = (
        LSTM(d_model, n_layers)
        if attention is None
        else Transformer(d_model, n_heads, n_layers, attention=attention, positions="auto")
    )
    return LanguageModel(backbone, VOCABULARY).eval()


def _row(size: str, rows: int, kind: str, args: argparse.Namespace) -> Row:
    task = model(kind, SIZES[size])
    with TemporaryDirectory() as folder:
        measures: dict[str, Callable[[], float]] = {
            "Python": partial(generated, task, rows, args.n_read, args.n_tokens, compile=False),
            "compiled": partial(generated, task, rows, args.n_read, args.n_tokens, compile=True),
            "products": partial(_products, matrices(task), rows, args.n_tokens),
            "bytes": partial(_moved, _bytes(task, rows, args.n_read)),
        }
        if not args.no_onnx:
            path = export(task, Path(folder) / "step.onnx", format="onnx", batch_size=rows, max_len=_room(task)).path
            measures["onnxruntime"] = partial(OnnxSteps(path, task, rows), args.n_read, args.n_tokens)
        for measure in measures.values():
            measure()  # compiles
        seconds = interleaved(f"{size}, {rows} rows, {kind}", measures, args.repeats)
    spreads = {name: Spread(tuple(s)) for name, s in seconds.items()}
    row: Row = {"size": size, "rows": rows, "kind": kind}
    row |= {f"{name}, ms": spread.map(lambda s: 1000 * s) for name, spread in spreads.items()}
    row["Python ÷ compiled"] = spreads["Python"] / spreads["compiled"]
    if not args.no_onnx:
        row["onnxruntime ÷ compiled"] = spreads["onnxruntime"] / spreads["compiled"]
    row["products ÷ compiled"] = spreads["products"] / spreads["compiled"]
    return row


def generated(task: LanguageModel, rows: int, n_read: int, n_tokens: int, *, compile: bool) -> float:
    """Return the seconds of a token in `generate`, of `n_tokens` after the first `n_read`."""
    watch = Stopwatch([n_read, n_read + n_tokens], task.device)
    task.sample(torch.zeros(rows, 1, dtype=torch.long), n_read + n_tokens + 1, compile=compile, progress=watch)
    return watch.seconds / n_tokens


class OnnxSteps:
    """Draws tokens by the exported step.

    Args:
        path: The exported step.
        task: The model.
        rows: Its rows.
    """

    def __init__(self, path: Path, task: LanguageModel, rows: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [x.name for x in self._session.get_inputs()][1:]
        empty = task.backbone.initial_state(rows, max_len=_room(task))
        self._state = dict(zip(names, (t.numpy() for t in tensors(empty)), strict=True))
        self._rows = rows

    def __call__(self, n_read: int, n_tokens: int) -> float:
        """Return the seconds of a token, of `n_tokens` after the first `n_read`."""
        tokens, state, uniform = torch.zeros(self._rows, 1, dtype=torch.long), self._state, torch.rand(self._rows)
        for i in range(n_read + n_tokens):
            if i == n_read:
                start = time.perf_counter()
            log_probs, *after = self._session.run(None, {"tokens": tokens.numpy()} | state)
            state = dict(zip(state, after, strict=True))
            tokens = draw(torch.from_numpy(log_probs), uniform)[:, None]
        return (time.perf_counter() - start) / n_tokens


def matrices(task: LanguageModel) -> list[Tensor]:
    """Return the weights by which a step multiplies each row: all matrices but the embedding."""
    return [p.detach() for p in task.parameters() if p.dim() == 2 and p is not task.embedding.weight]


def _products(weights: Sequence[Tensor], rows: int, n_tokens: int) -> float:
    inputs = {w.size(1): torch.randn(rows, w.size(1)) for w in weights}
    start = time.perf_counter()
    for _ in range(n_tokens):
        for w in weights:
            F.linear(inputs[w.size(1)], w)
    return (time.perf_counter() - start) / n_tokens


def _bytes(task: LanguageModel, rows: int, n_read: int) -> int:
    return sum(w.nbytes for w in matrices(task)) + 2 * nbytes(task.backbone.initial_state(rows, max_len=n_read))


def _moved(n_bytes: int) -> float:
    """Return the seconds in which so many bytes are moved. A copy reads and writes each."""
    source = torch.zeros(2**28, dtype=torch.uint8)
    target = torch.zeros_like(source)
    start = time.perf_counter()
    target.copy_(source)
    return (time.perf_counter() - start) * n_bytes / (2 * source.nbytes)


def _room(task: LanguageModel) -> int | None:
    return None if task.backbone.bounded_by is None else ROOM
