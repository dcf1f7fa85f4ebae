import json
import math
from unittest import mock

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import gpu, measuring
from lit_effattn.ops.gated_linear import fla


def parsed(*words: str):
    return command._parse(["gpu", "--dry_run", "--device", "cpu", *words])


@pytest.mark.parametrize("part", gpu.ROWS)
def test_a_dry_run_reaches_every_line(part: str, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(measuring, "LEAST", 0.0)
    monkeypatch.setattr(torch, "compile", lambda model, backend: model)
    gpu.main(parsed("--only", part))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert not [row for row in rows if "failure" in row]
    figures = [x for row in rows for x in row.values() if isinstance(x, float)]
    assert len(figures) > len(rows)
    assert all(math.isfinite(x) and x > 0 for x in figures)
    kinds = {"kernels": {"softmax", "linear", "performer", *gpu.RECURRENCES}, "steps": set(gpu.STEPS)}
    assert kinds.get(part, set()) <= {row["what"] for row in rows}


def test_flash_linear_attention_is_tuned_and_measured(monkeypatch, capsys):
    """With its kernels replaced by something of the right shapes."""
    calls = []

    def kernel(q, k, v, *, initial_state, **options):
        calls.append(sorted(options))
        return q + k + v + sum(t.float().mean() for t in options.values() if isinstance(t, torch.Tensor)), initial_state

    monkeypatch.setattr(fla, "_obstacle", lambda *of: None)
    monkeypatch.setattr(fla, "_kernel", lambda name: kernel)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(measuring, "LEAST", 0.0)
    gpu.main(parsed("--only", "gated delta"))
    assert calls == [["beta", "g", "output_final_state", "scale"]]
    assert json.loads(capsys.readouterr().out)["not measured"] is None
    gpu.main(parsed("--only", "kernels"))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    measured = {row["what"] for row in rows if row["form"] == "flash-linear-attention"}
    assert measured == {"linear", *gpu.RECURRENCES}


def test_what_a_part_printed_is_kept_when_it_is_stopped(monkeypatch):
    stops = []
    monkeypatch.setattr("threading.Timer", lambda limit, stop: stops.append(stop) or mock.Mock())
    lines = gpu.streamed({"broken": ["false"], "slow": ["sh", "-c", "echo {}; exec sleep 60"]}, 2)
    assert [next(lines), next(lines)] == [{"what": "broken", "failure": "status 1"}, "{}\n"]
    stops[0]()
    assert list(lines) == [{"what": "slow", "failure": "stopped after 2 s"}]


def test_rows_are_written_as_they_come_and_a_failure_ends_with_1(monkeypatch, tmp_path, capsys):
    rows = {"kernels": [{"what": "linear", "ms": 1234.5}], "steps": [{"what": "x", "failure": "status 1"}]}
    monkeypatch.setattr(gpu, "_of_part", lambda part, args: rows[part])
    with pytest.raises(SystemExit):
        gpu.main(parsed("--parts", "kernels", "steps", "--output", str(tmp_path)))
    kept = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert kept == [{"part": "kernels", "what": "linear", "ms": 1234.5}, {"part": "steps", **rows["steps"][0]}]
    assert "| linear | 1,234 |" in (tmp_path / "gpu.md").read_text()
    assert "## steps" in capsys.readouterr().out


def test_all_parts_fit_into_9_minutes():
    assert sum(gpu.PARTS.values()) < 9 * 60
