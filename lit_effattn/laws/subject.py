"""A module under test: its inputs and calls in one type on one device."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lit_effattn.laws import tree
from lit_effattn.laws.adapter import Adapter, check_options
from lit_effattn.laws.comparison import EXACT, TOLERANCES, Tolerance

STARTS = ("none", "initial", "max_len")
"""The first state: None, an empty state, an empty state with `max_len`."""


class Subject:
    """A module, built once, and the results that several laws need.

    Args:
        adapter: Says how the module is built and called.
        device: Where it computes.
        dtype: The type of its parameters and inputs. Default: the adapter's.
        bitwise: Whether all laws that can must hold to the bit.

    Attributes:
        drawn: The types, shapes and seeds of the inputs of the case that is tested.

    Raises:
        ValueError: If `device` can't be used, or there is no tolerance for `dtype`, or an option of the adapter is
            invalid.
    """

    def __init__(
        self,
        adapter: Adapter,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        bitwise: bool = False,
    ) -> None:
        check_options(adapter)
        self.adapter, self.device, self.bitwise = adapter, _usable(device), bitwise
        self.dtype = adapter.dtype if dtype is None else dtype
        if self.dtype not in TOLERANCES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(map(str, TOLERANCES))}")
        self._module: Any = None
        self._memory: dict[Any, Any] = {}
        self._capabilities: set[str] | None = None
        self.drawn: dict[str, None] = {}

    @property
    def module(self) -> Any:
        """The module, in evaluation mode."""
        if self._module is None:
            self._module = self.build()
        return self._module

    def build(self, dtype: torch.dtype | None = None, width: int | None = None) -> Any:
        """Build the module again, equal to the first."""
        module = self.adapter.make(width)
        if isinstance(module, nn.Module):
            module = module.to(self.device, dtype or self.dtype).eval()
        return module

    @property
    def capabilities(self) -> set[str]:
        """The names of what the laws may use: see `Adapter.capabilities`."""
        if self._capabilities is None:
            self._inputs(1, 1)  # raises if the width is not known
            self._capabilities = self.adapter.capabilities(self.module)
        return self._capabilities

    def tolerance(self, law: str) -> Tolerance:
        """Return the tolerance of a law."""
        return EXACT if law in self.adapter.bitwise or self.bitwise else TOLERANCES[self.dtype]

    def remember(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return `compute()`, computed once for each key. Only the newest results are kept."""
        if key not in self._memory:
            while len(self._memory) > 16:
                self._memory.pop(next(iter(self._memory)))
            self._memory[key] = compute()
        return self._memory[key]

    # ------------------------------------------------------------------------------------------------------- inputs

    def inputs(self, batch: int, n: int, seed: int = 0, module: Any = None) -> Tensor:
        """Return random inputs (batch, n, …) in the subject's type on its device."""
        x = self._inputs(batch, n, seed, module)
        self.drawn[f"{x.dtype} of shape {tuple(x.shape)}, seed {seed}"] = None
        return x

    def _inputs(self, batch: int, n: int, seed: int = 0, module: Any = None) -> Tensor:
        x = self.adapter.inputs(self.module if module is None else module, batch, n, seed)
        return x.to(self.device, self.dtype if x.is_floating_point() else None)

    def lengths(self, lengths: Sequence[int]) -> Tensor:
        """Return lengths as a tensor (B,)."""
        return torch.tensor(list(lengths), device=self.device)

    def valid(self, lengths: Sequence[int], n: int) -> Tensor:
        """Return (B, n) booleans, True at valid positions: at the left, or the right with padding on the left."""
        position = torch.arange(n, device=self.device)
        if self.adapter.padding == "left":
            position = n - 1 - position
        return position < self.lengths(lengths)[:, None]

    def padded(self, x: Tensor, lengths: Sequence[int], garbage: Tensor | None = None) -> Tensor:
        """Return the first `lengths` positions of the rows of `x`, and `garbage` (as `x`; default: 0) as padding."""
        n = x.size(1)
        result = torch.zeros_like(x) if garbage is None else garbage.clone()
        for i, length in enumerate(lengths):
            at = slice(n - length, n) if self.adapter.padding == "left" else slice(0, length)
            result[i, at] = x[i, :length]
        return result

    # -------------------------------------------------------------------------------------------------------- calls

    def call(self, x: Tensor, state: Any = None, lengths: Sequence[int] | None = None, module: Any = None) -> Any:
        """Return outputs and state."""
        module = self.module if module is None else module
        return self.adapter.call(module, x, state, None if lengths is None else self.lengths(lengths))

    def stream(self, x: Tensor, way: Sequence[int], state: Any = None, module: Any = None) -> tuple[Tensor, Any]:
        """Feed `x` in segments of the lengths `way`, and pass the state along."""
        return stream(lambda part, before: self.call(part, before, module=module), x, way, state)

    def whole(self, batch: int, n: int) -> Tensor:
        """Return the outputs of one call on `inputs(batch, n)`, without gradients."""

        def compute() -> Tensor:
            with torch.no_grad():
                return self.call(self.inputs(batch, n))[0]

        result: Tensor = self.remember(("whole", batch, n), compute)
        return result

    def begin(self, start: str, batch: int, max_len: int) -> Any:
        """Return the first state: `start` is one of `STARTS`."""
        if start == "none":
            return None
        x = self._inputs(1, 1)
        return self.adapter.initial_state(self.module, batch, max_len if start == "max_len" else None, x)

    def starts(self) -> list[str]:
        """Return those of `STARTS` that the adapter offers."""
        return list(STARTS) if "initial_state" in self.capabilities else ["none"]

    def streams(self) -> list[str]:
        """Return the ways to hand states along: kept or donated, and the first one, such as `kept-none`."""
        ways = ["kept", "donated"] if "donated" in self.capabilities else ["kept"]
        return [f"{way}-{start}" for way in ways for start in self.starts()]

    def donating(self, variant: str) -> AbstractContextManager[Any]:
        """Return the context for a variant of `streams`."""
        return self.adapter.donated() if variant.startswith("donated") else nullcontext()

    def kept(self, state: Any) -> Any:
        """Return `state` for a call after which it is needed again: a copy if calls overwrite states."""
        return tree.clone(state) if self.adapter.donates else state

    def select(self, state: Any, rows: Sequence[int]) -> Any:
        """Return rows of a state."""
        return self.adapter.select(self.module, state, self.lengths(rows))

    def gradients(self, y: Tensor, *wanted: Tensor) -> dict[str, Tensor]:
        """Return gradients with respect to the parameters, and to those of `wanted` that need one: see `gradients`."""
        return gradients(self.module, y, *(t for t in wanted if t.requires_grad))

    def differentiable(self, x: Tensor) -> Tensor:
        """Return `x` as a leaf that requires a gradient, if it is of floating point."""
        return x.detach().requires_grad_(x.is_floating_point())


