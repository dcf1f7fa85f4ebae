"""The adapter of the causal language models of the package transformers."""

import inspect
from typing import Any, Literal

import torch
from torch import Tensor

from lit_effattn.laws import tree
from lit_effattn.laws.adapter import Adapter, Build


class HuggingFaceAdapter(Adapter):
    """A causal language model of transformers, with its cache and `generate`. Padding is on the left.

    Calls without padding give no mask, those with padding the mask and the positions, as `generate` does. The state is
    the cache, which calls overwrite, and the mask of all positions so far. A model that returns no cache, as
    RecurrentGemma, is checked without a state; one whose `forward` takes no mask without padding. Norms and
    recurrences compute in float32 whatever the type of the parameters is, so float32 is the type of the checks.

    Args:
        module: The model, or a function that builds it.
        options: See `Adapter`.
    """

    padding: Literal["right", "left"] | None = "left"
    donates = True
    dtype = torch.float32
    longest = 512
    spacings = 16  # several layers, each of which rounds
    compiles = False

    def __init__(self, module: torch.nn.Module | Build, **options: Any) -> None:
        super().__init__(module, **options)
        model: Any = self.make().eval()
        self.vocabulary = options.get("vocabulary", model.config.get_text_config().vocab_size)
        routes = any("experts_per_tok" in name for name in vars(model.config.get_text_config()))
        self.jumps = options.get("jumps", routes)
        with torch.no_grad():
            _, (cache, _) = self.call(model, torch.ones(1, 2, dtype=torch.long))
        self.stateful = options.get("stateful", cache is not None)
        takes = inspect.signature(model.forward).parameters
        if "attention_mask" not in takes or model.config.model_type == "rwkv":
            self.padding = None  # RWKV documents that it does not use the mask

    @staticmethod
    def call(module: Any, x: Tensor, state: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return logits, and the cache with the attention mask."""
        cache, mask = state or (None, None)
        options: dict[str, Any] = {}
        if lengths is not None or mask is not None:
            new = _mask(x, lengths)
            mask = new if mask is None else torch.cat([mask, new], 1)
            position = (mask.cumsum(1) - 1).clamp(min=0)[:, -x.size(1) :]
            options = {"attention_mask": mask, "position_ids": position}
        takes = inspect.signature(module.forward).parameters
        name = next(n for n in ("cache", "past_key_values", "cache_params", "state") if n in takes)
        options = {name: cache, **{key: value for key, value in options.items() if key in takes}}
        out = module(x, use_cache=True, **options)
        return out.logits, (out.get(name), mask)

    @staticmethod
    def select(module: Any, state: Any, rows: Tensor) -> Any:
        """Return rows by the cache's own `reorder_cache`, as beam search does."""
        cache, mask = tree.clone(state)
        if not hasattr(cache, "reorder_cache"):
            return tree.select(state, rows)
        cache.reorder_cache(rows)
        return cache, None if mask is None else mask[rows]

    @staticmethod
    def generate(module: Any, x: Tensor, n: int, lengths: Tensor | None) -> Tensor:
        """Return the tokens of `module.generate`."""
        options = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "pad_token_id": 0}
        return module.generate(x, attention_mask=_mask(x, lengths), **options)[:, x.size(1) :]


def _mask(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return the attention mask of tokens (B, N) that are padded on the left."""
    if lengths is None:
        return torch.ones_like(x)
    return (torch.arange(x.size(1), 0, -1, device=x.device) <= lengths[:, None]).long()
