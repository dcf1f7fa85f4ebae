"""Whole attention layers compared with those of libraries from PyPI, with the same weights if possible."""

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.kernels import flash_linear_attention
from benchmarks.measuring import LEAST, add_options, compared, peak_bytes, timed
from benchmarks.report import Report, Row
from lit_effattn.attention import LinearAttention, LSHAttention, PerformerAttention, SoftmaxAttention
from lit_effattn.attention.base import Attention
from lit_effattn.ops.runtime.differences import largest_relative_difference

OURS = "lit-effattn"
INSTALL = "see benchmarks/requirements-peers.txt"
SEED = 0
FIGURES = ("ms", "tokens/s", f"time ÷ {OURS}'s", "peak, MiB", f"peak ÷ {OURS}'s", "difference")

NOTES = [
    "Forward and backward of one layer, causal unless stated otherwise: projections without biases (0 in libraries "
    "that require them), attention, output projection; gradients of input and weights; float32.",
    f"A round's figure is the mean of the calls that {LEAST} s allow, after a first one; or the first if it takes 1 s "
    "or more. peak: memory in addition to the input and the weights.",
    "difference: the largest difference of the output and the gradients from lit-effattn's with the same weights, each "
    "relative to its norm. softmax, linear, and lsh that is not causal (with the same rotations) are the same "
    "functions. performer has the same random features, but performer-pytorch adds 10⁻⁴ to each and scales keys by "
    "the maximum over all positions. Causal lsh is another function: lit-effattn divides each bucket into its own "
    "chunks, so that no later position moves a border.",
    "reformer-pytorch, exact: with options for the paper's attention, as in lit-effattn: no key counts twice, and "
    "keys of other buckets are not seen. flash-linear-attention: its function in lit-effattn's projections, "
    "with products in TF32.",
]


class Layer(NamedTuple):
    """A layer and its weights."""

    call: Callable[[Tensor], Tensor]  # (B, N, E) -> (B, N, E)
    weights: list[nn.Parameter]  # of queries, keys, values and output, in that order


class Comparison(NamedTuple):
    """One kind of attention in several libraries."""

    ours: Callable[[argparse.Namespace, int], Attention]
    peers: Mapping[str, Callable[[argparse.Namespace, int, Attention], Layer]]
    same: bool = True  # whether the outputs are compared


