import itertools
import warnings
from functools import partial

import pytest
import torch

from lit_effattn import PixelModel, Transformer, sequence
from lit_effattn.attention import SoftmaxAttention, SparseAttention
from lit_effattn.attention.positions import GridPositions, RotaryPositions
from lit_effattn.laws.subject import stream
from lit_effattn.nn.heads import CategoricalHead
from tests.laws import definitions
from tests.support.tensor_sizes import Largest

E, H = 12, 3
FIXED = {"pattern": "fixed", "stride": 6, "summary": 2}


def test_a_pattern_that_holds_all_keys_is_softmax():
    for options, causal in itertools.product(
        [{"stride": 50}, {"pattern": "fixed", "stride": 50}, {"stride": 1}], [True, False]
    ):
        full, sparse = SoftmaxAttention(E, H, causal), SparseAttention(E, H, causal, **options)
        sparse.load_state_dict(full.state_dict())
        x = torch.randn(2, 20, E)
        torch.testing.assert_close(sparse(x)[0], full(x)[0])


def test_heads_take_sets_in_turn_and_see_nothing_else():
    """Three heads: two see the last 4 keys, the third those 4 apart."""
    attention = SparseAttention(E, H, stride=4, combine="heads").double()
    x = torch.randn(1, 20, E, dtype=torch.float64)
    with torch.no_grad():
        attention.out_proj.weight.copy_(torch.eye(E))  # dimensions 4 h … 4 h + 3 are those of head h
        y, changed = attention(x)[0], x.clone()
        changed[0, 9] += 1
        differs = (attention(changed)[0] != y).any(0).view(20, H, -1).any(-1)
    expected = [[9, 10, 11, 12], [9, 10, 11, 12], [9, 13, 17]]
    assert [differs[:, h].nonzero().flatten().tolist() for h in range(H)] == expected


def test_groups_of_heads_see_the_layouts_of_the_authors_code():
    """Blocks of one position: from the last sub-block on, the heads take `num_verts` of them in turn."""
    for num_verts in [1, 2, 4]:
        heads, n, stride, vertsize = 4, 29, 8, 2
        options = {"pattern": "fixed", "stride": stride, "summary": vertsize, "num_verts": num_verts}
        attention = SparseAttention(8, heads, **options).double().eval()
        rows = [list(range(end - 1, end - 1 - vertsize, -1)) for end in range(stride, 0, -vertsize)]
        layout = torch.zeros(heads, n, n, dtype=torch.bool)
        for h in range(heads):
            for j in rows[h % num_verts]:
                layout[h, :, j::stride] = True
            for i in range(n):
                block = i // stride * stride
                layout[h, i, block : block + stride] = True
                layout[h, i, i + 1 :] = False
        x = torch.randn(2, n, 8, dtype=torch.float64)
        assert torch.equal(attention.attention_weights(x)[0] > 0, layout)
        y = attention(x)[0]
        torch.testing.assert_close(y, definitions.sparse(attention, x))
        torch.testing.assert_close(stream(attention, x, [3, 1, 9, 1, 15])[0], y)
        half = SparseAttention(8, heads, **options, combine="heads").double()
        torch.testing.assert_close(half(x)[0], definitions.sparse(half, x))


def test_queries_and_keys_of_half_the_width():
    for options, causal, rotary in [
        ({"stride": 4}, True, True),
        ({"stride": 4, "combine": "local"}, True, False),
        (FIXED, True, False),
        (FIXED, False, True),
    ]:
        model = Transformer(
            E,
            H,
            1,
            attention=partial(SparseAttention, **options, d_qk=6),
            causal=causal,
            positions=RotaryPositions if rotary else None,
            init="pytorch",
        )
        attention = model.blocks[0].attention.double()
        assert attention.q_proj.weight.shape == attention.k_proj.weight.shape == (6, E)
        x = torch.randn(2, 17, E, dtype=torch.float64)
        with torch.no_grad():
            expected = definitions.sparse(attention, x)
            torch.testing.assert_close(attention(x)[0], expected)
            if causal:
                for max_len in (None, 17):
                    y, _ = stream(attention, x, [5, 1, 1, 10], attention.initial_state(2, max_len=max_len))
                    torch.testing.assert_close(y, expected)


def bytes_of(attention, n: int, **initial) -> int:
    state = attention.initial_state(2, **initial) if initial else None
    return sequence.nbytes(attention(torch.zeros(2, n, E), state)[1])


