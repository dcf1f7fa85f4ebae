"""The adapter of the layers of the package flash-linear-attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_effattn.laws.adapter import Adapter


class FlashLinearAttentionAdapter(Adapter):
    """A layer of `fla.layers` that takes `past_key_values`, made with `layer_idx=0`. Padding is on the left.

    The state is the package's `Cache`, which calls overwrite, and the mask of all positions so far.
    """

    padding = "left"
    donates = True
    dtype = torch.float32  # kernels accumulate in float32
    compiles = False

    @staticmethod
    def call(module: Any, x: Tensor, state: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return the outputs, and the cache with the attention mask."""
        from fla.models.utils import Cache

        cache, mask = (Cache(), None) if state is None else state
        if lengths is not None:
            mask = torch.arange(x.size(1), 0, -1, device=x.device) <= lengths[:, None]
        elif mask is not None:  # rotary layers count the padding of earlier calls
            mask = torch.cat([mask, mask.new_ones(x.shape[:2])], 1)
        y, _, cache = module(x, attention_mask=mask, past_key_values=cache, use_cache=True)
        return y, (cache, mask)
