"""The contract of all sequence modules, `y, state = module(x, state, lengths)`, and the operations on states.

Only this file defines how a state is detached, moved, selected, counted and saved. The contents of a state are private
to the kind of module that returned it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from lit_effattn.hparams import HasInitArgs

State = Any
"""A tensor whose first dimension is the batch, a NamedTuple or tuple of states, or None (nothing remembered)."""


class SequenceModule(HasInitArgs, nn.Module, ABC):
    """A module that mixes a sequence: `y, state = module(x, state, lengths)`.

    Attributes:
        d_input: Width of `x`; equal to `d_model` unless the module adds dimensions of its own (concatenated positions).
        d_model: Width of `y`.
        causal: Whether `y` at a position depends only on that and earlier positions. Only causal modules have a state.
    """

    d_input: int
    d_model: int
    causal: bool

    takes_parts = False
    """Whether the module can be called inside `sequence_parallel`."""

    takes_pieces = False
    """Whether `forward` has a further argument, `pieces`: see `Pieces`."""

    no_weight_decay: tuple[str, ...] = ()
    """Names of the module's own parameters to which no weight decay applies, such as the decays of a recurrence."""

    if TYPE_CHECKING:  # nn.Module's returns Any

        def __call__(
            self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
        ) -> tuple[Tensor, State | None]:
            """Call `forward`."""

    @abstractmethod
    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        """Mix `x`, continuing from `state`.

        Args:
            x: (B, N, d_input).
            state: State that an earlier call returned for the positions before `x`; None: no earlier positions. It is
                not changed, except inside `donated()`.
            lengths: (B,) integers in 0 … N, the number of valid positions of each row. The rest, on the right, is
                padding: it affects no output, gradient or state, and its own outputs are 0. None: all are valid.

        Returns:
            y: (B, N, d_model), and the state after `x` (None for a module that is not causal).
        """

    @abstractmethod
    def initial_state(
        self,
        batch_size: int,
        *,
        max_len: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """Return the empty state, equivalent to `state=None`.

        Args:
            batch_size: Number of rows.
            max_len: Maximum number of positions of each row, without padding. All shapes are then fixed, as compiled
                generation requires; `grow` makes room for more. None: the state may grow.
            device: Default: the parameters'.
            dtype: Type of the stored tensors (accumulators have at least float32). Default: the parameters'.
        """

    def reset(self, state: State, rows: Tensor) -> State:
        """Return `state` with the rows where `rows` (B,) is True reset to `initial_state`.

        The default sets them to zero. A kind whose empty state is not all zeros (a running maximum) overrides it.
        """
        return map_tensors(lambda t: t.masked_fill(rows.view(-1, *[1] * (t.dim() - 1)), 0), state)

    def grow(self, state: State, max_len: int) -> State:
        """Return `state` with room for `max_len` positions in all.

        A state that was made without `max_len` grows by itself, and is returned as it is; so is one that has the room.
        The default copies it to the first slots of an empty state of that size. A slot must keep its meaning there, so
        slots of a fixed number come before those that `max_len` adds to.
        """
        first = next(tensors(state))
        larger = self.initial_state(first.size(0), max_len=max_len, device=first.device)
        if type(state) is not type(larger):
            return state
        if all(old.numel() >= new.numel() for old, new in zip(tensors(state), tensors(larger), strict=True)):
            return state
        stored = tensors(state)
        return map_tensors(lambda empty: _with_first_slots(empty, next(stored)), larger)

    @property
    def bounded_by(self) -> str | None:
        """None if the state's size is bounded, else the option that bounds it, such as "window"; "" if none does."""
        return None

    def check(self, x: Tensor, state: State | None, lengths: Tensor | None) -> None:
        """Check the arguments of `forward`.

        Raises:
            ValueError: If an argument is invalid, or `state` was donated to an earlier call. The message names the
                argument, its value and what was expected.
            NotImplementedError: If the module is called inside `sequence_parallel` and does not support it.
        """
        name = type(self).__name__
        if parts() is not None and not self.takes_parts:
            raise NotImplementedError(parts().unsupported(self))
        if x.dim() != 3 or x.size(-1) != self.d_input:
            raise ValueError(f"{name}: x has shape {tuple(x.shape)}; expected (batch, length, {self.d_input})")
        if x.size(1) == 0:
            raise ValueError(f"{name}: x has shape {tuple(x.shape)}; a sequence has at least one position")
        if state is not None and not self.causal:
            raise ValueError(f"{name}: state was given, but causal=False; only a causal module has a state")
        for t in tensors(state):
            if t.size(0) != x.size(0):
                raise ValueError(
                    f"{name}: x has {x.size(0)} rows and the state {t.size(0)}; `select` repeats or drops rows"
                )
        check_lengths(name, lengths, x)
        if state is not None and not torch.compiler.is_compiling():
            _take(self, state)

    def default(self, device: torch.device | None, dtype: torch.dtype | None) -> tuple[torch.device, torch.dtype]:
        """Return `device` and `dtype`, with the parameters' for None."""
        parameter = next(self.parameters())
        return device or parameter.device, dtype or parameter.dtype


def reads_values(tensor: Tensor) -> bool:
    """Whether reading `tensor`'s values is free: on the CPU, outside torch.compile (a GPU would synchronise)."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def valid_positions(lengths: Tensor, n: int) -> Tensor:
    """Return (B, n) booleans, True at the positions before `lengths`."""
    return torch.arange(n, device=lengths.device) < lengths[:, None]


def valid_lengths(lengths: Tensor | None, x: Tensor, dim: int = 1) -> Tensor:
    """Return `lengths` (B,), or without them the number of positions of `x`, its size along `dim`, for each row."""
    return torch.full(x.shape[:1], x.size(dim), device=x.device) if lengths is None else lengths


def check_lengths(name: str, lengths: Tensor | None, x: Tensor) -> None:
    """Check that `lengths` are numbers of positions of `x` (B, N, …).

    Raises:
        ValueError: If they have another shape, a floating-point type, or (checked on the CPU) values outside 0 … N.
    """
    if lengths is None:
        return
    if lengths.shape != x.shape[:1] or lengths.is_floating_point():
        raise ValueError(
            f"{name}: lengths is {lengths.dtype} of shape {tuple(lengths.shape)}; expected integers of shape "
            f"({x.size(0)},)"
        )
    if reads_values(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= x.size(1):
        raise ValueError(f"{name}: lengths is {lengths.tolist()}; expected values from 0 to {x.size(1)}")


def without_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Set the padding of `x` (B, N, …) to 0, even where it is NaN."""
    return x if lengths is None else x.masked_fill(~valid_positions(lengths, x.size(1))[..., None], 0)


def heads_without_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Set the padding of `x` (B, H, N, D) to 0, even where it is NaN."""
    return x if lengths is None else x.masked_fill(~valid_positions(lengths, x.size(2))[:, None, :, None], 0)


def reversed_rows(x: Tensor, lengths: Tensor | None, dim: int = 1) -> Tensor:
    """Reverse each row's valid positions of `x` (B, …) along `dim`, and keep the padding on the right."""
    if lengths is None:
        return x.flip(dim)
    t = torch.arange(x.size(dim), device=x.device)
    index = torch.where(t < lengths[:, None], lengths[:, None] - 1 - t, t)  # (B, N)
    shape = [1] * x.dim()
    shape[0], shape[dim] = index.shape
    return x.gather(dim, index.view(shape).expand_as(x))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type to accumulate `dtype` in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


# ------------------------------------------------------------------------------------------------ the state as a tree


def map_tensors(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Apply `function` to every tensor of `state`."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, tuple):
        return _like(state, [map_tensors(function, part) for part in state])
    raise TypeError(f"a state holds tensors, tuples and None, not {type(state).__name__}")


def tensors(state: State) -> Iterator[Tensor]:
    """Yield every tensor of `state`."""
    if isinstance(state, Tensor):
        yield state
    elif state is not None:
        for part in state:
            yield from tensors(part)


def detach(state: State) -> State:
    """Detach `state` from the graph, as truncated back-propagation through time does between two batches."""
    return map_tensors(Tensor.detach, state)


def to(state: State, device: torch.device | str) -> State:
    """Move `state` to `device`."""
    return map_tensors(lambda t: t.to(device), state)


def select(state: State, rows: Tensor) -> State:
    """Return the rows of `state` with the indices `rows` (K,), in that order; an index may be repeated."""
    return map_tensors(lambda t: t.index_select(0, rows.to(t.device)), state)


def reorder(state: State, rows: Tensor) -> State:
    """Return the rows of `state` with the indices `rows` (B,), each a row with the same source as the one it replaces.

    Like `select`, but the state of a source, which has a field `given`, is not copied: beams of one sentence share it.
    """
    if hasattr(state, "given"):
        return state
    if isinstance(state, tuple):
        return _like(state, [reorder(part, rows) for part in state])
    return select(state, rows)


def nbytes(state: State) -> int:
    """Count the bytes that `state` takes."""
    return sum(t.numel() * t.element_size() for t in tensors(state))


def losses(state: State) -> Tensor | None:
    """Sum the auxiliary losses of the last call, (B,), over all fields named `loss` in the tree; None if none."""
    values = list(losses_by_kind(state).values())
    return reduce(torch.add, values) if values else None


def losses_by_kind(state: State) -> dict[str, Tensor]:
    """Sum the auxiliary losses, (B,), for each class of state with a field `loss`, by class name."""
    sums: dict[str, Tensor] = {}
    if isinstance(state, tuple):
        for name, part in zip(getattr(state, "_fields", [""] * len(state)), state, strict=True):
            of_part = {type(state).__name__: part} if name == "loss" else losses_by_kind(part)
            for kind, loss in of_part.items():
                sums[kind] = sums[kind] + loss if kind in sums else loss
    return sums


def pack(state: State) -> Any:
    """Turn `state` into plain tuples of tensors, which `torch.load(weights_only=True)` reads."""
    return tuple(pack(part) for part in state) if isinstance(state, tuple) else state


def unpack(packed: Any, like: State) -> State:
    """Undo `pack`.

    Args:
        packed: The result of `pack`, perhaps from a file.
        like: Any state of the same module, such as `initial_state(1)`.

    Raises:
        ValueError: If `packed` has another structure than `like`, or a tensor with another number of dimensions.
    """
    if like is None or (packed is None and isinstance(like, tuple)):
        return packed
    if isinstance(like, tuple):
        if not isinstance(packed, tuple | list) or len(packed) != len(like):
            raise ValueError(f"a state of {len(like)} parts was expected, and {_described(packed)} was found")
        return _like(like, [unpack(part, example) for part, example in zip(packed, like, strict=True)])
    if not isinstance(packed, Tensor) or packed.dim() != like.dim():
        raise ValueError(f"{_described(like)} was expected in a state, and {_described(packed)} was found")
    return packed


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dim()} dimensions"
    return f"a {type(value).__name__} of {len(value)} parts" if isinstance(value, tuple | list) else repr(value)[:40]


def _like(state: tuple[Any, ...], values: list[Any]) -> State:
    """Return a tuple of the class of `state` with `values`."""
    return type(state)(*values) if hasattr(state, "_fields") else tuple(values)


def _with_first_slots(empty: Tensor, stored: Tensor) -> Tensor:
    """Copy `stored` to the first slots of `empty`, in the type of `stored`."""
    larger = empty.to(stored.dtype)
    larger[tuple(map(slice, stored.shape))] = stored
    return larger


# ----------------------------------------------------------------------------------------- several sequences in a row


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
    holds the last pieces of all rows. A module with `takes_pieces`, such as `Transformer`, makes these calls for its
    attention alone; the rest of it reads the pieces end to end, without padding.

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
    if _reads_source(state):
        raise NotImplementedError(f"{name}: the state holds one source for each row; give each target a row of its own")
    if state is not None and not module.causal:
        raise ValueError(f"{name}: state was given, but causal=False; only a causal module has a state")
    # States of other sizes can't be joined, so one call then holds all the pieces whose states are returned.
    is_bounded = not getattr(module, "causal", True) or getattr(module, "bounded_by", "") is None
    pieces = _cut(starts, valid_lengths(lengths, x), joinable=is_bounded or not keep_state, keep_states=keep_state)
    before = None
    if state is not None:
        before = [module.reset(select(state, pieces.row[g]), pieces.is_new[g]) for g in pieces.groups]
    x = without_padding(x, lengths)  # a row without positions still has one
    y, ends = pieces.call(module, x.flatten(0, 1)[None].index_select(1, pieces.source), before)
    last_ends, last_rows = [], []
    for end, group in zip(ends, pieces.groups, strict=True):
        if len(last := pieces.is_last[group].nonzero()[:, 0]):
            last_ends.append(select(end, last))
            last_rows.append(pieces.row[group[last]])
    after = select(join(last_ends), torch.cat(last_rows).argsort())
    for end, group in zip(ends, pieces.groups, strict=True):
        after = _with_losses(after, end, pieces.row[group], (~pieces.is_last[group]).nonzero()[:, 0])
    y = y.index_select(1, pieces.target.flatten()).unflatten(1, starts.shape)[0]
    return without_padding(y, lengths), after


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


def cu_seqlens_of(starts: Tensor) -> Tensor:
    """Undo `starts_of`: (1, N) booleans, of which the first is True, -> (S + 1,) of type int32.

    Raises:
        ValueError: If `starts` has another shape or type, or no sequence begins at position 0.
    """
    if starts.dim() != 2 or starts.size(0) != 1 or starts.dtype != torch.bool:
        raise ValueError(f"starts is {starts.dtype} of shape {tuple(starts.shape)}; expected booleans of shape (1, N)")
    if not starts[:, :1].all():
        raise ValueError("starts is False at position 0, but cu_seqlens have a sequence that begins there")
    begins = starts[0].nonzero()[:, 0]
    return torch.cat([begins, begins.new_tensor([starts.size(1)])]).int()


class Pieces(NamedTuple):
    """P sequences, or pieces of them, into which `packed` cuts B rows of N positions; T positions in all.

    A module with `takes_pieces` is called with x (1, T, d_input), in which the pieces lie end to end without padding,
    and with a list of states, one for each group, or None. It returns such a list too. It applies position-wise layers
    to x, and `call`s the modules that mix positions.

    Attributes:
        row: (P,), the row of each.
        sizes: (P,) numbers of positions. A row without positions has one empty piece.
        is_new: (P,), whether a sequence begins with it; otherwise it continues from the row's state.
        is_last: (P,), whether the piece is the last one of its row.
        groups: The pieces that are called together, in modules that mix positions.
        longest: For each group the size of its longest piece, at least 1.
        first: (P,), the position among the T at which each begins.
        place: (T,), where the outputs of the groups, laid end to end, hold each position.
        piece: (T,), the piece of each position.
        source: (T,), the place of each in the B · N positions of the rows.
        target: (B, N), the place of a row's position among the T; any in the padding.
        keep_states: Whether states are returned. Otherwise their auxiliary losses alone are.
    """

    row: Tensor
    sizes: Tensor
    is_new: Tensor
    is_last: Tensor
    groups: list[Tensor]
    longest: list[int]
    first: Tensor
    place: Tensor
    piece: Tensor
    source: Tensor
    target: Tensor
    keep_states: bool

    @torch.compiler.disable(recursive=False, reason="the number of calls depends on values")
    def call(
        self, module: SequenceModule, x: Tensor, states: list[State] | None = None
    ) -> tuple[Tensor, list[State | None]]:
        """Call `module` on the pieces, those of a group as the rows of a padded batch unless it has `takes_pieces`.

        Args:
            module: Any sequence module.
            x: (1, T, d_input).
            states: For each group the state before its pieces; None: no earlier positions.

        Returns:
            y: (1, T, d_model), and for each group the state after its pieces.
        """
        if getattr(module, "takes_pieces", False):
            takes_pieces: Any = module
            y, ends = takes_pieces(x, states, pieces=self)
        else:
            outputs, ends = [], []
            for i, (group, longest) in enumerate(zip(self.groups, self.longest, strict=True)):
                inside = (self.first[group, None] + torch.arange(longest, device=x.device)).clamp(max=x.size(1) - 1)
                rows = x.index_select(1, inside.flatten()).unflatten(1, inside.shape)[0]  # (pieces, longest, d_input)
                output, end = module(rows, None if states is None else states[i], self.sizes[group])
                outputs.append(output.flatten(0, 1))
                ends.append(end)
            y = torch.cat(outputs).index_select(0, self.place)[None]
        return y, ends if self.keep_states else [_losses_alone(end) for end in ends]

    @torch.compiler.disable(reason="the number of groups depends on values")
    def lengths(self, earlier: list[Tensor] | None = None) -> tuple[list[Tensor], Tensor]:
        """Return the numbers of positions after each group's pieces, and the position (1, T) of each in its sequence.

        Args:
            earlier: For each group the numbers of positions before its pieces; None: 0.
        """
        earlier = earlier or [torch.zeros_like(group) for group in self.groups]
        before = torch.cat(earlier)[torch.cat(self.groups).argsort()]  # (P,)
        position = torch.arange(len(self.piece), device=before.device) - (self.first - before)[self.piece]
        return [n + self.sizes[group] for n, group in zip(earlier, self.groups, strict=True)], position[None]


CALL_COST = 256
"""Positions that take about as long as one more call of a module."""


@torch.compiler.disable(reason="the number of pieces depends on values")
def _cut(starts: Tensor, lengths: Tensor, *, joinable: bool, keep_states: bool) -> Pieces:
    """Cut rows at `starts` (B, N), of which the positions before `lengths` (B,) are valid.

    Unless states are `joinable`, the last pieces of the rows are one group.
    """
    n = starts.size(1)
    begins = first_positions(starts, lengths)
    row, column = begins.nonzero(as_tuple=True)  # (P,)
    is_last = torch.cat([row[1:] != row[:-1], row.new_ones(1, dtype=torch.bool)])
    sizes = torch.where(is_last, lengths[row], column.roll(-1)) - column
    if joinable:
        groups = [*alike(sizes, torch.arange(len(row), device=row.device))]
    else:
        groups = [is_last.nonzero()[:, 0], *alike(sizes, (~is_last).nonzero()[:, 0])]
    longest = [max(1, int(sizes[group].max())) for group in groups]
    begin, end = torch.empty_like(row), 0  # of each piece in the outputs of the groups
    for group, size in zip(groups, longest, strict=True):
        begin[group] = end + size * torch.arange(len(group), device=row.device)
        end += size * len(group)
    first = sizes.cumsum(0) - sizes
    piece = torch.arange(len(row), device=row.device).repeat_interleave(sizes)
    source = valid_positions(lengths, n).flatten().nonzero()[:, 0]
    if len(source) == 0:  # one position of padding, because modules need one
        piece, source = piece.new_zeros(1), source.new_zeros(1)
    place = begin[piece] + torch.arange(len(piece), device=row.device) - first[piece]
    target = (valid_positions(lengths, n).flatten().cumsum(0) - 1).clamp(min=0).view_as(starts)
    is_new = starts[row, column] & (sizes > 0)
    return Pieces(row, sizes, is_new, is_last, groups, longest, first, place, piece, source, target, keep_states)


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


def _reads_source(state: State) -> bool:
    return hasattr(state, "given") or (isinstance(state, tuple) and any(_reads_source(part) for part in state))


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


# ----------------------------------------------------------------------------------------------------- donated states


class _Donated(threading.local):
    """Whether the current thread is inside `donated()`. `torch.compile` of PyTorch 2.11 cannot trace a ContextVar."""

    now = False


_donated = _Donated()


@contextmanager
def donated(is_donated: bool = True) -> Iterator[None]:
    """Donate every state passed to a module inside the context.

    A donated state may be overwritten in place and must not be used again. A key/value cache is then written in place;
    copying it for every new token would cost more than the attention itself.

    A module that is called a second time with a state that was donated to it raises ValueError, inside the context and
    after it, if the state has a field `length`. Compiled calls are not checked, and copies are other states (those of
    `select` and `detach` too).
    """
    before, _donated.now = _donated.now, is_donated
    try:
        yield
    finally:
        _donated.now = before


def may_overwrite() -> bool:
    """Whether the current state may be written in place: it is donated, and gradients are disabled."""
    return not torch.is_grad_enabled() and _donated.now


_taken: dict[tuple[int, int], tuple[ref[Tensor], ref[Tensor], int]] = {}
"""The donated states, by the ids of the module and of `length`: `length`, one more tensor, and the version of `length`.

A caller may copy the next state into the same tensors; `length` then has another version."""


def _take(module: SequenceModule, state: State) -> None:
    """Record that `module` was given a donated state. The state that it returns has another tensor `length`.

    A state that consists of other states is not recorded, since the modules inside record those; nor is the state of a
    source, which has a field `given` and is never overwritten.

    Raises:
        ValueError: If the state was donated to `module` before.
    """
    if not (_taken or may_overwrite()):
        return
    length = getattr(state, "length", None)
    if length is None or not isinstance(state[0], Tensor) or hasattr(state, "given"):
        return
    other = state[0] if state[0] is not length else state[1]
    if not isinstance(other, Tensor):
        return
    key, version = (id(module), id(length)), 0 if length.is_inference() else length._version
    before = _taken.get(key)
    if before is not None and before[0]() is length and before[1]() is other and before[2] == version:
        raise ValueError(
            f"{type(module).__name__}: the state was donated to an earlier call and may have been overwritten; use the "
            "state that the call returned, or make that call outside of sequence.donated() to keep this one"
        )
    if may_overwrite():
        _taken[key] = ref(length, lambda _: _taken.pop(key, None)), ref(other), version


# ------------------------------------------------------------------------------------------------- parts of a sequence


class _Parallel(threading.local):
    """The `sequence_parallel.Parts` of the current thread, None outside `sequence_parallel`."""

    parts: Any = None


_parallel = _Parallel()


@contextmanager
def in_parts(parts: Any) -> Iterator[None]:
    """Let every call in the context compute one of several parts: see `sequence_parallel`."""
    before, _parallel.parts = _parallel.parts, parts
    try:
        yield
    finally:
        _parallel.parts = before


def parts() -> Any:
    """Return the `Parts` of the innermost `sequence_parallel`; None outside."""
    return _parallel.parts
