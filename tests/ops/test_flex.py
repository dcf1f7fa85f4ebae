"""FlexAttention against the plain form: forward on the CPU; both passes on a GPU, where there is one."""

import warnings

import pytest
import torch

from lit_effattn.attention import SparseAttention
from lit_effattn.ops import fixed_attention, flex, sparse, strided_attention
from lit_effattn.ops.flex import FLEX, Band, relative_flex_attention, use_flex
from lit_effattn.ops.relative import furthest, relative_attention

B, H, D = 2, 3, 16
CHUNK = 3

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has a backward pass on CUDA alone")


def random(n: int, m: int, distances: int, dtype: torch.dtype = torch.float64, device: str = "cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, n, D), (B, H, m + n, D), (B, H, m + n, D), (H, distances, D), (H, D), (H, D)]
    return [torch.randn(shape, dtype=dtype, generator=generator).to(device) for shape in shapes]


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch):
    """Let a forward pass do without Dynamo, which takes a second a call; those with gradients are traced."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


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
@pytest.mark.usefixtures("untraced")
def test_causal_is_the_plain_form(n: int, m: int, window: int | None, dtype: torch.dtype, given: tuple[str, ...]):
    tensors = random(n, m, furthest(n, m, window, CHUNK) + 1, dtype)
    options = {name: hidden(n, m)[name] for name in given} | {"window": window}
    plain = relative_attention(*tensors, **options, chunk_size=CHUNK)
    torch.testing.assert_close(relative_flex_attention(*tensors, **options), plain)


@pytest.mark.parametrize("n", [1, 9])
@pytest.mark.usefixtures("untraced")
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


# ------------------------------------------------------------------------------------------------------ sparse patterns


@pytest.fixture
def through_flex(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let sparse attention take FlexAttention wherever the last of the list is True; gradients are as above."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    takes = [False]
    monkeypatch.setattr(sparse, "use_flex", lambda t, dropout, *, batch: takes[-1] and dropout == 0)
    return takes


def both_forms(takes: list[bool], function) -> list[list[torch.Tensor]]:
    """Outputs and gradients of the plain form and of FlexAttention, of the same numbers."""
    found = []
    for taken in (False, True):
        takes.append(taken)
        tensors = [t.requires_grad_() for t in random(300, 0, 1)[:3]]
        y = function(*tensors)
        cotangent = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
        found.append([y, *torch.autograd.grad(y, tensors, cotangent)])
    return found


LENGTHS = torch.tensor([300, 41])


@pytest.mark.parametrize(("stride", "causal", "lengths"), [(7, True, None), (140, True, None), (7, False, LENGTHS)])
def test_strided_sets_are_put_together(stride: int, causal: bool, lengths: torch.Tensor | None, through_flex):
    options = {"causal": causal, "lengths": lengths}
    plain, ours = both_forms(through_flex, lambda q, k, v: strided_attention(q, k, v, stride, **options))
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize(
    ("stride", "columns", "local", "causal", "lengths"),
    [
        (6, [[4, 5], [2, 3], [0, 1]], True, True, None),
        (6, [[4, 5], [2, 3], [0, 1]], False, True, None),
        (140, [[138, 139]], True, False, LENGTHS),
    ],
)
def test_fixed_sets_are_put_together(
    stride: int, columns: list, local: bool, causal: bool, lengths: torch.Tensor | None, through_flex
):
    options = {"causal": causal, "lengths": lengths, "local": local}
    plain, ours = both_forms(
        through_flex, lambda q, k, v: fixed_attention(q, k, v, stride, torch.tensor(columns), **options)
    )
    torch.testing.assert_close(ours, plain)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"pattern": "fixed", "summary": 2}], ids=["strided", "fixed"])
@pytest.mark.usefixtures("untraced")
def test_a_sparse_stream_goes_on(options: dict, through_flex):
    attention = SparseAttention(16, 1, stride=5, **options).double()
    x = torch.randn(2, 60, 16, dtype=torch.float64)
    whole = attention(x)[0]
    through_flex.append(True)
    _, state = attention(x[:, :9], None, torch.tensor([9, 4]))  # rows that stand at different positions
    y = attention(torch.stack([x[0, 9:40], x[1, 4:35]]), state)[0]
    for row, start in ((0, 9), (1, 4)):
        torch.testing.assert_close(y[row], whole[row, start : start + 31])


def test_scores_are_not_kept(through_flex, monkeypatch: pytest.MonkeyPatch):
    """Each set is handed over once, with what it can see; none of them is computed here."""
    monkeypatch.setattr(sparse, "_summed", None)
    given = []

    def flex_sums(q, k, v, mask, band):
        given.append((tuple(q.shape[1:4]), tuple(k.shape[1:4]), band))
        return q, q[..., 0]

    monkeypatch.setattr(sparse, "flex_sums", flex_sums)
    through_flex.append(True)
    q, k, v = random(300, 0, 1)[:3]
    strided_attention(q, k, v, 50)
    fixed_attention(q, k, v, 50, torch.tensor([[48, 49]]))
    assert given == [
        ((6, H, 50), (6, H, 100), Band(offset=50, below=50)),
        ((50, H, 6), (50, H, 6), Band(least=1)),
        ((6, H, 50), (6, H, 50), Band()),
        ((1, H, 300), (1, H, 12), Band(rows=50, columns=2, least=1)),
    ]


def test_blocks_that_none_sees_are_left_out():
    """Of 512 × 512 in blocks of 128, by hand."""
    device = torch.device("cpu")

    def left(m: int, **band: int) -> list[list[int]]:
        return flex._blocks(512, m, Band(**band), device).to_dense()[0, 0].tolist()

    assert left(512) == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert left(512, least=1 - 128, below=128) == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert left(512, offset=256, below=128) == [[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert left(256, rows=128, columns=64, least=1) == [[0, 0], [1, 0], [1, 0], [1, 1]]


def test_more_kernels_are_made_than_dynamos_limit():
    made = []
    compiled = flex._compiled(
        lambda x, kind: x + len(kind), backend=lambda graph, _: made.append(graph) or graph.forward
    )
    x = torch.zeros(2)
    for _ in range(2):
        assert [int(compiled(x, "m" * n)[0]) for n in range(20)] == list(range(20))
    assert len(made) == 20
    whole = torch.compile(lambda x: compiled(x, "mmm"), backend="eager", fullgraph=True)
    assert int(whole(x)[0]) == 3


@no_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("stride", [16, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gradients_are_the_plain_forms(stride: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    columns = torch.arange(stride - 4, stride, device="cuda")[None]
    for function in (
        lambda *t: strided_attention(*t, stride),
        lambda *t: fixed_attention(*t, stride, columns),
    ):
        exact = [t.requires_grad_() for t in random(1000, 0, 1, device="cuda")[:3]]
        rounded = [t.detach().to(dtype).requires_grad_() for t in exact]
        plain = function(*exact)
        monkeypatch.setenv(FLEX, "1")
        ours = function(*rounded)
        monkeypatch.delenv(FLEX)
        cotangent = torch.randn_like(plain)
        wanted = [plain, *torch.autograd.grad(plain, exact, cotangent)]
        found = [ours, *torch.autograd.grad(ours, rounded, cotangent.to(dtype))]
        for a, b in zip(found, wanted, strict=True):
            assert (a.double() - b).norm() / b.norm() < {torch.float32: 1e-2, torch.bfloat16: 5e-2}[dtype]


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
        (Queries(dtype=torch.float64), 0, "it does not support float64"),
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
def test_not_for_more_groups_than_a_grid_has():
    assert use_flex(Queries(), batch=65535)
    with pytest.warns(UserWarning, match="65536 groups"):
        assert not use_flex(Queries(), batch=65536)


@pytest.mark.usefixtures("asked")
def test_sparse_attention_asks(monkeypatch: pytest.MonkeyPatch):
    q, k, v = random(9, 0, 1)[:3]
    with pytest.warns(UserWarning, match="tensors are on cpu"):
        strided_attention(q, k, v, 3)


@pytest.mark.usefixtures("asked")
def test_not_where_results_must_repeat():
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.warns(UserWarning, match="deterministic"):
            assert not use_flex(Queries())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("untraced")
def test_the_plain_form_hands_over_what_it_was_given(monkeypatch: pytest.MonkeyPatch):
    n, m = 7, 5
    tensors, options = random(n, m, m + n), hidden(n, m) | {"window": 9}
    plain = relative_attention(*tensors, **options)
    monkeypatch.setattr("lit_effattn.ops.relative.use_flex", lambda q, dropout: dropout == 0)
    torch.testing.assert_close(relative_attention(*tensors, **options), plain)
    monkeypatch.setattr("lit_effattn.ops.relative.relative_flex_attention", lambda *a, **options: options)
    assert relative_attention(*tensors, **options) == options | {"causal": True}
    assert isinstance(relative_attention(*tensors, **options, dropout=0.5), torch.Tensor)
