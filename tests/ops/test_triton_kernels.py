"""The kernels in Triton against the definitions: on a GPU where there is one, else interpreted on the CPU.

Interpreted, each chunk of each head takes some hundredths of a second: so few heads, positions and features.
"""

import itertools
import os
import re
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lit_effattn.attention import LinearAttention, ReluFeatureMap
from lit_effattn.ops.favor import pytorch as favor_pytorch
from lit_effattn.ops.favor.pytorch import positive_favor
from lit_effattn.ops.gated_linear import fla
from lit_effattn.ops.gated_linear import pytorch as gated_pytorch
from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention
from lit_effattn.ops.linear import pytorch as linear_pytorch
from lit_effattn.ops.runtime import operators
from lit_effattn.ops.runtime.operators import KERNELS
from tests.support import gated_linear, kernels
from tests.support.families import FAMILIES, FAVOR, GATED, LINEAR, Family, favor_inputs, gated_inputs, linear_inputs
from tests.support.kernels import gradients, positive_definition
from tests.support.rounding import rounding

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime import interpreter

from lit_effattn.ops.favor import triton_kernels as favor_triton
from lit_effattn.ops.gated_linear import triton_kernels as gated_triton
from lit_effattn.ops.linear import triton_kernels as linear_triton

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
C, BF = favor_triton.CHUNK, favor_triton.FEATURES
B, H = 1, 1
MODULES: dict[str, tuple[Any, Any]] = {
    "linear": (linear_triton, linear_pytorch),
    "favor": (favor_triton, favor_pytorch),
    "gated_linear": (gated_triton, gated_pytorch),
}
SIZES: dict[str, dict[str, int]] = {"linear": {}, "favor": {"e": 16, "f": BF + 8, "d": 8}, "gated_linear": {}}

pytestmark = [
    pytest.mark.skipif(
        not GPU and os.environ.get("TRITON_INTERPRET") != "1",
        reason="TRITON_INTERPRET=1 was taken out of the environment",
    ),
    pytest.mark.filterwarnings("ignore:((overflow|invalid value) encountered|All-NaN)"),  # masked later
]
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
each_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
on_gpu = [pytest.mark.skipif(not GPU, reason="no GPU: the interpreter would take an hour"), pytest.mark.gpu]


@pytest.fixture(autouse=True)
def _asked_for(in_triton, monkeypatch: pytest.MonkeyPatch):
    """Mend the interpreter, which would multiply the bits of bfloat16 as if they were integers."""
    right = interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *others: right(self, _in_float32(a), _in_float32(b), *others),
    )


def _in_float32(t):
    if t.dtype.scalar != tl.bfloat16:
        return t
    return interpreter.TensorHandle((t.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32), tl.float32)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch):
    """Say into how many groups a head's chunks are divided."""

    def into(n: int, rows: int = B) -> None:
        for module in (linear_triton, favor_triton):
            monkeypatch.setattr(module, "_at_once", lambda device: n * rows * H)

    into(1)
    return into


def inputs(family: Family, n: int, **options: Any) -> list[Tensor]:
    return family.inputs(n, **{**SIZES[family.name], "b": B, "h": H, "device": DEVICE, **options})


def assert_defined(family: Family, given: list[Tensor], lengths=None, **options: Any) -> list[Tensor]:
    options = {"magnified": 4} | options
    return kernels.assert_alike(family.function, family.definition, given, lengths, **options)


def lengths_of(*lengths: int) -> Tensor:
    return torch.tensor(lengths, device=DEVICE)


# ------------------------------------------------------------------------------------------------------ the definition


@pytest.mark.parametrize(
    ("n", "into", "d", "dv"),
    [
        (1, 1, 16, 16),
        (C, 1, 5, 7),
        (C + 1, 2, 40, 24),
        (3 * C + 7, 3, 16, 16),  # groups of two chunks, the last not full
        (70, 2, 16, 100),  # blocks of v's columns, and shorter chunks in the backward pass
    ],
)
def test_linear_attention_equals_the_definition(n: int, into: int, d: int, dv: int, cut):
    cut(into)
    assert_defined(LINEAR, linear_inputs(n, d, dv, b=B, h=H, device=DEVICE))


