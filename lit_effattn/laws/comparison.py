"""Comparisons of what a law says must be equal, and the differences that they show."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_effattn.laws import tree


class Tolerance(NamedTuple):
    """|a − b| ≤ rtol |b| + atol min(s, cap), with s the largest |b| of all tensors that are compared together.

    s is at least 10⁻³: inputs are near 1, and gradients that cancel to 0 are rounding.
    """

    rtol: float
    atol: float
    reason: str
    cap: float = 1


TOLERANCES = {
    torch.float64: Tolerance(1e-9, 1e-11, "two orders of the same float64 sums: some thousand roundings of 1e-16"),
    torch.float32: Tolerance(
        1e-3, 2e-4, "two orders of the same float32 sums: some thousand roundings of 6e-8", math.inf
    ),
    torch.bfloat16: Tolerance(6e-2, 6e-2, "several roundings of 4e-3"),
    torch.float16: Tolerance(8e-3, 8e-3, "several roundings of 5e-4"),
}
_LEAST_SCALE = 1e-3
EXACT = Tolerance(0, 0, "the same operations on the same numbers: equal to the bit")


class Pair(NamedTuple):
    """Two results that must be equal: tensors, or dictionaries of tensors."""

    what: str
    got: Any
    expected: Any
    exact: bool = False


class Claim(NamedTuple):
    """A condition that must hold, the message if it does not, and a relative difference if it is about numbers."""

    holds: bool
    message: str
    relative: float | None = None


Check = Pair | Claim


@dataclass(frozen=True)
class Difference:
    """A violation of a law.

    Attributes:
        what: The results that were compared, or the condition that does not hold.
        largest: The largest absolute difference.
        relative: The same, divided by the largest expected magnitude.
        first: The indices of the first difference, such as row, position and feature; empty for a condition.
        of: Name of the tensor in which it is, for dictionaries.
        error: The exception that the module raised, in place of numbers.
    """

    what: str
    largest: float | None = None
    relative: float | None = None
    first: tuple[int, ...] = ()
    of: str = ""
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.what}: {self.error}"
        if self.largest is None or self.relative is None:
            return self.what
        place = ", ".join(f"{axis} {i}" for axis, i in zip(("row", "position", "feature"), self.first, strict=False))
        if self.of and not self.of.startswith("input"):
            place = f"index {list(self.first)}" if self.first else ""
        place = " of ".join(filter(None, (place, self.of)))
        place = f"; first at {place}" if place else ""
        if not math.isfinite(self.largest):
            return f"{self.what}: differ by NaN or infinity{place}"
        share = f" ({percent(self.relative)} of the largest value)" if math.isfinite(self.relative) else ""
        return f"{self.what}: differ by {self.largest:.3g}{share}{place}"


def difference(check: Check, tolerance: Tolerance) -> Difference | None:
    """Return how the check fails, or None if it holds. NaN is equal to nothing, and no number is near infinity."""
    if isinstance(check, Claim):
        return None if check.holds else Difference(check.message, relative=check.relative)
    got, expected = _named(check.got), _named(check.expected)
    if got.keys() != expected.keys():
        return Difference(f"{check.what}: there are {sorted(got)} in place of {sorted(expected)}")
    for name, b in expected.items():
        a = got[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            actual, wanted = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (a, b))
            return Difference(f"{check.what}: {actual} in place of {wanted}", of=name)
    rtol, atol, _, cap = EXACT if check.exact else tolerance
    if all(torch.equal(got[name], b) for name, b in expected.items()):
        return None
    sizes = [b.abs().max().item() for b in expected.values() if b.numel()]
    scale = max((size for size in sizes if size < torch.inf), default=0.0)
    allowed = atol * min(cap, max(scale, _LEAST_SCALE))
    worst: Difference | None = None
    for name, b in expected.items():
        gap = (got[name] - b).abs()
        wrong = ~(gap.isfinite() & (gap <= rtol * b.abs() + allowed))
        if not wrong.any():
            continue
        largest = gap.max().item() if not gap.isnan().any() else float("nan")
        if worst is None or not (worst.largest is not None and largest <= worst.largest):
            first = tuple(wrong.nonzero()[0].tolist())
            worst = Difference(check.what, largest, largest / scale if scale else float("inf"), first, name)
    return worst


def percent(share: float, digits: int = 3) -> str:
    """Return a share in percent with these significant digits, large ones without an exponent.

    Examples:
        >>> percent(1.125, 2), percent(0.045), percent(0.00049)
        ('110 %', '4.5 %', '0.049 %')
    """
    return f"{float(f'{100 * share:.{digits}g}'):.12g} %"


def _named(result: Any) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {"": result}
    return dict(result) if isinstance(result, Mapping) else {str(i): t for i, t in enumerate(tree.tensors(result))}
