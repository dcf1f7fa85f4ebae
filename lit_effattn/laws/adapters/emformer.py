"""The adapter of torchaudio's Emformer, a streaming encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_effattn.laws.adapter import Adapter, Build


class EmformerAdapter(Adapter):
    """`torchaudio.models.Emformer` without right context: `forward` on the whole, and `infer` on segments.

    A position of the laws is one segment of the encoder, so that a split is always one that `infer` allows.

    Args:
        module: The encoder, or a function that builds it. `right_context_length` is 0.
        frames: Its `segment_length`.
        d_input: Features of a frame.
        options: See `Adapter`.
    """

    spacings = 16  # several layers, each of which rounds
    longest = 64
    steps = 16
    compiles = False
    batch_dim = 1

    def __init__(self, module: torch.nn.Module | Build, *, frames: int, d_input: int, **options: Any) -> None:
        super().__init__(module, width=frames * d_input, **options)

    @staticmethod
    def call(module: Any, x: Tensor, state: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return outputs of `forward` without a state, of `infer` with one, and the state after `infer`."""
        segments = x.unflatten(2, (module.segment_length, -1)).unbind(1)
        frames, y, after = torch.full((len(x),), module.segment_length), [], state
        for segment in segments:
            z, _, after = module.infer(segment, frames, after)
            y.append(z)
        if state is None:
            y = module(torch.cat(segments, 1), frames * len(segments))[0].split(module.segment_length, 1)
        return torch.stack(list(y), 1).flatten(2), after
