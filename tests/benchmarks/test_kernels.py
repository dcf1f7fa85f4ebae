import argparse

import pytest
import torch
from torch._subclasses import FakeTensorMode

from benchmarks import kernels, measuring
from benchmarks.report import cell
from tests.support.rounding import rounding

N, H, C, D = 70, 2, 8, 8
ACCURATE = rounding(torch.float32, 2 * (N + D))
"""Relative to the norm: an output sums N weights, each of D products, and the backward pass as many again."""


@pytest.fixture
def args():
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    sizes = f"--lengths {N} --n_heads {H} --head_dim {D} --n_features 4 --chunk_size {C} --repeats 2"
    args = parser.parse_args(sizes.split())
    args.device = torch.device("cpu")
    return args


def flawed(library, q, k, v):
    weights = (q @ k.mT).tril()
    return 1.5 * (weights @ v) / (weights.sum(-1, keepdim=True) + 1e-6)


def exact(library, q, k, v):
    return flawed(library, q, k, v) / 1.5


def test_peers_are_compared_and_absent_ones_said(args, monkeypatch):
    peers = {
        "one": ("cpu", "linear", "math", exact),
        "flawed": ("cpu", "linear", "math", flawed),
        "other": ("cpu", "linear", "no_such_library", exact),
    }
    monkeypatch.setattr(kernels, "PEERS", {**peers, "elsewhere": ("cuda", "linear", "math", exact)})
    monkeypatch.setattr(measuring, "LEAST", 0.0)
    report = kernels.run(args)
    rows = {(row["pass"], row["form"]): row for row in report.rows}
    forms = [*kernels._forms(args), "one", "flawed"]
    assert list(rows) == [(p, f) for p in kernels.PASSES for f in forms] + [(p, "other") for p in kernels.PASSES]
    assert all(row.keys() == report.rows[0].keys() for row in report.rows)
    assert "Absent, and so not measured: other; " in report.notes[-1]
    assert "benchmarks/requirements-peers.txt" in report.notes[-1]
    for title in kernels.PASSES:
        assert cell(rows[title, "other"]["ms"]) == "not measured"
        assert 0 < rows[title, "one"]["difference"] < ACCURATE
        assert rows[title, "flawed"]["difference"] == pytest.approx(0.5, rel=1e-3)
        assert rows[title, "linear"]["time ÷ linear's"].samples == (1.0, 1.0)
        for form in forms:
            assert rows[title, form]["ms"].median > 0
            assert rows[title, form]["peak, MiB"] > 0
            if form not in ("one", "flawed"):
                assert rows[title, form]["difference"] < ACCURATE


def test_what_flash_linear_attention_refuses_is_said(args, monkeypatch):
    args.device, measured = torch.device("cuda"), []
    with FakeTensorMode():
        forms = kernels._forms(args)
    assert [forms[name].args[0] for name in ("delta", "delta, plain")] == ["triton", "plain"]
    monkeypatch.setattr(kernels, "_forms", lambda args: {})
    monkeypatch.setattr(kernels, "_rows", lambda n, forms, args: measured.extend(forms) or [])
    monkeypatch.setattr(kernels, "import_module", lambda name: None)
    report = kernels.run(args)
    assert measured == [kernels.FLA]
    assert {row["form"] for row in report.rows} == {f"{kernels.FLA}, {family}" for family in kernels.GATED}
    assert f"Not measured: {kernels.FLA}, delta: its kernels of the delta rule are for bfloat16" in report.notes[-2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_forms_on_a_gpu_compute_the_same(args):
    args.device = torch.device("cuda")
    for row in kernels.run(args).rows:
        assert row["difference"] in ("—", None) or row["difference"] < 1e-2
