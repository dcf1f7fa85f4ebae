"""Custom operators and their forms: Triton on CUDA and C++ on the CPU where possible, else PyTorch ("plain").

C++ kernels are compiled before their first use (see `cpp_build`). The environment variable `LIT_EFFATTN_KERNELS` forces
a form: "plain", "triton", "fla" (the recurrences by flash-linear-attention, else as "triton") or "cpp". If a forced
form is not usable, an error is raised.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from lit_effattn.ops.runtime import cpp_build

KERNELS = "LIT_EFFATTN_KERNELS"
"""The environment variable that forces a form."""

FORMS = ("plain", "triton", "fla", "cpp")
"""The values of `KERNELS`."""

Form = Literal["plain", "triton", "fla", "cpp", "onnx"]
"""How an operation is computed; "onnx": an exported program contains the operator, which ONNX has too."""

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Supported types of queries, keys and values."""

WIDEST = 128
"""Maximum width of queries, keys or values on CUDA, so that a program's sums stay in registers."""

_INTERPRET = "TRITON_INTERPRET"  # Triton's variable: its kernels then run in Python, on the CPU
_OLDEST = (8, 0)  # compute capability, the first with TF32

_keeps_operators = False


@contextmanager
def kept() -> Iterator[None]:
    """Within the context, programs of `torch.export` keep the operators for which ONNX has one too.

    Otherwise they consist of PyTorch's own operators, which any program can run.
    """
    global _keeps_operators
    before, _keeps_operators = _keeps_operators, True
    try:
        yield
    finally:
        _keeps_operators = before


def default_form(device: torch.device) -> Form:
    """Return the form of operations on `device`, if their kernels can be used.

    Raises:
        ValueError: If `LIT_EFFATTN_KERNELS` is not a form.
    """
    asked = os.environ.get(KERNELS, "")
    if asked not in ("", *FORMS):
        raise ValueError(
            f"{KERNELS}={asked!r} in the environment is not one of {', '.join(FORMS)}; unset it for an automatic choice"
        )
    if torch.compiler.is_exporting():
        return "onnx" if _keeps_operators else "plain"
    if asked == "fla":
        return "triton"
    return asked or {"cuda": "triton", "cpu": "cpp"}.get(device.type, "plain")  # type: ignore[return-value]


def choose_form(
    form: Form | None, what: str, name: str, *tensors: Tensor, width: int, shared: int = 0, obstacle: str | None = None
) -> Form:
    """Return `form`, or choose the form of an operation by the device, the types and the widths of its tensors.

    A warning gives the reason once if kernels can't be used, unless a form was asked for. There are none for float64 on
    the CPU, which causes no warning.

    Args:
        form: The form asked for. None: what `LIT_EFFATTN_KERNELS` says, or the fastest.
        what: Name of the operation, for messages.
        name: Its folder in `lit_effattn.ops`.
        tensors: Its heads and sums, whose types and device are checked.
        width: The largest width of a head.
        shared: KiB of `shared_memory` that its Triton kernels need.
        obstacle: Why its Triton kernels in particular can't be used, or None.

    Raises:
        ValueError: If the form that was asked for can't be used, or `LIT_EFFATTN_KERNELS` is not a form.
    """
    return _chosen(form, what, name, tensors[0].device, tuple(t.dtype for t in tensors), width, shared, obstacle)


