from typing import Literal

import pytest

from lit_effattn.checks import at_least, one_of, positive, probabilities


def test_values_out_of_range_are_named():
    at_least(1, a=1, b=2.5, c=None)
    for value in (0, 0.999, -1, float("nan")):
        with pytest.raises(ValueError, match=f"b={value} must be at least 1"):
            at_least(1, a=3, b=value)
    probabilities(a=0, b=0.99)
    for value in (1, -0.1, float("nan"), None):
        with pytest.raises(ValueError, match=f"b={value} is not a probability from 0 to below 1"):
            probabilities(a=0.5, b=value)
    positive(a=1e-9, b=None)
    for value in (0.0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"b={value} must be above 0, and finite"):
            positive(a=1, b=value)
    for known in (Literal["x", "y"], ("x", "y")):
        one_of(known, a="x", b="y")
        with pytest.raises(ValueError, match="b='z' is not one of x, y"):
            one_of(known, a="x", b="z")
