"""Operations on the tensors in a state of any class: tuples, lists, dictionaries and objects, nested."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor of `tree` once, in a fixed order."""
    collected: dict[int, Tensor] = {}

    def collect(t: Tensor) -> Tensor:
        collected.setdefault(id(t), t)
        return t

    map_tensors(collect, tree)
    return iter(collected.values())


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a copy of `tree` with `function` applied to every tensor; what occurs twice stays one object."""
    return _mapped(function, tree, {})


def _mapped(function: Callable[[Tensor], Tensor], tree: Any, done: dict[int, Any]) -> Any:
    if tree is None or isinstance(tree, (bool, int, float, complex, str, bytes, type, nn.Module)):
        return tree
    if id(tree) in done:
        return done[id(tree)]
    result: Any
    if isinstance(tree, Tensor):
        result = done[id(tree)] = function(tree)
    elif isinstance(tree, tuple):
        parts = [_mapped(function, part, done) for part in tree]
        result = type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    elif isinstance(tree, list):
        result = done[id(tree)] = copy.copy(tree)
        result[:] = [_mapped(function, part, done) for part in tree]
    elif isinstance(tree, dict):
        result = done[id(tree)] = copy.copy(tree)
        result.update({key: _mapped(function, value, done) for key, value in tree.items()})
    elif hasattr(tree, "__dict__") and not callable(tree) and type(tree).__module__ != "torch":
        result = done[id(tree)] = copy.copy(tree)
        vars(result).update({key: _mapped(function, value, done) for key, value in vars(tree).items()})
    else:
        result = tree
    return result


def clone(tree: Any) -> Any:
    """Copy every tensor of `tree`, in the autograd graph."""
    return map_tensors(Tensor.clone, tree)


def detach(tree: Any) -> Any:
    """Detach every tensor of `tree`."""
    return map_tensors(Tensor.detach, tree)


def select(tree: Any, rows: Tensor, dim: int = 0) -> Any:
    """Return the rows of `tree` with the indices `rows`, along the dimension `dim` of every tensor that has it."""
    return map_tensors(lambda t: t.index_select(dim, rows.to(t.device)) if t.dim() > dim else t, tree)


def nbytes(tree: Any) -> int:
    """Count the bytes of all tensors of `tree`."""
    return sum(t.numel() * t.element_size() for t in tensors(tree))


def same(a: Any, b: Any) -> bool:
    """Return whether two trees have the same class and tensors that are equal to the bit, NaN included."""
    first, second = list(tensors(a)), list(tensors(b))
    return (
        type(a) is type(b)
        and len(first) == len(second)
        and all(_equal(s, t) for s, t in zip(first, second, strict=True))
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
