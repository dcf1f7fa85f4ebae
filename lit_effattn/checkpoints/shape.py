"""Checks of the structure of a checkpoint's content, before Lightning and the optimisers, which trust it, read it.

A file that loads with `weights_only=True` can still hold a number in place of a mapping, a tensor that claims a
terabyte, or a list that contains itself. `check_plain` rejects content that a checkpoint never has; `check_contents`
checks the parts that all models share; `check_like` compares a part with the state of the new object that loads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MAX_DEPTH = 100
"""Depth of containers within containers."""

MAX_ITEMS = 10_000_000
"""Number of items of all containers, each counted as often as it is reached."""

_MAX_COUNT = 2**53 - 1
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


def dimensions(value: Any) -> str:
    """Describe the shape of a tensor in a message; None: there is no such tensor."""
    return "absent" if value is None else "×".join(map(str, value.shape)) or "a number"


def wrong(where: str, value: Any, expected: str) -> ValueError:
    """Return the error for a part that is not of the expected kind.

    Args:
        where: The name of the part.
        value: Its value.
        expected: Describes the expected value.
    """
    return ValueError(f"{where} is {kind(value)}, not {expected}")


def _is_integer(value: Any, low: int, high: int) -> bool:
    """Return whether a value is an integer, not a boolean, from `low` to `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


# ------------------------------------------------------------------------------------------------------- any content


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


# --------------------------------------------------------------------------------------------------- every checkpoint


def check_contents(checkpoint: dict[str, Any]) -> None:
    """Check the parts of a checkpoint that all models and trainers share.

    Raises:
        ValueError: If a part has another structure. The message names the part, its value and the expected structure.
    """
    for name in checkpoint:
        if not isinstance(name, str):
            raise wrong("the name of a part", name, "text")
    _check_weights(checkpoint["state_dict"])
    for name in ("epoch", "global_step"):
        if name in checkpoint:
            _count(checkpoint[name], name)
    version = checkpoint.get("pytorch-lightning_version", "0.0.0")
    if not isinstance(version, str) or not re.fullmatch(r"\d{1,6}(\.\d{1,6}){1,3}([.+-]?\w{1,40}){0,3}", version):
        raise wrong("pytorch-lightning_version", version, "a version such as 2.6.0")
    for name, container in (("callbacks", dict), ("loops", dict), ("optimizer_states", list), ("lr_schedulers", list)):
        if name in checkpoint:
            _states(checkpoint[name], container, name)
    if checkpoint.get("random_states") is not None:
        _check_random_states(checkpoint["random_states"])


def _check_weights(weights: Any) -> None:
    if not isinstance(weights, dict):
        raise wrong("state_dict", weights, "a mapping of names to tensors")
    for name, value in weights.items():
        if not isinstance(name, str):
            raise wrong("a name in state_dict", name, "text")
        if not isinstance(value, Tensor):
            raise wrong(f"state_dict[{name[:80]!r}]", value, "a tensor")


def _states(states: Any, container: type[Any], where: str) -> None:
    if not isinstance(states, container):
        raise wrong(where, states, "a mapping of names to mappings" if container is dict else "a list of mappings")
    items: Any = states.items() if isinstance(states, dict) else enumerate(states)
    for name, state in items:
        if isinstance(states, dict) and not isinstance(name, str):
            raise wrong(f"a name in {where}", name, "text")
        if not isinstance(state, dict):
            raise wrong(f"{where}[{_short(name)}]", state, "a mapping")


def _count(value: Any, where: str) -> None:
    if not _is_integer(value, 0, _MAX_COUNT):
        raise wrong(where, value, "a count")


def _short(name: Any) -> str:
    text = repr(name)
    return text if len(text) <= 60 else f"{text[:57]}…{text[0]}"


# ------------------------------------------------------------------------------------------------------ random states


def _check_random_states(states: Any) -> None:
    """Check the states that `RandomStates` saves: one mapping for each process. Python and torch check theirs."""
    if not isinstance(states, (list, tuple)):
        raise wrong("random_states", states, "a list with the states of each process")
    for rank, state in enumerate(states):
        where = f"random_states[{rank}]"
        if not isinstance(state, dict):
            raise wrong(where, state, "a mapping")
        numpy = state.get("numpy")
        # NumPy would read outside of its memory at a position beyond the words of the generator.
        if not isinstance(numpy, (list, tuple)) or len(numpy) != 5 or not _is_integer(numpy[2], 0, 624):
            raise wrong(f"{where}.numpy", numpy, "the state of NumPy's generator, with a position up to 624")


# ------------------------------------------------------------------------------------ compared with new objects' states


def check_like(saved: Any, new: Any, where: str) -> None:
    """Check that a saved state has the names, sizes and numbers of a new object's state.

    Args:
        saved: The state in a checkpoint.
        new: The `state_dict()` of the object that is to load it. A mapping may lack names of the saved one, values that
            are None may be anything, and a list may have another length.
        where: The name of the state, for messages.

    Raises:
        ValueError: If a part differs. The message names the part, its value and the expected structure.
    """
    if isinstance(new, Mapping):
        if not isinstance(saved, dict):
            raise wrong(where, saved, "a mapping")
        for name, value in new.items():
            if name not in saved:
                raise ValueError(f"{where} has no {_short(name)}")
            check_like(saved[name], value, f"{where}.{name}")
    elif isinstance(new, Tensor):
        if not isinstance(saved, Tensor) or saved.shape != new.shape:
            raise wrong(where, saved, f"a tensor of shape {tuple(new.shape)}")
    elif isinstance(new, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or (isinstance(new, tuple) and len(saved) != len(new)):
            raise wrong(where, saved, f"a list of {len(new)}")
        for i, value in enumerate(saved if new else ()):
            check_like(value, new[min(i, len(new) - 1)], f"{where}[{i}]")
    elif isinstance(new, (int, float)) and not isinstance(saved, (int, float)) and getattr(saved, "ndim", 1) > 0:
        raise wrong(where, saved, "a number")


def check_counts(saved: Any, where: str) -> None:
    """Check that all integers in a state of loops are counts, which are not negative.

    Raises:
        ValueError: If one is not. The message names the first.
    """
    if isinstance(saved, dict):
        for name, value in saved.items():
            check_counts(value, f"{where}.{name}")
    elif not isinstance(saved, bool):
        _count(saved, where)
