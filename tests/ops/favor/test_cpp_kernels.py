"""Performer's kernels in C++ against the definition, for each kind of vectors that this machine has."""

import math
import warnings

import pytest
import torch

from lit_effattn.attention import PerformerAttention
from lit_effattn.ops.favor import cpp_kernels
from lit_effattn.ops.favor.dispatch import positive_favor, use_kernels
from lit_effattn.ops.favor.pytorch import causal_favor, log_offset
from lit_effattn.ops.runtime import cpp_build, selection
from lit_effattn.ops.runtime.selection import KERNELS
from tests.support.cpp_kernels import each_kind_of_vectors, needs_kernels
from tests.support.tensor_sizes import Made

pytestmark = needs_kernels(cpp_kernels)

B, H, C = 2, 2, 16  # C: positions of a chunk
NAMES = ("out", "s", "z", "m", "dq", "dk", "dv", "ds", "dz", "d offset")


@pytest.fixture(autouse=True)
def _unsaid(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(KERNELS, raising=False)
    selection._notice.cache_clear()
    yield
    selection._notice.cache_clear()


vectors = each_kind_of_vectors(cpp_kernels)


def definition(log_q, log_k, v, s, z, m, there):
    """Every query's products with every key up to it, in logarithms: Choromanski et al. 2020, section 2.2."""
    sees = there[:, :, None] & torch.ones(v.size(2), v.size(2), dtype=torch.bool).tril()  # (B, 1, N, N)
    log_w = (log_q[:, :, :, None] + log_k[:, :, None]).logsumexp(-1).masked_fill(~sees, -torch.inf)  # (B, H, N, N)
    log_k = log_k.masked_fill(~there[..., None], -torch.inf)
    log_before = log_q + m[:, :, None]  # (B, H, N, F)
    top = torch.maximum(log_w.amax(-1), log_before.amax(-1)).detach()[..., None]
    top = top.masked_fill(top == -torch.inf, 0)
    w, p = (log_w - top).exp(), (log_before - top).exp()
    below = w.sum(-1, keepdim=True) + p @ z[..., None]
    out = (w @ v + p @ s) / below.masked_fill(below == 0, 1)
    after = torch.maximum(m, log_k.detach().amax(2))
    finite = after.masked_fill(after == -torch.inf, 0)
    kept, keys = (m - finite).exp(), (log_k - finite[:, :, None]).exp()
    return out, s * kept[..., None] + keys.mT @ v, z * kept + keys.sum(2), after


def positive(q, k, v, omega, s, z, m, lengths=None):
    """`definition` for positive features (lemma 1) of some keys."""
    scale, half_log = q.size(-1) ** -0.25, math.log(omega.size(1)) / 2
    log_q, log_k = (x @ omega.mT - x.square().sum(-1, keepdim=True) / 2 - half_log for x in (scale * q, scale * k))
    n = torch.full((len(k),), k.size(2)) if lengths is None else lengths
    return definition(log_q, log_k, v, s, z, m, (torch.arange(k.size(2)) < n[:, None])[:, None])


def kernel(q, k, v, omega, s, z, m, lengths=None):
    return positive_favor(q, k, v, omega, s, z, m, lengths, scale=q.size(-1) ** -0.25)


def inputs(n: int, e: int = 12, f: int = 20, d: int = 9, *, b: int = B, h: int = H, louder=None, seen: bool = True):
    """Queries, keys and values, with the strides that `Attention` gives them, directions, and sums of keys before.

    `louder`: by how much keys are multiplied, (N,). Long keys have small features: those after them rise far.
    """
    q, k, v = (torch.randn(b, n, h, width) for width in (e, e, d))
    k = k if louder is None else k * louder[:, None, None]
    omega = torch.randn(h, f, e)
    s, z, m = torch.zeros(b, h, f, d), torch.zeros(b, h, f), torch.full((b, h, f), -torch.inf)
    if seen:
        log_k = torch.randn(b, h, 3, f)
        m = log_k.amax(2)
        before = (log_k - m[:, :, None]).exp()
        s, z = before.mT @ torch.randn(b, h, 3, d), before.sum(2)
    heads = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]
    return [*heads, omega, s.requires_grad_(), z.requires_grad_(), m]


