"""A step of a recurrence: by the definition, and in place."""

from itertools import product

import torch
from torch import Tensor

from lit_effattn.ops.recurrent_step import recurrent_step

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]

CASES = [*product((1, 5), (1, 7), (None, 1, "F"), (False, True))]
"""F, D, width of the decay, and whether there is the delta rule."""


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


def test_the_definition():
    for in_place in [False, True]:
        for case in CASES:
            q, k, v, s, decay, beta = doubled(arguments(*case))
            expected = by_definition(q, k, v, s, decay, beta)
            before = s.clone()
            y, after = recurrent_step(q, k, v, s, decay=decay, beta=beta, in_place=in_place)
            torch.testing.assert_close((y, after), expected)
            assert (after is s) == in_place
            assert in_place or torch.equal(s, before)
