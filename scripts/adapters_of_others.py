"""Adapters of modules of other packages, whose laws `scripts/laws_of_others.py` checks."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lit_effattn.laws.adapter import Adapter, Build
from lit_effattn.laws.adapters.hugging_face import HuggingFaceAdapter

WIDTHS = {
    **dict.fromkeys(("hidden_size", "embedding_dim", "d_model", "n_embd", "lru_width", "attention_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "mamba_d_ssm", "vocab_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_blocks", "n_layer", "num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("n_mamba_heads", "n_groups", "num_query_groups", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts_per_token",), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank", "chunk_size", "mamba_chunk_size", "block_size"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "adapter_rank"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4),
    **dict.fromkeys(("head_dim", "attention_head_dim", "state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_num_heads", "mamba_head_dim", "mamba_headdim"), 8),
    **dict.fromkeys(("attention_window_size", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim", "qk_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "num_expert_group", "topk_group"), 1),
    "context_length": 256,
    "initializer_range": 0.2,  # with 0.02 so small a model hardly attends
}
"""The sizes of a tiny model, where an architecture has them."""

_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _HYBRID,
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": _HYBRID,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "mamba2": {"num_heads": 8},
    "minimax": _HYBRID,
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "olmo_hybrid": {**_HYBRID, "linear_num_value_heads": 2},
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 12, "num_key_value_heads": 4, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {
        **{"attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4, "n_mamba_heads": 8},
        "layers_block_type": ["mamba", "hybrid"],
    },
}
"""What an architecture needs besides."""


class TinyAdapter(HuggingFaceAdapter):
    """A tiny random model of transformers.

    Args:
        architecture: Its `model_type`, such as `mamba`.
        layers: The kinds of its layers, for an architecture with several. Default: one of each.
    """

    def __init__(self, architecture: str, layers: list[str] | None = None) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        self.architecture = architecture
        options = _sizes(transformers.CONFIG_MAPPING[architecture], architecture)
        if layers is not None:
            options |= {"layer_types": layers, "num_hidden_layers": len(layers)}

        def build() -> torch.nn.Module:
            made = transformers.CONFIG_MAPPING[architecture](**options)
            self.layers = list(getattr(made, "layer_types", None) or [])
            return transformers.AutoModelForCausalLM.from_config(made)

        super().__init__(build, name=architecture + (f" of {', '.join(layers)}" if layers else ""))

    def smaller(self) -> Iterator[Adapter]:
        """Yield models of one kind of layer, then of two."""
        kinds = list(dict.fromkeys(self.layers))
        for layers in [[kind] for kind in kinds] + [[a, b] for a in kinds for b in kinds if len(self.layers) > 2]:
            try:
                yield TinyAdapter(self.architecture, layers)
            except Exception:  # an architecture may need several kinds, or names them otherwise
                continue


def _sizes(config: Any, architecture: str) -> dict[str, Any]:
    """Return the arguments of a tiny configuration."""
    takes = inspect.signature(config.__init__).parameters
    default = config()
    sizes = {
        name: size
        for name, size in WIDTHS.items()
        if (name in takes or isinstance(getattr(default, name, None), (int, float)))
        and not isinstance(inspect.getattr_static(config, name, None), property)
    }
    return {**sizes, **SPECIAL.get(architecture, {}), "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}


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
