"""The kernels in C++ against the definitions, for each kind of vectors that this machine has."""

import ctypes
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_effattn.attention import EluFeatureMap, LinearAttention, ReluFeatureMap
from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention
from lit_effattn.ops.linear.pytorch import causal_linear_attention
from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.operators import KERNELS, choose_form
from tests.support import gated_linear
from tests.support.families import FAMILIES, FAVOR, GATED, LINEAR, Family, favor_inputs, linear_inputs
from tests.support.kernels import (
    assert_alike,
    assert_same_through,
    assert_second_derivative_is_refused,
    check_operators,
    elu_features,
    gradients,
    linear_definition,
)
from tests.support.tensor_sizes import Made

OBSTACLE = cpp_build.obstacle("linear")
pytestmark = [
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no kernels: {OBSTACLE}"),
    pytest.mark.usefixtures("no_notices"),
]
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)

C, GROUP = 16, 64  # positions of a chunk, and for each state that the gated backward pass keeps
B, H = 2, 2
VECTORS = {4: (), 8: cpp_build._VECTORS["AVX2"], 16: cpp_build._VECTORS["AVX512"]}
HAS = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)


@pytest.fixture(params=sorted(VECTORS))
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use vectors of 4, 8 or 16 numbers."""
    width = request.param
    if width > HAS:
        pytest.skip(f"the processor has no vectors of {width} numbers")
    monkeypatch.setattr(cpp_build, "library", lambda name: ctypes.CDLL(str(cpp_build.build(name, VECTORS[width]))))
    for family in FAMILIES.values():
        family.module._library.cache_clear()
        assert family.module._library().width_of_vectors() == width
    yield
    for family in FAMILIES.values():
        family.module._library.cache_clear()


def watched(family: Family, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[Any, ...]]]:
    """Return the arguments of all later calls of the kernels."""
    kernels, calls = family.module._library(), {"forward": [], "backward": []}

    def kernel(name: str):
        return lambda *a: calls[name].append(a) or getattr(kernels, name)(*a)

    monkeypatch.setattr(family.module, "_library", lambda: SimpleNamespace(**{name: kernel(name) for name in calls}))
    return calls


def positive(given: list[Tensor]) -> list[Tensor]:
    """With features of queries and keys in place of these."""
    return [*((elu_features(t.detach())).requires_grad_() for t in given[:2]), *given[2:]]


# ------------------------------------------------------------------------------------------------------ the definition


@pytest.mark.usefixtures("vectors")
def test_linear_attention_equals_the_definition():
    """With any features, and with the feature map inside."""
    for n, f, d in ((1, 16, 16), (C - 1, 3, 5), (C, 64, 64), (C + 1, 2, 1), (2 * C, 33, 20), (3 * C + 5, 24, 160)):
        given = linear_inputs(n, f, d)
        assert_alike(LINEAR.function, LINEAR.definition, given)
        assert_alike(causal_linear_attention, linear_definition, positive(given))


@pytest.mark.usefixtures("vectors")
def test_performer_equals_the_definition():
    for n, e, f, d, seen in (
        (1, 16, 16, 16, True),
        (C - 1, 3, 5, 7, True),
        (C, 16, 48, 16, False),
        (C + 1, 1, 2, 1, True),
        (2 * C, 33, 100, 20, True),
        (3 * C + 5, 20, 41, 50, False),
        (20, 160, 24, 160, True),  # wider than on CUDA
    ):
        assert_alike(FAVOR.function, FAVOR.definition, favor_inputs(n, e, f, d, seen=seen), magnified=2)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(("n", "d", "dv"), [(1, 16, 16), (C, 3, 5), (GROUP + C + 3, 33, 20)])
def test_decays_and_the_delta_rule_equal_the_definition(n: int, d: int, dv: int):
    for rule in gated_linear.RULES:
        tensors, options = gated_linear.inputs(n, d, dv, *rule, b=1, h=1, dtype=torch.float32)
        gated_linear.assert_defined(gated_linear_attention, tensors, options)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("n", [C - 1, C + 1, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP + 5])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (24, 160), (128, 40)])
def test_decays_and_the_delta_rule_equal_the_definition_in_any_size(n: int, d: int, dv: int):
    for rule in gated_linear.RULES:
        tensors, options = gated_linear.inputs(n, d, dv, *rule, dtype=torch.float32)
        gated_linear.assert_defined(gated_linear_attention, tensors, options, lengths=torch.tensor([n, n // 2]))


@each_family
@pytest.mark.usefixtures("vectors")
def test_padding_is_nothing(family: Family):
    n, lengths = 2 * C + 3, torch.tensor([2 * C + 3, 0, 1, C, C + 3])
    given = family.inputs(n, b=5, h=1)
    assert_alike(family.function, family.definition, given, lengths, magnified=4)
    found = family.function(*given, lengths)
    sums = [t for t in given[3:] if t.shape == found[1].shape][:1]
    assert torch.equal(found[1][1], sums[0][1])  # the row without keys
    of = gradients(found, given)
    for row, length in enumerate(lengths.tolist()):
        assert (of[1][row, :, length:] == 0).all()
        assert (of[2][row, :, length:] == 0).all()
    with torch.no_grad():
        given[1][1:, :, C + 3 :] = torch.nan  # whatever stands there
    assert all(torch.equal(a, b) for a, b in zip(family.function(*given, lengths), found, strict=True))


@each_family
def test_a_row_of_padding_has_no_gradient_of_the_row_before(family: Family):
    torch.set_num_threads(1)  # which computes both rows
    given = family.inputs(2 * C, b=2, h=1)
    with torch.no_grad():
        given[1][0] = torch.nan
    found = gradients(family.function(*given, torch.tensor([2 * C, 0])), given)
    assert found[0][0].isnan().any()
    assert all(g[1].isfinite().all() for g in found)


@each_family
def test_any_strides_and_broadcast_gradients(family: Family):
    given = family.inputs(40, b=3)
    others = [t.detach().mT.contiguous().mT.requires_grad_() for t in given[:3]]
    assert others[0].stride(-1) != 1
    found, expected = (family.function(*heads, *given[3:]) for heads in (others, given[:3]))
    pairs = [*zip(found, expected, strict=True)]
    pairs += zip(gradients(found, others), gradients(expected, given[:3]), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)
    one = [t.detach()[:, :1].expand_as(t).requires_grad_() for t in given[:3]]  # heads share them
    out = family.function(*one, *given[3:])[0]
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), one))  # the gradient is one number, expanded


@each_family
def test_threads_share_the_rows(family: Family):
    given = family.inputs(50, b=3, h=3)
    one = gradients(family.function(*given), given)
    torch.set_num_threads(4)  # the tests' number is set anew before each
    assert all(torch.equal(a, b) for a, b in zip(one, gradients(family.function(*given), given), strict=True))


@each_family
def test_half_precision_is_computed_in_float32(family: Family):
    for dtype in (torch.bfloat16, torch.float16):
        *given, g = [t.detach() for t in (*family.inputs(70), family.inputs(70)[2])]
        halves = [t.to(dtype).requires_grad_() for t in given[:3]]
        full = [t.detach().float().requires_grad_() for t in halves]
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out, after = family.function(*halves, *given[3:])[:2]
        expected = family.function(*full, *given[3:])[0]
        assert torch.equal(out, expected.to(dtype))
        assert after.dtype == torch.float32
        of_halves = torch.autograd.grad(out, halves, g.to(dtype))
        for a, b in zip(of_halves, torch.autograd.grad(expected, full, g.to(dtype).float()), strict=True):
            assert torch.equal(a, b.to(dtype))


@each_family
def test_what_is_infinite_or_not_a_number_is_not_hidden(family: Family):
    for which in range(3):
        for value in (torch.nan, torch.inf):
            given = [t.detach() for t in family.inputs(3 * C)]
            given[which][0, :, 20] = value
            out = family.function(*given)[0]
            if which == 2:
                assert not out[0, :, 20:].isfinite().all(-1).any()
            elif not (which == 1 and value == torch.inf):  # a feature of an infinite key is 0
                assert not out[0, :, 20].isfinite().all(-1).any()
            assert out[0, :, :C].isfinite().all()  # within a chunk products meet it, times 0
            assert out[1].isfinite().all()


SMALL: dict[str, tuple[dict[str, int], list[int]]] = {
    "linear": ({"f": 16, "d": 8}, [8, 16, 16]),
    "favor": ({"e": 8, "f": 32, "d": 16}, [8, 8, 16]),
    "gated_linear": ({"d": 16, "dv": 8}, [8, 16, 16, 16]),
}
"""Widths, and those of the gradients."""


@each_family
def test_little_is_made_beside_outputs_and_gradients(family: Family):
    """No features, no matrices of all positions, though these are more than the positions' vectors."""
    n, (widths, of_gradients) = 2048, SMALL[family.name]
    given = family.inputs(n, **widths, b=1, h=1)
    with Made() as forward:
        out = family.function(*given)[0]
    weights = torch.rand_like(out)
    wanted = [t for t in given if t.requires_grad] if family is GATED else given[:3]
    with Made() as backward:
        torch.autograd.grad(out, wanted, weights)
    assert forward.large(n) == [n * widths["d" if "dv" not in widths else "dv"]]
    assert backward.large(n) == [n * width for width in of_gradients]


