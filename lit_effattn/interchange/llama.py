"""Llama-like decoders: rotary positions, RMSNorm, SwiGLU and grouped-query attention (Touvron et al. 2023)."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from lit_effattn.attention import SoftmaxAttention
from lit_effattn.attention.positions import RotaryPositions
from lit_effattn.interchange.family import Family, Settings, unsupported
from lit_effattn.nn.heads import CategoricalHead
from lit_effattn.nn.transformer import Transformer
from lit_effattn.tasks import LanguageModel

_HARMLESS = frozenset(("attention_dropout", "max_position_embeddings", "pretraining_tp"))
_THETA = 10000.0
_MISTRAL, _QWEN = ("mistral", "ministral"), ("qwen2", "qwen3")
_FULL, _SLIDING = "full_attention", "sliding_attention"  # the entries of `layer_types`


class Llama(Family):
    """Llama, Mistral, Ministral, Qwen2, Qwen3, and models of their shape, such as SmolLM.

    `layer_types` determines which layers have a sliding window.
    """

    model_types = ("llama", "mistral", "ministral", "qwen2", "qwen3")
    prefix = "model."
    buffers = r".*\.rotary_emb\.inv_freq"
    modules: ClassVar[dict[str, str]] = {
        "model.embed_tokens": "embedding",
        "model.norm": "backbone.norm",
        "model.layers.{i}.input_layernorm": "backbone.blocks.{i}.norm_1",
        "model.layers.{i}.self_attn.q_proj": "backbone.blocks.{i}.attention.q_proj",
        "model.layers.{i}.self_attn.k_proj": "backbone.blocks.{i}.attention.k_proj",
        "model.layers.{i}.self_attn.v_proj": "backbone.blocks.{i}.attention.v_proj",
        "model.layers.{i}.self_attn.o_proj": "backbone.blocks.{i}.attention.out_proj",
        "model.layers.{i}.self_attn.q_norm": "backbone.blocks.{i}.attention.q_norm",
        "model.layers.{i}.self_attn.k_norm": "backbone.blocks.{i}.attention.k_norm",
        "model.layers.{i}.post_attention_layernorm": "backbone.blocks.{i}.norm_2",
        "model.layers.{i}.mlp.gate_proj": "backbone.blocks.{i}.feed_forward.gate",
        "model.layers.{i}.mlp.up_proj": "backbone.blocks.{i}.feed_forward.up",
        "model.layers.{i}.mlp.down_proj": "backbone.blocks.{i}.feed_forward.down",
    }

    def build(self, content: Mapping[str, Any], tokenizer: str | None) -> LanguageModel:
        """Build the model: see `Family.build`."""
        s, kind = Settings(content, _HARMLESS), content["model_type"]
        s.expect("hidden_act", "silu")
        s.expect("mlp_bias", False)
        s.expect("rope_interleaved", False)
        width, heads, layers = s.number("hidden_size"), s.number("num_attention_heads"), s.number("num_hidden_layers")
        eps = s.number("rms_norm_eps", 1e-6, whole=False)
        head_dim = s.number("head_dim", 128 if kind == "qwen3" else None)
        _check_pairs(head_dim or width // max(heads, 1))
        attention = partial(
            SoftmaxAttention,
            n_kv_heads=s.number("num_key_value_heads", 8 if kind in _MISTRAL else None) or heads,
            head_dim=head_dim,
            **({"qk_norm": True, "qk_norm_eps": eps} if kind == "qwen3" else {}),
            **_biases(s, kind),
        )
        windows = _windows(s, kind, layers)
        kinds: list[Any] = [partial(attention, window=window) for window in windows]
        backbone = Transformer(
            width,
            heads,
            layers,
            s.number("intermediate_size"),
            attention=kinds[0] if len(set(windows)) == 1 else kinds,
            positions=partial(RotaryPositions, base=_theta(s)),
            activation="swiglu",
            norm_kind="rms",
            norm_eps=eps,
        )
        size, tie = s.number("vocab_size"), s.flag("tie_word_embeddings", False)
        s.finish()
        return LanguageModel(backbone, size, tokenizer=tokenizer, head=partial(CategoricalHead, bias=False), tie=tie)

    def config(self, model: LanguageModel) -> dict[str, Any]:
        """Return a config.json: Qwen3's with `qk_norm`, Qwen2's by its biases, Mistral's with windows, else Llama's.

        A Mistral in which only some layers have a window is a Ministral. See `Family.config`.
        """
        backbone: Any = model.backbone
        block = backbone.blocks[0]
        attention = block.attention
        q, out = attention.q_proj.bias is not None, attention.out_proj.bias is not None
        windows = [getattr(block.attention, "window", None) for block in backbone.blocks]
        window = next((window for window in windows if window is not None), None)
        types = [_FULL if window is None else _SLIDING for window in windows]
        own: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": out}
        if attention.q_norm is not None:
            own = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": out}
        elif q and not out:
            own = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        elif window is not None and _FULL in types:
            own = {"model_type": "ministral", "architectures": ["MinistralForCausalLM"], "layer_types": types}
        elif window is not None:
            own = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        if window is not None:
            own["sliding_window"] = window
            if own["model_type"] in _QWEN:
                own |= {"use_sliding_window": True, "layer_types": types}
        _check_pairs(attention.head_dim)
        if block.norm_1.eps is None:
            raise ValueError("norm_eps=None depends on the precision; config.json needs a number: give norm_eps")
        return {
            **own,
            "head_dim": attention.head_dim,
            "hidden_act": "silu",
            "hidden_size": backbone.d_model,
            "intermediate_size": block.feed_forward.up.out_features,
            "num_attention_heads": attention.n_heads,
            "num_hidden_layers": len(backbone.blocks),
            "num_key_value_heads": attention.n_kv_heads,
            "rms_norm_eps": block.norm_1.eps,
            "rope_parameters": {"rope_theta": float(attention.rotary.base), "rope_type": "default"},
            "rope_theta": float(attention.rotary.base),
        }

    def fits(self, model: LanguageModel) -> bool:
        """Return whether positions are rotary."""
        blocks = getattr(model.backbone, "blocks", [None])
        return getattr(getattr(blocks[0], "attention", None), "rotary", None) is not None


def _check_pairs(head_dim: int) -> None:
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} is odd, but transformers rotates pairs of dimensions")


def _windows(s: Settings, kind: str, layers: int) -> list[int | None]:
    """Return the window of each layer. transformers treats a Mistral with `layer_types` as a Ministral."""
    first, window = 0, None
    if kind in _MISTRAL:
        window = s.number("sliding_window", 4096, null=True)
    elif kind in _QWEN:
        first = s.get("max_window_layers", 28)
        if not isinstance(first, int) or isinstance(first, bool):
            raise ValueError(f"config.json has max_window_layers={first!r}: it must be an integer")
        if s.flag("use_sliding_window", False):
            window = s.number("sliding_window", 4096, null=True)
        else:
            s.get("sliding_window", None)  # not in use
    else:
        s.expect("sliding_window", None)
    types = s.get("layer_types", None)
    if types is None:
        types = [_FULL if window is None or i < first else _SLIDING for i in range(layers)]
    known = [_FULL] if window is None else [_FULL, _SLIDING]
    if not isinstance(types, list) or len(types) != layers or not all(kind in known for kind in types):
        raise unsupported("layer_types", types, f"only {layers} entries {' or '.join(known)} are supported here")
    return [window if kind == _SLIDING else None for kind in types]


def _biases(s: Settings, kind: str) -> dict[str, bool]:
    if kind == "qwen2":
        return {"bias": True, "out_bias": False}
    if kind in ("llama", "qwen3"):
        return {"bias": s.flag("attention_bias", False)}
    s.expect("attention_bias", False)
    return {"bias": False}


def _theta(s: Settings) -> float:
    """Return the base of the rotary positions, which newer folders have in `rope_parameters`."""
    scaling = s.expect("rope_scaling", None, {"type": "default"}, {"rope_type": "default"})
    theta = s.number("rope_theta", _THETA, whole=False)
    parameters = s.get("rope_parameters", None)
    if parameters is None or scaling is not None:  # transformers reads `rope_scaling` in place of `rope_parameters`
        return float(theta)
    inner = Settings(parameters if isinstance(parameters, Mapping) else {"rope_parameters": parameters})
    inner.expect("rope_type", "default")
    theta = inner.number("rope_theta", theta, whole=False)
    inner.finish()
    return float(theta)