def _usable(device: torch.device | str) -> torch.device:
    try:
        torch.zeros(1, device=device).item()
        return torch.device(device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device={str(device)!r} can't be used: {error}") from error


def stream(
    call: Callable[[Tensor, Any], tuple[Tensor, Any]], x: Tensor, way: Sequence[int], state: Any = None
) -> tuple[Tensor, Any]:
    """Feed `x` to `call` in segments of the lengths `way`, and pass the state along."""
    outputs = []
    for segment in x.split(list(way), 1):
        y, state = call(segment, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def gradients(module: Any, y: Tensor, *wanted: Tensor) -> dict[str, Tensor]:
    """Return the gradients, with respect to the parameters and to `wanted`, of a sum of `y` with fixed uneven weights.

    The weight of a position does not depend on how many follow.
    """
    named: dict[str, Tensor] = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
    named |= {f"input {i}": t for i, t in enumerate(wanted)}
    n, e = y.shape[1:]
    weights = torch.arange(n * e, dtype=y.dtype, device=y.device).view(n, e).sin()
    computed = torch.autograd.grad((y * weights).sum(), list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(t) if gradient is None else gradient
        for (name, t), gradient in zip(named.items(), computed, strict=True)
    }


def splits(n: int, unit: int) -> list[list[int]]:
    """Return ways to cut a stream of n positions, n > 2 unit: steps, across borders, several units, and at random."""
    generator = torch.Generator().manual_seed(n)
    ways = [[1] * n, [unit + 1, 1, 1, n - unit - 3], [1, n - 2, 1], [2 * unit, n - 2 * unit]]
    for longest in (3, unit + 2, 3 * unit):
        way: list[int] = []
        while sum(way) < n:
            way.append(min(int(torch.randint(1, longest + 1, (), generator=generator)), n - sum(way)))
        ways.append(way)
    return ways