def test_bytes_of_the_state():
    """Keys and values in float32, lengths in int64: the block of 6 and 2 summary columns a block."""
    counts = 2 * 8
    assert bytes_of(SparseAttention(E, H, stride=4), 25) == 2 * (2 * 25 * E) * 4 + counts
    assert bytes_of(SparseAttention(E, H, stride=4, combine="local"), 25) == 2 * (2 * 4 * E) * 4 + counts
    assert bytes_of(SparseAttention(E, H, **FIXED), 25) == 2 * (2 * (6 + 5 * 2) * E) * 4 + counts
    assert bytes_of(SparseAttention(E, H, **FIXED, combine="local"), 25) == 2 * (2 * 6 * E) * 4 + counts
    assert bytes_of(SparseAttention(E, H, **FIXED, combine="distant"), 25) == 2 * (2 * 5 * 2 * E) * 4 + counts
    by_heads = 2 * (2 * (6 * 8 + 5 * 2 * 4)) * 4 + counts  # two heads have blocks, the third has summaries
    assert bytes_of(SparseAttention(E, H, **FIXED, combine="heads"), 25) == by_heads
    assert bytes_of(SparseAttention(E, H, **FIXED), 5, max_len=25) == bytes_of(SparseAttention(E, H, **FIXED), 25)
    assert SparseAttention(E, H, **FIXED).initial_state(2, dtype=torch.float16).block_keys.dtype == torch.float16


def test_a_fixed_state_grows_by_blocks_also_in_steps():
    attention = SparseAttention(E, H, **FIXED)
    state, slots = None, []
    for _ in range(14):
        _, state = attention(torch.zeros(1, 1, E), state)
        slots.append(state.summary_keys.size(2))
    assert slots == [2] * 6 + [4] * 6 + [6] * 2


def test_a_donated_state_is_written_in_place():
    for options in [{"stride": 4}, FIXED, {**FIXED, "combine": "heads"}]:
        attention = SparseAttention(E, H, **options).double()
        x = torch.randn(2, 20, E, dtype=torch.float64)
        with torch.no_grad(), sequence.donated():
            state = attention.initial_state(2, max_len=20)
            where = [t.data_ptr() for t in state[:-1]]
            for i in range(20):
                y, state = attention(x[:, i : i + 1], state)
                torch.testing.assert_close(y, attention(x[:, : i + 1])[0][:, i:])
        assert [t.data_ptr() for t in state[:-1]] == where


def test_a_step_costs_what_it_sees():
    for options in [{"stride": 32}, {"pattern": "fixed", "stride": 32}]:
        n = 1024
        attention = SparseAttention(E, H, **options)
        with torch.no_grad(), sequence.donated():
            _, state = attention(torch.randn(1, n - 1, E), attention.initial_state(1, max_len=n))
            with Largest() as largest:
                attention(torch.randn(1, 1, E), state)
        assert largest.elements <= (32 + 32 + 1) * E


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_compiled_equals_eager(causal: bool):
    """The fixed pattern: the laws take one of a kind, and it is strided."""
    torch._dynamo.reset()
    attention = SparseAttention(E, H, causal, **FIXED, distinct=True).double()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=False)
    x = torch.randn(2, 15, E, dtype=torch.float64)
    lengths = torch.tensor([15, 8])
    with torch.no_grad():
        y, state = compiled(x, None, lengths)
        expected, after = attention(x, None, lengths)
        torch.testing.assert_close(y, expected)
        if causal:
            torch.testing.assert_close(compiled(x, state)[0], attention(x, after)[0])
            with sequence.donated():
                fixed = attention.initial_state(2, max_len=20)
                for i in range(8):
                    y, fixed = compiled(x[:, i : i + 1], fixed)
                    torch.testing.assert_close(y[1], expected[1, i : i + 1])


def test_the_papers_model_starts_at_8_bits():
    """Child et al. 2019, section 5.2: no logit prefers any of 256 values."""
    backbone = Transformer(
        8,
        2,
        2,
        attention=partial(SparseAttention, stride=4, d_qk=4),
        positions=GridPositions,
        activation="quick_gelu",
        gradient_checkpointing=True,
    )
    model = PixelModel(backbone, (4, 4, 3), 256, head=partial(CategoricalHead, zero_init=True)).double()
    bits = model(torch.randint(256, (3, 48)))
    torch.testing.assert_close(bits, torch.full((3,), 8.0, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("combine", "n", "said"), [("merged", 8, 1), ("local", 5, 1), ("merged", 9, 0), ("heads", 8, 0)]
)
def test_a_pattern_that_covers_everything_is_said_once_in_training(combine: str, n: int, said: int):
    attention = SparseAttention(8, 2, stride=8, combine=combine)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        attention.eval()(torch.zeros(1, n, 8))
        for _ in range(2):
            _, state = attention.train()(torch.zeros(1, n, 8))
        attention(torch.zeros(1, 1, 8), state)
    assert ["stride=8 covers all" in str(w.message) for w in found] == [True] * said
