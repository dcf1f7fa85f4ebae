"""What every attention kind shares: four projections, heads, rotary positions, and the treatment of padding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lit_effattn.positions import RotaryPositions
from lit_effattn.sequence import SequenceModule, State, without_padding


class Attention(SequenceModule):
    """Multi-head attention whose `attend` says how queries, keys and values combine.

        y = W_o concat_h attend(W_q x, W_k x, W_v x)                          Vaswani et al. 2017, section 3.2.2

    A new kind implements `attend` and `initial_state`, on a state with a field `length` (B,): the positions seen.

    Args:
        d_model: Width E.
        n_heads: Heads H; each has D = E / H dimensions.
        causal: Whether a position sees only itself and earlier ones.
        bias: Whether the four projections have a bias.

    Raises:
        ValueError: `n_heads` does not divide `d_model`.
    """

    takes_rotary = True
    """Whether rotary positions mean something to this kind."""

    def __init__(self, d_model: int, n_heads: int, causal: bool = True, *, bias: bool = True) -> None:
        super().__init__()
        if n_heads < 1 or d_model < 1 or d_model % n_heads:
            raise ValueError(
                f"n_heads={n_heads} does not divide d_model={d_model}: each head has d_model / n_heads dimensions; "
                "change one of them"
            )
        self.d_input = self.d_model = d_model
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads
        self.causal = causal
        self.q_proj = nn.Linear(d_model, d_model, bias=bias)
        self.k_proj = nn.Linear(d_model, d_model, bias=bias)
        self.v_proj = nn.Linear(d_model, d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)
        self.rotary: RotaryPositions | None = None
        """Turns queries and keys by their position; set by a `Transformer` whose positions are rotary."""

    @abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State | None, lengths: Tensor | None
    ) -> tuple[Tensor, State | None]:
        """Combine queries, keys and values.

        Args:
            q: (B, H, N, D), as are `k` and `v`; what stands in padding is finite, but not zero.
            k: See `q`.
            v: See `q`.
            state: State before the first position, or None.
            lengths: (B,) valid positions, or None.

        Returns:
            The heads' outputs (B, H, N, D), anything finite in padding, and the state after the last valid position.
        """

    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        """See `SequenceModule.forward`."""
        self.check(x, state, lengths)
        x = without_padding(x, lengths)
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.rotary is not None:
            position = torch.arange(x.size(1), device=x.device)[None]  # (1, N)
            if state is not None:
                position = position + state.length[:, None]  # (B, N)
            q, k = self.rotary.turn(q, position), self.rotary.turn(k, position)
        y, state = self.attend(q, k, v, state, lengths)
        y = self.out_proj(y.transpose(1, 2).flatten(2))  # (B, H, N, D) -> (B, N, E)
        return without_padding(y, lengths), state

    def _heads(self, x: Tensor) -> Tensor:
        """(B, N, E) -> (B, H, N, D)."""
        return x.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2)

    def extra_repr(self) -> str:
        """Show what the projections do not."""
        return f"n_heads={self.n_heads}, causal={self.causal}"


AttentionFactory = Callable[[int, int, bool], Attention]
"""Makes an attention from width, heads and causality: a class, or `functools.partial(Class, option=…)`."""
