import argparse

import pytest
import torch

from benchmarks import kernels
from benchmarks.report import cell
from lit_effattn.ops.linear.pytorch import causal_linear_attention
from tests.support.cpp_kernels import needs_kernels

N, H, C = 70, 2, 16


@pytest.fixture
def args():
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    sizes = f"--lengths {N} --n_heads {H} --head_dim 8 --n_features 4 --chunk_size {C} --repeats 2"
    args = parser.parse_args(sizes.split())
    args.device = torch.device("cpu")
    return args


def flawed(library, q, k, v):
    weights = (q @ k.mT).tril()
    return 1.5 * (weights @ v) / (weights.sum(-1, keepdim=True) + 1e-6)


def exact(library, q, k, v):
    return flawed(library, q, k, v) / 1.5


def test_peers_are_compared_and_absent_ones_said(args, monkeypatch, capsys):
    peers = {"one": ("math", {"": exact, ", flawed": flawed}), "other": ("no_such_library", {"": exact})}
    monkeypatch.setattr(kernels, "PEERS", peers)
    report = kernels.run(args)
    rows = {(row["pass"], row["form"]): row for row in report.rows}
    forms = [*kernels.OURS, "one", "one, flawed", "other"]
    assert list(rows) == [(p, f) for p in kernels.PASSES for f in forms[:-1]] + [(p, "other") for p in kernels.PASSES]
    assert all(row.keys() == report.rows[0].keys() for row in report.rows)
    assert "Absent, and so not measured: other" in report.notes[-1]
    assert "benchmarks/requirements-peers.txt" in report.notes[-1]
    for title in kernels.PASSES:
        assert cell(rows[title, "other"]["ms"]) == "not measured"
        assert 0 < rows[title, "one"]["difference"] < 1e-5
        assert rows[title, "one, flawed"]["difference"] == pytest.approx(0.5, rel=1e-3)
        assert rows[title, "linear"]["time ÷ linear's"].samples == (1.0, 1.0)
        assert rows[title, "performer"]["time ÷ fewest products' at full speed"] == "—"
        assert rows[title, "linear"]["time ÷ its products', in cache"].median > 0
        assert rows[title, "one"]["time ÷ its products', in cache"] == "—"
        for form in forms[:-1]:
            assert rows[title, form]["ms"].median > 0
            assert rows[title, form]["peak, MiB"] > 0


def test_cpu_time_needs_the_cpu(args):
    args.cpu_time, args.device = True, torch.device("cuda")
    with pytest.raises(SystemExit, match="--cpu_time measures no cuda"):
        kernels.run(args)


def test_products_are_all_that_a_pass_performs_recomputation_included():
    """Multiplications by hand: the formulas of the forward and of the backward sweeps, chunk by chunk."""
    f, d = 8, 4
    q, k, v = (torch.rand(1, H, N, width, requires_grad=True) for width in (f, f, d))

    def both_ways():
        out = causal_linear_attention(q, k, v, torch.zeros(1, H, f, d), torch.zeros(1, H, f), chunk_size=C)[0]
        torch.autograd.grad(out.sum(), (q, k, v))

    products = kernels.Products(kernels._in_pytorch(both_ways))
    assert products.multiplications == multiplications(f, d, C)
    products()  # it runs
    assert len(products.operands) < len(products.calls)


def test_products_in_place_lie_where_the_operands_lay():
    q, k, v = (torch.rand(1, H, N, C) for _ in range(3))

    def forward():
        causal_linear_attention(q, k, v, torch.zeros(1, H, C, C), torch.zeros(1, H, C), chunk_size=C)

    products = kernels.Products(kernels._in_pytorch(forward), in_place=True)
    assert products.multiplications == multiplications(C, C, C, backward=False)
    values = products.operands[v.untyped_storage().data_ptr(), v.nbytes]
    assert values.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()
    of_values = [call.args[-1] for call in products.calls if call.args[-1].data_ptr() in _within(values)]
    chunks = [v[:, :, i : i + C] for i in range(0, N, C)]
    assert len(of_values) == 2 * len(chunks)  # times scores, and times k
    for operand, chunk in zip(of_values, [c for c in chunks for _ in range(2)], strict=True):
        assert operand.stride() == chunk[0].stride()
        assert operand.shape == chunk[0].shape
        assert operand.data_ptr() - values.data_ptr() == chunk.data_ptr() - v.data_ptr()
    products()
    assert torch.equal(values, torch.zeros_like(values))


def _within(t: torch.Tensor) -> range:
    return range(t.data_ptr(), t.data_ptr() + t.nbytes)


def multiplications(f: int, d: int, chunk: int, *, backward: bool = True) -> int:
    """Of the formulas of the forward and of the backward sweeps, chunk by chunk."""
    total = 0
    for c in [chunk] * (N // chunk) + [N % chunk]:
        total += c * c * f + c * c * d + 2 * c * f * d + c * f  # scores, times v, q S, kᵀv; q z
        if backward:
            total += 2 * c * f * d  # dq from S, S again
            total += c * c * (f + d) + c * c * (2 * f + d) + 3 * c * f * d + c * f  # scores again, their gradients; …
    return H * total


def test_the_limit_is_the_fewest_operations_at_the_speed_of_a_large_product(args, monkeypatch):
    monkeypatch.setattr(kernels, "PEERS", {})
    monkeypatch.setattr(kernels, "seconds_of", lambda function, device: 2.0 if function == "square" else 3.0)
    monkeypatch.setattr(kernels, "_square", lambda device: Square("square"))
    for row in kernels.run(args).rows:
        if row["form"] not in kernels.PERFORMER:
            fewest = multiplications(8, 8, min(kernels.CHUNKS), backward=row["pass"] != "forward")
            limit = 2.0 * fewest / kernels.SQUARE**3
            assert row["time ÷ fewest products' at full speed"].samples == pytest.approx((3.0 / limit,) * 2)


class Square(str):
    """Stands for the large product."""

    def __call__(self) -> None:
        """Take no time."""


@needs_kernels(kernels.linear_cpp_kernels)
def test_the_products_of_a_kernel_are_those_at_its_chunk_size(args):
    inputs = kernels._inputs(N, args, raw=False)
    own = kernels._at_its_chunk_size("linear", kernels._gradients, inputs, args)
    assert kernels.Products(own).multiplications == multiplications(8, 8, 16)
    assert kernels._at_its_chunk_size("linear, in PyTorch", kernels._gradients, inputs, args) is None


def test_in_pytorch_means_for_one_call(args, monkeypatch):
    asked = kernels._in_pytorch(lambda: kernels.os.environ.get(kernels.KERNELS))
    for before in (None, "c++"):
        monkeypatch.delenv(kernels.KERNELS, raising=False)
        if before:
            monkeypatch.setenv(kernels.KERNELS, before)
        assert asked() == "plain"
        assert kernels.os.environ.get(kernels.KERNELS) == before


@pytest.mark.parametrize(
    "results", [[torch.ones(3), torch.full((3,), torch.nan)], [torch.tensor([1, torch.nan, 1])] * 2]
)
def test_a_form_whose_numbers_are_not_finite_is_named(results):
    """Also where the first result is right."""
    with pytest.raises(ValueError, match="favor: the difference from linear is nan"):
        kernels._differences({"linear": [torch.ones(3)] * 2, "exact": [torch.ones(3)] * 2, "favor": results})
