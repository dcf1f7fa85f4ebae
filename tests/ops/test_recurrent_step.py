"""A step of a recurrence: by the definition, in place, and in machine code."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lit_effattn.generation.packages import options
from lit_effattn.ops.recurrent_step import recurrent_step

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]

CASES = [*product((1, 5), (1, 7, 8, 19), (None, 1, "F"), (False, True)), (128, 96, "F", True)]
"""F, D (parts of a vector of 8, one, and more), width of the decay, and whether there is the delta rule.

The last is large enough for several threads."""


def arguments(f: int, d: int, width: int | str | None, delta: bool, batch: int = 2, heads: int = 3) -> Arguments:
    """(B, H, 1, ·), parts of larger tensors (B, 1, H, ·), and S."""
    sizes = [f, f, d, f if width == "F" else width or 1, 1]
    q, k, v, decay, beta = (torch.rand(batch, 1, heads, n + 1)[..., :n].transpose(1, 2) for n in sizes)
    s = torch.randn(batch, heads, f, d)
    return q, k, v, s, decay if width else None, beta if delta else None


def by_definition(q: Tensor, k: Tensor, v: Tensor, s: Tensor, decay: Tensor | None, beta: Tensor | None):
    """S' = diag(a) S, S_t = S' + k uᵀ, u = v or β (v − S'ᵀ k), y = S_tᵀ q, for each head by itself."""
    y, after = torch.empty_like(v), torch.empty_like(s)
    for b, h in product(*map(range, s.shape[:2])):
        kept = s[b, h] if decay is None else torch.diag(decay[b, h, 0].expand(s.size(2))) @ s[b, h]
        u = v[b, h, 0] if beta is None else beta[b, h, 0, 0] * (v[b, h, 0] - kept.T @ k[b, h, 0])
        after[b, h] = kept + torch.outer(k[b, h, 0], u)
        y[b, h, 0] = after[b, h].T @ q[b, h, 0]
    return y, after


def doubled(given: Arguments) -> list[Tensor | None]:
    return [None if t is None else t.double() for t in given]


@pytest.mark.parametrize("in_place", [False, True])
def test_the_definition(in_place: bool):
    for case in CASES:
        q, k, v, s, decay, beta = doubled(arguments(*case))
        expected = by_definition(q, k, v, s, decay, beta)
        before = s.clone()
        y, after = recurrent_step(q, k, v, s, decay=decay, beta=beta, in_place=in_place)
        torch.testing.assert_close((y, after), expected)
        assert (after is s) == in_place
        assert in_place or torch.equal(s, before)


class Steps(nn.Module):
    """A step of each case, in place."""

    def forward(self, cases: list[list[Tensor]]) -> list[Tensor]:
        results = []
        for (*_, width, delta), (q, k, v, s, *rest) in zip(CASES, cases, strict=True):
            decay = rest[0] if width else None
            beta = rest[-1] if delta else None
            results.append(recurrent_step(q, k, v, s, decay=decay, beta=beta, in_place=True)[0])
        return results


@pytest.mark.slow
def test_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It overwrites S."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # what inductor compiles for
    given = [arguments(*case) for case in CASES]
    expected = [by_definition(*doubled(arguments_)) for arguments_ in given]
    cases = [[t for t in arguments_ if t is not None] for arguments_ in given]
    with torch.no_grad():
        exported = torch.export.export(Steps(), (cases,), strict=False)
    operator = torch.ops.lit_effattn.recurrent_step.default
    assert sum(node.target is operator for node in exported.graph.nodes) == len(CASES)
    path = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "steps.pt2"), inductor_configs=options()
    )
    results = torch._inductor.aoti_load_package(path)(cases)
    for y, (_, _, _, s, *_), (y_expected, s_expected) in zip(results, cases, expected, strict=True):
        torch.testing.assert_close(y.double(), y_expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(s.double(), s_expected, rtol=1e-5, atol=1e-5)
