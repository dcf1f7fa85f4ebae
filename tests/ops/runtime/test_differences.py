"""No difference is found small because of NaN, an infinity, a missing pair or a missing element."""

import math

import pytest
import torch

from lit_effattn.ops.runtime.differences import largest, largest_difference, largest_relative_difference

NAN = torch.tensor([1.0, torch.nan])
INF = torch.tensor([1.0, torch.inf])
ONE = torch.ones(2)


def test_the_largest_of_numbers_that_are_not_finite_is_refused():
    for values in [[0.0, math.nan], [math.nan, 0.0], [math.inf], [0.0, -math.inf]]:
        with pytest.raises(ValueError, match=r"error of ours is (nan|-?inf), not a finite number"):
            largest(iter(values), "error of ours")


def test_the_largest_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing was compared"):
        largest([])
    assert largest([-2, -1.5]) == -1.5


def test_what_can_not_be_compared_is_refused():
    for function in [largest_difference, largest_relative_difference]:
        for results, expected in [
            ([ONE, NAN], [ONE, ONE]),
            ([NAN, ONE], [ONE, ONE]),
            ([ONE, ONE], [ONE, NAN]),
            ([NAN], [NAN]),
            ([INF], [ONE]),
            ([ONE], [INF]),
            ([], []),
            ([ONE, ONE[:0]], [ONE, ONE[:0]]),
            ([ONE], [torch.ones(2, 2)]),
        ]:
            with pytest.raises(ValueError, match=r"not a finite number|nothing (to|was) compare"):
                function(results, expected)


def test_as_many_results_as_expected():
    for function in [largest_difference, largest_relative_difference]:
        with pytest.raises(ValueError, match="zip"):
            function([ONE], [ONE, ONE])


def test_differences():
    half = ONE.half()
    assert largest_difference([ONE, half - 0.5], [ONE, ONE]) == 0.5
    assert largest_difference([INF], [INF]) == 0
    assert largest_relative_difference([ONE, 2 * ONE], [ONE, 4 * ONE]) == 0.5
    assert largest_relative_difference([0 * ONE], [0 * ONE]) == 0
    with pytest.raises(ValueError, match="inf"):
        largest_relative_difference([ONE], [0 * ONE])
    assert largest_difference([ONE.double() + 1e-12], [ONE]) == pytest.approx(1e-12, rel=1e-3)
