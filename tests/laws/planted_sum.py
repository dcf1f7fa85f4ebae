"""A sum over the past, with a bug for each law that no bug of `planted` breaks."""

from functools import partial
from itertools import count

import torch
from torch import nn

from lit_effattn.laws import Adapter

BUILT = count(1)


class Sum(nn.Module):
    """y_t = 1 + Σ_{j ≤ t} W x_j, 0 at padding. The state is the sum, (B, E)."""

    def __init__(self, bug: str = "") -> None:
        super().__init__()
        self.bug = bug
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.scale = next(BUILT) if bug == "value outside the state_dict" else 1

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None, lengths: torch.Tensor | None = None) -> tuple:
        if self.bug == "gradient of the wrong sign":
            x = 2 * x.detach() - x
        b, n, e = x.shape
        valid = torch.full((b,), n) if lengths is None else lengths
        inside = (torch.arange(n) < valid[:, None])[..., None]
        before = x.new_zeros(b, 1, e) if state is None else state.view(b, -1, e)
        sums = before[:, -1:] + (x.masked_fill(~inside, 0) @ self.weight).cumsum(1)
        after = sums[:, -1]
        if self.bug == "detached state":
            after = after.detach()
        if self.bug == "growing state":
            after = torch.cat([before, sums], 1)
        if self.bug == "lengths double the state" and lengths is not None:
            after = 2 * after
        y = 1 + self.scale * sums
        return y if self.bug == "outputs at padding" else y.masked_fill(~inside, 0), after


class SumAdapter(Adapter):
    padding, least, zeroes_padding, width, unit = "right", 0, True, 4, 3

    def __init__(self, bug: str = "") -> None:
        super().__init__(partial(Sum, bug))
        self.bug = bug

    @staticmethod
    def initial_state(module, batch, max_len, x):
        return x.new_zeros(batch, 4)

    @staticmethod
    def bounded(module):
        return module.bug != "constant state declared to grow"

    @staticmethod
    def combine(module, before, after):
        return before if module.bug == "half of a combination" else before + after

    def select(self, module, state, rows):
        return state[rows.sort().values if module.bug == "rows in order" else rows]

    @staticmethod
    def pack(state):
        return [state]

    def unpack(self, packed, like):
        return packed[0] * (2 if self.bug == "state loaded twice as large" else 1)