@each_family
def test_the_operators_are_what_torch_expects(family: Family):
    name, others, saved = family.operator(torch.tensor([5, 2]), "cpp")
    given = family.inputs(5)
    check_operators(name, (*given, *others), saved)
    assert_second_derivative_is_refused(family.function, family.inputs(5), "form='plain' has one")


# -------------------------------------------------------------------------------------------------- linear attention's


@pytest.mark.usefixtures("vectors")
def test_the_feature_map_over_its_whole_range():
    x = torch.cat([torch.linspace(-100, 20, 997), torch.tensor([-torch.inf, -0.0, 0.0, 1e30])])
    k = x[None, None, None]  # one position, whose sum is φ(k)
    zero = torch.zeros_like(k)
    _, _, z = LINEAR.function(k, k, zero[..., :1], zero[0, ..., None], zero[0])
    torch.testing.assert_close(z.flatten().double(), elu_features(x.double()), rtol=4 * 2**-23, atol=2e-38)
    _, _, z = LINEAR.function(k * torch.nan, k * torch.nan, zero[..., :1], zero[0, ..., None], zero[0])
    assert z.isnan().all()


@pytest.mark.usefixtures("vectors")
def test_eps_where_little_or_nothing_is_seen():
    q, k, v, s, z = linear_inputs(2 * C + 5)
    q, k = (elu_features(t.detach()).requires_grad_() for t in (q, k))
    sums = [torch.zeros_like(t, requires_grad=True) for t in (s, z)]
    few = [q, (1e-2 * k).detach().requires_grad_(), v, *sums]
    for eps in (0, 0.5):
        assert_alike(partial(causal_linear_attention, eps=eps), partial(linear_definition, eps=eps), few)
        in_map = [q, few[1].detach().log().requires_grad_(), v, *sums]  # φ(log x) = x below 1
        assert_alike(partial(LINEAR.function, eps=eps), partial(LINEAR.definition, eps=eps), in_map)
    out, *_ = LINEAR.function(q, k, v, *sums, torch.tensor([0, 0]), eps=1e-30)
    assert not out.any()
    assert not any(g.any() for g in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no large pages")
def test_large_results_ask_for_large_pages():
    """By smaps's flags (proc(5)): hg is what was asked for, whether or not there are any."""
    n, width = 4096, 64  # 8 heads: 8 MiB a tensor
    q, k, v = (torch.rand(1, 8, n, width, requires_grad=True) for _ in range(3))
    out, *_ = causal_linear_attention(q, k, v, torch.zeros(1, 8, width, width), torch.zeros(1, 8, width))
    for t in (out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))):
        assert "hg" in flags_of_memory(t.data_ptr() + t.nbytes // 2)


def flags_of_memory(address: int) -> list[str]:
    valid = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            valid = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif valid and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"{address:x} is nowhere")


