"""Selection of kernels: Triton on CUDA and C++ on the CPU where possible, else PyTorch ("plain").

Triton kernels are compared with the plain form before their first use. C++ kernels are compiled before their first use
(see `cpp_build`). The environment variable `LIT_EFFATTN_KERNELS` forces a form: "plain", "triton", "fla" (the
recurrences by flash-linear-attention, else as "triton") or "c++". If a forced form is not usable, an error is raised.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.differences import largest_relative_difference

KERNELS = "LIT_EFFATTN_KERNELS"
"""The environment variable that forces a form."""

FORMS = ("plain", "triton", "fla", "c++")
"""The values of `KERNELS`."""

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Supported types of queries, keys and values."""

WIDEST = 128
"""Maximum width of queries, keys or values on CUDA, so that a program's sums stay in registers."""

_INTERPRET = "TRITON_INTERPRET"  # Triton's variable: its kernels then run in Python, on the CPU
_OLDEST = (8, 0)  # compute capability, the first with TF32


def use_triton(
    what: str,
    asked: str,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    width: int,
    obstacle: str | None,
    trial: Callable[[], str | None],
) -> bool:
    """Return whether to use Triton kernels.

    On CUDA, a warning gives the reason once if they can't be used, unless another form was asked for.

    Args:
        what: Name of the operation, for messages.
        asked: The value of `LIT_EFFATTN_KERNELS`, "" if it is not set.
        device: Device of the tensors.
        dtypes: Types of the tensors.
        width: Largest width of the tensors.
        obstacle: Why these kernels in particular can't be used, or None.
        trial: Compares the kernels with the plain form on this device; returns the fault, or None.

    Raises:
        ValueError: If `LIT_EFFATTN_KERNELS` is not a form, or is "triton", which can't be used.
    """
    if _form(asked, device) != "triton":
        return False
    obstacle = _obstacle_of_device(device) or obstacle or _obstacle_of_tensors(dtypes, width)
    if obstacle is None and asked == "":
        obstacle = trial()
    return _usable_or_raise(what, asked, obstacle)


def use_cpp(what: str, asked: str, device: torch.device, dtypes: tuple[torch.dtype, ...], name: str) -> bool:
    """Return whether to use C++ kernels.

    On the CPU, a warning gives the reason once if they can't be used, unless another form was asked for. There are none
    for float64, which causes no warning.

    Args:
        what: Name of the operation, for messages.
        asked: The value of `LIT_EFFATTN_KERNELS`, "" if it is not set.
        device: Device of the tensors.
        dtypes: Types of the tensors.
        name: Name of the source.

    Raises:
        ValueError: If `LIT_EFFATTN_KERNELS` is not a form, or is "c++", which can't be used.
    """
    if _form(asked, device) != "c++":
        return False
    if device.type != "cpu":
        return _usable_or_raise(what, asked, f"the tensors are on {device}; they are for the CPU")
    if not set(dtypes) <= set(TYPES):
        return asked != "" and _usable_or_raise(what, asked, _obstacle_of_tensors(dtypes, 0))
    return _usable_or_raise(what, asked, cpp_build.obstacle(name))


def use_cpp_in_float32(what: str, name: str, heads: tuple[Tensor, ...], sums: tuple[Tensor, ...]) -> bool:
    """Return whether to use C++ kernels for float32 alone, whose inputs `heads` are contiguous in the last dimension.

    See `use_cpp` for `what`, `name` and the warning.
    """
    if any(t.dtype != torch.float32 for t in (*heads, *sums)) or any(t.stride(-1) != 1 for t in heads):
        return False
    return use_cpp(what, os.environ.get(KERNELS, ""), heads[0].device, (torch.float32,), name)


