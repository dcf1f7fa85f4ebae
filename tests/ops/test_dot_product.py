from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.attention import ShawAttention, SoftmaxAttention
from lit_effattn.ops import dot_product

E, H = 12, 3


def test_training_in_bfloat16_with_few_keys_is_computed_in_float32():
    q, k, v = (torch.randn(2, 3, 40, 16).bfloat16().requires_grad_() for _ in range(3))
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float()).bfloat16()
    assert torch.equal(dot_product.dot_product_attention(q, k, v), expected)


@pytest.mark.parametrize("kind", [SoftmaxAttention, partial(ShawAttention, max_distance=3)])
def test_a_long_segment_after_a_cache_is_masked_in_pieces(kind: Any, monkeypatch: pytest.MonkeyPatch):
    """No mask has more than so many scores, and outputs and gradients are those of one pass over each row's stream."""
    monkeypatch.setattr(dot_product, "_MASKED", 100)
    attention = kind(E, H).double()
    x, lengths = torch.randn(2, 30, E, dtype=torch.float64), torch.tensor([9, 4])
    masked, see = [], attention._see

    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *places: Tensor) -> Tensor:
        masked.append(0 if mask is None else mask[0].numel())
        return see(q, k, v, mask, *places)

    monkeypatch.setattr(attention, "_see", watched)

    def gradients(y: Tensor) -> list[Tensor]:
        return [y, *torch.autograd.grad(y.sin().sum(), list(attention.parameters()), retain_graph=True)]

    _, state = attention(x[:, :9], None, lengths)
    in_pieces = gradients(attention(x[:, 9:], state)[0])
    assert len(masked) > 3
    assert max(masked) <= 100
    streams = [torch.cat([x[row, :n], x[row, 9:]])[None] for row, n in enumerate(lengths.tolist())]
    at_once = torch.cat([attention(stream)[0][:, -21:] for stream in streams])
    torch.testing.assert_close(in_pieces, gradients(at_once))
