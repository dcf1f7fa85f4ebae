import itertools
import math
import re

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from lit_effattn.nn.lstm import LSTM, LSTMState

D = 6


def twin(model: LSTM) -> nn.LSTM:
    """Return torch's with the same weights."""
    directions = [model.layers] if model.causal else [model.layers, model.backward_layers]
    hidden = model.d_model // len(directions)
    theirs = nn.LSTM(model.d_input, hidden, len(model.layers), batch_first=True, bidirectional=not model.causal)
    for suffix, layers in zip(("", "_reverse"), directions, strict=False):
        for i, layer in enumerate(layers):
            for name, value in (
                ("weight_ih", layer.weight_ih),
                ("weight_hh", layer.weight_hh),
                ("bias_ih", layer.bias),
                ("bias_hh", torch.zeros_like(layer.bias)),
            ):
                getattr(theirs, f"{name}_l{i}{suffix}").data.copy_(value)
    return theirs.to(model.layers[0].bias.dtype)


def shaken(model: LSTM) -> LSTM:
    """Move every parameter, so that no bias is 0."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def by_hand(layer: nn.Module, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple:
    """Zaremba et al. 2014, section 3.1, one position after the other; x (N, D), h and c (hidden,)."""
    (wi, wf, wg, wo), (ui, uf, ug, uo), (bi, bf, bg, bo) = (
        weights.chunk(4) for weights in (layer.weight_ih, layer.weight_hh, layer.bias)
    )
    outputs = []
    for x_t in x:
        i = 1 / (1 + torch.exp(-(wi @ x_t + ui @ h + bi)))
        f = 1 / (1 + torch.exp(-(wf @ x_t + uf @ h + bf)))
        o = 1 / (1 + torch.exp(-(wo @ x_t + uo @ h + bo)))
        c = f * c + i * torch.tanh(wg @ x_t + ug @ h + bg)
        h = o * torch.tanh(c)
        outputs.append(h)
    return torch.stack(outputs), h, c


def test_the_equations_by_hand():
    model = shaken(LSTM(D, 2, d_input=4).double())
    x = torch.randn(3, 7, 4, dtype=torch.float64)
    before = LSTMState(*torch.randn(2, 3, 2, D, dtype=torch.float64), torch.tensor([5, 0, 2]))
    y, state = model(x, before)
    for row in range(3):
        z = x[row]
        for i, layer in enumerate(model.layers):
            z, h, c = by_hand(layer, z, before.h[row, i], before.c[row, i])
            torch.testing.assert_close(state.h[row, i], h)
            torch.testing.assert_close(state.c[row, i], c)
        torch.testing.assert_close(y[row], z)
    assert state.length.tolist() == [12, 7, 9]


def test_it_equals_torch_with_packed_sequences():
    """With gradients; in float32 on the CPU the kernel is another one than in float64."""
    for causal, dtype in itertools.product([True, False], [torch.float32, torch.float64]):
        model = shaken(LSTM(2 * D, 3, d_input=4, causal=causal).to(dtype))
        theirs = twin(model)
        x = torch.randn(4, 9, 4, dtype=dtype, requires_grad=True)
        lengths = torch.tensor([2, 9, 5, 1])
        y, state = model(x, None, lengths)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        expected, (h, c) = theirs(packed)
        expected, _ = pad_packed_sequence(expected, batch_first=True, total_length=9)
        torch.testing.assert_close(y, expected)
        weights = torch.randn_like(y)
        loss, other = (y * weights).sum(), (expected * weights).sum()
        if causal:
            torch.testing.assert_close(state.h, h.transpose(0, 1))
            torch.testing.assert_close(state.c, c.transpose(0, 1))
            assert state.length.tolist() == [2, 9, 5, 1]
            loss, other = loss + (state.h * state.c).sum(), other + (h * c).sum()
        (found,), (wanted,) = (
            torch.autograd.grad(loss, x, retain_graph=True),
            torch.autograd.grad(other, x, retain_graph=True),
        )
        torch.testing.assert_close(found, wanted)
        (found,) = torch.autograd.grad(loss, model.layers[0].weight_hh)
        (wanted,) = torch.autograd.grad(other, theirs.weight_hh_l0)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_padding_keeps_the_cell_to_the_last_bit():
    """However much of it, and however large the numbers."""
    for dtype in [torch.float32, torch.float64]:
        model = LSTM(D, 1).to(dtype)
        before = LSTMState(*(100 * torch.randn(2, 3, 1, D, dtype=dtype)), torch.zeros(3, dtype=torch.long))
        _, after = model(1e3 * torch.randn(3, 500, D, dtype=dtype), before, torch.zeros(3, dtype=torch.long))
        assert torch.equal(after.c, before.c)
        assert torch.equal(after.h, before.h)


@pytest.mark.parametrize("ragged", [False, True])
def test_what_is_remembered_has_at_least_float32(ragged: bool):
    def types(model, x):
        y, state = model(x, None, torch.tensor([3]) if ragged else None)
        z, after = model(x, state)
        assert y.dtype == z.dtype
        return y.dtype, state.h.dtype, state.c.dtype, after.c.dtype

    wide = (torch.float32,) * 3
    with torch.autocast("cpu", torch.bfloat16):
        assert types(LSTM(D, 1), torch.randn(1, 5, D)) == (torch.float32, *wide)
    for dtype in (torch.float16, torch.bfloat16):
        assert types(LSTM(D, 1).to(dtype), torch.randn(1, 5, D, dtype=dtype)) == (dtype, *wide)
        assert LSTM(D, 1).to(dtype).initial_state(1).c.dtype == torch.float32
    assert types(LSTM(D, 1).double(), torch.randn(1, 5, D).double()) == (torch.float64,) * 4


def test_a_new_model_remembers():
    """The forget gates' bias is 1; the other biases 0; matrices within ±1/√hidden."""
    model = LSTM(64, 2, causal=False)
    for layer in [*model.layers, *model.backward_layers]:
        i, f, g, o = layer.bias.chunk(4)
        assert (f == 1).all()
        assert not torch.cat([i, g, o]).any()
        for weight in (layer.weight_ih, layer.weight_hh):
            assert 0.9 / math.sqrt(32) < weight.abs().max() <= 1 / math.sqrt(32)
    assert {name.split(".")[-1] for name in model.state_dict()} == {"weight_ih", "weight_hh", "bias"}


