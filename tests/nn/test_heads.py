import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.special import expit, log_expit, logsumexp
from torch import nn

from lit_effattn import LanguageModel, Transformer
from lit_effattn.datamodules.common.tokens import IGNORE, TokenBatch
from lit_effattn.nn import heads
from lit_effattn.nn.heads import CategoricalHead, MixtureOfLogisticsHead
from lit_effattn.ops.cross_entropy import linear_cross_entropy
from tests.support.rounding import rounding

D = 5
KINDS = [CategoricalHead, MixtureOfLogisticsHead]


def saying(head: nn.Module, out: torch.Tensor) -> torch.Tensor:
    """Make `head`'s last layer the identity, so that `out` (…, parameters) is what it says; return the hidden state."""
    width = head.proj.out_features
    head.proj = nn.Linear(width, width).to(out.dtype)
    with torch.no_grad():
        head.proj.weight.copy_(torch.eye(width))
        head.proj.bias.zero_()
    return out


def mixture(n_levels: int, logits, means, log_scales, dtype=torch.float32):
    """Return a head and the hidden state with these parameters of one mixture."""
    head = MixtureOfLogisticsHead(D, n_levels, n_mixtures=len(logits)).to(dtype)
    return head, saying(head, torch.tensor([*logits, *means, *log_scales], dtype=dtype))


def differences(n_levels: int, logits, means, log_scales) -> np.ndarray:
    """log p(level) from the definition, Σ_k π_k (F_k(upper border) − F_k(lower border)), in float64.

    F(b) − F(a) is taken as the smaller of it and (1 − F(a)) − (1 − F(b)): where both are near 1, digits are lost.
    """
    logits, means, log_scales = (np.asarray(v, dtype=np.float64)[:, None] for v in (logits, means, log_scales))
    borders = (np.arange(n_levels + 1) - 0.5) * 2 / (n_levels - 1) - 1
    borders[0], borders[-1] = -np.inf, np.inf
    z = (borders - means) / np.exp(np.maximum(log_scales, -7.0))  # (K, n_levels + 1)
    below = np.where(z > 0, -expit(-z), expit(z))  # up to a constant 1, which a difference on one side does not see
    across = (z[:, :-1] <= 0) & (z[:, 1:] > 0)
    p = np.where(across, 1 - expit(-z[:, 1:]) - expit(z[:, :-1]), below[:, 1:] - below[:, :-1])
    # Both tails beyond e^{-700} underflow to 0: there log F(z) is z to every digit, and bins differ by their width.
    with np.errstate(divide="ignore", invalid="ignore"):
        narrow = np.minimum(z[:, 1:], -z[:, :-1])
        width = z[:, 1:] - z[:, :-1]
        far = log_expit(narrow) + np.where(np.isinf(width), 0, np.log(-np.expm1(-width)))
        log_p = np.where(p > 1e-280, np.log(p), far)
    return logsumexp(logits - logsumexp(logits, axis=0, keepdims=True) + log_p, axis=0)


EXTREMES = {
    "plain": ([0.3, -0.2, 1.0], [-0.5, 0.1, 0.9], [-2.0, -3.0, -1.0]),
    "narrowest": ([0.0], [0.1], [-7.0]),
    "narrower than allowed": ([0.0], [0.1], [-12.0]),
    "on a border": ([0.0], [1 / 255], [-7.0]),
    "widest": ([0.0, 0.5], [0.3, -2.0], [5.0, 4.0]),
    "means outside": ([0.0, 1.0], [-30.0, 45.0], [-7.0, -7.0]),
    "far outside and wide": ([0.0, 1.0], [-30.0, 45.0], [2.0, 5.0]),
    "one component wins": ([80.0, -80.0], [0.7, -0.7], [-5.0, 2.0]),
}


def test_a_mixture_is_the_difference_of_its_distribution_functions():
    for n_levels, name in itertools.product([2, 3, 17, 256], EXTREMES):
        head, h = mixture(n_levels, *EXTREMES[name], dtype=torch.float64)
        expected = differences(n_levels, *EXTREMES[name])
        np.testing.assert_allclose(head.log_probs(h).detach().numpy(), expected, rtol=1e-8, atol=1e-10)


