"""Causal linear attention, Performer and the gated delta rule: kernels, PyTorch and libraries."""

import argparse
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measuring import add_options, compared, peak_bytes, timed
from benchmarks.report import Report, Row
from lit_effattn.ops.favor.pytorch import draw_omega, positive_favor
from lit_effattn.ops.gated_linear import fla
from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention
from lit_effattn.ops.linear.pytorch import causal_linear_attention
from lit_effattn.ops.runtime.differences import largest_relative_difference

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

NOTES = [
    "Inputs are normal numbers, queries and keys of Performer divided by D^¼. On a CPU linear attention gets features "
    "(elu + 1); on CUDA it computes them. Performer computes its own. A round's figure is the mean of several calls.",
    "decay: linear attention without a denominator, with a decay per head and position, uniform in (-1, 0) in "
    "logarithms; delta: the delta rule, with keys of norm 1 and strengths uniform in (0, 1); gated delta: both. Their "
    "backward passes give the gradients of decays and strengths too. transformers: Qwen3-Next's form in PyTorch; "
    "attn-gym: its reference in chunks.",
    "linear, performer, decay, delta, gated delta: kernels in C++ on a CPU with a compiler, in Triton on CUDA. "
    "plain: in PyTorch, differentiated by autograd, in float32. flash-linear-attention multiplies float32 in TF32.",
    "peak: tensors alive at once in addition to the inputs, those saved for the backward pass included; on a CPU "
    "without the scratch memory of C++ kernels, some chunks and sums a thread.",
    "difference: the largest difference of outputs and gradients from the plain form's in float32, relative to their "
    "norms.",
]
FIGURES = ("ms", "time ÷ linear's", "peak, MiB", "peak ÷ linear's", "difference")


GATED = {"decay": ("log_decay",), "delta": ("beta",), "gated delta": ("log_decay", "beta")}
"""The functions of `gated_linear_attention`, and the options that they have."""


