"""Sliding-window evaluation: a new context for every position."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lit_effattn.attention.kv_cache import gather, newest
from lit_effattn.checks import at_least
from lit_effattn.sequence import SequenceModule, valid_lengths, without_padding


class SlidingState(NamedTuple):
    """The newest window − 1 inputs, the newest last."""

    inputs: Tensor  # (B, window − 1, d_input)
    length: Tensor  # (B,), positions seen


class SlidingWindow(SequenceModule):
    """Computes every position from the `window` newest positions alone.

        y_i = module(x_{i−w+1} … x_i), its last output

    Al-Rfou et al. (2018, section 3) evaluate a Transformer without a memory in this way. Each prediction has the
    longest context that the model was trained with, at the cost of a whole segment per token. Splitting a stream
    changes nothing. Each window starts at position 0.

    Args:
        module: Causal; its own state is not used.
        window: Number of positions in a window, the current one included.
        windows_at_once: Number of windows in one call of `module`. It has no effect on the result.

    Raises:
        ValueError: If `module` is not causal, or a number is not positive.
    """

    def __init__(self, module: SequenceModule, window: int, *, windows_at_once: int = 256) -> None:
        super().__init__()
        if not module.causal:
            raise ValueError(f"{type(module).__name__} has causal=False; SlidingWindow needs a causal module")
        at_least(1, window=window, windows_at_once=windows_at_once)
        self.d_input, self.d_model, self.causal = module.d_input, module.d_model, True
        self.module = module
        self.window = window
        self.windows_at_once = windows_at_once

    @override
    def empty_state(
        self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> SlidingState:
        return SlidingState(
            torch.zeros(batch_size, self.window - 1, self.d_input, device=device, dtype=dtype),
            torch.zeros(batch_size, dtype=torch.long, device=device),
        )

    @override
    def forward(
        self, x: Tensor, state: SlidingState | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, SlidingState]:
        self.check(x, state, lengths)
        b, n, _ = x.shape
        x = without_padding(x, lengths)
        state = state or self.initial_state(b, device=x.device, dtype=x.dtype)
        seen = valid_lengths(lengths, x)
        reach = self.window - 1
        stream = torch.cat([state.inputs.to(x.dtype), x], 1)  # (B, window − 1 + N, E)

        # Window i holds the inputs i … i + window − 1 of `stream`. At most as many are valid as the row has seen.
        position = state.length[:, None] + torch.arange(n, device=x.device)  # (B, N)
        valid = (position + 1).clamp(max=self.window)
        index = torch.arange(n, device=x.device)[:, None] + torch.arange(self.window, device=x.device)  # (N, window)
        index = (index + (self.window - valid)[..., None]).clamp(max=reach + n - 1)  # valid inputs come first
        columns = max(1, self.windows_at_once // b)
        chunks = zip(index.split(columns, 1), valid.split(columns, 1), strict=True)
        y = [self._last_outputs(stream, *chunk) for chunk in chunks]
        inputs = newest(stream, reach + seen, reach, dim=1).to(state.inputs.dtype)  # (B, window − 1, E)
        return without_padding(torch.cat(y, 1), lengths), SlidingState(inputs, state.length + seen)

    def _last_outputs(self, stream: Tensor, index: Tensor, valid: Tensor) -> Tensor:
        """Run the windows with the inputs `index` (B, n, window) of `stream`; the first `valid` (B, n) are valid.

        Returns:
            (B, n, d_model).
        """
        b, n, w = index.shape
        windows = gather(stream, index.flatten(1), dim=1).view(b * n, w, -1)
        lengths = valid.reshape(b * n)
        y, _ = self.module(without_padding(windows, lengths), None, lengths)
        return gather(y, lengths[:, None] - 1, dim=1).view(b, n, -1)
