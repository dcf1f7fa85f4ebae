import json
import math

import pytest

from benchmarks import __main__ as command
from benchmarks.experiments.features import KINDS

TINY = "features --length 24 --head_dim 4 --n_features 4 8 --scales 0.5 --draws 3 --device cpu"


def test_table(tmp_path, capsys):
    command.main([*TINY.split(), "--output", str(tmp_path)])
    text = (tmp_path / "features.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() == text.strip()
    assert (tmp_path / "features.png").stat().st_size > 0
    rows = json.loads((tmp_path / "features.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 3 * 2 * 2
    for row in rows:
        assert len(row["squared error"]["samples"]) == 3
        assert all(math.isfinite(x) and x > 0 for x in row["squared error"]["samples"])
        assert row["÷ iid"]["median"] == 1 or row["ω"] == "orthogonal"


def test_more_features_err_less(tmp_path):
    command.main([*TINY.split(), "--n_features", "4", "4096", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "features.json").read_text(encoding="utf-8"))["rows"]
    errors = {(r["features"], r["ω"], r["F"]): r["squared error"] for r in rows}
    for name in KINDS:
        for directions in ("orthogonal", "iid"):
            assert errors[name, directions, 4096]["median"] < errors[name, directions, 4]["median"] / 10


def test_an_odd_number_of_features_is_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["features", "--n_features", "7"])
    assert "7 is odd" in capsys.readouterr().err
