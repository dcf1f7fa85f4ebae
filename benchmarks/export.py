"""What an exported streaming step costs beside the model in PyTorch, and how much its results differ."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.models import at_least
from benchmarks.report import Report, Row
from lit_effattn import LSTM, LanguageModel, Transformer
from lit_effattn.attention import (
    CompressiveAttention,
    InfiniteAttention,
    LinearAttention,
    LSHAttention,
    PerformerAttention,
    ShawAttention,
    SoftmaxAttention,
    SparseAttention,
    TransformerXLAttention,
)
from lit_effattn.export import SUFFIXES, Exported, export

KINDS = {
    "softmax": SoftmaxAttention,
    "softmax, window 64": partial(SoftmaxAttention, window=64),
    "shaw": ShawAttention,
    "sparse, fixed": partial(SparseAttention, pattern="fixed", stride=32),
    "sparse, strided": partial(SparseAttention, pattern="strided", stride=32),
    "LSH": LSHAttention,
    "linear": LinearAttention,
    "performer": PerformerAttention,
    "Transformer-XL": partial(TransformerXLAttention, mem_len=64),
    "compressive": partial(CompressiveAttention, mem_len=64),
    "∞-former": partial(InfiniteAttention, mem_len=64, segment_len=64, n_basis=64),
    "LSTM": None,
}

NOTES = [
    "Random weights; one stream of random tokens, read one after another, each side with its own state. difference: "
    "the largest of any log-probability at any token.",
    "onnx: by onnxruntime. torch: the program of `torch.export`, read back from its file and not compiled. here: the "
    "model in PyTorch, as `generate` runs it. All with the same number of threads; the median over the tokens.",
    "Kinds that keep every position have room for as many as there are tokens.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kinds", choices=KINDS, nargs="+", default=list(KINDS), help="default: all")
    parser.add_argument("--tokens", type=at_least(1), default=1000, help="default: %(default)s")
    parser.add_argument("--d_model", type=at_least(1), default=64, help="default: %(default)s")
    parser.add_argument("--n_heads", type=at_least(1), default=4, help="default: %(default)s")
    parser.add_argument("--n_layers", type=at_least(1), default=2, help="default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    rows: list[Row] = []
    for name in args.kinds:
        model = build(name, args.d_model, args.n_heads, args.n_layers)
        onnx, size = exported(model, "onnx", args.tokens)
        program, _ = exported(model, "torch", args.tokens)
        rows.append(
            {
                "kind": name,
                "onnx: difference": f"{onnx.difference:.1e}",
                "torch: difference": f"{program.difference:.1e}",
                "onnx, ms a token": 1e3 * onnx.seconds,
                "torch, ms a token": 1e3 * program.seconds,
                "here, ms a token": 1e3 * onnx.seconds_here,
                "here ÷ onnx": onnx.seconds_here / onnx.seconds,
                "onnx, MB": size / 1e6,
            }
        )
    return Report("export", rows, NOTES)


def build(name: str, d_model: int, n_heads: int, n_layers: int) -> LanguageModel:
    """Make a model of bytes with random weights, whose attention is not uniform."""
    torch.manual_seed(0)
    kind = KINDS[name]
    if kind is None:
        backbone: LSTM | Transformer = LSTM(d_model, n_layers)
    else:
        backbone = Transformer(d_model, n_heads, n_layers, attention=kind, positions="auto", init="xavier")
    return LanguageModel(backbone, 257, unit="byte", embedding_std=1.0)


def exported(model: LanguageModel, format: str, tokens: int) -> tuple[Exported, int]:
    """Export a model, and compare it with itself for as many tokens; return also the size of the file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"model{SUFFIXES[format]}"
        room = None if model.backbone.bounded_by is None else tokens
        return export(model, path, format=format, max_len=room, check=tokens), path.stat().st_size