# --------------------------------------------------------------------------------------------------------- Performer's


def loud(n: int, first: int, last: int, by: float = 12.0) -> Tensor:
    """Only keys from `first` to `last` are long."""
    return torch.where((torch.arange(n) >= first) & (torch.arange(n) < last), by, 1.0)[:, None]


def with_loud_keys(n: int, louder: Tensor, **options: Any) -> list[Tensor]:
    given = favor_inputs(n, **options)
    return [given[0], (given[1] * louder).detach().requires_grad_(), *given[2:]]


@pytest.mark.usefixtures("vectors")
def test_keys_that_rise_far():
    for n, first, last in (
        (C, 0, 5),  # within the first chunk
        (C + 3, 0, C),  # at a border
        (3 * C, C + 3, 2 * C + 7),  # later: nothing rises above those before
        (50, 0, 20),
    ):
        given = with_loud_keys(n, loud(n, first, last), seen=False)
        assert_alike(FAVOR.function, FAVOR.definition, given, magnified=10)
    given = favor_inputs(2 * C)
    given[6][:, 1] -= 200.0  # far above those before the sequence, which were very long
    assert_alike(FAVOR.function, FAVOR.definition, given, magnified=2)
    given = with_loud_keys(30, torch.linspace(45, 1, 30)[:, None], seen=False)  # each rises above the one before
    assert_alike(FAVOR.function, FAVOR.definition, given, magnified=100)


