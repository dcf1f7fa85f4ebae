"""Custom operators: the same in eager mode, in modes, in tracing and in compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from lit_effattn.ops.runtime.selection import Operator


def _forward(x: Tensor, power: int) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(x.numpy() ** power), torch.zeros_like(x)  # NumPy: nobody can look inside


def _backward(g: Tensor, x: Tensor, power: int) -> Tensor:
    return torch.from_numpy(g.numpy() * power * x.numpy() ** (power - 1))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.power = inputs
    ctx.save_for_backward(x)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, None]:
    return POWER.backward(g, *ctx.saved_tensors, ctx.power), None


POWER = Operator(
    "test_power",
    "(Tensor x, int power) -> (Tensor, Tensor)",
    "(Tensor g, Tensor x, int power) -> Tensor",
    _forward,
    _backward,
    shapes=lambda x, power: (torch.empty_like(x), torch.empty_like(x)),
    backward_shapes=lambda g, x, power: torch.empty_like(x),
    keep=_keep,
    gradients=_gradients,
    refusal="a power has no second derivative here",
)


def cube(x: Tensor) -> Tensor:
    y, nothing = POWER(x, 3)
    assert not nothing.requires_grad
    return y


class Seen(TorchDispatchMode):
    """Which operators of ours PyTorch's dispatcher was given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "lit_effattn":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_its_results_and_gradients():
    x = torch.tensor([2.0, -3.0], requires_grad=True)
    y = cube(x)
    y.backward(torch.tensor([1.0, 10.0]))
    assert y.tolist() == [8, -27]
    assert x.grad is not None
    assert x.grad.tolist() == [3 * 4, 10 * 3 * 9]
    with torch.no_grad():
        assert not cube(x).requires_grad


def test_a_mode_sees_it_whole():
    x = torch.tensor([2.0], requires_grad=True)
    with Seen() as seen:
        (g,) = torch.autograd.grad(cube(x).sum(), x)
    assert g.tolist() == [12]
    assert seen.names == ["test_power", "test_power_backward"]


def test_tensors_without_numbers_get_its_shapes():
    with FakeTensorMode() as mode:
        x = torch.empty(2, 5, requires_grad=True)
        y = cube(x)
        (g,) = torch.autograd.grad(y.sum(), x)
        assert y.shape == g.shape == (2, 5)
    assert cube(mode.from_tensor(torch.ones(3))).shape == (3,)  # outside of the mode, too


def test_a_traced_graph_has_it():
    x = torch.tensor([2.0, -3.0])
    graph = make_fx(lambda x: cube(x))(x)
    assert any("test_power" in str(node.target) for node in graph.graph.nodes)
    assert graph(x + 1).tolist() == [27, -8]
    with pytest.warns(FutureWarning, match="deprecated"):
        traced = torch.jit.trace(cube, x)
    assert traced(x + 1).tolist() == [27, -8]


def test_a_compiled_function_has_it_and_nothing_breaks_the_graph():
    x = torch.tensor([2.0, -3.0], requires_grad=True)
    y = torch.compile(cube, fullgraph=True, backend="aot_eager")(x)
    y.sum().backward()
    assert y.tolist() == [8, -27]
    assert x.grad is not None
    assert x.grad.tolist() == [12, 27]


def test_a_second_derivative_is_refused():
    x = torch.tensor([2.0], requires_grad=True)
    (g,) = torch.autograd.grad(cube(x).sum(), x, create_graph=True)
    assert g.tolist() == [12]
    with pytest.raises(NotImplementedError, match="a power has no second derivative here"):
        g.sum().backward()
