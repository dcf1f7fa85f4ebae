"""Every key of a config.json is followed, rejected by name, or harmless in transformers too."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_effattn.interchange.convert import FAMILIES, convert
from tests.interchange import test_convert
from tests.interchange.test_convert import MIXED, SIZE, START, doubles, logits, near, tokenizer_json, tokens

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None,
    reason="needs the package transformers",
)

TOKENS = {"vocab_size": SIZE, "bos_token_id": START, "eos_token_id": START + 1}
LLAMA = {**test_convert.LLAMA, "head_dim": 4, **TOKENS}
QWEN = {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
BASES: dict[str, dict[str, Any]] = {
    "gpt2": {**test_convert.GPT2, **TOKENS},
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 5},
    "ministral": {**LLAMA, "sliding_window": 5},
    "qwen2": QWEN,
    "qwen3": QWEN,
}
OLD_KEYS = ("layer_types", "per_layer_config", "partial_rotary_factor", "rope_scaling", "rope_theta", "is_causal")
"""Keys that transformers reads although they are not attributes of every configuration, or not any more."""

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
FULL, SLIDING = ["full_attention"] * 2, ["sliding_attention"] * 2
FOLLOWED: dict[str, list[Any]] = {
    "vocab_size": [310],
    "tie_word_embeddings": [True, False],
    # GPT-2's
    "n_positions": [30],
    "n_embd": [24],
    "n_layer": [1],
    "n_head": [4],
    "n_inner": [12],
    "activation_function": ["gelu", "gelu_pytorch_tanh", "relu"],
    "layer_norm_epsilon": [0.1],
    # the others'
    "hidden_size": [24],
    "intermediate_size": [12],
    "num_hidden_layers": [1],
    "num_attention_heads": [2, 8],
    "num_key_value_heads": [1, 4],
    "head_dim": [6],
    "rms_norm_eps": [0.1],
    "attention_bias": [True],
    "rope_theta": [50.0],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 50.0}, {"rope_theta": 50.0}],
    "rope_scaling": [{"rope_type": "default"}],
    "sliding_window": [3, None],
    "use_sliding_window": [False],
    "max_window_layers": [0, 2],
    "layer_types": [FULL, SLIDING, MIXED, MIXED[::-1]],
}
REFUSED: dict[str, list[Any]] = {
    "is_encoder_decoder": [True],
    "is_causal": [False],
    "per_layer_config": [{"0": {"num_key_value_heads": 1}}],
    "activation_function": ["silu"],
    "add_cross_attention": [True],
    "reorder_and_upcast_attn": [True],
    "scale_attn_by_inverse_layer_idx": [True],
    "scale_attn_weights": [False],
    "hidden_act": ["gelu"],
    "mlp_bias": [True],
    "partial_rotary_factor": [0.5],
    "rope_parameters": [LINEAR],
    "rope_scaling": [LINEAR],
}
HARMLESS: dict[str, Any] = {
    **{"transformers_version": "4.30.0", "architectures": ["Other"], "_name_or_path": "x", "dtype": "float16"},
    **{"return_dict": True, "output_hidden_states": True, "output_attentions": True, "use_cache": False},
    **{"chunk_size_feed_forward": 1, "id2label": {"0": "a"}, "label2id": {"a": 0}, "problem_type": "regression"},
    **{"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 8, "initializer_range": 0.5},
    **{"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5, "attention_dropout": 0.5},
    **{"summary_type": "mean", "summary_use_proj": False, "summary_activation": "tanh"},
    **{"summary_proj_to_labels": False, "summary_first_dropout": 0.5},
    **{"max_position_embeddings": 99, "pretraining_tp": 2},
}
SAME = dict.fromkeys(BASES, ("rope_scaling",)) | {"llama": ("rope_scaling", "layer_types")}
"""Keys whose values in `FOLLOWED` are what transformers assumes without them."""


def config(kind: str, folder: Path, **changed: Any) -> Any:
    """The configuration that transformers reads from a config.json with the changed keys."""
    from transformers import AutoConfig

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **BASES[kind], **changed}))
    return AutoConfig.from_pretrained(folder)


@torch.no_grad()
def pretrained(kind: str, folder: Path, **changed: Any) -> Tensor:
    """The logits of transformers' random model of a config.json, whose folder is written."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with doubles():
        made = AutoModelForCausalLM.from_config(config(kind, folder, **changed), attn_implementation="eager")
        model = made.double().eval()
    random = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.copy_(0.3 * torch.randn(p.shape, generator=random) + (p.ndim == 1))
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    tensors = {
        name: t.to(torch.float32, copy=True)
        for name, t in model.state_dict().items()
        if name != "lm_head.weight" or not tied
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").write_text(tokenizer_json())
    with doubles():
        return model(tokens())[0]


@torch.no_grad()
def converted(folder: Path, target: Path) -> Tensor:
    """The logits of the converted model. It is not built by `load_from_checkpoint`, which takes longer."""
    convert(folder, target)
    content = json.loads((folder / "config.json").read_text())
    (family,) = (family for family in FAMILIES if content["model_type"] in family.model_types)
    model = family.build(content, None).eval()
    model.load_state_dict(torch.load(target / "model.ckpt", weights_only=True)["state_dict"])
    return logits(model.double())


def followed(kind: str) -> dict[str, list[Any]]:
    """The values of each key that are to be followed."""
    old = () if kind == "gpt2" else OLD_KEYS  # of rotary models
    values = {key: FOLLOWED.get(key, []) for key in (*config_keys(kind), *old)}
    if kind == "ministral":
        values["sliding_window"] = [3]  # transformers fails without one
    return values | {"layer_types": [FULL]} if kind == "llama" else values


def config_keys(kind: str) -> dict[str, Any]:
    from transformers import AutoConfig

    return dict(AutoConfig.for_model(kind, **BASES[kind]).to_dict())


def test_every_key_of_transformers_is_followed_or_refused_or_harmless():
    known = FOLLOWED.keys() | REFUSED.keys() | HARMLESS.keys() | {"model_type"}
    assert {kind: config_keys(kind).keys() - known for kind in BASES} == {kind: set() for kind in BASES}


# A Mistral and a Ministral are read alike.
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.exhaustive] * (kind == "ministral")) for kind in BASES]
)
def test_followed_keys_give_the_same_logits(kind: str, tmp_path: Path):
    base = pretrained(kind, tmp_path / "base")
    near(converted(tmp_path / "base", tmp_path / "ours"), base)
    for key, values in followed(kind).items():
        of_values = [pretrained(kind, tmp_path / f"{key}{i}", **{key: value}) for i, value in enumerate(values)]
        for i, expected in enumerate(of_values):
            near(converted(tmp_path / f"{key}{i}", tmp_path / f"ours_{key}{i}"), expected)
        if key not in SAME.get(kind, ()):
            changes = [x.shape != base.shape or (x - base).abs().max() > 1e-4 for x in of_values]
            assert any(changes) or not values, f"{key} changes nothing, so this tests nothing"


