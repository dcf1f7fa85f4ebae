"""Linear attention's kernels in C++ against the definition, for each kind of vectors that this machine has."""

import re
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from lit_effattn.attention import EluFeatureMap, LinearAttention, ReluFeatureMap
from lit_effattn.ops.linear import cpp_kernels
from lit_effattn.ops.linear.dispatch import elu_linear_attention, use_kernels
from lit_effattn.ops.linear.pytorch import causal_linear_attention
from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.selection import KERNELS
from tests.support import kernels
from tests.support.cpp_kernels import HAS, each_kind_of_vectors, needs_kernels
from tests.support.kernels import elu_definition, elu_features, linear_definition
from tests.support.tensor_sizes import Made

pytestmark = [needs_kernels(cpp_kernels), pytest.mark.usefixtures("no_notices")]
assert_alike = partial(kernels.assert_alike, rtol=2e-6)

C = 16  # positions of a chunk


vectors = each_kind_of_vectors(cpp_kernels)


def inputs(n: int, f: int, d: int, *, b: int = 2, h: int = 2, positive: bool = False) -> list[torch.Tensor]:
    """Queries, keys and values, with the strides that `Attention` gives them, and sums of some keys before."""
    q, k, v = (1.5 * torch.randn(b, n, h, width).transpose(1, 2) for width in (f, f, d))
    if positive:
        q, k = elu_features(q), elu_features(k)
    before = elu_features(torch.randn(b, h, 3, f))
    return [t.requires_grad_() for t in (q, k, v, before.mT @ torch.randn(b, h, 3, d), before.sum(2))]


SHAPES = [
    (1, 16, 16),
    (C - 1, 3, 5),
    (C, 64, 64),
    (C + 1, 2, 1),
    (2 * C, 33, 20),
    (3 * C + 5, 24, 160),  # wider than on CUDA
    (150, 64, 32),
]


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(("n", "f", "d"), SHAPES)
def test_equal_to_the_definition(n: int, f: int, d: int):
    """With any features, and with the feature map inside."""
    assert_alike(causal_linear_attention, linear_definition, inputs(n, f, d, positive=True))
    assert_alike(elu_linear_attention, elu_definition, inputs(n, f, d))


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("length", [0, 1, C, C + 3])
def test_padding_is_nothing(length: int):
    n = 2 * C + 3
    lengths = torch.tensor([n, length])
    tensors = inputs(n, 8, 8)
    for rows in (lengths, lengths.flip(0)):
        assert_alike(elu_linear_attention, elu_definition, tensors, rows)
    out, s, z = elu_linear_attention(*tensors, lengths)
    assert (out[1, :, length:] == 0).all()
    _, g_k, *_ = torch.autograd.grad(out.sum() + s.sum() + z.sum(), tensors)
    assert (g_k[1, :, length:] == 0).all()


@pytest.mark.usefixtures("vectors")
def test_the_feature_map_over_its_whole_range():
    x = torch.cat([torch.linspace(-100, 20, 997), torch.tensor([-torch.inf, -0.0, 0.0, 1e30])])
    k = x[None, None, None]  # one position, whose sum is φ(k)
    zero = torch.zeros_like(k)
    _, _, z = elu_linear_attention(k, k, zero[..., :1], zero[0, ..., None], zero[0])
    torch.testing.assert_close(z.flatten().double(), elu_features(x.double()), rtol=3e-7, atol=2e-38)
    _, _, z = elu_linear_attention(k * torch.nan, k * torch.nan, zero[..., :1], zero[0, ..., None], zero[0])
    assert z.isnan().all()


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("eps", [0, 0.5])
def test_eps_where_little_is_seen(eps: float):
    q, k, v, s, z = inputs(2 * C + 5, 8, 8, positive=True)
    few = [q, k.detach().mul(1e-2).requires_grad_(), v, *(torch.zeros_like(t, requires_grad=True) for t in (s, z))]
    assert_alike(partial(causal_linear_attention, eps=eps), partial(linear_definition, eps=eps), few)
    few[1] = few[1].detach().log().requires_grad_()  # φ(log x) = x below 1
    assert_alike(partial(elu_linear_attention, eps=eps), partial(elu_definition, eps=eps), few)


