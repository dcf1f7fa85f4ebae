"""Products of one row: the same numbers as in float64, and which products are replaced."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lit_effattn.generation import row_products

SHAPES = list(product((1, 3, 4, 7, 64), (1, 5, 8, 19, 75, 128)))
"""N, K: whole steps of four vectors, single vectors, and a rest that is shorter than a vector."""

needs_avx2 = pytest.mark.skipif(not row_products.options(), reason="the processor has no AVX2")


class Products(nn.Module):
    """x Wᵀ, x Wᵀ + b and x Wᵀ + c, with c (1, N), for matrices of all shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
        self.biases = nn.ParameterList(torch.randn(n) for n, _ in SHAPES)

    def forward(self, x: Tensor, c: Tensor) -> list[Tensor]:
        results: list[Tensor] = []
        for w, b in zip(self.weights, self.biases, strict=True):
            n, k = w.shape
            row = x[:, 1 : k + 1]  # not aligned
            results += [row @ w.T, torch.addmm(b, row, w.T), torch.addmm(c[:, :n], row, w.T)]
        return results


@pytest.mark.slow
@needs_avx2
def test_the_numbers_are_those_of_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    made, x, c = Products(), torch.randn(1, 130), torch.randn(1, 64)
    replaced: list[int] = []
    real = row_products.replace_products

    def counted(graph: torch.fx.Graph) -> None:
        real(graph)
        replaced.append(sum(n.target is torch.ops.lit_effattn.row_product.default for n in graph.nodes))

    monkeypatch.setattr(row_products, "replace_products", counted)
    with torch.no_grad():
        exported = torch.export.export(made, (x, c))
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "products.pt2"), inductor_configs=row_products.options()
        )
        results = torch._inductor.aoti_load_package(path)(x, c)
        expected = made.double()(x.double(), c.double())
    assert sum(replaced) >= 3 * sum(max(shape) > 16 for shape in SHAPES)  # inductor computes smaller ones itself
    assert len(results) == len(expected) == 3 * len(SHAPES)
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def _is_replaced(*arguments: Tensor, **options) -> bool:
    """Whether arguments[-2] @ arguments[-1].T, plus the first if there are three, is replaced. Check the result."""

    def compute(*tensors: Tensor) -> Tensor:
        x, w = tensors[-2:]
        transposed = torch.ops.aten.permute(w, [1, 0])
        return torch.addmm(tensors[0], x, transposed, **options) if len(tensors) == 3 else torch.mm(x, transposed)

    module = make_fx(compute, tracing_mode="fake")(*arguments)
    row_products.replace_products(module.graph)
    module.recompile()
    torch.testing.assert_close(module(*arguments), compute(*arguments))
    return any(n.target is torch.ops.lit_effattn.row_product.default for n in module.graph.nodes)


def test_products_of_one_row_of_float32_are_replaced():
    x, w, b = torch.randn(1, 5), torch.randn(3, 5), torch.randn(3)
    assert _is_replaced(x, w)
    assert _is_replaced(b, x, w)
    assert _is_replaced(b[None], x, w)
    assert _is_replaced(torch.randn(5, 4)[:, :1].T.contiguous(), w)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        pytest.param((torch.randn(2, 5), torch.randn(3, 5)), {}, id="two rows"),
        pytest.param((torch.randn(1, 5).double(), torch.randn(3, 5).double()), {}, id="float64"),
        pytest.param((torch.randn(1, 5).bfloat16(), torch.randn(3, 5).bfloat16()), {}, id="bfloat16"),
        pytest.param((torch.randn(1, 5), torch.randn(5, 3).T), {}, id="columns"),
        pytest.param((torch.randn(1, 5), torch.randn(3, 7)[:, :5]), {}, id="a part of a matrix"),
        pytest.param((torch.randn(1, 10)[:, ::2], torch.randn(3, 5)), {}, id="every second number"),
        pytest.param((torch.randn(1), torch.randn(1, 5), torch.randn(3, 5)), {}, id="one bias for all"),
        pytest.param((torch.randn(6)[::2], torch.randn(1, 5), torch.randn(3, 5)), {}, id="every second bias"),
        pytest.param((torch.randn(3), torch.randn(1, 5), torch.randn(3, 5)), {"beta": 2}, id="a factor"),
    ],
)
def test_other_products_are_not_replaced(arguments: tuple[Tensor, ...], options: dict[str, int]):
    assert not _is_replaced(*arguments, **options)


def test_other_processors_have_no_function(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not row_products.options()