def test_no_output_depends_on_what_comes_after_however_far_it_rises():
    n = 3 * C
    q, k, v, *others = (t.detach() for t in with_loud_keys(n, loud(n, 0, C + 2), seen=False))
    before = FAVOR.function(q, k, v, *others)[0]
    for t in (1, C - 1, C, C + 2):
        for factor in (0.0, 0.9, 100.0):  # none as long: it rises; all as long: nothing does
            changed = [torch.cat([x[:, :, :t], x[:, :, t:] * factor], 2) for x in (q, k, v)]
            after = FAVOR.function(*changed, *others)[0]
            assert torch.equal(before[:, :, :t], after[:, :, :t])
            assert not torch.equal(before[:, :, t], after[:, :, t])


# ------------------------------------------------------------------------------------------------------- the selection


def test_chosen_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    single, double = torch.zeros(1, 1, 1, 300), torch.zeros(1, 1, 1, 300, dtype=torch.float64)

    def chosen(*tensors: Tensor, form: Any = None) -> str:
        return choose_form(form, "attention", "linear", *tensors, width=300)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(single, single) == chosen(single.bfloat16(), single) == "cpp"
        assert chosen(single, double) == "plain"  # in silence
        assert chosen(single.to("meta")) == "plain"
        assert chosen(single, form="plain") == "plain"
        monkeypatch.setenv(KERNELS, "plain")
        assert chosen(single) == "plain"
        assert chosen(single, form="cpp") == "cpp"
    with pytest.raises(ValueError, match=r"form=cpp, but .* of attention can't be used: torch.float64"):
        chosen(double, form="cpp")
    monkeypatch.setenv(KERNELS, "cpp")
    assert chosen(single) == "cpp"
    with pytest.raises(ValueError, match=r"=cpp, but .* of attention can't be used: torch.float64"):
        chosen(double)
    with pytest.raises(ValueError, match="the tensors are on meta; they are for the CPU"):
        chosen(single.to("meta"))


@each_family
def test_without_a_compiler_the_plain_form_is_used_and_said_once(family: Family, monkeypatch: pytest.MonkeyPatch):
    given = family.inputs(40)
    exact = family.function(*(t.detach().double() for t in given))[0]
    monkeypatch.setattr(cpp_build, "obstacle", lambda name: "there is no C++ compiler")
    monkeypatch.setattr(family.module, "_library", None)
    with pytest.warns(UserWarning, match=r"slower than its kernels.*there is no C\+\+ compiler.*=plain"):
        found = family.function(*given)[0]
    assert (found - exact).norm() < 1e-5 * exact.norm()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        family.function(*given)
    monkeypatch.setenv(KERNELS, "cpp")
    with pytest.raises(ValueError, match="there is no C"):
        family.function(*given)


@each_family
@pytest.mark.parametrize("form", ["plain", "cpp"])
def test_forms_are_forced(family: Family, form: str, monkeypatch: pytest.MonkeyPatch):
    calls = watched(family, monkeypatch)
    monkeypatch.setenv(KERNELS, form)
    given = family.inputs(40)
    family.function(*given)[0].sum().backward()
    assert [len(of_one) for of_one in calls.values()] == ([0, 0] if form == "plain" else [1, 1])
    if form == "cpp":
        with pytest.raises(ValueError, match=r"torch\.float64 is not one of their types"):
            family.function(*(t.detach().double() for t in given))


@each_family
def test_the_attention_is_the_same_through_them(family: Family, monkeypatch: pytest.MonkeyPatch):
    calls = watched(family, monkeypatch)["forward"]
    for make in family.attentions:
        calls.clear()
        assert_same_through("cpp", make(8, 2), 40, calls, monkeypatch)


def test_only_elu_features_are_computed_inside(monkeypatch: pytest.MonkeyPatch):
    calls = watched(LINEAR, monkeypatch)["forward"]
    for feature_map in (EluFeatureMap, ReluFeatureMap):
        calls.clear()
        assert_same_through("cpp", LinearAttention(8, 2, feature_map=feature_map), 40, calls, monkeypatch)
        assert [elu for *_, elu, _ in calls] == [feature_map is EluFeatureMap] * 2


def test_torch_compile_sees_one_operator():
    given, graphs = GATED.inputs(20), []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    compiled = torch.compile(GATED.function, backend=backend, fullgraph=True)
    for a, b in zip(compiled(*given), GATED.function(*given), strict=True):
        assert torch.equal(a, b)
    (targets,) = graphs
    assert targets.count(torch.ops.lit_effattn.gated_linear.default) == 1
    assert not any("bmm" in str(target) or "matmul" in str(target) for target in targets)


def test_they_were_compiled_for_this_processor():
    assert LINEAR.module._library().width_of_vectors() == HAS
