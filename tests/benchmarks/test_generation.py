import json

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import generation
from benchmarks.generation import (
    CROSS,
    PLAIN,
    SOFTMAX,
    Decoder,
    Stopwatch,
    _draw_one,
    _evenly,
    build_decoder,
    integrate,
)
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
        assert {row["measured"] for row in rows[2:]} == {"integrated from 3 prefixes"}
    assert {shape[0] for shape in calls} == {2}
    assert {shape[1] for shape in calls} == {1, 6, 12}


SOURCE = {SOFTMAX: lambda s: 2 * 2 * s * 4, "linear": lambda s: 2 * (4 * 4 + 4)}
"""Numbers in a layer's state of a source of s tokens: keys and values, or S and z, of 2 heads of 4 dimensions."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The table: (source's length, kind) to the row."""
    folder = tmp_path_factory.mktemp("sources")
    words = "generation --sources 6 9 --most 6 --tokens 2 --repeats 2 --batch_sizes 3 --beam 4 --device cpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "SMALL", Size(2, 2, 8))
        command.main([*words.split(), "--output", str(folder)])
    report = json.loads((folder / "generation.json").read_text(encoding="utf-8"))
    return {(row["source"], row["cross-attention"]): row for row in report["rows"]}


def test_each_kind_is_measured_where_it_can_be(rows):
    assert list(rows) == [*((6, kind) for kind in CROSS), *((9, kind) for kind in CROSS if kind != PLAIN)]
    for row in rows.values():
        times = [row[f"{name}ms/token"]["samples"] for name in ("", "beam of 4, ")]
        assert all(len(samples) == 2 and min(samples) > 0 for samples in [*times, row["remember, s"]["samples"]])


def test_bytes_are_those_of_the_definition_and_beam_search_copies_no_source(rows):
    for kind, numbers in SOURCE.items():
        for length in (6, 9):
            # 2 layers of float32 numbers; the length, 8 bytes, and whether there is a source, 1 byte
            assert rows[length, kind]["source's state, bytes"] == 2 * (4 * numbers(length) + 9)
    for row in rows.values():
        hypotheses = 3 * 4  # of 3 sentences
        copied = row["select would copy"] - row["reorder copies, bytes/token"]
        assert copied == hypotheses * row["source's state, bytes"]


def test_a_token_is_one_step_of_the_decoder(monkeypatch):
    """By a clock that counts the decoder's calls."""
    for kind in CROSS:
        decoder, rows = Decoder(build_decoder(kind, Size(1, 2, 8), CPU), beam=2, tokens=3), []
        forward = decoder.model.backbone.forward

        def counted(*args, forward=forward, rows=rows):
            rows.append(len(args[0]))
            return forward(*args)

        decoder.model.backbone.forward = counted
        monkeypatch.setattr("benchmarks.generation.now", lambda device, rows=rows: float(len(rows)))
        source = random_levels(1, 5, CPU)
        with torch.no_grad():
            state = decoder.model.remember(source, max_len=6)
            for decode, options, n_rows in (
                (generation.generate, {"temperature": 0.0}, 1),
                (generation.beam_search, {"beam": 2}, 2),
            ):
                assert decoder._timed(decode, source, state, **options) == 1
                assert rows[-3:] == [n_rows] * 3
