"""Causal linear attention and Performer against their own matrix products, the plain form and other libraries."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measuring import (
    LEAST,
    MIB,
    Spread,
    interleaved,
    is_written_in_python,
    look_inside,
    mean_of,
    peak_bytes,
    seconds_of,
)
from benchmarks.models import at_least
from benchmarks.report import Report, Row
from lit_effattn.differences import largest
from lit_effattn.ops.favor import cpp_kernels as favor_cpp_kernels
from lit_effattn.ops.favor.pytorch import causal_favor, draw_omega, log_offset
from lit_effattn.ops.linear import cpp_kernels as linear_cpp_kernels
from lit_effattn.ops.linear.pytorch import causal_linear_attention, plain_causal_linear_attention
from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.selection import KERNELS

SQUARE = 1024
"""Rows and columns of the product that runs at full speed."""

NOTES = [
    "Features of queries and keys (elu + 1 of normal numbers; Performer, which computes its own: the numbers divided "
    "by D^¼) and values are given; float32. Figures are median (min–max) over the rounds, in which all take turns; "
    f"a round's is the mean of as many calls as take {LEAST} s, after one (of 1 s or more: that one). "
    "Ratios are taken round by round.",
    "linear, performer: as they are chosen, in C++ where there is a compiler; in PyTorch: LIT_EFFATTN_KERNELS=plain.",
    "products: every bmm and baddbmm that the form in PyTorch calls at the chunk size of the row's form, recorded from "
    "one call, recomputation included, run again by itself; of a chunk's own scores C++ computes but the half that "
    "counts. in place: on operands that lie in memory as the form's did, each chunk's its own, so that what the form "
    "has to fetch for them they fetch too. in cache: on one set of operands of the same shapes and strides for all "
    "chunks, which is in the cache as far as it fits. best products: in cache, those of linear at the chunk size of "
    "16, 32, 64, 128 and 256 at which they take least.",
    "fewest products at full speed: linear's at whichever of those chunk sizes has the fewest operations, were they as "
    f"fast as the product of two {SQUARE:,} × {SQUARE:,} matrices in the same round.",
    "peak: tensors alive at once above the inputs, those that wait for the backward pass included; not what a kernel "
    "in C++ takes for itself, some chunks and sums a thread.",
    "difference: the largest of outputs and gradients from linear's, relative to linear's largest value.",
    "numerators: the library's C++ kernel alone, without denominators, which the row above adds as the library does.",
]

CHUNKS = (16, 32, 64, 128, 256)

Form = Callable[..., Tensor]
"""Takes features of queries and keys and values, (B, H, N, ·), and returns (B, H, N, D)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths", type=at_least(2), nargs="+", default=[2048, 4096, 8192], help="N; default: %(default)s"
    )
    for name, default in (("batch_size", 1), ("n_heads", 8), ("head_dim", 64)):
        parser.add_argument(f"--{name}", type=at_least(1), default=default, help="default: %(default)s")
    parser.add_argument("--chunk_size", type=at_least(1), default=64, help="linear's; default: %(default)s")
    parser.add_argument("--n_features", type=at_least(1), help="Performer's; default: D ln D")
    parser.add_argument("--repeats", type=at_least(1), default=5, help="rounds; default: %(default)s")
    parser.add_argument(
        "--cpu_time", action="store_true", help="the process's CPU time, for a machine that does other work too"
    )


def run(args: argparse.Namespace) -> Report:
    if args.cpu_time and args.device.type != "cpu":
        raise SystemExit(f"kernels: --cpu_time measures no {args.device}; leave it out, or add --device cpu")
    peers, absent = _peers()
    rows = []
    for n in sorted(set(args.lengths)):
        rows += _rows(n, _linear_forms(args) | peers, args) + [row for name in absent for row in _absent(n, name)]
    install = "pip install --no-build-isolation -r benchmarks/requirements-peers.txt"
    notes = [f"Absent, and so not measured: {', '.join(absent)}; {install}."] if absent else []
    return Report("kernels", rows, [*NOTES, *notes])


