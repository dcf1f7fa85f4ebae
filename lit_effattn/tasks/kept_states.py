"""Files of states: where a generated sequence or a stream of sound stops, for a later process to go on from.

A file holds tensors in the safetensors format, and a few numbers as JSON: a checksum, the fingerprint of the weights
(not the weights), and the sizes of the states that the model makes.
"""

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
from lit_effattn.datamodules.common.json_data import parse_json
from lit_effattn.generation import Kept
from lit_effattn.sequence import SequenceModule, State, map_tensors, nbytes

if TYPE_CHECKING:
    from lit_effattn.tasks.speech_stream import SpeechStream

_METADATA = "lit_effattn_state"
_META = torch.device("meta")


def save_state(kept: Kept, path: Path, task: Any) -> None:
    """Write a file that `load_state` reads.

    Args:
        kept: The state of `task.backbone`, and tokens: of a text those that it has not read, of images all levels
            so far, of pairs the source.
        path: The file. An earlier saved state is replaced, at once and as a whole.
        task: The task whose state it is.

    Raises:
        FileExistsError: If there is a file that is not a state.
    """
    _write(path, kept.state, {"tokens": kept.tokens}, {"drawn": kept.drawn}, task)


def load_state(path: Path, task: Any) -> Kept:
    """Read a file of `save_state` as data, to the device of `task`.

    Args:
        path: The file.
        task: The task with the weights of the one that wrote the file, and its options of evaluation.

    Raises:
        DamagedError: If the file is damaged, or not a saved state.
        ValueError: If it is the state of another model, or of another size.
    """
    leaves, about = _read(path, "tokens", "drawn", task, "generate")
    tokens = leaves.pop("tokens")
    if not _fits(tokens, torch.empty(1, 1, dtype=torch.long)):
        raise DamagedError(f"{path} is not a saved state: tokens is {tokens.dtype} of shape {tuple(tokens.shape)}")
    return Kept(_of_backbone(task.backbone, leaves, path, len(tokens), max_len=1), tokens, about["drawn"])


def save_stream(stream: SpeechStream, path: Path) -> None:
    """Write a file from which `load_stream` goes on: see `save_state`.

    Raises:
        ValueError: If the stream's decoder can't be kept.
    """
    kept = stream.kept
    others = {name: t for name, t in kept._asdict().items() if isinstance(t, Tensor)}
    _write(path, kept.state, others, {"stream": stream.options}, stream.model)


def load_stream(stream: SpeechStream, path: Path) -> None:
    """Let a new stream, with the weights and options of the one that wrote the file, go on where that stopped.

    Raises:
        DamagedError: If the file is damaged, or not a saved state of a stream.
        ValueError: If it is the state of another model, of another size, or of a stream with other options.
    """
    leaves, about = _read(path, "counts", "stream", stream.model, "predict --stream FILE")
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


def _write(path: Path, state: State, others: Mapping[str, Tensor], numbers: dict[str, Any], task: Any) -> None:
    from safetensors.torch import save

    check_replaceable(path)
    leaves = {name: t.detach().cpu().contiguous().clone() for name, t in [*others.items(), *_leaves(state)]}
    about = {**numbers, "model": fingerprint(task), "sizes": _sizes(task.backbone)}
    about["sum"] = _digest(leaves, about)
    with whole(path) as part, part.open("wb") as file:
        file.write(save(leaves, {_METADATA: json.dumps(about)}))
        file.flush()
        os.fsync(file.fileno())  # a power cut can't leave an empty file


def _read(path: Path, tensor: str, number: str, task: Any, command: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file of `_write`, on the device of `task`, and its numbers.

    The file must have a `tensor` and a `number` of these names. `command` is the one that writes such files.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    about = _about(path)
    try:
        leaves = load(path.read_bytes())  # `load_file` of safetensors 0.8 loses 30 bytes for each number of a shape
    except (SafetensorError, ValueError) as error:
        raise DamagedError(f"{path} can't be read as a state: {error}") from error
    if about is None or about.keys() != {number, "model", "sum", "sizes"} or tensor not in leaves:
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
    """Return the numbers of a file; None if it is not a saved state."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = parse_json((file.metadata() or {}).get(_METADATA, "null"))
    except (SafetensorError, ValueError):
        return None
    return about if isinstance(about, dict) else None


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of the weights' names, types, shapes and bytes."""
    return _digest(model.state_dict())


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
    """Return the state of `rows` rows with the tensors `leaves`, made with `max_len` or without as the written one.

    The number of positions must be one that the tensors have room for: the next call makes room for more.
    """
    like = backbone.initial_state(rows, max_len=max_len, device=_META)
    examples = dict(_leaves(like))
    if leaves.keys() != examples.keys() or not all(_fits(leaves[name], t) for name, t in examples.items()):
        raise DamagedError(
            f"{path} is not a saved state: its tensors have other names, types or shapes; write it again"
        )
    names = iter(examples)
    state = map_tensors(lambda _: leaves[next(names)], like)
    lengths = torch.cat([*_lengths(state)])
    longest, shortest = int(lengths.max()), int(lengths.min())
    room = min(max(longest, 0), 2**40)  # beyond, torch can't count the bytes
    needed = nbytes(backbone.initial_state(rows, max_len=room, device=_META))
    if shortest < 0 or needed > 2 * nbytes(state) + 2**24:
        raise DamagedError(f"{path} is not a saved state: its tensors have no room for {longest:,} positions")
    return state


def _fits(t: Tensor, least: Tensor) -> bool:
    """Return whether `t` has the type and dimensions of `least`, the smallest tensor of its place."""
    return t.dtype == least.dtype and t.dim() == least.dim() and all(map(int.__ge__, t.shape, least.shape))


def _lengths(state: State) -> Iterator[Tensor]:
    """Yield the numbers of positions that a state has read."""
    if isinstance(state, tuple):
        for name, part in zip(getattr(state, "_fields", [""] * len(state)), state, strict=True):
            yield from [part] if name == "length" else _lengths(part)


def _sizes(backbone: SequenceModule) -> list[list[Any]]:
    """Return the types and shapes of empty states with room for few and for many positions, which options change."""
    empty = [backbone.initial_state(1, max_len=n, device=_META) for n in (1, 2**20)]
    return [[name, str(t.dtype), list(t.shape)] for state in empty for name, t in _leaves(state)]
