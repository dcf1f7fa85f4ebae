"""Several sequences in a row: rows are cut where a sequence begins, and the pieces are the rows of padded calls."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_effattn.sequence import (
    SequenceModule,
    State,
    _like,
    check_lengths,
    parts,
    select,
    sources,
    tensors,
    valid_lengths,
    valid_positions,
    without_padding,
)

CALL_COST = 256
"""Positions that take about as long as one more call of a module."""


@torch.compiler.disable(recursive=False, reason="the number of calls depends on values")
def packed(
    module: SequenceModule,
    x: Tensor,
    starts: Tensor,
    state: State | None = None,
    lengths: Tensor | None = None,
    *,
    keep_state: bool = True,
) -> tuple[Tensor, State | None]:
    """Call `module` on rows that hold several sequences each, of which none depends on another.

    Each row is cut at its starts, and the pieces are the rows of padded calls. So every module supports it, and
    outputs, gradients and states are those of separate calls, positions included. In a call at most a quarter is
    padding, or fewer positions than a further call costs. Where states grow with the sequence and are kept, one call
    holds the last pieces of all rows.

    Args:
        module: Any sequence module, such as an attention or a whole stack. It is called at least once.
        x: (B, N, d_input).
        starts: (B, N) booleans, True where a sequence begins. The positions before a row's first start continue from
            `state`; a start at position 0 resets the row. Starts in padding are ignored.
        state: See `SequenceModule.forward`. It is not changed.
        lengths: See `SequenceModule.forward`.
        keep_state: Whether the state is returned. If not, the returned tree has the auxiliary losses alone.

    Returns:
        y: (B, N, d_model), and the state after the last piece of each row. Its auxiliary losses (`losses`) are the sums
        over the pieces of the row.

    Raises:
        ValueError: If an argument is invalid.
        NotImplementedError: If `state` holds a source, or the module is called inside `sequence_parallel`.
    """
    name = f"packed {type(module).__name__}"
    if x.dim() != 3 or 0 in x.shape[:2]:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)}; expected (rows, positions, d_input), at least one each"
        )
    if wrong := [t.size(0) for t in tensors(state) if t.size(0) != x.size(0)]:
        raise ValueError(f"{name}: state has {wrong[0]} rows; expected {x.size(0)}, as x has")
    check_starts(name, starts, x)
    check_lengths(name, lengths, x)
    if parts() is not None:
        raise NotImplementedError(f"{name} can't be called inside sequence_parallel; call it outside, or pad the rows")
    if any(True for _ in sources(state)):
        raise NotImplementedError(f"{name}: the state holds one source for each row; give each target a row of its own")
    if state is not None and not module.causal:
        raise ValueError(f"{name}: state was given, but causal=False; only a causal module has a state")
    lengths = valid_lengths(lengths, x)
    x, n = without_padding(x, lengths), x.size(1)
    # Piece p is of row[p] and begins at first[p]. A row without positions has one empty piece.
    begins = first_positions(starts, lengths)
    row, first = begins.nonzero(as_tuple=True)  # (P,)
    is_last = torch.cat([row[1:] != row[:-1], row.new_ones(1, dtype=torch.bool)])
    sizes = torch.where(is_last, lengths[row], first.roll(-1)) - first
    is_new = starts[row, first] & (sizes > 0)
    every = torch.arange(len(row), device=row.device)
    # States of other sizes can't be joined, so one call then holds all the pieces whose states are returned.
    is_bounded = not getattr(module, "causal", True) or getattr(module, "bounded_by", "") is None
    if is_bounded or not keep_state:
        groups = [*alike(sizes, every)]
    else:
        groups = [every[is_last], *alike(sizes, every[~is_last])]

    outputs, places, ends = [], [], []
    for group in groups:
        longest = max(1, int(sizes[group].max()))
        place = row[group, None] * n + (first[group, None] + torch.arange(longest, device=x.device)).clamp(max=n - 1)
        of_pieces = x.flatten(0, 1)[place]  # (pieces, longest, d_input); the padding holds other positions
        before = None if state is None else module.reset(select(state, row[group]), is_new[group])
        y, end = module(of_pieces, before, sizes[group])
        valid = valid_positions(sizes[group], longest)
        outputs.append(y[valid])
        places.append(place[valid])
        ends.append(end if keep_state else _losses_alone(end))
    y = torch.cat(outputs)
    y = y.new_zeros(len(x) * n, y.size(1)).index_copy(0, torch.cat(places), y).unflatten(0, (len(x), n))

    last = [is_last[group].nonzero()[:, 0] for group in groups]
    of_rows = [(select(end, i), row[group[i]]) for end, group, i in zip(ends, groups, last, strict=True) if len(i)]
    after = select(join([end for end, _ in of_rows]), torch.cat([rows for _, rows in of_rows]).argsort())
    for end, group in zip(ends, groups, strict=True):
        after = _with_losses(after, end, row[group], (~is_last[group]).nonzero()[:, 0])
    return y, after


def check_starts(name: str, starts: Tensor, x: Tensor) -> None:
    """Raise ValueError unless `starts` are booleans for the positions of `x` (B, N, …)."""
    if starts.shape != x.shape[:2] or starts.dtype != torch.bool:
        raise ValueError(
            f"{name}: starts is {starts.dtype} of shape {tuple(starts.shape)}; expected booleans of shape "
            f"{tuple(x.shape[:2])}"
        )


def first_positions(starts: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return where the pieces begin into which `packed` cuts rows, (B, N) booleans: position 0, and the valid starts.

    Args:
        starts: (B, N): see `packed`.
        lengths: (B,): see `SequenceModule.forward`.
    """
    begins = starts & valid_positions(valid_lengths(lengths, starts), starts.size(1))
    begins[:, 0] = True
    return begins


