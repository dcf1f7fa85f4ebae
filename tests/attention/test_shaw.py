import re
from functools import partial

import pytest
import torch

from lit_effattn import Transformer
from lit_effattn.attention import ShawAttention, SoftmaxAttention
from lit_effattn.attention.positions import RotaryPositions
from lit_effattn.ops.shaw import shaw_attention
from tests.support.tensor_sizes import largest_in_training

E, H = 12, 3


def without_distances(attention: ShawAttention) -> ShawAttention:
    with torch.no_grad():
        attention.key_table.zero_()
        attention.value_table.zero_()
    return attention


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 4), (False, None)])
def test_zero_tables_equal_softmax(causal: bool, window: int | None):
    shaw = without_distances(ShawAttention(E, H, causal, max_distance=3, window=window)).double()
    softmax = SoftmaxAttention(E, H, causal, window=window).double()
    softmax.load_state_dict(shaw.state_dict(), strict=False)
    x, lengths = torch.randn(2, 11, E, dtype=torch.float64), torch.tensor([11, 6])
    torch.testing.assert_close(shaw(x, None, lengths)[0], softmax(x, None, lengths)[0])


@pytest.mark.parametrize("causal", [True, False])
def test_each_distance_has_a_vector_of_its_own(causal: bool):
    """With q = k = v = 0 a position's output is the mean of the value vectors of the distances that it sees."""
    attention = ShawAttention(4, 1, causal, max_distance=2, bias=False).double()
    with torch.no_grad():
        attention.v_proj.weight.zero_()
        attention.q_proj.weight.zero_()
        attention.out_proj.weight.copy_(torch.eye(4))
    a = attention.value_table  # of the distances −2, −1, 0, and 1, 2 where these are seen
    assert len(a) == (3 if causal else 5)
    y, _ = attention(torch.randn(1, 5, 4, dtype=torch.float64))
    if causal:
        expected = [a[2], a[1:3].mean(0), a.mean(0), (2 * a[0] + a[1] + a[2]) / 4, (3 * a[0] + a[1] + a[2]) / 5]
    else:
        expected = [
            (a[2] + a[3] + 3 * a[4]) / 5,
            (a[1] + a[2] + a[3] + 2 * a[4]) / 5,
            a.mean(0),
            (2 * a[0] + a[1] + a[2] + a[3]) / 5,
            (3 * a[0] + a[1] + a[2]) / 5,
        ]
    torch.testing.assert_close(y[0], torch.stack(expected))


def test_beyond_max_distance_all_look_alike():
    attention = ShawAttention(E, H, max_distance=2).double()
    x = torch.randn(1, 8, E, dtype=torch.float64)
    swapped = x.clone()
    swapped[:, [0, 3]] = x[:, [3, 0]]
    y, z = attention(x)[0], attention(swapped)[0]
    torch.testing.assert_close(z[:, 6:], y[:, 6:])
    assert not torch.allclose(z[:, 4], y[:, 4])


def test_vectors_of_pairs_are_never_made():
    b, h, n, d, most = 1, 2, 128, 16, 4
    q, k, v = (torch.rand(b, h, n, d) for _ in range(3))
    tables = [torch.rand(2 * most + 1, d) for _ in range(2)]
    distance = (torch.arange(n) - torch.arange(n)[:, None])[None]
    largest = largest_in_training(
        lambda q, k, v, *t: shaw_attention(q, k, v, distance, *t, max_distance=most), q, k, v, *tables
    )
    assert largest <= b * h * n * n < n * n * d


def test_a_window_never_makes_all_scores():
    n, window = 512, 8
    attention = ShawAttention(8, 1, window=window)
    assert largest_in_training(lambda x: attention(x)[0], torch.rand(1, n, 8)) <= n * 2 * window * 8 < n * n


def test_dropout_in_training_alone():
    x = torch.randn(2, 20, E)
    for window in (None, 4):
        attention = ShawAttention(E, H, window=window, dropout=0.5)
        assert not torch.equal(attention(x)[0], attention(x)[0])
        attention.eval()
        assert torch.equal(attention(x)[0], attention(x)[0])


def test_rotary_positions_are_refused():
    with pytest.raises(ValueError, match="ShawAttention does not take rotary positions"):
        Transformer(E, H, 1, attention=ShawAttention, positions=RotaryPositions)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_distance": 0}, ["max_distance=0", "at least 1"]),
        ({"window": 0}, ["window=0"]),
        ({"window": 4, "causal": False}, ["window=4", "causal"]),
        ({"dropout": 1.0}, ["dropout=1.0"]),
    ],
)
def test_bad_options_are_named(options: dict, words: list[str]):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        ShawAttention(**{"d_model": E, "n_heads": H, **options})


def test_it_learns_what_only_distances_tell():
    """To repeat the input of three positions ago, which softmax attention without positions can't."""
    torch.manual_seed(0)
    losses = {}
    for attention in (partial(ShawAttention, max_distance=4), SoftmaxAttention):
        model = Transformer(16, 2, 1, attention=attention, positions=None)
        embed, read = torch.nn.Embedding(4, 16), torch.nn.Linear(16, 4)
        optimizer = torch.optim.Adam([*model.parameters(), *embed.parameters(), *read.parameters()], 1e-2)
        for _ in range(150):
            tokens = torch.randint(4, (16, 16))
            logits = read(model(embed(tokens))[0])[:, 3:]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-3].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[type(model.blocks[0].attention)] = loss.item()
    assert losses[ShawAttention] < 0.3 < 1 < losses[SoftmaxAttention]
