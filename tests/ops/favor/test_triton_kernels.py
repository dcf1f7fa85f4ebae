"""Performer's kernels against the definition: on a GPU where there is one, else interpreted on the CPU.

Interpreted, each chunk of each head takes some hundredths of a second: so few heads, few positions, and few features.
"""

import os
import re

import numpy as np
import pytest
import torch

from lit_effattn.attention import PerformerAttention
from lit_effattn.ops.favor import dispatch
from lit_effattn.ops.favor.dispatch import positive_favor, use_kernels
from tests.support import kernels
from tests.support.kernels import Tensors, gradients, log_positive, positive_definition, summed_keys

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime import interpreter

from lit_effattn.ops.favor import triton_kernels

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
C, BF = triton_kernels.CHUNK, triton_kernels.FEATURES
B, H, E, D, F = 2, 1, 16, 8, BF + 8
SCALE = E**-0.25
TRIAL = dispatch._failure

pytestmark = [
    pytest.mark.skipif(
        not GPU and os.environ.get("TRITON_INTERPRET") != "1",
        reason="TRITON_INTERPRET=1 was taken out of the environment",
    ),
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value) encountered"
    ),  # by the interpreter, of what is not chosen
]


def inputs(n, e=E, d=D, f=F, dtype=torch.float32, b=B, h=H, seen=True, louder=None):
    """Queries, keys and values, with the strides that `Attention` gives them, directions, and sums of keys before.

    `louder`: by how much keys and queries are multiplied, (N, 1).
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = (random(b, n, h, width).transpose(1, 2) for width in (e, e, d))
    omega = random(h, f, e)
    s, z, m = torch.zeros(b, h, f, d), torch.zeros(b, h, f), torch.full((b, h, f), -torch.inf)
    if seen:
        s, z, m = summed_keys(log_positive(random(b, h, 3, e), omega), random(b, h, 3, d))
    if louder is not None:
        q, k = q * louder, k * louder
    heads = [t.to(dtype).transpose(1, 2).contiguous().transpose(1, 2).to(DEVICE).requires_grad_() for t in (q, k, v)]
    return [*heads, omega.to(DEVICE), s.to(DEVICE).requires_grad_(), z.to(DEVICE).requires_grad_(), m.to(DEVICE)]


def kernel(q, *others):
    return positive_favor(q, *others, scale=q.size(-1) ** -0.25)


def assert_defined(tensors, lengths=None, rtol=1e-5, which="qkvsz"):
    which = ["qkvwsz".index(name) for name in which]
    rtol = max(rtol, 1e-4) if GPU else rtol
    return kernels.assert_alike(kernel, positive_definition, tensors, lengths, rtol=rtol, which=which)


@pytest.fixture(autouse=True)
def _bfloat16_products(monkeypatch: pytest.MonkeyPatch):
    """The interpreter multiplies bfloat16's bits as if they were integers."""
    right = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *others):
        return right(self, *(_in_float32(t) for t in (a, b)), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _in_float32(t):
    if t.dtype.scalar != tl.bfloat16:
        return t
    return interpreter.TensorHandle((t.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32), tl.float32)


@pytest.mark.parametrize(
    ("n", "cut", "f", "seen"),
    [
        (1, 1, 7, True),
        (C - 1, 1, F, True),
        (C + 1, 1, 2 * BF, False),
        (2 * C + 7, 2, F, True),  # groups of two chunks and one
        (2 * C + 7, 3, 3, True),
    ],
)
def test_outputs_sums_and_gradients_are_the_definitions(n: int, cut: int, f: int, seen: bool, groups):
    groups(cut)
    found = assert_defined(inputs(n, f=f, seen=seen), which="qkvsz" if seen else "qkv")
    assert not found[3].requires_grad


def test_widths_may_differ(groups):
    assert_defined(inputs(C + 3, e=16, d=40, f=5))
    assert_defined(inputs(C + 3, e=5, d=7, f=5))


def louder(n: int, first: int, last: int, by: float) -> torch.Tensor:
    """Keys of large norms have small features: those that come after them rise far."""
    return torch.where((torch.arange(n) >= first) & (torch.arange(n) < last), by, 1.0)[:, None]


@pytest.mark.parametrize(
    ("n", "first", "last", "cut", "seen"),
    [
        (C, 0, 20, 1, False),  # the first chunk's reference is its first key
        (C + 20, 0, C + 5, 2, False),
    ],
)
def test_keys_that_rise_far(n: int, first: int, last: int, cut: int, seen: bool, groups):
    groups(cut)
    assert_defined(inputs(n, seen=seen, f=9, louder=louder(n, first, last, 12.0)), which="qkv")


def test_keys_that_rise_far_above_those_before_the_sequence(groups):
    tensors = inputs(9)  # more than one block of features
    with torch.no_grad():
        tensors[6] -= 200.0  # as if they had been very long
    assert_defined(tensors)


def test_a_later_key_changes_no_bit_however_far_it_rises(groups):
    n = C
    q, k, v, omega, *sums = inputs(n, b=1, seen=False, louder=louder(n, 0, 30, 12.0))
    sums[2] = torch.full_like(sums[2], -60.0)
    before = kernel(q, k, v, omega, *sums)[0]
    for t in (9, 40):
        changed = k.detach().clone()
        changed[:, :, t] /= 12.0 if t < 30 else 3.0
        after = kernel(q, changed, v, omega, *sums)[0]
        assert torch.equal(after[:, :, :t], before[:, :, :t])
        assert not torch.equal(after[:, :, t:], before[:, :, t:])


@pytest.mark.parametrize("cut", [1, 2])
def test_padding_is_nothing(cut: int, groups):
    groups(cut)
    n = C + 20
    tensors, lengths = inputs(n), torch.tensor([0, C - 9], device=DEVICE)
    found = assert_defined(tensors, lengths, which="kvsz")
    for a, b in zip(found[1:], tensors[4:], strict=True):
        torch.testing.assert_close(a[0], b[0], rtol=0, atol=0)  # the row without keys
    dq, dk, dv, *_ = gradients(found, tensors)
    assert dq.isfinite().all()
    assert (dk[0] == 0).all()
    assert (dv[1, :, C - 9 :] == 0).all()


def test_a_row_that_has_seen_nothing_is_zero(groups):
    tensors = inputs(5, seen=False)
    found = kernel(*tensors, torch.tensor([0, 5], device=DEVICE))
    assert all((t[0] == 0).all() for t in found[:3])
    assert (found[3][0] == -torch.inf).all()
    for t in gradients(found, tensors):
        assert t.isfinite().all()
        assert (t[0] == 0).all()


@pytest.mark.parametrize(
    ("dtype", "precision", "rtol"),
    [
        (torch.bfloat16, "highest", 5e-3),
        (torch.bfloat16, "medium", 2e-2),
        (torch.float16, "highest", 1e-3),
        (torch.float32, "medium", 2e-2),
    ],
)
def test_half_precision_is_near(dtype: torch.dtype, precision: str, rtol: float, groups, monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    tensors = inputs(C + 1, dtype=dtype, f=BF)
    found = assert_defined(tensors, rtol=rtol)
    assert [t.dtype for t in found] == [dtype] + [torch.float32] * 3
    assert [t.dtype for t in gradients(found, tensors)] == [dtype] * 3 + [torch.float32] * 2
    if precision == "highest":  # what is in exponents is not rounded
        m = positive_definition(*(t.detach().double() for t in tensors))[3]
        torch.testing.assert_close(found[3].double(), m, rtol=1e-5, atol=1e-5)


def test_any_strides_and_heads(groups):
    q, k, v, omega, s, z, m = (t.detach() for t in inputs(9, h=2, f=5))
    q = torch.cat([q, q], 2)[:, :, ::2]
    k, v = k[:, :1].expand_as(q), v.mT.contiguous().mT
    s, omega = s.mT.contiguous().mT, omega.mT.contiguous().mT
    assert {t.is_contiguous() for t in (q, k, v, s, omega)} == {False}
    for t in (q, k, v, s, z):
        t.requires_grad_()
    found = assert_defined([q, k, v, omega, s, z, m])
    assert found[0].transpose(1, 2).flatten(2).data_ptr() == found[0].data_ptr()  # heads are joined without a copy


def test_arguments_are_not_changed_and_little_more_is_kept(groups):
    tensors = inputs(3)
    before = [t.detach().clone() for t in tensors]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        found = kernel(*tensors)
    gradients(found, tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    given = {t.data_ptr() for t in tensors}
    made = sorted(t.numel() for t in kept if t.data_ptr() not in given)
    assert made == [0, B * H * 3, B * H * 3, B * H * 3 * D]  # tops, denominators and outputs


def test_compiled_without_a_break(groups):
    def doubled(*tensors):
        return [2 * t for t in kernel(*tensors)]

    arguments = (*inputs(5, f=3), torch.tensor([5, 2], device=DEVICE))
    expected, found = (
        function(*arguments) for function in (doubled, torch.compile(doubled, fullgraph=True, backend="aot_eager"))
    )
    for a, b in zip([*found, *gradients(found, arguments)], [*expected, *gradients(expected, arguments)], strict=True):
        assert torch.equal(a, b)
    kernels.check_operators(
        "positive_favor",
        (*arguments, SCALE),
        lambda given, out: (*out[:3], *given[:-1], out[0], *out[4:], given[-1]),
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"k": torch.zeros(2, 1, 4, 16)},
            "k has shape (2, 1, 4, 16); with q of (2, 1, 5, 16) it should be (2, 1, 5, 16)",
        ),
        ({"omega": torch.zeros(2, F, 16)}, f"omega has shape (2, {F}, 16)"),
        ({"m": torch.zeros(2, 1, 3)}, "m has shape (2, 1, 3)"),
        ({"lengths": torch.tensor([5])}, "lengths has shape (1,)"),
        ({"m": torch.zeros(2, 1, F).double()}, "m is torch.float64; sums must be torch.float32: m.float()"),
        ({"q": torch.zeros(2, 1, 5, 16).double()}, "q is torch.float64; expected bfloat16, float16 or float32"),
        (
            {"v": torch.zeros(2, 1, 5, 65), "s": torch.zeros(2, 1, F, 65)},
            "v is torch.float32 of width 65; expected at most 64: `causal_favor`",
        ),
        (
            {"omega": torch.zeros(1, F, 16).requires_grad_()},
            "which positive_favor does not compute; pass omega.detach()",
        ),
    ],
)
def test_what_they_can_not_take_is_refused(changed, words: str):
    arguments = dict(zip(("q", "k", "v", "omega", "s", "z", "m"), inputs(5), strict=True)) | changed
    with pytest.raises(ValueError, match=re.escape(words)):
        positive_favor(**arguments)