def test_a_mixture_in_float32():
    for n_levels, name in itertools.product([2, 17, 256], EXTREMES):
        head, h = mixture(n_levels, *EXTREMES[name])
        log_probs = head.log_probs(h)
        assert log_probs.dtype == torch.float32
        assert log_probs.isfinite().all()
        assert log_probs.double().exp().sum().item() == pytest.approx(1, abs=rounding(torch.float32, 256, 2))
        # An error of ε in a border is one of ε / s in the exponent.
        rtol, atol = rounding(torch.float32, 100, 10), rounding(torch.float32, 8, math.exp(7))  # the least s is e⁻⁷
        np.testing.assert_allclose(log_probs.detach(), differences(n_levels, *EXTREMES[name]), rtol=rtol, atol=atol)


def test_a_mixture_of_scales_beyond_float32():
    for log_scale in (20.0, 100.0, 1e4):
        head, h = mixture(256, [0.0], [0.1], [log_scale])
        middle = math.log(2 / 255 / 4) - log_scale  # the density of a logistic at its mean is 1 / 4 s
        expected = torch.tensor([-math.log(2), *[middle] * 254, -math.log(2)])
        torch.testing.assert_close(head.log_probs(h), expected)


def test_probabilities_sum_to_1():
    for kind, n_levels, size in itertools.product(KINDS, [2, 256], [0.0, 30.0]):
        head = kind(D, n_levels)
        p = head.log_probs(size * torch.randn(3, 4, D)).double().exp()
        assert p.shape == (3, 4, n_levels)
        torch.testing.assert_close(
            p.sum(-1), torch.ones(3, 4, dtype=torch.float64), atol=rounding(torch.float32, 256, 2), rtol=0
        )


def test_the_loss_is_read_off_the_table():
    """Every level in turn, the outermost too: sampler and loss may not disagree."""
    for kind, n_levels in itertools.product(KINDS, [2, 17]):
        head = kind(D, n_levels).double()
        h = 3 * torch.randn(4, n_levels, D, dtype=torch.float64)
        target = torch.stack([torch.randperm(n_levels) for _ in range(4)])
        table = head.log_probs(h)
        expected = torch.stack([torch.stack([-table[b, t, target[b, t]] for t in range(n_levels)]) for b in range(4)])
        nll = head.nll(h, target)
        assert nll.shape == target.shape
        torch.testing.assert_close(nll, expected)
        torch.testing.assert_close(super(kind, head).nll(h, target), expected)


def test_zero_init_knows_nothing():
    for n_levels, options in itertools.product(
        [17], [{"zero_init": True}, {"zero_init": True, "bias": False}, {"init_std": 0.0}]
    ):
        head = CategoricalHead(D, n_levels, **options)
        bits = head.nll(100 * torch.randn(8, D), torch.randint(n_levels, (8,))) / math.log(2)
        torch.testing.assert_close(bits, torch.full((8,), math.log2(n_levels)))
        default = CategoricalHead(D, n_levels)
        assert default.proj.weight.std() > 0


def test_a_start_as_in_gpt2():
    head = CategoricalHead(400, 100, bias=False, init_std=0.02)
    assert [name for name, _ in head.named_parameters()] == ["proj.weight"]
    assert head.proj.weight.std().item() == pytest.approx(0.02, rel=0.03)
    h = torch.randn(3, 400).double()
    head = head.double()
    torch.testing.assert_close(head.log_probs(h), (h @ head.proj.weight.T).log_softmax(-1))
    assert not CategoricalHead(D, 3, init_std=0.02).proj.bias.any()


