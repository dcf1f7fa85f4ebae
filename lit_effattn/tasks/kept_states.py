"""Files of states: where a generated sequence or a stream of sound stops, for a later process to go on from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lit_effattn.checkpoints.files import DamagedError, whole
from lit_effattn.checkpoints.runs import short
from lit_effattn.generation import Kept
from lit_effattn.sequence import SequenceModule, State, map_tensors, nbytes

if TYPE_CHECKING:
    from lit_effattn.tasks.speech_stream import SpeechStream

_METADATA = "lit_effattn_state"
_TOKENS = "tokens"


def save_state(kept: Kept, path: Path, task: Any) -> None:
    """Write a file that `load_state` reads: tensors in the safetensors format, and a few numbers as JSON.

    Args:
        kept: The state of `task.backbone`, and tokens: of a text those that it has not read, of images all levels
            so far, of pairs the source.
        path: The file. An earlier saved state is replaced, at once and as a whole.
        task: The task whose state it is. The file holds the fingerprint of its weights, not the weights.

    Raises:
        FileExistsError: If there is a file that is not a state.
    """
    _write(path, {_TOKENS: kept.tokens, **dict(_leaves(kept.state))}, {"drawn": kept.drawn}, task)


def load_state(path: Path, task: Any) -> Kept:
    """Read a file of `save_state` as data, to the device of `task`.

    Args:
        path: The file.
        task: The task with the weights of the one that wrote the file, and its options of evaluation.

    Raises:
        DamagedError: If the file is damaged, or not a saved state.
        ValueError: If it is the state of another model, or of another size.
    """
    leaves, about = _read(path, {"drawn"}, {_TOKENS}, task, "generate")
    tokens = leaves.pop(_TOKENS)
    _check(tokens, torch.empty(1, 1, dtype=torch.long), f"{path}: {_TOKENS}")
    return Kept(_of_backbone(task.backbone, leaves, path, len(tokens), max_len=1), tokens, about["drawn"])


def save_stream(stream: SpeechStream, path: Path) -> None:
    """Write a file from which `load_stream` goes on: see `save_state`.

    Args:
        stream: A stream of sound, before its end.
        path: The file. An earlier saved state is replaced, at once and as a whole.

    Raises:
        FileExistsError: If there is a file that is not a state.
        ValueError: If the stream's decoder can't be kept.
    """
    kept = stream.kept
    leaves = {**dict(_leaves(kept.state)), **{n: t for n, t in kept._asdict().items() if isinstance(t, Tensor)}}
    _write(path, leaves, {"stream": stream.options}, stream.model)


def load_stream(stream: SpeechStream, path: Path) -> None:
    """Let a new stream go on where `save_stream` stopped.

    Args:
        stream: A stream with the weights and the options of the one that wrote the file.
        path: The file.

    Raises:
        DamagedError: If the file is damaged, or not a saved state of a stream.
        ValueError: If it is the state of another model, of another size, or of a stream with other options.
    """
    leaves, about = _read(path, {"stream"}, {"counts"}, stream.model, "predict --stream FILE")
    if about["stream"] != stream.options:
        written = ", ".join(f"{name} {value}" for name, value in about["stream"].items())
        raise ValueError(f"{path} is of a stream with other options; give those with which it was written: {written}")
    given: Any = {name: leaves.pop(name, None) for name in stream.kept._fields if name != "state"}
    state = _of_backbone(stream.model.backbone, leaves, path, 1, max_len=None) if leaves else None
    for name in ("samples", "moments"):  # of the features, which are computed on the CPU
        given[name] = None if given[name] is None else given[name].cpu()
    stream.kept = stream.kept._replace(**given, state=state)


def check_replaceable(path: Path) -> None:
    """Check that a saved state can be written to `path`.

    Raises:
        FileExistsError: If something is there that is not a saved state.
        OSError: If its folder is not a folder, or can't be written to.
    """
    if path.exists() and not (path.is_file() and _about(path) is not None):
        raise FileExistsError(f"{path} exists and is not a saved state; name another file")
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise OSError(f"{path}: {short(folder)} is not a folder to which files can be written; name another")


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of the weights' names, types, shapes and bytes."""
    return _digest(model.state_dict())


def _write(path: Path, leaves: Mapping[str, Tensor], numbers: dict[str, Any], task: Any) -> None:
    from safetensors.torch import save_file

    check_replaceable(path)
    leaves = {name: t.detach().cpu().contiguous().clone() for name, t in leaves.items()}
    about = {**numbers, "model": fingerprint(task), "sizes": _sizes(task.backbone)}
    about["sum"] = _digest(leaves, about)
    with whole(path) as part:
        part.touch()
        mode = part.stat().st_mode  # safetensors lets the owner alone read its files
        save_file(leaves, part, {_METADATA: json.dumps(about)})
        part.chmod(mode)
        with part.open("rb+") as file:  # a power cut can't leave an empty file
            os.fsync(file.fileno())


