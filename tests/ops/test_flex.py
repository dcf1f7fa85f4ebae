"""FlexAttention against the plain form: forward on the CPU; both passes on a GPU, where there is one."""

import warnings

import pytest
import torch

from lit_effattn.ops import flex
from lit_effattn.ops.flex import FLEX, relative_flex_attention, use_flex
from lit_effattn.ops.relative import furthest, relative_attention

B, H, D = 2, 3, 16
CHUNK = 3

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward pass on CUDA alone")


def random(n: int, m: int, distances: int, dtype: torch.dtype = torch.float64, device: str = "cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, n, D), (B, H, m + n, D), (B, H, m + n, D), (H, distances, D), (H, D), (H, D)]
    return [torch.randn(shape, dtype=dtype, generator=generator).to(device) for shape in shapes]


def hidden(n: int, m: int) -> dict[str, torch.Tensor]:
    """Rows that have filled their memories as far as not at all, and queries that each have a first key."""
    there = torch.arange(m + n) >= torch.tensor([[m], [m // 2]])
    first = m + torch.arange(n) - torch.tensor([[1], [4]])
    return {"there": there, "first": first}


@pytest.mark.parametrize(
    ("n", "m", "window", "dtype"),
    [
        (1, 0, None, torch.float64),
        (7, 5, None, torch.float32),
        (7, 5, 1, torch.float64),
        (7, 5, 4, torch.float64),
        (7, 0, 50, torch.float64),
        (130, 9, 20, torch.float32),
    ],
)
@pytest.mark.parametrize("given", [(), ("there", "first")], ids="+".join)
def test_causal_is_the_plain_form(n: int, m: int, window: int | None, dtype: torch.dtype, given: tuple[str, ...]):
    tensors = random(n, m, furthest(n, m, window, CHUNK) + 1, dtype)
    options = {name: hidden(n, m)[name] for name in given} | {"window": window}
    plain = relative_attention(*tensors, **options, chunk_size=CHUNK)
    torch.testing.assert_close(relative_flex_attention(*tensors, **options), plain)


@pytest.mark.parametrize("n", [1, 9])
def test_bidirectional_is_the_plain_form(n: int):
    tensors = random(n, 0, 2 * n - 1)
    there = torch.arange(n) < torch.tensor([[n], [n // 2 + 1]])
    for options in ({}, {"there": there}):
        plain = relative_attention(*tensors, causal=False, **options)
        torch.testing.assert_close(relative_flex_attention(*tensors, causal=False, **options), plain)


@pytest.mark.parametrize("window", [None, 6])
def test_gradients_are_right_where_no_kernel_is_made(window: int | None, monkeypatch: pytest.MonkeyPatch):
    """What PyTorch refuses on the CPU it can do there, uncompiled; a GPU's kernels are the next test's."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    n, m = 9, 5
    tensors = [t.requires_grad_() for t in random(n, m, furthest(n, m, window, CHUNK) + 1)]
    options = hidden(n, m) | {"window": window}
    plain = relative_attention(*tensors, **options, chunk_size=CHUNK)
    ours = relative_flex_attention(*tensors, **options)
    cotangent = torch.randn_like(plain)
    wanted, found = (torch.autograd.grad(y, tensors, cotangent) for y in (plain, ours))
    torch.testing.assert_close(found, wanted)


@no_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "m", "window"), [(256, 256, None), (300, 77, 100), (200, 0, None)])
def test_gradients_are_the_plain_forms(n: int, m: int, window: int | None, dtype: torch.dtype):
    exact = [t.requires_grad_() for t in random(n, m, furthest(n, m, window, 128) + 1, device="cuda")]
    rounded = [t.detach().to(dtype).requires_grad_() for t in exact]
    options = {name: t.cuda() for name, t in hidden(n, m).items()} | {"window": window}
    options["first"] = options["first"] - 60
    plain, ours = relative_attention(*exact, **options), relative_flex_attention(*rounded, **options)
    tolerance = {torch.float32: 1e-2, torch.bfloat16: 5e-2}[dtype]  # float32's products may be TF32's
    torch.testing.assert_close(ours.double(), plain, rtol=tolerance, atol=tolerance)
    cotangent = torch.randn_like(plain)
    for tensor, other in zip(exact, rounded, strict=True):
        (wanted,) = torch.autograd.grad(plain, tensor, cotangent, retain_graph=True)
        (found,) = torch.autograd.grad(ours, other, cotangent.to(dtype), retain_graph=True)
        error = (found.double() - wanted).norm() / wanted.norm()
        assert error < tolerance


# ------------------------------------------------------------------------------------------------------- the dispatch


class Queries:
    """What `use_flex` asks about, of a GPU that is not here."""

    def __init__(self, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, width: int = 64) -> None:
        self.device, self.dtype, self.width = torch.device(device), dtype, width

    def size(self, dim: int) -> int:
        return self.width


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch):
    flex._notice.cache_clear()
    monkeypatch.setenv(FLEX, "1")
    yield
    flex._notice.cache_clear()


def test_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    for value in (None, "0", ""):
        monkeypatch.delenv(FLEX, raising=False) if value is None else monkeypatch.setenv(FLEX, value)
        assert not use_flex(Queries())


@pytest.mark.usefixtures("asked")
def test_where_it_can_be():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert use_flex(Queries(dtype=dtype))


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("queries", "dropout", "reason"),
    [
        (Queries("cpu"), 0, "tensors are on cpu"),
        (Queries(dtype=torch.float64), 0, "float64 is none"),
        (Queries(width=8), 0, "heads of width 8"),
        (Queries(), 0.1, "dropout=0.1"),
    ],
)
def test_where_it_can_not_be_is_said_once(queries: Queries, dropout: float, reason: str):
    with pytest.warns(UserWarning, match=f"{FLEX}=1, but.*the plain form is: .*{reason}"):
        assert not use_flex(queries, dropout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not use_flex(queries, dropout)


@pytest.mark.usefixtures("asked")
def test_not_where_results_must_repeat():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.warns(UserWarning, match="deterministic"):
            assert not use_flex(Queries())
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_plain_form_hands_over_what_it_was_given(monkeypatch: pytest.MonkeyPatch):
    n, m = 7, 5
    tensors, options = random(n, m, m + n), hidden(n, m) | {"window": 9}
    plain = relative_attention(*tensors, **options)
    monkeypatch.setattr("lit_effattn.ops.relative.use_flex", lambda q, dropout: dropout == 0)
    torch.testing.assert_close(relative_attention(*tensors, **options), plain)
    monkeypatch.setattr("lit_effattn.ops.relative.relative_flex_attention", lambda *a, **options: options)
    assert relative_attention(*tensors, **options) == options | {"causal": True}
    assert isinstance(relative_attention(*tensors, **options, dropout=0.5), torch.Tensor)
