"""Performer's kernels in C++ against the definition, for each kind of vectors that this machine has."""

import warnings
from functools import partial

import pytest
import torch

from lit_effattn.attention import PerformerAttention
from lit_effattn.ops.favor import cpp_kernels
from lit_effattn.ops.favor.dispatch import positive_favor, use_kernels
from lit_effattn.ops.favor.pytorch import causal_favor, log_offset
from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.selection import KERNELS
from tests.support import kernels
from tests.support.cpp_kernels import each_kind_of_vectors, needs_kernels
from tests.support.kernels import favor_definition, positive_definition, summed_keys
from tests.support.tensor_sizes import Made

pytestmark = [needs_kernels(cpp_kernels), pytest.mark.usefixtures("no_notices")]
assert_alike = partial(kernels.assert_alike, rtol=3e-6)

B, H, C = 2, 2, 16  # C: positions of a chunk


vectors = each_kind_of_vectors(cpp_kernels)


def kernel(q, k, v, omega, s, z, m, lengths=None):
    return positive_favor(q, k, v, omega, s, z, m, lengths, scale=q.size(-1) ** -0.25)


def inputs(n: int, e: int = 12, f: int = 20, d: int = 9, *, b: int = B, h: int = H, louder=None, seen: bool = True):
    """Queries, keys and values, with the strides that `Attention` gives them, directions, and sums of keys before.

    `louder`: by how much keys are multiplied, (N,). Long keys have small features: those after them rise far.
    """
    q, k, v = (torch.randn(b, n, h, width) for width in (e, e, d))
    k = k if louder is None else k * louder[:, None, None]
    omega = torch.randn(h, f, e)
    s, z, m = torch.zeros(b, h, f, d), torch.zeros(b, h, f), torch.full((b, h, f), -torch.inf)
    if seen:
        s, z, m = summed_keys(torch.randn(b, h, 3, f), torch.randn(b, h, 3, d))
    heads = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]
    return [*heads, omega, s.requires_grad_(), z.requires_grad_(), m]


SHAPES = [  # n, e, f, d, whether keys were seen before
    (1, 16, 16, 16, True),
    (C - 1, 3, 5, 7, True),
    (C, 16, 48, 16, False),
    (C + 1, 1, 2, 1, True),
    (2 * C, 33, 100, 20, True),
    (3 * C + 5, 20, 41, 50, False),
    (20, 160, 24, 160, True),  # wider than on CUDA
    (100, 64, 267, 64, True),
]


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(("n", "e", "f", "d", "seen"), SHAPES)
def test_equal_to_the_definition(n: int, e: int, f: int, d: int, seen: bool):
    assert_alike(kernel, positive_definition, inputs(n, e, f, d, seen=seen))


def with_offset(q, k, v, omega, s, z, offset, m):
    return causal_favor(q, k, v, omega, offset, s, z, m)


def of_offset(q, k, v, omega, s, z, offset, m):
    valid = torch.ones(B, 1, k.size(2), dtype=torch.bool)
    return favor_definition(q @ omega.mT, k @ omega.mT + offset[..., None], v, s, z, m, valid)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("at", [1, 7, C - 1, C, C + 1])
def test_a_key_that_rises_at_any_place_of_a_chunk(at: int):
    *tensors, m = inputs(2 * C)
    offset = torch.randn(B, H, 2 * C) + 100 * (torch.arange(2 * C) == at)
    assert_alike(with_offset, of_offset, [*tensors, offset.requires_grad_(), m], rtol=3e-5)


def loud(n: int, first: int, last: int, by: float = 12.0) -> torch.Tensor:
    return torch.where((torch.arange(n) >= first) & (torch.arange(n) < last), by, 1.0)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(
    ("n", "first", "last", "seen"),
    [
        (C, 0, 5, False),  # within the first chunk
        (C + 3, 0, C, False),  # at a border
        (3 * C, C + 3, 2 * C + 7, False),  # later: nothing rises above those before
        (50, 0, 20, False),
    ],
)
def test_keys_that_rise_far(n: int, first: int, last: int, seen: bool):
    assert_alike(kernel, positive_definition, inputs(n, louder=loud(n, first, last), seen=seen), rtol=3e-5)


