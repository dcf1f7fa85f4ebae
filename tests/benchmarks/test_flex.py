import json

import torch

from benchmarks import __main__ as command
from benchmarks.flex import dense
from lit_effattn.ops.relative import relative_attention


def test_without_a_gpu_nothing_is_measured_and_the_table_says_so(tmp_path, capsys):
    command.main(["flex", "--lengths", "8", "16", "--device", "cpu", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "flex.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["N"], row["form"]) for row in rows] == [(n, f) for n in (8, 16) for f in ("flex", "plain", "dense")]
    assert all(row["ms"] is row["time ÷ plain's"] is row["peak, MiB"] is None for row in rows)
    said = capsys.readouterr().out
    assert said.count("| not measured | not measured | not measured | not measured |") == 6
    assert "Not measured: the device is cpu" in said


def test_dense_is_the_same_attention_without_positions():
    q, k, v = (torch.randn(2, 3, n, 4) for n in (5, 10, 10))
    r, u = torch.zeros(3, 10, 4), torch.zeros(3, 4)
    torch.testing.assert_close(dense(q, k, v, r, u, u), relative_attention(q, k, v, r, u, u))