def assert_alike(function, reference, tensors, *others, rtol=3e-6) -> None:
    """Outputs, last sums, maxima and all gradients are the reference's in float64, each to `rtol` of its norm."""
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    found, expected = function(*tensors, *others), reference(*exact, *others)
    cotangents = [torch.randn_like(t) for t in expected[:3]]
    pairs = [*zip(found, expected, strict=True)]
    for results, given in ((found, tensors), (expected, exact)):
        assert not results[3].requires_grad
        wanted = [t for t in given if t.requires_grad]
        pairs += [torch.autograd.grad(results[:3], wanted, [t.to(results[0]) for t in cotangents])]
    *pairs, ours, theirs = pairs
    pairs += zip(ours, theirs, strict=True)
    for name, (a, b) in zip(NAMES, pairs, strict=False):
        assert a.shape == b.shape
        a, b = (t.double().nan_to_num(neginf=-1e3) for t in (a, b))
        error = (a - b).norm() / b.norm().clamp(min=1e-30)
        assert error < rtol, f"{name}: {error}"


SHAPES = [  # n, e, f, d, whether keys were seen before
    (1, 16, 16, 16, True),
    (C - 1, 3, 5, 7, True),
    (C, 16, 48, 16, False),
    (C + 1, 1, 2, 1, True),
    (2 * C, 33, 100, 20, True),
    (3 * C + 5, 20, 41, 50, False),
    (100, 64, 267, 64, True),
]


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(("n", "e", "f", "d", "seen"), SHAPES)
def test_equal_to_the_definition(n: int, e: int, f: int, d: int, seen: bool):
    assert_alike(kernel, positive, inputs(n, e, f, d, seen=seen))


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(("n", "e", "f", "d", "seen"), SHAPES[1:5])
def test_equal_to_the_definition_of_any_offset(n: int, e: int, f: int, d: int, seen: bool):
    *tensors, m = inputs(n, e, f, d, seen=seen)
    assert_alike(with_offset, of_offset, [*tensors, torch.randn(B, n, H).transpose(1, 2).requires_grad_(), m])


def with_offset(q, k, v, omega, s, z, offset, m):
    return causal_favor(q, k, v, omega, offset, s, z, m)


def of_offset(q, k, v, omega, s, z, offset, m):
    there = torch.ones(B, 1, k.size(2), dtype=torch.bool)
    return definition(q @ omega.mT, k @ omega.mT + offset[..., None], v, s, z, m, there)


@pytest.mark.parametrize("at", [1, 7, C - 1, C, C + 1])
def test_a_key_that_rises_at_any_place_of_a_chunk(at: int):
    *tensors, m = inputs(2 * C)
    offset = torch.randn(B, H, 2 * C) + 100 * (torch.arange(2 * C) == at)
    assert_alike(with_offset, of_offset, [*tensors, offset.requires_grad_(), m], rtol=3e-5)


def loud(n: int, first: int, last: int, by: float = 12.0) -> torch.Tensor:
    return torch.where((torch.arange(n) >= first) & (torch.arange(n) < last), by, 1.0)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize(
    ("n", "first", "last", "seen"),
    [
        (C, 0, 5, False),  # within the first chunk
        (C + 3, 0, C, False),  # at a border
        (3 * C, C + 3, 2 * C + 7, False),  # later: nothing rises above those before
        (50, 0, 20, False),
    ],
)
def test_keys_that_rise_far(n: int, first: int, last: int, seen: bool):
    assert_alike(kernel, positive, inputs(n, louder=loud(n, first, last), seen=seen), rtol=3e-5)


@pytest.mark.usefixtures("vectors")
def test_keys_that_rise_far_above_those_before_the_sequence():
    tensors = inputs(2 * C)
    tensors[6][:, 1] -= 200.0  # as if they had been very long
    assert_alike(kernel, positive, tensors)


@pytest.mark.usefixtures("vectors")
def test_keys_that_rise_again_and_again():
    """Each is shorter than the one before: there are as many chunks as positions."""
    assert_alike(kernel, positive, inputs(30, seen=False, louder=torch.linspace(45, 1, 30)), rtol=3e-4)


@pytest.mark.parametrize("spread", [30.0, 300.0])
def test_logarithms_of_any_size(spread: float):
    """Weights sum to 1 whatever the norms: the denominator is never 0, nor so small that its rounding shows."""
    q, k, v, omega, s, z, m = (t.detach() for t in inputs(300, seen=False))
    out, *_ = kernel(spread * q, spread * k, torch.ones_like(v), omega, s, z, m)
    torch.testing.assert_close(out, torch.ones_like(v))


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("length", [0, 1, C, C + 3])
@pytest.mark.parametrize("seen", [False, True])
def test_padding_is_nothing(length: int, seen: bool):
    n = 2 * C + 3
    lengths = torch.tensor([n, length])
    tensors = inputs(n, seen=seen)
    with torch.no_grad():
        tensors[1][1, :, length:] = torch.nan  # whatever stands there
        exact = [t.detach().nan_to_num(neginf=-torch.inf).requires_grad_(t.requires_grad) for t in tensors]
    found = kernel(*tensors, lengths)
    assert_alike(kernel, positive, exact, lengths)
    assert all(torch.equal(a, b) for a, b in zip(found, kernel(*exact, lengths), strict=True))
    _, g_k, g_v = torch.autograd.grad(found[0].sum() + found[1].sum() + found[2].sum(), tensors[:3])
    assert (g_k[1, :, length:] == 0).all()
    assert (g_v[1, :, length:] == 0).all()
    if length == 0 and not seen:
        assert (found[0][1] == 0).all()
        assert (found[3][1] == -torch.inf).all()


