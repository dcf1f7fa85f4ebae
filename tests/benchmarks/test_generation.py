import json

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import generation
from benchmarks.generation import Stopwatch, _draw_one, _evenly, integrate
from benchmarks.models import SMALL, Size, build, random_levels
from lit_effattn.generation.sampling import draw

CPU = torch.device("cpu")


def total(cost, length):
    return sum(cost(n) for n in range(1, length + 1))


def sampled(cost, length, count):
    prefixes = _evenly(1, length, count)
    return integrate(prefixes, [cost(n) for n in prefixes], length)


def test_the_integral_of_a_cost():
    assert sampled(lambda n: 3.0 + 0.5 * n, 784, 2) == pytest.approx(total(lambda n: 3.0 + 0.5 * n, 784), rel=1e-12)

    def quadratic(n):
        return 1.0 + 0.2 * n + 0.01 * n * n

    assert sampled(quadratic, 3072, 8) == pytest.approx(total(quadratic, 3072), rel=0.015)
    assert sampled(quadratic, 50, 50) == pytest.approx(total(quadratic, 50), rel=1e-12)  # every prefix
    assert integrate([3, 5], [2.0, 4.0], 6) == 2 + 2 + 2 + 3 + 4 + 4  # constant beyond the samples


def test_stopwatch_ends_at_its_last_mark(monkeypatch):
    for marks, n_steps, seen in (([2, 5], 100, 5), ([0, 3], 3, 3)):
        times = iter((10.0, 14.5))
        monkeypatch.setattr(generation, "now", lambda device, times=times: next(times))
        watch = Stopwatch(marks, CPU)
        assert list(watch(range(n_steps))) == list(range(seen))
        assert watch.seconds == 4.5


@torch.no_grad()
def test_without_a_cache_the_same_tokens_are_drawn():
    model = build("softmax", 12, SMALL, CPU).eval()
    tokens = random_levels(2, 6, CPU)
    _, state = model.backbone(model.embedding(tokens[:, :5]))
    y, _ = model.backbone(model.embedding(tokens[:, 5:]), state)
    expected = draw(model.head.log_probs(y[:, 0]), torch.full((2,), 0.5))
    assert _draw_one(model, tokens).tolist() == expected.tolist()


def test_lsh_is_measured_at_the_papers_size_only(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.models.MNIST", Size(1, 2, 8))
    monkeypatch.setattr("benchmarks.models.SMALL", Size(1, 2, 8))
    calls = []
    monkeypatch.setattr(generation, "_draw_one", lambda model, tokens: calls.append(tokens.shape))
    words = f"generation --lengths 12 --repeats 1 --batch_sizes 3 --uncached 2 --prefixes 3 --output {tmp_path}"
    for size, lsh in ([], ["LSH-1, no cache"]), (["--small"], []):
        command.main(words.split() + size)
        rows = json.loads((tmp_path / "generation.json").read_text(encoding="utf-8"))["rows"]
        assert [row["method"] for row in rows] == [*generation.PAPER[784]][:3] + lsh
    assert {shape[0] for shape in calls} == {2}
    assert {shape[1] for shape in calls} == {1, 6, 12}
