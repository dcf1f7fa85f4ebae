"""The arithmetic of many GPUs, on a tiny model: what is counted is what is there."""

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import arithmetic
from benchmarks.arithmetic import TINY, kept_for_backward, limit, operations, sizes

(MODEL,) = TINY


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_sizes_are_those_of_the_whole_model(kind: str):
    """They are extrapolated from models with 1 and 2 layers."""
    found = sizes(MODEL, kind)
    whole = MODEL.build(kind, MODEL.n_layers)
    assert found.parameters == sum(p.numel() for p in whole.parameters())
    kept, state = arithmetic._of_a_step(whole, MODEL.length)
    assert kept == found.fixed + MODEL.length * found.activations
    assert state == found.state
    heads, width = MODEL.n_heads, MODEL.d_model // MODEL.n_heads
    # docs/sequence-parallel.md: a message a layer, and 8 bytes for the stack and for each layer with rotary positions
    message = MODEL.n_layers * (4 * heads * width * (width + 1) + 8 + 8) + 8
    assert found.messages == (message if kind == "linear" else 0)


def test_each_storage_is_counted_once_and_parameters_are_not():
    layer = torch.nn.Linear(8, 8, bias=False)
    x = torch.ones(4, 8, requires_grad=True)
    with kept_for_backward(layer) as found:
        y = layer(x)  # keeps x and its weight
        (y * y).sum()  # keeps y twice
    assert sum(found.values()) == 2 * 4 * 8 * 4


def test_operations_and_limits():
    parameters = 1e6
    assert operations(MODEL, "softmax", parameters) == 6e6 + 6 * 3 * 16 * 512
    assert operations(MODEL, "linear", parameters) == 6e6 + 6 * 3 * 16 * (64 + 2 * 8)
    assert [limit(0.5, 2, 2), limit(1, 2, 2), limit(1, 1, 2), limit(1, 1, 1)] == [
        *("fewer rows than GPUs", "memory", "messages", "computing")
    ]


def test_a_table_of_steps(capsys: pytest.CaptureFixture[str]):
    options = ["--device", "cpu", "--gpus", "4", "16", "--tokens", "8192", "--between", "1e9", "--within", "4e9"]
    command.main(["arithmetic", "--small", *options, "--flops", "1e9"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny | softmax")]
    n = sizes(MODEL, "softmax").parameters
    for row, gpus, links in zip(rows, (4, 16), (4e9, 1e9), strict=True):
        sent = 8 * n * (gpus - 1) / gpus
        assert row[3] == f"{8192 // gpus:,}"
        assert float(row[6]) == pytest.approx(sent / 1e9, rel=0.01)
        assert float(row[8]) == pytest.approx(1e3 * sent / links, rel=0.01)
        computing = operations(MODEL, "softmax", n) * 8192 / gpus / 1e9
        assert float(row[7].replace(",", "")) == pytest.approx(1e3 * computing, rel=0.01)
