import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lit_effattn import Transformer, sequence
from lit_effattn.attention import (
    CrossAttention,
    LinearCrossAttention,
    PerformerCrossAttention,
    SoftmaxAttention,
    SoftmaxCrossAttention,
    cross,
)
from lit_effattn.attention.positions import RotaryPositions
from lit_effattn.laws.subject import gradients
from tests.laws import definitions
from tests.laws.cases import chosen
from tests.laws.tools import assert_close, assert_same

E, H, D_SOURCE = 8, 2, 6


class Kind(NamedTuple):
    """A cross-attention and its definition, (module, x, source) -> y."""

    make: Callable[..., CrossAttention]
    definition: Callable[[CrossAttention, Tensor, Tensor], Tensor]


KINDS = {
    "softmax": Kind(SoftmaxCrossAttention, definitions.softmax_cross),
    "linear": Kind(LinearCrossAttention, definitions.linear_cross),
    "performer": Kind(PerformerCrossAttention, definitions.performer_cross),
    "relu": Kind(partial(PerformerCrossAttention, features="relu"), definitions.performer_cross),
}
EFFICIENT = ["linear", "performer", "relu"]
PERFORMERS = ["performer", "relu"]


def made(name: str, d_source: int | None = D_SOURCE) -> CrossAttention:
    return KINDS[name].make(E, H, d_source).double().eval()


def target(rows: int = 3, n: int = 4) -> Tensor:
    return 2 * torch.randn(rows, n, E, dtype=torch.float64)


def source(rows: int = 3, n: int = 5) -> Tensor:
    return 2 * torch.randn(rows, n, D_SOURCE, dtype=torch.float64)


def redraw(module: CrossAttention) -> None:
    module.redraw(torch.Generator().manual_seed(5))


# ----------------------------------------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("garbage", [100.0, torch.nan, torch.inf])
def test_each_row_reads_its_own_source(garbage: float):
    """By the definition of a row alone, without padding; outputs and all gradients."""
    for name in KINDS:
        module, x, lengths = made(name), target(4).requires_grad_(), torch.tensor([9, 1, 0, 4])
        read = source(4, 9)
        padding = ~sequence.valid_positions(lengths, 9)
        read[padding] = garbage * torch.rand_like(read[padding])
        read.requires_grad_()
        y, _ = module(x, module.remember(read, lengths))
        found = gradients(module, y, x, read)
        assert (found["input 1"][padding] == 0).all()

        alone = [KINDS[name].definition(module, x[i : i + 1], read[i : i + 1, :n]) for i, n in enumerate(lengths) if n]
        expected = torch.cat([*alone[:2], torch.zeros_like(alone[0]), *alone[2:]])  # the third has no source to read
        assert_close(y, expected)
        assert_close(found, gradients(module, expected, x, read))


def test_without_a_source_the_output_is_zero():
    """Of a row that was given none, or an empty one, or lost it; the bias of the output projection is not seen."""
    for name in KINDS:
        module, x = made(name), target(2).requires_grad_()
        assert (module.out_proj.bias != 0).any()
        lengths, rows = torch.zeros(2, dtype=torch.long), torch.tensor([True, True])
        for state in (
            None,
            module.initial_state(2),
            module.initial_state(2, max_len=3),
            module.remember(source(2) * torch.nan, lengths),
            module.reset(sequence.detach(module.remember(source(2) * torch.nan)), rows),
        ):
            y, _ = module(x, state)
            assert (y == 0).all()
            assert all((g == 0).all() for g in gradients(module, y, x).values())


def test_reset_restores_the_initial_state():
    for name in KINDS:
        module, x = made(name), target()
        state = module.remember(source())
        reset = module.reset(state, torch.tensor([True, False, False]))
        if name in EFFICIENT:
            assert_same(sequence.select(reset, torch.tensor([0])), module.initial_state(1))
        assert reset.given.tolist() == [False, True, True]
        assert reset.length.tolist() == [0, 5, 5]
        y, _ = module(x, reset)
        assert (y[0] == 0).all()
        assert torch.equal(y[1:], module(x, state)[0][1:])


def test_the_state_is_handed_on_as_it_is():
    for name in KINDS:
        module = made(name)
        state = module.remember(source())
        assert module(target(), state)[1] is state
        assert module.grow(state, 999) is state
        with torch.no_grad(), sequence.donated():
            assert module(target(n=1), state)[1] is state


def test_the_parameters_are_those_of_softmax():
    shapes = [{n: p.shape for n, p in made(name).named_parameters()} for name in KINDS]
    assert shapes == [shapes[0]] * len(KINDS)


