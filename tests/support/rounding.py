"""Tolerances that follow from the type and the number of operations, on any processor."""

import math

import torch


def rounding(dtype: torch.dtype, operations: int, magnified: float = 1.0) -> float:
    """Return how far apart two ways to compute the same number may be, relative to it.

    Errors of so many roundings add up as a random walk; 8 standard deviations are not reached. `magnified`: how many
    times larger than a rounding error the change of the result is, such as where differences nearly cancel.
    """
    return 8 * torch.finfo(dtype).eps * math.sqrt(operations) * magnified
