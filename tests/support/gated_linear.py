"""The recurrence of linear attention with decay and the delta rule, by its definition, and inputs for it."""

import torch
from torch import Tensor

from tests.support.kernels import assert_alike

DECAYS = ("none", "fixed", "head", "channel")
RULES = [(decay, delta) for decay in DECAYS for delta in (False, True)]


def definition(q, k, v, state, *, log_decay=None, beta=None, lengths=None):
    """Position after position, number by number: S_t = A_t S_{t-1} + k_t u_tᵀ, y_t = S_tᵀ q_t.

    u_t = v_t, or β_t (v_t − S_{t-1}ᵀ A_tᵀ k_t). Yang et al. 2024 (2412.06464), equation 10; Kimi Team 2025, equation 1.
    """
    b, h, n, d = q.shape
    lengths = [n] * b if lengths is None else lengths.tolist()
    outputs, states = [], []
    for row in range(b):
        for head in range(h):
            s, y = state[row, head], []
            for t in range(n):
                if t < lengths[row]:
                    a = decay_of(log_decay, row, head, t, d)
                    s = torch.diag(a.to(s).exp()) @ s
                    u = v[row, head, t]
                    if beta is not None:
                        u = beta[row, head, t] * (u - s.T @ k[row, head, t])
                    s = s + torch.outer(k[row, head, t], u)
                y.append(s.T @ q[row, head, t])
            outputs.append(torch.stack(y))
            states.append(s)
    return torch.stack(outputs).unflatten(0, (b, h)), torch.stack(states).unflatten(0, (b, h))


def decay_of(log_decay: Tensor | None, row: int, head: int, t: int, d: int) -> Tensor:
    """Return the logarithms of the decay of one position's channels, (D,)."""
    if log_decay is None:
        return torch.zeros(d)
    if log_decay.dim() == 1:
        return log_decay[head].expand(d)
    of_row = log_decay[row if log_decay.size(0) > 1 else 0, head]
    return of_row[t if of_row.size(0) > 1 else 0].expand(d)


def inputs(n: int, d: int, dv: int, decay: str, delta: bool, *, b=2, h=2, dtype=torch.float64, strongest=1.0):
    """Return q, k, v, state, and the options `log_decay` and `beta`; keys have norm 1, β is in (0, 2).

    Heads are views of (B, N, H, D), as `Attention` makes them. Logarithms of decays are uniform in (-strongest, 0).
    """
    q, k, v = (torch.randn(b, n, h, width, dtype=dtype).transpose(1, 2) for width in (d, d, dv))
    k = torch.nn.functional.normalize(k, dim=-1)
    shape = {"none": None, "fixed": (h,), "head": (b, h, n), "channel": (b, h, n, d)}[decay]
    log_decay = None if shape is None else -strongest * torch.rand(shape, dtype=dtype)
    beta = 2 * torch.rand(b, h, n, dtype=dtype) if delta else None
    return [q, k, v, torch.randn(b, h, d, dv, dtype=dtype)], {"log_decay": log_decay, "beta": beta}


def assert_defined(function, tensors, options, *, rtol=None, magnified: float = 1.0, lengths=None, **others):
    """Outputs, states and all arguments' gradients are the definition's in float64: see `assert_alike`."""
    decay = options["log_decay"]
    if decay is not None and decay.dim() == 1:  # its gradient is a sum over all positions, which may nearly cancel
        magnified *= 10
    names = [name for name, t in options.items() if t is not None]
    arguments = [t.detach().requires_grad_() for t in (*tensors, *(options[name] for name in names))]
    found, expected = (by_position(f, names, **o) for f, o in ((function, others), (definition, {})))
    return assert_alike(found, expected, arguments, lengths, rtol=rtol, magnified=magnified)


def by_position(function, names, **others):
    """Return `function` with q, k, v, the state and the options `names` as positional arguments."""
    last = 4 + len(names)

    def called(*a):  # after the options there may be lengths
        given = {"lengths": a[last]} if len(a) > last else {}
        return function(*a[:4], **dict(zip(names, a[4:last], strict=True)), **given, **others)

    return called
