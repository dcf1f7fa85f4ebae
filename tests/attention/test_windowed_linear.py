import torch

from lit_effattn.attention import SoftmaxAttention, WindowedLinearAttention

E, H = 8, 2


def test_up_to_the_window_it_is_softmax_attention_and_beyond_it_is_not():
    softmax, windowed = SoftmaxAttention(E, H).double(), WindowedLinearAttention(E, H, window=6).double()
    missing, left = windowed.load_state_dict(softmax.state_dict(), strict=False)
    assert missing == ["mixing", "feature_map.query_weight", "feature_map.key_weight"]
    assert not left
    x = 2 * torch.randn(2, 7, E, dtype=torch.float64)
    expected, y = softmax(x)[0], windowed(x)[0]
    torch.testing.assert_close(y[:, :6], expected[:, :6])
    assert (y[:, 6] - expected[:, 6]).abs().max() > 1e-3


def test_the_state_is_the_window_and_the_sums_before_it():
    attention = WindowedLinearAttention(E, H, window=3).double()
    x = torch.randn(2, 5, E, dtype=torch.float64)
    _, state = attention(x, None, torch.tensor([5, 1]))
    k, v = (p(x).view(2, 5, H, 4).transpose(1, 2) for p in (attention.k_proj, attention.v_proj))
    phi = torch.cat([k.softmax(-1), (-k).softmax(-1)], -1)
    torch.testing.assert_close(state.keys[0], k[0, :, 3:])
    torch.testing.assert_close(state.s[0], phi[0, :, :3].mT @ v[0, :, :3])
    torch.testing.assert_close(state.z[0], phi[0, :, :3].sum(1))
    torch.testing.assert_close(state.values[1, :, 1], v[1, :, 0])
    assert (state.z[1] == 0).all()
    assert state.length.tolist() == [5, 1]


def test_gamma_starts_at_a_tenth():
    """Of the terms, the largest of the window is γ: here the only one beside a linear term of φ(q)ᵀφ(k)."""
    attention = WindowedLinearAttention(E, H, window=1).double()
    x = torch.randn(1, 2, E, dtype=torch.float64)
    q, k, _ = attention.project(x)
    linear = (attention.feature_map(q)[:, :, 1] * attention.feature_map.keys(k)[:, :, 0]).sum(-1)
    torch.testing.assert_close(attention.attention_weights(x)[:, :, 1, 1], 0.1 / (0.1 + linear))
