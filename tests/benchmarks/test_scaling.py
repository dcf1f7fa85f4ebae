import json
import math

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import measuring, scaling

TINY = "scaling --device cpu --lengths 8 16 32 --d_model 8 --n_heads 2 --segment_len 8 --repeats 2 --most 16"
CPU = torch.device("cpu")


def table(words: str, folder) -> tuple[dict[str, dict], list[str]]:
    command.main([*words.split(), "--output", str(folder)])
    report = json.loads((folder / "scaling.json").read_text(encoding="utf-8"))
    return {row["attention"]: row for row in report["rows"]}, report["notes"]


def test_every_kind_has_a_row(tmp_path, capsys):
    rows, notes = table(TINY, tmp_path)
    assert list(rows) == list(scaling.KINDS)
    for name, row in rows.items():
        quadratic = name in ("softmax", "shaw")
        assert row["longest N"] == (16 if quadratic else 32)
        assert (row["ms, N 32"] is None) == (row["MiB, N 32"] is None) == quadratic
        for n in (8, 16):
            assert min(row[f"ms, N {n}"]["samples"]) > 0
            assert row[f"MiB, N {n}"] > 0
        assert math.isfinite(row["slope of time"])
        assert row["state, bytes"] > 0
    assert {name: round(rows[name]["slope of state"], 1) for name in ("linear", "lstm", "transformer_xl")} == {
        "linear": 0,
        "lstm": 0,
        "transformer_xl": 0,
    }
    assert rows["softmax"]["slope of state"] == pytest.approx(1, abs=0.1)
    assert rows["softmax"]["time ÷ softmax's, longest common"]["median"] == 1
    assert rows["linear"]["slope of memory"] > 0.5 > rows["transformer_xl"]["slope of memory"]
    assert "softmax and shaw beyond N 16" in " ".join(notes)
    assert "segments of 8" in notes[-1]


def test_a_slow_kind_does_not_go_on(tmp_path, capsys, monkeypatch):
    took = {8: 1.0, 16: 2.5, 32: 2.5}
    monkeypatch.setattr(measuring, "seconds_of", lambda layer, device: took[layer.x.size(1)])
    rows, notes = table(f"{TINY} --limit 2 --kinds linear shaw", tmp_path)
    assert (rows["linear"]["longest N"], rows["linear"]["ms, N 32"]) == (16, None)
    assert rows["linear"]["slope of time"] == pytest.approx(math.log2(2.5))
    assert rows["linear"]["time ÷ softmax's, longest common"] is None
    assert "more than 2 s" in " ".join(notes)


def test_segments_are_trained_one_by_one():
    """What is left is the last one's gradient, through no other, and the state is that of the whole stream."""
    layer = scaling._Layer(scaling.KINDS["transformer_xl"], 24, (8, 2), 8, CPU)
    layer()
    found = [p.grad.clone() for p in layer.module.parameters()]
    _, before = layer.module(layer.x[:, :16])
    layer.module.zero_grad()
    y, after = layer.module(layer.x[:, 16:], scaling.sequence.detach(before))
    y.sum().backward()
    for grad, parameter in zip(found, layer.module.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)
    torch.testing.assert_close(layer.state.inputs, after.inputs)
    assert layer.state.length.tolist() == [24]
