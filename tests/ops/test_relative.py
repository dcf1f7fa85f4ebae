import itertools
import math

import pytest
import torch

from lit_effattn.ops.relative import attention_by_distance, furthest, relative_attention, relative_shift, sinusoids
from tests.support.tensor_sizes import Made, largest_in_training

B, H, D = 2, 3, 4


def wave(d: int, width: int) -> list[float]:
    angles = [d / 10000 ** (2 * i / width) for i in range(width // 2)]
    return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]


def test_sinusoids():
    for first, last in [(0, 0), (1, 0), (8, 0), (9, 0), (40, 0), (0, -6), (7, -9)]:
        for clamp in [None, 0, 5]:
            found = sinusoids(first, last, 6, clamp=clamp, dtype=torch.float64, device=torch.device("cpu"))
            most = 10**9 if clamp is None else clamp
            expected = [wave(max(-most, min(d, most)), 6) for d in range(first, last - 1, -1)]
            torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_sinusoids_of_large_distances_are_exact_to_float32():
    found = sinusoids(10**6, 0, 2, dtype=torch.float32, device=torch.device("cpu"))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[0], torch.tensor(wave(10**6, 2)), rtol=0, atol=1e-6)
    assert sinusoids(4, 0, 2, dtype=torch.bfloat16, device=torch.device("cpu")).dtype == torch.bfloat16


def test_relative_shift():
    for n, width in [(1, 1), (1, 4), (3, 3), (3, 7), (4, 5)]:
        scores = torch.rand(B, H, n, width)
        shifted = relative_shift(scores)
        assert shifted.shape == scores.shape
        for i in range(n):
            for j in range(width):
                if n - 1 - i + j < width:
                    assert torch.equal(shifted[..., i, j], scores[..., i, n - 1 - i + j])


def random(n: int, m: int, distances: int):
    q = 2 * torch.randn(B, H, n, D, dtype=torch.float64)
    k, v = (2 * torch.randn(B, H, m + n, D, dtype=torch.float64) for _ in range(2))
    r = torch.randn(H, distances, D, dtype=torch.float64)
    u, w = torch.randn(2, H, D, dtype=torch.float64)
    return q, k, v, r, u, w


def by_hand(q, k, v, r, u, w, causal, window, there):
    """One query after the other; r[h, 0 − 1 − d] (causal) is of distance d."""
    n, m = q.size(2), k.size(2) - q.size(2)
    zero = r.size(1) - (1 if causal else n)
    y = torch.empty_like(q)
    for b in range(B):
        for i in range(n):
            keys = [j for j in range(m + n) if there[b, j] and (j <= m + i or not causal) and j > m + i - window]
            scores = [
                ((q[b, :, i] + u) * k[b, :, j] + (q[b, :, i] + w) * r[:, zero - (m + i - j)]).sum(-1) / D**0.5
                for j in keys
            ]
            y[b, :, i] = torch.einsum("jh,hjd->hd", torch.stack(scores).softmax(0), v[b][:, keys])
    return y