def test_what_is_not_there_may_stand_anywhere():
    q, k, v, omega, s, z, m = (t.detach() for t in inputs(3 * C, seen=False))
    offset = log_offset(k, omega.size(1)) - 300
    there = torch.ones(B, 1, 3 * C, dtype=torch.bool)
    there[:, :, [0, 1, 4, C, C + 1, 2 * C - 1]] = False
    out, *sums = causal_favor(q, k, v, omega, offset.masked_fill(~there, -torch.inf), s, z, m)
    assert (out[:, :, :2] == 0).all()
    exact = [t.double() for t in (q @ omega.mT, k @ omega.mT + offset[..., None], v, s, z, m)]
    expected = definition(*exact, there)
    for a, b in zip((out, *sums), expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("louder", [None, loud(3 * C, 0, C + 2)])
def test_no_output_depends_on_what_comes_after(louder):
    q, k, v, *others = (t.detach() for t in inputs(3 * C, louder=louder, seen=False))
    before = kernel(q, k, v, *others)[0]
    for t in (0, 1, C - 1, C, C + 2, C + 5):
        for factor in (0.0, 0.9, 100.0):  # none as long: it rises; all as long: nothing does
            changed = [x.clone() for x in (q, k, v)]
            for x in changed:
                x[:, :, t:] *= factor
            after = kernel(*changed, *others)[0]
            assert torch.equal(before[:, :, :t], after[:, :, :t])
            assert not torch.equal(before[:, :, t], after[:, :, t])


def test_in_pieces_as_a_whole():
    q, k, v, omega, *sums = (t.detach() for t in inputs(100, louder=loud(100, 0, 40), seen=False))
    whole = kernel(q, k, v, omega, *sums)
    out = []
    for piece in ((0, 1), (1, 30), (30, 45), (45, 100)):
        y, *sums = kernel(*(t[:, :, slice(*piece)] for t in (q, k, v)), omega, *sums)
        out.append(y)
    for a, b in zip((torch.cat(out, 2), *sums), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_any_strides_and_broadcast_gradients():
    tensors = [t.detach() for t in inputs(40, b=3)]
    expected = kernel(*tensors)[0]
    by_column = [t.mT.contiguous().mT for t in tensors[:5]]
    assert by_column[0].stride(-1) != 1
    torch.testing.assert_close(kernel(*by_column, *tensors[5:])[0], expected)
    one = [t[:, :1].expand_as(t).requires_grad_() for t in tensors[:3]]
    out = kernel(*one, *tensors[3:])[0]
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), one))  # the gradient is one number, expanded


def test_threads_share_the_rows():
    tensors = inputs(50, b=3, h=3)
    wanted = [t for t in tensors if t.requires_grad]
    one = torch.autograd.grad(kernel(*tensors)[0].square().sum(), wanted)
    torch.set_num_threads(4)  # the tests' one is set anew before each
    four = torch.autograd.grad(kernel(*tensors)[0].square().sum(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(one, four, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype):
    q, k, v, *others = (t.detach() for t in inputs(70))
    halves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    full = [t.detach().float().requires_grad_() for t in halves]
    out, expected = kernel(*halves, *others)[0], kernel(*full, *others)[0]
    assert torch.equal(out, expected.to(dtype))
    g = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, halves, g), torch.autograd.grad(expected, full, g.float()), strict=True):
        assert torch.equal(a, b.to(dtype))


def test_no_positions_at_all():
    q, k, v, omega, s, z, m = inputs(3)
    out, *sums = kernel(*(t[:, :, :0] for t in (q, k, v)), omega, s, z, m)
    assert out.shape == (B, H, 0, 9)
    assert all(torch.equal(a, b) for a, b in zip(sums, (s, z, m), strict=True))
    assert torch.equal(torch.autograd.grad(sums[0].sum(), s)[0], torch.ones_like(s))


