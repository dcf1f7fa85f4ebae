"""When kernels written in Triton are used: on CUDA, wherever they can be, after a trial beside the plain form.

`LIT_EFFATTN_KERNELS` in the environment forces a form: "plain", or "triton", which is then an error where it can't be
had.
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

KERNELS = "LIT_EFFATTN_KERNELS"
"""The environment's variable that forces a form."""

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of the kernels' queries, keys and values."""

WIDEST = 128
"""The most columns of queries, keys or values: what a walk carries stays in registers."""

_INTERPRET = "TRITON_INTERPRET"  # Triton's own: its kernels then run in Python, on the CPU
_OLDEST = (8, 0)  # compute capability, the first with TF32


def chosen(
    what: str,
    asked: str,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    width: int,
    obstacle: str | None,
    trial: Callable[[], str | None],
) -> bool:
    """Whether kernels are to be used.

    If not, it says once why where that is a loss: on CUDA, unless the plain form was asked for.

    Args:
        what: Whose kernels they are, for messages.
        asked: The value of `LIT_EFFATTN_KERNELS`, "" if there is none.
        device: The tensors'.
        dtypes: Theirs.
        width: The most columns that one has.
        obstacle: What keeps these kernels from being used, if anything that the others do not mind.
        trial: Says what is wrong with them on this device, None if nothing is.

    Raises:
        ValueError: `LIT_EFFATTN_KERNELS` is not a form.
        RuntimeError: it is "triton", and that can't be had.
    """
    if asked not in ("", "plain", "triton"):
        raise ValueError(f"{KERNELS}={asked!r} in the environment is no form: plain or triton; unset, it is chosen")
    if asked == "plain" or (asked == "" and device.type != "cuda"):
        return False
    obstacle = _obstacle_of_device(device) or obstacle or _obstacle_of_tensors(dtypes, width)
    if obstacle is None and asked == "":
        obstacle = trial()
    if obstacle is None:
        return True
    if asked == "triton":
        raise RuntimeError(f"{KERNELS}=triton, but the kernels of {what} can't be used: {obstacle}")
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
        f"{what} runs in its plain form, several times slower than its kernels, which can't be used: {obstacle}. "
        f"{KERNELS}=plain in the environment silences this",
        stacklevel=5,
    )


def off(
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
    sums: dict[str, Tensor], heads: dict[str, Tensor], otherwise: str, *, widest_in_full: int = WIDEST
) -> None:
    """Refuse `sums` that are not in float32, and `heads` of a type or width that kernels do not take.

    In float32, heads may have `widest_in_full` columns.

    Raises:
        ValueError: names the argument, its type or width, and what was expected: `otherwise` takes any.
    """
    for name, t in sums.items():
        if t.dtype != torch.float32:
            raise ValueError(f"{name} is {t.dtype}; sums are torch.float32: {name}.float()")
    for name, t in heads.items():
        widest = widest_in_full if t.dtype == torch.float32 else WIDEST
        if t.dtype not in TYPES or t.size(-1) > widest:
            raise ValueError(
                f"{name} is {t.dtype} of width {t.size(-1)}; expected bfloat16, float16 or float32, and at most "
                f"{widest}: `{otherwise}` takes any"
            )


def on_device(t: Tensor) -> AbstractContextManager[Any]:
    """Make `t`'s GPU the current one: where Triton launches."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def by_position(like: Tensor) -> Tensor:
    """Return room for (B, H, N, D), laid out (B, N, H, D): what joins the heads again then copies nothing."""
    b, h, n, d = like.shape
    return like.new_empty(b, n, h, d).transpose(1, 2)
