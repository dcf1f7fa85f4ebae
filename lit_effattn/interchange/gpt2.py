"""GPT-2 (Radford et al. 2019): learned positions, pre-norm, biases everywhere, and a head tied to the embedding."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from lit_effattn.attention import SoftmaxAttention
from lit_effattn.attention.positions import LearnedPositions
from lit_effattn.interchange.family import Family, Settings
from lit_effattn.nn.heads import CategoricalHead
from lit_effattn.nn.transformer import Transformer
from lit_effattn.tasks import LanguageModel

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}

_HARMLESS = frozenset(
    (
        *("attn_pdrop", "embd_pdrop", "resid_pdrop", "n_ctx", "summary_activation", "summary_first_dropout"),
        *("summary_proj_to_labels", "summary_type", "summary_use_proj"),
    )
)


class GPT2(Family):
    """GPT-2 and models of its shape, such as DistilGPT-2."""

    model_types = ("gpt2",)
    prefix = "transformer."
    buffers = r".*\.attn\.(bias|masked_bias)"  # the causal mask
    modules: ClassVar[dict[str, str]] = {
        "transformer.wte": "embedding",
        "transformer.wpe": "backbone.positions.table",
        "transformer.ln_f": "backbone.norm",
        "transformer.h.{i}.ln_1": "backbone.blocks.{i}.norm_1",
        "transformer.h.{i}.attn.c_attn": " ".join(f"backbone.blocks.{{i}}.attention.{part}_proj" for part in "qkv"),
        "transformer.h.{i}.attn.c_proj": "backbone.blocks.{i}.attention.out_proj",
        "transformer.h.{i}.ln_2": "backbone.blocks.{i}.norm_2",
        "transformer.h.{i}.mlp.c_fc": "backbone.blocks.{i}.feed_forward.up",
        "transformer.h.{i}.mlp.c_proj": "backbone.blocks.{i}.feed_forward.down",
    }
    transposed = r".*\.c_\w+\.weight"

    def build(self, content: Mapping[str, Any], tokenizer: str | None) -> LanguageModel:
        """Build the model: see `Family.build`."""
        s = Settings(content, _HARMLESS)
        for name in ("add_cross_attention", "reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx"):
            s.expect(name, False)
        s.expect("scale_attn_weights", True)
        width = s.number("n_embd")
        backbone = Transformer(
            width,
            s.number("n_head"),
            s.number("n_layer"),
            s.number("n_inner", None) or 4 * width,
            attention=SoftmaxAttention,
            positions=partial(LearnedPositions, max_len=s.number("n_positions")),
            activation=_ACTIVATIONS[s.expect("activation_function", *_ACTIVATIONS)],  # type: ignore[arg-type]
            norm_eps=s.number("layer_norm_epsilon", 1e-5, whole=False),
        )
        size, tie = s.number("vocab_size"), s.flag("tie_word_embeddings", True)
        s.finish()
        return LanguageModel(backbone, size, tokenizer=tokenizer, head=partial(CategoricalHead, bias=False), tie=tie)

    def config(self, model: LanguageModel) -> dict[str, Any]:
        """Return a config.json: see `Family.config`."""
        backbone: Any = model.backbone
        block = backbone.blocks[0]
        activations = {own: name for name, own in reversed(_ACTIVATIONS.items())}
        activation = block.feed_forward.activation
        if activation not in activations:
            raise ValueError(f"activation={activation!r}: GPT-2 has one of {', '.join(activations)}")
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": activations[activation],
            "layer_norm_epsilon": block.norm_1.eps,
            "n_embd": backbone.d_model,
            "n_head": block.attention.n_heads,
            "n_inner": block.feed_forward.up.out_features,
            "n_layer": len(backbone.blocks),
            "n_positions": backbone.positions.table.num_embeddings,
        }

    def fits(self, model: LanguageModel) -> bool:
        """Return whether positions are learned."""
        return isinstance(getattr(model.backbone, "positions", None), LearnedPositions)
