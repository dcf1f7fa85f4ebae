import itertools
import math

import pytest
import torch

from lit_effattn.ops.window import slices, windowed_attention
from tests.support.tensor_sizes import Made, largest_in_training

B, H, D = 2, 3, 4


def by_hand(q, k, v, window, past):
    """One query after the other: the softmax over the keys that it sees."""
    n, m = q.size(2), k.size(2) - q.size(2)
    y = torch.empty_like(q)
    for b in range(q.size(0)):
        for i in range(n):
            first = max(i - window + 1, -past[b])
            keys, values = k[b, :, m + first : m + i + 1], v[b, :, m + first : m + i + 1]
            weights = torch.softmax(torch.einsum("hd,hjd->hj", q[b, :, i], keys) / math.sqrt(q.size(-1)), -1)
            y[b, :, i] = torch.einsum("hj,hjd->hd", weights, values)
    return y


def random(n: int, m: int):
    q = 2 * torch.randn(B, H, n, D, dtype=torch.float64)
    k, v = (2 * torch.randn(B, H, m + n, D, dtype=torch.float64) for _ in range(2))
    return q, k, v


def test_equals_one_query_after_the_other():
    for window, n in itertools.product([1, 2, 5, 30], [1, 4, 5, 6, 17, 20]):
        for m in {0, min(1, window - 1), window - 1}:
            q, k, v = random(n, m)
            torch.testing.assert_close(windowed_attention(q, k, v, window), by_hand(q, k, v, window, [m, m]))
            past = [0, m // 2]
            y = windowed_attention(q, k, v, window, past=torch.tensor(past))
            torch.testing.assert_close(y, by_hand(q, k, v, window, past))


def test_gradients():
    q, k, v = (t[:1, :1].requires_grad_() for t in random(7, 2))
    assert torch.autograd.gradcheck(lambda *a: windowed_attention(*a, 3, past=torch.tensor([1])), (q, k, v))


def test_dropout_drops_and_keeps_the_mean():
    q, k = (torch.zeros(1, 1, 4000, 1) for _ in range(2))
    v = torch.ones(1, 1, 4000, 1)
    y = windowed_attention(q, k, v, 4, dropout=0.5)
    assert y.std() > 0.3
    assert y.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(windowed_attention(q, k, v, 4), torch.ones_like(y))


def test_nothing_of_size_n_squared_is_made():
    n, window, d = 1024, 16, 8
    q, k, v = (torch.rand(1, 1, n, d) for _ in range(3))
    assert largest_in_training(lambda *a: windowed_attention(*a, window), q, k, v) <= n * 2 * window * d < n * n


def test_a_window_beyond_all_keys_costs_no_more_than_they_do():
    n, d = 8, 2
    q, k, v = torch.randn(3, 1, 1, n, d)
    assert largest_in_training(lambda *a: windowed_attention(*a, 10_000), q, k, v) <= 2 * n * max(n, d)


BOUNDS = [(0, 3), (2, 6), (4, 4), (5, 6)]


def test_slices_are_those_of_indexing():
    t = torch.randn(2, 6, 3)
    found = slices(t, BOUNDS, 1)
    assert all(torch.equal(s, t[:, low:high]) for s, (low, high) in zip(found, BOUNDS, strict=True))
    assert {s.untyped_storage().data_ptr() for s in found} == {t.untyped_storage().data_ptr()}


def test_gradients_of_slices():
    t = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)

    def function(t):
        first, second, empty, last = slices(t, BOUNDS, 1)
        return first.sin(), second @ second.mT, empty.sum(), last.exp()

    assert torch.autograd.gradcheck(function, t)
    assert torch.autograd.gradgradcheck(function, t)


def test_the_gradient_of_slices_is_made_once():
    t = torch.randn(64, 2, requires_grad=True)
    pieces = slices(t, [(i, i + 2) for i in range(63)], 0)
    total = sum(piece.sum() for piece in pieces)
    with Made() as made:
        torch.autograd.grad(total, t)
    assert made.large(t.numel() // 2) == [t.numel()]
