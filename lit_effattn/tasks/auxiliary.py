"""Auxiliary losses of language models: predictions of intermediate layers and of later tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn.checks import at_least
from lit_effattn.datamodules.common.tokens import IGNORE
from lit_effattn.nn.heads import Head
from lit_effattn.sequence import parts


def mean_of_scored(losses: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of the losses (B, N) whose targets (B, N) are scored, that is, not IGNORE, and their number.

    Inside `sequence_parallel`, return this part's sum, divided by the mean number of targets of a part, and the number
    of targets of the whole sequences. The mean of the former over the processes, which DDP's gradients belong to, is
    the mean over the whole sequences.
    """
    scored = targets != IGNORE
    total, group = losses.masked_fill(~scored, 0).sum(), parts()
    if group is None:
        n_scored = scored.sum()
        return total / n_scored.clamp(min=1), n_scored
    _, count = group.count(scored.sum()[None])  # (1,), of all parts
    return total * group.size / count[0].clamp(min=1), count[0]


class FurtherPredictions(nn.Module):
    """Sums the losses of all predictions in training except the last layer's of the next token.

        Σ_l a_l Σ_k b_k L_{l,k},  (l, k) ≠ (n, 1)            Al-Rfou et al. 2018, section "Auxiliary Losses"

        L_{l,k} = mean_t −log p_{l,k}(x_{t+k} | output of layer l at t)
        a_l = 1 until the fraction l / (2 n) of training is done, then 0;  a_n = 1
        b_1 = 1,  b_k = `target_weight` for k > 1

    n layers predict `n_targets` tokens each, x_{t+1}, x_{t+2}, …, and each pair (l, k) has its own head. The last k − 1
    positions of a segment have no target k. Heads of layers that have stopped get gradients of 0, because DDP needs a
    gradient of every parameter.

    Args:
        make_head: Makes a head.
        n_layers: n, the number of layers that predict.
        n_targets: Number of tokens that each layer predicts.
        target_weight: Weight of the targets after the first.

    Raises:
        ValueError: If `n_targets` or `target_weight` is out of range.
    """

    layer_weights: Tensor

    def __init__(self, make_head: Callable[[], Head], *, n_layers: int, n_targets: int, target_weight: float) -> None:
        super().__init__()
        at_least(1, n_targets=n_targets)
        if not 0 <= target_weight < math.inf:
            raise ValueError(f"target_weight={target_weight} must be at least 0 and finite")
        self.n_targets = n_targets
        self.target_weight = target_weight
        sizes = [n_targets] * (n_layers - 1) + [n_targets - 1]
        self.heads = nn.ModuleList(nn.ModuleList(make_head() for _ in range(size)) for size in sizes)
        self.register_buffer("layer_weights", torch.ones(n_layers), persistent=False)

    def follow(self, step: int, n_steps: float) -> None:
        """Set the weights a_l for step `step` of a training of `n_steps` steps."""
        n = len(self.heads)
        stopped = min(int(2 * n * step / n_steps), n - 1)  # layers l with l / (2 n) <= step / n_steps
        self.layer_weights.fill_(1)
        self.layer_weights[:stopped] = 0

    def forward(self, outputs: Sequence[Tensor], targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Return the weighted sum of the losses, in nats.

        Args:
            outputs: n tensors (B, N, d_model), the output of each layer that predicts.
            targets: (B, N), the next tokens, IGNORE where they are not scored.
            label_smoothing: See `Head.loss`.
        """
        total = targets.new_zeros((), dtype=self.layer_weights.dtype)
        for weight, hidden, heads in zip(self.layer_weights, outputs, self.heads, strict=True):
            first = self.n_targets - len(heads)  # type: ignore[arg-type]
            for k, head in enumerate(heads, start=first):  # type: ignore[arg-type,var-annotated]
                later = F.pad(targets, (0, k), value=IGNORE)[:, k:]  # (B, N)
                losses = head.loss(hidden, later.clamp(min=0), label_smoothing)
                total = total + weight * (self.target_weight if k else 1) * mean_of_scored(losses, later)[0]
        return total