Form = Callable[..., Tensor]
"""One way to compute causal attention of queries, keys and values (B, H, N, D), and its family's further inputs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, lengths=([2048, 4096, 8192], "N"), batch_size=1, n_heads=8, head_dim=64)
    features = (None, "Performer's; default: D ln D")
    add_options(parser, chunk_size=(64, "in PyTorch"), repeats=(5, "rounds"), n_features=features)
    parser.add_argument("--dtype", choices=TYPES, default="float32", help="default: %(default)s")
    about = "torch.set_float32_matmul_precision; default: %(default)s"
    parser.add_argument("--precision", choices=("highest", "high", "medium"), default="highest", help=about)


def run(args: argparse.Namespace) -> Report:
    forms, absent, refused = _forms(args), [], dict[str, str]()
    for name, (device, family, module, form) in PEERS.items():
        if device != args.device.type:
            continue
        if device == "cuda" and family in GATED:
            reason = fla._obstacle(args.device, TYPES[args.dtype], args.head_dim, "log_decay" in GATED[family])
            if reason is not None:
                refused[name] = reason
                continue
        try:
            forms[name] = partial(form, import_module(module))
        except ImportError:
            absent.append(name)
    torch.set_float32_matmul_precision(args.precision)
    missing = [*absent, *refused]
    rows = [row for n in sorted(set(args.lengths)) for row in [*_rows(n, forms, args), *_absent(n, missing)]]
    install = "pip install --no-build-isolation -r benchmarks/requirements-peers.txt"
    notes = [f"Absent, and so not measured: {', '.join(absent)}; {install}."] if absent else []
    notes += [f"Not measured: {name}: {why}." for name, why in refused.items()]
    return Report("kernels", rows, [*NOTES, *notes])


def _forms(args: argparse.Namespace) -> dict[str, Form]:
    """Return the forms of this package."""
    d = args.head_dim
    n_features = args.n_features or math.ceil(d * math.log(d))
    omega = draw_omega(args.n_heads, n_features, d, generator=torch.Generator().manual_seed(1)).float().to(args.device)
    forms: dict[str, Form] = {}
    own = "triton" if args.device.type == "cuda" else None  # by default flash-linear-attention in bfloat16 and float16
    for form, suffix in ((None, ""), ("plain", ", plain")):
        forms[f"linear{suffix}"] = partial(_linear, form, args.chunk_size)
        forms[f"performer{suffix}"] = partial(_performer, form, omega, args.chunk_size)
        forms |= {f"{family}{suffix}": partial(_gated, form or own, family, args.chunk_size) for family in GATED}
    return forms | ({"softmax": _softmax} if args.device.type == "cuda" else {})


def _linear(form: Any, chunk_size: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    elu = q.device.type == "cuda"  # on a CPU features of queries and keys are given
    return causal_linear_attention(q, k, v, *_no_sums(k, v), elu=elu, chunk_size=chunk_size, form=form)[0]


def _no_sums(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    b, h, _, f = k.shape
    return k.new_zeros(b, h, f, v.size(3), dtype=torch.float32), k.new_zeros(b, h, f, dtype=torch.float32)


def _performer(form: Any, omega: Tensor, chunk_size: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = v.new_zeros(len(v), *omega.shape[:2], v.size(3), dtype=torch.float32)  # (B, H, F, D)
    sums = s, s[..., 0].clone(), torch.full_like(s[..., 0], -torch.inf)
    return positive_favor(q, k, v, omega, *sums, chunk_size=chunk_size, form=form)[0]


def _gated(form: Any, family: str, chunk_size: int, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
    given = dict(zip(GATED[family], gates, strict=True))
    return gated_linear_attention(q, k, v, _no_sums(k, v)[0], **given, chunk_size=chunk_size, form=form)[0]


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _fast_transformers(library: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the library's CausalLinearAttention after the feature map, with heads before positions."""
    denominator = torch.einsum("bhnf,bhnf->bhn", q, k.cumsum(2)) + 1e-6
    return library.causal_dot_product(q, k, v) * (1 / denominator)[..., None]


