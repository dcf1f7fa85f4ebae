"""How large the tensors are that a computation makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """Inside, `sizes` are the elements of all tensors that are made; views are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def large(self, least: int) -> list[int]:
        """Return those above `least`, sorted."""
        return sorted(size for size in self.sizes if size > least)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lit_effattn":  # an operator of our own, written in Python: what it makes counts too
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args)
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                self.sizes.append(t.untyped_storage().nbytes() // t.element_size())
        return out


class Largest(Made):
    """Inside, `elements` is the most elements of any tensor that was made."""

    @property
    def elements(self) -> int:
        return max(self.sizes, default=0)


def largest_in_training(function, *tensors: torch.Tensor) -> int:
    """Return the most elements of a tensor that `function(*tensors)` and its gradients make."""
    tensors = [t.requires_grad_() for t in tensors]
    with Largest() as largest:
        out = function(*tensors)
        torch.autograd.grad(out.sum(), tensors)
    return largest.elements
