"""The adapter of `torch.nn.LSTM`, `GRU` and `RNN`."""

from typing import Any

import torch
from torch import Tensor, nn

from lit_effattn.laws.adapter import Adapter, Build


class RecurrentAdapter(Adapter):
    """One of PyTorch's recurrent modules, made with `batch_first=True`. Padding is packed.

    Args:
        module: See `Adapter`.
        options: See `Adapter`.

    Raises:
        ValueError: If the module was made without `batch_first=True`.
    """

    padding = "right"
    batch_dim = 1
    spacings = 8  # h is rounded at every step, and goes on

    def __init__(self, module: nn.RNNBase | Build, **options: Any) -> None:
        super().__init__(module, **options)
        rnn = self.make()
        if not rnn.batch_first:
            raise ValueError(f"{self.name}: batch_first=False; make the module with batch_first=True")
        self.causal = self.stateful = not rnn.bidirectional

    @staticmethod
    def call(module: Any, x: Tensor, state: Any = None, lengths: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return `module(x, state)`."""
        if lengths is None:
            return module(x, state)
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, state = module(packed, state)
        return torch.nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=x.size(1))[0], state

    @staticmethod
    def reset(module: Any, state: Any, rows: Tensor) -> Any:
        """Set the rows of h, and of c, to zero."""
        return torch.utils._pytree.tree_map(lambda t: t.masked_fill(rows[None, :, None], 0), state)

    @staticmethod
    def bounded(module: Any) -> bool:
        """Return True."""
        return True