def flash_linear_attention(library: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    by_position = (t.transpose(1, 2) for t in (F.elu(q) + 1, F.elu(k) + 1, v))  # (B, H, N, D) -> (B, N, H, D)
    return library.chunk_linear_attn(*by_position, scale=1.0, normalize=True)[0].transpose(1, 2)


def _performer_pytorch(library: Any, *qkv: Tensor) -> Tensor:
    return library.causal_linear_attention_noncuda(*qkv)


def _transformers(library: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Compute Qwen3-Next's form in PyTorch, which divides queries by √D."""
    function = inspect.unwrap(library.torch_chunk_gated_delta_rule)  # not fla's where that is installed
    by_position = (t.transpose(1, 2) for t in (q * q.size(-1) ** 0.5, k, v, log_decay, beta))
    return function(*by_position)[0].transpose(1, 2)


def _attn_gym(library: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    by_position = (t.transpose(1, 2) for t in (q, k, v, log_decay, beta))  # (B, H, N, D) -> (B, N, H, D)
    return library.chunk_gdn(*by_position, scale=1.0, impl="reference")[0].transpose(1, 2)


def _fla(name: str, library: Any, *tensors: Tensor) -> Tensor:
    by_position = (t.transpose(1, 2) for t in tensors)  # (B, H, N, D) -> (B, N, H, D)
    return getattr(library, name)(*by_position, scale=1.0)[0].transpose(1, 2)


FLA = "flash-linear-attention"
PEERS: dict[str, tuple[str, str, str, Form]] = {
    "pytorch-fast-transformers": ("cpu", "linear", "fast_transformers.causal_product", _fast_transformers),
    "performer-pytorch": ("cpu", "linear", "performer_pytorch.performer_pytorch", _performer_pytorch),
    FLA: ("cuda", "linear", "fla.ops.linear_attn", flash_linear_attention),
    f"{FLA}, decay": ("cuda", "decay", "fla.ops.simple_gla", partial(_fla, "chunk_simple_gla")),
    f"{FLA}, delta": ("cuda", "delta", "fla.ops.delta_rule", partial(_fla, "chunk_delta_rule")),
    f"{FLA}, gated delta": ("cuda", "gated delta", "fla.ops.gated_delta_rule", partial(_fla, "chunk_gated_delta_rule")),
    "transformers": ("cpu", "gated delta", "transformers.models.qwen3_next.modeling_qwen3_next", _transformers),
    "attn-gym": ("cpu", "gated delta", "attn_gym.linear", _attn_gym),
}
"""Libraries: device, the function that is computed, module, and form."""


def _family(name: str) -> str:
    """Return which function a form computes: "linear", "performer" or one of `GATED`."""
    first = name.partition(",")[0]
    return PEERS[name][1] if name in PEERS else first if first in ("performer", *GATED) else "linear"


def _rows(n: int, forms: Mapping[str, Form], args: argparse.Namespace) -> list[Row]:
    """Return a row for each pass and form at length `n`."""
    inputs = {name: _inputs(n, args, _family(name)) for name in forms}
    exact = {
        _family(name): _both_ways(forms[name], [t.detach().float().requires_grad_() for t in inputs[name]])
        for name in forms
        if name.endswith(", plain")
    }
    differences = {
        name: largest_relative_difference(
            _both_ways(form, inputs[name]), exact[_family(name)], f"{name}: the difference from the plain form"
        )
        for name, form in forms.items()
        if name != "softmax"  # another function
    }
    rows: list[Row] = []
    for title, one_pass in PASSES.items():
        calls = {name: partial(one_pass, form, inputs[name]) for name, form in forms.items()}
        peaks = {name: peak_bytes(call, args.device) for name, call in calls.items()}
        seconds = timed(f"N {n}, {title}", calls, args, means=True)
        for name in forms:
            row: Row = {"N": n, "pass": title, "form": name, **compared(name, seconds, peaks, "linear")}
            rows.append(row | {"difference": differences.get(name, "—")})
    return rows


def _absent(n: int, names: Sequence[str]) -> list[Row]:
    return [{"N": n, "pass": title, "form": name, **dict.fromkeys(FIGURES)} for title in PASSES for name in names]


def _inputs(n: int, args: argparse.Namespace, family: str) -> list[Tensor]:
    """Return queries, keys and values (B, H, N, D), for `GATED` with logarithms of decays or strengths (B, H, N).

    On CUDA they are as projections leave them, on a CPU linear's features.
    """
    generator, d, cuda = torch.Generator().manual_seed(0), args.head_dim, args.device.type == "cuda"
    shape = (args.batch_size, n, args.n_heads, d) if cuda else (args.batch_size, args.n_heads, n, d)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    gates = [torch.rand(q.shape[:3], generator=generator) for _ in GATED.get(family, ())]
    if family in GATED:
        k = F.normalize(k, dim=-1)
        if "log_decay" in GATED[family]:
            gates[0] = -gates[0]
    elif family == "performer":
        q, k = q * d**-0.25, k * d**-0.25
    elif not cuda:
        q, k = F.elu(q) + 1, F.elu(k) + 1
    numbers = [t.to(args.device, TYPES[args.dtype]) for t in (q, k, v, *gates)]
    return [(t.transpose(1, 2) if cuda else t).requires_grad_() for t in numbers]


def _forward(form: Form, inputs: list[Tensor]) -> None:
    with torch.no_grad():
        form(*inputs)


def _both_ways(form: Form, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of its product with the values."""
    out = form(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, inputs[2].detach())]


PASSES: dict[str, Callable[[Form, list[Tensor]], Any]] = {"forward": _forward, "forward + backward": _both_ways}