@pytest.mark.parametrize(
    ("n", "into", "e", "f", "d", "seen"),
    [
        (1, 1, 16, 7, 8, True),
        (C - 1, 1, 16, BF + 8, 8, True),
        (C + 1, 1, 5, 5, 7, False),
        (2 * C + 7, 2, 16, 3, 40, True),  # groups of two chunks and one
    ],
)
def test_performer_equals_the_definition(n: int, into: int, e: int, f: int, d: int, seen: bool, cut):
    cut(into)
    found = assert_defined(FAVOR, favor_inputs(n, e, f, d, b=B, h=H, device=DEVICE, seen=seen))
    assert not found[3].requires_grad


@pytest.mark.parametrize(("n", "d", "dv", "chunk_size"), [(1, 5, 16, 64), (11, 20, 18, 4)])
def test_decays_and_the_delta_rule_equal_the_definition(n: int, d: int, dv: int, chunk_size: int):
    for rule in gated_linear.RULES:
        tensors, options = gated_linear.inputs(n, d, dv, *rule, b=1, h=1, dtype=torch.float32)
        tensors, options = _moved(tensors, options)
        gated_linear.assert_defined(gated_linear_attention, tensors, options, chunk_size=chunk_size, magnified=2)


def _moved(tensors: list[Tensor], options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    return [t.to(DEVICE) for t in tensors], {x: None if t is None else t.to(DEVICE) for x, t in options.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("n", "d", "dv"), [(63, 64, 64), (64, 24, 160), (65, 128, 40), (200, 33, 100)])
def test_decays_and_the_delta_rule_equal_the_definition_in_any_size(n: int, d: int, dv: int):
    for rule in gated_linear.RULES:
        tensors, options = _moved(*gated_linear.inputs(n, d, dv, *rule, h=1, dtype=torch.float32))
        gated_linear.assert_defined(gated_linear_attention, tensors, options, lengths=lengths_of(n, n // 2))


@each_family
def test_padding_is_nothing(family: Family, cut):
    cut(2, rows=2)
    given = inputs(family, C + 20, b=2)
    found = assert_defined(family, given, lengths_of(0, C - 9))
    before = [t for t in given[3:] if t.shape in [s.shape for s in found[1:]]]
    assert all(torch.equal(a[0], b[0]) for a, b in zip(found[1:], before, strict=True))  # the row without keys
    dq, dk, dv = gradients(found, given)[:3]
    assert dq.isfinite().all()
    assert (dk[0] == 0).all()
    assert (dv[1, :, C - 9 :] == 0).all()


def test_a_row_that_has_seen_nothing_is_zero():
    q, k, v, s, z = inputs(LINEAR, 5, b=2)
    found = LINEAR.function(q, k, v, torch.zeros_like(s), torch.zeros_like(z), lengths_of(0, 5))
    assert (found[0][0] == 0).all()
    assert all(t.isfinite().all() for t in gradients(found, (q, k, v)))
    assert_defined(LINEAR, [q, k, v, s, z], eps=3.0)
    given = inputs(FAVOR, 5, b=2, seen=False)
    found = FAVOR.function(*given, lengths_of(0, 5))
    assert all((t[0] == 0).all() for t in found[:3])
    assert (found[3][0] == -torch.inf).all()
    for t in gradients(found, given):
        assert t.isfinite().all()
        assert (t[0] == 0).all()


@each_half
def test_linear_attentions_sums_do_not_overflow_in_half_precision(dtype: torch.dtype, cut):
    given = inputs(LINEAR, C + 1, dtype=dtype)
    with torch.no_grad():
        given[3] *= 1e5  # float16 ends at 65,504
        given[4] *= 1e5
    found = assert_defined(LINEAR, given, rtol=2 * torch.finfo(dtype).eps)
    assert [t.dtype for t in found] == [dtype, torch.float32, torch.float32]
    assert [t.dtype for t in gradients(found, given)] == [dtype] * 3 + [torch.float32] * 2


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.bfloat16, "highest"), (torch.bfloat16, "medium"), (torch.float16, "highest"), (torch.float32, "medium")],
)
def test_performer_in_half_precision(dtype: torch.dtype, precision: str, cut, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    given = inputs(FAVOR, C + 1, dtype=dtype, f=BF)
    factors = torch.bfloat16 if precision == "medium" else dtype
    found = assert_defined(FAVOR, given, rtol=(4 if precision == "medium" else 1) * torch.finfo(factors).eps)
    assert [t.dtype for t in found] == [dtype] + [torch.float32] * 3
    assert [t.dtype for t in gradients(found, given)] == [dtype] * 3 + [torch.float32] * 2
    if precision == "highest":  # what is in exponents is not rounded
        m = positive_definition(*(t.detach().double() for t in given))[3]
        assert (found[3] - m).norm() < rounding(torch.float32, 16, 4) * m.norm()


@each_half
def test_decays_and_the_delta_rule_are_computed_in_float32_whatever_the_autocast(dtype: torch.dtype):
    results = []
    for autocast in (True, False):
        torch.manual_seed(0)
        given = [t.detach() for t in gated_inputs(11, 4, 4, b=B, h=H, dtype=dtype, device=DEVICE)]
        given = [t.requires_grad_() for t in (given if autocast else [t.float() for t in given])]
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            found = assert_defined(GATED, given, rtol=torch.finfo(dtype).eps if autocast else None)
        results.append([t.detach() for t in found])
    assert [t.dtype for t in results[0]] == [dtype, torch.float32]
    assert all(torch.equal(a, b.to(a)) for a, b in zip(*results, strict=True))


@each_family
def test_any_strides_and_heads(family: Family, cut):
    n = 9 if family is not LINEAR else C + 3
    q, k, v, *others = (t.detach() for t in inputs(family, n, h=2))
    q, k, v = torch.cat([q, q], 2)[:, :, ::2], k[:, :1].expand_as(q), v.mT.contiguous().mT
    others = [t.mT.contiguous().mT if t.dim() > 2 and t.size(2) != n else t for t in others]
    assert not any(t.is_contiguous() for t in (q, k, v, others[0]))
    tensors = [q, k, v, *others]
    for i, t in enumerate(tensors):
        if not (family is FAVOR and i in (3, 6)):
            t.requires_grad_()
    found = assert_defined(family, tensors)
    if family is not GATED:
        assert found[0].transpose(1, 2).flatten(2).data_ptr() == found[0].data_ptr()  # heads are joined without a copy
    family.function(*tensors)[0].sum().backward()  # the gradient is one number, expanded
    assert q.grad.isfinite().all()


@each_family
def test_arguments_are_not_changed_and_little_else_is_kept(family: Family, cut):
    given = inputs(family, 3)
    before = [t.detach().clone() for t in given]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = family.function(*given)
    gradients(found, given)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    made = sorted(t.numel() for t in kept if t.data_ptr() not in {g.data_ptr() for g in given})
    assert made == ([0, B * H * 3, B * H * 3, B * H * 3 * 8] if family is FAVOR else [])  # tops, denominators, outputs


@each_family
def test_compiled_without_a_break(family: Family, cut):
    def doubled(*tensors):
        return [2 * t for t in family.function(*tensors)]

    torch._dynamo.reset()  # else the sizes of another family's inputs make these dynamic
    options = {"b": 2} | ({"f": 3} if family is FAVOR else {})
    arguments = [*inputs(family, 5, **options), lengths_of(5, 2)]
    expected, found = (f(*arguments) for f in (doubled, torch.compile(doubled, fullgraph=True, backend="aot_eager")))
    for a, b in zip([*found, *gradients(found, arguments)], [*expected, *gradients(expected, arguments)], strict=True):
        assert torch.equal(a, b)
    name, others, saved = family.operator(arguments[-1], "triton")
    kernels.check_operators(name, (*arguments[:-1], *others), saved)


def test_large_queries_and_keys_are_finite():
    q, k, v, s, z = inputs(LINEAR, 9)
    large = [(100 * q).detach().requires_grad_(), (-100 * k).detach().requires_grad_()]
    assert_defined(LINEAR, [*large, v, s, z], magnified=10)


def test_what_is_not_a_number_is_not_hidden():
    for family, i in itertools.product((LINEAR, FAVOR), range(3)):
        tensors = [t.detach().clone() for t in inputs(family, 4, b=2)]
        tensors[i][0, 0, 1, 3] = torch.nan
        out = family.function(*tensors)[0]
        assert out[0, 0, 1:].isnan().any(-1).all() if i else out[0, 0, 1].isnan().all()
        assert out[1].isfinite().all()


# --------------------------------------------------------------------------------------- keys that rise, strong decays


def louder(n: int, first: int, last: int, by: float) -> Tensor:
    """Keys of large norms have small features: those that come after them rise far."""
    return torch.where((torch.arange(n) >= first) & (torch.arange(n) < last), by, 1.0)[:, None]


@pytest.mark.parametrize(
    ("n", "last", "into"),
    [(C, 20, 1), (C + 20, C + 5, 2)],  # in the first case the first chunk's reference is its first key
)
def test_keys_that_rise_far(n: int, last: int, into: int, cut):
    cut(into)
    given = inputs(FAVOR, n, seen=False, f=9, louder=louder(n, 0, last, 12.0))
    assert_defined(FAVOR, given, magnified=10)


def test_keys_that_rise_far_above_those_before_the_sequence(cut):
    given = inputs(FAVOR, 9)  # more than one block of features
    with torch.no_grad():
        given[6] -= 200.0  # as if they had been very long
    assert_defined(FAVOR, given)


def test_a_later_key_changes_no_bit_however_far_it_rises(cut):
    q, k, v, omega, *sums = inputs(FAVOR, C, seen=False, louder=louder(C, 0, 30, 12.0))
    sums[2] = torch.full_like(sums[2], -60.0)
    before = FAVOR.function(q, k, v, omega, *sums)[0]
    for t in (9, 40):
        changed = k.detach().clone()
        changed[:, :, t] /= 12.0 if t < 30 else 3.0
        after = FAVOR.function(q, changed, v, omega, *sums)[0]
        assert torch.equal(after[:, :, :t], before[:, :, :t])
        assert not torch.equal(after[:, :, t:], before[:, :, t:])


@pytest.mark.parametrize("strongest", [5, 1e4, torch.inf])
@pytest.mark.parametrize(("decay", "delta"), [("head", False), ("channel", True)])
def test_strong_decays(decay: str, delta: bool, strongest: float):
    """In chunks of 64, whose logarithms of decays add up to far less than -88, float32's range."""
    tensors, options = gated_linear.inputs(70, 5, 4, decay, delta, b=1, h=1, dtype=torch.float32, strongest=5)
    some = torch.rand_like(options["log_decay"]) < 0.2
    options["log_decay"] = options["log_decay"].masked_fill(some, -strongest)
    gated_linear.assert_defined(gated_linear_attention, *_moved(tensors, options))


@pytest.mark.parametrize("strength", [1, 2])
def test_equal_keys_under_the_delta_rule(strength: float):
    """The hardest triangular system: every key overlaps with every earlier one."""
    tensors, options = gated_linear.inputs(70, 5, 4, "head", True, b=1, h=1, dtype=torch.float32, strongest=0.01)
    tensors[1] = tensors[1][:, :, :1].expand_as(tensors[1])
    options["beta"] = torch.full_like(options["beta"], strength)
    tensors, options = _moved(tensors, options)
    gated_linear.assert_defined(gated_linear_attention, tensors, options, chunk_size=16, magnified=20)


# ---------------------------------------------------------------------------------------------------- what is refused


def test_what_they_can_not_take_is_refused():
    f = BF + 8
    of_linear = dict(zip("qkvsz", inputs(LINEAR, 5, b=2, f=16, d=16), strict=True))
    of_favor = dict(zip(("q", "k", "v", "omega", "s", "z", "m"), inputs(FAVOR, 5, b=2), strict=True))
    refused: list[tuple[Any, dict[str, Tensor], dict[str, Tensor], str]] = [
        (LINEAR.function, of_linear, changed, words)
        for changed, words in (
            ({"k": torch.zeros(2, 1, 4, 16)}, "k has shape (2, 1, 4, 16); with q of (2, 1, 5, 16) it should be (2, 1,"),
            ({"s": torch.zeros(2, 1, 16, 8)}, "s has shape (2, 1, 16, 8)"),
            ({"lengths": torch.tensor([5])}, "lengths has shape (1,)"),
            ({"z": torch.zeros(2, 1, 16).half()}, "z is torch.float16; sums must be torch.float32 or more: z.float()"),
            ({"z": torch.zeros(2, 1, 16).double()}, "torch.float64 is not one of their types"),
            ({"v": torch.zeros(2, 1, 5, 129), "s": torch.zeros(2, 1, 16, 129)}, "heads of width 129 are wider"),
        )
    ]
    refused += [
        (positive_favor, of_favor, changed, words)
        for changed, words in (
            ({"k": torch.zeros(2, 1, 4, 16)}, "k has shape (2, 1, 4, 16); with q of (2, 1, 5, 16) it should be (2, 1,"),
            ({"omega": torch.zeros(2, f, 16)}, f"omega has shape (2, {f}, 16)"),
            ({"m": torch.zeros(2, 1, 3)}, "m has shape (2, 1, 3)"),
            ({"lengths": torch.tensor([5])}, "lengths has shape (1,)"),
            ({"m": torch.zeros(2, 1, f).bfloat16()}, "m is torch.bfloat16; sums must be"),
            ({"m": torch.zeros(2, 1, f).double()}, "torch.float64 is not one of their types"),
            ({"v": torch.zeros(2, 1, 5, 65), "s": torch.zeros(2, 1, f, 65)}, "heads of width 65 in torch.float32"),
            ({"omega": torch.zeros(1, f, 16).requires_grad_()}, "positive_favor does not compute; pass omega.detach()"),
        )
    ]
    for function, given, changed, words in refused:
        with pytest.raises(ValueError, match=re.escape(words)):
            function(**given | changed)


# ------------------------------------------------------------------------------------------------------ on the device


@pytest.mark.parametrize(("n_heads", "n"), [(1, 65), (3, 4099), (1, 100_000), (7, 12_345), (1000, 777)])
def test_groups_fill_the_device_and_no_more(n_heads: int, n: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_triton, "_at_once", lambda device: 264)
    q = torch.empty(1, 1, 1, 64).expand(1, n_heads, n, 64)
    plan = linear_triton._Plan(q, q, backward=False)
    assert (plan.groups - 1) * plan.each < plan.chunks <= plan.groups * plan.each
    assert plan.groups == 1 or plan.groups * n_heads <= 264
    assert plan.groups in (1, plan.chunks) or plan.groups > min(64, 264 // n_heads) / 2


def test_pytorch_says_how_factors_are_rounded(monkeypatch: pytest.MonkeyPatch):
    for setting, newer, half, full in (
        ("highest", "", "tf32", "tf32x3"),
        ("high", "", "tf32", "tf32"),
        ("medium", "", "bf16", "bf16"),
        (None, "ieee", "tf32", "tf32x3"),
        (None, "tf32", "tf32", "tf32"),
    ):

        def said(setting: str | None = setting) -> str:
            if setting is None:
                raise RuntimeError("mix of the legacy and new APIs")
            return setting

        monkeypatch.setattr(torch, "get_float32_matmul_precision", said)
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=newer))
        for dtype, expected in ((torch.bfloat16, half), (torch.float16, half), (torch.float32, full)):
            factors = torch.empty(0, dtype=dtype), torch.empty(0, dtype=torch.bfloat16)
            assert linear_triton._precision(*factors) == expected


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.bfloat16, "medium"), (torch.float16, "high"), (torch.float32, "highest")]
)
@pytest.mark.parametrize("width", [pytest.param(width, marks=on_gpu) for width in (32, 128)])
def test_long_sequences_on_the_gpu(dtype: torch.dtype, precision: str, width: int):
    exact = dtype == torch.float32 and precision == "highest"
    rtol = 1e-4 if exact else 3e-2
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        given = linear_inputs(4096, width, width, h=2, dtype=dtype, device=DEVICE)  # the definition makes N × N
        assert_repeatable(LINEAR, given, lengths_of(4096, 2500), rtol)
        if dtype != torch.float32 or width <= favor_pytorch._WIDEST_IN_FULL:
            loud = louder(1500, 0, 700, 8.0)  # the definition makes N × N × F
            given = favor_inputs(1500, width, 72, width, dtype=dtype, device=DEVICE, louder=loud)
            assert_repeatable(FAVOR, given, lengths_of(1500, 1000), rtol)
        for decay, delta in gated_linear.RULES:
            tensors, options = gated_linear.inputs(8192, width, width, decay, delta, h=4, dtype=torch.float32)
            tensors, options = _moved([*(t.to(dtype) for t in tensors[:3]), tensors[3]], options)
            options["lengths"] = lengths_of(8192, 5000)
            found, expected, again = (
                [*results, *gradients(results, given)]
                for function in (
                    gated_linear_attention,
                    partial(gated_linear_attention, form="plain"),
                    gated_linear_attention,
                )
                for given in [[t.detach().requires_grad_() for t in tensors]]
                for results in [function(*given, **options)]
            )
            for a, b, c in zip(found, expected, again, strict=True):
                assert (a - b).float().norm() < rtol * b.float().norm()
                assert torch.equal(a, c)  # bit by bit
    finally:
        torch.set_float32_matmul_precision(before)