@pytest.mark.usefixtures("vectors")
def test_keys_that_rise_far_above_those_before_the_sequence():
    tensors = inputs(2 * C)
    tensors[6][:, 1] -= 200.0  # as if they had been very long
    assert_alike(kernel, positive_definition, tensors)


@pytest.mark.usefixtures("vectors")
def test_keys_that_rise_again_and_again():
    """Each is shorter than the one before: there are as many chunks as positions."""
    assert_alike(kernel, positive_definition, inputs(30, seen=False, louder=torch.linspace(45, 1, 30)), rtol=3e-4)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("length", [0, 1, C, C + 3])
@pytest.mark.parametrize("seen", [False, True])
def test_padding_is_nothing(length: int, seen: bool):
    n = 2 * C + 3
    lengths = torch.tensor([n, length])
    tensors = inputs(n, seen=seen)
    with torch.no_grad():
        tensors[1][1, :, length:] = torch.nan  # whatever stands there
        exact = [t.detach().nan_to_num(neginf=-torch.inf).requires_grad_(t.requires_grad) for t in tensors]
    found = kernel(*tensors, lengths)
    assert_alike(kernel, positive_definition, exact, lengths)
    assert (found[0][1, :, length:] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(found, kernel(*exact, lengths), strict=True))
    _, g_k, g_v = torch.autograd.grad(found[0].sum() + found[1].sum() + found[2].sum(), tensors[:3])
    assert (g_k[1, :, length:] == 0).all()
    assert (g_v[1, :, length:] == 0).all()
    assert_alike(kernel, positive_definition, inputs(n, seen=seen), lengths.flip(0))
    if length == 0 and not seen:
        assert (found[0][1] == 0).all()
        assert (found[3][1] == -torch.inf).all()


def test_what_is_not_there_may_stand_anywhere():
    q, k, v, omega, s, z, m = (t.detach() for t in inputs(3 * C, seen=False))
    offset = log_offset(k, omega.size(1)) - 300
    there = torch.ones(B, 1, 3 * C, dtype=torch.bool)
    there[:, :, [0, 1, 4, C, C + 1, 2 * C - 1]] = False
    out, *sums = causal_favor(q, k, v, omega, offset.masked_fill(~there, -torch.inf), s, z, m)
    assert (out[:, :, :2] == 0).all()
    exact = [t.double() for t in (q @ omega.mT, k @ omega.mT + offset[..., None], v, s, z, m)]
    expected = favor_definition(*exact, there)
    for a, b in zip((out, *sums), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("louder", [None, loud(3 * C, 0, C + 2)])
def test_no_output_depends_on_what_comes_after(louder):
    q, k, v, *others = (t.detach() for t in inputs(3 * C, louder=louder, seen=False))
    before = kernel(q, k, v, *others)[0]
    for t in (0, 1, C - 1, C, C + 2, C + 5):
        for factor in (0.0, 0.9, 100.0):  # none as long: it rises; all as long: nothing does
            changed = [x.clone() for x in (q, k, v)]
            for x in changed:
                x[:, :, t:] *= factor
            after = kernel(*changed, *others)[0]
            assert torch.equal(before[:, :, :t], after[:, :, :t])
            assert not torch.equal(before[:, :, t], after[:, :, t])


def test_any_strides_and_broadcast_gradients():
    tensors = [t.detach() for t in inputs(40, b=3)]
    expected = kernel(*tensors)[0]
    by_column = [t.mT.contiguous().mT for t in tensors[:5]]
    assert by_column[0].stride(-1) != 1
    torch.testing.assert_close(kernel(*by_column, *tensors[5:])[0], expected)
    one = [t[:, :1].expand_as(t).requires_grad_() for t in tensors[:3]]
    out = kernel(*one, *tensors[3:])[0]
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), one))  # the gradient is one number, expanded


