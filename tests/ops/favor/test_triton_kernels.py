"""Performer's kernels against the definition: on a GPU where there is one, else interpreted on the CPU.

Interpreted, each chunk of each head takes some hundredths of a second: so few heads, few positions, and few features.
"""

import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from lit_effattn.attention import PerformerAttention
from lit_effattn.ops.favor import dispatch
from lit_effattn.ops.favor.dispatch import positive_favor, use_kernels
from lit_effattn.ops.runtime import selection
from lit_effattn.ops.runtime.selection import KERNELS
from tests.support.compile_for_gpu import FOR_9_0, MOST_SHARED

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
NAMES = ("out", "s", "z", "m", "dq", "dk", "dv", "ds", "dz")

pytestmark = [
    pytest.mark.skipif(
        not GPU and os.environ.get("TRITON_INTERPRET") != "1",
        reason="TRITON_INTERPRET=1 was taken out of the environment",
    ),
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value) encountered"
    ),  # by the interpreter, of what is not chosen
]


def log_features(x, omega):
    """Choromanski et al. 2020, lemma 1."""
    return x @ omega.mT - x.square().sum(-1, keepdim=True) / 2 - math.log(omega.size(1)) / 2


def definition(q, k, v, omega, s, z, m, lengths=None, scale=SCALE):
    """Every query's products with every key up to it, in logarithms, which no norm takes out of range."""
    b, _, n, _ = k.shape
    valid = torch.full((b,), n, device=k.device) if lengths is None else lengths
    there = (torch.arange(n, device=k.device) < valid[:, None])[:, None, :, None]
    log_q, log_k = log_features(scale * q, omega), log_features(scale * k, omega)
    sees = there.mT & torch.ones(n, n, dtype=torch.bool, device=k.device).tril()  # (B, 1, N, N)
    log_w = (log_q[:, :, :, None] + log_k[:, :, None]).logsumexp(-1).masked_fill(~sees, -torch.inf)
    log_s = log_q + m[:, :, None]  # (B, H, N, F)
    top = torch.maximum(log_w.amax(-1), log_s.amax(-1)).detach()[..., None]
    top = top.masked_fill(top == -torch.inf, 0)
    w, p = (log_w - top).exp(), (log_s - top).exp()
    below = w.sum(-1) + (p @ z[..., None]).squeeze(-1)
    out = (w @ v + p @ s) / below.masked_fill(below == 0, 1)[..., None]
    after = torch.maximum(m, log_k.detach().masked_fill(~there, -torch.inf).amax(2))
    finite = after.masked_fill(after == -torch.inf, 0)
    kept, keys = (m - finite).exp(), (log_k - finite[:, :, None]).exp().masked_fill(~there, 0)
    return out, s * kept[..., None] + keys.mT @ v, z * kept + keys.sum(2), after


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
        log_k, values = log_features(e**-0.25 * random(b, h, 3, e), omega), random(b, h, 3, d)
        m = log_k.amax(2)
        before = (log_k - m[:, :, None]).exp()
        s, z = before.mT @ values, before.sum(2)
    if louder is not None:
        q, k = q * louder, k * louder
    heads = [t.to(dtype).transpose(1, 2).contiguous().transpose(1, 2).to(DEVICE).requires_grad_() for t in (q, k, v)]
    return [*heads, omega.to(DEVICE), s.to(DEVICE).requires_grad_(), z.to(DEVICE).requires_grad_(), m.to(DEVICE)]


def gradients(results, tensors, names="qkvsz"):
    """Return those of q, k, v, s and z, or of some, given all arguments."""
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(t.shape, generator=generator).to(t) for t in results[:3]]
    wanted = [t for name, t in zip("qkvwsz", tensors, strict=False) if name in names]
    return torch.autograd.grad(results[:3], wanted, cotangents, retain_graph=True)


def assert_defined(tensors, lengths=None, rtol=1e-5, names="qkvsz"):
    """Outputs, last sums and gradients are the definition's in float64, each to `rtol` of its norm."""
    rtol = max(rtol, 1e-4) if GPU else rtol
    found = positive_favor(*tensors, lengths, scale=SCALE)
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    expected = definition(*exact, lengths)
    pairs = [*zip(found, expected, strict=True)]
    pairs += zip(gradients(found, tensors, names), gradients(expected, exact, names), strict=True)
    for name, (a, b) in zip([*NAMES[:4], *(f"d{name}" for name in names)], pairs, strict=True):
        assert a.shape == b.shape
        a, b = (t.double().nan_to_num(neginf=-1e3) for t in (a, b))
        error = (a - b).norm() / b.norm().clamp(min=1e-30)
        assert error < rtol, f"{name}: {error}"
    return found


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


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch):
    """Say into how many groups a head's chunks are cut, if there are as many chunks."""

    def cut(into: int) -> None:
        monkeypatch.setattr(triton_kernels, "_at_once", lambda device: into * B * H)

    cut(1)
    return cut


