import pytest

from lit_effattn.checks import at_least, probabilities


def test_values_in_range_pass():
    at_least(1, a=1, b=2.5, c=None)
    probabilities(a=0, b=0.99)


@pytest.mark.parametrize("value", [0, 0.999, -1, float("nan")])
def test_a_value_below_the_minimum_is_named(value):
    with pytest.raises(ValueError, match=f"b={value} must be at least 1"):
        at_least(1, a=3, b=value)


@pytest.mark.parametrize("value", [1, -0.1, float("nan"), None])
def test_a_value_that_is_not_a_probability_is_named(value):
    with pytest.raises(ValueError, match=f"b={value} is not a probability from 0 to below 1"):
        probabilities(a=0.5, b=value)