def _form(asked: str, device: torch.device) -> str:
    """Return the form asked for, or else the device's default; plain in an exported program, which sums run."""
    if asked not in ("", *FORMS):
        raise ValueError(
            f"{KERNELS}={asked!r} in the environment is not one of {', '.join(FORMS)}; unset it for an automatic choice"
        )
    if torch.compiler.is_exporting():
        return "plain"
    if asked == "fla":
        return "triton"
    return asked or {"cuda": "triton", "cpu": "c++"}.get(device.type, "plain")


def _usable_or_raise(what: str, asked: str, obstacle: str | None) -> bool:
    """Return whether there is no obstacle. Warn of an obstacle, or raise it if the form was asked for."""
    if obstacle is None:
        return True
    if asked != "":
        raise ValueError(f"{KERNELS}={asked}, but the kernels of {what} can't be used: {obstacle}")
    _notice(what, obstacle)
    return False


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


def _obstacle_of_tensors(dtypes: tuple[torch.dtype, ...], width: int) -> str | None:
    for dtype in dtypes:
        if dtype not in TYPES:
            return f"{dtype} is not one of their types; choose torch.float32 or less"
    if width > WIDEST:
        return f"heads of width {width} are wider than {WIDEST}; choose more heads"
    return None


@cache
def _notice(what: str, obstacle: str) -> None:
    warnings.warn(
        f"{what} runs in its plain form, slower than its kernels, which can't be used: {obstacle}. "
        f"{KERNELS}=plain in the environment silences this",
        stacklevel=6,
    )


def failed_self_check(
    device: torch.device,
    dtype: torch.dtype,
    compare: Callable[[], tuple[Iterable[Tensor], Iterable[Tensor]]],
    *,
    most: float = 0.02,
) -> str | None:
    """Compare kernels with the plain form, since other GPUs and compilers may differ. Return the fault, or None.

    Args:
        device: Device of the comparison.
        dtype: Type of the inputs.
        compare: Returns the kernels' results, and those of the plain form in float32.
        most: Maximum error, relative to the norm of the result.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad():
            results, expected = compare()
        worst = largest_relative_difference(results, expected)
    except Exception as error:  # Triton's compiler and the driver raise many types
        return f"tried on {device} in {dtype}, they fail: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # bfloat16 rounds to 2⁻⁹; a wrong result is off by far more.
    return None if worst < most else f"tried on {device} in {dtype}, they are off by {worst:.1%}"


def refuse_others(
    sums: dict[str, Tensor],
    heads: dict[str, Tensor],
    otherwise: str,
    *,
    widest: int | None = WIDEST,
    widest_in_full: int | None = None,
) -> None:
    """Check that `sums` are in float32, and that kernels support the types and widths of `heads`.

    `widest` is the maximum width of heads (None: no maximum), `widest_in_full` that in float32 (None: `widest`).

    Raises:
        ValueError: If one is not. The message names the argument, its type or width, the expected ones, and
            `otherwise`, the function that takes any.
    """
    for name, t in sums.items():
        if t.dtype != torch.float32:
            raise ValueError(f"{name} is {t.dtype}; sums must be torch.float32: {name}.float()")
    for name, t in heads.items():
        if t.dtype not in TYPES:
            raise ValueError(f"{name} is {t.dtype}; expected bfloat16, float16 or float32: `{otherwise}` accepts any")
        most = (widest_in_full if t.dtype == torch.float32 else None) or widest
        if most is not None and t.size(-1) > most:
            raise ValueError(
                f"{name} is {t.dtype} of width {t.size(-1)}; expected at most {most}: `{otherwise}` accepts any"
            )


def interpreted() -> bool:
    """Return whether Triton kernels were asked for; on the CPU, Triton's interpreter runs them."""
    return os.environ.get(KERNELS) == "triton"


def on_device(t: Tensor) -> AbstractContextManager[Any]:
    """Make `t`'s GPU the current one, on which Triton launches kernels."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def by_position(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate (B, H, N, D) in the memory layout (B, N, H, D), so that joining the heads needs no copy."""
    b, h, n, d = like.shape
    return like.new_empty(b, n, h, d, dtype=dtype).transpose(1, 2)