@pytest.mark.parametrize(
    ("n", "cut", "f", "seen"),
    [
        (1, 1, 7, True),
        (C - 1, 1, F, True),
        (C + 1, 1, 2 * BF, False),
        (2 * C + 7, 1, F, True),
        (2 * C + 7, 2, F, True),  # groups of two chunks and one
        (2 * C + 7, 3, 3, True),
        (2 * C, 2, F, False),
    ],
)
def test_outputs_sums_and_gradients_are_the_definitions(n: int, cut: int, f: int, seen: bool, groups):
    groups(cut)
    found = assert_defined(inputs(n, f=f, seen=seen), names="qkvsz" if seen else "qkv")
    assert not found[3].requires_grad


def test_widths_may_differ(groups):
    assert_defined(inputs(C + 3, e=16, d=40, f=5))
    tensors = inputs(C + 3, e=5, d=7, f=5)
    tensors[3] = tensors[3] * (5 / E) ** 0.25
    assert_defined(tensors)


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
    assert_defined(inputs(n, seen=seen, f=9, louder=louder(n, first, last, 12.0)), names="qkv")


def test_keys_that_rise_far_above_those_before_the_sequence(groups):
    tensors = inputs(9)  # more than one block of features
    with torch.no_grad():
        tensors[6] -= 200.0  # as if they had been very long
    assert_defined(tensors)


def test_a_later_key_changes_no_bit_however_far_it_rises(groups):
    n = C
    q, k, v, omega, *sums = inputs(n, b=1, seen=False, louder=louder(n, 0, 30, 12.0))
    sums[2] = torch.full_like(sums[2], -60.0)
    before = positive_favor(q, k, v, omega, *sums, scale=SCALE)[0]
    for t in (9, 40):
        changed = k.detach().clone()
        changed[:, :, t] /= 12.0 if t < 30 else 3.0
        after = positive_favor(q, changed, v, omega, *sums, scale=SCALE)[0]
        assert torch.equal(after[:, :, :t], before[:, :, :t])
        assert not torch.equal(after[:, :, t:], before[:, :, t:])


@pytest.mark.parametrize("cut", [1, 2])
def test_padding_is_nothing(cut: int, groups):
    groups(cut)
    n = C + 20
    tensors, lengths = inputs(n), torch.tensor([0, C - 9], device=DEVICE)
    found = assert_defined(tensors, lengths, names="kvsz")
    for a, b in zip(found[1:], tensors[4:], strict=True):
        torch.testing.assert_close(a[0], b[0], rtol=0, atol=0)  # the row without keys
    dq, dk, dv = gradients(found, tensors, "qkv")
    assert dq.isfinite().all()
    assert (dk[0] == 0).all()
    assert (dv[1, :, C - 9 :] == 0).all()


def test_a_row_that_has_seen_nothing_is_zero(groups):
    tensors = inputs(5, seen=False)
    found = positive_favor(*tensors, torch.tensor([0, 5], device=DEVICE), scale=SCALE)
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
        m = definition(*(t.detach().double() for t in tensors))[3]
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
        found = positive_favor(*tensors, scale=SCALE)
    gradients(found, tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    given = {t.data_ptr() for t in tensors}
    made = sorted(t.numel() for t in kept if t.data_ptr() not in given)
    assert made == [0, B * H * 3, B * H * 3, B * H * 3 * D]  # tops, denominators and outputs


def test_compiled_without_a_break(groups):
    def doubled(*tensors):
        return [2 * t for t in positive_favor(*tensors, scale=SCALE)]

    arguments = (*inputs(5, f=3), torch.tensor([5, 2], device=DEVICE))
    expected, found = (
        function(*arguments) for function in (doubled, torch.compile(doubled, fullgraph=True, backend="aot_eager"))
    )
    for a, b in zip([*found, *gradients(found, arguments)], [*expected, *gradients(expected, arguments)], strict=True):
        assert torch.equal(a, b)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.lit_effattn.positive_favor, (*arguments, SCALE), test_utils=checks)


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
        found = assert_defined(tensors, lengths, rtol=1e-4 if exact else 3e-2)
        again = positive_favor(*tensors, lengths, scale=SCALE)
        for a, b in zip([*found, *gradients(found, tensors)], [*again, *gradients(again, tensors)], strict=True):
            assert torch.equal(a, b)  # bit by bit
    finally:
        torch.set_float32_matmul_precision(before)


