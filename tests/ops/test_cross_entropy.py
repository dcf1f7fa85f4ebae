"""The cross-entropy in chunks of positions, against the whole matrix of logits in float64."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_effattn.ops.cross_entropy import linear_cross_entropy
from tests.support.tensor_sizes import Largest

M, E, V = 23, 6, 17


def inputs(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[list[Tensor | None], Tensor, Tensor]:
    """Return h, W and b, which need gradients; targets; and the gradients of the losses, some of them 0."""
    generator = torch.Generator().manual_seed(0)
    h, weight, b = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((M, E), (V, E), (V,)))
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in (h, weight, b if bias else None)]
    upstream = torch.randn(M, generator=generator, dtype=torch.float64) * (torch.arange(M) % 4 != 0)
    return leaves, torch.randint(V, (M,), generator=generator), upstream


def whole(h: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, epsilon: float) -> Tensor:
    return F.cross_entropy(F.linear(h, weight, bias), target, reduction="none", label_smoothing=epsilon)


def gradients(losses: Tensor, leaves: list[Tensor | None], upstream: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(losses, [x for x in leaves if x is not None], upstream.to(losses.dtype)))


def test_losses_and_gradients_are_those_of_the_whole_matrix():
    for epsilon, bias, chunk in itertools.product([0.0, 0.1], [True, False], [1, V, 7 * V + 3, M * V, 2**24]):
        leaves, target, upstream = inputs(bias=bias)
        losses = linear_cross_entropy(*leaves, target, epsilon, chunk)
        expected = whole(*leaves, target, epsilon)
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(
            gradients(losses, leaves, upstream), gradients(expected, leaves, upstream), rtol=0, atol=1e-13
        )


def test_logits_of_any_size_are_safe():
    """exp of 1e4 is infinite, and of the others 0."""
    h, weight, target = torch.eye(2) * 1e4, torch.eye(2, requires_grad=True), torch.tensor([0, 0])
    losses = linear_cross_entropy(h, weight, None, target)
    assert losses.tolist() == [0, 1e4]
    (of_weight,) = torch.autograd.grad(losses.sum(), weight)
    assert of_weight.tolist() == [[0, -1e4], [0, 1e4]]


def test_half_precision_accumulates_in_float32():
    """Errors are those of the whole matrix in bfloat16; the sum over 23 chunks adds none."""
    for autocast in [True, False]:
        leaves, target, upstream = inputs(torch.float32 if autocast else torch.bfloat16)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        losses64 = whole(*exact, target, 0.1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = linear_cross_entropy(*leaves, target, 0.1, V)
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses.double(), losses64, rtol=0, atol=0.05)
        found = gradients(losses, leaves, upstream)
        assert [x.dtype for x in found] == [x.dtype for x in leaves]
        for x, y in zip(found, gradients(losses64, exact, upstream), strict=True):
            assert (x - y).norm() < 0.02 * y.norm()


def test_no_matrix_of_all_logits_is_made():
    leaves, target, upstream = inputs()
    for function, most in ((lambda: linear_cross_entropy(*leaves, target, 0.1, 4 * V), M * E), (None, M * V)):
        with Largest() as largest:
            losses = whole(*leaves, target, 0.1) if function is None else function()
            losses.backward(upstream)
        assert largest.elements == most


def test_gradients_that_are_not_needed_do_not_harm():
    (h, weight, bias), target, _ = inputs()
    linear_cross_entropy(h.detach(), weight, bias, target).sum().backward()
    assert h.grad is None
    with torch.no_grad():
        assert not linear_cross_entropy(h, weight, bias, target).requires_grad
