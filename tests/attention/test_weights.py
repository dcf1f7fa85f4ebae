"""`attention_weights` of every kind: the sum of the values that they weigh is what the kind returns."""

import copy
import itertools
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lit_effattn.attention import (
    Attention,
    CompressiveAttention,
    InfiniteAttention,
    LinearAttention,
    LSHAttention,
    PerformerAttention,
    RecurrentAttention,
    ShawAttention,
    SoftmaxAttention,
    SparseAttention,
    TransformerXLAttention,
    WindowedLinearAttention,
)
from tests.laws import definitions
from tests.laws.cases import ATTENTIONS, ROTARY, Case, kind
from tests.laws.tools import assert_close, assert_same, copied, each, inputs

E, H = 8, 2
NORMED = [
    case for case in ATTENTIONS if not isinstance(case.example, RecurrentAttention)
]  # test_recurrent.py has those
CASES = [*NORMED, *ROTARY, *kind(SoftmaxAttention, definitions.softmax, 5, window=5, causal=[True], rotary=True)]
SUMMED = LinearAttention, PerformerAttention
"""Kinds whose state holds no single keys."""


def build(case: Case) -> Attention:
    """Build a module whose output is that of its weights alone."""
    attention = case.build()
    if isinstance(attention, InfiniteAttention) and attention.n_basis:
        torch.nn.init.zeros_(attention.ltm_out_proj.weight)
    return attention