@pytest.mark.parametrize("elu", [False, True])
def test_no_output_depends_on_what_comes_after(elu: bool):
    function = elu_linear_attention if elu else causal_linear_attention
    q, k, v, s, z = (t.detach() for t in inputs(3 * C, 20, 12, positive=not elu))
    before = function(q, k, v, s, z)[0]
    for t in (q, k, v):
        t[:, :, C + 5 :] += 1
    after = function(q, k, v, s, z)[0]
    assert torch.equal(before[:, :, : C + 5], after[:, :, : C + 5])
    assert not torch.equal(before[:, :, C + 5], after[:, :, C + 5])


def test_any_strides_and_broadcast_gradients():
    q, k, v, s, z = (t.detach() for t in inputs(40, 12, 12, b=3))
    expected = elu_linear_attention(q, k, v, s, z)[0]
    by_column = [t.mT.contiguous().mT for t in (q, k, v)]
    assert by_column[0].stride(-1) != 1
    torch.testing.assert_close(elu_linear_attention(*by_column, s, z)[0], expected)
    one = [t[:, :1].expand_as(t).requires_grad_() for t in (q, k, v)]
    out = elu_linear_attention(*one, s, z)[0]
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), one))  # the gradient is one number, expanded
    in_products = causal_linear_attention(elu_features(by_column[0]), elu_features(by_column[1]), by_column[2], s, z)[0]
    torch.testing.assert_close(in_products, expected, rtol=1e-5, atol=1e-5)


def test_threads_share_the_rows():
    tensors = inputs(50, 16, 16, b=3, h=3)
    one = kernels.gradients(elu_linear_attention(*tensors), tensors)
    torch.set_num_threads(4)  # the tests' one is set anew before each
    four = kernels.gradients(elu_linear_attention(*tensors), tensors)
    assert all(torch.equal(a, b) for a, b in zip(one, four, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype):
    q, k, v, s, z = (t.detach() for t in inputs(70, 16, 16))
    halves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    full = [t.detach().float().requires_grad_() for t in halves]
    out = elu_linear_attention(*halves, s, z)[0]
    expected = elu_linear_attention(*full, s, z)[0]
    assert torch.equal(out, expected.to(dtype))
    g = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, halves, g), torch.autograd.grad(expected, full, g.float()), strict=True):
        assert torch.equal(a, b.to(dtype))


def test_what_is_infinite_or_not_a_number_is_not_hidden():
    for value in (torch.nan, torch.inf):
        q, k, v, s, z = (t.detach() for t in inputs(40, 8, 8))
        v[:, :, 20] = value
        out = elu_linear_attention(q, k, v, s, z)[0]
        assert not out[:, :, 20:].isfinite().any()
        assert out[:, :, :C].isfinite().all()  # within a chunk products meet it, times 0


def test_little_is_made_beside_outputs_and_gradients():
    n, f, d = 1024, 16, 8
    tensors = inputs(n, f, d, b=1, h=1)
    with Made() as forward:
        out, _, _ = elu_linear_attention(*tensors)
    weights = torch.rand_like(out)
    with Made() as backward:
        torch.autograd.grad(out, tensors, weights)
    assert forward.large(f * d) == [n * d]  # the output
    assert backward.large(f * d) == [n * d, n * f, n * f]  # gradients of v, q and k


def test_the_operators_are_what_torch_expects():
    arguments = *inputs(5, 4, 3), torch.tensor([5, 2]), 1e-6
    kernels.check_operators("elu_linear", arguments, lambda given, out: (*out, *given))
    kernels.assert_second_derivative_is_refused(
        elu_linear_attention, inputs(5, 4, 4), "plain_causal_linear_attention has"
    )


# ------------------------------------------------------------------------------------------------------- the dispatch