def starts_of(cu_seqlens: Tensor) -> Tensor:
    """Return the starts (1, N) of sequences that lie end to end in one row, as `packed` takes them.

    Args:
        cu_seqlens: (S + 1,) integers from 0 to N, the convention of flash-attention: sequence i has the positions
            from cu_seqlens[i] to cu_seqlens[i + 1] − 1.

    Raises:
        ValueError: If `cu_seqlens` has another shape or type, does not begin with 0, or does not increase.
    """
    is_integer = not (cu_seqlens.is_floating_point() or cu_seqlens.is_complex() or cu_seqlens.dtype == torch.bool)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or not is_integer:
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; expected (S + 1,) integers"
        )
    cu_seqlens = cu_seqlens.long()  # differences of uint8 are never negative
    if cu_seqlens[0] != 0 or not (cu_seqlens.diff() > 0).all():
        raise ValueError(f"cu_seqlens is {cu_seqlens.tolist()}; expected increasing numbers that begin with 0")
    starts = torch.zeros(1, int(cu_seqlens[-1]), dtype=torch.bool, device=cu_seqlens.device)
    starts[0, cu_seqlens[:-1]] = True
    return starts


def alike(sizes: Tensor, pieces: Tensor) -> Iterator[Tensor]:
    """Yield groups of `pieces`, the longest first, each for a padded call.

    A group ends before the first piece shorter than ¾ of its longest if the padding that this saves costs more than
    another call.
    """
    pieces = pieces[sizes[pieces].argsort(descending=True, stable=True)]
    while len(pieces):
        of_pieces = sizes[pieces]
        similar = int((4 * of_pieces >= 3 * of_pieces[0]).sum())
        rest = of_pieces[similar:]
        if len(rest) * int(of_pieces[0] - rest[:1].sum()) < CALL_COST:
            similar = len(pieces)
        yield pieces[:similar]
        pieces = pieces[similar:]


def join(states: list[State]) -> State:
    """Return the rows of all states, whose tensors differ in the number of rows alone, as a copy."""
    first = states[0]
    if isinstance(first, Tensor):
        return torch.cat(states)
    return None if first is None else _like(first, [join(list(parts)) for parts in zip(*states, strict=True)])


def _losses_alone(state: State) -> State:
    """Return `state` with None in place of all tensors but the auxiliary losses."""
    if not isinstance(state, tuple):
        return None
    names = getattr(state, "_fields", [""] * len(state))
    return _like(
        state, [part if name == "loss" else _losses_alone(part) for name, part in zip(names, state, strict=True)]
    )


def _with_losses(state: State, other: State, row: Tensor, pieces: Tensor) -> State:
    """Add to the auxiliary losses of `state` (B rows) those of `pieces` (K,) of `other`, which are of `row` (P,)."""
    if not isinstance(state, tuple):
        return state
    values = [
        part.index_add(0, row[pieces], more[pieces])
        if name == "loss" and part is not None
        else _with_losses(part, more, row, pieces)
        for name, part, more in zip(getattr(state, "_fields", [""] * len(state)), state, other, strict=True)
    ]
    return _like(state, values)
