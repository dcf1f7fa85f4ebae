import re

import pytest
import torch

from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention, gated_linear_step, gated_linear_weights
from tests.support.gated_linear import DECAYS, RULES, definition, inputs
from tests.support.tensor_sizes import Largest

each_rule = pytest.mark.parametrize(("decay", "delta"), RULES)


def assert_close(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@each_rule
def test_equals_the_definition(decay: str, delta: bool):
    tensors, options = inputs(11, 5, 4, decay, delta)
    assert_close(gated_linear_attention(*tensors, **options), definition(*tensors, **options))


@pytest.mark.parametrize("shape", [(1, 2, 7), (2, 2, 1), (1, 2, 1)])
def test_broadcast_decays(shape: tuple[int, ...]):
    tensors, options = inputs(7, 3, 4, "none", True)
    options["log_decay"] = -torch.rand(shape, dtype=torch.float64)
    assert_close(gated_linear_attention(*tensors, **options), definition(*tensors, **options))


@each_rule
def test_padding_leaves_the_state(decay: str, delta: bool):
    tensors, options = inputs(9, 3, 4, decay, delta, b=3)
    lengths = torch.tensor([9, 5, 0])
    found = gated_linear_attention(*tensors, **options, lengths=lengths)
    assert_close(found, definition(*tensors, **options, lengths=lengths))
    assert torch.equal(found[1][2], tensors[3][2])


@each_rule
def test_a_step_equals_the_definition(decay: str, delta: bool):
    tensors, options = inputs(1, 3, 4, decay, delta)
    lengths, state = torch.tensor([1, 0]), tensors[3]
    before, expected = state.clone(), definition(*tensors, **options, lengths=lengths)
    assert_close(gated_linear_step(*tensors, **options, lengths=lengths), expected)
    assert torch.equal(state, before)
    y, after = gated_linear_step(*tensors, **options, lengths=lengths, in_place=True)
    assert after is state
    assert_close((y, after), expected)


def test_a_step_in_place_allocates_nothing_of_the_states_size():
    tensors, options = inputs(1, 16, 16, "channel", True, b=1, h=1)
    with Largest() as largest:
        gated_linear_step(*tensors, **options, in_place=True)
    assert largest.elements < 16 * 16


@each_rule
def test_weights_are_those_of_the_values(decay: str, delta: bool):
    (q, k, v, state), options = inputs(6, 3, 4, decay, delta)
    options["lengths"] = torch.tensor([6, 4])
    y, _ = definition(q, k, v, state, **options)
    weights = gated_linear_weights(q, k, state, **options)
    torch.testing.assert_close(weights[..., :4] + weights[..., 4:] @ v, y)
    assert torch.equal(weights[..., 4:], gated_linear_weights(q, k, **options))
    assert (weights[..., 4:].triu(1) == 0).all()


@each_rule
def test_gradients(decay: str, delta: bool):
    """Of the output and of the last state, with respect to everything; and the gradients of these gradients."""
    tensors, options = inputs(4, 2, 2, decay, delta, h=1)
    names = [name for name, t in options.items() if t is not None]
    arguments = [t.requires_grad_() for t in (*tensors, *(options[name] for name in names))]

    def function(*arguments):
        return gated_linear_attention(
            *arguments[:4], **dict(zip(names, arguments[4:], strict=True)), lengths=torch.tensor([4, 2])
        )

    assert torch.autograd.gradcheck(function, arguments)
    assert torch.autograd.gradgradcheck(function, arguments)


def test_results_are_in_vs_type_and_sums_in_the_states():
    (q, k, v, state), options = inputs(5, 3, 4, "head", True, dtype=torch.float32)
    halves = [t.bfloat16() for t in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        y, after = gated_linear_attention(*halves, state, **options)
    assert (y.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    exact = gated_linear_attention(*(t.float() for t in halves), state, **options)
    assert torch.equal(y, exact[0].bfloat16())
    assert torch.equal(after, exact[1])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"k": torch.zeros(2, 2, 4, 3)}, "k has shape (2, 2, 4, 3); with q of (2, 2, 5, 3) it should be (2, 2, 5, 3)"),
        ({"v": torch.zeros(2, 2, 4, 4)}, "v has shape"),
        ({"state": torch.zeros(2, 2, 4, 3)}, "state has shape (2, 2, 4, 3); with q of (2, 2, 5, 3) it should be"),
        ({"log_decay": torch.zeros(2, 5)}, "log_decay has shape (2, 5)"),
        ({"beta": torch.zeros(2, 2, 5, 1)}, "beta has shape"),
        ({"lengths": torch.tensor([5])}, "lengths has shape (1,)"),
        ({"state": torch.zeros(2, 2, 3, 4).half()}, "state is torch.float16; sums must be torch.float32 or more"),
    ],
)
def test_errors(changed, words: str):
    tensors, options = inputs(5, 3, 4, "head", True)
    arguments = dict(zip(("q", "k", "v", "state"), tensors, strict=True)) | options | changed
    with pytest.raises(ValueError, match=re.escape(words)):
        gated_linear_attention(**arguments)


def test_a_step_takes_one_position():
    tensors, _ = inputs(2, 3, 4, DECAYS[0], False)
    with pytest.raises(ValueError, match="q has 2 positions; a step takes one"):
        gated_linear_step(*tensors)
