import json
from pathlib import Path

from benchmarks import __main__ as command


def test_table(tmp_path: Path):
    """A kind whose state can't be carried, and one that carries it, with a loss that is not compiled."""
    named = ["softmax", "linear, adaptive head"]
    command.main(["graphs", "--kinds", *named, "--segment_len", "8", "--device", "cpu", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "graphs.json").read_text(encoding="utf-8"))["rows"]
    assert [row["state"] for row in rows] == ["none", "carried"]
    assert [row["graphs"] for row in rows] == [1, 2]
    assert [row["breaks"] for row in rows] == [0, 1]
    assert ["AdaptiveHead.loss" in row["why"] for row in rows] == [False, True]
    for row in rows:
        assert row["compiled again, same size"] == 0
        assert row["compiled again, other sizes"] > 0
