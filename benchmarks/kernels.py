"""Causal linear attention, Performer and the gated delta rule: kernels, PyTorch, matrix products and libraries."""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measuring import add_options, compared, is_written_in_python, look_inside, peak_bytes, timed
from benchmarks.report import Report, Row
from lit_effattn.ops.favor import cpp_kernels as favor_cpp_kernels
from lit_effattn.ops.favor.pytorch import draw_omega, positive_favor
from lit_effattn.ops.gated_linear import cpp_kernels as gated_cpp_kernels
from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention
from lit_effattn.ops.linear import cpp_kernels as linear_cpp_kernels
from lit_effattn.ops.linear.pytorch import causal_linear_attention
from lit_effattn.ops.runtime import cpp_build
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
    "plain: in PyTorch, differentiated by autograd, in float32.",
    "products: every bmm and baddbmm that the plain form calls at the chunk size of the row's form, recorded from "
    "one call, and run again alone on operands of the same shapes and strides, which are in "
    "the cache if they fit. Of the scores within a chunk, C++ computes only the causal half, and solves a triangular "
    "system by substitution, PyTorch by an inverse.",
    "peak: tensors alive at once in addition to the inputs, those saved for the backward pass included; on a CPU "
    "without the scratch memory of C++ kernels, some chunks and sums a thread.",
    "difference: the largest difference of outputs and gradients from the plain form's in float32, relative to their "
    "norms.",
]
FIGURES = ("ms", "time ÷ linear's", "peak, MiB", "peak ÷ linear's", "time ÷ its products'", "difference")


class Form(NamedTuple):
    """One way to compute causal attention of queries, keys and values (B, H, N, D), and its family's further inputs."""

    call: Callable[..., Tensor]
    cpp: str | None = None  # the source of its kernels in C++
    same: bool = True  # whether it computes the same function as the plain form


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, lengths=([2048, 4096, 8192], "N"), batch_size=1, n_heads=8, head_dim=64)
    features = (None, "Performer's; default: D ln D")
    add_options(parser, chunk_size=(64, "in PyTorch"), repeats=(5, "rounds"), n_features=features)
    parser.add_argument("--dtype", choices=TYPES, default="float32", help="default: %(default)s")
    about = "torch.set_float32_matmul_precision; default: %(default)s"
    parser.add_argument("--precision", choices=("highest", "high", "medium"), default="highest", help=about)


def run(args: argparse.Namespace) -> Report:
    forms, absent = _forms(args), []
    for name, (device, module, form) in PEERS.items():
        try:
            if device == args.device.type:
                forms[name] = Form(partial(form, import_module(module)))
        except ImportError:
            absent.append(name)
    torch.set_float32_matmul_precision(args.precision)
    rows = [row for n in sorted(set(args.lengths)) for row in [*_rows(n, forms, args), *_absent(n, absent)]]
    install = "pip install --no-build-isolation -r benchmarks/requirements-peers.txt"
    notes = [f"Absent, and so not measured: {', '.join(absent)}; {install}."] if absent else []
    return Report("kernels", rows, [*NOTES, *notes])


def _forms(args: argparse.Namespace) -> dict[str, Form]:
    """Return the forms of this package."""
    d = args.head_dim
    n_features = args.n_features or math.ceil(d * math.log(d))
    omega = draw_omega(args.n_heads, n_features, d, generator=torch.Generator().manual_seed(1)).float().to(args.device)
    forms: dict[str, Form] = {}
    for form in (None, "plain"):
        functions = {
            "linear": (partial(_linear, form, args.chunk_size), linear_cpp_kernels.NAME),
            "performer": (partial(_performer, form, omega, args.chunk_size), favor_cpp_kernels.NAME),
            **{f: (partial(_gated, form, f, args.chunk_size), gated_cpp_kernels.NAME) for f in GATED},
        }
        for name, (call, cpp) in functions.items():
            forms[f"{name}, plain" if form else name] = Form(call, cpp=None if form else cpp)
    return forms | ({"softmax": Form(_softmax, same=False)} if args.device.type == "cuda" else {})