def test_threads_share_the_rows():
    tensors = inputs(50, b=3, h=3)
    one = kernels.gradients(kernel(*tensors), tensors)
    torch.set_num_threads(4)  # the tests' one is set anew before each
    assert all(torch.equal(a, b) for a, b in zip(one, kernels.gradients(kernel(*tensors), tensors), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype):
    q, k, v, *others = (t.detach() for t in inputs(70))
    halves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    full = [t.detach().float().requires_grad_() for t in halves]
    out, expected = kernel(*halves, *others)[0], kernel(*full, *others)[0]
    assert torch.equal(out, expected.to(dtype))
    g = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, halves, g), torch.autograd.grad(expected, full, g.float()), strict=True):
        assert torch.equal(a, b.to(dtype))


@pytest.mark.parametrize("which", [0, 1, 2], ids="qkv")
def test_what_is_infinite_or_not_a_number_is_not_hidden(which: int):
    for value in (torch.nan, torch.inf):
        tensors = [t.detach() for t in inputs(3 * C)]
        tensors[which][0, :, 20] = value
        out = kernel(*tensors)[0]
        assert (which == 1 and value == torch.inf) or not out[0, :, 20].isfinite().any()
        assert out[0, :, :C].isfinite().all()  # within a chunk products meet it, times 0
        assert out[1].isfinite().all()


def test_little_is_made_beside_outputs_and_gradients():
    """No features of all positions, though there are more of them than dimensions."""
    n, e, f, d = 2048, 8, 32, 16
    q, k, v, omega, *sums = inputs(n, e, f, d, b=1, h=1)
    with Made() as forward:
        out = kernel(q, k, v, omega, *sums)[0]
    weights = torch.rand_like(out)
    with Made() as backward:
        torch.autograd.grad(out, (q, k, v), weights)
    assert forward.large(f * d) == [n * d]  # the output
    assert backward.large(f * d) == [n * e, n * e, n * d]  # gradients of q, k and v


def test_the_operators_are_what_torch_expects():
    arguments = *inputs(5), torch.tensor([5, 2]), 0.5
    kernels.check_operators(
        "positive_favor", arguments, lambda given, out: (*out[:3], *given[:-1], out[0], *out[4:], given[-1])
    )
    kernels.assert_second_derivative_is_refused(kernel, inputs(5), "plain_causal_favor has")


# ------------------------------------------------------------------------------------------------------- the dispatch


def test_chosen_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    single, double = torch.zeros(1, 1, 1, 300), torch.zeros(1, 1, 1, 300, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert use_kernels(single, single, 8)
        assert not use_kernels(double, double, 8)
        monkeypatch.setenv(KERNELS, "plain")
        assert not use_kernels(single, single, 8)


def test_without_a_compiler_the_form_in_pytorch_is_used(monkeypatch: pytest.MonkeyPatch):
    q, k, v, omega, *sums = (t.detach() for t in inputs(40))
    given = q, k, v, omega, log_offset(k, omega.size(1)), *sums
    expected = causal_favor(*given)[0]
    monkeypatch.setattr(cpp_build, "obstacle", lambda name: "there is no C++ compiler")
    monkeypatch.setattr(cpp_kernels, "forward", None)
    with pytest.warns(UserWarning, match="slower than its kernels"):
        torch.testing.assert_close(causal_favor(*given)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
def test_the_attention_is_the_same_through_them(features: str, monkeypatch: pytest.MonkeyPatch):
    called = []
    forward = cpp_kernels.forward
    monkeypatch.setattr(cpp_kernels, "forward", lambda *a: called.append(a) or forward(*a))
    attention = PerformerAttention(8, 2, features=features, n_features=6)
    kernels.assert_same_through("c++", attention, 40, called, monkeypatch)