class UnmeasuredError(Exception):
    """A library's layer can't be measured on this device."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, lengths=([512, 1024, 2048, 4096], "N"), batch_size=1, d_model=256, n_heads=4)
    add_options(parser, window=(128, "keys that are seen"), n_hashes=(4, "rounds of LSH"), repeats=(3, "rounds"))
    add_options(parser, chunk_size=(64, "of LSH's buckets"), n_features=(256, "Performer's"))
    add_options(parser, most=(1024, "longest for performer-pytorch on a CPU, which keeps N · F · D numbers a head"))
    titles = list(COMPARISONS)
    parser.add_argument("--attentions", choices=titles, nargs="+", default=titles, help="default: all")


def run(args: argparse.Namespace) -> Report:
    lengths = sorted(set(args.lengths))
    uneven = [n for n in lengths if n % (2 * args.chunk_size)]
    if uneven and any(title.startswith("lsh") for title in args.attentions):
        raise SystemExit(
            f"layers: --lengths {uneven[0]} must be a multiple of {2 * args.chunk_size}, two chunks, for "
            "reformer-pytorch; choose another length or --chunk_size, or --attentions without lsh"
        )
    rows: list[Row] = []
    reasons: dict[str, str] = {}
    for n in lengths:
        for title in dict.fromkeys(args.attentions):
            rows += _compared(n, title, COMPARISONS[title], args, reasons)
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return Report("layers", rows, [*NOTES, *(f"Not measured: {', '.join(n)}: {why}." for why, n in names.items())])


def _lsh(causal: bool, args: argparse.Namespace, n: int) -> Attention:
    buckets = {"n_hashes": args.n_hashes, "n_buckets": n // args.chunk_size, "chunk_size": args.chunk_size}
    return LSHAttention(args.d_model, args.n_heads, causal, bias=False, **buckets)


def _weights(layer: Attention) -> list[nn.Parameter]:
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    return [getattr(layer, name).weight for name in names if hasattr(layer, name)]  # LSH's keys are the queries


def _x_transformers(args: argparse.Namespace, n: int, ours: Attention) -> Layer:
    library = import_module("x_transformers.x_transformers")
    window = getattr(ours, "window", None)
    past = None if window is None else window - 1  # the distance of the furthest visible key
    size = {"dim_head": ours.head_dim, "heads": ours.n_heads}
    layer = library.Attention(ours.d_model, causal=True, flash=True, max_attend_past=past, **size).to(args.device)
    return Layer(layer, [getattr(layer, name).weight for name in ("to_q", "to_k", "to_v", "to_out")])


def _fast_transformers(args: argparse.Namespace, n: int, ours: Attention) -> Layer:
    library = import_module("fast_transformers.attention")
    masking = import_module("fast_transformers.masking")
    layer = library.AttentionLayer(library.CausalLinearAttention(ours.head_dim), ours.d_model, ours.n_heads)
    layer.to(args.device)
    causal = masking.TriangularCausalMask(n, device=args.device)
    whole = masking.LengthMask(torch.full((args.batch_size,), n, device=args.device))
    names = ("query_projection", "key_projection", "value_projection", "out_projection")
    _without_biases(layer)
    weights = [getattr(layer, name).weight for name in names]
    return Layer(lambda x: layer(x, x, x, causal, whole, whole), weights)


def _flash_linear_attention(args: argparse.Namespace, n: int, ours: Attention) -> Layer:
    if args.device.type != "cuda":
        raise UnmeasuredError(f"its kernels need CUDA, and the device is {args.device}")
    library = import_module("fla.ops.linear_attn")
    layer = copy.deepcopy(ours)
    layer.attend = lambda q, k, v, state, lengths: (flash_linear_attention(library, q, k, v), None)  # type: ignore[method-assign]
    return Layer(lambda x: layer(x)[0], _weights(layer))


def _performer_pytorch(args: argparse.Namespace, n: int, ours: Attention) -> Layer:
    if args.device.type != "cuda" and n > args.most:
        raise UnmeasuredError(f"longer than --most {args.most}, since it keeps N · F · D numbers a head")
    library = import_module("performer_pytorch")
    size = {"heads": ours.n_heads, "dim_head": ours.head_dim, "nb_features": args.n_features}
    with redirect_stdout(sys.stderr):  # the library prints which of its forms it uses
        layer = library.SelfAttention(ours.d_model, causal=True, attn_out_bias=False, **size).to(args.device)
    # All its heads have one set of features.
    ours.feature_map.omega.copy_(layer.fast_attention.projection_matrix.expand_as(ours.feature_map.omega))
    return Layer(layer, [getattr(layer, name).weight for name in ("to_q", "to_k", "to_v", "to_out")])


def _reformer_pytorch(args: argparse.Namespace, n: int, ours: Attention, *, exact: bool) -> Layer:
    library = import_module("reformer_pytorch")
    layer = library.LSHSelfAttention(
        ours.d_model,
        heads=ours.n_heads,
        bucket_size=args.chunk_size,
        n_hashes=args.n_hashes,
        causal=ours.causal,
        attend_across_buckets=not exact,
        allow_duplicate_attention=not exact,
    ).to(args.device)
    _without_biases(layer)
    # All its heads and rows have one set of rotations, which each call draws again.
    shape = (1, ours.head_dim, args.n_hashes, n // args.chunk_size // 2)
    torch.manual_seed(SEED)
    drawn = torch.randn(shape, device=args.device).permute(2, 0, 1, 3)  # (1, D, R, ·) -> (R, 1, D, ·)
    ours.rotations.copy_(drawn.expand_as(ours.rotations))

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(SEED)
        return layer(x)

    return Layer(seeded, [getattr(layer, name).weight for name in ("toqk", "tov", "to_out")])


def _without_biases(layer: nn.Module) -> None:
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter).requires_grad_(False)


FLASH = {"x-transformers, flash": _x_transformers}
EXACT = {"reformer-pytorch, exact": partial(_reformer_pytorch, exact=True)}

COMPARISONS = {
    "softmax": Comparison(lambda a, n: SoftmaxAttention(a.d_model, a.n_heads, bias=False), FLASH),
    "softmax, window": Comparison(
        lambda a, n: SoftmaxAttention(a.d_model, a.n_heads, bias=False, window=a.window), FLASH
    ),
    "linear": Comparison(
        lambda a, n: LinearAttention(a.d_model, a.n_heads, bias=False),
        {"pytorch-fast-transformers": _fast_transformers, "flash-linear-attention": _flash_linear_attention},
    ),
    "performer": Comparison(
        lambda a, n: PerformerAttention(a.d_model, a.n_heads, bias=False, n_features=a.n_features),
        {"performer-pytorch": _performer_pytorch},
    ),
    "lsh": Comparison(
        partial(_lsh, True), {"reformer-pytorch": partial(_reformer_pytorch, exact=False), **EXACT}, same=False
    ),
    "lsh, not causal": Comparison(partial(_lsh, False), EXACT),
}


def _compared(
    n: int, title: str, comparison: Comparison, args: argparse.Namespace, reasons: dict[str, str]
) -> list[Row]:
    """Return a row for each library. Add to `reasons` why one was not measured."""
    torch.manual_seed(SEED)
    ours = comparison.ours(args, n).to(args.device)
    x = torch.randn(args.batch_size, n, args.d_model, device=args.device, requires_grad=True)
    layers = {OURS: Layer(lambda x: ours(x)[0], _weights(ours))}
    for name, build in comparison.peers.items():
        with _noting(name, reasons):
            layers[name] = build(args, n, ours)
    results = {}
    for name, layer in layers.items():
        with _noting(name, reasons), torch.no_grad():
            for weight, value in zip(layer.weights, _weights(ours), strict=True):
                weight.copy_(value)
            with torch.enable_grad():
                results[name] = _both_ways(layer, x)
    differences = {
        name: largest_relative_difference(results[name], results[OURS], f"{name}: the difference")
        if comparison.same
        else "—"
        for name in results
    }
    calls = {name: partial(_both_ways, layers[name], x) for name in results}
    del results
    peaks = {name: peak_bytes(call, args.device) for name, call in calls.items()}
    seconds = timed(f"N {n}, {title}", calls, args, means=True)
    rows: list[Row] = []
    for name in (OURS, *comparison.peers):
        row: Row = {"N": n, "attention": title, "layer": name, **dict.fromkeys(FIGURES)}
        if name in calls:
            row |= compared(name, seconds, peaks, OURS)
            row["tokens/s"] = seconds[name].map(lambda s: args.batch_size * n / s)
            row["difference"] = "—" if name == OURS else differences[name]
        rows.append(row)
    return rows


@contextmanager
def _noting(name: str, reasons: dict[str, str]) -> Iterator[None]:
    """Note the reason if another library fails, and continue."""
    try:
        yield
    except UnmeasuredError as error:
        reasons[name] = str(error)
    except ImportError as error:
        reasons[name] = f"absent ({error}); {INSTALL}"
    except Exception as error:
        if name == OURS:
            raise
        reasons[name] = f"failed ({type(error).__name__}: {error})"


def _both_ways(layer: Layer, x: Tensor) -> list[Tensor]:
    """Return the output y and the gradients of y · x with respect to the input x and the weights."""
    y = layer.call(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.weights], x.detach())]
