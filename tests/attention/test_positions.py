import math

import pytest
import torch
from torch import nn

from lit_effattn import Transformer
from lit_effattn.attention.positions import (
    GridPositions,
    LearnedPositions,
    RotaryPositions,
    SinusoidalPositions,
    bind,
    n_positions,
)


def test_sinusoidal_formula():
    p = SinusoidalPositions(6)(torch.tensor([[0, 1, 7], [1000, 5, 2]]))
    assert p.shape == (2, 3, 6)
    for row, positions in enumerate([[0, 1, 7], [1000, 5, 2]]):
        for column, t in enumerate(positions):
            expected = []
            for i in range(3):
                angle = t / 10000 ** (2 * i / 6)
                expected += [math.sin(angle), math.cos(angle)]
            torch.testing.assert_close(p[row, column], torch.tensor(expected))


def test_sinusoidal_is_exact_far_out():
    """Angles in float32 are off by 0.06 at position 10⁶."""
    t = 999_999
    p = SinusoidalPositions(4)(torch.tensor([[t]]))[0, 0]
    expected = torch.tensor([math.sin(t), math.cos(t), math.sin(t / 100), math.cos(t / 100)])
    torch.testing.assert_close(p, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(SinusoidalPositions(4).half()(torch.tensor([[t]]))[0, 0], p)


def test_widths_without_pairs_are_refused():
    with pytest.raises(ValueError, match="width=5"):
        SinusoidalPositions(5)
    with pytest.raises(ValueError, match="width=1"):
        RotaryPositions(1)


def test_learned_looks_up():
    positions = LearnedPositions(4, max_len=10)
    t = torch.tensor([[0, 9, 3]])
    assert torch.equal(positions(t)[0], positions.table.weight[[0, 9, 3]])


def test_learned_takes_its_length_from_the_data():
    positions = LearnedPositions(4)
    with pytest.raises(ValueError, match="max_len"):
        positions(torch.tensor([[0]]))
    positions.bind((2, 3, 5))
    assert positions.table.weight.shape == (30, 4)
    table = positions.table
    positions.bind((7,))
    assert positions.table is table, "what is known is not bound again"


def test_learned_positions_begin_again():
    positions = LearnedPositions(4, max_len=3, period=3)
    position = torch.tensor([[0, 2, 3, 7]])
    assert torch.equal(positions(position), positions.table(torch.tensor([[0, 2, 0, 1]])))
    with pytest.raises(ValueError, match=r"period=0 is not positive"):
        LearnedPositions(4, max_len=3, period=0)
    with pytest.raises(ValueError, match="max_len=-1 must be at least 1"):
        LearnedPositions(4, max_len=-1)


def test_beyond_the_last_position():
    with pytest.raises(ValueError, match=r"LearnedPositions: position 10 .*9.*max_len"):
        LearnedPositions(4, max_len=10)(torch.tensor([[2, 10]]))
    with pytest.raises(ValueError, match=r"GridPositions: position 30 .*29.*shape"):
        GridPositions(4, (2, 3, 5))(torch.tensor([[30]]))


def test_the_number_of_positions_is_that_of_the_vectors():
    for positions, expected in [
        (LearnedPositions(4, 6), 6),
        (LearnedPositions(4, 6, period=6), None),
        (LearnedPositions(4, 6, period=7), 6),
        (GridPositions(4, (2, 3, 1)), 6),
        (SinusoidalPositions(4), None),
        (RotaryPositions(4), None),
    ]:
        assert n_positions(nn.ModuleList([positions, SinusoidalPositions(4)])) == expected
        positions(torch.tensor([[(expected or 10**6) - 1]]))
        if expected is not None:
            assert n_positions(nn.ModuleList([positions, LearnedPositions(4, 5)])) == 5
            with pytest.raises(ValueError, match="is beyond the last"):
                positions(torch.tensor([[expected]]))


def test_grid_adds_row_column_and_channel():
    h, w, c = 3, 4, 2
    positions = GridPositions(5, (h, w, c))
    rows, columns, channels = (table.weight for table in (positions.row, positions.column, positions.channel))
    assert (len(rows), len(columns), len(channels)) == (h, w, c)
    p = positions(torch.arange(h * w * c)[None])[0]
    t = 0
    for row in range(h):  # raster order, the channels of a pixel in turn
        for column in range(w):
            for channel in range(c):
                torch.testing.assert_close(p[t], rows[row] + columns[column] + channels[channel])
                t += 1


def test_grid_takes_its_shape_from_the_data():
    positions = GridPositions(4)
    with pytest.raises(ValueError, match="shape"):
        positions(torch.tensor([[0]]))
    with pytest.raises(ValueError, match=r"\(12,\)"):
        positions.bind((12,))
    positions.bind((2, 3, 1))
    positions.bind((6,))  # what is known is not bound again
    assert [len(table.weight) for table in (positions.row, positions.column, positions.channel)] == [2, 3, 1]


def test_bind_reaches_all_positions_in_a_module():
    model = Transformer(8, 2, 1, positions=LearnedPositions)
    other = GridPositions(4)
    bind(nn.ModuleList([model, other]), (2, 3, 2))
    assert model.positions.table.num_embeddings == 12
    assert len(other.column.weight) == 3
    model(torch.zeros(1, 12, 8))
    with pytest.raises(ValueError, match="position 12"):
        model(torch.zeros(1, 13, 8))


def test_rotary_turns_pairs():
    for base, odd in [(10000.0, 0), (100.0, 0), (10000.0, 1)]:
        d, t = 6, 7
        x = torch.randn(1, 1, 1, d + odd, dtype=torch.float64)
        y = RotaryPositions(d + odd, base).turn(x, torch.tensor([[t]]))
        assert torch.equal(y[..., d:], x[..., d:])
        for i in range(d // 2):
            a = t * base ** (-2 * i / d)
            first, second = x[0, 0, 0, i].item(), x[0, 0, 0, i + d // 2].item()
            assert y[0, 0, 0, i].item() == pytest.approx(first * math.cos(a) - second * math.sin(a), abs=1e-12)
            assert y[0, 0, 0, i + d // 2].item() == pytest.approx(first * math.sin(a) + second * math.cos(a), abs=1e-12)


def test_rotary_products_depend_on_differences_alone():
    rotary = RotaryPositions(8)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def product(s: int, t: int) -> float:
        return (rotary.turn(q, torch.tensor([[s]])) * rotary.turn(k, torch.tensor([[t]]))).sum().item()

    for difference in (0, 1, 5):
        expected = product(difference, 0)
        for t in (1, 17, 4000):
            assert product(t + difference, t) == pytest.approx(expected, abs=1e-9)
    assert abs(product(0, 0) - product(1, 0)) > 1e-3
    torch.testing.assert_close(rotary.turn(q, torch.tensor([[9]])).norm(), q.norm())


def test_rotary_rows_stand_at_positions_of_their_own():
    rotary = RotaryPositions(4)
    x = torch.randn(2, 3, 5, 4)
    position = torch.stack([torch.arange(5), torch.arange(5) + 7])
    y = rotary.turn(x, position)
    for row in range(2):
        torch.testing.assert_close(y[row : row + 1], rotary.turn(x[row : row + 1], position[row : row + 1]))
    assert y.dtype == x.dtype
    half = rotary.turn(x.half(), position)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), y, rtol=0, atol=4e-3)  # an input and an output near 4 are rounded
