"""The adapter of the causal language models of the package transformers, and such models of a tiny size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_effattn.laws.adapter import Adapter


class HuggingFaceAdapter(Adapter):
    """A model with `logits` and a cache: `past_key_values`, `cache_params` or `state`. Padding is on the left.

    The state is the cache, which calls overwrite, and the mask of all positions so far.
    """

    padding = "left"
    donates = True
    dtype = torch.float32
    longest = 512
    bitwise = frozenset()

    @staticmethod
    def call(module: Any, x: Tensor, state: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return logits, and the cache with the attention mask."""
        cache, mask = state or (None, None)
        n = x.size(1)
        new = torch.ones_like(x) if lengths is None else (torch.arange(n, 0, -1) <= lengths[:, None]).long()
        mask = new if mask is None else torch.cat([mask, new], 1)
        name = next(p for p in ("past_key_values", "cache_params", "state") if p in FORWARD(module))
        options = {} if name == "state" else {"attention_mask": mask}
        out = module(x, use_cache=True, **{name: cache}, **options)
        return out.logits, (out[name], mask)