def _linear(form: Any, chunk_size: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    elu = q.device.type == "cuda"  # on a CPU features of queries and keys are given
    return causal_linear_attention(q, k, v, *_no_sums(k, v), elu=elu, chunk_size=chunk_size, form=form)[0]


def _no_sums(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    b, h, _, f = k.shape
    return k.new_zeros(b, h, f, v.size(3), dtype=torch.float32), k.new_zeros(b, h, f, dtype=torch.float32)


def _performer(form: Any, omega: Tensor, chunk_size: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return positive_favor(q, k, v, omega, *_no_features(omega, v), chunk_size=chunk_size, form=form)[0]


def _no_features(omega: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = v.new_zeros(len(v), *omega.shape[:2], v.size(3), dtype=torch.float32)  # (B, H, F, D)
    return s, s[..., 0].clone(), torch.full_like(s[..., 0], -torch.inf)


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


PEERS: dict[str, tuple[str, str, Callable[..., Tensor]]] = {
    "pytorch-fast-transformers": ("cpu", "fast_transformers.causal_product", _fast_transformers),
    "performer-pytorch": ("cpu", "performer_pytorch.performer_pytorch", _performer_pytorch),
    "flash-linear-attention": ("cuda", "fla.ops.linear_attn", flash_linear_attention),
    "flash-linear-attention, decay": ("cuda", "fla.ops.simple_gla", partial(_fla, "chunk_simple_gla")),
    "flash-linear-attention, delta": ("cuda", "fla.ops.delta_rule", partial(_fla, "chunk_delta_rule")),
    "flash-linear-attention, gated delta": (
        "cuda",
        "fla.ops.gated_delta_rule",
        partial(_fla, "chunk_gated_delta_rule"),
    ),
    "transformers": ("cpu", "transformers.models.qwen3_next.modeling_qwen3_next", _transformers),
    "attn-gym": ("cpu", "attn_gym.linear", _attn_gym),
}
"""Libraries that compute linear attention, with decays or the delta rule: device, module and function."""

FAMILIES = {
    "flash-linear-attention, decay": "decay",
    "flash-linear-attention, delta": "delta",
    "flash-linear-attention, gated delta": "gated delta",
    "transformers": "gated delta",
    "attn-gym": "gated delta",
}
"""The functions that libraries compute which do not compute linear attention."""


def _family(name: str) -> str:
    """Return which function a form computes: "linear", "performer" or one of `GATED`."""
    first = name.partition(",")[0]
    return first if first in ("performer", *GATED) else FAMILIES.get(name, "linear")


def _rows(n: int, forms: Mapping[str, Form], args: argparse.Namespace) -> list[Row]:
    """Return a row for each pass and form at length `n`."""
    inputs = {name: _inputs(n, args, _family(name)) for name in forms}

    def call_of(name: str, one_pass: Callable[..., Any]) -> Callable[[], Any]:
        return partial(one_pass, forms[name], inputs[name])

    exact = {
        _family(name): _both_ways(forms[name], [t.detach().float().requires_grad_() for t in inputs[name]])
        for name in forms
        if name.endswith(", plain")
    }
    differences = {
        name: largest_relative_difference(
            call_of(name, _both_ways)(), exact[_family(name)], f"{name}: the difference from the plain form"
        )
        for name, form in forms.items()
        if form.same
    }
    rows: list[Row] = []
    for title, one_pass in PASSES.items():
        calls = {name: call_of(name, one_pass) for name in forms}
        products = {
            f"products of {name}": Products(_at_its_chunk_size(name, forms[name], one_pass, inputs[name], args))
            for name in OURS
            if args.device.type == "cpu"
        }
        peaks = {name: peak_bytes(call, args.device) for name, call in calls.items()}
        for call in (*calls.values(), *products.values()):
            call()  # one-time allocations
        seconds = timed(f"N {n}, {title}", {**calls, **products}, args, means=True)
        for name in forms:
            of_products = seconds.get(f"products of {name}")
            row: Row = {"N": n, "pass": title, "form": name, **compared(name, seconds, peaks, "linear")}
            row["time ÷ its products'"] = "—" if of_products is None else seconds[name] / of_products
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
        form.call(*inputs)


def _both_ways(form: Form, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of its product with the values."""
    out = form.call(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, inputs[2].detach())]


PASSES: dict[str, Callable[[Form, list[Tensor]], Any]] = {"forward": _forward, "forward + backward": _both_ways}


def _at_its_chunk_size(
    name: str, form: Form, one_pass: Callable[..., Any], inputs: list[Tensor], args: argparse.Namespace
) -> Callable[[], Any]:
    """Return the call whose products are recorded: plain, with the chunk size of the kernel in C++, if any."""
    if form.cpp is not None and cpp_build.obstacle(form.cpp) is None:
        chunk = cpp_build.library(form.cpp).positions_of_a_chunk()
        form = _forms(argparse.Namespace(**{**vars(args), "chunk_size": chunk}))[f"{name}, plain"]
    return partial(one_pass, form, inputs)


class Products(TorchDispatchMode):
    """Records the matrix products of a function; calling it repeats them, and nothing else.

    Args:
        function: The function.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self.operands: dict[Any, Tensor] = {}  # one for all with the same layout
        self.calls: list[Callable[[], Any]] = []
        self.multiplications = 0  # of numbers
        with self:
            function()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_written_in_python(func, args):
            return look_inside(self, func, args)
        if func is torch.ops.aten.matmul.default:  # as it is seen inside an operator
            with self:
                return func.decompose(*args)
        if func in PRODUCTS:
            self.multiplications += args[-2].numel() * args[-1].size(-1)
            self.calls.append(partial(func, *(self._like(t, i) for i, t in enumerate(args)), **(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _like(self, t: Tensor, place: int) -> Tensor:
        """Return a tensor with the layout of `t`, the argument at `place`."""
        key = (place, t.shape, t.stride())
        if key not in self.operands:
            like = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            self.operands[key] = like.zero_()  # written to: untouched memory would all be one page
        return self.operands[key]

    def __call__(self) -> None:
        """Multiply."""
        for call in self.calls:
            call()


PRODUCTS = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default, torch.ops.aten.baddbmm_.default)
GATED = {"decay": ("log_decay",), "delta": ("beta",), "gated delta": ("log_decay", "beta")}
"""The functions of `gated_linear_attention`, and the options that they have."""

OURS = tuple(f"{name}{form}" for name in ("linear", "performer", *GATED) for form in ("", ", plain"))
"""Forms whose matrix products are known."""
