"""Checks of a checkpoint's content before anything reads it.

A file that loads with `weights_only=True` can still hold a tensor that claims a terabyte, or a list that contains
itself.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MAX_DEPTH = 100  # depth of containers within containers
MAX_ITEMS = 10_000_000  # number of items of all containers, each counted as often as it is reached

_SLACK = 2**20  # bytes


def kind(value: Any) -> str:
    """Describe a value in a message."""
    if value is None or isinstance(value, (bool, int, float)):
        return str(value) if not isinstance(value, int) or abs(value) < 10**20 else "an integer beyond 10**20"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, (dict, list, tuple)):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    return f"a {type(value).__name__}"


def _dimensions(value: Any) -> str:
    """Describe the shape of a tensor in a message; None: there is no such tensor."""
    return "absent" if value is None else "×".join(map(str, value.shape)) or "a number"


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the names of tensors that have other shapes in `b` than in `a`, or are absent in one, and both shapes."""
    shapes = ((name, _dimensions(a.get(name)), _dimensions(b.get(name))) for name in dict.fromkeys([*a, *b]))
    return [(name, of_a, of_b) for name, of_a, of_b in shapes if of_a != of_b]


def wrong(where: str, value: Any, expected: str) -> ValueError:
    """Return the error for a part that is not of the expected kind."""
    return ValueError(f"{where} is {kind(value)}, not {expected}")


def check_plain(content: Any) -> None:
    """Check that content can be traversed, and that its tensors have as many values in memory as they claim.

    Raises:
        ValueError: If a container is nested more than `MAX_DEPTH` deep or contains itself; if there are more than
            `MAX_ITEMS` items, counted as often as they are reached; or if a tensor repeats its values, is sparse or
            quantised.
    """
    sizes: dict[int, int] = {}  # of finished containers
    open_: set[int] = set()
    stack: list[tuple[Any, bool]] = [(content, False)]
    while stack:
        value, done = stack.pop()
        if isinstance(value, Tensor):
            _check_tensor(value)
            continue
        if not isinstance(value, (dict, list, tuple, set, frozenset)) or id(value) in sizes:
            continue
        items = [*value, *value.values()] if isinstance(value, dict) else list(value)
        if done:
            sizes[id(value)] = 1 + sum(sizes.get(id(item), 1) for item in items)
            open_.discard(id(value))
            if sizes[id(value)] > MAX_ITEMS:
                raise ValueError(f"it holds more than {MAX_ITEMS:,} items, some of them many times")
            continue
        if id(value) in open_:
            raise ValueError("a part of it contains itself")
        if len(open_) >= MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        open_.add(id(value))
        stack.append((value, True))
        stack.extend((item, False) for item in items)


def _check_tensor(t: Tensor) -> None:
    if t.layout != torch.strided or t.is_quantized or t.is_nested:
        raise ValueError(f"a tensor of shape {tuple(t.shape)} is sparse, quantised or nested")
    # A stride of 0 claims any number of elements; a parameter never has one, a small buffer may.
    if t.device.type != "meta" and t.numel() * t.element_size() > t.untyped_storage().nbytes() + _SLACK:
        raise ValueError(f"a tensor of shape {tuple(t.shape)} repeats {t.untyped_storage().nbytes():,} bytes")


def check_weights(weights: Any) -> None:
    """Check that the weights of a checkpoint are tensors with names.

    Raises:
        ValueError: If a part has another structure. The message names the part, its value and the expected structure.
    """
    if not isinstance(weights, dict):
        raise wrong("state_dict", weights, "a mapping of names to tensors")
    for name, value in weights.items():
        if not isinstance(name, str):
            raise wrong("a name in state_dict", name, "text")
        if not isinstance(value, Tensor):
            raise wrong(f"state_dict[{name[:80]!r}]", value, "a tensor")
