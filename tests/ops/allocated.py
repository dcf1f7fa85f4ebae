"""How large the tensors are that a computation makes."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Inside, `elements` is the most elements of any tensor that was made; views are not made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return out


def largest_in_training(function, *tensors: torch.Tensor) -> int:
    """Return the most elements of a tensor that `function(*tensors)` and its gradients make."""
    tensors = [t.requires_grad_() for t in tensors]
    with Largest() as largest:
        out = function(*tensors)
        torch.autograd.grad(out.sum(), tensors)
    return largest.elements
