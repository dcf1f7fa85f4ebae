import re
from functools import partial
from itertools import product

import pytest
import torch

from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention, gated_linear_step
from lit_effattn.ops.runtime import cpp_build
from tests.support.gated_linear import DECAYS, RULES, assert_defined, by_position, definition, inputs
from tests.support.kernels import check_operators
from tests.support.tensor_sizes import Largest, largest_in_training

each_rule = pytest.mark.parametrize(("decay", "delta"), RULES)


def assert_close(found, expected, **options) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **options)


@each_rule
def test_equals_the_definition(decay: str, delta: bool):
    for n, chunk_size in ((1, 64), (7, 1), (8, 4), (9, 4), (11, 64)):
        tensors, options = inputs(n, 5, 4, decay, delta, h=1)
        assert_defined(
            gated_linear_attention, tensors, options, lengths=torch.tensor([n, n // 2]), chunk_size=chunk_size
        )


def test_broadcast_decays():
    tensors, options = inputs(7, 3, 4, "none", True)
    for shape in ((2,), (1, 2, 7), (2, 2, 1), (1, 2, 1)):
        options["log_decay"] = -torch.rand(shape, dtype=torch.float64)
        assert_defined(gated_linear_attention, tensors, options, chunk_size=4)


def test_segments_equal_the_whole():
    """The state of one segment, whose last chunk is partial, starts the next."""
    for decay, delta in RULES:
        (q, k, v, state), options = inputs(29, 5, 4, decay, delta)
        expected = definition(q, k, v, state, **options)
        outputs = []
        for part in (slice(0, 11), slice(11, 12), slice(12, 29)):
            of_part = {x: t if t is None or t.dim() == 1 else t[:, :, part] for x, t in options.items()}
            y, state = gated_linear_attention(*(t[:, :, part] for t in (q, k, v)), state, **of_part, chunk_size=8)
            outputs.append(y)
        assert_close((torch.cat(outputs, 2), state), expected)


def test_a_step_equals_the_definition():
    for decay, delta in RULES:
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
def test_the_plain_form_has_second_derivatives(decay: str, delta: bool):
    tensors, options = inputs(4, 2, 2, decay, delta, h=1)
    options = {x: t for x, t in options.items() if t is not None}
    arguments = [t.requires_grad_() for t in (*tensors, *options.values())]
    plain = by_position(gated_linear_attention, options, lengths=torch.tensor([4, 2]), chunk_size=3)
    assert torch.autograd.gradgradcheck(plain, arguments, fast_mode=True)


@pytest.mark.usefixtures("in_float32")
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_strong_decays(decay: str):
    """Over 70 positions in chunks of 64, whose logarithms of decays add up to far less than -88, float32's range."""
    for delta, strongest in product((False, True), (5, 20, torch.inf)):
        tensors, options = inputs(70, 5, 4, decay, delta, b=1, h=1, strongest=5, dtype=torch.float32)
        if strongest > 5:  # some, else next to nothing would be left to compare
            some = torch.rand(options["log_decay"].shape) < 0.2
            options["log_decay"] = options["log_decay"].masked_fill(some, -strongest)
        assert_defined(gated_linear_attention, tensors, options)


@pytest.mark.usefixtures("in_float32")
def test_equal_keys_under_the_delta_rule():
    """The hardest triangular system: every key overlaps with every earlier one."""
    tensors, options = inputs(70, 5, 4, "head", True, b=1, h=1, strongest=0.01, dtype=torch.float32)
    tensors[1] = tensors[1][:, :, :1].expand_as(tensors[1])
    for strength in (1, 2):
        options["beta"] = torch.full_like(options["beta"], strength)
        assert_defined(gated_linear_attention, tensors, options, magnified=20)


@pytest.mark.usefixtures("in_float32")
def test_zero_keys_strengths_and_decays_have_finite_gradients():
    tensors, options = inputs(40, 5, 4, "channel", True, dtype=torch.float32)
    for t in (tensors[1], options["beta"], options["log_decay"]):
        t[:, :, 10:20] = 0
    assert_defined(gated_linear_attention, tensors, options)


@pytest.mark.parametrize(("decay", "delta"), [("none", False), ("fixed", False), ("channel", True)])
def test_the_operators_are_what_torch_expects(decay: str, delta: bool):
    if (obstacle := cpp_build.obstacle("gated_linear")) is not None:
        pytest.skip(obstacle)
    (q, k, v, state), options = inputs(5, 4, 3, decay, delta, dtype=torch.float32)
    log_decay = options["log_decay"]
    if log_decay is not None:
        log_decay = {1: log_decay.view(-1, 1, 1), 3: log_decay[..., None]}.get(log_decay.dim(), log_decay)
        log_decay = log_decay.expand(2, 2, 5, -1).requires_grad_()
    tensors = [t.requires_grad_() for t in (q, k, v, state)]
    arguments = (*tensors, log_decay, options["beta"], torch.tensor([5, 2]), 4, "cpp")
    check_operators("gated_linear", arguments, lambda given, out: (*out, *given))


def test_nothing_of_size_n_squared_nor_n_d_d_is_made():
    n, d, chunk_size = 1024, 16, 32
    for decay in ("fixed", "channel"):
        tensors, options = inputs(n, d, d, decay, True, b=1, h=1)
        by = partial(gated_linear_attention, **options, chunk_size=chunk_size)
        assert largest_in_training(lambda *a, by=by: by(*a)[0], *tensors) <= 2 * n * chunk_size  # far below n², n d²


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
