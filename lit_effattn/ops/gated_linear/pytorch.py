"""Linear attention with decay and the delta rule: one recurrence for six kinds of attention.

    S_t = A_t S_{t-1} + k_t u_tᵀ,  y_t = S_tᵀ q_t
    u_t = v_t, or with the delta rule β_t (v_t − S_{t-1}ᵀ A_tᵀ k_t)

A_t is 1, or diagonal: a decay per head, per head and position, or per channel and position. The papers: retention (Sun
et al. 2023, equation 3), gated linear attention (Yang et al. 2023, equation 3), state space duality (Dao and Gu 2024,
equation 1), DeltaNet (Yang et al. 2024, equation 6), Gated DeltaNet (Yang et al. 2024, equation 10), and Kimi Delta
Attention (Kimi Team 2025, equation 1). Queries are not scaled, and nothing is normalised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_effattn.sequence import valid_positions


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    lengths: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence over N positions.

    Args:
        q: (B, H, N, D), queries.
        k: (B, H, N, D), keys.
        v: (B, H, N, D').
        state: (B, H, D, D'), S before the first position, in float32 or more, the type of all sums.
        log_decay: The logarithms of A_t, at most 0: (H,), (B or 1, H, N or 1), or (B, H, N, D) for a decay per channel.
            None: A_t = 1.
        beta: (B, H, N), the strengths of the delta rule. None: u_t = v_t.
        lengths: (B,), number of valid positions; the rest is padding, which leaves the state as it is. None: all are
            valid.
        chunk_size: Positions that are computed at once; no effect on the result.

    Returns:
        The output (B, H, N, D') in v's type, any finite values in padding, and S after the last valid position.

    Raises:
        ValueError: If an argument has a wrong shape or type. The message names it and what was expected.
    """
    _check(q, k, v, state, log_decay, beta, lengths)
    k, decay, beta = _masked(k, state.dtype, log_decay, beta, lengths)
    outputs = []
    for t in range(q.size(2)):
        at = slice(t, t + 1)
        d, b = (None if x is None else x[:, :, at] for x in (decay, beta))
        y, state = _step(q[:, :, at], k[:, :, at], v[:, :, at], d, b, state, in_place=False)
        outputs.append(y)
    return torch.cat(outputs, 2), state


def gated_linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    lengths: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `gated_linear_attention` for one position, N = 1, as in generation.

    With `in_place` the state is updated in place, and nothing of its size is allocated.
    """
    _check(q, k, v, state, log_decay, beta, lengths)
    if q.size(2) != 1:
        raise ValueError(f"q has {q.size(2)} positions; a step takes one, gated_linear_attention any number")
    k, decay, beta = _masked(k, state.dtype, log_decay, beta, lengths)
    return _step(q, k, v, decay, beta, state, in_place=in_place)


def gated_linear_weights(
    q: Tensor,
    k: Tensor,
    before: Tensor | None = None,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return the weights of the values in `gated_linear_attention`, which is linear in them: y = w v + r S_0.

    Exact for the delta rule too, whose weights may be negative.

    Args:
        q: (B, H, N, D), queries.
        k: (B, H, N, D), keys.
        before: (B, H, D, M), columns of a state before the first position; r times them is returned. A state that was
            updated with values of 1 gives the weight of all earlier positions together.
        log_decay: As in `gated_linear_attention`.
        beta: (B, H, N), or None.
        lengths: (B,), or None.

    Returns:
        (B, H, N, N), the weights w; with `before` (B, H, N, M + N), with r before in the first M columns.
    """
    b, h, n, d = q.shape
    if before is None:
        before = q.new_zeros(b, h, d, 0)
    m = before.size(-1)
    v = torch.eye(n, m + n, dtype=q.dtype, device=q.device).roll(m, 1)  # (N, M + N): no column of `before`
    state = torch.cat([before, before.new_zeros(b, h, d, n)], -1)  # (B, H, D, M + N)
    v = v.expand(b, h, n, m + n)
    return gated_linear_attention(q, k, v, state, log_decay=log_decay, beta=beta, lengths=lengths)[0]


def _masked(
    k: Tensor, full: torch.dtype, log_decay: Tensor | None, beta: Tensor | None, lengths: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return k, the logarithms of decay (B or 1, H, N, D or 1) and β (B, H, N, 1); all 0 in padding."""
    n = k.size(2)
    padding = None if lengths is None else ~valid_positions(lengths, n)[:, None, :, None]  # (B, 1, N, 1)

    def masked(t: Tensor) -> Tensor:
        return t.to(full) if padding is None else t.to(full).masked_fill(padding, 0)

    if log_decay is not None:
        if log_decay.dim() == 1:
            log_decay = log_decay[None, :, None]  # (H,) -> (1, H, 1)
        if log_decay.dim() == 3:
            log_decay = log_decay[..., None].expand(-1, -1, n, 1)
        log_decay = masked(log_decay)
    return masked(k), log_decay, None if beta is None else masked(beta[..., None])


def _step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None, state: Tensor, *, in_place: bool
) -> tuple[Tensor, Tensor]:
    """Compute one position of what `_masked` returns."""
    with torch.autocast(q.device.type, enabled=False):
        u = v.to(state.dtype)
        if decay is not None:
            a = decay.exp().mT  # (B or 1, H, D or 1, 1)
            state = state.mul_(a) if in_place else state * a
        if beta is not None:
            u = beta * (u - k @ state)
        state = state.addcmul_(k.mT, u) if in_place else torch.addcmul(state, k.mT, u)
        return (q.to(state.dtype) @ state).to(v.dtype), state


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    lengths: Tensor | None,
) -> None:
    b, h, n, d = q.shape
    width = v.size(-1)
    shapes: dict[str, list[tuple[int, ...]]] = {
        "k": [(b, h, n, d)],
        "v": [(b, h, n, width)],
        "state": [(b, h, d, width)],
        "log_decay": [(h,), *((i, h, j) for i in (b, 1) for j in (n, 1)), (b, h, n, d)],
        "beta": [(b, h, n)],
        "lengths": [(b,)],
    }
    for (name, expected), t in zip(shapes.items(), (k, v, state, log_decay, beta, lengths), strict=True):
        if t is not None and t.shape not in expected:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; with q of {tuple(q.shape)} it should be "
                + " or ".join(map(str, dict.fromkeys(expected)))
            )
    if state.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"state is {state.dtype}; sums must be torch.float32 or more: state.float()")
