"""The mean of several checkpoints of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.checkpoints.runs import short
from lit_effattn.checkpoints.shape import differences


def average_parameters(
    checkpoint: dict[str, Any], paths: Sequence[Path], model: nn.Module, map_location: Any = "cpu"
) -> None:
    """Replace the parameters in a checkpoint with their mean over several checkpoints, summed in float64.

        θ = (θ₁ + … + θ_k) / k                                                    Vaswani et al. 2017, section 6.1

    The rest of `checkpoint`, the newest, stays. Buffers are not averaged: a mean of random features, or of counts, is
    not one of them.

    Args:
        checkpoint: The content of the last of `paths`.
        paths: The checkpoints.
        model: The model, whose parameters are averaged.
        map_location: Where tensors go, as in `torch.load`.

    Raises:
        ValueError: If two of the checkpoints hold different models. The message names both and the difference.
    """
    weights = checkpoint["state_dict"]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if name in weights]
    # Copies: parameters that share memory would otherwise be added twice.
    sums = {n: weights[n].to(torch.promote_types(weights[n].dtype, torch.float64), copy=True) for n in names}
    for path in paths[:-1]:
        earlier = read_checkpoint(path, map_location)["state_dict"]
        for name, of_a, of_b in differences(earlier, weights):
            raise ValueError(
                f"{short(path)} and {short(paths[-1])} hold different models, which can't be averaged: {name} is "
                f"{of_a} in the first and {of_b} in the second; average fewer checkpoints"
            )
        for name, total in sums.items():
            total += earlier[name]
    weights.update({name: (total / len(paths)).to(weights[name].dtype) for name, total in sums.items()})
