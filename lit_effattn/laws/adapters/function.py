"""The adapter of a function of queries, keys and values."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lit_effattn.laws.adapter import Adapter


class FunctionAdapter(Adapter):
    """A function `y, state = function(q, k, v, state)`, with q, k, v and y of shape (B, H, N, D).

    The inputs of the laws are q, k and v side by side, (B, N, 3 H D), for two heads.

    Args:
        function: The function. One that takes or returns other things is wrapped.
        width: 3 · 2 · D.
        options: See `Adapter`.
    """

    def __init__(self, function: Callable[..., Any], *, width: int = 24, **options: Any) -> None:
        options.setdefault("name", getattr(function, "__name__", "function"))
        super().__init__(lambda: function, width=width, **options)

    @staticmethod
    def call(module: Any, x: Tensor, state: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return the outputs of the heads side by side, (B, N, H D), and the state."""
        q, k, v = x.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y, state = module(q, k, v, state)
        return y.transpose(1, 2).flatten(2), state
