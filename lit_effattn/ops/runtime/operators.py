"""Custom operators with hand-written gradients, called directly on the CPU in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lit_effattn.ops.runtime.selection import interpreted, on_device

_PLAIN = (Tensor, torch.nn.Parameter)

_kept = False


@contextmanager
def kept() -> Iterator[None]:
    """Within the context, programs of `torch.export` keep the operators for which ONNX has one too.

    Otherwise they consist of PyTorch's own operators, which any program can run.
    """
    global _kept
    before, _kept = _kept, True
    try:
        yield
    finally:
        _kept = before


def keeps() -> bool:
    """Return whether a program is being exported that keeps its operators: see `kept`."""
    return _kept and torch.compiler.is_exporting()


class Operator:
    """The operators `lit_effattn::name` and `lit_effattn::name_backward`, its gradients, which have no gradients.

    `torch.compile`, dispatch modes and tracers see them like PyTorch's own operators. In eager mode on the CPU they are
    called without PyTorch's dispatcher, whose Python overhead is as large as the cost of a short sequence.

    Args:
        name: Name of the operator.
        signature: Its arguments and results, as in `torch.library.define`.
        signature_of_backward: Arguments and results of its gradients.
        forward: Its implementation on the CPU.
        backward: The implementation of its gradients on the CPU.
        shapes: Allocates its results, of the right shapes and layouts, without computing them.
        backward_shapes: The same for its gradients.
        keep: Takes autograd's context, the arguments and the results, and saves the inputs of `gradients`.
        gradients: Takes autograd's context and the results' gradients, calls `self.backward` and returns the
            arguments' gradients.
        refusal: Error message if the gradients are differentiated.
        triton: Module whose `forward` and `backward` are the implementations on CUDA, and on the CPU where Triton's
            interpreter was asked for. Imported when needed, since Triton is slow to import and optional.
    """

    def __init__(
        self,
        name: str,
        signature: str,
        signature_of_backward: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        *,
        shapes: Callable[..., Any],
        backward_shapes: Callable[..., Any],
        keep: Callable[[Any, tuple[Any, ...], Any], None],
        gradients: Callable[..., tuple[Tensor | None, ...]],
        refusal: str,
        triton: str | None = None,
    ) -> None:
        whole = f"lit_effattn::{name}"
        of_backward = f"{whole}_backward"
        torch.library.define(whole, signature)
        torch.library.define(of_backward, signature_of_backward)
        if triton is not None:
            forward = _with_triton(whole, triton, "forward", forward)
            backward = _with_triton(of_backward, triton, "backward", backward)
        torch.library.impl(whole, "cpu", forward)
        torch.library.impl(of_backward, "cpu", backward)
        torch.library.register_fake(whole, shapes)
        torch.library.register_fake(of_backward, backward_shapes)
        torch.library.register_autograd(whole, gradients, setup_context=keep)
        torch.library.register_autograd(of_backward, _refusing(refusal))
        self._forward = getattr(torch.ops.lit_effattn, name).default
        self._backward = getattr(torch.ops.lit_effattn, f"{name}_backward").default
        self._backward_on_cpu = backward

        def apply(ctx: Any, *inputs: Any) -> Any:
            result = forward(*inputs)
            keep(ctx, inputs, result)
            return result

        parts = {"forward": staticmethod(apply), "backward": staticmethod(gradients)}
        self._straight: Any = type(name, (torch.autograd.Function,), parts)

    def __call__(self, *inputs: Any) -> Any:
        """Apply the operator, with autograd."""
        return self._forward(*inputs) if _watched(inputs) else self._straight.apply(*inputs)

    def backward(self, *inputs: Any) -> Any:
        """Return the gradients, the results of `signature_of_backward`."""
        if torch.is_grad_enabled() or _watched(inputs):  # the operator raises the error if they are differentiated
            return self._backward(*inputs)
        return self._backward_on_cpu(*inputs)


def _with_triton(operator: str, module: str, name: str, on_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """Implement `operator` on CUDA by the function `name` of `module`; return its implementation on the CPU."""

    def in_triton(first: Tensor, *arguments: Any) -> Any:
        with on_device(first):
            return getattr(import_module(module), name)(first, *arguments)

    torch.library.impl(operator, "cuda", in_triton)
    return lambda *arguments: (in_triton if interpreted() else on_cpu)(*arguments)


def _watched(inputs: tuple[Any, ...]) -> bool:
    """Return whether to call the dispatcher: in compilation, tracing or a dispatch mode, or on another device."""
    if torch.compiler.is_compiling() or inputs[0].device.type != "cpu":
        return True
    if any(isinstance(t, Tensor) and type(t) not in _PLAIN for t in inputs):
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch.jit.is_tracing()


def _refusing(refusal: str) -> Callable[..., Any]:
    def refuse(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError(refusal)

    return refuse
