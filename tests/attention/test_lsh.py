import itertools
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from lit_effattn import sequence
from lit_effattn.attention import LSHAttention
from lit_effattn.ops.lsh import attend_in_chunks, hash_buckets
from tests.support.tensor_sizes import Largest

E, H = 12, 3


def of_all(attention: LSHAttention, x: torch.Tensor) -> torch.Tensor:
    """Softmax attention with shared queries and keys to all, or all earlier, positions but its own."""
    b, n, _ = x.shape
    q, v = (p(x).view(b, n, attention.n_heads, -1).transpose(1, 2) for p in (attention.q_proj, attention.v_proj))
    scores = q @ F.normalize(q, dim=-1).transpose(-1, -2) / math.sqrt(attention.head_dim)
    own = torch.eye(n).bool()
    hidden = torch.ones(n, n).triu().bool() if attention.causal else own
    hidden = hidden & ~(own & hidden.all(-1, keepdim=True))  # where there is no other
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return attention.out_proj((weights @ v).transpose(1, 2).flatten(2))


def test_one_bucket_and_one_chunk_equal_full_attention():
    for causal, n_hashes, n in itertools.product([True, False], [1, 3], [1, 2, 11]):
        attention = LSHAttention(E, H, causal, n_hashes=n_hashes, n_buckets=1, chunk_size=11).double()
        x = torch.randn(2, n, E, dtype=torch.float64)
        torch.testing.assert_close(attention(x)[0], of_all(attention, x))


def test_more_rounds_come_closer_to_full_attention():
    for causal in [True, False]:
        torch.manual_seed(0)
        one = LSHAttention(32, 2, causal, n_hashes=1, n_buckets=8, chunk_size=16)
        x = 3 * torch.randn(2, 128, 32)
        errors = []
        for n_hashes in (1, 2, 4, 8, 16):
            attention = LSHAttention(32, 2, causal, n_hashes=n_hashes, n_buckets=8, chunk_size=16)
            attention.load_state_dict({**one.state_dict(), "rotations": attention.rotations})
            errors.append((attention(x)[0] - of_all(attention, x)).norm(dim=-1).mean().item())
        assert all(b < 0.9 * a for a, b in itertools.pairwise(errors)), errors
        assert errors[-1] < 0.25 * errors[0]


def test_what_is_alone_sees_itself():
    """There are more buckets than positions."""
    for causal in [True, False]:
        attention = LSHAttention(E, 1, causal, n_hashes=2, n_buckets=256, chunk_size=8).double()
        x = 50 * torch.randn(1, 8, E, dtype=torch.float64)
        buckets = hash_buckets(attention.q_proj(x)[:, None], attention.rotations)[0, 0]  # (R, N)
        same = (buckets[:, :, None] == buckets[:, None]).any(0) & ~torch.eye(8).bool()
        alone = ~(same.tril() if causal else same).any(-1)
        assert alone.sum() > 3
        y, own = attention(x)[0], attention.out_proj(attention.v_proj(x))
        torch.testing.assert_close(y[0, alone], own[0, alone])
        assert not torch.isclose(y[0, ~alone], own[0, ~alone]).all(-1).any()


def test_keys_are_the_queries():
    names = [name for name, _ in LSHAttention(E, H).named_parameters()]
    assert names == [f"{p}.{w}" for p in ("q_proj", "v_proj", "out_proj") for w in ("weight", "bias")]


def test_hashing_is_in_float32():
    attention = LSHAttention(E, H, n_hashes=2, n_buckets=16, chunk_size=100)  # one chunk: a place is a bucket
    x = torch.randn(1, 64, E)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = attention(x)
        shared = attention.q_proj(x).view(1, 64, H, -1).transpose(1, 2)
        buckets = attention.attention_buckets(x)
    assert state.shared.dtype == torch.bfloat16
    expected = hash_buckets(shared.float(), attention.rotations)
    assert torch.equal(state.places.long(), expected.transpose(2, 3))
    assert torch.equal(buckets, expected)
    rounded = hash_buckets(shared, attention.rotations.bfloat16())
    assert not torch.equal(rounded, expected)


# ---------------------------------------------------------------------------------------------------------- redrawing


