"""Linear attention's kernels against the definition: on a GPU where there is one, else interpreted on the CPU.

Interpreted, each chunk of each head takes some hundredths of a second: so few heads, and few positions.
"""

import os
import re
import warnings
from types import SimpleNamespace

import pytest
import torch

from lit_effattn.attention import LinearAttention, ReluFeatureMap
from lit_effattn.ops.linear import dispatch
from lit_effattn.ops.linear.dispatch import elu_linear_attention, use_kernels
from lit_effattn.ops.runtime import selection
from lit_effattn.ops.runtime.selection import KERNELS
from tests.support import kernels
from tests.support.kernels import Tensors, elu_definition, elu_features, gradients

pytest.importorskip("triton")
from lit_effattn.ops.linear import triton_kernels

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
C = triton_kernels.CHUNK
B, H = 2, 1
TRIAL = dispatch._failure

pytestmark = pytest.mark.skipif(
    not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET=1 was taken out of the environment"
)


@pytest.fixture(autouse=True)
def _asked_for(in_triton, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "_failure", lambda *of: None)  # there is no GPU to try them on


def inputs(n: int, d: int = 16, dv: int = 16, dtype: torch.dtype = torch.float32, b: int = B, h: int = H):
    """Queries, keys and values, with the strides that `Attention` gives them, and sums of some keys before."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    q, k, v = (random(b, n, h, width).to(dtype).transpose(1, 2) for width in (d, d, dv))
    before = elu_features(random(b, h, 3, d))
    tensors = [q, k, v, before.mT @ random(b, h, 3, dv), before.sum(2)]
    return [t.requires_grad_() for t in tensors]


def assert_defined(tensors, lengths=None, rtol=1e-4, **options):
    return kernels.assert_alike(elu_linear_attention, elu_definition, tensors, lengths, rtol=rtol, **options)


@pytest.mark.parametrize(
    ("n", "cut", "d", "dv"),
    [
        (1, 1, 16, 16),
        (C, 1, 5, 7),
        (C + 1, 2, 40, 24),
        (2 * C + 7, 1, 16, 16),
        (3 * C + 7, 3, 16, 16),  # groups of two chunks, the last not full
        (70, 2, 16, 100),  # blocks of v's columns, and shorter chunks in the backward pass
    ],
)
def test_outputs_sums_and_gradients_are_the_definitions(n: int, cut: int, d: int, dv: int, groups):
    groups(cut)
    assert_defined(inputs(n, d, dv), rtol=1e-5 if not GPU else 1e-4)


@pytest.mark.parametrize("cut", [1, 2])
def test_padding_is_nothing(cut: int, groups):
    groups(cut)
    n = C + 20
    tensors = inputs(n)
    lengths = torch.tensor([0, C - 9], device=DEVICE)
    found = assert_defined(tensors, lengths)
    assert torch.equal(found[1][0], tensors[3][0])  # the row without keys
    assert torch.equal(found[2][0], tensors[4][0])
    dk, dv = gradients(found, tensors)[1:3]
    assert (dk[0] == 0).all()
    assert (dv[1, :, C - 9 :] == 0).all()


def test_a_row_that_has_seen_nothing_is_zero(groups):
    q, k, v, s, z = inputs(5)
    found = elu_linear_attention(q, k, v, torch.zeros_like(s), torch.zeros_like(z), torch.tensor([0, 5], device=DEVICE))
    assert (found[0][0] == 0).all()
    assert all(t.isfinite().all() for t in gradients(found, (q, k, v)))
    assert_defined((q, k, v, s, z), eps=3.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_and_its_sums_do_not_overflow(dtype: torch.dtype, groups):
    tensors = inputs(C + 1, dtype=dtype)
    with torch.no_grad():
        tensors[3] *= 1e5  # float16 ends at 65,504
        tensors[4] *= 1e5
    found = assert_defined(tensors, rtol={torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype])
    assert [t.dtype for t in found] == [dtype, torch.float32, torch.float32]
    assert [t.dtype for t in gradients(found, tensors)] == [dtype] * 3 + [torch.float32] * 2


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # by the interpreter, of what is not chosen
def test_large_queries_and_keys_are_finite(groups):
    q, k, v, s, z = inputs(9)
    assert_defined([(100 * q).detach().requires_grad_(), (-100 * k).detach().requires_grad_(), v, s, z])


def test_what_is_not_a_number_is_not_hidden(groups):
    for i in range(3):
        tensors = [t.detach().clone() for t in inputs(4)]
        tensors[i][0, 0, 1, 3] = torch.nan
        out = elu_linear_attention(*tensors)[0]
        assert out[0, 0, 1:].isnan().any(-1).all() if i else out[0, 0, 1].isnan().all()
        assert out[1].isfinite().all()


def test_any_strides_and_heads(groups):
    q, k, v, s, z = (t.detach() for t in inputs(C + 3, b=2, h=2))
    k = k[:, :1].expand_as(q)  # shared by the heads
    v = v.mT.contiguous().mT
    s = s.mT.contiguous().mT
    q = torch.cat([q, q], 2)[:, :, ::2]
    assert {t.is_contiguous() for t in (q, k, v, s)} == {False}
    found = assert_defined([t.requires_grad_() for t in (q, k, v, s, z)])
    assert found[0].transpose(1, 2).flatten(2).data_ptr() == found[0].data_ptr()  # heads are joined without a copy


def test_nothing_is_kept_but_the_arguments(groups):
    tensors = inputs(3)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        elu_linear_attention(*tensors)
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in tensors}


@pytest.mark.parametrize(("heads", "n"), [(1, 1), (1, 65), (3, 4099), (1, 100_000), (7, 12_345), (1000, 777)])
def test_groups_fill_the_device_and_no_more(heads: int, n: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_kernels, "_at_once", lambda device: 264)
    q = torch.empty(1, 1, 1, 64).expand(1, heads, n, 64)
    plan = triton_kernels._Plan(q, q, backward=False)
    assert (plan.groups - 1) * plan.each < plan.chunks <= plan.groups * plan.each
    assert plan.groups == 1 or plan.groups * heads <= 264
    assert plan.groups in (1, plan.chunks) or plan.groups > min(64, 264 // heads) / 2


def test_compiled_without_a_break(groups):
    def doubled(q, k, v, s, z, lengths):
        return [2 * t for t in elu_linear_attention(q, k, v, s, z, lengths)]

    tensors, lengths = inputs(5), torch.tensor([5, 2], device=DEVICE)
    expected, found = (
        function(*tensors, lengths)
        for function in (doubled, torch.compile(doubled, fullgraph=True, backend="aot_eager"))
    )
    for a, b in zip([*found, *gradients(found, tensors)], [*expected, *gradients(expected, tensors)], strict=True):
        assert torch.equal(a, b)
    kernels.check_operators("elu_linear", (*tensors, lengths, 1e-6), lambda given, out: (*out, *given))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"k": torch.zeros(2, 1, 4, 16)},
            "k has shape (2, 1, 4, 16); with q of (2, 1, 5, 16) it should be (2, 1, 5, 16)",
        ),
        ({"s": torch.zeros(2, 1, 16, 8)}, "s has shape (2, 1, 16, 8)"),
        ({"lengths": torch.tensor([5])}, "lengths has shape (1,)"),
        ({"z": torch.zeros(2, 1, 16).double()}, "z is torch.float64; sums must be torch.float32: z.float()"),
        ({"q": torch.zeros(2, 1, 5, 16).double()}, "q is torch.float64; expected bfloat16, float16 or"),
        ({"v": torch.zeros(2, 1, 5, 129), "s": torch.zeros(2, 1, 16, 129)}, "v is torch.float32 of width 129"),
    ],
)
def test_what_they_can_not_take_is_refused(changed, words: str):
    arguments = dict(zip(("q", "k", "v", "s", "z"), inputs(5), strict=True)) | changed
    with pytest.raises(ValueError, match=re.escape(words)):
        elu_linear_attention(**arguments)


@pytest.mark.parametrize(
    ("setting", "newer", "half", "full"),
    [
        ("highest", "", "tf32", "tf32x3"),
        ("high", "", "tf32", "tf32"),
        ("medium", "", "bf16", "bf16"),
        (None, "ieee", "tf32", "tf32x3"),
        (None, "tf32", "tf32", "tf32"),
    ],
)
def test_pytorch_says_how_factors_are_rounded(setting: str | None, newer: str, half: str, full: str, monkeypatch):
    def said() -> str:
        if setting is None:
            raise RuntimeError("mix of the legacy and new APIs")
        return setting

    monkeypatch.setattr(torch, "get_float32_matmul_precision", said)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=newer))
    for dtype, expected in ((torch.bfloat16, half), (torch.float16, half), (torch.float32, full)):
        assert triton_kernels._precision(torch.empty(0, dtype=dtype), torch.empty(0, dtype=torch.bfloat16)) == expected


@pytest.mark.skipif(not GPU, reason="no GPU: the interpreter would take an hour")
@pytest.mark.gpu
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_long_sequences_on_the_gpu(dtype: torch.dtype, precision: str, width: int):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        tensors = inputs(8192, width, width, dtype, h=4)
        exact = dtype == torch.float32 and precision == "highest"
        found, again = (
            assert_defined(tensors, torch.tensor([8192, 5000], device=DEVICE), rtol=1e-4 if exact else 3e-2)
            for _ in range(2)
        )
        for a, b in zip([*found, *gradients(found, tensors)], [*again, *gradients(again, tensors)], strict=True):
            assert torch.equal(a, b)  # bit by bit
    finally:
        torch.set_float32_matmul_precision(before)


# ------------------------------------------------------------------------------------------------------- the dispatch


def test_chosen_on_cuda(capability):
    capability(9, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert use_kernels(Tensors(dtype=dtype), Tensors(width=128), elu=True)
        assert not use_kernels(Tensors("mps"), Tensors("mps"), elu=True)


@pytest.mark.parametrize(
    ("q", "v", "elu", "numbers", "reason"),
    [
        (Tensors(), Tensors(), False, (9, 0), "feature map is elu"),
        (Tensors(), Tensors(dtype=torch.float64), True, (9, 0), "torch.float64 is not one of their types"),
        (Tensors(width=129), Tensors(), True, (9, 0), "heads of width 129"),
        (Tensors(), Tensors(width=256), True, (9, 0), "heads of width 256"),
        (Tensors(), Tensors(), True, (7, 5), "GPU of old is older than compute capability 8.0"),
    ],
)
def test_the_plain_form_on_cuda_is_said_once(q, v, elu: bool, numbers, reason: str, capability, monkeypatch):
    capability(*numbers)
    with pytest.warns(UserWarning, match=f"plain form, slower than its kernels.*{reason}.*{KERNELS}=plain"):
        assert not use_kernels(q, v, elu=elu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not use_kernels(q, v, elu=elu)
        selection._notice.cache_clear()
        monkeypatch.setenv(KERNELS, "plain")
        assert not use_kernels(q, v, elu=elu)
    monkeypatch.setenv(KERNELS, "triton")
    with pytest.raises(ValueError, match=f"{KERNELS}=triton, but.*{reason}"):
        use_kernels(q, v, elu=elu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial_shows_what_is_wrong(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    arguments = torch.device(DEVICE), dtype, 16
    kernels.assert_trial_finds_faults(TRIAL, triton_kernels, C, arguments, monkeypatch)


def test_what_fails_its_trial_is_not_used(capability, monkeypatch: pytest.MonkeyPatch):
    capability(9, 0)
    monkeypatch.setattr(dispatch, "_failure", lambda *of: "they fail")
    with pytest.warns(UserWarning, match="can't be used: they fail"):
        assert not use_kernels(Tensors(), Tensors(), elu=True)
    monkeypatch.setenv(KERNELS, "triton")  # by who knows better, to see the error
    assert use_kernels(Tensors(), Tensors(), elu=True)


def test_what_is_forced(capability, monkeypatch: pytest.MonkeyPatch):
    capability(9, 0)
    monkeypatch.setenv(KERNELS, "plain")
    assert not use_kernels(Tensors(), Tensors(), elu=True)
    monkeypatch.setenv(KERNELS, "triton")
    assert use_kernels(Tensors(), Tensors(), elu=True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert use_kernels(Tensors("cpu"), Tensors("cpu"), elu=True)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"the tensors are on cpu.*TRITON_INTERPRET=1"):
        use_kernels(Tensors("cpu"), Tensors("cpu"), elu=True)
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install triton"):
        use_kernels(Tensors(), Tensors(), elu=True)
    monkeypatch.setenv(KERNELS, "cuda")
    with pytest.raises(ValueError, match=f"{KERNELS}='cuda' in the environment is not one of plain, triton, c"):
        use_kernels(Tensors(), Tensors(), elu=True)


def test_the_attention_is_the_same_through_them(monkeypatch: pytest.MonkeyPatch):
    called = []
    monkeypatch.setattr(
        "lit_effattn.attention.linear.elu_linear_attention",
        lambda *a, **options: called.append(a) or elu_linear_attention(*a, **options),
    )
    kernels.assert_same_through("triton", LinearAttention(8, 1).to(DEVICE), 9, called, monkeypatch)
    with pytest.raises(ValueError, match="EluFeatureMap"):
        LinearAttention(8, 1, feature_map=ReluFeatureMap).to(DEVICE)(torch.zeros(2, 9, 8, device=DEVICE))


# ------------------------------------------------------------------------------------------- compilation, without a GPU

COMPILE = """
from lit_effattn.ops.linear import triton_kernels

triton_kernels._at_once = lambda device: 8
for dtype, width, precision in [case.split() for case in sys.argv[1:]]:
    torch.set_float32_matmul_precision(precision)
    q = torch.zeros(1, 256, 2, int(width), dtype=getattr(torch, dtype)).transpose(1, 2)
    s, z = torch.zeros(1, 2, int(width), int(width)), torch.zeros(1, 2, int(width))
    triton_kernels.forward(q, q, q, s, z, torch.tensor([3]), 1e-6)
    triton_kernels.backward(q, s, z, q, q, q, s, z, torch.tensor([3]), 1e-6)
"""


@pytest.mark.exhaustive
def test_all_kernels_compile_for_compute_capability_9_and_fit(tmp_path):
    # Nine launches: forward three, backward six.
    kernels.assert_compiles(COMPILE, ["bfloat16 64 highest", "float32 128 highest"], 9, tmp_path)
