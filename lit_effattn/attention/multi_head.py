"""The base class of self-attention and cross-attention: their heads, which processes can divide among themselves."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lit_effattn.checks import at_least
from lit_effattn.sequence import SequenceModule


class MultiHead(SequenceModule):
    """A sequence module with several heads."""

    n_heads: int
    """Heads H that this process computes: all, unless `keep_heads` was called."""

    n_kv_heads: int
    """Heads of keys and values, in kinds that have fewer of them."""

    head_dim: int
    """Dimensions D of a head's values."""

    qk_dim: int
    """Dimensions of a head's queries and keys."""

    heads: slice | None = None
    """The heads that this process computes, as indices of all heads. None: all."""

    divides_heads = False
    """Whether each process may compute some of the heads: see `lit_effattn.distributed.tensor_parallel`.

    In the kind's state, tensors of two or more dimensions are then (B, H, …).
    """

    without_autocast = False
    """Whether heads are combined without autocast. The kind converts them to float32 or more."""

    reads_source = False
    """Whether the module reads a source: see `CrossAttention`."""

    split_option = ""
    """The option that, set to true, makes outputs independent of how a stream is split. "": they always are.

    With this option the kind supports `sequence_parallel`.
    """

    def _precision(self, heads: Tensor) -> AbstractContextManager[Any]:
        """Disable autocast within the context if `without_autocast`."""
        return torch.autocast(heads.device.type, enabled=False) if self.without_autocast else nullcontext()

    def _divide(self, d_model: int, n_heads: int, head_dim: int | None, d_qk: int | None) -> int:
        """Set the sizes of the heads, and return the width of all heads' queries together.

        Raises:
            ValueError: If a width is not positive, or `n_heads` does not divide it.
        """
        if n_heads < 1 or d_model < 1 or (head_dim is None and d_model % n_heads):
            raise ValueError(
                f"n_heads={n_heads} does not divide d_model={d_model}: each head has d_model / n_heads dimensions; "
                "change one of them"
            )
        at_least(1, head_dim=head_dim)
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads if head_dim is None else head_dim
        width = n_heads * self.head_dim if d_qk is None else d_qk
        if width < 1 or width % n_heads:
            raise ValueError(
                f"d_qk={d_qk} is not a multiple of n_heads={n_heads}: heads have d_qk / n_heads dimensions; change one"
            )
        self.qk_dim = width // n_heads
        return width

    def keep_heads(self, rank: int, size: int) -> None:
        """Compute part `rank` of `size` equal parts of the heads, which are also those of the state.

        The caller divides the projections: this process's give and take the dimensions of its heads.

        Raises:
            ValueError: If the kind does not support it, or `size` does not divide the heads.
        """
        if not self.divides_heads:
            raise ValueError(
                f"tensor_parallel_size={size}: {type(self).__name__} does not divide its heads among processes; leave "
                f"it out, or choose {kinds_with('divides_heads')}"
            )
        for option in ("n_heads", "n_kv_heads"):
            if getattr(self, option, size) % size:
                raise ValueError(
                    f"tensor_parallel_size={size} does not divide {option}={getattr(self, option)} of "
                    f"{type(self).__name__}: each process computes as many heads; change one of them"
                )
        self.n_heads //= size
        if hasattr(self, "n_kv_heads"):
            self.n_kv_heads //= size
        self.heads = slice(rank * self.n_heads, (rank + 1) * self.n_heads)

    def _heads(self, x: Tensor, n_heads: int | None = None) -> Tensor:
        """Split the width into heads: (B, N, H · D) -> (B, H, N, D)."""
        return x.unflatten(2, (n_heads or self.n_heads, -1)).transpose(1, 2)


def kinds_with(attribute: str) -> str:
    """Return the names of the library's kinds whose class has a true `attribute`, for messages.

    An attribute that is a text is an option, which is named, too.
    """
    kinds: list[Any] = [MultiHead]
    for kind in kinds:
        kinds.extend(below for below in kind.__subclasses__() if below.__module__.startswith("lit_effattn."))
    values = {kind.__name__: getattr(kind, attribute) for kind in kinds if not inspect.isabstract(kind)}
    return ", ".join(
        f"{name} with {value}" if isinstance(value, str) else name for name, value in sorted(values.items()) if value
    )