def test_redrawing_is_repeatable_and_saved():
    a, b = LSHAttention(E, H), LSHAttention(E, H)
    before = a.rotations.clone()
    for attention in (a, b):
        attention.redraw(torch.Generator().manual_seed(5))
    assert torch.equal(a.rotations, b.rotations)
    assert not torch.equal(a.rotations, before)
    assert {"rotations", "draws"} <= a.state_dict().keys()
    assert a.draws == 1
    assert a.draws.dtype == a.half().draws.dtype == torch.long


def test_what_another_draw_hashed_is_not_seen():
    for n, max_len in itertools.product([1, 5], [None, 40]):
        attention = LSHAttention(E, H, n_hashes=2, n_buckets=2, chunk_size=3).double()
        x, after = torch.randn(2, 20, E, dtype=torch.float64), torch.randn(2, 12, E, dtype=torch.float64)
        _, old = attention(x, attention.initial_state(2, max_len=max_len))
        attention.redraw(torch.Generator().manual_seed(5))
        _, new = attention(x, attention.initial_state(2, max_len=max_len))
        one_of_each = type(old)(*(torch.stack([s[0], t[1]]) for s, t in zip(old, new, strict=True)))
        ways = [after.split(n, 1), after.split(n, 1)]
        results = []
        for segments, state in zip(ways, (one_of_each, new), strict=True):
            outputs = []
            for segment in segments:
                y, state = attention(segment, state)
                outputs.append(y)
            results.append(torch.cat(outputs, 1))
            assert state.length.tolist() == [32, 32]
            assert state.drawn.tolist() == [1, 1]
        torch.testing.assert_close(results[0][0], attention(after)[0][0])
        torch.testing.assert_close(results[0][1], results[1][1])
        torch.testing.assert_close(results[1][1], attention(torch.cat([x, after], 1))[0][1, 20:])


# ---------------------------------------------------------------------------------------------------------- the state


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("chunk_size", [3, 64])
def test_segments_equal_one_pass_in_chunks_of_any_size(monkeypatch, plain: bool, chunk_size: int):
    """Gradients too, to where each row stands, and after chunks that are full, begun and not there."""
    monkeypatch.setattr("lit_effattn.attention.lsh.attend_in_chunks", partial(attend_in_chunks, plain=plain))
    attention = LSHAttention(E, H, n_hashes=2, n_buckets=2, chunk_size=chunk_size).double()
    x = torch.randn(2, 330, E, dtype=torch.float64, requires_grad=True)
    lengths = [(3, 2), (20, 9), (140, 140), (100, 150), (67, 29)]  # 330 positions a row
    expected = attention(x)[0]
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    outputs, state, seen = ([], []), None, [0, 0]
    for of_rows in lengths:
        parts = [x[row, s : s + n] for row, (s, n) in enumerate(zip(seen, of_rows, strict=True))]
        y, state = attention(torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), state, torch.tensor(of_rows))
        for row, n in enumerate(of_rows):
            outputs[row].append(y[row, :n])
            seen[row] += n
    assert seen == [330, 330]
    y = torch.stack([torch.cat(of_row) for of_row in outputs])
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], wanted)


def test_a_step_looks_up_only_what_it_sees():
    n, c, n_hashes = 4096, 4, 2
    attention = LSHAttention(E, H, n_hashes=n_hashes, n_buckets=4, chunk_size=c)
    state = attention.initial_state(1, max_len=n)
    with torch.no_grad(), sequence.donated():
        _, state = attention(torch.randn(1, 300, E), state)
        with Largest() as largest:
            attention(torch.randn(1, 1, E), state)
    assert largest.elements <= max(H * n_hashes * (2 * c + 1) * E, E * E)


def test_a_donated_cache_is_written_in_place():
    attention = LSHAttention(E, H, n_buckets=4, chunk_size=4)
    state = attention.initial_state(2, max_len=30)
    with torch.no_grad(), sequence.donated():
        for n in (20, 1):
            _, after = attention(torch.randn(2, n, E), state)
            for name in ("shared", "values", "places", "recent"):
                assert getattr(after, name).data_ptr() == getattr(state, name).data_ptr()
            state = after


# ------------------------------------------------------------------------------------------------------------- options


def test_a_zero_input_does_not_blow_up_the_gradient():
    """Biases start at 0, so its shared vector is 0, which has no direction."""
    attention = LSHAttention(8, 2, bias=False, n_buckets=1)
    x = torch.randn(1, 6, 8)
    x[:, 2] = 0
    x.requires_grad_()
    attention(x)[0].square().sum().backward()
    assert x.grad.abs().max() < 100
