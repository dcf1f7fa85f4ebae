"""Definitions that kernels are compared with, and the comparison of outputs, last sums and gradients."""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_effattn.ops.runtime.operators import KERNELS
from tests.support.compile_for_gpu import COMPILED, MOST_SHARED
from tests.support.rounding import rounding


def elu_features(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


def linear_definition(phi_q, phi_k, v, s, z, eps=1e-6):
    """Katharopoulos et al. 2020, equation 8 of all keys up to a query's, and those that were before."""
    weights = torch.einsum("bhnf,bhmf->bhnm", phi_q, phi_k).tril()
    below = weights.sum(-1) + torch.einsum("bhnf,bhf->bhn", phi_q, z) + eps
    return (weights @ v + phi_q @ s) / below[..., None], s + phi_k.mT @ v, z + phi_k.sum(2)


def elu_definition(q, k, v, s, z, lengths=None, eps=1e-6):
    """`linear_definition` with elu(x) + 1, of the valid keys."""
    return linear_definition(elu_features(q), elu_features(k) * _valid(k, lengths)[..., None], v, s, z, eps)


def favor_definition(log_q, log_k, v, s, z, m, valid):
    """Every query's products with every key up to it, in logarithms: Choromanski et al. 2020, section 2.2."""
    n = v.size(2)
    sees = valid[:, :, None] & torch.ones(n, n, dtype=torch.bool, device=v.device).tril()  # (B, 1, N, N)
    log_w = (log_q[:, :, :, None] + log_k[:, :, None]).logsumexp(-1).masked_fill(~sees, -torch.inf)  # (B, H, N, N)
    log_k = log_k.masked_fill(~valid[..., None], -torch.inf)
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


def positive_definition(q, k, v, omega, s, z, m, lengths=None):
    """`favor_definition` with positive features (lemma 1), of the valid keys."""
    log_q, log_k = (log_positive(x, omega) for x in (q, k))
    return favor_definition(log_q, log_k, v, s, z, m, _valid(k, lengths))


def log_positive(x, omega):
    x = x.size(-1) ** -0.25 * x
    return x @ omega.mT - x.square().sum(-1, keepdim=True) / 2 - math.log(omega.size(1)) / 2


def summed_keys(log_k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums s and z of keys and values, and their greatest logarithms."""
    m = log_k.amax(2)
    keys = (log_k - m[:, :, None]).exp()
    return keys.mT @ v, keys.sum(2), m


def _valid(k: Tensor, lengths: Tensor | None) -> Tensor:
    """(B or 1, 1, N)."""
    n = torch.full((1,), k.size(2), device=k.device) if lengths is None else lengths
    return (torch.arange(k.size(2), device=k.device) < n[:, None])[:, None]


def gradients(results: Sequence[Tensor], tensors: Sequence[Tensor], which: Sequence[int] | None = None):
    """Return the gradients of `tensors`, of all that have one or of `which`, for fixed cotangents."""
    generator = torch.Generator().manual_seed(1)
    results = [t for t in results if t.requires_grad]
    wanted = [t for i, t in enumerate(tensors) if t.requires_grad and (which is None or i in which)]
    cotangents = [torch.randn(t.shape, generator=generator).to(t) for t in results]
    return torch.autograd.grad(results, wanted, cotangents, retain_graph=True)


def assert_alike(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    tensors,
    lengths=None,
    *,
    rtol: float | None = None,
    magnified: float = 1.0,
    which=None,
    **options,
):
    """Outputs, last sums and gradients are the reference's in float64, each to `rtol` of its norm.

    Without `rtol` it follows from the number of terms of a sum: positions and widths. Outputs of padding, after
    `lengths`, are finite, and nothing reads them.
    """
    if rtol is None:
        terms = tensors[0].size(2) + sum(t.size(-1) for t in tensors[:3])
        rtol = rounding(tensors[0].dtype, terms, magnified)
    exact = [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]
    others = () if lengths is None else (lengths,)
    results, expected = function(*tensors, *others, **options), reference(*exact, *others, **options)
    if lengths is not None:
        padding = ~_valid(exact[1], lengths)[..., None]
        assert results[0].isfinite().all()
        results, expected = ((out.masked_fill(padding, 0), *rest) for out, *rest in (results, expected))
    assert [t.requires_grad for t in results] == [t.requires_grad for t in expected]
    pairs = [*zip(results, expected, strict=True)]
    pairs += zip(gradients(results, tensors, which), gradients(expected, exact, which), strict=True)
    for i, (a, b) in enumerate(pairs):
        assert a.shape == b.shape
        a, b = (t.double().nan_to_num(neginf=-1e3) for t in (a, b))
        error = (a - b).norm() / b.norm().clamp(min=1e-30)
        assert error < rtol, f"result or gradient {i}: {error}"
    return results


def check_operators(name: str, arguments: tuple, saved: Callable[..., tuple]) -> None:
    """Shapes, layouts and aliases are those announced to torch.compile. `saved`: the backward pass's arguments."""
    operator = getattr(torch.ops.lit_effattn, name).default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")  # the laws compile it
    torch.library.opcheck(operator, arguments, test_utils=checks)
    given = tuple(t.detach() if isinstance(t, Tensor) else t for t in arguments)
    backward = getattr(torch.ops.lit_effattn, f"{name}_backward").default
    torch.library.opcheck(backward, saved(given, operator(*given)), test_utils=("test_schema", "test_faketensor"))


def assert_second_derivative_is_refused(function: Callable[..., Any], tensors: Sequence[Tensor], remedy: str) -> None:
    (g,) = torch.autograd.grad(function(*tensors)[0].square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match=remedy):
        g.sum().backward()


def assert_same_through(form: str, attention: Any, n: int, called: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, states and gradients of an attention are those of the plain form; the kernel is called twice."""
    d = attention.d_model
    device = next(attention.parameters()).device
    x, lengths = torch.randn(2, n, d, device=device), torch.tensor([n, n // 2], device=device)

    def by(form: str) -> list[Tensor]:
        monkeypatch.setenv(KERNELS, form)
        y, state = attention(x[:, : n // 3])
        y, state = attention(x[:, n // 3 :], state, lengths - n // 3)
        y, state = attention(torch.cat([y, x], 1)[:, :1], state)  # a step
        return [y, *state, *torch.autograd.grad(y.sum() + state.s.sum(), attention.parameters(), allow_unused=True)]

    plain, kernels = by("plain"), by(form)
    assert len(called) == 2
    for a, b in zip(kernels, plain, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            a, b = (t.double().nan_to_num(neginf=-1e3) for t in (a, b))
            assert (a - b).norm() <= rounding(torch.float32, 10 * n * d, 10) * b.norm()


def assert_compiles(program: str, cases: Sequence[str], launches: int, folder: Path, capability: int = 90) -> None:
    """Every kernel that `program` launches compiles for compute capability 9.0 or another, and fits into memory."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-c", COMPILED + program, str(capability), *cases]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert all(int(line.split()[-1]) <= MOST_SHARED[capability] for line in lines), result.stdout
    assert len(lines) == launches * len(cases)
