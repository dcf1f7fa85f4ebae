import json

import pytest

from benchmarks import __main__ as command
from benchmarks.export import KINDS

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

TINY = "export --tokens 150 --d_model 16 --n_heads 2 --device cpu --output"


@pytest.mark.exhaustive
def test_every_kind_streams_as_the_model_does(tmp_path):
    command.main([*TINY.split(), str(tmp_path)])
    rows = json.loads((tmp_path / "export.json").read_text(encoding="utf-8"))["rows"]
    assert [row["kind"] for row in rows] == list(KINDS)
    for row in rows:
        assert float(row["onnx: difference"]) < 1e-5, row["kind"]
        assert float(row["torch: difference"]) < 1e-5, row["kind"]
