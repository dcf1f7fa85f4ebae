import argparse

import pytest
import torch

from benchmarks import kernels, measuring
from benchmarks.report import cell
from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention
from lit_effattn.ops.linear.pytorch import causal_linear_attention
from tests.support.cpp_kernels import needs_kernels
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
        "one": ("cpu", "math", exact),
        "flawed": ("cpu", "math", flawed),
        "other": ("cpu", "no_such_library", exact),
    }
    monkeypatch.setattr(kernels, "PEERS", {**peers, "elsewhere": ("cuda", "math", exact)})
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
            ratio = rows[title, form]["time ÷ its products'"]
            assert 0 < ratio.median < 1000 if form in kernels.OURS else ratio == "—"
            if form not in ("one", "flawed"):
                assert rows[title, form]["difference"] < ACCURATE


def test_products_are_all_that_a_pass_performs():
    """Multiplications by hand: the formulas of the forward pass, twice as many in the backward pass."""
    f, d = 8, 4
    q, k, v = (torch.rand(1, H, N, width, requires_grad=True) for width in (f, f, d))

    def both_ways():
        sums = torch.zeros(1, H, f, d), torch.zeros(1, H, f)
        out = causal_linear_attention(q, k, v, *sums, chunk_size=C, form="plain")[0]
        torch.autograd.grad(out.sum(), (q, k, v))

    products = kernels.Products(both_ways)
    assert products.multiplications == multiplications(f, d, C)
    products()  # it runs
    assert len(products.operands) < len(products.calls)


def multiplications(f: int, d: int, chunk: int) -> int:
    """Of scores, scores times v, q S, kᵀv, and q z, forward and backward; the last chunk is filled up."""
    forward = chunk * chunk * (f + d) + 2 * chunk * f * d + chunk * f
    return 3 * H * -(-N // chunk) * forward


def test_the_products_of_the_delta_rule_are_recorded():
    f, d = 8, 4
    q, k, v = (torch.rand(1, H, N + 2, width) for width in (f, f, d))  # 72, whole chunks of 8
    state, beta = torch.zeros(1, H, f, d), torch.rand(1, H, N + 2)
    products = kernels.Products(lambda: gated_linear_attention(q, k, v, state, beta=beta, chunk_size=C, form="plain"))
    of_chunk = 2 * C * C * f + 2 * C * C * d + 3 * C * f * d  # A, P; the inverse and A times values; K S, Q S, Kᵀ U
    assert products.multiplications == H * (N + 2) // C * of_chunk


@needs_kernels(kernels.linear_cpp_kernels)
def test_the_products_of_a_kernel_are_those_at_its_chunk_size(args):
    inputs, forms = kernels._inputs(N, args, "linear"), kernels._forms(args)
    for name, chunk in (("linear", 16), ("linear, plain", args.chunk_size)):
        own = kernels._at_its_chunk_size(name, forms[name], kernels._both_ways, inputs, args)
        assert kernels.Products(own).multiplications == multiplications(8, 8, chunk)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_forms_on_a_gpu_compute_the_same(args):
    args.device = torch.device("cuda")
    for row in kernels.run(args).rows:
        assert row["difference"] in ("—", None) or row["difference"] < 1e-2
