"""The adapter of modules with this package's contract: `y, state = module(x, state, lengths)`."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lit_effattn import sequence
from lit_effattn.laws.adapter import Adapter, Build
from lit_effattn.nn import packing


class ContractAdapter(Adapter):
    """A `SequenceModule`, such as every attention of this package, or a class that has the same methods.

    Args:
        module: See `Adapter`.
        options: See `Adapter`. Default of `causal`: the module's attribute, True without one. Default of `jumps` and
            `magnifies`: whether a part of the module has an attribute of that name that is true.
    """

    padding = "right"
    least = 0
    zeroes_padding = True
    fullgraph = True
    bitwise = frozenset({"no-future"})

    def __init__(self, module: nn.Module | Build, **options: Any) -> None:
        super().__init__(module, **options)
        made = self.make()
        parts = [*made.modules()] if isinstance(made, nn.Module) else [made]
        if "causal" not in options:
            self.causal = self.causal and bool(getattr(made, "causal", True))
        for name in {"jumps", "magnifies"} - options.keys():
            setattr(self, name, getattr(self, name) or any(getattr(part, name, False) for part in parts))

    @staticmethod
    def call(module: Any, x: Tensor, state: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return `module(x, state, lengths)`."""
        y, state = module(x, state, lengths)
        return y, state

    @staticmethod
    def initial_state(module: Any, batch: int, max_len: int | None, x: Tensor) -> Any:
        """Return `module.initial_state`."""
        return module.initial_state(batch, max_len=max_len)

    @staticmethod
    def reset(module: Any, state: Any, rows: Tensor) -> Any:
        """Return `module.reset`."""
        return module.reset(state, rows)

    @staticmethod
    def select(module: Any, state: Any, rows: Tensor) -> Any:
        """Return `sequence.select`."""
        return sequence.select(state, rows)

    @staticmethod
    def donated() -> AbstractContextManager[Any]:
        """Return `sequence.donated`."""
        return sequence.donated()

    @staticmethod
    def bounded(module: Any) -> bool:
        """Return whether no option is needed to bound the state."""
        return module.bounded_by is None

    @staticmethod
    def pack(state: Any) -> Any:
        """Return `sequence.pack`."""
        return sequence.pack(state)

    @staticmethod
    def unpack(packed: Any, like: Any) -> Any:
        """Return `sequence.unpack`."""
        return sequence.unpack(packed, like)

    @staticmethod
    def combine(module: Any, before: Any, after: Any) -> Any:
        """Return `module.combine_states`."""
        return module.combine_states(before, after)

    @staticmethod
    def packed(module: Any, x: Tensor, lengths: list[int]) -> Tensor:
        """Return the outputs of `nn.packing.packed`."""
        ends = torch.tensor([0, *lengths], device=x.device).cumsum(0)
        return packing.packed(module, x, packing.starts_of(ends))[0]

    def capabilities(self, module: Any) -> set[str]:
        """Return what is offered: see `Adapter.capabilities`. Rotated keys of two parts can't be combined."""
        combines = getattr(module, "takes_parts", False) and getattr(module, "rotary", None) is None
        needed = {"combine": "combine_states", "reset": "reset", "bounded": "bounded_by"}
        absent = {name for name, attribute in needed.items() if not hasattr(module, attribute)}
        absent |= set() if self.padding else {"packed"}  # pieces are the rows of a padded call
        return super().capabilities(module) - absent - (set() if combines else {"combine"})