def _read(
    path: Path, numbers: set[str], tensors: set[str], task: Any, command: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file of `_write`, on the device of `task`, and what it says of itself.

    Args:
        path: The file.
        numbers: The names of the numbers that it must have.
        tensors: The names of some tensors that it must have.
        task: The task whose state it must be.
        command: The command that writes such files.

    Raises:
        DamagedError: If the file is damaged, or not such a file.
        ValueError: If it is the state of another model, or of another size.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    about = _about(path)
    try:
        leaves = load(path.read_bytes())  # `load_file` of safetensors 0.8 loses 30 bytes for each number of a shape
    except (SafetensorError, ValueError) as error:
        raise DamagedError(f"{path} can't be read as a state: {error}") from error
    if about is None or about.keys() != {*numbers, "model", "sum", "sizes"} or not tensors <= leaves.keys():
        raise DamagedError(f"{path} is not a saved state: `lit-effattn {command} --save_state` writes them")
    if about.pop("sum") != _digest(leaves, about):
        raise DamagedError(f"{path} is damaged: its checksum differs")
    if about["model"] != fingerprint(task):
        raise ValueError(f"{path} is the state of a model with other weights; give the checkpoint that wrote it")
    if about["sizes"] != _sizes(task.backbone):
        raise ValueError(f"{path} is a state of other sizes: give the options of memory with which it was written")
    device = next(task.parameters()).device
    return {name: t.to(device) for name, t in leaves.items()}, about


def _about(path: Path) -> dict[str, Any] | None:
    """Return what a file says of itself; None if it is not a saved state."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(_METADATA, "null"))
    except (SafetensorError, RecursionError, ValueError):
        return None
    return about if isinstance(about, dict) else None


def _digest(tensors: dict[str, Tensor], about: dict[str, Any] | None = None) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
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


def _of_backbone(
    backbone: SequenceModule, leaves: dict[str, Tensor], path: Path, rows: int, *, max_len: int | None
) -> State:
    """Return the state of `rows` rows with the tensors `leaves`, which must have room for the positions it has read.

    It is made with `max_len`, or without, as the one that was written: their structures differ.
    """
    like = backbone.initial_state(rows, max_len=max_len, device=torch.device("meta"))
    examples = dict(_leaves(like))
    if leaves.keys() != examples.keys():
        raise ValueError(f"{path} is a state of other sizes: give the options of memory with which it was written")
    for name, example in examples.items():
        _check(leaves[name], example, f"{path}: {name}")
    in_order = iter(examples)
    state = map_tensors(lambda _: leaves[next(in_order)], like)
    if any(int(length.min()) < 0 for length in _lengths(state) if len(length)):
        raise DamagedError(f"{path} is not a saved state: a length in it is negative; write it again")
    longest = max((int(length.max()) for length in _lengths(state) if len(length)), default=0)
    longest = min(longest, 2**40)  # beyond, torch can't count the bytes
    needed = nbytes(backbone.initial_state(rows, max_len=longest, device=torch.device("meta")))
    if needed > 2 * nbytes(state) + 2**24:
        raise DamagedError(
            f"{path} is not a saved state: one of {longest:,} positions has {needed:,} bytes, and it has "
            f"{nbytes(state):,}; write it again"
        )
    return state


def _check(t: Tensor, like: Tensor, name: str) -> None:
    """Raise DamagedError unless `t` has the type and dimensions of `like`, the smallest tensor of its place."""
    if t.dtype != like.dtype or t.dim() != like.dim() or any(n < m for n, m in zip(t.shape, like.shape, strict=True)):
        raise DamagedError(
            f"{name} is {t.dtype} of shape {tuple(t.shape)}, and not {like.dtype} of at least {tuple(like.shape)}: it "
            "is not a saved state; write it again"
        )


def _lengths(state: State) -> Iterator[Tensor]:
    """Yield the numbers of positions that a state has read."""
    if isinstance(state, tuple):
        for name, part in zip(getattr(state, "_fields", [""] * len(state)), state, strict=True):
            yield from [part] if name == "length" else _lengths(part)


def _sizes(backbone: SequenceModule) -> list[list[Any]]:
    """Return the types and shapes of empty states with room for few and for many positions, which options change."""
    empty = [backbone.initial_state(1, max_len=n, device=torch.device("meta")) for n in (1, 2**20)]
    return [[name, str(t.dtype), list(t.shape)] for state in empty for name, t in _leaves(state)]
