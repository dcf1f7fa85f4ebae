"""The feature maps φ of linear attention."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.checks import positive
from lit_effattn.hparams import HasInitArgs
from lit_effattn.ops.linear.pytorch import elu_features


class FeatureMap(HasInitArgs, nn.Module, ABC):
    """Maps (…, D) queries or keys to (…, n_features) non-negative numbers.

    Args:
        head_dim: D, the dimension of a head's queries and keys.
    """

    n_features: int

    eps: float = 1e-6
    """What linear attention with this map adds to its denominators; 10⁻⁶ in the code of Katharopoulos et al. 2020."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.n_features = head_dim

    def for_heads(self, n_heads: int) -> None:
        """Make the parameters that each head has of its own: none by default. The attention calls it once."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Map queries, and keys unless `keys` is overridden: (B, H, N, D) -> (B, H, N, n_features)."""

    def keys(self, k: Tensor) -> Tensor:
        """Map keys, by default as queries."""
        phi: Tensor = self(k)
        return phi


class EluFeatureMap(FeatureMap):
    """φ(x) = elu(x) + 1 (Katharopoulos et al. 2020, equation 7)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`."""
        return elu_features(x)


class ReluFeatureMap(FeatureMap):
    """φ(x) = relu(x) + floor. The floor avoids 0 / 0 for a query that has a product of 0 with every key.

    Args:
        head_dim: D.
        floor: Constant that is added.
    """

    magnifies = True  # all features of a query may be `floor`

    def __init__(self, head_dim: int, floor: float = 1e-3) -> None:
        super().__init__(head_dim)
        if not 0 <= floor < math.inf:
            raise ValueError(f"floor={floor} must be at least 0, and finite: attention weights are not negative")
        self.floor = floor

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`."""
        return F.relu(x) + self.floor


class HedgehogFeatureMap(FeatureMap):
    """φ(x) = [softmax(W x), softmax(−W x)], with a learned D × D matrix W per head (Hedgehog, Zhang et al. 2024).

        softmax_i(u) = exp(u_i) / Σ_j exp(u_j),  i, j = 1 … D;  n_features = 2 D

    The paper's section 4.2 has [exp(W x + b), exp(−W x − b)]. Here each half is normalised by its own sum, as in the
    authors' later code (LoLCATs, Zhang et al. 2024): features are at most 1, so no exponential overflows, and no key
    has a weight only because its norm is large. In the quotient of linear attention the normalisation of a query would
    cancel if both halves had the same sum; that of the keys is another function. b is left out.

    Queries and keys have matrices of their own. They start as the identity, with which φ(q)ᵀφ(k) is large where q and k
    have the same large elements. In a swap from softmax attention, train them first: see `nn.transfer`.

    φ(q)ᵀφ(k) may be small: about 10⁻⁶ where q and k have norms of 30 and different large elements. Linear attention
    therefore adds less to its denominators than with other maps.

    Args:
        head_dim: D.
        eps: What is added to the denominators of linear attention: 10⁻¹² in the authors' later code.
            `WindowedLinearAttention` adds nothing, since its denominators have a softmax term.

    Raises:
        ValueError: If `eps` is not positive.
    """

    def __init__(self, head_dim: int, eps: float = 1e-12) -> None:
        super().__init__(head_dim)
        positive(eps=eps)
        self.eps = eps
        self.head_dim = head_dim
        self.n_features = 2 * head_dim

    def for_heads(self, n_heads: int) -> None:
        """Make the matrices, (H, D, D)."""
        identity = torch.eye(self.head_dim).repeat(n_heads, 1, 1)
        self.query_weight = nn.Parameter(identity)
        self.key_weight = nn.Parameter(identity.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Map queries (B, H, N, D)."""
        return self._map(x, self.query_weight)

    def keys(self, k: Tensor) -> Tensor:
        """Map keys (B, H, N, D)."""
        return self._map(k, self.key_weight)

    @staticmethod
    def _map(x: Tensor, weight: Tensor) -> Tensor:
        u = x @ weight.to(x.dtype).mT  # (B, H, N, D)
        return torch.cat([u.softmax(-1), (-u).softmax(-1)], -1)  # (B, H, N, 2 D)
