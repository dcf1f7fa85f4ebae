"""A short causal convolution of each channel, with a state."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_effattn.ops.runtime.selection import default_form


def short_convolution(x: Tensor, recent: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Convolve each channel by itself.

        y_t = b + Σ_{j<K} w_j ⊙ x_{t−j}

    Args:
        x: (B, N, C).
        recent: (B, K − 1, C), the inputs before `x`, the newest last.
        weight: (K, C).
        bias: (C,). None: 0.

    Returns:
        y (B, N, C), and the newest K − 1 inputs (B, K − 1, C).
    """
    if default_form(x.device) == "onnx":
        y, newest = torch.ops.lit_effattn.short_convolution(x, recent, weight, bias)
        return y, newest
    return _in_pytorch(x, recent, weight, bias)


def _in_pytorch(x: Tensor, recent: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    n, k = x.size(1), weight.size(0)
    joined = torch.cat([recent, x], 1)  # (B, K − 1 + N, C)
    y = joined[:, k - 1 :] * weight[0]
    for j in range(1, k):
        y = torch.addcmul(y, joined[:, k - 1 - j : k - 1 - j + n], weight[j])
    return y if bias is None else y + bias, joined[:, n:].clone()


def _shapes(x: Tensor, recent: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(recent)


torch.library.define(
    "lit_effattn::short_convolution", "(Tensor x, Tensor recent, Tensor weight, Tensor? bias) -> (Tensor, Tensor)"
)
torch.library.impl("lit_effattn::short_convolution", "cpu", _in_pytorch)
torch.library.register_fake("lit_effattn::short_convolution", _shapes)