def test_causal_equals_one_query_after_the_other():
    for chunk_size, n, m, window in itertools.product([1, 3, 100], [1, 2, 7], [0, 1, 5], [None, 1, 4, 50]):
        first = furthest(n, m, window, chunk_size)
        assert first < m + n
        given = random(n, m, first + 1)
        there = torch.ones(B, m + n, dtype=torch.bool)
        for hidden in {0, m // 2, m}:
            there[0, :hidden] = False
            y = relative_attention(*given, window=window, valid=there, chunk_size=chunk_size)
            torch.testing.assert_close(y, by_hand(*given, True, window or 99, there))
        y = relative_attention(*given, window=window, chunk_size=chunk_size)
        torch.testing.assert_close(y, by_hand(*given, True, window or 99, torch.ones_like(there)))


def test_queries_that_each_have_a_first_key():
    for chunk_size in [1, 3, 100]:
        n, m = 6, 3
        q, k, v, *others = random(n, m, m + n)
        first = torch.tensor([[0, 0, 3, 3, 3, 6], [1, 4, 4, 4, 7, 8]])
        y = relative_attention(q, k, v, *others, first=first, chunk_size=chunk_size)
        for i in range(n):
            end = m + i + 1
            there = torch.arange(end) >= first[:, i : i + 1]
            alone = by_hand(q[:, :, i : i + 1], k[:, :, :end], v[:, :, :end], *others, True, 99, there)
            torch.testing.assert_close(y[:, :, i : i + 1], alone)


def test_bidirectional_equals_one_query_after_the_other():
    for chunk_size, n in itertools.product([1, 3, 100], [1, 2, 7]):
        given = random(n, 0, 2 * n - 1)
        there = torch.arange(n) < torch.tensor([[n], [n // 2 + 1]])
        y = relative_attention(*given, causal=False, valid=there, chunk_size=chunk_size)
        torch.testing.assert_close(y, by_hand(*given, False, 99, there))


def test_gradients():
    given = [t.requires_grad_() for t in random(5, 2, 7)]
    assert torch.autograd.gradcheck(lambda *a: relative_attention(*a, chunk_size=2), given, fast_mode=True)


def test_by_distance_equals_in_order():
    """Keys in any order, each with the score of its distance, are the attention to keys in their order."""
    n, m = 3, 4
    q, k, v, r, u, w = random(n, m, m + n)
    distance = m + torch.arange(n)[:, None] - torch.arange(m + n)  # (N, M + N)
    order = torch.stack([torch.randperm(m + n) for _ in range(B)])
    index = torch.stack([m + n - 1 - distance[:, o] for o in order])
    seen = torch.stack([distance[:, o] >= 0 for o in order])
    index = index.masked_fill(~seen, 10**6)  # of what is not seen, any
    shuffled = [torch.stack([t[b][:, order[b]] for b in range(B)]) for t in (k, v)]
    by_distance = torch.einsum("bhnd,hld->bhnl", q + w[:, None], r) / D**0.5
    y = attention_by_distance(q + u[:, None], *shuffled, by_distance, index, seen)
    torch.testing.assert_close(y, relative_attention(q, k, v, r, u, w))


def test_dropout_drops_and_keeps_the_mean():
    zeros = torch.zeros(1, 1, 1000, 1)
    r, u = torch.zeros(1, 1000, 1), torch.zeros(1, 1)
    y = relative_attention(zeros, zeros, zeros + 1, r, u, u, dropout=0.5)
    assert y.std() > 0.03
    assert y.mean().item() == pytest.approx(1, abs=0.05)


def test_no_vector_for_each_pair():
    """Nor, with a window, a score for each."""
    n, window, chunk, d = 512, 16, 32, 64
    q, k, v = (torch.rand(1, 1, n, d) for _ in range(3))
    r, u, w = torch.rand(1, n, d), torch.rand(1, d), torch.rand(1, d)
    assert largest_in_training(lambda *a: relative_attention(*a, chunk_size=n), q, k, v, r, u, w) <= n * (n + 1)
    short = r[:, -furthest(n, 0, window, chunk) - 1 :]
    largest = largest_in_training(
        lambda *a: relative_attention(*a, window=window, chunk_size=chunk), q, k, v, short, u, w
    )
    assert largest <= n * d


def test_what_a_window_makes_grows_with_the_length():
    """Not with its square, which a gradient as large as all keys for every chunk would be."""

    def made(n: int) -> int:
        q, k, v = torch.randn(3, 1, 2, n, 4).unbind()
        r, (u, w) = torch.randn(2, furthest(n, 0, 8, 8) + 1, 4), torch.randn(2, 2, 4).unbind()
        inputs = [t.requires_grad_() for t in (q, k, v, r, u, w)]
        with Made() as made:
            relative_attention(*inputs, window=8, chunk_size=8).sum().backward()
        return sum(made.sizes)

    assert made(1024) < 1.01 * 4 * made(256)
