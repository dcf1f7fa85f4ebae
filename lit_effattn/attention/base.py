"""What every attention kind shares: four projections, heads, rotary positions, and the treatment of padding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lit_effattn.positions import RotaryPositions
from lit_effattn.sequence import SequenceModule, State, without_padding


class Attention(SequenceModule):
    """Multi-head attention. `attend` defines how queries, keys and values are combined.

        y = W_o concat_h attend(W_q x, W_k x, W_v x)                          Vaswani et al. 2017, section 3.2.2

    A new kind implements `attend` and `initial_state`. Its state has a field `length` (B,), the number of positions
    seen.

    Args:
        d_model: Width E.
        n_heads: Heads H; each has D = E / H dimensions.
        causal: Whether a position sees only itself and earlier ones.
        bias: Whether the four projections have a bias.
        d_qk: Width of all heads' queries and keys together. Default: E.

    Raises:
        ValueError: `n_heads` does not divide `d_model`, or `d_qk`.
    """

    takes_rotary = True
    """Whether this kind supports rotary positions."""

    def __init__(
        self, d_model: int, n_heads: int, causal: bool = True, *, bias: bool = True, d_qk: int | None = None
    ) -> None:
        super().__init__()
        if n_heads < 1 or d_model < 1 or d_model % n_heads:
            raise ValueError(
                f"n_heads={n_heads} does not divide d_model={d_model}: each head has d_model / n_heads dimensions; "
                "change one of them"
            )
        width = d_model if d_qk is None else d_qk
        if width < 1 or width % n_heads:
            raise ValueError(
                f"d_qk={d_qk} is not a multiple of n_heads={n_heads}: heads have d_qk / n_heads dimensions; change one"
            )
        self.d_input = self.d_model = d_model
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads
        self.qk_dim = width // n_heads
        """Dimensions of a head's queries and keys; its values have `head_dim`."""
        self.causal = causal
        self.q_proj = nn.Linear(d_model, width, bias=bias)
        self.k_proj = nn.Linear(d_model, width, bias=bias)
        self.v_proj = nn.Linear(d_model, d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        self.rotary: RotaryPositions | None = None
        """Rotates queries and keys by their position. Set by a `Transformer` with rotary positions."""

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, lengths: Tensor | None
    ) -> tuple[Tensor, State | None]:
        """Combine queries, keys and values.

        Args:
            q: (B, H, N, D_qk), where D_qk is `qk_dim`: D, unless `d_qk` is given. Values in padding are finite, but not
                zero; in `k` and `v` too.
            k: (B, H, N, D_qk).
            v: (B, H, N, D).
            state: State before the first position, or None.
            lengths: (B,) valid positions, or None.

        Returns:
            The heads' outputs (B, H, N, D), any finite values in padding, and the state after the last valid position.
        """

    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        """See `SequenceModule.forward`."""
        self.check(x, state, lengths)
        x = without_padding(x, lengths)
        q, k, v = self.project(x)
        if self.rotary is not None:
            position = torch.arange(x.size(1), device=x.device)[None]  # (1, N)
            if state is not None:
                position = position + state.length[:, None]  # (B, N)
            shared = k is q
            q = self.rotary.turn(q, position)
            k = q if shared else self.rotary.turn(k, position)
        y, state = self.attend(q, k, v, state, lengths)
        y = self.out_proj(y.transpose(1, 2).flatten(2))  # (B, H, N, D) -> (B, N, E)
        return without_padding(y, lengths), state

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, (B, N, E) -> (B, H, N, D_qk), and values, (B, N, E) -> (B, H, N, D)."""
        return self._heads(self.q_proj(x)), self._heads(self.k_proj(x)), self._heads(self.v_proj(x))

    def _heads(self, x: Tensor) -> Tensor:
        """Split the width into heads: (B, N, H · D) -> (B, H, N, D)."""
        return x.unflatten(2, (self.n_heads, -1)).transpose(1, 2)

    def extra_repr(self) -> str:
        """Return the options that the projections do not show."""
        return f"n_heads={self.n_heads}, causal={self.causal}"


AttentionFactory = Callable[[int, int, bool], Attention]
"""Makes an attention from width, heads and causality: a class, or `functools.partial(Class, option=…)`."""
