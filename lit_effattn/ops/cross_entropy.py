"""Cross-entropy of a linear layer's outputs, without all logits in memory at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_effattn.sequence import accumulator

CHUNK = 2**24
"""Number of logits that are in memory at once."""


@torch.compiler.disable(reason="compilation time would grow with the number of chunks")
def linear_cross_entropy(
    h: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, label_smoothing: float = 0.0, chunk: int = CHUNK
) -> Tensor:
    """Return the cross-entropy of softmax(W h + b) in nats, of each position.

        loss = log Σ_v exp(x_v) − (1 − ε) x_target − ε / V Σ_v x_v,  x = W h + b
        ∂loss / ∂x_v = exp(x_v − log Σ_u exp(x_u)) − ε / V − (1 − ε) [v = target]

    It equals `F.cross_entropy(F.linear(h, weight, bias), target, reduction="none")` up to rounding. The forward pass
    computes the logits of some positions at a time and keeps log Σ exp alone, (M,). The backward pass computes the
    logits again, so the time is that of four products (M, E) × (E, V) in place of three. Logits are computed in the
    type of autocast; losses and the sums over chunks of the gradients of W and b are float32 at least.

    Args:
        h: (M, E).
        weight: W, (V, E).
        bias: b, (V,), or None.
        target: (M,), integers from 0 to V − 1.
        label_smoothing: ε.
        chunk: Number of logits in memory at once; at least one position is computed.
    """
    device = h.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h.dtype
    loss: Tensor = _LinearCrossEntropy.apply(h, weight, bias, target, label_smoothing, dtype, chunk)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        epsilon: float,
        dtype: torch.dtype,
        chunk: int,
    ) -> Tensor:
        losses = h.new_empty(len(h), dtype=accumulator(dtype))
        normalizers = torch.empty_like(losses)
        with torch.autocast(h.device.type, enabled=False):
            for rows, _, logits in _logits(h, weight, bias, dtype, chunk):
                normalizers[rows] = logits.logsumexp(-1)
                losses[rows] = normalizers[rows] - (1 - epsilon) * logits.gather(-1, target[rows, None])[:, 0]
                if epsilon:
                    losses[rows] -= epsilon * logits.mean(-1)
        ctx.save_for_backward(h, weight, bias, target, normalizers)
        ctx.options = epsilon, dtype, chunk
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, bias, target, normalizers = ctx.saved_tensors
        epsilon, dtype, chunk = ctx.options
        of_h = torch.empty_like(h)
        of_weight = torch.zeros_like(weight, dtype=accumulator(dtype))
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=accumulator(dtype))
        with torch.autocast(h.device.type, enabled=False):
            cast = weight.to(dtype)
            for rows, h_rows, logits in _logits(h, weight, bias, dtype, chunk):
                of_logits = logits.sub_(normalizers[rows, None]).exp_()
                if epsilon:
                    of_logits -= epsilon / len(weight)
                of_logits[torch.arange(len(of_logits), device=h.device), target[rows]] -= 1 - epsilon
                of_logits *= grad[rows, None]
                if of_bias is not None:
                    of_bias += of_logits.sum(0)
                of_logits = of_logits.to(dtype)
                of_h[rows] = (of_logits @ cast).to(h.dtype)
                if dtype == of_weight.dtype:
                    of_weight.addmm_(of_logits.T, h_rows)
                else:
                    of_weight += of_logits.T @ h_rows
        of_bias = None if of_bias is None else of_bias.to(bias.dtype)
        return of_h, of_weight.to(weight.dtype), of_bias, None, None, None, None


def _logits(
    h: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, chunk: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield slices of positions, with their h in `dtype`, (m, E), and their logits, (m, V), in float32 at least."""
    size = max(1, chunk // len(weight))
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    for begin in range(0, len(h), size):
        rows = slice(begin, begin + size)
        h_rows = h[rows].to(dtype)
        yield rows, h_rows, F.linear(h_rows, weight, bias).to(accumulator(dtype))
