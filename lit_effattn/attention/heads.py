"""The heads of an attention, which processes can divide among themselves."""

from __future__ import annotations

from torch import Tensor


class MultiHead:
    """What self-attention and cross-attention know of their heads."""

    n_heads: int
    """Heads H that this process computes: all, unless `keep_heads` was called."""

    heads: slice | None = None
    """Which of all heads these are. None: all."""

    divides_heads = False
    """Whether each process may compute some of the heads: see `lit_effattn.distributed.tensor_parallel`.

    In the kind's state, tensors of two or more dimensions are then (B, H, …).
    """

    def keep_heads(self, rank: int, size: int) -> None:
        """Compute part `rank` of `size` equal parts of the heads, which are also those of the state.

        The caller divides the projections: this process's give and take the dimensions of its heads.

        Raises:
            ValueError: the kind does not support it, or `size` does not divide the heads.
        """
        for option in ("n_heads", "n_kv_heads"):
            if getattr(self, option, size) % size:
                raise ValueError(
                    f"tensor_parallel_size={size} does not divide {option}={getattr(self, option)} of "
                    f"{type(self).__name__}: each process computes as many heads; change one of them"
                )
        if not self.divides_heads:
            raise ValueError(
                f"tensor_parallel_size={size}: {type(self).__name__} does not divide its heads among processes; leave "
                "it out, or choose SoftmaxAttention, LinearAttention or PerformerAttention"
            )
        self.n_heads //= size
        if hasattr(self, "n_kv_heads"):
            self.n_kv_heads //= size
        self.heads = slice(rank * self.n_heads, (rank + 1) * self.n_heads)

    def _heads(self, x: Tensor, n_heads: int | None = None) -> Tensor:
        """Split the width into heads: (B, N, H · D) -> (B, H, N, D)."""
        return x.unflatten(2, (n_heads or self.n_heads, -1)).transpose(1, 2)
