import math
from functools import partial

import pytest
import torch

from lit_effattn import Transformer, sequence
from lit_effattn.attention import CompressiveAttention, InfiniteAttention, SoftmaxAttention, TransformerXLAttention
from lit_effattn.attention.kv_cache import FixedCache
from lit_effattn.attention.positions import RotaryPositions
from lit_effattn.attention.transformer_xl import InputMemory

E, H, D = 12, 3, 4


def make(**options) -> TransformerXLAttention:
    torch.manual_seed(0)
    attention = TransformerXLAttention(E, H, **options).double().eval()
    with torch.no_grad():
        for bias in (attention.u, attention.v):
            bias.copy_(torch.randn_like(bias))  # as they are after training, not near 0
    return attention


def by_hand(attention, keys, x):
    """Queries `x` (N, E) at the end of `keys` (M + N, E), one pair after the other, each R_{i−j} by itself."""
    heads = lambda projection, t: (t @ projection.weight.T).unflatten(-1, (H, D))  # noqa: E731
    q, k, v = heads(attention.q_proj, x), heads(attention.k_proj, keys), heads(attention.v_proj, keys)
    m, out = len(keys) - len(x), []
    for i in range(len(x)):
        scores = []
        for j in range(m + i + 1):
            d = min(m + i - j, attention.clamp_len or 10**9)
            angles = [d / 10000 ** (2 * e / E) for e in range(E // 2)]
            r = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
            r = heads(attention.r_proj, r)
            a, b = (q[i] * k[j]).sum(-1), (q[i] * r).sum(-1)
            c, e = (attention.u * k[j]).sum(-1), (attention.v * r).sum(-1)
            scores.append((a + b + c + e) / D**0.5)
        out.append(torch.einsum("jh,jhd->hd", torch.stack(scores).softmax(0), v[: m + i + 1]).flatten())
    return torch.stack(out) @ attention.out_proj.weight.T


def test_a_segment_sees_itself_and_mem_len_more():
    for mem_len, clamp_len in [(0, None), (4, 3), (100, None)]:
        attention = make(mem_len=mem_len, clamp_len=clamp_len, chunk_size=3)
        x = 2 * torch.randn(1, 14, E, dtype=torch.float64)
        state, done = None, 0
        for n in (4, 1, 7, 2):
            y, state = attention(x[:, done : done + n], state)
            expected = by_hand(attention, x[0, max(0, done - mem_len) : done + n], x[0, done : done + n])
            torch.testing.assert_close(y[0], expected)
            done += n


def test_gradients_of_a_segment_and_of_its_memory():
    """What W_k and W_v learn from the memory, too."""
    attention = make(mem_len=5)
    x = torch.randn(1, 9, E, dtype=torch.float64)
    with torch.no_grad():
        _, state = attention(x[:, :6])
    weights = torch.randn(3, E, dtype=torch.float64)
    wanted = list(attention.parameters())
    found = torch.autograd.grad((attention(x[:, 6:], state)[0][0] * weights).sum(), wanted)
    expected = torch.autograd.grad((by_hand(attention, x[0, 1:], x[0, 6:]) * weights).sum(), wanted)
    torch.testing.assert_close(found, expected)


def test_generating_sees_mem_len_positions_and_its_own():
    for start in ["none", "max_len"]:
        attention = make(mem_len=4)
        x = torch.randn(1, 15, E, dtype=torch.float64)
        state = None if start == "none" else attention.initial_state(1, max_len=15)
        with torch.no_grad(), sequence.donated():
            for i in range(15):
                y, state = attention(x[:, i : i + 1], state)
                torch.testing.assert_close(y[0], by_hand(attention, x[0, max(0, i - 4) : i + 1], x[0, i : i + 1]))


def test_many_rows_and_few_take_different_ways_to_the_same_scores():
    attention = make(mem_len=6)
    x = torch.randn(40, 9, E, dtype=torch.float64)
    state = attention.initial_state(40, max_len=20)
    _, state = attention(x[:, :8], state)
    y, _ = attention(x[:, 8:], state)
    for row in (0, 39):
        alone, _ = attention(x[row : row + 1, 8:], sequence.select(state, torch.tensor([row])))
        torch.testing.assert_close(alone[0], y[row])


def test_evaluation_with_another_memory_is_that_memory_from_the_start():
    changed, fresh = make(mem_len=3), make(mem_len=9, clamp_len=5, same_length=True)
    changed.set_memory(9, 5, True)
    assert changed.initial_state(2).inputs.shape == fresh.initial_state(2).inputs.shape == (2, 8, E)
    x = torch.randn(2, 30, E, dtype=torch.float64)
    assert torch.equal(changed(x)[0], fresh(x)[0])
    changed.set_memory(3)
    assert torch.equal(changed(x)[0], make(mem_len=3)(x)[0])
    assert changed.state_dict().keys() == fresh.state_dict().keys()


def test_a_state_of_another_memory_is_refused():
    for max_len in [None, 20]:
        attention = make(mem_len=8)
        x = torch.zeros(1, 2, E, dtype=torch.float64)
        state = attention.initial_state(1, max_len=max_len)
        attention.set_memory(4)
        with pytest.raises(ValueError, match=r"mem_len=4.*start with state=None"):
            attention(x, state)


def test_what_states_hold():
    attention = make(mem_len=6).float()
    x = torch.randn(2, 9, E)
    _, state = attention(x, None, torch.tensor([9, 4]))
    assert isinstance(state, InputMemory)
    assert state.length.tolist() == [9, 4]
    assert torch.equal(state.inputs[0], x[0, 3:])
    assert torch.equal(state.inputs[1], torch.cat([torch.zeros(2, E), x[1, :4]]))
    assert sequence.nbytes(state) == 2 * 6 * E * 4 + 2 * 8

    projected = attention.initial_state(2, max_len=100, dtype=torch.float16)
    assert isinstance(projected, FixedCache)
    assert projected.keys.shape == projected.values.shape == (2, H, 7, D)
    assert attention.initial_state(2, max_len=5).keys.shape[2] == 5
    _, after = attention(x, projected)
    assert after.keys.dtype == torch.float16
    assert attention.bounded_by is None


def test_a_donated_step_writes_one_slot_in_place():
    attention = make(mem_len=6)
    with torch.no_grad(), sequence.donated():
        _, state = attention(torch.randn(2, 9, E, dtype=torch.float64), attention.initial_state(2, max_len=50))
        before = state.keys.clone()
        _, after = attention(torch.randn(2, 1, E, dtype=torch.float64), state)
    assert after.keys.data_ptr() == state.keys.data_ptr()
    assert after.values.data_ptr() == state.values.data_ptr()
    assert (before != after.keys).any(-1).any(1).sum().item() == 2  # one a row


def test_the_paper_has_no_biases():
    names = {name for name, _ in TransformerXLAttention(E, H).named_parameters()}
    assert names == {"u", "v", *(f"{p}_proj.weight" for p in ("q", "k", "v", "out", "r"))}
    assert TransformerXLAttention(E, H, bias=True).k_proj.bias is not None


def sharing(e: int, h: int, causal: bool) -> TransformerXLAttention:
    return TransformerXLAttention(e, h, causal, share_uv=True)


def test_layers_share_u_and_v():
    def build() -> Transformer:
        return Transformer(E, H, 3, attention=sharing, positions=None)

    model, other = build(), build()
    first, *rest = [block.attention for block in model.blocks]
    assert all(a.u is first.u and a.v is first.v for a in rest)
    untied = Transformer(E, H, 3, attention=TransformerXLAttention, positions=None)
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in model.parameters()) == 2 * 2 * E

    with torch.no_grad():
        first.u.add_(1)
    other.load_state_dict(model.state_dict())
    assert all(torch.equal(block.attention.u, first.u) for block in other.blocks)
    assert other.blocks[2].attention.u is other.blocks[0].attention.u

    model(torch.randn(2, 5, E))[0].sum().backward()
    assert first.u.grad is not None


def test_other_kinds_and_layers_that_do_not_share_keep_their_own():
    model = Transformer(E, H, 4, attention=[TransformerXLAttention, SoftmaxAttention, sharing, sharing])
    own, _, first, second = (block.attention for block in model.blocks)
    assert first.u is second.u
    assert own.u is not first.u


def test_kinds_made_of_it_share_too():
    for kind in [CompressiveAttention, InfiniteAttention]:
        model = Transformer(E, H, 2, attention=partial(kind, mem_len=4, share_uv=True))
        assert model.blocks[0].attention.v is model.blocks[1].attention.v


def test_rotary_positions_are_refused():
    with pytest.raises(ValueError, match="TransformerXLAttention does not take rotary positions"):
        Transformer(E, H, 2, attention=TransformerXLAttention, positions=RotaryPositions)