def test_bad_options_are_named():
    for make, words in [
        (lambda: CategoricalHead(D, 3, init_std=-0.1), "init_std=-0.1"),
        (lambda: CategoricalHead(D, 3, init_std=0.02, zero_init=True), "init_std=0.02"),
        (lambda: CategoricalHead(D, 1), "n_levels=1 must be at least 2"),
        (lambda: MixtureOfLogisticsHead(D, 17, n_mixtures=0), "n_mixtures=0 must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            make()


def test_gradients_stay_finite():
    for n_mixtures, size in itertools.product([1, 10], [1.0, 40.0, 1e4]):
        head = MixtureOfLogisticsHead(D, 256, n_mixtures=n_mixtures)
        out = size * torch.randn(64, 3 * n_mixtures)
        out[:, 2 * n_mixtures :] = torch.empty(64, n_mixtures).uniform_(-12, 200)
        out = saying(head, out).requires_grad_()
        target = torch.arange(64) * 255 // 63
        nll = head.nll(out, target)
        nll.sum().backward()
        assert nll.isfinite().all()
        assert out.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in head.parameters())
        (again,) = torch.autograd.grad(head.log_probs(out).gather(-1, target[:, None]).neg().sum(), out)
        torch.testing.assert_close(again, out.grad)


def test_gradients_of_a_mixture_are_right():
    head = MixtureOfLogisticsHead(D, 5, n_mixtures=2).double()
    h = torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    target = torch.arange(5)
    assert torch.autograd.gradcheck(lambda h: head.nll(h, target), h)


def test_only_the_last_layer_runs_in_bfloat16():
    """What follows is float32: no more is lost than the layer's own rounding."""
    for kind in KINDS:
        head = kind(D, 256)
        h, target = 3 * torch.randn(32, D), torch.randint(256, (32,))
        with torch.autocast("cpu", torch.bfloat16):
            out = head.proj(h)
            table, nll = head.log_probs(h), head.nll(h, target)
        assert out.dtype == torch.bfloat16
        assert table.dtype == nll.dtype == torch.float32
        rounded = kind(D, 256) if kind is CategoricalHead else MixtureOfLogisticsHead(D, 256)
        expected = rounded.log_probs(saying(rounded, out.float()))
        torch.testing.assert_close(table, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(nll, -expected.gather(-1, target[:, None])[:, 0], rtol=1e-6, atol=1e-6)


def test_a_bfloat16_model_has_a_float32_loss():
    for kind in KINDS:
        head = kind(D, 17).bfloat16()
        h = torch.randn(3, D, dtype=torch.bfloat16)
        assert head.log_probs(h).dtype == head.nll(h, torch.tensor([0, 8, 16])).dtype == torch.float32


class Chunked(CategoricalHead):
    """A head with a limit that small batches exceed."""

    MOST_LOGITS = 60


def test_large_batches_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch):
    """More than 60 logits automatically, and if asked for; the loss is the same."""
    calls = []
    monkeypatch.setattr(heads, "linear_cross_entropy", lambda *a: calls.append(len(a[0])) or linear_cross_entropy(*a))
    torch.manual_seed(0)
    plain, automatic = CategoricalHead(D, 20).double(), Chunked(D, 20).double()
    automatic.load_state_dict(plain.state_dict())
    for rows, chunked, expected in ((3, None, []), (3, True, [3]), (4, None, [4]), (4, False, [])):
        automatic.chunked = chunked
        h, target = torch.randn(1, rows, D, dtype=torch.float64), torch.randint(20, (1, rows))
        for epsilon in (0.0, 0.2):
            calls.clear()
            torch.testing.assert_close(automatic.loss(h, target, epsilon), plain.loss(h, target, epsilon))
            assert calls == expected
        torch.testing.assert_close(automatic.nll(h, target), plain.nll(h, target))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_tied_language_model_trains_in_chunks(compiled: bool):
    gradients = []
    for chunked in (False, True):
        torch.manual_seed(0)
        head = partial(CategoricalHead, chunked=chunked)
        model = LanguageModel(Transformer(8, 2, 1), 11, head=head, tie=True, label_smoothing=0.1).double()
        if compiled and chunked:
            model.compile_objective("aot_eager")
        tokens = torch.randint(11, (2, 7))
        targets = tokens.roll(-1, 1)
        targets[0, 3:] = IGNORE
        model.run_objective(TokenBatch(tokens, targets)).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
