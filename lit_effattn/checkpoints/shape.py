"""Checks of the structure of a checkpoint's content, before Lightning and the optimisers, which trust it, read it.

A file that loads with `weights_only=True` can still hold a number in place of a mapping, a tensor that claims a
terabyte, or a list that contains itself. `check_plain` rejects content that a checkpoint never has; `check_contents`
checks the parts that all models share; `check_like` compares a part with the state of the new object that loads it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
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
    """Check the states that `RandomStates` saves: one mapping for each process."""
    if not isinstance(states, (list, tuple)):
        raise wrong("random_states", states, "a list with the states of each process")
    size_here = torch.get_rng_state().shape
    for rank, state in enumerate(states):
        where = f"random_states[{rank}]"
        if not isinstance(state, dict):
            raise wrong(where, state, "a mapping")
        _python_state(state.get("python"), f"{where}.python")
        _numpy_state(state.get("numpy"), f"{where}.numpy")
        for name in {"torch", *(state.keys() & {"cuda"})}:
            value = state.get(name)
            size = size_here if name == "torch" else None
            if not isinstance(value, Tensor) or value.dtype != torch.uint8 or (size and value.shape != size):
                raise wrong(f"{where}.{name}", value, "the bytes of a random state")


def _python_state(state: Any, where: str) -> None:
    expected = "the state of Python's generator"
    if not isinstance(state, (list, tuple)) or len(state) != 3:
        raise wrong(where, state, expected)
    version, internal, gauss = state
    if not isinstance(version, int) or version != 3:
        raise wrong(f"{where}[0]", version, "3")
    if not isinstance(internal, (list, tuple)) or len(internal) != 625:
        raise wrong(f"{where}[1]", internal, expected)
    for i, word in enumerate(internal):
        if not _is_integer(word, 0, 2**32 - 1):
            raise wrong(f"{where}[1][{i}]", word, "an integer of 32 bits")
    if not 1 <= internal[-1] <= 624:
        raise wrong(f"{where}[1][624]", internal[-1], "a position up to 624")
    if gauss is not None and not isinstance(gauss, float):
        raise wrong(f"{where}[2]", gauss, "a number or None")


def _numpy_state(state: Any, where: str) -> None:
    if not isinstance(state, (list, tuple)) or len(state) != 5:
        raise wrong(where, state, "the state of NumPy's generator")
    name, keys, position, has_gauss, cached = state
    if name != "MT19937":
        raise wrong(f"{where}[0]", name, "'MT19937'")
    if not isinstance(keys, Tensor) or keys.shape != (624,) or keys.dtype != torch.int64:
        raise wrong(f"{where}[1]", keys, "624 integers")
    if not _is_integer(position, 0, 624):
        raise wrong(f"{where}[2]", position, "a position up to 624")
    if not _is_integer(has_gauss, 0, 1):
        raise wrong(f"{where}[3]", has_gauss, "0 or 1")
    if not _number(cached) or not math.isfinite(cached):
        raise wrong(f"{where}[4]", cached, "a number")


# ------------------------------------------------------------------------------------ compared with new objects' states


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _score(value: Any) -> bool:
    return _number(value) or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())


def _scores(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(path, str) and _score(score) for path, score in value.items())


UNSET: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "best_model_score": (lambda v: v is None or _score(v), "a number or None"),
    "current_score": (lambda v: v is None or _score(v), "a number or None"),
    "best_k_models": (_scores, "a mapping of paths to numbers"),
    "stopping_reason_message": (lambda v: v is None or isinstance(v, str), "text or None"),
    "total_steps": (lambda v: v is None or _number(v), "a number or None"),
    "foreach": (lambda v: v is None or isinstance(v, bool), "true, false or None"),
    "fused": (lambda v: v is None or isinstance(v, bool), "true, false or None"),
}
"""Entries that are empty in a new callback, schedule or optimiser: the check of their later values, described."""

NUMBERS = ("lr", "step")
"""Entries of optimisers that are a tensor or a number, which depends on the options and on torch's version."""


def check_like(saved: Any, new: Any, where: str, *, exact: bool = False) -> None:
    """Check that a saved state has the structure of a new object's state.

    A mapping must have all names of the new one, with values like its; a list, if the new one is not empty, as many
    items; a tensor its shape; a number must be a number. A value that is empty in the new object is checked by `UNSET`
    if that has its name; otherwise it may be anything.

    Args:
        saved: The state in a checkpoint.
        new: The `state_dict()` of the object that is to load it.
        where: The name of the state, for messages.
        exact: Whether a mapping must not have other names.

    Raises:
        ValueError: If a part has another structure. The message names the part, its value and the expected structure.
    """
    name = where.rpartition(".")[2]
    if name in UNSET and (new is None or new == {}):
        suits, expected = UNSET[name]
        if not suits(saved):
            raise wrong(where, saved, expected)
    elif isinstance(new, Mapping):
        _check_mapping(saved, new, where, exact)
    elif isinstance(new, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or (new and len(saved) != len(new)):
            raise wrong(where, saved, f"a list of {len(new)}" if new else "a list")
        for i, item in enumerate(new):
            check_like(saved[i], item, f"{where}[{i}]", exact=exact)
    elif isinstance(new, Tensor):
        same = isinstance(saved, Tensor) and saved.shape == new.shape
        scalar = new.ndim == 0 and _score(saved) and (isinstance(saved, Tensor) or name in NUMBERS)
        if not same and not scalar:
            raise wrong(where, saved, f"a tensor of shape {tuple(new.shape)}")
    elif isinstance(new, bool):
        if not isinstance(saved, bool):
            raise wrong(where, saved, "true or false")
    elif isinstance(new, (int, float)):
        if not _score(saved) or (isinstance(new, int) and not math.isfinite(saved)):
            raise wrong(where, saved, "a number")
    elif isinstance(new, str) and not (saved is None or isinstance(saved, str)):
        raise wrong(where, saved, "text")


def _check_mapping(saved: Any, new: Mapping[Any, Any], where: str, exact: bool) -> None:
    if not isinstance(saved, dict):
        raise wrong(where, saved, "a mapping")
    missing = [name for name in new if name not in saved]
    if missing:
        raise ValueError(f"{where} has no {_short(missing[0])}")
    unknown = [name for name in saved if name not in new]
    if exact and unknown:
        raise ValueError(f"{where} has {_short(unknown[0])}, which is not known")
    for name, value in new.items():
        check_like(saved[name], value, f"{where}.{name}", exact=exact)


def check_counts(saved: Any, where: str) -> None:
    """Check that all integers in a state of loops are counts, which are not negative.

    Raises:
        ValueError: If one is not. The message names the first.
    """
    if isinstance(saved, dict):
        for name, value in saved.items():
            check_counts(value, f"{where}.{name}")
    elif isinstance(saved, list):
        for i, value in enumerate(saved):
            check_counts(value, f"{where}[{i}]")
    elif not isinstance(saved, bool):
        _count(saved, where)
