"""The plain O(N²) definition of each attention kind, from its paper's equation: what the laws measure the code by.

Nothing here calls the code under test; of a module, only its parameters and its options are read. A definition takes
`(module, x)`, with `x` (B, N, E) without padding, and returns (B, N, E).
"""

import math

import torch
from torch import Tensor


def softmax(module, x: Tensor) -> Tensor:
    """softmax(Q Kᵀ / √D) V, Vaswani et al. 2017, equation 1; of the newest `window` keys."""
    q, k, v = queries_keys_values(module, x)
    scores = q @ k.transpose(-1, -2) / math.sqrt(module.head_dim)
    exponential = scores.exp() * sees(module, x.size(1))  # small sizes: no maximum need be subtracted
    return heads_together(module, exponential / exponential.sum(-1, keepdim=True) @ v)


def linear(module, x: Tensor) -> Tensor:
    """φ(Q) φ(K)ᵀ V over its row sums, Katharopoulos et al. 2020, equations 4 to 9; `+ 1e-6` as in the authors' code."""
    q, k, v = queries_keys_values(module, x)
    weights = phi(module, q) @ phi(module, k).transpose(-1, -2) * sees(module, x.size(1))
    return heads_together(module, weights / (weights.sum(-1, keepdim=True) + 1e-6) @ v)


def phi(module, x: Tensor) -> Tensor:
    """The feature map, by its name: elu(x) + 1 (equation 7), or relu(x) and a floor."""
    name = type(module.feature_map).__name__
    if name == "EluFeatureMap":
        return torch.where(x > 0, x + 1, x.exp())
    if name == "ReluFeatureMap":
        return torch.where(x > 0, x, 0) + module.feature_map.floor
    raise NotImplementedError(f"write the definition of {name} here")


# ------------------------------------------------------------------------------------------------- what they share


def queries_keys_values(module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N, E) -> three of (B, H, N, D), queries and keys turned where the module has rotary positions."""
    b, n, _ = x.shape

    def heads(projection) -> Tensor:
        y = x @ projection.weight.T
        if projection.bias is not None:
            y = y + projection.bias
        return y.reshape(b, n, module.n_heads, module.head_dim).permute(0, 2, 1, 3)

    q, k, v = heads(module.q_proj), heads(module.k_proj), heads(module.v_proj)
    if module.rotary is not None:
        q, k = rotated(q, module.rotary.base), rotated(k, module.rotary.base)
    return q, k, v


def heads_together(module, y: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, E), through the output projection."""
    y = y.permute(0, 2, 1, 3).reshape(y.size(0), y.size(2), -1) @ module.out_proj.weight.T
    return y if module.out_proj.bias is None else y + module.out_proj.bias


def sees(module, n: int) -> Tensor:
    """Return (N, N) booleans: whether query i sees key j."""
    window = getattr(module, "window", None) or n
    return torch.tensor([[not module.causal or i - window < j <= i for j in range(n)] for i in range(n)])


def rotated(x: Tensor, base: float) -> Tensor:
    """Multiply x_i + 𝑖 x_{i+D/2} by exp(𝑖 t base^(−2i/D)), Su et al. 2021, equation 13."""
    n, d = x.shape[-2:]
    angle = torch.tensor([[t * base ** (-2 * i / d) for i in range(d // 2)] for t in range(n)], dtype=torch.float64)
    turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)