def test_dropout_in_training_only():
    for causal in [True, False]:
        model = LSTM(64, 1, causal=causal, dropout=0.5)
        x = torch.randn(2, 50, 64)
        y, _ = model(x)
        assert (y == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
        assert not torch.equal(model(x)[0], y)
        plain = LSTM(64, 1, causal=causal)
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model.eval()(x)[0], plain(x)[0])


def test_dropout_of_the_input():
    """And what is dropped from the output does not reach the state."""
    model = LSTM(64, 1, dropout=0.5)
    _, one = model(torch.zeros(1, 9, 64))
    _, two = model(torch.zeros(1, 9, 64))
    assert torch.equal(one.h, two.h)
    _, one = model(torch.ones(1, 9, 64))
    _, two = model(torch.ones(1, 9, 64))
    assert not torch.equal(one.h, two.h)


def test_bad_options_are_named():
    for options, words in [
        ({"d_model": 0}, ["d_model=0"]),
        ({"n_layers": 0}, ["n_layers=0"]),
        ({"d_input": 0}, ["d_input=0"]),
        ({"d_model": 5, "causal": False}, ["d_model=5", "causal=False"]),
        ({"dropout": 1.0}, ["dropout=1.0"]),
    ]:
        with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
            LSTM(**{"d_model": D, "n_layers": 1, **options})


def test_what_cudnn_is_given_lies_side_by_side(monkeypatch):
    """On a GPU "rnn: hx is not contiguous" is an error; the CPU does not mind."""
    model, recurrence = LSTM(D, 2), torch.lstm

    def strict(x, start, *rest):
        assert all(t.is_contiguous() for t in start)
        return recurrence(x, start, *rest)

    monkeypatch.setattr(torch, "lstm", strict)
    _, state = model(torch.randn(3, 4, D))
    model(torch.randn(3, 1, D), state)