# ------------------------------------------------------------------------------------------------------------ the forms


def _linear_forms(args: argparse.Namespace) -> dict[str, Form]:
    return {
        "linear": partial(_linear, causal_linear_attention, args.chunk_size),
        "linear, in PyTorch": partial(_linear, causal_linear_attention, args.chunk_size),
        "linear, plain": partial(_linear, plain_causal_linear_attention, args.chunk_size),
        "performer": partial(_performer, args.chunk_size, _directions(args)),
        "performer, in PyTorch": partial(_performer, args.chunk_size, _directions(args)),
    }


def _in_pytorch(call: Callable[[], Any]) -> Callable[[], Any]:
    """Make a call that uses no kernels."""

    def forced() -> Any:
        before = os.environ.get(KERNELS)
        os.environ[KERNELS] = "plain"
        try:
            return call()
        finally:
            os.environ.pop(KERNELS)
            os.environ.update({} if before is None else {KERNELS: before})

    return forced


def _linear(function: Callable[..., tuple[Tensor, ...]], chunk_size: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, _, f = q.shape
    return function(q, k, v, q.new_zeros(b, h, f, v.size(-1)), q.new_zeros(b, h, f), chunk_size=chunk_size)[0]


def _directions(args: argparse.Namespace) -> Tensor:
    """Draw ω, (H, F, D)."""
    d = args.head_dim
    n_features = args.n_features or math.ceil(d * math.log(d))
    return draw_omega(args.n_heads, n_features, d, generator=torch.Generator().manual_seed(1)).float().to(args.device)


def _performer(chunk_size: int, omega: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, (h, f, _) = len(q), omega.shape
    s, z, m = v.new_zeros(b, h, f, v.size(-1)), v.new_zeros(b, h, f), v.new_full((b, h, f), -torch.inf)
    return causal_favor(q, k, v, omega, log_offset(k, f), s, z, m, chunk_size=chunk_size)[0]


def _peers() -> tuple[dict[str, Form], list[str]]:
    """Return the other libraries' forms, and the names of those that are not installed."""
    found: dict[str, Form] = {}
    absent = []
    for name, (module, forms) in PEERS.items():
        try:
            library = import_module(module)
        except ImportError:
            absent.append(name)
        else:
            found |= {name + suffix: partial(form, library) for suffix, form in forms.items()}
    return found, absent


def _fast_transformers(library: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Do what the library's CausalLinearAttention does after the feature map, its heads already before positions."""
    below = torch.einsum("bhnf,bhnf->bhn", q, k.cumsum(2)) + 1e-6
    return library.causal_dot_product(q, k, v) * (1 / below)[..., None]


def _fast_transformers_numerators(library: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return library.causal_dot_product(q, k, v)


def _performer_pytorch(library: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return library.causal_linear_attention_noncuda(q, k, v)


PEERS: dict[str, tuple[str, dict[str, Callable[..., Tensor]]]] = {
    "pytorch-fast-transformers": (
        "fast_transformers.causal_product",
        {"": _fast_transformers, ", numerators": _fast_transformers_numerators},
    ),
    "performer-pytorch": ("performer_pytorch.performer_pytorch", {"": _performer_pytorch}),
}
"""The libraries in requirements-peers.txt, the module that has each one's function, and how it is called."""


# ------------------------------------------------------------------------------------------------------ the measurement


def _rows(n: int, forms: Mapping[str, Form], args: argparse.Namespace) -> list[Row]:
    """Return a row for each pass and form at length `n`."""
    inputs = {name: _inputs(n, args, raw=name in PERFORMER) for name in forms}

    def call_of(name: str, one_pass: Callable[[Form, list[Tensor]], Any]) -> Callable[[], Any]:
        call = partial(one_pass, forms[name], inputs[name])
        return _in_pytorch(call) if name.endswith("in PyTorch") else call

    differences = _differences({name: call_of(name, _gradients)() for name in forms if _same(name)})
    rows: list[Row] = []
    for title, one_pass in PASSES.items():
        calls = {name: call_of(name, one_pass) for name in forms}
        products: dict[str, Products] = {}
        for name in OURS:
            own = _at_its_chunk_size(name, one_pass, inputs[name], args) or calls[name]
            products |= {name: Products(own), f"{name}, in place": Products(own, in_place=True)}
        for chunk in CHUNKS:
            form = partial(_linear, causal_linear_attention, chunk)
            call = partial(one_pass, form, inputs["linear"])
            products[f"chunks of {chunk}"] = Products(_in_pytorch(call))
        peaks = {name: peak_bytes(call, args.device) for name, call in calls.items()}
        measures: dict[str, Callable[[], Any]] = {**calls, "full speed": _square(args.device)}
        measures |= {f"products of {name}": replay for name, replay in products.items()}
        for measure in measures.values():
            measure()  # what is allocated once
        clock = _cpu_seconds if args.cpu_time else partial(seconds_of, device=args.device)
        means = {name: partial(mean_of, clock, measure) for name, measure in measures.items()}
        timed = interleaved(f"N {n}, {title}", means, args.repeats)
        seconds = {name: Spread(tuple(samples)) for name, samples in timed.items()}
        best = min((seconds[f"products of chunks of {chunk}"] for chunk in CHUNKS), key=lambda s: s.median)
        fewest = min(products[f"chunks of {chunk}"].multiplications for chunk in CHUNKS)
        limit = seconds["full speed"].map(lambda s: s * fewest / SQUARE**3)  # noqa: B023, called at once
        rows += [
            {
                "N": n,
                "pass": title,
                "form": name,
                "ms": seconds[name].map(lambda s: 1000 * s),
                "time ÷ its products', in place": _over(seconds, name, ", in place"),
                "time ÷ its products', in cache": _over(seconds, name),
                "time ÷ best products'": "—" if name in PERFORMER else seconds[name] / best,
                "time ÷ fewest products' at full speed": "—" if name in PERFORMER else seconds[name] / limit,
                "time ÷ linear's": seconds[name] / seconds["linear"],
                "peak, MiB": peaks[name] / MIB,
                "peak ÷ linear's": peaks[name] / peaks["linear"],
                "difference": differences.get(name, "—"),
            }
            for name in forms
        ]
    return rows


def _at_its_chunk_size(
    name: str, one_pass: Callable[[Form, list[Tensor]], Any], inputs: list[Tensor], args: argparse.Namespace
) -> Callable[[], Any] | None:
    """Return the call in PyTorch whose products a kernel in C++ performs; None where `name` is none."""
    if name not in IN_CPP or cpp_build.obstacle(IN_CPP[name]) is not None or inputs[0].device.type != "cpu":
        return None
    chunk = cpp_build.library(IN_CPP[name]).positions_of_a_chunk()
    form = partial(_linear, causal_linear_attention, chunk)
    if name == "performer":
        form = partial(_performer, chunk, _directions(args))
    return _in_pytorch(partial(one_pass, form, inputs))


def _over(seconds: Mapping[str, Spread], name: str, how: str = "") -> Spread | str:
    return seconds[name] / seconds[f"products of {name}{how}"] if name in OURS else "—"


def _absent(n: int, name: str) -> list[Row]:
    return [{"N": n, "pass": title, "form": name, **dict.fromkeys(FIGURES)} for title in PASSES]


def _square(device: torch.device) -> Callable[[], Any]:
    a, b, out = (torch.ones(SQUARE, SQUARE, device=device) for _ in range(3))
    return partial(torch.mm, a, b, out=out)


def _cpu_seconds(function: Callable[[], Any]) -> float:
    """Time one call by what this process, all its threads together, has of the CPU."""
    start = time.process_time()
    function()
    return time.process_time() - start


def _inputs(n: int, args: argparse.Namespace, *, raw: bool) -> list[Tensor]:
    """Return features of queries and keys, or what Performer makes its features of, and values, (B, H, N, ·)."""
    generator = torch.Generator().manual_seed(0)
    b, h, d = args.batch_size, args.n_heads, args.head_dim
    q, k, v = (torch.randn(b, h, n, d, generator=generator) for _ in range(3))
    q, k = (x * d**-0.25 if raw else F.elu(x) + 1 for x in (q, k))
    return [x.to(args.device).requires_grad_() for x in (q, k, v)]


def _forward(form: Form, inputs: list[Tensor]) -> None:
    with torch.no_grad():
        form(*inputs)


def _gradients(form: Form, inputs: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of its product with fixed numbers."""
    out = form(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, inputs[2].detach())]


PASSES: dict[str, Callable[[Form, list[Tensor]], Any]] = {"forward": _forward, "forward + backward": _gradients}


def _same(name: str) -> bool:
    """Whether a form computes what linear does."""
    return name not in PERFORMER and not name.endswith("numerators")


def _differences(results: Mapping[str, list[Tensor]]) -> dict[str, float]:
    """Return the largest difference of any tensor from linear's, relative to that tensor's largest value."""
    linear = results["linear"]

    def difference(name: str, found: list[Tensor]) -> float:
        relative = (float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, linear, strict=True))
        return largest(relative, f"{name}: the difference from linear")

    return {name: difference(name, found) for name, found in results.items() if name != "linear"}


class Products(TorchDispatchMode):
    """The matrix products that a call performs, recorded once; a call performs them again, and nothing else.

    Args:
        function: The call.
        in_place: Whether operands lie as they did, temporary ones too: at the same places of as many storages. Else
            all that are laid out alike are one.
    """

    def __init__(self, function: Callable[[], Any], *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.operands: dict[Any, Tensor] = {}
        self.calls: list[Callable[[], Any]] = []
        self.multiplications = 0  # of numbers
        with self:
            function()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_written_in_python(func, args):
            return look_inside(self, func, args)
        if func in PRODUCTS:
            self.multiplications += args[-2].numel() * args[-1].size(-1)
            self.calls.append(partial(func, *(self._like(t, i) for i, t in enumerate(args)), **(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def _like(self, t: Tensor, place: int) -> Tensor:
        """Return a tensor laid out as `t`, the argument in that place."""
        if self.in_place:
            held = t.untyped_storage()
            key: Any = (held.data_ptr(), held.nbytes())
            if key not in self.operands:
                self.operands[key] = t.new_empty(held.nbytes() // t.itemsize).fill_(0)  # written to, as below
            return self.operands[key].as_strided(t.shape, t.stride(), t.storage_offset())
        key = (place, t.shape, t.stride())
        if key not in self.operands:
            like = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            self.operands[key] = like.zero_()  # written to: memory that was never touched would all be one page
        return self.operands[key]

    def __call__(self) -> None:
        """Multiply."""
        for call in self.calls:
            call()


FIGURES = (
    "ms",
    "time ÷ its products', in place",
    "time ÷ its products', in cache",
    "time ÷ best products'",
    "time ÷ fewest products' at full speed",
    "time ÷ linear's",
    "peak, MiB",
    "peak ÷ linear's",
    "difference",
)
PRODUCTS = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default, torch.ops.aten.baddbmm_.default)
PERFORMER = ("performer", "performer, in PyTorch")
OURS = ("linear", "linear, in PyTorch", "linear, plain", *PERFORMER)
IN_CPP = {"linear": linear_cpp_kernels.NAME, "performer": favor_cpp_kernels.NAME}
"""Those of them that are kernels in C++, and their sources."""