# ------------------------------------------------------------------------------------------------------- the dispatch


class Tensors:
    """What `use_kernels` asks about, of a GPU that is not here."""

    def __init__(self, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, width: int = 64) -> None:
        self.device, self.dtype, self.width = torch.device(device), dtype, width

    def size(self, dim: int) -> int:
        return self.width


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KERNELS, "triton")  # on the CPU those in C++ are used
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    selection._notice.cache_clear()
    monkeypatch.setattr(dispatch, "_failure", lambda *of: None)  # there is no GPU to try them on
    yield
    selection._notice.cache_clear()


@pytest.mark.parametrize(
    ("q", "reason"),
    [
        (Tensors(dtype=torch.float64), "torch.float64 is not one of their types"),
        (Tensors(width=129), "heads of width 129"),
        (Tensors(width=65, dtype=torch.float32), "heads of width 65 in torch.float32 are wider than 64"),
    ],
)
def test_chosen_on_cuda_and_what_is_not_is_said_once(q, reason: str, monkeypatch: pytest.MonkeyPatch, recwarn):
    monkeypatch.delenv(KERNELS)
    assert use_kernels(Tensors(width=128), Tensors(), 256)
    assert use_kernels(Tensors(dtype=torch.float32), Tensors(dtype=torch.float32), 256)
    assert not use_kernels(Tensors("mps"), Tensors("mps"), 256)
    assert not recwarn
    with pytest.warns(UserWarning, match=f"Performer runs in its plain form, slower than its kernels.*{reason}"):
        assert not use_kernels(q, Tensors(), 256)
    assert not use_kernels(q, Tensors(), 256)
    monkeypatch.setenv(KERNELS, "plain")
    assert not use_kernels(Tensors(), Tensors(), 256)
    monkeypatch.setenv(KERNELS, "triton")
    with pytest.raises(ValueError, match=f"the kernels of Performer can't be used: {reason}"):
        use_kernels(q, Tensors(), 256)
    assert not recwarn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial_shows_what_is_wrong(dtype: torch.dtype, groups, monkeypatch: pytest.MonkeyPatch):
    device = torch.device(DEVICE)
    TRIAL.cache_clear()
    with torch.inference_mode():  # generation may be what uses them first
        assert TRIAL(device, dtype, 16, 24) is None
    if dtype == torch.bfloat16:
        return
    right = triton_kernels.backward

    def wrong(*arguments):
        found = right(*arguments)
        found[1][0, 1, C : 2 * C] = 0  # the gradients of a chunk of one head's keys
        return found

    TRIAL.cache_clear()
    monkeypatch.setattr(triton_kernels, "backward", wrong)
    assert re.search(r"they are off by \d+\.\d%", TRIAL(device, dtype, 16, 24))
    TRIAL.cache_clear()


def test_what_fails_its_trial_is_not_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(KERNELS)
    monkeypatch.setattr(dispatch, "_failure", lambda *of: "they fail")
    with pytest.warns(UserWarning, match="can't be used: they fail"):
        assert not use_kernels(Tensors(), Tensors(), 256)


@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
def test_the_attention_is_the_same_through_them(features: str, monkeypatch: pytest.MonkeyPatch):
    attention = PerformerAttention(8, 2, features=features, n_features=6).to(DEVICE)
    x, lengths = torch.randn(2, 9, 8, device=DEVICE), torch.tensor([9, 4], device=DEVICE)
    called = []
    monkeypatch.setattr(
        "lit_effattn.attention.performer.positive_favor", lambda *a, **o: called.append(a) or positive_favor(*a, **o)
    )

    def both_ways(form: str) -> list[torch.Tensor]:
        monkeypatch.setenv(KERNELS, form)
        y, state = attention(x[:, :3])
        y, state = attention(x[:, 3:], state, lengths - 3)
        y, state = attention(torch.cat([y, x], 1)[:, :1], state)  # a step
        return [y, *state, *torch.autograd.grad(y.sum() + state.s.sum(), attention.parameters(), allow_unused=True)]

    plain, ours = both_ways("plain"), both_ways("triton")
    assert len(called) == 2
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


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
LAUNCHES = 9  # forward three, backward six


@pytest.mark.exhaustive
def test_all_kernels_compile_for_compute_capability_9_and_fit(tmp_path):
    cases = ["bfloat16 128 624 highest"]  # float32 of half the width takes as much, and longer to compile
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", FOR_9_0 + COMPILE, *cases], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert all(int(line.split()[-1]) <= MOST_SHARED for line in lines), result.stdout
    assert len(lines) == LAUNCHES * len(cases)
