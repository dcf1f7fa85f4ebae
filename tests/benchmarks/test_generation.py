import pytest
import torch

from benchmarks.generation import Continued, Stopwatch, _draw_one, _evenly, integrate
from benchmarks.models import KINDS, SMALL, build, random_levels
from lit_effattn.generation import draw
from lit_effattn.sequence import donated

CPU = torch.device("cpu")


def total(cost, length):
    return sum(cost(n) for n in range(1, length + 1))


def sampled(cost, length, count):
    prefixes = _evenly(1, length, count)
    return integrate(prefixes, [cost(n) for n in prefixes], length)


def test_integral_of_a_linear_cost_is_exact():
    def cost(n):
        return 3.0 + 0.5 * n

    assert sampled(cost, 784, 2) == pytest.approx(total(cost, 784), rel=1e-12)


def test_integral_of_a_quadratic_cost_is_near():
    def cost(n):
        return 1.0 + 0.2 * n + 0.01 * n * n

    assert sampled(cost, 3072, 8) == pytest.approx(total(cost, 3072), rel=0.015)
    assert sampled(cost, 50, 50) == pytest.approx(total(cost, 50), rel=1e-12)  # every prefix: nothing between them


def test_integral_is_constant_beyond_the_samples():
    assert integrate([3, 5], [2.0, 4.0], 6) == 2 + 2 + 2 + 3 + 4 + 4


def test_stopwatch_ends_at_its_last_mark():
    watch = Stopwatch([2, 5, 6], CPU)
    assert list(watch(range(100))) == [0, 1, 2, 3, 4, 5]
    assert len(watch.seconds) == 2


def test_stopwatch_covers_a_whole_run():
    watch = Stopwatch([0, 3], CPU)
    assert list(watch(range(3))) == [0, 1, 2]
    assert len(watch.seconds) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_prefix", [0, 7])
@torch.no_grad()
def test_continued_goes_on_behind_its_prefix(kind, n_prefix):
    model = build(kind, 12, SMALL, CPU).eval()
    x = model.embedding(random_levels(1, 12, CPU))
    whole, _ = model.backbone(x)
    continued = Continued(model.backbone)
    continued.state = continued.behind(x[:, :n_prefix], 12)
    for _ in range(2):  # the second time from an untouched state, though the first one was given away
        state = continued.initial_state(3)
        with donated():
            for t in range(n_prefix, 12):
                y, state = continued(x[:, t : t + 1].expand(3, -1, -1), state)
                torch.testing.assert_close(y, whole[:, t : t + 1].expand(3, -1, -1), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_without_a_cache_the_same_tokens_are_drawn():
    model = build("softmax", 12, SMALL, CPU).eval()
    tokens = random_levels(2, 6, CPU)
    _, state = model.backbone(model.embedding(tokens[:, :5]))
    y, _ = model.backbone(model.embedding(tokens[:, 5:]), state)
    expected = draw(model.head.log_probs(y[:, 0]), torch.full((2,), 0.5))
    assert _draw_one(model, tokens).tolist() == expected.tolist()
