"""What tensor parallelism refuses; what it computes is in test_sharding.py, whose processes it shares."""

from itertools import product
from types import SimpleNamespace

import pytest
from torch import nn

from lit_effattn import LSTM, Transformer
from lit_effattn.distributed.tensor_parallel import divide
from lit_effattn.settings.kinds import attention_kinds

TWO = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0)


def test_what_does_not_divide_is_told():
    for model, said in (
        (LSTM(8, 1), "tensor_parallel_size=2: an LSTM has no heads to divide; leave it out"),
        (nn.Sequential(Transformer(8, 2, 1, d_ff=9)), "tensor_parallel_size=2 does not divide d_ff=9; change one"),
        (Transformer(12, 3, 1), "tensor_parallel_size=2 does not divide n_heads=3"),
    ):
        with pytest.raises(ValueError, match=said):
            divide(model, TWO)


def test_a_kind_that_does_not_divide_its_heads_names_those_that_do():
    """With any number of heads, since another number would not help."""
    others = {name: kind for name, kind in attention_kinds().items() if not kind(12, 2).divides_heads}
    assert others
    for (name, kind), n_heads in product(others.items(), (2, 3)):
        said = rf"^tensor_parallel_size=2: {name} does not divide .*; leave it out, or choose LinearAttention, [^\n]*$"
        with pytest.raises(ValueError, match=said):
            divide(Transformer(12, n_heads, 1, attention=kind, positions=None), TWO)
