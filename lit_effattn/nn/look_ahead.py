"""Look-ahead by a row convolution: an output depends on n later positions, and comes n positions later."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lit_effattn.attention.recurrent import ShortConvolution
from lit_effattn.checks import at_least
from lit_effattn.sequence import SequenceModule, State, without_padding


class LookAheadState(NamedTuple):
    """The state of the module, and its newest n outputs, the newest last."""

    module: State
    recent: Tensor  # (B, n, E)


class LookAhead(SequenceModule):
    """Lets an output of a causal module depend on the n positions after it, and returns it n positions later.

        y_{t+n} = Σ_{j=0}^{n} w_j ⊙ h_{t+j},  h = module(x),  h_t = 0 for t < 0

    The sum is the row convolution of Amodei et al. 2015 (Deep Speech 2, 1512.02595), section 3.7. At first w_0 = 1 and
    the other w_j = 0, so y_{t+n} = h_t.

    Args:
        module: Causal.
        n: Number of later positions.

    Raises:
        ValueError: If `module` is not causal, or `n` is not positive.
    """

    def __init__(self, module: SequenceModule, n: int) -> None:
        super().__init__()
        if not module.causal:
            raise ValueError(f"{type(module).__name__} has causal=False; LookAhead needs a causal module")
        at_least(1, n=n)
        self.d_input, self.d_model, self.causal = module.d_input, module.d_model, True
        self.module = module
        self.n = n
        self.convolution = ShortConvolution(module.d_model, n + 1)
        with torch.no_grad():
            self.convolution.weight.zero_()[n] = 1  # row j weighs h_{t+n−j}

    @override
    def empty_state(
        self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> LookAheadState:
        module = self.module.initial_state(batch_size, max_len=max_len, device=device, dtype=dtype)
        return LookAheadState(module, torch.zeros(batch_size, self.n, self.d_model, device=device, dtype=dtype))

    @override
    def reset(self, state: LookAheadState, rows: Tensor) -> LookAheadState:
        return LookAheadState(self.module.reset(state.module, rows), super().reset(state.recent, rows))

    @override
    def grow(self, state: LookAheadState, max_len: int) -> LookAheadState:
        return LookAheadState(self.module.grow(state.module, max_len), state.recent)

    @property
    @override
    def bounded_by(self) -> str | None:
        return self.module.bounded_by

    @override
    def forward(
        self, x: Tensor, state: LookAheadState | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, LookAheadState]:
        self.check(x, state, lengths)
        state = state or LookAheadState(None, x.new_zeros(x.size(0), self.n, self.d_model))
        h, module = self.module(x, state.module, lengths)  # (B, N, d_model), 0 in the padding
        y, recent = self.convolution(h, state.recent, lengths)
        return without_padding(y, lengths), LookAheadState(module, recent)