def values(attention: Attention, x: Tensor) -> Tensor:
    """(B, N, E) -> (B, H, N, D)."""
    v = x @ attention.v_proj.weight.T + (0 if attention.v_proj.bias is None else attention.v_proj.bias)
    v = v.unflatten(2, (attention.n_kv_heads, -1)).transpose(1, 2)
    return v[:, torch.arange(H) * attention.n_kv_heads // H]


def summaries(attention: Attention, x: Tensor) -> Tensor:
    """The summaries that the last position of `x` sees or has forgotten, (B, K, E)."""
    c, last = attention.compression_rate, x.size(1) - 1
    n = max(0, last - last % attention.segment_len - attention.mem_len)
    return definitions.summaries(attention, x[:, : n // c * c])


def mixed(attention: Attention, weights: Tensor, x: Tensor) -> Tensor:
    """W_o Σ_j w_ij v_j of weights without a state."""
    if isinstance(attention, CompressiveAttention):
        x = torch.cat([summaries(attention, x), x], 1)
    y = weights @ values(attention, x)
    if isinstance(attention, ShawAttention):
        k, n = attention.max_distance, x.size(1)
        ahead = 0 if attention.causal else k
        row = torch.tensor([[min(max(j - i, -k), ahead) + k for j in range(n)] for i in range(n)])
        y = y + torch.einsum("bhij,ijd->bhid", weights, attention.value_table[row])
    return definitions.heads_together(attention, y)


KINDS = {type(case.example).__name__: [] for case in CASES}
for _case in CASES:
    KINDS[type(_case.example).__name__].append(_case)
each_kind = pytest.mark.parametrize("cases", KINDS.values(), ids=KINDS)


@each_kind
def test_weighted_values_are_the_output(cases: list[Case]):
    for case in cases:
        assert_weighted(case)


def assert_weighted(case: Case) -> None:
    attention, n = build(case), case.long
    x, lengths = inputs(attention, 3, n), torch.tensor([n, n // 2, 0])
    weights = attention.attention_weights(x, None, lengths)
    assert weights.shape[:3] == (3, H, n)
    assert not weights.requires_grad
    if not isinstance(attention, CompressiveAttention):
        assert weights.size(3) == n
    valid = torch.arange(n) < lengths[:, None]
    assert (weights.transpose(1, 2)[~valid] == 0).all()
    total = weights.sum(-1).transpose(1, 2)[valid]
    if isinstance(attention, LinearAttention):  # its denominator has 1e-6 added
        assert ((total > 0.5) & (total < 1)).all()
    else:
        assert_close(total, torch.ones_like(total))
    assert_close(mixed(attention, weights, x)[valid], attention(x, None, lengths)[0][valid])
    assert_close(attention.attention_weights(x)[:1], weights[:1])


@each_kind
def test_a_state_changes_no_weight(cases: list[Case]):
    for case, fixed, early in itertools.product(cases, (False, True), (False, True)):
        if case.causal:
            assert_unchanged_by_a_state(case, fixed, early)


def assert_unchanged_by_a_state(case: Case, fixed: bool, early: bool) -> None:
    """Row by row the weights are those of the whole stream, in columns that lie where they are documented.

    Early in the stream memories of fixed size are not full.
    """
    attention, end = build(case), case.long
    x = inputs(attention, 4, end)
    whole = attention.attention_weights(x)
    before, n = torch.tensor([2, 1, 0, 2] if early else [end - 6, end // 3, 0, 2 * case.unit]), 6
    lengths = torch.tensor([6, 4, 6, 0])
    state = attention.initial_state(4, max_len=end + n) if fixed else None
    _, state = attention(x[:, : int(before.max())], state, before)
    saved = copied(state)
    segment = x.gather(1, (before[:, None] + torch.arange(n)).clamp(max=end - 1)[..., None].expand(-1, -1, E))
    weights = attention.attention_weights(segment, state, lengths)
    assert_same(state, saved)
    for row, (start, count) in enumerate(zip(before.tolist(), lengths.tolist(), strict=True)):
        assert (weights[row, :, count:] == 0).all()
        found, expected = weights[row, :, :count], whole[row, :, start : start + count]
        if isinstance(attention, SUMMED):
            assert found.size(-1) == 1 + n
            assert_close(found[..., 0], expected[..., :start].sum(-1))
            assert_close(found[..., 1 : 1 + count], expected[..., start : start + count])
            continue
        if isinstance(attention, WindowedLinearAttention):  # the first column is of all before the window
            before_window = max(0, start - attention.window + 1)
            assert_close(found[..., 0], expected[..., :before_window].sum(-1))
            found, expected = found[..., 1:], expected.clone()
            expected[..., :before_window] = 0
        earlier = found.size(-1) - n
        if isinstance(attention, CompressiveAttention):
            late = attention.segment_len - 1
            earlier = min(attention.mem_len + late + attention.compression_rate - 1, int(before.max()))
            made = (
                (before - before % attention.segment_len - attention.mem_len)
                .div(attention.compression_rate, rounding_mode="floor")
                .clamp(min=0)
            )
            first = int(made[row]) - min(attention.compressed_len, int(made.max()))
            assert_close(placed(found[..., : -earlier - n], first, whole.size(-1) - end), expected[..., :-end])
            found, expected = found[..., -earlier - n :], expected[..., -end:]
        assert_close(placed(found, start - earlier, end), expected)


def placed(weights: Tensor, first: int, size: int) -> Tensor:
    """Put columns, the first of them for position `first`, into the `size` of all positions; no others have weight."""
    position = torch.arange(first, first + weights.size(-1))
    there = (position >= 0) & (position < size)
    assert (weights[..., ~there] == 0).all()
    whole = weights.new_zeros(*weights.shape[:-1], size)
    whole[..., position[there]] = weights[..., there]
    return whole


@pytest.mark.parametrize("fixed", [False, True], ids=["grows", "max_len"])
def test_a_memory_of_few_inputs(fixed: bool):
    """Where the split of a stream decides what is seen: all of the call, and `mem_len` before it."""
    attention = TransformerXLAttention(E, H, mem_len=4).double()
    x, before = inputs(attention, 2, 20), torch.tensor([13, 2])
    _, state = attention(x[:, :13], attention.initial_state(2, max_len=30) if fixed else None, before)
    segment = torch.stack([x[0, 13:], x[1, 2:9]])
    weights = attention.attention_weights(segment, state)
    assert weights.shape == (2, H, 7, 4 + 7)
    seen = torch.cat([torch.stack([x[0, 9:13], torch.cat([x[1, :2], x[1, :2]])]), segment], 1)
    assert (weights[1, ..., :2] == 0).all()
    y = definitions.heads_together(attention, weights @ values(attention, seen))
    assert_close(y, attention(segment, state)[0])


def test_a_bounded_memory_has_few_columns():
    for make, most in [
        (partial(SoftmaxAttention, window=5), 4),
        (partial(SparseAttention, combine="local", stride=5), 4),
        (partial(SparseAttention, combine="local", pattern="fixed", stride=5), 4),
        (partial(TransformerXLAttention, mem_len=5), 5),
        (partial(TransformerXLAttention, mem_len=5, same_length=True), 4),
        (partial(InfiniteAttention, mem_len=3, segment_len=2, n_basis=0), 5),
        (LinearAttention, 1),
        (partial(WindowedLinearAttention, window=5), 1 + 4),
    ]:
        for max_len in [None, 600]:
            attention = make(E, H)
            _, state = attention(torch.randn(1, 500, E), attention.initial_state(1, max_len=max_len))
            assert attention.attention_weights(torch.randn(1, 2, E), state).shape == (1, H, 2, most + 2)


def test_redrawn_features_forget():
    for features in ["positive", "relu"]:
        attention = PerformerAttention(E, H, features=features).double()
        x = inputs(attention, 2, 9)
        _, state = attention(x[:, :5])
        attention.redraw(torch.Generator().manual_seed(1))
        weights = attention.attention_weights(x[:, 5:], state)
        assert (weights[..., 0] == 0).all()
        assert_close(weights[..., 1:], attention.attention_weights(x[:, 5:]))


def test_redrawn_rotations_forget():
    """Also in the calls after, whose state has hashes of both draws in it."""
    attention = LSHAttention(E, H, n_hashes=2, n_buckets=2, chunk_size=4).double()
    x = inputs(attention, 2, 24)
    _, state = attention(x[:, :8])
    attention.redraw(torch.Generator().manual_seed(1))
    weights = attention.attention_weights(x[:, 8:16], state)
    assert (weights[..., :8] == 0).all()
    assert_close(weights[..., 8:], attention.attention_weights(x[:, 8:16]))
    _, state = attention(x[:, 8:16], state)
    weights = attention.attention_weights(x[:, 16:], state)
    assert (weights[..., :8] == 0).all()
    y = definitions.heads_together(attention, weights @ values(attention, x))
    assert_close(y, attention(x[:, 16:], state)[0])


def test_performers_weights_are_finite_for_large_norms():
    attention = PerformerAttention(E, H)
    x = 1000 * torch.randn(2, 12, E)
    _, state = attention(x[:, :6])
    for weights in (attention.attention_weights(x), attention.attention_weights(x[:, 6:], state)):
        assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)), rtol=0, atol=1e-5)


EACH_KIND = list({type(case.example): case for case in reversed(NORMED) if case.causal}.values())


@each(EACH_KIND)
def test_weights_have_float32_or_more(case: Case):
    x = torch.randn(2, 7, E)
    for dtype in (torch.float32, torch.float64):
        attention = case.build(dtype)
        assert attention.attention_weights(x.to(dtype)).dtype == dtype
    attention = case.build(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = attention(x)
        assert attention.attention_weights(x, state).dtype == torch.float32
    attention = case.build(torch.bfloat16)
    _, state = attention(x.bfloat16())
    weights = attention.attention_weights(x.bfloat16(), state)
    assert weights.dtype == torch.float32
    assert_close(weights.sum(-1), torch.ones(2, H, 7), rtol=0, atol=1e-5)


def test_weights_without_dropout():
    for make in [
        partial(SoftmaxAttention, dropout=0.5),
        partial(ShawAttention, dropout=0.5),
        partial(SparseAttention, dropout=0.5),
        partial(TransformerXLAttention, dropout=0.5, position_dropout=0.5),
    ]:
        attention, x = make(E, H).train(), torch.randn(2, 7, E)
        random = torch.get_rng_state()
        weights = attention.attention_weights(x)
        assert torch.equal(torch.get_rng_state(), random)
        assert torch.equal(attention.eval().attention_weights(x), weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_weights_on_the_gpu():
    for case in CASES:
        attention = case.build()
        x, lengths, states = inputs(attention, 2, 2 * case.long), torch.tensor([case.long, 3]), [None, None]
        if case.causal:
            _, states[0] = attention(x[:, : case.long], None, lengths)
        expected = attention.attention_weights(x[:, case.long :], states[0], lengths)
        attention, x, lengths = attention.cuda(), x.cuda(), lengths.cuda()
        if case.causal:
            _, states[1] = attention(x[:, : case.long], None, lengths)
        found = attention.attention_weights(x[:, case.long :], states[1], lengths)
        assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-8)


class Totals(NamedTuple):
    total: Tensor
    length: Tensor


class MeanAttention(Attention):
    """The mean of the values so far."""

    def empty_state(self, batch_size, max_len, device, dtype):
        total = torch.zeros(batch_size, self.n_heads, 1, self.head_dim, device=device, dtype=dtype)
        return Totals(total, torch.zeros(batch_size, dtype=torch.long, device=device))

    def attend(self, q, k, v, state, lengths):
        state = self.initial_state(len(q), device=q.device, dtype=q.dtype) if state is None else state
        total = state.total + v.cumsum(2)
        count = state.length[:, None] + torch.arange(1, q.size(2) + 1)
        return total / count[:, None, :, None], Totals(total[:, :, -1:], state.length + q.size(2))


def test_weights_of_ones_own_kind():
    """Without a method for them. A state has them if it is a cache or sums; otherwise the method is named."""
    attention, x = MeanAttention(E, H).double(), torch.randn(1, 5, E).double()
    expected = torch.ones(5, 5).double().tril() / torch.arange(1, 6)[:, None]
    assert_close(attention.attention_weights(x), expected.expand(1, H, 5, 5))
    with pytest.raises(NotImplementedError, match=r"MeanAttention.*unit_values"):
        attention.attention_weights(x, attention(x)[1])


def test_arguments_are_checked():
    for attention in (SoftmaxAttention(E, H), TransformerXLAttention(E, H)):
        with pytest.raises(ValueError, match=r"lengths is \[3\]"):
            attention.attention_weights(torch.zeros(1, 2, E), None, torch.tensor([3]))


# --------------------------------------------------------------------------------------------------- Transformer-XL's


def test_terms_of_transformer_xl():
    """The four terms of Dai et al. 2019, section 3.3, of each pair of positions."""
    for options in [
        {"mem_len": 50},
        {"mem_len": 50, "clamp_len": 4, "bias": True},
        {"mem_len": 5, "same_length": True},
        {"causal": False, "clamp_len": 4},
    ]:
        attention = TransformerXLAttention(E, H, **options).double()
        torch.nn.init.normal_(attention.u)
        torch.nn.init.normal_(attention.v)
        x, n = inputs(attention, 2, 16), 16
        q, k, _ = definitions.queries_keys_values(attention, x)
        r = definitions.relative_vectors(attention, n)
        scale = (E / H) ** -0.5
        expected = [
            torch.einsum("bhid,bhjd->bhij", q, k) * scale,
            torch.einsum("bhid,ijhd->bhij", q, r) * scale,
            torch.einsum("hd,bhjd->bhj", attention.u, k)[:, :, None].expand(2, H, n, n) * scale,
            torch.einsum("hd,ijhd->hij", attention.v, r).expand(2, H, n, n) * scale,
        ]
        reach = attention.mem_len if attention.same_length else n
        hidden = torch.tensor([[attention.causal and not i - reach < j <= i for j in range(n)] for i in range(n)])
        expected = [term.masked_fill(hidden, -torch.inf) for term in expected]
        terms = attention.attention_terms(x)
        assert terms._fields == ("content", "position", "content_bias", "position_bias")
        for term, e in zip(terms, expected, strict=True):
            assert_close(term, e)
        assert_close(sum(terms).softmax(-1), attention.attention_weights(x))
        if not attention.causal:
            return
        for max_len in (None, n):
            _, state = attention(x[:, :10], attention.initial_state(2, max_len=max_len))
            terms = attention.attention_terms(x[:, 10:], state, torch.tensor([6, 3]))
            for term, e in zip(terms, expected, strict=True):
                assert_close(term[0], e[0, :, 10:, -term.size(-1) :])
                assert_close(term[1, :, :3], e[1, :, 10:13, -term.size(-1) :])
                assert (term[1, :, 3:] == -torch.inf).all()


@pytest.mark.parametrize("cls", [TransformerXLAttention, CompressiveAttention, InfiniteAttention])
def test_weights_of_normalised_inputs(cls: type[TransformerXLAttention]):
    """An attention that normalises its inputs weighs like one that is given them normalised."""
    for max_len in [None, 12]:
        signal = {"mem_len": 2, "segment_len": 3, "n_basis": 10, "n_samples": 6, "widths": (0.1,)}
        options = signal if cls is InfiniteAttention else {"mem_len": 20}
        torch.manual_seed(0)
        plain, norm = cls(E, H, **options).double(), torch.nn.LayerNorm(E).double()
        torch.nn.init.normal_(norm.weight)
        attention = copy.deepcopy(plain)
        attention.normalise_with(norm)
        x = inputs(plain, 2, 12)
        normed, times = norm(x), torch.linspace(0, 1, 9)
        _, state = attention(x[:, :8], attention.initial_state(2, max_len=max_len))
        _, same = plain(normed[:, :8], plain.initial_state(2, max_len=max_len))
        assert_close(attention.attention_weights(x[:, 8:], state), plain.attention_weights(normed[:, 8:], same))
        if cls is InfiniteAttention:
            found = attention.attention_densities(x[:, 8:], state, times=times)
            assert_close(found, plain.attention_densities(normed[:, 8:], same, times=times))


# -------------------------------------------------------------------------------------------------------- the signal's

SIGNAL = {"mem_len": 3, "segment_len": 3, "n_basis": 10, "widths": (0.1, 0.2), "n_samples": 6, "n_bins": 8}


def test_densities_read_the_signal():
    """What is read at a position is ∫ p(t) W_v' X̄(t) dt, X̄ being the signal that the position sees."""
    for options in [{"sticky": True, "gate": True}, {"writes": "segment"}, {"norm_signal": False}]:
        torch.manual_seed(0)
        attention = InfiniteAttention(E, H, **SIGNAL | options).double()
        near = InfiniteAttention(E, H, **SIGNAL | options).double()
        near.load_state_dict(attention.state_dict())
        for module in (attention, near):
            module.normalise_with(torch.nn.LayerNorm(E).double())
        torch.nn.init.zeros_(near.ltm_out_proj.weight)
        x, before, lengths = inputs(attention, 3, 24), torch.tensor([10, 4, 0]), torch.tensor([9, 5, 14])
        times = torch.linspace(-1.5, 2.5, 2001, dtype=torch.float64)
        _, state = attention(x[:, :10], None, before)
        saved = copied(state)
        densities = attention.attention_densities(x[:, 10:], state, lengths, times=times)
        assert densities.shape == (3, H, 14, 2001)
        assert_same(state, saved)
        y = attention(x[:, 10:], state, lengths)[0] - near(x[:, 10:], state, lengths)[0]
        for i in range(14):
            now = (i < lengths).long()
            assert (densities[now == 0, :, i] == 0).all()
            _, state = attention(x[:, 10 + i : 11 + i], state, now)
            value = attention.signal(state, times) @ attention.ltm_v_proj.weight.T  # (B, T, E)
            read = torch.einsum("bht,bthd->bhd", densities[:, :, i], value.unflatten(2, (H, -1))) * (
                times[1] - times[0]
            )
            assert_close(read.flatten(1) @ attention.ltm_out_proj.weight.T, y[:, i], rtol=0, atol=1e-7)
        written = attention._delay + attention.segment_len  # the first position that attends to a signal
        assert (densities[2, :, :written] == 0).all()
        assert (densities[2, :, written].sum(-1) > 0).all()


def test_no_signal_has_no_densities():
    attention = InfiniteAttention(E, H, **SIGNAL | {"n_basis": 0})
    with pytest.raises(ValueError, match="n_basis=0"):
        attention.attention_densities(torch.zeros(1, 2, E), times=torch.zeros(1))


# ------------------------------------------------------------------------------------------------- sparse kinds' sets


def test_the_given_pattern():
    """The sets A_i of Child et al. 2019, section 4.2, and 4.3 for the fixed pattern."""
    for causal, options in itertools.product(
        [True, False], [{"stride": 4}, {"stride": 4, "pattern": "fixed", "summary": 2, "combine": "heads"}]
    ):
        attention, n, stride = SparseAttention(E, H, causal, **options).double(), 11, options["stride"]
        x, lengths = inputs(attention, 2, n), torch.tensor([n, 7])
        expected = torch.zeros(2, H, n, n, dtype=torch.bool)
        for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (2, H, n, n))).tolist():
            if "pattern" in options:
                sets = j // stride == i // stride, j % stride >= stride - 2 or i == j
                there = sets[h]  # the first head's is the local set
            else:
                there = abs(i - j) < stride or (i - j) % stride == 0
            expected[b, h, i, j] = there and max(i, j) < lengths[b] and (j <= i or not causal)
        assert torch.equal(attention.attention_pattern(x, None, lengths), expected)
        assert torch.equal(attention.attention_weights(x, None, lengths) > 0, expected)
        if causal:
            _, state = attention(x[:, :6])
            assert torch.equal(attention.attention_pattern(x[:, 6:], state)[0], expected[0, :, 6:])


def test_buckets_of_lsh():
    """h(x) = argmax [xR; −xR] (Kitaev et al. 2020, section 2), and no key of other buckets has weight."""
    for causal in [True, False]:
        attention = LSHAttention(E, H, causal, n_hashes=2, n_buckets=6, chunk_size=20).double()
        x, lengths = inputs(attention, 2, 12), torch.tensor([12, 8])
        found = attention.attention_buckets(x, None, lengths)
        q = attention.q_proj(x).detach().unflatten(2, (H, -1))  # (B, N, H, D)
        for b, h, r, i in torch.cartesian_prod(*map(torch.arange, (2, H, 2, 12))).tolist():
            turned = [float(q[b, i, h] @ attention.rotations[r, h, :, axis]) for axis in range(3)]
            sides = turned + [-value for value in turned]
            assert found[b, h, r, i] == (sides.index(max(sides)) if i < lengths[b] else 6)
        shared = (found[..., None, :] == found[..., :, None]).any(2)  # (B, H, N, N)
        weights = attention.attention_weights(x, None, lengths)
        assert (weights[~shared & ~torch.eye(12, dtype=torch.bool)] == 0).all()
        if causal:
            _, state = attention(x[:, :5])
            assert torch.equal(attention.attention_buckets(x[:, 5:], state)[0], found[0, ..., 5:])