@pytest.mark.skipif(not GPU, reason="no GPU: the interpreter would take an hour")
@pytest.mark.gpu
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_long_sequences_on_the_gpu(dtype: torch.dtype, precision: str, width: int):
    if dtype == torch.float32 and width > dispatch._WIDEST_IN_FULL:
        pytest.skip("wider than the kernels take in float32")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        n = 1500  # the definition makes N × N × F
        tensors = inputs(n, width, width, 72, dtype, louder=louder(n, 0, 700, 8.0))
        lengths = torch.tensor([n, 1000], device=DEVICE)
        exact = dtype == torch.float32 and precision == "highest"
        found, again = (assert_defined(tensors, lengths, rtol=1e-4 if exact else 3e-2) for _ in range(2))
        for a, b in zip([*found, *gradients(found, tensors)], [*again, *gradients(again, tensors)], strict=True):
            assert torch.equal(a, b)  # bit by bit
    finally:
        torch.set_float32_matmul_precision(before)


# ------------------------------------------------------------------------------------------------------- the dispatch


@pytest.fixture(autouse=True)
def _asked_for(in_triton, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "_failure", lambda *of: None)  # there is no GPU to try them on


def test_chosen_on_cuda_and_what_is_not_is_said(capability, monkeypatch: pytest.MonkeyPatch, recwarn):
    """How a form is chosen is tested with linear attention's kernels."""
    capability(9, 0)
    assert use_kernels(Tensors(width=128), Tensors(), 256)
    assert use_kernels(Tensors(dtype=torch.float32), Tensors(dtype=torch.float32), 256)
    assert not recwarn
    wide = Tensors(width=65, dtype=torch.float32)
    with pytest.warns(UserWarning, match="Performer runs in its plain form.*width 65 in torch.float32 are wider than"):
        assert not use_kernels(wide, Tensors(), 256)
    monkeypatch.setattr(dispatch, "_failure", lambda *of: "they fail")
    with pytest.warns(UserWarning, match="can't be used: they fail"):
        assert not use_kernels(Tensors(), Tensors(), 256)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)])