@pytest.mark.parametrize("features", ["positive", "hyperbolic", "trigonometric"])
def test_many_features_come_near_to_softmax(features: str):
    softmax = made("softmax")
    x, read, lengths = target(2) / 4, source(2, 9) / 4, torch.tensor([9, 5])
    expected, _ = softmax(x, softmax.remember(read, lengths))
    errors = []
    for n_features in (64, 64 * 256):
        performer = PerformerCrossAttention(E, H, D_SOURCE, n_features=n_features, features=features).double()
        performer.load_state_dict(softmax.state_dict(), strict=False)
        y, _ = performer(x, performer.remember(read, lengths))
        errors.append(((y - expected).norm() / expected.norm()).item())
    assert errors[1] < 0.01
    assert errors[1] < errors[0] / 6  # by chance 16 times smaller


def test_dropout_is_of_weights_and_in_training_alone():
    """Of 400 equal values a half is dropped and the rest doubled: the mean is as before, but for a twentieth."""
    module = SoftmaxCrossAttention(E, H, dropout=0.5)
    x, state = torch.zeros(1, 1, E), module.remember(torch.ones(1, 400, E))
    expected = module.eval()(x, state)[0]
    assert torch.equal(module(x, state)[0], expected)
    found = torch.cat([module.train()(x, state)[0] for _ in range(50)])
    assert found.std(0).max() > 0
    torch.testing.assert_close(found.mean(0), expected[0], rtol=0.03, atol=0.03)


