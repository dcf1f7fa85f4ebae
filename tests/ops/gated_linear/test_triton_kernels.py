"""The kernel in Triton against the definition: on a GPU where there is one, else interpreted on the CPU."""

import os
import warnings

import pytest
import torch

from lit_effattn.attention import GatedDeltaNetAttention, RetentionAttention
from lit_effattn.ops.gated_linear import pytorch
from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention, use_kernels
from lit_effattn.ops.runtime.selection import KERNELS
from tests.support import kernels
from tests.support.gated_linear import RULES, assert_defined, by_position, inputs
from tests.support.kernels import Tensors, gradients

pytest.importorskip("triton")
from lit_effattn.ops.gated_linear import triton_kernels

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
TRIAL = pytorch._failure

each_rule = pytest.mark.parametrize(("decay", "delta"), RULES)
pytestmark = pytest.mark.skipif(
    not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 was taken out of the environment"
)


@pytest.fixture(autouse=True)
def _asked_for(in_triton, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pytorch, "_failure", lambda *of: None)  # there is no GPU to try them on


def single(n: int, d: int, dv: int, decay: str, delta: bool, **options):
    tensors, gates = inputs(n, d, dv, decay, delta, **{"h": 1, "dtype": torch.float32} | options)
    return [t.to(DEVICE) for t in tensors], {name: None if t is None else t.to(DEVICE) for name, t in gates.items()}


def lengths_of(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths, device=DEVICE)


@each_rule
@pytest.mark.parametrize(("n", "d", "dv", "chunk_size"), [(1, 5, 16, 64), (11, 20, 18, 4)])
def test_equals_the_definition(n: int, d: int, dv: int, chunk_size: int, decay: str, delta: bool):
    tensors, options = single(n, d, dv, decay, delta, b=1)
    rtol = 2e-5 if decay == "fixed" else 5e-6  # its gradient is a sum over all positions, which may nearly cancel
    assert_defined(gated_linear_attention, tensors, options, rtol=rtol, chunk_size=chunk_size)


@each_rule
def test_padding_is_nothing(decay: str, delta: bool):
    tensors, options = single(11, 4, 3, decay, delta, b=3)
    lengths = lengths_of(0, 7, 11)
    assert_defined(gated_linear_attention, tensors, options, rtol=5e-6, lengths=lengths, chunk_size=4)
    options = {name: t for name, t in options.items() if t is not None}
    arguments = [t.requires_grad_() for t in (*tensors, *options.values())]
    found = by_position(gated_linear_attention, options, lengths=lengths, chunk_size=4)(*arguments)
    assert torch.equal(found[1][0], tensors[3][0])  # the row without keys
    for g, t in zip(gradients(found, arguments)[1:], arguments[1:], strict=True):
        assert t.dim() == 1 or t is tensors[3] or ((g[0] == 0).all() and (g[1, :, 7:] == 0).all())


@pytest.mark.parametrize("strongest", [5, 30, 1e4, torch.inf])
@pytest.mark.parametrize(("decay", "delta"), [("head", False), ("channel", True)])
def test_strong_decays(decay: str, delta: bool, strongest: float):
    """In chunks of 64, whose logarithms of decays add up to far less than -88, float32's range."""
    tensors, options = single(70, 5, 4, decay, delta, b=1, strongest=5)
    some = torch.rand_like(options["log_decay"]) < 0.2
    options["log_decay"] = options["log_decay"].masked_fill(some, -strongest)
    assert_defined(gated_linear_attention, tensors, options, rtol=5e-6)


