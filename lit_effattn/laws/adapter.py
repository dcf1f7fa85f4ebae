"""The base class of adapters: how the laws build, call and inspect a module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lit_effattn.laws import tree

Build = Callable[[], Any]


class Adapter:
    """Calls a module for the laws. A subclass overrides `call`; each further method enables the laws that need it.

    The class attributes say what the module promises. Each can be set for one adapter by a keyword of the same name.

    Args:
        module: The module, or a function without arguments that builds it, always the same after
            `torch.manual_seed(1)`. A module is copied, never changed.
        name: Its name in reports. Default: that of its class.
        options: Values of the class attributes.

    Raises:
        TypeError: If an option is not one of the class attributes.
    """

    causal: bool = True
    """Whether the output at a position depends on that and earlier positions only."""

    stateful: bool = True
    """Whether a call returns a state from which the next one goes on."""

    unit: int = 4
    """The chunk, window or stride of the module: lengths around its multiples are tested."""

    width: int | None = None
    """Features of an input. Default: the module's `d_input`, `d_model`, `input_size`, `embed_dim` or `hidden_size`."""

    vocabulary: int | None = None
    """Size of the vocabulary, at least 3, if inputs are token numbers (B, N) in place of features (B, N, E)."""

    padding: Literal["right", "left"] | None = None
    """The side of the padding, if `call` takes `lengths`."""

    least: int = 1
    """The smallest number of valid positions of a padded row: 0 or 1."""

    zeroes_padding: bool = False
    """Whether outputs at padding, and gradients with respect to it, are exactly 0."""

    donates: bool = False
    """Whether a call may overwrite the state that it is given, as a cache that is written in place."""

    remembers: bool = True
    """Whether outputs depend on earlier positions at all."""

    jumps: bool = False
    """Whether the module decides by comparing numbers (hashes, routing), so that rounding makes single outputs jump."""

    magnifies: bool = False
    """Whether outputs are divided by a norm or a sum that may be near 0, which magnifies rounding of single outputs."""

    spacings: float = 4
    """Bound on the error in half precision, in spacings of its numbers near 1 (2⁻⁷ in bfloat16, 2⁻¹⁰ in float16)."""

    longest: int = 4096
    """Length of the sequences in half precision."""

    steps: int = 120
    """Number of single steps in half precision, twice."""

    dtype: torch.dtype = torch.float64
    """The type to check in. One that computes in float32 whatever its parameters are says `torch.float32`."""

    compiles: bool = True
    """Whether to check `torch.compile`."""

    fullgraph: bool = False
    """Whether `torch.compile` must trace the module as one graph."""

    bitwise: frozenset[str] = frozenset()
    """Names of the laws that hold to the bit, not just but for rounding."""

    batch_dim: int = 0
    """The dimension of the state's tensors that is the batch."""

    _OPTIONAL: ClassVar[tuple[str, ...]] = (
        *("initial_state", "reset", "donated", "bounded", "pack", "combine", "packed", "generate"),
    )

    def __init__(
        self,
        module: nn.Module | Build,
        *,
        name: str | None = None,
        **options: Any,
    ) -> None:
        self._module = module
        self.name = name or _name(module)
        for option, value in options.items():
            if option not in _options(type(self)):
                known = ", ".join(sorted(_options(type(self))))
                raise TypeError(f"{type(self).__name__} has no option {option!r}; there are {known}")
            setattr(self, option, value)

    # --------------------------------------------------------------------------------------------------- the module

    def make(self, width: int | None = None) -> Any:
        """Build the module, always the same.

        Args:
            width: The width to build it in, where it can be chosen: small for finite differences, large for half
                precision. The default ignores it.
        """
        if isinstance(self._module, nn.Module):
            return copy.deepcopy(self._module)
        torch.manual_seed(1)
        return self._module()

    @staticmethod
    def call(module: Any, x: Tensor, state: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return the outputs (B, N, …) and the state after `x`, None without one.

        Args:
            module: The module that `make` has built.
            x: (B, N, E) features, or (B, N) token numbers.
            state: State that an earlier call returned; None: nothing before `x`.
            lengths: (B,) valid positions of each row, if `padding` is set; None: all.
        """
        y, state = module(x, state) if lengths is None else module(x, state, lengths)
        return y, state

    def inputs(self, module: Any, batch: int, n: int, seed: int) -> Tensor:
        """Return random inputs, on the CPU: features in float64 of variance 4, or token numbers."""
        generator = torch.Generator().manual_seed(seed)
        if self.vocabulary is not None:
            return torch.randint(1, self.vocabulary, (batch, n), generator=generator)  # 0 is often padding
        return 2 * torch.randn(batch, n, self.input_width(module), generator=generator, dtype=torch.float64)

    def input_width(self, module: Any) -> int:
        """Return the number of features of an input.

        Raises:
            ValueError: If it can't be inferred from the module.
        """
        if self.width is not None:
            return self.width
        for name in ("d_input", "d_model", "input_size", "embed_dim", "hidden_size"):
            if isinstance(getattr(module, name, None), int):
                return int(getattr(module, name))
        raise ValueError(f"{self.name}: width is not known; give the adapter width=…, the features of an input")

    def changed(self, x: Tensor, at: int, factor: float) -> Tensor:
        """Return `x` with position `at` changed: tokens to another one, features by `factor`, or for 1 by a little.

        The little change differs from feature to feature: layer normalisation removes what all have in common.
        """
        changed = x.clone()
        if self.vocabulary is not None:
            changed[:, at] = x[:, at] % (self.vocabulary - 1) + 1
        elif factor == 1:
            changed[:, at] += 1e-3 * torch.linspace(0.5, 1.5, x.size(-1), dtype=x.dtype, device=x.device)
        else:
            changed[:, at] *= factor
        return changed

    # -------------------------------------------------------------------------------------- optional: laws about states

    @staticmethod
    def initial_state(module: Any, batch: int, max_len: int | None, x: Tensor) -> Any:
        """Return the empty state, equivalent to `state=None`; with `max_len`, of final size; for inputs like `x`."""
        raise NotImplementedError

    @staticmethod
    def reset(module: Any, state: Any, rows: Tensor) -> Any:
        """Return `state` with the rows where `rows` (B,) is True emptied."""
        raise NotImplementedError

    def select(self, module: Any, state: Any, rows: Tensor) -> Any:
        """Return the rows of `state` with the indices `rows`. The default selects along `batch_dim` of each tensor."""
        return tree.select(state, rows, self.batch_dim)

    @staticmethod
    def donated() -> AbstractContextManager[Any]:
        """Return a context in which a call may overwrite the state that it is given."""
        raise NotImplementedError

    @staticmethod
    def bounded(module: Any) -> bool:
        """Return whether the size of the state is bounded."""
        raise NotImplementedError

    @staticmethod
    def pack(state: Any) -> Any:
        """Return `state` as plain containers of tensors, for `torch.save`."""
        raise NotImplementedError

    @staticmethod
    def unpack(packed: Any, like: Any) -> Any:
        """Undo `pack`; `like` is another state of the same module."""
        raise NotImplementedError

    @staticmethod
    def combine(module: Any, before: Any, after: Any) -> Any:
        """Return the state after both parts; `after` was made from an empty state, of the positions after `before`."""
        raise NotImplementedError

    @staticmethod
    def packed(module: Any, x: Tensor, lengths: list[int]) -> Tensor:
        """Return the outputs (1, N, …) of the sequences in `x` (1, N, …), one after the other, of these lengths."""
        raise NotImplementedError

    @staticmethod
    def generate(module: Any, x: Tensor, n: int, lengths: Tensor | None) -> Tensor:
        """Return (B, n) tokens that follow `x` (B, N), the most probable one each time, by the module's own loop."""
        raise NotImplementedError

    def smaller(self) -> Iterator[Adapter]:
        """Yield adapters of the module with fewer layers, the smallest first. The default yields none."""
        return iter(())

    def capabilities(self, module: Any) -> set[str]:
        """Return the names of what laws may need: of methods that are overridden, and of attributes that are set."""
        result = {name for name in self._OPTIONAL if getattr(type(self), name) is not getattr(Adapter, name)}
        if not (self.causal and self.stateful):
            result -= {"initial_state", "reset", "donated", "bounded", "pack", "combine"}
        result |= {"state"} if self.causal and self.stateful else set()
        result |= {"compiles"} if self.compiles else set()
        result |= {"causal"} if self.causal else set()
        result |= {"lengths"} if self.padding else set()
        result |= {"empty rows"} if self.padding and self.least == 0 else set()
        result |= {"kept states"} if not self.donates and "state" in result else set()
        result |= {"features"} if self.vocabulary is None else set()
        if isinstance(module, nn.Module):
            result |= {"module", "parameters"} if any(True for _ in module.parameters()) else {"module"}
        return result


def check_options(adapter: Adapter) -> None:
    """Check the options of an adapter that are numbers or one of a few values.

    Raises:
        ValueError: If one is invalid.
    """
    for option, least in (("unit", 1), ("longest", 1), ("steps", 1), ("width", 1), ("vocabulary", 3)):
        value = getattr(adapter, option)
        if value is not None and not value >= least:
            raise ValueError(f"{adapter.name}: {option}={value} must be at least {least}")
    if not adapter.spacings > 0:
        raise ValueError(f"{adapter.name}: spacings={adapter.spacings} must be positive")
    if adapter.padding not in ("right", "left", None):
        raise ValueError(f"{adapter.name}: padding={adapter.padding!r} must be 'right', 'left' or None")
    if adapter.least not in (0, 1):
        raise ValueError(f"{adapter.name}: least={adapter.least} must be 0 or 1")


def _options(kind: type[Adapter]) -> set[str]:
    names = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}
    return {name for name in names if not name.startswith("_")}


def _name(module: Any) -> str:
    if isinstance(module, nn.Module):
        return type(module).__name__
    return str(getattr(module, "__name__", None) or getattr(getattr(module, "func", None), "__name__", "module"))
