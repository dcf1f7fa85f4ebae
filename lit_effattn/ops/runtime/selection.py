"""When kernels are used: on CUDA those written in Triton, on the CPU those written in C++, wherever they can be.

Those for CUDA are tried beside the plain form first; those for the CPU are compiled first, as `cpp_build` says.
`LIT_EFFATTN_KERNELS` in the environment forces a form: "plain", "triton" or "c++"; the latter two are then an
error where they can't be had.
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

KERNELS = "LIT_EFFATTN_KERNELS"
"""The environment's variable that forces a form."""

FORMS = ("plain", "triton", "c++")
"""Its values."""

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of the kernels' queries, keys and values."""

WIDEST = 128
"""The most columns of queries, keys or values on CUDA: what a walk carries stays in registers."""

_INTERPRET = "TRITON_INTERPRET"  # Triton's own: its kernels then run in Python, on the CPU
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
    """Whether kernels written in Triton are to be used.

    If not, it says once why where that is a loss: on CUDA, unless another form was asked for.

    Args:
        what: Whose kernels they are, for messages.
        asked: The value of `LIT_EFFATTN_KERNELS`, "" if there is none.
        device: The tensors'.
        dtypes: Theirs.
        width: The most columns that one has.
        obstacle: What keeps these kernels from being used, if anything that the others do not mind.
        trial: Says what is wrong with them on this device, None if nothing is.

    Raises:
        ValueError: `LIT_EFFATTN_KERNELS` is not a form, or is "triton", and that can't be had.
    """
    if _form(asked, device) != "triton":
        return False
    obstacle = _obstacle_of_device(device) or obstacle or _obstacle_of_tensors(dtypes, width)
    if obstacle is None and asked == "":
        obstacle = trial()
    return _usable_or_raise(what, asked, obstacle)


def use_cpp(what: str, asked: str, device: torch.device, dtypes: tuple[torch.dtype, ...], name: str) -> bool:
    """Whether kernels written in C++ are to be used.

    If not, it says once why where that is a loss: on the CPU, unless another form was asked for. In float64 there are
    none, and nobody is told.

    Args:
        what: Whose kernels they are, for messages.
        asked: The value of `LIT_EFFATTN_KERNELS`, "" if there is none.
        device: The tensors'.
        dtypes: Theirs.
        name: The source's.

    Raises:
        ValueError: `LIT_EFFATTN_KERNELS` is not a form, or is "c++", and that can't be had.
    """
    if _form(asked, device) != "c++":
        return False
    if device.type != "cpu":
        return _usable_or_raise(what, asked, f"the tensors are on {device}; they are for the CPU")
    if not set(dtypes) <= set(TYPES):
        return asked != "" and _usable_or_raise(what, asked, _obstacle_of_tensors(dtypes, 0))
    return _usable_or_raise(what, asked, cpp_build.obstacle(name))


def _form(asked: str, device: torch.device) -> str:
    """Return what was asked for, or what is for the device."""
    if asked not in ("", *FORMS):
        raise ValueError(f"{KERNELS}={asked!r} in the environment is no form: {', '.join(FORMS)}; unset, it is chosen")
    return asked or {"cuda": "triton", "cpu": "c++"}.get(device.type, "plain")


def _usable_or_raise(what: str, asked: str, obstacle: str | None) -> bool:
    """Whether there is no obstacle; if there is one, it is said, or raised where the form was asked for."""
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
            return f"{dtype} is none of their types; choose torch.float32 or less"
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
    """Say what is wrong with kernels, None if nothing is: no GPU was at hand when they were written.

    Args:
        device: Where they are tried.
        dtype: The inputs'.
        compare: Returns what they find, and the same by the plain form in float32.
        most: How far what is right may be off, by its norm.
    """
    try:
        with torch.inference_mode(False), torch.enable_grad():
            found, wanted = compare()
        worst = max(
            float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(found, wanted, strict=True)
        )
    except Exception as error:  # of Triton's compiler, of the driver: there are many kinds
        return f"tried on {device} in {dtype}, they fail: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    # bfloat16 rounds to 2⁻⁹; what is wrong is off by far more. NaN is not less, either.
    return None if worst < most else f"tried on {device} in {dtype}, they are off by {worst:.1%}"


def refuse_others(
    sums: dict[str, Tensor],
    heads: dict[str, Tensor],
    otherwise: str,
    *,
    widest: int | None = WIDEST,
    widest_in_full: int | None = None,
) -> None:
    """Refuse `sums` that are not in float32, and `heads` of a type or width that kernels do not take.

    Heads may have `widest` columns, in float32 `widest_in_full`; None: no fewer than others, and any number.

    Raises:
        ValueError: names the argument, its type or width, and what was expected: `otherwise` takes any.
    """
    for name, t in sums.items():
        if t.dtype != torch.float32:
            raise ValueError(f"{name} is {t.dtype}; sums are torch.float32: {name}.float()")
    for name, t in heads.items():
        if t.dtype not in TYPES:
            raise ValueError(f"{name} is {t.dtype}; expected bfloat16, float16 or float32: `{otherwise}` takes any")
        most = (widest_in_full if t.dtype == torch.float32 else None) or widest
        if most is not None and t.size(-1) > most:
            raise ValueError(
                f"{name} is {t.dtype} of width {t.size(-1)}; expected at most {most}: `{otherwise}` takes any"
            )


def interpreted() -> bool:
    """Whether kernels written in Triton were asked for: on the CPU, Triton's interpreter runs them."""
    return os.environ.get(KERNELS, "") == "triton"


def on_device(t: Tensor) -> AbstractContextManager[Any]:
    """Make `t`'s GPU the current one: where Triton launches."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def by_position(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return room for (B, H, N, D), laid out (B, N, H, D): what joins the heads again then copies nothing."""
    b, h, n, d = like.shape
    return like.new_empty(b, n, h, d, dtype=dtype).transpose(1, 2)
