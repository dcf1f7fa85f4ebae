"""What `--init_weights` takes from softmax attention, for every kind: the rest is fresh and named, or refused."""

from functools import partial
from typing import Any

import pytest
import torch

from lit_effattn import Transformer
from lit_effattn.attention import (
    InfiniteAttention,
    LinearAttention,
    LSHAttention,
    SoftmaxAttention,
    TransformerXLAttention,
)
from lit_effattn.attention.feature_maps import HedgehogFeatureMap
from lit_effattn.settings.initial_weights import add_missing, remedy
from lit_effattn.settings.kinds import attention_kinds
from lit_effattn.tasks import LanguageModel

KINDS = [*attention_kinds().values()]
NEEDED: dict[str, dict[str, Any]] = {
    "SparseAttention": {"stride": 4},
    "WindowedLinearAttention": {"window": 4},
    "RetentionAttention": {"head_dim": 4},
    "GatedLinearAttention": {"qk_dim": 4},
    "Mamba2Attention": {"qk_dim": 4, "head_dim": 4, "n_qk_heads": 2},
    "InfiniteAttention": {"mem_len": 4, "segment_len": 4, "n_basis": 4, "widths": (0.2,)},
    "CompressiveAttention": {"mem_len": 4},
    "TransformerXLAttention": {"mem_len": 4},
}


def model(kind: Any, **options: Any) -> LanguageModel:
    made = partial(kind, **{**NEEDED.get(kind.__name__, {}), **options})
    return LanguageModel(Transformer(8, 2, 2, attention=made, positions=None), 5)


def taken(target: LanguageModel, source: LanguageModel) -> tuple[list[str], set[str]]:
    """What is kept fresh, and the names that are not those of the target."""
    weights = dict(source.state_dict())
    kept = add_missing(target, weights)
    return kept, weights.keys() ^ target.state_dict().keys()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_starts_from_softmax_attention_or_says_what_it_lacks(kind: Any):
    source, target = model(SoftmaxAttention), model(kind, bias=True)
    before = {name: t.clone() for name, t in target.state_dict().items()}
    kept, left = taken(target, source)
    own = target.state_dict().keys() - source.state_dict().keys()
    assert sum(int(text.rpartition("(")[2].rstrip("×)")) for text in kept) == len(own)
    if not left:
        weights = dict(source.state_dict())
        add_missing(target, weights)
        target.load_state_dict(weights)
        after = target.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in own)
        assert all(torch.equal(after[name], source.state_dict()[name]) for name in after.keys() - own)
    else:
        assert {name.split(".attention.")[1].split(".")[0] for name in left} == set(kind.lacks)
        (lacked,) = kind.lacks
        assert f"{kind.__name__} has no {lacked}: " in remedy(target, source.state_dict())


def test_new_parameters_are_listed():
    xl = ["u (2×)", "v (2×)", "r_proj.weight (2×)"]
    assert taken(model(TransformerXLAttention, bias=True), model(SoftmaxAttention)) == (xl, set())
    shared = model(TransformerXLAttention, bias=True, share_uv=True)
    assert taken(shared, model(SoftmaxAttention)) == (xl, set())
    near = {"short_term": "softmax", "mem_len": 0, "bias": True}
    kept, left = taken(model(InfiniteAttention, **near), model(SoftmaxAttention))
    assert not left
    assert kept
    assert all(text.startswith(("ltm_", "gate")) for text in kept)
    hedgehog = model(LinearAttention, feature_map=HedgehogFeatureMap)
    assert taken(hedgehog, model(SoftmaxAttention))[0] == [
        "feature_map.query_weight (2×)",
        "feature_map.key_weight (2×)",
    ]


def test_what_helps_is_said():
    softmax, bare = model(SoftmaxAttention), model(SoftmaxAttention, bias=False)
    xl = model(TransformerXLAttention)
    assert "give TransformerXLAttention bias=true (--model.backbone.attention.bias true)" in remedy(
        xl, softmax.state_dict()
    )
    assert "give it bias=false" in remedy(softmax, bare.state_dict())
    assert "SoftmaxAttention has no u, v, r_proj, which" in remedy(bare, xl.state_dict())
    assert "options of that run" in remedy(softmax, model(SoftmaxAttention, n_kv_heads=1).state_dict())
    assert "shared q/k" in remedy(model(LSHAttention), softmax.state_dict())