def test_a_trial_shows_what_is_wrong(dtype: torch.dtype, groups, monkeypatch: pytest.MonkeyPatch):
    arguments = torch.device(DEVICE), dtype, 16, 24
    if dtype == torch.bfloat16:
        TRIAL.cache_clear()
        with torch.inference_mode():
            assert TRIAL(*arguments) is None
    else:
        kernels.assert_trial_finds_faults(TRIAL, triton_kernels, C, arguments, monkeypatch)


@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
def test_the_attention_is_the_same_through_them(features: str, monkeypatch: pytest.MonkeyPatch):
    called = []
    monkeypatch.setattr(
        "lit_effattn.attention.performer.positive_favor", lambda *a, **o: called.append(a) or positive_favor(*a, **o)
    )
    attention = PerformerAttention(8, 2, features=features, n_features=6).to(DEVICE)
    kernels.assert_same_through("triton", attention, 9, called, monkeypatch)


# ------------------------------------------------------------------------------------------- compilation, without a GPU

COMPILE = """
from lit_effattn.ops.favor import triton_kernels

triton_kernels._at_once = lambda device: 8
for dtype, width, features, precision in [case.split() for case in sys.argv[1:]]:
    torch.set_float32_matmul_precision(precision)
    width, features, lengths = int(width), int(features), torch.tensor([3])
    q = torch.zeros(1, 256, 2, width, dtype=getattr(torch, dtype)).transpose(1, 2)
    omega, s, z = torch.zeros(2, features, width), torch.zeros(1, 2, features, width), torch.zeros(1, 2, features)
    top = torch.zeros(1, 2, 256)
    triton_kernels.forward(q, q, q, omega, s, z, z, lengths, 0.5)
    triton_kernels.backward(q, s, z, q, q, q, omega, s, z, z, lengths, q, q, top, top, 0.5)
"""


@pytest.mark.exhaustive
def test_all_kernels_compile_for_compute_capability_9_and_fit(tmp_path):
    # Nine launches: forward three, backward six. float32 of half the width takes as much, and longer to compile.
    kernels.assert_compiles(COMPILE, ["bfloat16 128 624 highest"], 9, tmp_path)
