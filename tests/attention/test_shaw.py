import pytest
import torch

from lit_effattn import Transformer
from lit_effattn.attention import ShawAttention, SoftmaxAttention
from lit_effattn.attention.positions import RotaryPositions
from lit_effattn.ops.shaw import shaw_attention
from tests.support.tensor_sizes import largest_in_training

E, H = 12, 3


def without_distances(attention: ShawAttention) -> ShawAttention:
    with torch.no_grad():
        attention.key_table.zero_()
        attention.value_table.zero_()
    return attention


def test_zero_tables_equal_softmax():
    for causal, window in [(True, None), (True, 4), (False, None)]:
        shaw = without_distances(ShawAttention(E, H, causal, max_distance=3, window=window)).double()
        softmax = SoftmaxAttention(E, H, causal, window=window).double()
        softmax.load_state_dict(shaw.state_dict(), strict=False)
        x, lengths = torch.randn(2, 11, E, dtype=torch.float64), torch.tensor([11, 6])
        torch.testing.assert_close(shaw(x, None, lengths)[0], softmax(x, None, lengths)[0])


def test_each_distance_has_a_vector_of_its_own():
    """With q = k = v = 0 a position's output is the mean of the value vectors of the distances that it sees."""
    for causal in [True, False]:
        attention = ShawAttention(4, 1, causal, max_distance=2, bias=False).double()
        with torch.no_grad():
            attention.v_proj.weight.zero_()
            attention.q_proj.weight.zero_()
            attention.out_proj.weight.copy_(torch.eye(4))
        a = attention.value_table  # of the distances −2, −1, 0, and 1, 2 where these are seen
        assert len(a) == (3 if causal else 5)
        y, _ = attention(torch.randn(1, 5, 4, dtype=torch.float64))
        if causal:
            expected = [a[2], a[1:3].mean(0), a.mean(0), (2 * a[0] + a[1] + a[2]) / 4, (3 * a[0] + a[1] + a[2]) / 5]
        else:
            expected = [
                (a[2] + a[3] + 3 * a[4]) / 5,
                (a[1] + a[2] + a[3] + 2 * a[4]) / 5,
                a.mean(0),
                (2 * a[0] + a[1] + a[2] + a[3]) / 5,
                (3 * a[0] + a[1] + a[2]) / 5,
            ]
        torch.testing.assert_close(y[0], torch.stack(expected))


def test_vectors_of_pairs_are_never_made():
    b, h, n, d, most = 1, 2, 128, 16, 4
    q, k, v = (torch.rand(b, h, n, d) for _ in range(3))
    tables = [torch.rand(2 * most + 1, d) for _ in range(2)]
    distance = (torch.arange(n) - torch.arange(n)[:, None])[None]
    largest = largest_in_training(
        lambda q, k, v, *t: shaw_attention(q, k, v, distance, *t, max_distance=most), q, k, v, *tables
    )
    assert largest <= b * h * n * n < n * n * d


def test_a_window_never_makes_all_scores():
    n, window = 512, 8
    attention = ShawAttention(8, 1, window=window)
    assert largest_in_training(lambda x: attention(x)[0], torch.rand(1, n, 8)) <= n * 2 * window * 8 < n * n


def test_rotary_positions_are_refused():
    with pytest.raises(ValueError, match="ShawAttention does not take rotary positions"):
        Transformer(E, H, 1, attention=ShawAttention, positions=RotaryPositions)
