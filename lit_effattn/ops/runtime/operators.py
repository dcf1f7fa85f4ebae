"""Operators of our own: whole to whoever looks at operators, and called straight where nobody does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


class Operator:
    """`lit_effattn::name` and `lit_effattn::name_backward`, its gradients by hand; they have none themselves.

    Compilers, modes and tracers see them as they see PyTorch's own. Nobody looks where a model simply runs: there, on
    the CPU, PyTorch's dispatcher is passed by, whose part in Python takes as long as a short sequence.

    Args:
        name: What it is called.
        signature: Its arguments and results, as `torch.library.define` takes them.
        signature_of_backward: Those of its gradients.
        forward: It, on the CPU.
        backward: Its gradients, on the CPU.
        keep: Takes autograd's context, the arguments and the results, and keeps what `gradients` needs.
        gradients: Takes autograd's context and the results' gradients, calls `self.backward` and returns the
            arguments' gradients.
        refusal: What is said where the gradients are to be differentiated.
    """

    def __init__(
        self,
        name: str,
        signature: str,
        signature_of_backward: str,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        *,
        keep: Callable[[Any, tuple[Any, ...], Any], None],
        gradients: Callable[..., tuple[Tensor | None, ...]],
        refusal: str,
    ) -> None:
        whole = f"lit_effattn::{name}"
        of_backward = f"{whole}_backward"
        torch.library.define(whole, signature)
        torch.library.define(of_backward, signature_of_backward)
        torch.library.impl(whole, "cpu", forward)
        torch.library.impl(of_backward, "cpu", backward)
        torch.library.register_autograd(whole, gradients, setup_context=keep)
        torch.library.register_autograd(of_backward, _refusing(refusal))
        self._forward = getattr(torch.ops.lit_effattn, name).default
        self._backward = getattr(torch.ops.lit_effattn, f"{name}_backward").default
        self._backward_on_cpu = backward

        def apply(ctx: Any, *inputs: Any) -> Any:
            found = forward(*inputs)
            keep(ctx, inputs, found)
            return found

        parts = {"forward": staticmethod(apply), "backward": staticmethod(gradients)}
        self._straight: Any = type(name, (torch.autograd.Function,), parts)

    def __call__(self, *inputs: Any) -> Any:
        """Return the results."""
        return self._forward(*inputs) if _watched(inputs) else self._straight.apply(*inputs)

    def backward(self, *inputs: Any) -> Any:
        """Return the gradients, of all that its signature names."""
        if torch.is_grad_enabled() or _watched(inputs):  # they may be differentiated: the operator says that it can't
            return self._backward(*inputs)
        return self._backward_on_cpu(*inputs)


def _watched(inputs: tuple[Any, ...]) -> bool:
    """Whether the dispatcher has to see the operator: others look, or it knows the device and what it calls there."""
    if torch.compiler.is_compiling() or inputs[0].device.type != "cpu":
        return True
    if any(isinstance(t, Tensor) and type(t) not in _PLAIN for t in inputs):
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch.jit.is_tracing()


def _refusing(refusal: str) -> Callable[..., Any]:
    def refuse(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError(refusal)

    return refuse
