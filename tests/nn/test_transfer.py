import copy
import re
from functools import partial

import pytest
import torch

from lit_effattn import sequence
from lit_effattn.attention import (
    HedgehogFeatureMap,
    InfiniteAttention,
    LinearAttention,
    SoftmaxAttention,
    TransformerXLAttention,
    WindowedLinearAttention,
)
from lit_effattn.nn.transfer import Transfer, begin_transfer
from lit_effattn.nn.transformer import Transformer

E, H = 8, 2
WINDOW = partial(SoftmaxAttention, window=5)
GPT2 = partial(InfiniteAttention, mem_len=0, segment_len=4, n_basis=4, widths=(0.2,), short_term="softmax")
KINDS = [partial(LinearAttention, feature_map=HedgehogFeatureMap), partial(WindowedLinearAttention, window=2)]


def models(attention=KINDS, of_teacher=WINDOW, n_layers: int = 2, **options) -> tuple[Transformer, Transformer]:
    """Return a model in training mode and a teacher in float64, with the same weights where both have them."""
    made = partial(Transformer, E, H, n_layers, init="pytorch", **options)
    model, teacher = made(attention=attention, dropout=0.5).double(), made(attention=of_teacher).double()
    model.load_state_dict(teacher.state_dict(), strict=False)
    return model, teacher


def test_the_teachers_activations_flow_and_each_layer_learns_on_its_own_input():
    model, teacher = models()
    students = copy.deepcopy([block.attention for block in model.blocks])
    x, lengths = torch.randn(3, 9, E, dtype=torch.float64), torch.tensor([9, 4, 0])
    expected, _ = teacher(x, None, lengths)
    inputs: list[torch.Tensor] = []
    for block in teacher.blocks:
        block.attention.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
    teacher(x, None, lengths)
    olds = copy.deepcopy([block.attention for block in teacher.blocks])
    for old in olds:
        old._forward_pre_hooks.clear()
    assert begin_transfer(model, teacher) == 2
    y, state = model(x, None, lengths)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    losses = torch.zeros(3, dtype=torch.float64)
    for row, n in enumerate(lengths.tolist()[:2]):
        for student, old, given in zip(students, olds, inputs, strict=False):
            a, b = (attention(given[row : row + 1, :n])[0] for attention in (student, old))
            losses[row] += (a - b).square().mean().div(b.square().mean()).detach()
    torch.testing.assert_close(sequence.losses(state), losses)
    sequence.losses(state).sum().backward()
    learns = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learns == {name for name, _ in model.named_parameters() if ".attention.new." in name}


def test_evaluation_and_the_state_dict_are_of_the_new_attention():
    model, teacher = models()
    alone = copy.deepcopy(model).eval()
    x = torch.randn(2, 9, E, dtype=torch.float64)
    begin_transfer(model, teacher)
    saved = model.state_dict()
    assert saved.keys() == alone.state_dict().keys()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    assert not torch.equal(model.eval()(x)[0], alone(x)[0])
    model.load_state_dict(alone.state_dict())
    torch.testing.assert_close(model(x)[0], alone(x)[0], rtol=0, atol=0)
    assert type(model(x)[1].layers[0]) is type(alone(x)[1].layers[0])


def test_alone_it_carries_both_states_and_gives_the_old_output_without_gradients():
    both = Transfer(LinearAttention(E, H), WINDOW(E, H)).double()
    x = torch.randn(2, 12, E, dtype=torch.float64, requires_grad=True)
    y, whole = both(x)
    assert not y.requires_grad
    assert not any(p.requires_grad for p in both.old.parameters())
    state = None
    for segment in x.split(4, 1):
        _, state = both(segment, state)
    for found, expected in zip(sequence.tensors(state[:2]), sequence.tensors(whole[:2]), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_stream_may_be_split_and_its_rows_reset():
    model, teacher = models()
    begin_transfer(model, teacher)
    x = torch.randn(2, 12, E, dtype=torch.float64)
    whole, _ = model(x)
    state, errors = model.initial_state(2), []
    parts = []
    for segment in x.split(4, 1):
        y, state = model(segment, sequence.detach(state))
        parts.append(y)
        errors.append(sequence.losses(state))
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    reset = model.reset(state, torch.tensor([True, False]))
    y, after = model(x[:, :4], reset)
    torch.testing.assert_close(y[0], whole[0, :4])
    torch.testing.assert_close(sequence.losses(after)[0], errors[0][0])
    assert not torch.isclose(sequence.losses(after)[1], errors[0][1])
    assert model.bounded_by is None


def test_layers_that_do_not_differ_are_left_alone():
    dropping = partial(WINDOW, dropout=0.5)
    model, teacher = models([dropping, KINDS[0]], dropping)
    x = torch.randn(2, 9, E, dtype=torch.float64)
    expected, _ = teacher.eval()(x)
    assert begin_transfer(model, teacher) == 1
    torch.testing.assert_close(model(x)[0], expected, rtol=0, atol=0)
    assert isinstance(model.blocks[0].attention, SoftmaxAttention)
    assert not any(p.requires_grad for p in model.blocks[0].parameters())


def test_a_teacher_whose_state_grows_bounds_nothing():
    model, teacher = models(of_teacher=SoftmaxAttention)
    begin_transfer(model, teacher)
    assert model.bounded_by == "window"
    assert model.eval().bounded_by is None


def test_unsuitable_models_are_rejected():
    for attention, options, words in [
        (WINDOW, {}, "the model has the same attention as the teacher"),
        (KINDS, {"n_layers": 3}, "the model has 2 blocks, but the teacher 3"),
        (LinearAttention, {"causal": False, "of_teacher": SoftmaxAttention}, "needs causal attention"),
        (TransformerXLAttention, {"norm_memory": True, "positions": None}, "so their attentions get different inputs"),
        ([WINDOW, GPT2], {"positions": "auto"}, "adds SinusoidalPositions to its inputs, the teacher no pos"),
    ]:
        model, _ = models(attention, **{**options, "n_layers": 2})
        _, teacher = models(attention, **options)
        with pytest.raises(ValueError, match=re.escape(words)):
            begin_transfer(model, teacher)