@pytest.mark.parametrize("kind", BASES)
def test_harmless_keys_change_neither_logits(kind: str, tmp_path: Path):
    changed = {key: value for key, value in HARMLESS.items() if key in config_keys(kind)}
    assert len(changed) >= 18
    expected, base = pretrained(kind, tmp_path / "hf", **changed), pretrained(kind, tmp_path / "base")
    near(expected, base)
    near(converted(tmp_path / "hf", tmp_path / "ours"), expected)
    if kind not in ("gpt2", "llama"):  # a window is not applied where no layer has one
        expected = pretrained(kind, tmp_path / "full", layer_types=FULL)
        assert (expected - base).abs().max() > 0.01
        near(converted(tmp_path / "full", tmp_path / "ours of full"), expected)


@pytest.mark.parametrize("kind", BASES)
def test_refused_keys_are_named(kind: str, tmp_path: Path):
    pretrained(kind, tmp_path / "hf")
    cases = [(key, value) for key in {**config_keys(kind), **dict.fromkeys(OLD_KEYS)} for value in REFUSED.get(key, [])]
    cases += [("layer_types", MIXED), ("sliding_window", 3)] if kind in ("gpt2", "llama") else []
    cases += [("layer_types", FULL[:1]), ("layer_types", ["chunked_attention"] * 2), ("not_known", 1)]
    for key, value in cases:
        (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": kind, **BASES[kind], key: value}))
        with pytest.raises(ValueError, match=r"^config\.json has") as error:
            convert(tmp_path / "hf", tmp_path / "ours")
        named = (key, *value) if isinstance(value, dict) else (key,)
        assert any(f"{name}=" in str(error.value) for name in named), f"{key}={value!r}: {error.value}"
        assert not (tmp_path / "ours").exists()
