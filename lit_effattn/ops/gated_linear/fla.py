"""Linear recurrences by flash-linear-attention's Triton kernels, on CUDA in bfloat16 and float16.

They compute `lit_effattn.ops.gated_linear.pytorch.gated_linear_attention`. The adapter changes layouts, masks padding:

    decay          beta    kernel
    none, (H,)     none    chunk_simple_gla (retention: decays that don't depend on the input)
    (B, H, N)      none    chunk_simple_gla (Mamba-2, whose step multiplies the keys)
    (B, H, N, D)   none    chunk_gla
    none           given   chunk_delta_rule
    (B, H, N)      given   chunk_gated_delta_rule
    (B, H, N, D)   given   chunk_kda

Sums are in float32, operands of matrix products in the type of q, k and v. The first call for a new size compiles and
times variants of each kernel, which takes minutes; Triton keeps the fastest on disk.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lit_effattn.ops.runtime.operators import KERNELS
from lit_effattn.sequence import valid_positions

TYPES = (torch.bfloat16, torch.float16)
"""Supported types of queries, keys and values. The kernels of the delta rule refuse float32."""

WIDEST = 256
"""Maximum width of queries and keys."""

LEAST = -40.0
"""The smallest logarithm of a decay. The kernels subtract sums of logarithms, and −∞ − (−∞) is not a number; e⁻⁴⁰ is 0
beside a float32."""

INSTALL = "pip install 'lit-effattn[gpu]'"


def use(device: torch.device, dtype: torch.dtype, width: int, *, gated: bool) -> bool:
    """Return whether flash-linear-attention computes a recurrence.

    On CUDA in a supported type, a warning gives the reason once if it can't.

    Args:
        device: Device of the tensors.
        dtype: Type of queries, keys and values.
        width: Width of queries and keys.
        gated: See `is_gated`.

    Raises:
        ValueError: If `LIT_EFFATTN_KERNELS` is "fla", which can't be used.
    """
    return _chosen(os.environ.get(KERNELS, ""), device, dtype, width, gated)


def is_gated(log_decay: Tensor | None, beta: Tensor | None, lengths: Tensor | None) -> bool:
    """Return whether the kernels get a decay per position: always but with fixed decays, (H,), and nothing else."""
    return log_decay is not None and (
        log_decay.dim() > 1 or log_decay.requires_grad or beta is not None or lengths is not None
    )


@torch.compiler.assume_constant_result
def _chosen(asked: str, device: torch.device, dtype: torch.dtype, width: int, gated: bool) -> bool:
    if asked not in ("", "fla") or torch.compiler.is_exporting():
        return False
    obstacle = _obstacle(device, dtype, width, gated)
    if obstacle is not None and asked == "fla":
        raise ValueError(f"{KERNELS}=fla, but flash-linear-attention can't be used: {obstacle}")
    if obstacle is not None and device.type == "cuda" and dtype in TYPES:
        _say_once(obstacle)
    return obstacle is None


def _obstacle(device: torch.device, dtype: torch.dtype, width: int, gated: bool) -> str | None:
    if device.type != "cuda":
        return f"the tensors are on {device}; its kernels are for CUDA"
    if dtype not in TYPES:
        return f"its kernels of the delta rule are for bfloat16 and float16, not {dtype}"
    if width > WIDEST:
        return f"heads of width {width} are wider than {WIDEST}; choose more heads"
    if find_spec("fla") is None:
        return f"it is not installed: {INSTALL}"
    return _obstacle_of_triton(device) if gated else None


@cache
def _obstacle_of_triton(device: torch.device) -> str | None:
    """Name the Triton whose gradients of gated kernels are wrong on Hopper GPUs (fla's issue 640)."""
    import triton
    from torch.torch_version import TorchVersion

    hopper, version = torch.cuda.get_device_capability(device)[0] == 9, TorchVersion(triton.__version__)
    if not hopper or not "3.4" <= version < "3.7.1":
        return None
    return f"Triton {version} compiles its gradients of decays wrongly on Hopper GPUs; install a newer torch"


@cache
def _say_once(obstacle: str) -> None:
    warnings.warn(
        "Recurrent attention runs in this package's own form, which is slower than flash-linear-attention's kernels: "
        f"{obstacle}. {KERNELS}=triton in the environment silences this",
        stacklevel=5,
    )


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `pytorch.gated_linear_attention`, whose arguments these are. The state is in float32."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, N, H, D)
    beta = None if beta is None else beta.transpose(1, 2)  # (B, N, H)
    gated = is_gated(log_decay, beta, lengths)
    if log_decay is not None and gated:
        log_decay = _by_position(log_decay, q)
    if lengths is not None:
        padding = ~valid_positions(lengths, q.size(1))[..., None]  # (B, N, 1)
        k = k.masked_fill(padding[..., None], 0)
        beta = None if beta is None else beta.masked_fill(padding, 0)
        if log_decay is not None:
            log_decay = log_decay.masked_fill(padding if log_decay.dim() == 3 else padding[..., None], 0)
    options: dict[str, Any] = {"scale": 1.0, "initial_state": state, "output_final_state": True}
    per_channel = log_decay is not None and log_decay.dim() == 4
    if log_decay is not None:
        options["g" if gated else "g_gamma"] = log_decay.float().clamp(min=LEAST)
    if beta is not None:
        options["beta"] = beta
        name = "delta_rule" if log_decay is None else "kda" if per_channel else "gated_delta_rule"
    else:
        name = "gla" if per_channel else "simple_gla"
    y, state = _kernel(name)(q, k, v, **options)
    return y.transpose(1, 2), state


def _by_position(log_decay: Tensor, q: Tensor) -> Tensor:
    """(H,), (B or 1, H, N or 1) or (B, H, N, D) -> (B, N, H) or (B, N, H, D), for q of (B, N, H, D)."""
    if log_decay.dim() == 1:
        log_decay = log_decay[:, None]
    if log_decay.dim() == 2:
        log_decay = log_decay[None]
    log_decay = log_decay.transpose(1, 2)
    return log_decay if log_decay.dim() == 4 else log_decay.expand(q.shape[:3])


@cache
def _kernel(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about optional parts of the package
        return getattr(import_module(f"fla.ops.{name}"), f"chunk_{name}")
