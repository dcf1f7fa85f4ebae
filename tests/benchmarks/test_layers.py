import argparse
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from benchmarks import layers, measuring
from benchmarks.report import cell
from lit_effattn.attention import LSHAttention, SoftmaxAttention
from tests.support.rounding import rounding

N, WIDTH = 64, 32
ACCURATE = rounding(torch.float32, 2 * (4 * WIDTH + 2 * N))
"""Relative to the norm: four projections, sums over N keys, and the backward pass as many again."""
LIBRARIES = {
    "x-transformers, flash": "x_transformers",
    "pytorch-fast-transformers": "fast_transformers.attention",
    "reformer-pytorch, exact": "reformer_pytorch",
}


def parsed(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    layers.add_arguments(parser)
    sizes = (
        f"--lengths {N} --d_model {WIDTH} --n_heads 2 --window 5 --n_hashes 2 --chunk_size 8 --n_features 8 --repeats 2"
    )
    args = parser.parse_args([*sizes.split(), *words.split()])
    args.device = torch.device("cpu")
    return args


def absent(name):
    raise ImportError(f"No module named {name!r}")


def other_softmax(args, n, ours, *, factor):
    """Softmax attention as one reads it, its queries times a factor that makes it right or wrong."""
    names = ("q", "k", "v", "o")
    layer = nn.ModuleDict({name: nn.Linear(ours.d_model, ours.d_model, bias=False) for name in names})

    def call(x):
        q, k, v = (layer[name](x).unflatten(2, (ours.n_heads, -1)).transpose(1, 2) for name in names[:3])
        scores = (factor * q @ k.mT * ours.head_dim**-0.5).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        return layer["o"]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    return layers.Layer(call, [layer[name].weight for name in names])


def failing(args, n, ours):
    raise TypeError("they changed it")


def test_layers_are_compared_and_what_can_not_be_is_said(monkeypatch):
    monkeypatch.setattr(layers, "import_module", absent)
    monkeypatch.setattr(measuring, "LEAST", 0.0)
    peers = {
        "right": partial(other_softmax, factor=1),
        "wrong": partial(other_softmax, factor=4),
        "failing": failing,
        "x-transformers": layers._x_transformers,
        "flash-linear-attention": layers._flash_linear_attention,
    }
    comparison = layers.COMPARISONS["softmax"]._replace(peers=peers)
    monkeypatch.setattr(layers, "COMPARISONS", {"softmax": comparison, "other": comparison._replace(same=False)})
    report = layers.run(parsed("--attentions softmax other"))
    assert [(row["attention"], row["layer"]) for row in report.rows] == [
        (title, name) for title in ("softmax", "other") for name in ("lit-effattn", *peers)
    ]
    rows = {(row["attention"], row["layer"]): row for row in report.rows}
    for title in ("softmax", "other"):
        for name in ("failing", "x-transformers", "flash-linear-attention"):
            figures = list(rows[title, name].values())[3:]
            assert [cell(figure) for figure in figures] == ["not measured"] * 6
        for name in ("lit-effattn", "right", "wrong"):
            row = rows[title, name]
            assert row["peak, MiB"] > 0
            assert len(row["ms"].samples) == 2
            for ms, speed in zip(row["ms"].samples, row["tokens/s"].samples, strict=True):
                assert ms * speed == pytest.approx(1000 * N)
    assert rows["softmax", "lit-effattn"]["time ÷ lit-effattn's"].samples == (1, 1)
    assert rows["softmax", "right"]["difference"] < ACCURATE
    assert rows["softmax", "wrong"]["difference"] > 0.01
    assert rows["other", "wrong"]["difference"] == "—"
    message = "\n".join(report.notes)
    assert "Not measured: failing: failed (TypeError: they changed it)." in message
    assert "Not measured: x-transformers: absent (No module named 'x_transformers.x_transformers'); see " in message
    assert "Not measured: flash-linear-attention: its kernels need CUDA" in message


def test_without_libraries_every_comparison_has_our_row(monkeypatch):
    monkeypatch.setattr(layers, "import_module", absent)
    monkeypatch.setattr(measuring, "LEAST", 0.0)
    report = layers.run(parsed("--repeats 1"))
    assert [row["attention"] for row in report.rows if row["ms"] is not None] == list(layers.COMPARISONS)


def test_what_a_layer_can_not_do_is_said():
    with pytest.raises(SystemExit, match="--lengths 24 must be a multiple of 16"):
        layers.run(parsed("--lengths 24 32"))
    with pytest.raises(layers.UnmeasuredError, match="longer than --most 32"):
        layers._performer_pytorch(parsed("--most 32"), N, SoftmaxAttention(32, 2))
    assert len(layers._weights(LSHAttention(32, 2))) == 3  # keys of LSH are its queries


@pytest.mark.exhaustive
def test_the_libraries_compute_the_same(monkeypatch):
    """Where they are installed."""
    installed = {name for name, module in LIBRARIES.items() if find_spec(module.partition(".")[0])}
    monkeypatch.setattr(measuring, "LEAST", 0.0)
    for title, comparison in [*layers.COMPARISONS.items()]:
        for name in installed & {*comparison.peers} if comparison.same else ():
            monkeypatch.setitem(layers.COMPARISONS, title, comparison._replace(peers={name: comparison.peers[name]}))
            args = parsed("--repeats 1")
            args.attentions = [title]
            report = layers.run(args)
            assert report.rows[1]["difference"] < ACCURATE, report.notes