@torch.compiler.assume_constant_result
def _chosen(
    form: Form | None,
    what: str,
    name: str,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    width: int,
    shared: int,
    obstacle: str | None,
) -> Form:
    if form is None and in_forward_mode():
        return "plain"
    chosen, is_forced = form or default_form(device), bool(form or os.environ.get(KERNELS))
    if chosen == "triton":
        obstacle = _obstacle_of_device(device) or obstacle or _obstacle_of_types(dtypes) or _obstacle_of_width(width)
        obstacle = obstacle or _obstacle_of_memory(device, shared)
    elif chosen == "cpp" and device.type != "cpu":
        obstacle = f"the tensors are on {device}; they are for the CPU"
    elif chosen == "cpp":
        obstacle = _obstacle_of_types(dtypes)
        if obstacle is not None and not is_forced:
            return "plain"
        obstacle = obstacle or cpp_build.obstacle(name)
    else:
        return chosen
    if obstacle is None:
        return chosen
    if is_forced:
        asked = f"{KERNELS}={os.environ[KERNELS]}" if form is None else f"form={form}"
        raise ValueError(f"{asked}, but the kernels of {what} can't be used: {obstacle}")
    _notice(what, obstacle)
    return "plain"


@torch.compiler.assume_constant_result
def in_forward_mode() -> bool:
    """Return whether `torch.func` computes derivatives forwards (jvp, jacfwd). Operators would give it zeros."""
    functorch: Any = torch._C._functorch
    return any(level.key() == functorch.TransformType.Jvp for level in functorch.get_interpreter_stack() or ())


def _obstacle_of_device(device: torch.device) -> str | None:
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get(_INTERPRET) == "1"):
        return f"the tensors are on {device}; they are for CUDA (and, with {_INTERPRET}=1, for tests on the CPU)"
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if device.type == "cuda" and torch.version.hip is not None:
        return "they are for NVIDIA's GPUs, and this is ROCm"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _OLDEST:
        return f"{torch.cuda.get_device_name(device)} is older than compute capability {_OLDEST[0]}.{_OLDEST[1]}"
    return None


def _obstacle_of_types(dtypes: tuple[torch.dtype, ...]) -> str | None:
    other = next((dtype for dtype in dtypes if dtype not in TYPES), None)
    return None if other is None else f"{other} is not one of their types; choose torch.float32 or less"


def _obstacle_of_width(width: int) -> str | None:
    return f"heads of width {width} are wider than {WIDEST}; choose more heads" if width > WIDEST else None


def _obstacle_of_memory(device: torch.device, shared: int) -> str | None:
    if not shared or shared_memory(device) >= shared:
        return None
    return (
        f"these heads need {shared} KiB of shared memory, and {torch.cuda.get_device_name(device)} has "
        f"{shared_memory(device)}; choose more heads, or bfloat16"
    )


@cache
def shared_memory(device: torch.device) -> int:
    """Return the KiB of shared memory of a multiprocessor, of which a program may have all but 1.

    They are 228 for an H100 (and if interpreted), 164 for an A100, and 100 for compute capability 8.6 and 8.9.
    """
    if device.type != "cuda":
        return 228
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor // 1024


@cache
def _notice(what: str, obstacle: str) -> None:
    warnings.warn(
        f"{what} runs in its plain form, slower than its kernels, which can't be used: {obstacle}. "
        f"{KERNELS}=plain in the environment silences this",
        stacklevel=6,
    )


def check_arguments(q: Tensor, sums: Mapping[str, Tensor], **arguments: tuple[Any, ...]) -> None:
    """Check the arguments of an operation on queries `q`, each given by its name.

    Args:
        q: Queries, for the message.
        sums: The tensors in whose type is computed.
        arguments: A tensor or None, and the shapes that it may have.

    Raises:
        ValueError: If a tensor has another shape, or sums have another type than float32 and float64.
    """
    for name, (t, *shapes) in arguments.items():
        if t is not None and t.shape not in shapes:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; with q of {tuple(q.shape)} it should be "
                + " or ".join(map(str, dict.fromkeys(shapes)))
            )
    for name, t in sums.items():
        if t.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} is {t.dtype}; sums must be torch.float32 or more: {name}.float()")


