"""Random features have names in checkpoints as if they were the attention's own."""

import copy

import pytest
import torch

from lit_effattn import Transformer
from lit_effattn.attention import PerformerAttention, PerformerCrossAttention


@pytest.mark.parametrize("kind", [PerformerAttention, PerformerCrossAttention])
def test_checkpoints_have_the_buffers_of_the_attention(kind):
    attention, other = kind(8, 2), kind(8, 2)
    weights = attention.state_dict()
    assert list(weights)[:3] == ["omega", "draws", "q_proj.weight"]
    for loaded in (other, copy.deepcopy(other)):
        loaded.load_state_dict(weights)
        assert torch.equal(loaded.feature_map.omega, attention.feature_map.omega)
    assert list(weights)[:3] == ["omega", "draws", "q_proj.weight"]  # loading changes nothing


def test_a_stack_of_performers_is_loaded():
    model, other = (Transformer(8, 2, 2, attention=PerformerAttention) for _ in range(2))
    other.load_state_dict(model.state_dict())
    x = torch.randn(1, 5, 8)
    assert torch.equal(model(x)[0], other(x)[0])
    assert not any("feature_map" in name for name in model.state_dict())
