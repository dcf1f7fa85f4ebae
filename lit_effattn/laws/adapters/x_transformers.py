"""The adapter of the decoders of the package x-transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_effattn.laws.adapter import Adapter, Build


class XTransformersAdapter(Adapter):
    """A `TransformerWrapper` with a `Decoder`: tokens, a cache of keys and values. Padding is on the left.

    A call is given the new tokens alone, and `seq_start_pos`, the first valid position of each row, if rows are padded.

    Args:
        module: The wrapper, or a function that builds it.
        options: See `Adapter`. Default of `vocabulary`: the wrapper's.
    """

    padding = "left"
    dtype = torch.float32  # positions are computed in float32
    compiles = False
    longest = 512
    steps = 32
    spacings = 16  # several layers, each of which rounds

    def __init__(self, module: torch.nn.Module | Build, **options: Any) -> None:
        super().__init__(module, **options)
        self.vocabulary = options.get("vocabulary") or self.make().num_tokens

    @staticmethod
    def call(module: Any, x: Tensor, state: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return logits, and the intermediates with the first valid positions."""
        cache, start = (None, None) if state is None else state
        if lengths is not None:
            start = x.size(1) - lengths
        options = {"cache": cache, "input_not_include_cache": True, "cache_age": 0, "seq_start_pos": start}
        y, cache = module(x, return_intermediates=True, **options)
        return y, (cache, start)
