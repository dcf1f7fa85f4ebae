"""Differences between results and expected results: finite numbers, or errors.

Python's `max` of 0 and NaN is 0, that of NaN and 0 is NaN, and a loop over nothing finds no difference. A check that
uses it accepts results that are NaN, or missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def largest(values: Iterable[float], what: str = "the difference") -> float:
    """Return the largest of one or more finite numbers.

    Args:
        values: The numbers.
        what: Their name in the error message.

    Raises:
        ValueError: If a number is NaN or infinite, or there is none.

    Examples:
        >>> largest([0.5, 2, 1])
        2
    """
    numbers = list(values)
    if not numbers:
        raise ValueError(f"{what}: nothing was compared")
    for number in numbers:
        if not math.isfinite(number):
            raise ValueError(f"{what} is {number}, not a finite number")
    return max(numbers)


def largest_difference(results: Iterable[Tensor], expected: Iterable[Tensor], what: str = "the difference") -> float:
    """Return max |a − b| over all elements of all pairs of tensors; equal infinities differ by 0.

    Raises:
        ValueError: If a difference is NaN or infinite, shapes differ, or there is nothing to compare.
    """
    pairs = [_pair(a, b) for a, b in zip(results, expected, strict=True)]
    return largest((torch.where(a == b, 0, a - b).abs().max().item() for a, b in pairs), what)


def largest_relative_difference(
    results: Iterable[Tensor], expected: Iterable[Tensor], what: str = "the relative difference"
) -> float:
    """Return the largest ‖a − b‖ / ‖b‖ of all pairs of tensors; equal tensors differ by 0, also where b is 0.

    Raises:
        ValueError: As `largest_difference`, and if b is 0 and a is not.
    """
    pairs = [_pair(a, b) for a, b in zip(results, expected, strict=True)]
    return largest((0.0 if torch.equal(a, b) else ((a - b).norm() / b.norm()).item() for a, b in pairs), what)


def _pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two tensors in one type, float32 or float64.

    Raises:
        ValueError: If their shapes differ, or they have no elements.
    """
    if a.shape != b.shape or not a.numel():
        raise ValueError(f"results have the shape {tuple(a.shape)}, expected ones {tuple(b.shape)}: nothing to compare")
    dtype = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    return a.detach().to(dtype), b.detach().to(dtype)
