"""The definitions that the laws measure all kinds by: which they are, and known special cases."""

import math

import pytest
import torch
import torch.nn.functional as F

from lit_effattn.attention import reference
from lit_effattn.settings.kinds import attention_kinds

B, H, N, D = 2, 2, 13, 4


@pytest.fixture
def heads() -> torch.Tensor:
    """Queries, keys and values: three of (B, H, N, D)."""
    return torch.randn(3, B, H, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_it_has_every_kind():
    kinds = [*attention_kinds()]
    functions = {name.replace("_", "") for name in vars(reference)}
    other = {"SparseAttention": "sparseseen"}  # softmax_attention to these keys
    missing = [kind for kind in kinds if other.get(kind, kind.lower()) not in functions]
    assert kinds
    assert not missing


def test_softmax_is_torchs(heads: torch.Tensor):
    expected = F.scaled_dot_product_attention(*heads, is_causal=True)
    torch.testing.assert_close(reference.softmax_attention(*heads, reference.past(N)), expected)
    assert reference.past(4, window=2).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, True, True, False],
        [False, False, True, True],
    ]


def test_linear_attention_is_a_recurrence(heads: torch.Tensor):
    """Katharopoulos et al. 2020, equations 10 to 12 (here with ε)."""
    q, k, v = heads
    phi_q, phi_k = reference.elu_features(q), reference.elu_features(k)
    s, z, y = 0, 0, []
    for i in range(N):
        s = s + phi_k[:, :, i, :, None] * v[:, :, i, None]  # (B, H, D, D)
        z = z + phi_k[:, :, i]  # (B, H, D)
        numerator = (phi_q[:, :, i, None] @ s).squeeze(2)
        y.append(numerator / ((phi_q[:, :, i] * z).sum(-1, keepdim=True) + 1e-6))
    torch.testing.assert_close(reference.linear_attention(phi_q, phi_k, v, reference.past(N)), torch.stack(y, 2))


@pytest.mark.parametrize("features", ["positive", "hyperbolic", "trigonometric"])
def test_random_features_estimate_the_exponential(heads: torch.Tensor, features: str):
    """The mean of 200,000 products, of few and small vectors: a standard error below 0.01."""
    q, k, _ = 0.5 * heads[:, :1, :1, :3]
    omega = torch.randn(1, 200_000, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    phi = getattr(reference, f"{features}_features")
    exponential = (q @ k.mT / math.sqrt(D)).exp()
    torch.testing.assert_close(phi(q, omega) @ phi(k, omega).mT, exponential, rtol=0, atol=0.03)


def test_kinds_that_are_softmax_attention_in_a_special_case(heads: torch.Tensor):
    q, k, v = heads
    seen = reference.past(N)
    expected = reference.softmax_attention(q, k, v, seen)
    zero = torch.zeros(H, D, dtype=torch.float64)
    table = torch.zeros(4, D, dtype=torch.float64)
    torch.testing.assert_close(reference.shaw_attention(q, k, v, table, table, seen, max_distance=3), expected)
    r = torch.zeros(N, N, H, D, dtype=torch.float64)
    torch.testing.assert_close(reference.transformer_xl_attention(q, k, v, r, zero, zero, seen), expected)
    gamma = torch.tensor([0.1, 0.6], dtype=torch.float64)
    torch.testing.assert_close(reference.windowed_linear_attention(q, k, v, q, k, gamma, window=N), expected)
    everything = reference.sparse_seen(N, H, pattern="strided", stride=N)
    torch.testing.assert_close(reference.softmax_attention(q, k, v, everything), expected)


def test_one_bucket_sees_all_but_itself(heads: torch.Tensor):
    """A position sees itself only where it sees no other (Kitaev et al. 2020, section 2)."""
    x, _, v = heads
    rotations = torch.zeros(1, H, D, 0, dtype=torch.float64)
    others = ~torch.eye(N, dtype=torch.bool)
    for causal in (True, False):
        seen = others & (reference.past(N) if causal else reference.everything(N, N))
        seen[0, 0] = causal
        keys = x / x.norm(dim=-1, keepdim=True)
        y = reference.lsh_attention(x, v, rotations, chunk_size=N, causal=causal)
        torch.testing.assert_close(y, reference.softmax_attention(x, keys, v, seen))


def test_without_summaries_compressive_attention_is_that_of_transformer_xl(heads: torch.Tensor):
    generator = torch.Generator().manual_seed(2)
    weight, bias = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((8, 8), (2, H, D)))
    r = reference.relative_vectors(reference.distances(N), weight).unflatten(-1, (H, D))
    none = heads[0, :, :, :0]
    y = reference.compressive_attention(
        *heads, none, none, weight, *bias, mem_len=N, compressed_len=3, compression_rate=2
    )
    torch.testing.assert_close(y, reference.transformer_xl_attention(*heads, r, *bias, reference.past(N)))


def test_a_signal_with_many_basis_functions_passes_through_its_inputs():
    psi = reference.centres_widths(40, (0.05, 0.1))
    wave = (torch.pi * reference.evenly(20)).sin()[None, :, None] ** 3  # (1, 20, 1)
    signal = reference.updated_signal(None, wave, reference.evenly(1)[None], *psi, 1e-6, 0.5, "midpoints")
    torch.testing.assert_close(reference.basis(reference.evenly(20), *psi) @ signal, wave, rtol=0, atol=1e-3)
    later = reference.updated_signal(
        signal, -wave, reference.evenly(20)[None], *psi, 1e-6, 0.75, "midpoints"
    )  # the old signal on [0, .75]
    t = torch.tensor([0.375, 0.875], dtype=torch.float64)
    torch.testing.assert_close((reference.basis(t, *psi) @ later)[0, :, 0].sign(), torch.tensor([1.0, -1.0]).double())


def test_the_quantiles_of_an_even_histogram_are_the_levels():
    levels = reference.evenly(7)
    even = torch.full((2, 5), 0.2, dtype=torch.float64)
    torch.testing.assert_close(reference.quantiles(even, levels, left_edges=False), levels.expand(2, -1))
    half = torch.tensor([[0.5, 0, 0, 0.5]], dtype=torch.float64)
    assert reference.quantiles(half, torch.tensor([0.2, 0.7]), left_edges=True).tolist() == [[0, 0.75]]


def test_the_patterns_of_sparse_attention():
    """Figure 3 of Child et al. 2019: rows are queries."""
    options = {"stride": 3, "combine": "heads"}
    local, distant = reference.sparse_seen(6, 2, pattern="strided", **options).int().tolist()
    assert local[5] == [0, 0, 0, 1, 1, 1]
    assert distant[5] == [0, 0, 1, 0, 0, 1]
    local, distant = reference.sparse_seen(6, 2, pattern="fixed", **options).int().tolist()
    assert local[4] == [0, 0, 0, 1, 1, 0]
    assert distant[4] == [0, 0, 1, 0, 1, 0]
