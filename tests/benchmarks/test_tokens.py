import argparse
from functools import partial

import pytest
import torch

from benchmarks import tokens
from benchmarks.measuring import Spread
from benchmarks.models import Size
from benchmarks.tokens import OnnxSteps, generated, matrices, model, run
from lit_effattn.attention import SoftmaxAttention
from lit_effattn.generation import packages
from lit_effattn.interchange.export import export

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

TINY = Size(1, 2, 8)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Steps are not compiled."""
    monkeypatch.setattr(tokens, "SIZES", {"small": TINY})
    monkeypatch.setattr(tokens, "ROOM", 16)
    monkeypatch.setattr(tokens, "KINDS", {"softmax": SoftmaxAttention, "LSTM": None})
    monkeypatch.setattr("lit_effattn.generation.compiled.check_inductor", lambda asked, device: None)
    monkeypatch.setattr(packages, "program", lambda step, *_, may_compile: packages.Program(torch.no_grad()(step), []))


def test_a_kind_has_a_row_for_each_size_and_number_of_rows():
    options = {"sizes": ["small"], "kinds": ["softmax", "LSTM"], "repeats": 2, "n_read": 3, "n_tokens": 4}
    without = run(argparse.Namespace(**options, rows=[1, 2], no_onnx=True)).rows
    assert [(row["rows"], row["kind"]) for row in without] == [
        *((1, "softmax"), (1, "LSTM")),
        *((2, "softmax"), (2, "LSTM")),
    ]
    assert not any("onnxruntime" in column for row in without for column in row)
    rows = run(argparse.Namespace(**options, rows=[2], no_onnx=False)).rows
    for row in (*without, *rows):
        for name in ("Python, ms", "compiled, ms", "products, ms", "bytes, ms"):
            spread = row[name]
            assert isinstance(spread, Spread)
            assert min(spread.samples) > 0
    for row in rows:
        assert min(row["onnxruntime, ms"].samples) > 0
        ratio = row["onnxruntime ÷ compiled"]
        assert ratio.samples == pytest.approx(
            [a / b for a, b in zip(row["onnxruntime, ms"].samples, row["compiled, ms"].samples, strict=True)]
        )


def test_both_programs_draw_alike(tmp_path, monkeypatch):
    task = model("softmax", TINY)
    path = export(task, tmp_path / "step.onnx", format="onnx", batch_size=2, max_len=16).path
    drawn: dict[str, list[torch.Tensor]] = {"onnx": [], "python": []}
    real = tokens.draw

    def noted(log_probs, uniform, name):
        drawn[name].append(log_probs)
        return real(log_probs, uniform, temperature=0)

    monkeypatch.setattr(tokens, "draw", partial(noted, name="onnx"))
    OnnxSteps(path, task, 2)(3, 5)
    monkeypatch.setattr(
        "lit_effattn.generation.sampling.draw", lambda log_probs, uniform, **_: noted(log_probs, uniform, "python")
    )
    generated(task, 2, 3, 5, compile=False)
    assert len(drawn["onnx"]) == len(drawn["python"]) == 8
    torch.testing.assert_close(drawn["onnx"], drawn["python"], rtol=1e-4, atol=1e-4)


def test_the_products_are_those_of_all_matrices():
    shapes = sorted(tuple(m.shape) for m in matrices(model("softmax", TINY)))
    assert shapes == sorted([(8, 8)] * 4 + [(32, 8), (8, 32), (256, 8)])