def test_weights_are_those_of_the_output():
    """In half precision too, where they are float32: rows add up to 1."""
    for name in KINDS:
        module, x, lengths = made(name), target(), torch.tensor([5, 2, 0])
        read = source()
        weights = module.attention_weights(x, read, lengths)
        v = definitions.in_heads(module, module.v_proj, read)
        expected, _ = module(x, module.remember(read, lengths))
        assert_close(definitions.heads_together(module, weights @ v)[:2], expected[:2])
        assert (weights[1, ..., 2:] == 0).all()
        assert (weights[2] == 0).all()
        half = module.half().attention_weights(x.half(), read.half(), lengths)
        assert half.dtype == torch.float32
        assert_close(half[:2].sum(-1), torch.ones(2, H, 4), rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------ positions


def test_rotary_positions_do_not_turn_what_reads_a_source():
    """A window of 1 sees nothing but the position itself, so equal inputs read the same at all positions."""
    for name in KINDS:
        model = Transformer(
            E, H, 1, attention=partial(SoftmaxAttention, window=1), positions=RotaryPositions, init="pytorch",
            cross_attention=KINDS[name].make, d_source=D_SOURCE,
        ).double()  # fmt: skip
        state = model.remember(source(2), torch.tensor([5, 3]))
        x = target(2, 1)
        y, state = model(x.expand(-1, 7, -1), state)
        z, _ = model(x, state)
        assert_close(torch.cat([y, z], 1), y[:, :1].expand(-1, 8, -1))


# ------------------------------------------------------------------------------------------------------------ the state


def test_the_size_of_a_state():
    for name in KINDS:
        module = made(name)
        few, many = (sequence.nbytes(module.remember(source(1, n))) for n in (10, 1000))
        assert many - few == (0 if name in EFFICIENT else 2 * 990 * E * 8)
        empty = module.initial_state(1)
        assert sequence.nbytes(module.initial_state(1, max_len=99)) == sequence.nbytes(empty)
        assert module.bounded_by is None


def test_sums_of_half_precision_are_float32():
    """Of 20,000 positions: in float16 they would exceed the largest number, in bfloat16 stop at the 256th."""
    for dtype, name in itertools.product([torch.float16, torch.bfloat16], EFFICIENT):
        module = KINDS[name].make(E, H, D_SOURCE)
        read, x = (source(1, 20_000) + 1).to(dtype), target(1).to(dtype)
        narrow = module.to(dtype)
        state = narrow.remember(read)
        assert {t.dtype for t in state.kept[:2]} == {torch.float32}
        assert {t.dtype for t in sequence.tensors(narrow.initial_state(1)) if t.is_floating_point()} == {torch.float32}
        y, _ = narrow(x, state)
        assert y.dtype == dtype
        exact, _ = narrow.double()(x.double(), narrow.remember(read.double()))
        assert (y - exact).norm() / exact.norm() < 4 * torch.finfo(dtype).eps


def test_sums_of_autocast_are_float32():
    for name in EFFICIENT:
        module = KINDS[name].make(E, H, D_SOURCE)
        with torch.autocast("cpu", torch.bfloat16):
            state = module.remember(source(1).float())
            y, _ = module(target(1).float(), state)
        assert {t.dtype for t in state.kept[:2]} == {torch.float32}
        assert y.dtype == torch.bfloat16


# ------------------------------------------------------------------------------------------------------------ redrawing


def test_a_source_from_before_a_redraw_is_refused():
    for name in PERFORMERS:
        module, x, read = made(name), target(2), source(2)
        old = module.remember(read)
        redraw(module)
        new = module.remember(read)
        assert_close(module(x, new)[0], KINDS[name].definition(module, x, read))
        for stale in (old, chosen(torch.tensor([True, False]), new, old)):
            with pytest.raises(ValueError, match="PerformerCrossAttention: the features were redrawn after `remember`"):
                module(x, stale)


def test_on_a_gpu_what_is_stale_is_nan(monkeypatch: pytest.MonkeyPatch):
    for name in PERFORMERS:
        module, x, read = made(name), target(2), source(2)
        old = module.remember(read)
        redraw(module)
        new = module.remember(read)
        mixed = chosen(torch.tensor([True, False]), new, old)
        monkeypatch.setattr(cross, "reads_values", lambda t: False)
        y, _ = module(x, mixed)
        assert_close(y[0], module(x, new)[0][0])
        assert y[1].isnan().all()


def test_a_redraw_does_not_matter_without_a_source():
    for name in PERFORMERS:
        module, x = made(name), target(2)
        rows = torch.tensor([True, True])
        empty, old = module.initial_state(2), module.remember(source(2))
        lost = module.reset(old, rows)
        redraw(module)
        for state in (empty, lost):
            assert (module(x, state)[0] == 0).all()
        assert_same(module.reset(old, rows), module.initial_state(2))


# --------------------------------------------------------------------------------------------------- what is refused


def test_a_bad_source_is_named():
    for shape, lengths, words in [
        ((2, 6), None, ["source", "(2, 6)", "(batch, length, 6)"]),
        ((2, 3, 8), None, ["source", "(2, 3, 8)", "(batch, length, 6)"]),
        *[((b, n, 6), None, ["source", f"({b}, {n}, 6)", "one row and one position"]) for b, n in ((2, 0), (0, 3))],
        ((2, 3, 6), torch.tensor([1.0, 2.0]), ["lengths", "torch.float32", "integers of shape (2,)"]),
        ((2, 3, 6), torch.tensor([1, 2, 3]), ["lengths", "(3,)", "integers of shape (2,)"]),
        ((2, 3, 6), torch.tensor([1, 4]), ["lengths", "[1, 4]", "0 to 3"]),
        ((2, 3, 6), torch.tensor([-1, 2]), ["lengths", "[-1, 2]", "0 to 3"]),
    ]:
        for what in ["cross", "decoder"]:
            kind: type = LinearCrossAttention
            module = kind(E, H, 6) if what == "cross" else Transformer(E, H, 1, cross_attention=kind, d_source=6)
            with pytest.raises(ValueError, match=".*".join(map(re.escape, [type(module).__name__, *words]))):
                module.remember(torch.zeros(shape), lengths)


def test_queries_and_keys_of_another_width():
    """As with fast-transformers' `query_dimensions`, or d_k in Vaswani et al. 2017, Table 3 (B): 3 a head."""
    for kind, definition in [
        (LinearCrossAttention, definitions.linear_cross),
        (SoftmaxCrossAttention, definitions.softmax_cross),
    ]:
        cross = kind(E, H, D_SOURCE, d_qk=3 * H).double()
        q_and_k = (E * 3 * H + 3 * H) + (D_SOURCE * 3 * H + 3 * H)
        assert sum(p.numel() for p in cross.parameters()) == q_and_k + (D_SOURCE * E + E) + (E * E + E)
        x, source = torch.randn(2, 5, E).double(), torch.randn(2, 7, D_SOURCE).double()
        state = cross.remember(source)
        if kind is LinearCrossAttention:
            assert state.kept.s.shape == cross.initial_state(2).kept.s.shape == (2, H, 3, E // H)
        assert cross(x)[0].eq(0).all()  # no source
        torch.testing.assert_close(cross(x, state)[0], definition(cross, x, source))
        torch.testing.assert_close(
            cross.attention_weights(x, source).sum(-1), torch.ones(2, H, 5).double(), atol=1e-5, rtol=0
        )
