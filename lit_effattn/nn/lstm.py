"""The LSTM, a recurrent baseline."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lit_effattn.checks import at_least, probabilities
from lit_effattn.sequence import SequenceModule, accumulator, reversed_rows, valid_positions, without_padding

# cuDNN expects a layer's weights in one contiguous block. `_Layer` may cast them to float32 or add a column, so they
# are copied at every call. The copy costs little compared with the recurrence, and users can't avoid it.
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk of memory")


class LSTMState(NamedTuple):
    """The state of every layer, in float32 or more, and the number of positions seen."""

    h: Tensor  # (B, n_layers, d_model)
    c: Tensor  # (B, n_layers, d_model)
    length: Tensor  # (B,)


class LSTM(SequenceModule):
    """Layers of long short-term memory.

        i, f, o = σ(W_i [x_t, h_{t−1}] + b_i), σ(W_f [x_t, h_{t−1}] + b_f), σ(W_o [x_t, h_{t−1}] + b_o)
        c_t = f ⊙ c_{t−1} + i ⊙ tanh(W_g [x_t, h_{t−1}] + b_g),  h_t = o ⊙ tanh(c_t)

    Zaremba et al. 2014, section 3.1. Time O(N d_model²), one position after the other; state: h and c of each layer.
    Splitting a stream changes nothing. Everything is computed in float32 at least, regardless of autocast. The biases
    start at 0, those of the forget gates at 1, so that a new model remembers (Jozefowicz et al. 2015, section 2).
    Matrices start uniform within ±1/√hidden.

    `torch.compile` unrolls the recurrence, which takes about 0.1 s per position and layer. Compile single steps, as in
    generation, not whole sequences.

    Args:
        d_model: Width of the output. If not causal, each of the two directions has half of it.
        n_layers: Number of layers.
        d_input: Width of the input. Default: `d_model`.
        causal: True: one direction, with a state. False: two, concatenated after every layer (Bi-LSTM).
        dropout: Dropout on the input and on the output of each layer (Zaremba et al. 2014, section 3.2).

    Raises:
        ValueError: If a size is not positive, `d_model` is odd with two directions, or `dropout` is not in [0, 1).

    Examples:
        >>> model = LSTM(d_model=32, n_layers=2)
        >>> y, state = model(torch.zeros(1, 10, 32))
        >>> y, state = model(torch.zeros(1, 1, 32), state)  # the eleventh position
        >>> y.shape, state.c.shape, state.length
        (torch.Size([1, 1, 32]), torch.Size([1, 2, 32]), tensor([11]))
    """

    def __init__(
        self, d_model: int, n_layers: int, *, d_input: int | None = None, causal: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        d_input = d_model if d_input is None else d_input
        at_least(1, d_model=d_model, n_layers=n_layers, d_input=d_input)
        probabilities(dropout=dropout)
        if not causal and d_model % 2:
            raise ValueError(f"d_model={d_model} must be even, because with causal=False each direction has half of it")
        self.d_input, self.d_model, self.causal, self.dropout = d_input, d_model, causal, dropout
        widths = [d_input] + [d_model] * (n_layers - 1)
        hidden = d_model if causal else d_model // 2
        self.layers = nn.ModuleList(_Layer(width, hidden) for width in widths)
        self.backward_layers = nn.ModuleList(_Layer(width, hidden) for width in widths if not causal)

    @override
    def forward(
        self, x: Tensor, state: LSTMState | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, LSTMState | None]:
        self.check(x, state, lengths)
        with torch.autocast(x.device.type, enabled=False):
            y = self._drop(without_padding(x, lengths).to(accumulator(x.dtype)))
            y, state = self._one_way(y, state, lengths) if self.causal else (self._both_ways(y, lengths), None)
            return without_padding(y, lengths).to(x.dtype), state

    def _one_way(self, x: Tensor, state: LSTMState | None, lengths: Tensor | None) -> tuple[Tensor, LSTMState]:
        b, n, _ = x.shape
        if state is None:
            state = self.initial_state(b, device=x.device, dtype=x.dtype)
        hs, cs = [], []
        for i, layer in enumerate(self.layers):
            x, h, c = layer(x, state.h[:, i].to(x.dtype), state.c[:, i].to(x.dtype), lengths)
            x = self._drop(x)
            hs.append(h)
            cs.append(c)
        return x, LSTMState(torch.stack(hs, 1), torch.stack(cs, 1), state.length + (n if lengths is None else lengths))

    def _both_ways(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        zero = x.new_zeros(x.size(0), self.d_model // 2)
        for forward, backward in zip(self.layers, self.backward_layers, strict=True):
            # Padding stays on the right of the reversed rows, so neither direction sees it before the valid positions.
            left, *_ = forward(x, zero, zero)
            right, *_ = backward(reversed_rows(x, lengths), zero, zero)
            x = self._drop(torch.cat([left, reversed_rows(right, lengths)], -1))  # (B, N, d_model)
        return x

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def empty_state(self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype) -> LSTMState:
        """Return zeros: see `SequenceModule.initial_state`."""
        shape = batch_size, len(self.layers), self.d_model
        return LSTMState(
            torch.zeros(shape, device=device, dtype=accumulator(dtype)),
            torch.zeros(shape, device=device, dtype=accumulator(dtype)),
            torch.zeros(batch_size, dtype=torch.long, device=device),
        )

    def extra_repr(self) -> str:
        """Return the options that the layers do not show."""
        return f"causal={self.causal}, dropout={self.dropout}"


class _Layer(nn.Module):
    """One layer in one direction; the order of the gates is i, f, g, o, as in `torch.lstm`."""

    keep: Tensor

    def __init__(self, d_input: int, hidden: int) -> None:
        super().__init__()
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, d_input))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(4 * hidden))
        for weight in (self.weight_ih, self.weight_hh):
            nn.init.uniform_(weight, -1 / math.sqrt(hidden), 1 / math.sqrt(hidden))
        nn.init.ones_(self.bias[hidden : 2 * hidden])
        # Added to the gates at padding, where σ is then exactly 0 or 1, with a gradient of 0. (float64 needs 746; the
        # largest float16 is 65504.)
        keep = torch.tensor([-1e4, 1e4, 0, 0]).repeat_interleave(hidden)[:, None]  # (4 hidden, 1)
        self.register_buffer("keep", keep, persistent=False)

    def forward(self, x: Tensor, h: Tensor, c: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs (B, N, hidden) for `x` (B, N, d_input), and h and c (B, hidden) after `lengths`.

        The fused recurrence returns c after the last position only, so padding must not change c. An additional input
        is 1 at padding; it closes the input gate and opens the forget gate.
        """
        if x.size(1) == 1:
            return self._step(x, h, c, lengths)
        w = self.weight_ih.to(x.dtype)
        if lengths is not None:
            padding = ~valid_positions(lengths, x.size(1))
            x = torch.cat([x, padding[..., None].to(x.dtype)], -1)  # (B, N, d_input + 1)
            w = torch.cat([w, self.keep.to(x.dtype)], 1)
        b = self.bias.to(x.dtype)
        weights = [w, self.weight_hh.to(x.dtype), b, torch.zeros_like(b)]
        start = h[None].contiguous(), c[None].contiguous()  # cuDNN does not accept views of the layers' states
        # cuDNN computes gradients only after a forward pass in training mode.
        y, after, c = torch.lstm(x, start, weights, True, 1, 0.0, torch.is_grad_enabled(), False, True)
        if lengths is None:
            return y, after[0], c[0]
        last = y.gather(1, (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, h.size(1)))[:, 0]  # (B, hidden)
        return y, torch.where(lengths[:, None] > 0, last, h), c[0]

    def _step(self, x: Tensor, h: Tensor, c: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Read one position, without the overhead of the fused recurrence."""
        weights = [w.to(x.dtype) for w in (self.weight_ih, self.weight_hh, self.bias)]
        if x.device.type != "cpu":  # CUDA's cell takes two biases or none
            weights.append(torch.zeros_like(weights[-1]))
        new_h, new_c = torch.lstm_cell(x[:, 0], (h, c), *weights)
        if lengths is not None:
            valid = lengths[:, None] > 0
            new_h, new_c = torch.where(valid, new_h, h), torch.where(valid, new_c, c)
        return new_h[:, None], new_h, new_c
