"""Custom operators with hand-written gradients."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lit_effattn.ops.runtime.selection import on_device


class Operator:
    """The operators `lit_effattn::name` and `lit_effattn::name_backward`, its gradients, which have no gradients.

    `torch.compile`, dispatch modes and tracers see them like PyTorch's own operators.

    Args:
        name: Name of the operator.
        signature: Its arguments and results, as in `torch.library.define`.
        signature_of_backward: Arguments and results of its gradients.
        forward: Its implementation.
        backward: The implementation of its gradients.
        shapes: Allocates its results, of the right shapes and layouts, without computing them.
        backward_shapes: The same for its gradients.
        keep: Takes autograd's context, the arguments and the results, and saves the inputs of `gradients`.
        gradients: Takes autograd's context and the results' gradients, calls `self.backward` and returns the
            arguments' gradients.
        refusal: Error message if the gradients are differentiated.
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
    ) -> None:
        whole = f"lit_effattn::{name}"
        of_backward = f"{whole}_backward"
        # torch.library.custom_op does the same with more Python for each call.
        torch.library.define(whole, signature)
        torch.library.define(of_backward, signature_of_backward)
        torch.library.impl(whole, ("cpu", "cuda"), forward)
        torch.library.impl(of_backward, ("cpu", "cuda"), backward)
        torch.library.register_fake(whole, shapes)
        torch.library.register_fake(of_backward, backward_shapes)
        torch.library.register_autograd(whole, gradients, setup_context=keep)
        torch.library.register_autograd(of_backward, _refusing(refusal))
        self._forward = getattr(torch.ops.lit_effattn, name).default
        self.backward = getattr(torch.ops.lit_effattn, f"{name}_backward").default

    def __call__(self, *inputs: Any) -> Any:
        """Apply the operator, with autograd."""
        return self._forward(*inputs)


def in_form(package: str, name: str) -> Callable[..., Any]:
    """Return an implementation whose last argument is the form: the function `name` of `package`.{form}_kernels.

    The module is imported when it is needed, since Triton is slow to import and optional.
    """

    def call(first: Tensor, *arguments: Any) -> Any:
        *inputs, form = arguments
        with on_device(first):
            return getattr(import_module(f"{package}.{form}_kernels"), name)(first, *inputs)

    return call


def _refusing(refusal: str) -> Callable[..., Any]:
    def refuse(ctx: Any, *gradients: Tensor) -> None:
        raise NotImplementedError(refusal)

    return refuse