def test_chosen_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    single, double = torch.zeros(1, 1, 1, 300), torch.zeros(1, 1, 1, 300, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert use_kernels(single, single, elu=True)
        assert use_kernels(single.bfloat16(), single.bfloat16(), elu=True)
        assert not use_kernels(single, single, elu=False)  # `causal_linear_attention` has its own
        assert not use_kernels(double, double, elu=True)  # and is silent
        assert not use_kernels(single.to("meta"), single.to("meta"), elu=True)
        monkeypatch.setenv(KERNELS, "plain")
        assert not use_kernels(single, single, elu=True)
    monkeypatch.setenv(KERNELS, "c++")
    assert use_kernels(single, single, elu=True)
    with pytest.raises(ValueError, match=r"=c\+\+, but .* of linear attention can't be used: torch.float64"):
        use_kernels(double, double, elu=True)
    with pytest.raises(ValueError, match="the tensors are on meta; they are for the CPU"):
        use_kernels(single.to("meta"), single.to("meta"), elu=True)


def test_without_a_compiler_the_form_in_pytorch_is_used_and_said_once(monkeypatch: pytest.MonkeyPatch):
    tensors = inputs(40, 8, 8, positive=True)
    expected = causal_linear_attention(*tensors)[0]
    monkeypatch.setattr(cpp_build, "obstacle", lambda name: "there is no C++ compiler")
    monkeypatch.setattr(cpp_kernels, "forward", None)
    with pytest.warns(UserWarning, match=r"slower than its kernels.*there is no C\+\+ compiler.*=plain"):
        torch.testing.assert_close(causal_linear_attention(*tensors)[0], expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not use_kernels(tensors[0], tensors[2], elu=True)
    monkeypatch.setenv(KERNELS, "c++")
    with pytest.raises(ValueError, match="there is no C"):
        causal_linear_attention(*tensors)


def test_forced_they_are_not_used(monkeypatch: pytest.MonkeyPatch):
    tensors = inputs(40, 8, 8, positive=True)
    expected = torch.autograd.grad(causal_linear_attention(*tensors)[0].square().sum(), tensors)
    monkeypatch.setenv(KERNELS, "plain")
    monkeypatch.setattr(cpp_kernels, "_library", None)
    found = torch.autograd.grad(causal_linear_attention(*tensors)[0].square().sum(), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("feature_map", [EluFeatureMap, ReluFeatureMap])
def test_the_attention_is_the_same_through_them(feature_map, monkeypatch: pytest.MonkeyPatch):
    called = []
    forward = cpp_kernels.forward
    monkeypatch.setattr(cpp_kernels, "forward", lambda *a, elu, **o: called.append(elu) or forward(*a, elu=elu, **o))
    attention = LinearAttention(8, 2, feature_map=feature_map)
    kernels.assert_same_through("c++", attention, 40, called, monkeypatch)
    assert called == [feature_map is EluFeatureMap] * 2


def test_where_no_key_is_seen_a_tiny_eps_gives_no_nan():
    q, k, v, s, z = inputs(20, 16, 16, b=1, h=1)
    none = torch.zeros_like(s, requires_grad=True), torch.zeros_like(z, requires_grad=True)
    out, *_ = elu_linear_attention(q, k, v, *none, torch.tensor([0]), eps=1e-30)
    assert not out.any()
    for g in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)):
        assert not g.any()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no large pages")
def test_large_results_ask_for_large_pages():
    """By smaps's flags (proc(5)): hg is what was asked for, whether or not there are any."""
    n, width = 4096, 64  # 8 heads: 8 MiB a tensor
    q, k, v = (torch.rand(1, 8, n, width, requires_grad=True) for _ in range(3))
    out, *_ = causal_linear_attention(q, k, v, torch.zeros(1, 8, width, width), torch.zeros(1, 8, width))
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for t in (out, *gradients):
        assert "hg" in flags_of_memory(t.data_ptr() + t.nbytes // 2)


def flags_of_memory(address: int) -> list[str]:
    there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            there = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif there and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"{address:x} is nowhere")


def test_they_were_compiled_for_this_processor():
    assert cpp_kernels._library().width_of_vectors() == HAS
