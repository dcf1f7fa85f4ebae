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

import torch
from torch import Tensor, nn

from lit_effattn.hparams import HasInitArgs

State = Any
"""A tensor whose first dimension is the batch, a NamedTuple or tuple of states, or None (nothing remembered)."""


class Source(NamedTuple):
    """The state of a module that reads a source. Its outputs do not change it, so beams of one sentence share it."""

    kept: State  # what the module keeps of the source
    length: Tensor  # (B,), positions of the source
    given: Tensor  # (B,), whether the row has a source, which may be empty


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
            lengths: (B,) int32 or int64 integers in 0 … N, the number of valid positions of each row. The rest, on the
                right, is padding: it affects no output, gradient or state, and its own outputs are 0. None: all are
                valid.

        Returns:
            y: (B, N, d_model), and the state after `x` (None for a module that is not causal).
        """

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
        if device is None or dtype is None:
            like: Tensor | None = next(self.parameters(), None)
            if like is None:
                like = torch.empty(0)
            device, dtype = device or like.device, dtype or like.dtype
        return self.empty_state(batch_size, max_len, device, dtype)

    @abstractmethod
    def empty_state(self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype) -> State:
        """Compute `initial_state`, whose arguments without a value have their defaults."""

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
            ValueError: If an argument is invalid. The message names the argument, its value and what was expected.
            NotImplementedError: If the module is called inside `sequence_parallel` and does not support it.
        """
        name = type(self).__name__
        if parts() is not None and not self.takes_parts:
            raise NotImplementedError(parts().unsupported(self))
        if x.dim() != 3 or x.size(-1) != self.d_input:
            raise ValueError(f"{name}: x has shape {tuple(x.shape)}; expected (batch, length, {self.d_input})")
        if 0 in x.shape[:2]:
            raise ValueError(f"{name}: x has shape {tuple(x.shape)}; expected at least one row and one position")
        if state is not None and not self.causal:
            raise ValueError(f"{name}: state was given, but causal=False; only a causal module has a state")
        for t in tensors(state):
            if t.size(0) != x.size(0):
                raise ValueError(
                    f"{name}: x has {x.size(0)} rows and the state {t.size(0)}; `select` repeats or drops rows"
                )
        check_lengths(name, lengths, x)


def reads_values(tensor: Tensor) -> bool:
    """Whether reading `tensor`'s values is free: on the CPU, outside torch.compile (a GPU would synchronise)."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def valid_positions(lengths: Tensor, n: int) -> Tensor:
    """Return (B, n) booleans, True at the positions before `lengths`."""
    return torch.arange(n, device=lengths.device) < lengths[:, None]


def valid_lengths(lengths: Tensor | None, x: Tensor, dim: int = 1) -> Tensor:
    """Return `lengths` (B,), or without them the number of positions of `x`, its size along `dim`, for each row.

    A state may keep the result: it is int64, and a copy, so that the caller may change `lengths`.
    """
    if lengths is None:
        return torch.full(x.shape[:1], x.size(dim), device=x.device)
    return lengths.to(torch.long, copy=True)


def check_lengths(name: str, lengths: Tensor | None, x: Tensor) -> None:
    """Check that `lengths` are numbers of positions of `x` (B, N, …).

    Raises:
        ValueError: If they have another shape, another type than int32 and int64 (sums of positions overflow in fewer
            bits), or (checked on the CPU) values outside 0 … N.
    """
    if lengths is None:
        return
    if lengths.shape != x.shape[:1] or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name}: lengths is {lengths.dtype} of shape {tuple(lengths.shape)}; expected int32 or int64 integers of "
            f"shape ({x.size(0)},)"
        )
    if reads_values(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= x.size(1):
        raise ValueError(f"{name}: lengths is {lengths.tolist()}; expected values from 0 to {x.size(1)}")


def without_padding(x: Tensor, lengths: Tensor | None, dim: int = 1) -> Tensor:
    """Set the padding of `x` (B, …), whose positions are along `dim`, to 0, even where it is NaN."""
    return x if lengths is None else x.masked_fill(along(~valid_positions(lengths, x.size(dim)), x, dim), 0)


def along(t: Tensor, like: Tensor, dim: int) -> Tensor:
    """View `t` (B, K) with the number of dimensions of `like`, K along `dim`, for broadcasting."""
    shape = [1] * like.dim()
    shape[0], shape[dim] = t.shape
    return t.view(shape)


def reversed_rows(x: Tensor, lengths: Tensor | None, dim: int = 1) -> Tensor:
    """Reverse each row's valid positions of `x` (B, …) along `dim`, and keep the padding on the right."""
    if lengths is None:
        return x.flip(dim)
    t = torch.arange(x.size(dim), device=x.device)
    index = torch.where(t < lengths[:, None], lengths[:, None] - 1 - t, t)  # (B, N)
    return x.gather(dim, along(index, x, dim).expand_as(x))


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

    Like `select`, but a `Source` is not copied: beams of one sentence share it.
    """
    if isinstance(state, Source):
        return state
    if isinstance(state, tuple):
        return _like(state, [reorder(part, rows) for part in state])
    return select(state, rows)


def sources(state: State) -> Iterator[Source]:
    """Yield the sources in the tree `state`."""
    if isinstance(state, Source):
        yield state
    elif isinstance(state, tuple):
        for part in state:
            yield from sources(part)


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


# ----------------------------------------------------------------------------------------------------- donated states


class _Context(threading.local):
    """State of the current thread. `torch.compile` of PyTorch 2.11 cannot trace a ContextVar."""

    is_donated = False
    """Whether the thread is inside `donated()`."""

    parts: Any = None
    """The `sequence_parallel.Parts`, None outside `sequence_parallel`."""


_context = _Context()


@contextmanager
def donated(is_donated: bool = True) -> Iterator[None]:
    """Donate every state passed to a module inside the context.

    A donated state may be overwritten in place and must not be used again. A key/value cache is then written in place;
    copying it for every new token would cost more than the attention itself.
    """
    before, _context.is_donated = _context.is_donated, is_donated
    try:
        yield
    finally:
        _context.is_donated = before


def may_overwrite() -> bool:
    """Whether the current state may be written in place: it is donated, and gradients are disabled."""
    return not torch.is_grad_enabled() and _context.is_donated


# ------------------------------------------------------------------------------------------------- parts of a sequence


@contextmanager
def in_parts(parts: Any) -> Iterator[None]:
    """Let every call in the context compute one of several parts: see `sequence_parallel`."""
    before, _context.parts = _context.parts, parts
    try:
        yield
    finally:
        _context.parts = before


def parts() -> Any:
    """Return the `Parts` of the innermost `sequence_parallel`; None outside."""
    return _context.parts
