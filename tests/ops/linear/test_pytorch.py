import itertools

import torch

from lit_effattn.ops.linear.pytorch import causal_linear_attention, linear_attention, linear_attention_step
from tests.support.tensor_sizes import Largest, largest_in_training

B, H, F, D = 2, 3, 5, 4


def features(n: int, f: int = F, h: int = H, b: int = B) -> torch.Tensor:
    return torch.rand(b, h, n, f, dtype=torch.float64)


def by_hand(q, k, v, s, z, eps=1e-6):
    """Position after position, as in Katharopoulos et al. 2020, equations 16 to 20."""
    out = []
    for i in range(q.size(2)):
        s = s + torch.einsum("bhf,bhd->bhfd", k[:, :, i], v[:, :, i])
        z = z + k[:, :, i]
        out.append(
            torch.einsum("bhf,bhfd->bhd", q[:, :, i], s) / (torch.einsum("bhf,bhf->bh", q[:, :, i], z) + eps)[..., None]
        )
    return torch.stack(out, 2), s, z


def test_causal_equals_the_recurrence():
    for n, chunk_size in itertools.product([1, 3, 4, 5, 11, 16], [1, 4, 100]):
        q, k, v = features(n), features(n), torch.randn(B, H, n, D, dtype=torch.float64)
        s, z = torch.rand(B, H, F, D, dtype=torch.float64), torch.rand(B, H, F, dtype=torch.float64)
        found = causal_linear_attention(q, k, v, s, z, chunk_size=chunk_size)
        for a, b in zip(found, by_hand(q, k, v, s, z), strict=True):
            torch.testing.assert_close(a, b)


def test_step_equals_the_recurrence():
    q, k, v = features(1), features(1), torch.randn(B, H, 1, D, dtype=torch.float64)
    s, z = torch.rand(B, H, F, D, dtype=torch.float64), torch.rand(B, H, F, dtype=torch.float64)
    before = s.clone(), z.clone()
    expected = by_hand(q, k, v, s, z)
    for a, b in zip(linear_attention_step(q, k, v, s, z), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(s, before[0])
    assert torch.equal(z, before[1])
    y, new_s, new_z = linear_attention_step(q, k, v, s, z, in_place=True)
    torch.testing.assert_close(y, expected[0])
    assert new_s is s
    assert new_z is z
    torch.testing.assert_close(s, expected[1])
    torch.testing.assert_close(z, expected[2])


def test_every_query_sees_every_key():
    q, k, v = features(6), features(9), torch.randn(B, H, 9, D, dtype=torch.float64)
    weights = torch.einsum("bhnf,bhmf->bhnm", q, k)
    expected = torch.einsum("bhnm,bhmd->bhnd", weights / (weights.sum(-1, keepdim=True) + 1e-6), v)
    torch.testing.assert_close(linear_attention(q, k, v), expected)


def test_eps_where_no_key_is_seen():
    q, v = features(4), torch.randn(B, H, 4, D, dtype=torch.float64)
    k = torch.zeros_like(q)
    s, z = torch.zeros(B, H, F, D, dtype=torch.float64), torch.zeros(B, H, F, dtype=torch.float64)
    assert (linear_attention(q, k, v) == 0).all()
    assert (causal_linear_attention(q, k, v, s, z)[0] == 0).all()
    k[:, :, 1] = 1
    y = causal_linear_attention(q, k, v, s, z, chunk_size=2, eps=0.5)[0]
    total = q[:, :, 2].sum(-1, keepdim=True)
    torch.testing.assert_close(y[:, :, 2], total * v[:, :, 1] / (total + 0.5))


def test_gradients():
    """Of the output and of the last sums, with respect to everything, over chunks of 3, 3 and 1."""
    q, k = features(7, 3, 1, 1).requires_grad_(), features(7, 3, 1, 1).requires_grad_()
    v = torch.randn(1, 1, 7, 2, dtype=torch.float64, requires_grad=True)
    s = torch.rand(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    z = torch.rand(1, 1, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: causal_linear_attention(*a, chunk_size=3), (q, k, v, s, z))
    assert torch.autograd.gradcheck(linear_attention, (q, k, v))


def test_nothing_of_size_n_squared_nor_n_f_d_is_made():
    n, f, d, chunk_size = 1024, 16, 16, 32
    q, k, v = torch.rand(1, 1, n, f), torch.rand(1, 1, n, f), torch.rand(1, 1, n, d)
    s, z = torch.zeros(1, 1, f, d), torch.zeros(1, 1, f)
    plain = largest_in_training(
        lambda *a: causal_linear_attention(*a, s, z, chunk_size=chunk_size, form="plain")[0], q, k, v
    )
    assert plain == n * chunk_size  # far below n² and n f d
    assert largest_in_training(linear_attention, q, k, v) <= n * f


def test_a_step_in_place_allocates_no_sums():
    f, d = 16, 16
    q, k, v = torch.rand(1, 1, 1, f), torch.rand(1, 1, 1, f), torch.rand(1, 1, 1, d)
    s, z = torch.zeros(1, 1, f, d), torch.zeros(1, 1, f)
    with Largest() as largest:
        linear_attention_step(q, k, v, s, z, in_place=True)
    assert largest.elements < f * d


def test_the_measure_itself():
    """What the two tests above rely on: a product of queries and keys is seen, forward and backward."""
    q, k = torch.rand(1, 1, 64, 4), torch.rand(1, 1, 64, 4)
    assert largest_in_training(lambda q, k: q @ k.transpose(-1, -2), q, k) == 64 * 64
