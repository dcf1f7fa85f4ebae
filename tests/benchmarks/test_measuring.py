import pytest
import torch

from benchmarks.measuring import Spread, interleaved, mean_of, peak_bytes
from benchmarks.report import cell

CPU = torch.device("cpu")


def test_ratios_are_taken_round_by_round_and_cells_have_the_spread():
    assert (Spread((2.0, 20.0)) / Spread((1.0, 10.0))).samples == (2.0, 2.0)
    assert cell(Spread((1.0, 3.0, 2.0))) == "2 (1–3)"
    assert cell(None) == "not measured"
    assert cell(1234567) == "1,234,567"
    assert cell(0.01234) == "0.0123"
    assert cell("—") == "—"


def test_calls_are_repeated_and_the_first_is_not_counted_unless_it_is_long():
    for times, calls, mean in (([0.03, 0.06], 1 + 4, 0.06 / 4), ([0.3, 0.2], 1 + 1, 0.2), ([2], 1, 2)):
        made, left = [], iter(times)

        def clock(function, left=left):
            function()
            return next(left)

        assert mean_of(clock, lambda made=made: made.append(1)) == pytest.approx(mean)
        assert len(made) == calls


def test_measures_take_turns():
    order = []
    results = interleaved("", {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b", "a", "b"]
    assert results == {"a": [None, None], "b": [None, None]}


def test_peak_counts_what_is_alive_at_once():
    x = torch.zeros(1000)

    def function():
        for _ in range(5):
            y = x + 1  # 4000 bytes; the one before is freed when `y` is bound again
            y.add_(1)
            y.view(10, 100)
        del y
        return x + 1

    assert peak_bytes(function, CPU) == 8000


def test_peak_counts_what_the_backward_pass_keeps():
    x = torch.zeros(1000, requires_grad=True)

    def chain(length):
        y = x
        for _ in range(length):
            y = y.exp()  # keeps its output
        y.sum().backward()
        x.grad = None

    assert peak_bytes(lambda: chain(12), CPU) - peak_bytes(lambda: chain(2), CPU) == pytest.approx(10 * 4000, abs=100)