def assert_repeatable(family: Family, given: list[Tensor], lengths: Tensor, rtol: float) -> None:
    found, again = (assert_defined(family, given, lengths, rtol=rtol) for _ in range(2))
    for a, b in zip([*found, *gradients(found, given)], [*again, *gradients(again, given)], strict=True):
        assert torch.equal(a, b)  # bit by bit


# ------------------------------------------------------------------------------------------------------- the selection


def used(family: Family, device: str = "cuda", **options: Any) -> bool:
    """Return whether the operation chooses Triton for tensors on a GPU that may not exist."""
    module, chosen = MODULES[family.name][1], []
    sizes = dict.fromkeys(SIZES[family.name], 16) | {"dtype": torch.bfloat16} | options
    with pytest.MonkeyPatch.context() as patch, FakeTensorMode():
        patch.setattr(module, "choose_form", lambda *a, **o: chosen.append(operators.choose_form(*a, **o)) or "plain")
        patch.setattr(fla, "use", lambda *a, **o: False)
        family.function(*(t.detach().to(device) for t in family.inputs(2, **sizes)))
    return chosen == ["triton"]


@each_family
def test_chosen_on_cuda(family: Family, capability, monkeypatch: pytest.MonkeyPatch):
    capability(9, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert used(family, dtype=dtype)
        assert used(family, d=128)
        assert not used(family, "meta")
        monkeypatch.setenv(KERNELS, "plain")
        assert not used(family)


REASONS = [
    (LINEAR, {"dtype": torch.float64}, (9, 0), "torch.float64 is not one of their types"),
    (LINEAR, {"f": 129}, (9, 0), "heads of width 129"),
    (LINEAR, {"d": 256}, (9, 0), "heads of width 256"),
    (LINEAR, {}, (7, 5), "GPU of old is older than compute capability 8.0"),
    (LINEAR, {"d": 65, "dtype": torch.float32}, (8, 6), "need 164 KiB of shared memory, and GPU of old has 100"),
    (FAVOR, {"e": 65, "dtype": torch.float32}, (9, 0), "width 65 in torch.float32 are wider than"),
    (GATED, {"dtype": torch.float64}, (9, 0), "torch.float64 is not one of their types"),
    (GATED, {"d": 129}, (9, 0), "heads of width 129"),
    (GATED, {}, (7, 5), "GPU of old is older than compute capability 8.0"),
]


def test_the_plain_form_on_cuda_is_said_once(capability, monkeypatch: pytest.MonkeyPatch):
    for family, options, numbers, reason in REASONS:
        operators._notice.cache_clear()
        capability(*numbers)
        with pytest.warns(UserWarning, match=f"plain form, slower than its kernels.*{reason}.*{KERNELS}=plain"):
            assert not used(family, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not used(family, **options)
        operators._notice.cache_clear()
        with monkeypatch.context() as asked, warnings.catch_warnings():
            warnings.simplefilter("error")
            asked.setenv(KERNELS, "plain")
            assert not used(family, **options)
            asked.setenv(KERNELS, "triton")
            with pytest.raises(ValueError, match=f"{KERNELS}=triton, but.*{reason}"):
                used(family, **options)


@each_family
def test_what_is_forced(family: Family, capability, monkeypatch: pytest.MonkeyPatch):
    capability(9, 0)
    monkeypatch.setenv(KERNELS, "triton")
    assert used(family)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert used(family, "cpu")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"the tensors are on cpu.*TRITON_INTERPRET=1"):
        used(family, "cpu")
    monkeypatch.setattr(operators, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install triton"):
        used(family)
    monkeypatch.setenv(KERNELS, "cpp")
    with pytest.raises(ValueError, match="the tensors are on cuda:0; they are for the CPU"):
        used(family)
    monkeypatch.setenv(KERNELS, "cuda")
    with pytest.raises(ValueError, match=f"{KERNELS}='cuda' in the environment is not one of plain, triton, fla, cpp"):
        used(family)


@each_family
def test_the_attention_is_the_same_through_them(family: Family, monkeypatch: pytest.MonkeyPatch):
    module = MODULES[family.name][0]
    forward = module.forward
    for make in family.attentions:
        called: list[Any] = []
        monkeypatch.setattr(module, "forward", lambda *a, called=called: called.append(a) or forward(*a))
        kernels.assert_same_through("triton", make(8, 2).to(DEVICE), 9, called, monkeypatch)


def test_other_feature_maps_have_the_plain_form(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_triton, "forward", None)
    LinearAttention(8, 1, feature_map=ReluFeatureMap).to(DEVICE)(torch.zeros(2, 9, 8, device=DEVICE))
    with pytest.raises(ValueError, match=r"form=triton, but the kernels of linear attention.*feature map elu \+ 1"):
        linear_pytorch.causal_linear_attention(*linear_inputs(9, device=DEVICE), form="triton")


# ------------------------------------------------------------------------------------------ compilation, without a GPU

COMPILE = {
    "linear": """
from lit_effattn.ops.linear import triton_kernels

triton_kernels.shared_memory = lambda device: shared
triton_kernels._at_once = lambda device: 8
for dtype, width, precision in [case.split() for case in sys.argv[1:]]:
    torch.set_float32_matmul_precision(precision)
    q = torch.zeros(1, 256, 2, int(width), dtype=getattr(torch, dtype)).transpose(1, 2)
    s, z = torch.zeros(1, 2, int(width), int(width)), torch.zeros(1, 2, int(width))
    triton_kernels.forward(q, q, q, s, z, torch.tensor([3]), True, 1e-6)
    triton_kernels.backward(q, s, z, q, q, q, s, z, torch.tensor([3]), True, 1e-6)
""",
    "favor": """
from lit_effattn.ops.favor import triton_kernels

triton_kernels.shared_memory = lambda device: shared
triton_kernels._at_once = lambda device: 8
for dtype, width, features, precision in [case.split() for case in sys.argv[1:]]:
    torch.set_float32_matmul_precision(precision)
    width, features, lengths = int(width), int(features), torch.tensor([3])
    q = torch.zeros(1, 256, 2, width, dtype=getattr(torch, dtype)).transpose(1, 2)
    omega, s, z = torch.zeros(2, features, width), torch.zeros(1, 2, features, width), torch.zeros(1, 2, features)
    top = torch.zeros(1, 2, 256)
    triton_kernels.forward(q, q, q, omega, s, z, z, lengths, 0.5)
    triton_kernels.backward(q, s, z, q, q, q, omega, s, z, z, lengths, q, q, top, top, 0.5)
""",
    "gated_linear": """
from lit_effattn.ops.gated_linear import triton_kernels

for dtype, width, precision in [case.split() for case in sys.argv[1:]]:
    torch.set_float32_matmul_precision(precision)
    q, state = torch.zeros(1, 2, 256, int(width)), torch.zeros(1, 2, int(width), int(width))
    for gates in ((None, None), (q, q[..., 0])):
        triton_kernels.forward(q, q, q, state, *gates, None, 64)
        triton_kernels.backward(q, state, q, q, q, state, *gates, None, 64)
""",
}
GATED_CASES = [f"float32 {width} {precision}" for width in (64, 128) for precision in ("highest", "high", "medium")]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "cases", "launches", "capability"),
    [  # nine launches: forward three, backward six; six: forward one, backward two, with and without the delta rule
        ("linear", ["bfloat16 64 highest", "float32 128 highest"], 9, 90),
        ("linear", ["float32 128 highest"], 9, 80),
        ("linear", ["float32 64 highest", "bfloat16 128 highest"], 9, 86),
        ("favor", ["bfloat16 128 624 highest"], 9, 90),
        ("favor", ["float32 64 624 highest", "bfloat16 128 624 highest"], 9, 86),
        *(("gated_linear", GATED_CASES, 6, capability) for capability in (80, 86, 90)),
    ],
)
def test_all_kernels_compile_and_fit(name: str, cases: list[str], launches: int, capability: int, tmp_path):
    kernels.assert_compiles(COMPILE[name], cases, launches, tmp_path, capability)