@pytest.mark.parametrize("which", [0, 1, 2], ids="qkv")
def test_what_is_infinite_or_not_a_number_is_not_hidden(which: int):
    for value in (torch.nan, torch.inf):
        tensors = [t.detach() for t in inputs(3 * C)]
        tensors[which][0, :, 20] = value
        out = kernel(*tensors)[0]
        assert (which == 1 and value == torch.inf) or not out[0, :, 20].isfinite().any()
        assert out[0, :, :C].isfinite().all()  # within a chunk products meet it, times 0
        assert out[1].isfinite().all()


def test_little_is_made_beside_outputs_and_gradients():
    """No features of all positions, though there are more of them than dimensions."""
    n, e, f, d = 2048, 8, 32, 16
    q, k, v, omega, *sums = inputs(n, e, f, d, b=1, h=1)
    with Made() as forward:
        out = kernel(q, k, v, omega, *sums)[0]
    weights = torch.rand_like(out)
    with Made() as backward:
        torch.autograd.grad(out, (q, k, v), weights)
    assert forward.large(f * d) == [n * d]  # the output
    assert backward.large(f * d) == [n * e, n * e, n * d]  # gradients of q, k and v


def test_the_operators_are_what_torch_expects():
    tensors, lengths = inputs(5), torch.tensor([5, 2])
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.lit_effattn.positive_favor.default
    torch.library.opcheck(operator, (*tensors, lengths, 0.5), test_utils=checks)
    tensors = [t.detach() for t in tensors]
    out, s, z, _, *kept = operator(*tensors, lengths, 0.5)
    given = (out, s, z, *tensors, lengths, out, *kept, 0.5)
    operator = torch.ops.lit_effattn.positive_favor_backward.default
    torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


def test_a_second_derivative_is_refused_and_named():
    tensors = inputs(5)
    (g,) = torch.autograd.grad(kernel(*tensors)[0].square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="plain_causal_favor has"):
        g.sum().backward()


# ------------------------------------------------------------------------------------------------------- the dispatch


def test_chosen_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    single, double = torch.zeros(1, 1, 1, 300), torch.zeros(1, 1, 1, 300, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert use_kernels(single, single, 8)
        assert use_kernels(single.bfloat16(), single.bfloat16(), 8)
        assert not use_kernels(double, double, 8)  # and is silent
        assert not use_kernels(single.to("meta"), single.to("meta"), 8)
        monkeypatch.setenv(KERNELS, "plain")
        assert not use_kernels(single, single, 8)
    monkeypatch.setenv(KERNELS, "c++")
    assert use_kernels(single, single, 8)
    with pytest.raises(ValueError, match=r"LIT_EFFATTN_KERNELS=c\+\+, but the kernels of Performer can't be used: t"):
        use_kernels(double, double, 8)


def test_without_a_compiler_the_form_in_pytorch_is_used_and_said_once(monkeypatch: pytest.MonkeyPatch):
    q, k, v, omega, *sums = (t.detach() for t in inputs(40))
    given = q, k, v, omega, log_offset(k, omega.size(1)), *sums
    expected = causal_favor(*given)[0]
    monkeypatch.setattr(cpp_build, "obstacle", lambda name: "there is no C++ compiler")
    monkeypatch.setattr(cpp_kernels, "forward", None)
    with pytest.warns(UserWarning, match=f"slower than its kernels.*there is no C\\+\\+ compiler.*{KERNELS}=plain"):
        torch.testing.assert_close(causal_favor(*given)[0], expected, rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not use_kernels(q, v, 8)


@pytest.mark.parametrize("features", ["positive", "hyperbolic"])
def test_the_attention_is_the_same_through_them(features: str, monkeypatch: pytest.MonkeyPatch):
    attention = PerformerAttention(8, 2, features=features, n_features=6)
    x, lengths = torch.randn(2, 40, 8), torch.tensor([40, 21])
    called = []
    forward = cpp_kernels.forward
    monkeypatch.setattr(cpp_kernels, "forward", lambda *a: called.append(a) or forward(*a))

    def both_ways(form: str) -> list[torch.Tensor]:
        monkeypatch.setenv(KERNELS, form)
        y, state = attention(x[:, :20])
        y, state = attention(x[:, 20:], state, lengths - 20)
        return [y, *state, *torch.autograd.grad(y.sum() + state.s.sum(), attention.parameters(), allow_unused=True)]

    plain, ours = both_ways("plain"), both_ways("c++")
    assert len(called) == 2
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_wider_than_the_kernels_for_cuda():
    assert_alike(kernel, positive, inputs(20, 160, 24, 160, b=1, h=1))
