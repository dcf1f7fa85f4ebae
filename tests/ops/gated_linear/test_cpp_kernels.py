"""The kernels in C++ against the definition, for each kind of vectors that this machine has."""

import warnings
from functools import partial

import pytest
import torch

from lit_effattn.ops.gated_linear import cpp_kernels
from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention
from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.selection import KERNELS
from tests.support.cpp_kernels import each_kind_of_vectors, needs_kernels
from tests.support.gated_linear import RULES, assert_defined, by_position, inputs
from tests.support.kernels import gradients

pytestmark = [needs_kernels(cpp_kernels), pytest.mark.usefixtures("no_notices")]
each_rule = pytest.mark.parametrize(("decay", "delta"), RULES)
vectors = each_kind_of_vectors(cpp_kernels)

C, GROUP = 16, 64  # positions of a chunk, and for each state that the backward pass keeps


def single(*of, **options):
    return inputs(*of, **options, dtype=torch.float32)


@pytest.mark.usefixtures("vectors")
@each_rule
@pytest.mark.parametrize(("n", "d", "dv"), [(1, 16, 16), (C, 3, 5), (GROUP + C + 3, 33, 20)])
def test_equal_to_the_definition(n: int, d: int, dv: int, decay: str, delta: bool):
    assert_defined(gated_linear_attention, *single(n, d, dv, decay, delta, b=1, h=1), rtol=5e-6)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("vectors")
@each_rule
@pytest.mark.parametrize("n", [C - 1, C + 1, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 5])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (24, 160), (128, 40)])
def test_equal_to_the_definition_of_any_size(n: int, d: int, dv: int, decay: str, delta: bool):
    lengths = torch.tensor([n, n // 2])
    rtol = 1e-4 if decay == "fixed" else 1e-5  # its gradient is a sum over all positions, which may nearly cancel
    assert_defined(gated_linear_attention, *single(n, d, dv, decay, delta), rtol=rtol, lengths=lengths)


@pytest.mark.usefixtures("vectors")
@each_rule
def test_padding_is_nothing(decay: str, delta: bool):
    lengths = torch.tensor([0, 1, C, C + 3])
    tensors, options = single(2 * C + 3, 4, 4, decay, delta, b=4, h=1)
    assert_defined(gated_linear_attention, tensors, options, rtol=5e-6, lengths=lengths)
    options = {name: t for name, t in options.items() if t is not None}
    arguments = [t.requires_grad_() for t in (*tensors, *options.values())]
    found = by_position(gated_linear_attention, options, lengths=lengths)(*arguments)
    assert torch.equal(found[1][0], tensors[3][0])
    for g, t in zip(gradients(found, arguments)[1:], arguments[1:], strict=True):
        for row, length in enumerate(lengths):
            assert t.dim() == 1 or t is tensors[3] or (g[row, :, length:] == 0).all()


@each_rule
def test_no_output_depends_on_what_comes_after(decay: str, delta: bool):
    (q, k, v, state), options = single(3 * C, 20, 12, decay, delta)
    before = gated_linear_attention(q, k, v, state, **options)[0]
    for t in (q, k, v, *options.values()):
        if t is not None and t.dim() > 1:
            t[:, :, C + 5 :] *= 2
    after = gated_linear_attention(q, k, v, state, **options)[0]
    assert torch.equal(before[:, :, : C + 5], after[:, :, : C + 5])
    assert not torch.equal(before[:, :, C + 5], after[:, :, C + 5])


@each_rule
def test_any_strides(decay: str, delta: bool):
    tensors, options = single(40, 12, 8, decay, delta)
    options = {name: t for name, t in options.items() if t is not None}
    function = by_position(gated_linear_attention, options)
    arguments = [t.requires_grad_() for t in (*tensors, *options.values())]
    strided = [t.detach().mT.contiguous().mT if t.dim() > 1 else t.detach() for t in arguments]
    assert strided[0].stride(-1) != 1
    found, expected = (function(*a) for a in ([t.requires_grad_() for t in strided], arguments))
    pairs = zip([*found, *gradients(found, strided)], [*expected, *gradients(expected, arguments)], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    one = [t.detach()[:, :1].expand_as(t).requires_grad_() for t in tensors[:3]]  # heads share them
    y, _ = function(*one, *arguments[3:])
    y.sum().backward()  # the gradient is one number, expanded
    assert all(t.grad.isfinite().all() for t in one)


def test_threads_share_the_rows():
    tensors, options = single(50, 16, 16, "channel", True, b=3, h=3)
    arguments = [t.requires_grad_() for t in (*tensors, *options.values())]
    function = by_position(gated_linear_attention, options)
    one = gradients(function(*arguments), arguments)
    torch.set_num_threads(4)  # the tests' one is set anew before each
    four = gradients(function(*arguments), arguments)
    assert all(torch.equal(a, b) for a, b in zip(one, four, strict=True))


def test_what_is_infinite_or_not_a_number_is_not_hidden():
    for value in (torch.nan, torch.inf):
        (q, k, v, state), options = single(40, 8, 8, "head", True)
        v[:, :, 20] = value
        y, _ = gated_linear_attention(q, k, v, state, **options)
        assert not y[:, :, 20:].isfinite().any()
        assert y[:, :, :C].isfinite().all()  # within a chunk products meet it, times 0


def test_without_a_compiler_the_form_in_pytorch_is_used_and_said_once(monkeypatch: pytest.MonkeyPatch):
    tensors, options = single(40, 8, 8, "head", True)
    expected = gated_linear_attention(*tensors, **options)[0]
    monkeypatch.setattr(cpp_build, "obstacle", lambda name: "there is no C++ compiler")
    monkeypatch.setattr(cpp_kernels, "forward", None)
    with pytest.warns(UserWarning, match=r"slower than its kernels.*there is no C\+\+ compiler.*=plain"):
        torch.testing.assert_close(gated_linear_attention(*tensors, **options)[0], expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gated_linear_attention(*tensors, **options)
    monkeypatch.setenv(KERNELS, "c++")
    with pytest.raises(ValueError, match="there is no C"):
        gated_linear_attention(*tensors, **options)


@pytest.mark.parametrize("form", ["plain", "c++"])
def test_forms_are_forced(form: str, monkeypatch: pytest.MonkeyPatch):
    called = []
    for name in ("forward", "backward"):
        right = getattr(cpp_kernels, name)
        monkeypatch.setattr(cpp_kernels, name, lambda *a, name=name, right=right: called.append(name) or right(*a))
    monkeypatch.setenv(KERNELS, form)
    tensors, options = single(20, 8, 8, "head", True)
    gated_linear_attention(*(t.requires_grad_() for t in tensors), **options)[0].sum().backward()
    assert called == ([] if form == "plain" else ["forward", "backward"])
    double, options = inputs(20, 8, 8, "head", True)
    if form == "c++":
        with pytest.raises(ValueError, match=r"torch\.float64 is not one of their types"):
            gated_linear_attention(*double, **options)


def test_torch_compile_sees_one_operator():
    tensors, options = single(20, 8, 8, "channel", True)
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    function = partial(gated_linear_attention, **options)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for a, b in zip(compiled(*tensors), function(*tensors), strict=True):
        assert torch.equal(a, b)
    (targets,) = graphs
    assert targets.count(torch.ops.lit_effattn.gated_linear.default) == 1
    assert not any("bmm" in str(target) or "matmul" in str(target) for target in targets)