@pytest.mark.parametrize("strength", [1, 2])
def test_equal_keys_under_the_delta_rule(strength: float):
    """The hardest triangular system: every key overlaps with every earlier one."""
    tensors, options = single(70, 5, 4, "head", True, b=1, strongest=0.01)
    tensors[1] = tensors[1][:, :, :1].expand_as(tensors[1])
    options["beta"] = torch.full_like(options["beta"], strength)
    assert_defined(gated_linear_attention, tensors, options, rtol=1e-4, chunk_size=16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_whatever_the_autocast(dtype: torch.dtype):
    tensors, options = single(11, 4, 4, "channel", True)
    tensors = [*(t.to(dtype) for t in tensors[:3]), tensors[3]]
    results = []
    for autocast in (True, False):
        full = [t.detach() if autocast else t.detach().float() for t in tensors]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            found = assert_defined(gated_linear_attention, full, options, rtol=4e-3 if autocast else 5e-6, chunk_size=4)
        results.append([t.detach() for t in found])
    assert [t.dtype for t in results[0]] == [dtype, torch.float32]
    assert all(torch.equal(a, b.to(a)) for a, b in zip(*results, strict=True))


def test_any_strides_and_heads():
    tensors, options = single(9, 5, 4, "channel", True, h=2)
    tensors[1] = tensors[1][:, :1].expand_as(tensors[0])  # shared by the heads
    tensors[3] = tensors[3].mT.contiguous().mT
    assert not any(t.is_contiguous() for t in tensors)
    assert_defined(gated_linear_attention, tensors, options, rtol=5e-6, chunk_size=4)
    y, _ = gated_linear_attention(*(t.requires_grad_() for t in tensors), **options, chunk_size=4)
    y.sum().backward()  # the gradient is one number, expanded
    assert all(t.grad.isfinite().all() for t in tensors if t.is_leaf)


def test_only_the_arguments_are_kept():
    tensors, options = single(5, 4, 3, "channel", True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated_linear_attention(*(t.requires_grad_() for t in tensors), **options)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (*tensors, *options.values())}


def test_compiled_without_a_break():
    tensors, options = single(5, 4, 3, "channel", True)

    def doubled(*tensors):
        return [2 * t for t in gated_linear_attention(*tensors, **options, lengths=lengths_of(5, 2))]

    tensors = [t.requires_grad_() for t in tensors]
    expected, found = (f(*tensors) for f in (doubled, torch.compile(doubled, fullgraph=True, backend="aot_eager")))
    for a, b in zip([*found, *gradients(found, tensors)], [*expected, *gradients(expected, tensors)], strict=True):
        assert torch.equal(a, b)
    arguments = (*tensors, *options.values(), lengths_of(5, 2), 4)
    kernels.check_operators("gated_linear", arguments, lambda given, out: (*out, *given))


@pytest.mark.exhaustive
@each_rule
@pytest.mark.parametrize(("n", "d", "dv"), [(63, 64, 64), (64, 24, 160), (65, 128, 40), (200, 33, 100)])
def test_equals_the_definition_of_any_size(n: int, d: int, dv: int, decay: str, delta: bool):
    tensors, options = single(n, d, dv, decay, delta)
    rtol = 1e-4 if decay == "fixed" else 1e-5
    assert_defined(gated_linear_attention, tensors, options, rtol=rtol, lengths=lengths_of(n, n // 2))


@pytest.mark.skipif(not GPU, reason="no GPU: the interpreter would take an hour")
@pytest.mark.gpu
@each_rule
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long_sequences_on_the_gpu(dtype: torch.dtype, precision: str, width: int, decay: str, delta: bool):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        tensors, options = single(8192, width, width, decay, delta, h=4)
        tensors = [*(t.to(dtype) for t in tensors[:3]), tensors[3]]
        options["lengths"] = lengths_of(8192, 5000)
        found, expected, again = (
            [*results, *gradients(results, given)]
            for function in (gated_linear_attention, pytorch.plain_gated_linear_attention, gated_linear_attention)
            for given in [[t.detach().requires_grad_() for t in tensors]]
            for results in [function(*given, **options)]
        )
        exact = dtype == torch.float32 and precision == "highest"
        for a, b, c in zip(found, expected, again, strict=True):
            assert (a - b).float().norm() < (1e-4 if exact else 3e-2) * b.float().norm()
            assert torch.equal(a, c)  # bit by bit
    finally:
        torch.set_float32_matmul_precision(before)


# ------------------------------------------------------------------------------------------------------- the dispatch


def used(device: str = "cuda", state: torch.dtype = torch.float32, **options) -> bool:
    q = Tensors(device, **options)
    return use_kernels(q, q, q, Tensors(device, dtype=state))


def test_chosen_on_cuda(capability, monkeypatch: pytest.MonkeyPatch):
    capability(9, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert used(dtype=dtype, width=128)
        assert not used("mps")
        monkeypatch.setenv(KERNELS, "plain")
        assert not used()


@pytest.mark.parametrize(
    ("options", "numbers", "reason"),
    [
        ({"state": torch.float64}, (9, 0), "torch.float64 is not one of their types"),
        ({"width": 129}, (9, 0), "heads of width 129"),
        ({}, (7, 5), "GPU of old is older than compute capability 8.0"),
    ],
)
def test_the_plain_form_on_cuda_is_said_once(options, numbers, reason: str, capability, monkeypatch):
    capability(*numbers)
    with pytest.warns(UserWarning, match=f"plain form, slower than its kernels.*{reason}.*{KERNELS}=plain"):
        assert not used(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not used(**options)
    monkeypatch.setenv(KERNELS, "triton")
    with pytest.raises(ValueError, match=f"{KERNELS}=triton, but.*{reason}"):
        used(**options)


def test_what_is_forced_and_can_not_be_used_is_an_error(capability, monkeypatch: pytest.MonkeyPatch):
    capability(9, 0)
    monkeypatch.setenv(KERNELS, "c++")
    with pytest.raises(ValueError, match=r"the tensors are on cuda; they are for the CPU"):
        used()
    monkeypatch.setenv(KERNELS, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"the tensors are on cpu.*TRITON_INTERPRET=1"):
        used("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)])
def test_a_trial_shows_what_is_wrong(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    arguments = torch.device(DEVICE), dtype, 16
    kernels.assert_trial_finds_faults(TRIAL, triton_kernels, 64, arguments, monkeypatch)


def test_what_fails_its_trial_is_not_used(capability, monkeypatch: pytest.MonkeyPatch):
    capability(9, 0)
    monkeypatch.setattr(pytorch, "_failure", lambda *of: "they fail")
    with pytest.warns(UserWarning, match="can't be used: they fail"):
        assert not used()


@pytest.mark.parametrize("kind", [RetentionAttention, GatedDeltaNetAttention])
def test_the_attention_is_the_same_through_them(kind, monkeypatch: pytest.MonkeyPatch):
    called, right = [], triton_kernels.forward
    monkeypatch.setattr(triton_kernels, "forward", lambda *a: called.append(a) or right(*a))
    kernels.assert_same_through("triton", kind(8, 1).to(DEVICE), 9, called, monkeypatch)


# ------------------------------------------------------------------------------------------- compilation, without a GPU

COMPILE = """
from lit_effattn.ops.gated_linear import triton_kernels

for dtype, width, precision in [case.split() for case in sys.argv[1:]]:
    torch.set_float32_matmul_precision(precision)
    q, state = torch.zeros(1, 2, 256, int(width)), torch.zeros(1, 2, int(width), int(width))
    for gates in ((None, None), (q, q[..., 0])):
        triton_kernels.forward(q, q, q, state, *gates, None, 64)
        triton_kernels.backward(q, state, q, q, q, state, *gates, None, 64)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [80, 86, 90])
def test_the_kernel_compiles_and_fits(capability: int, tmp_path):
    # Six launches: forward one, backward two, with and without the delta rule.
    cases = [f"float32 {width} {precision}" for width in (64, 128) for precision in ("highest", "high", "medium")]
    kernels.assert_compiles(COMPILE, cases, 6, tmp_path, capability)