def by_position(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate (B, H, N, D) in the memory layout (B, N, H, D), so that joining the heads needs no copy."""
    b, h, n, d = like.shape
    return like.new_empty(b, n, h, d, dtype=dtype).transpose(1, 2)


class Heads(ctypes.Structure):
    """A float32 tensor (B, H, N, D), contiguous in its last dimension; as `Heads` in gemm_tiles.hpp."""

    _fields_ = (
        ("p", ctypes.c_void_p),
        ("b", ctypes.c_int64),
        ("h", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )

    @classmethod
    def of(cls, t: Tensor | None) -> Heads:
        """Describe `t`, which must outlive the result; a null pointer for None."""
        return cls() if t is None else cls(t.data_ptr(), *t.stride()[:3], t.size(3))


def heads(t: Tensor) -> Tensor:
    """Return `t` in float32, contiguous in its last dimension."""
    t = t.float()
    return t if t.stride(-1) == 1 or t.size(-1) <= 1 else t.contiguous()


def copied(t: Tensor) -> Tensor:
    """Return a float32 copy of `t`, for a kernel to write to."""
    return t.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def address(t: Tensor | None) -> int | None:
    """Return the address of `t`'s data, for a kernel; None for None."""
    return None if t is None else t.data_ptr()


class Operator:
    """The operators `lit_effattn::name` and `lit_effattn::name_backward`, its gradients, which have no gradients.

    `torch.compile`, dispatch modes and tracers see them like PyTorch's own operators.

    Args:
        name: Name of the operator.
        signature: Its arguments and results, as in `torch.library.define`.
        signature_of_backward: Arguments and results of its gradients.
        forward: Its implementation.
        backward: The implementation of its gradients.
        shapes: Allocates its results, of the right shapes and layouts, without computing them.
        backward_shapes: The same for its gradients.
        keep: Takes autograd's context, the arguments and the results, and saves the inputs of `gradients`.
        gradients: Takes autograd's context and the results' gradients, calls `self.backward` and returns the
            arguments' gradients.
        refusal: Error message if the gradients are differentiated.
    """

    def __init__(
        self,
        name: str,
        signature: str,
        signature_of_backward: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        *,
        shapes: Callable[..., Any],
        backward_shapes: Callable[..., Any],
        keep: Callable[[Any, tuple[Any, ...], Any], None],
        gradients: Callable[..., tuple[Tensor | None, ...]],
        refusal: str,
    ) -> None:
        whole = f"lit_effattn::{name}"
        of_backward = f"{whole}_backward"
        # `torch.library.custom_op` does the same with more Python for each call.
        torch.library.define(whole, signature)
        torch.library.define(of_backward, signature_of_backward)
        torch.library.impl(whole, ("cpu", "cuda"), forward)
        torch.library.impl(of_backward, ("cpu", "cuda"), backward)
        torch.library.register_fake(whole, shapes)
        torch.library.register_fake(of_backward, backward_shapes)
        torch.library.register_autograd(whole, gradients, setup_context=keep)
        torch.library.register_autograd(of_backward, _refusing(refusal))
        self.forward = getattr(torch.ops.lit_effattn, name).default
        """Applies the operator, with autograd."""
        self.backward = getattr(torch.ops.lit_effattn, f"{name}_backward").default
        """Returns the gradients, the results of `signature_of_backward`."""


def in_form(cpp: Callable[..., Any], triton: str) -> Callable[..., Any]:
    """Return an implementation whose last argument is the form.

    Args:
        cpp: The form in C++.
        triton: Module and name of the form in Triton, which is optional and slow to import.
    """
    module, _, name = triton.rpartition(".")

    def call(first: Tensor, *arguments: Any) -> Any:
        *inputs, form = arguments
        if form == "cpp":
            return cpp(first, *inputs)
        with torch.cuda.device(first.device) if first.is_cuda else nullcontext():  # Triton launches on the current GPU
            return getattr(import_module(module), name)(first, *inputs)

    return call


def _refusing(refusal: str) -> Callable[..., Any]:
    def refuse(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError(refusal)

    return refuse
