import itertools

import pytest
import torch
from torch import nn

from lit_effattn import sequence
from lit_effattn.attention import LinearAttention, PerformerAttention, SoftmaxAttention, WindowedLinearAttention
from lit_effattn.attention.feature_maps import EluFeatureMap
from lit_effattn.attention.positions import RotaryPositions
from lit_effattn.laws.subject import stream
from tests.laws import definitions

E, H = 12, 3


def test_equals_multihead_attention_of_torch():
    for bias, causal in itertools.product([True, False], [True, False]):
        ours = SoftmaxAttention(E, H, causal, bias=bias).double()
        theirs = nn.MultiheadAttention(E, H, bias=bias, batch_first=True).double()
        with torch.no_grad():
            theirs.in_proj_weight.copy_(torch.cat([p.weight for p in (ours.q_proj, ours.k_proj, ours.v_proj)]))
            theirs.out_proj.weight.copy_(ours.out_proj.weight)
            if bias:
                theirs.in_proj_bias.copy_(torch.cat([p.bias for p in (ours.q_proj, ours.k_proj, ours.v_proj)]))
                theirs.out_proj.bias.copy_(ours.out_proj.bias)
        x = torch.randn(2, 9, E, dtype=torch.float64)
        hidden = torch.ones(9, 9).triu(1).bool() if causal else None
        expected, _ = theirs(x, x, x, attn_mask=hidden, need_weights=False)
        torch.testing.assert_close(ours(x)[0], expected)

        lengths = torch.tensor([9, 4])
        padding = torch.arange(9) >= lengths[:, None]
        expected, _ = theirs(x, x, x, attn_mask=hidden, key_padding_mask=padding, need_weights=False)
        torch.testing.assert_close(ours(x, None, lengths)[0], expected.masked_fill(padding[..., None], 0))


@torch.no_grad()
def test_queries_and_keys_of_another_width():
    """d_k in Vaswani et al. 2017, Table 3 (B), scores over √d_k; in the caches that grow and that do not."""
    attention = SoftmaxAttention(E, H, d_qk=2 * H).double()
    assert sum(p.numel() for p in attention.parameters()) == 2 * (E * 2 * H + 2 * H) + 2 * (E * E + E)
    x = torch.randn(2, 7, E).double()
    expected = definitions.softmax(attention, x)
    torch.testing.assert_close(attention(x)[0], expected)
    for state in (None, attention.initial_state(2, max_len=7)):
        torch.testing.assert_close(stream(attention, x, [4, 3], state)[0], expected)
    values = attention._heads(attention.v_proj(x))
    seen = attention.out_proj((attention.attention_weights(x) @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(seen, expected)


@torch.no_grad()
def test_normalised_queries_and_keys_of_a_given_width():
    for kind, definition, options in [
        (SoftmaxAttention, definitions.softmax, {}),
        (SoftmaxAttention, definitions.softmax, {"window": 4}),
        (LinearAttention, definitions.linear, {}),
        (PerformerAttention, definitions.performer, {}),
        (WindowedLinearAttention, definitions.windowed_linear, {"window": 3, "feature_map": EluFeatureMap}),
    ]:
        attention = kind(10, H, n_kv_heads=1, head_dim=6, qk_norm=True, qk_norm_eps=0.1, **options).double()
        plain = SoftmaxAttention(10, H, n_kv_heads=1, head_dim=6, qk_norm=True).state_dict()
        assert all(attention.state_dict()[name].shape == t.shape for name, t in plain.items())
        attention.rotary = RotaryPositions(6)
        for norm in (attention.q_norm, attention.k_norm):
            assert norm.eps == 0.1
            torch.nn.init.uniform_(norm.weight, 0.5, 2)
        x = torch.randn(2, 7, 10).double()
        expected = definition(attention, x)
        torch.testing.assert_close(attention(x)[0], expected)
        for state in (None, attention.initial_state(2, max_len=7)):
            torch.testing.assert_close(stream(attention, x, [4, 3], state)[0], expected)
        with torch.autocast("cpu", torch.bfloat16):
            y, state = attention.float()(x.float())
            attention(x.float(), state)
        torch.testing.assert_close(y.double(), expected, atol=0.05, rtol=0.05)


def test_a_donated_cache_is_written_in_place():
    """A copy of the cache for every new position would cost more than the attention."""
    attention = SoftmaxAttention(E, H)
    with torch.no_grad(), sequence.donated():
        state = attention.initial_state(2, max_len=8)
        _, after = attention(torch.randn(2, 3, E), state)
        assert after.keys.data_ptr() == state.keys.data_ptr()
        assert after.values.data_ptr() == state.values.data_ptr()
    with sequence.donated():
        state = attention.initial_state(2, max_len=8)
        _, after = attention(torch.randn(2, 3, E), state)
        assert after.keys.data_ptr() != state.keys.data_ptr(), "a gradient may want what was there"


def test_a_donated_window_is_written_in_place():
    """Slot t mod window holds position t, and nothing else is touched."""
    attention = SoftmaxAttention(E, H, window=4)
    with torch.no_grad(), sequence.donated():
        _, state = attention(torch.randn(2, 6, E), attention.initial_state(2, max_len=30))
        before = state.keys.clone()
        x = torch.randn(2, 1, E)
        _, after = attention(x, state)
        assert after.keys.data_ptr() == state.keys.data_ptr()
        assert after.values.data_ptr() == state.values.data_ptr()
        expected = torch.cat([before[:, :, :2], attention.project(x)[1], before[:, :, 3:]], 2)  # 6 mod 4 is 2
        torch.testing.assert_close(after.keys, expected, rtol=0, atol=0)


def test_a_window_longer_than_all_that_will_be_fed_is_not_made():
    attention = SoftmaxAttention(E, H, window=100)
    state = attention.initial_state(1, max_len=5)
    assert state.keys.size(2) == 5
    for n in (4, 1):
        _, state = attention(torch.zeros(1, n, E), state)
    for n in (1, 2):
        with pytest.raises(ValueError, match=rf"max_len=5.*5 positions.*{n} more"):
            attention(torch.zeros(1, n, E), state)


def test_it_says_what_it_is():
    assert "n_heads=3, causal=False" in repr(SoftmaxAttention(E, H, causal=False))
