"""Files of states: where a generated sequence stops, for a later process to go on from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_effattn.checkpoints.files import DamagedError, whole
from lit_effattn.generation import Kept
from lit_effattn.sequence import SequenceModule, State

_METADATA = "lit_effattn_state"
_TOKENS = "tokens"


def save_state(kept: Kept, path: Path, model: nn.Module, backbone: SequenceModule) -> None:
    """Write a file that `load_state` reads: tensors in the safetensors format, and a few numbers as JSON.

    Args:
        kept: The state and the tokens that it has not read.
        path: The file. An earlier one of this function is replaced, at once and as a whole.
        model: The model whose state it is. The file holds its fingerprint, not its weights.
        backbone: The module of `model` whose state it is.

    Raises:
        FileExistsError: If there is a file that is not a state.
    """
    from safetensors.torch import save_file

    check_replaceable(path)
    leaves = {_TOKENS: kept.tokens, **dict(_leaves(kept.state))}
    leaves = {name: t.detach().cpu().contiguous().clone() for name, t in leaves.items()}
    about = {"drawn": kept.drawn, "model": fingerprint(model), "sum": _digest(leaves), "sizes": _sizes(backbone)}
    with whole(path) as part:
        part.touch()
        mode = part.stat().st_mode  # safetensors lets the owner alone read its files
        save_file(leaves, part, {_METADATA: json.dumps(about)})
        part.chmod(mode)


def load_state(path: Path, model: nn.Module, backbone: SequenceModule) -> Kept:
    """Read a file of `save_state` as data, to the device of `model`.

    Args:
        path: The file.
        model: The model with the weights of the one that wrote the file.
        backbone: The module of `model` whose state it is, with the same options of evaluation.

    Raises:
        DamagedError: If the file is damaged, or not a saved state.
        ValueError: If it is the state of another model, or of another size.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    about = _about(path)
    try:
        leaves = load_file(path)
    except (SafetensorError, ValueError) as error:
        raise DamagedError(f"{path} can't be read as a state: {error}") from error
    if about is None or about.keys() != {"drawn", "model", "sum", "sizes"} or _TOKENS not in leaves:
        raise DamagedError(f"{path} is not a saved state: `lit-effattn generate --save_state` writes them")
    if about["sum"] != _digest(leaves) or type(about["drawn"]) is not int:
        raise DamagedError(f"{path} is damaged: its checksum differs")
    if about["model"] != fingerprint(model):
        raise ValueError(f"{path} is the state of a model with other weights; give the checkpoint that wrote it")
    device = next(model.parameters()).device
    leaves = {name: t.to(device) for name, t in leaves.items()}
    tokens = leaves.pop(_TOKENS)
    empty = backbone.initial_state(len(tokens), max_len=1, device=torch.device("meta"))
    if about["sizes"] != _sizes(backbone) or dict(_leaves(empty)).keys() != leaves.keys():
        raise ValueError(f"{path} is a state of other sizes: give the options of memory with which it was written")
    return Kept(_filled(empty, leaves), tokens, about["drawn"])


def check_replaceable(path: Path) -> None:
    """Raise FileExistsError if there is a file that is not a saved state."""
    if path.exists() and _about(path) is None:
        raise FileExistsError(f"{path} exists and is not a saved state; name another file")


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of the weights' names, types, shapes and bytes."""
    return _digest(model.state_dict())


def _about(path: Path) -> dict[str, Any] | None:
    """Return what a file says of itself; None if it is not a saved state."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(_METADATA, "null"))
    except (SafetensorError, RecursionError, ValueError):
        return None
    return about if isinstance(about, dict) else None


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, t in sorted(tensors.items()):
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        digest.update(t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _leaves(state: State, name: str = "state") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a state with its place in the tree, such as state.1.0."""
    if isinstance(state, Tensor):
        yield name, state
    elif state is not None:
        for i, part in enumerate(state):
            yield from _leaves(part, f"{name}.{i}")


def _filled(like: State, leaves: dict[str, Tensor], name: str = "state") -> State:
    """Return a state of the structure of `like` with other tensors."""
    if not isinstance(like, tuple):
        return leaves.get(name)
    parts = [_filled(part, leaves, f"{name}.{i}") for i, part in enumerate(like)]
    return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)


def _sizes(backbone: SequenceModule) -> list[list[Any]]:
    """Return the types and shapes of empty states with room for few and for many positions, which options change."""
    empty = [backbone.initial_state(1, max_len=n, device=torch.device("meta")) for n in (1, 2**20)]
    return [[name, str(t.dtype), list(t.shape)] for state in empty for name, t in _leaves(state)]
