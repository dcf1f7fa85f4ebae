"""Checkpoints of sharded runs: a folder to which every process writes its own part.

    last.ckpt/
        common.pt        a checkpoint in which divided tensors have their shapes alone (the device `meta`)
        part_00000.pt    process 0: its rows of every divided tensor, and its own values, such as its carried memory
        part_00001.pt    process 1: …

Process r of W has the rows ⌈n / W⌉ r to ⌈n / W⌉ (r + 1) of a tensor of n rows, as FSDP2 divides them. No file names
another one: `common.pt` holds the number of parts, their lengths, and a token that all of them must have.

torch.distributed.checkpoint is not used: its own format has a pickle that is loaded without `weights_only`, and with
safetensors (`HuggingFaceStorageReader`) a missing or changed part is not detected.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import keystr, tree_map_only, tree_map_with_path

from lit_effattn.checkpoints.files import DamagedError, explained, put, read, unfinished, write
from lit_effattn.checkpoints.runs import COMMON

T = TypeVar("T")

PARTS_KEY = "parts"  # the key in `common.pt` of the number of its format and of the parts' token and lengths

_FORMAT = 1


class OfEach(NamedTuple):
    """A top-level value of a checkpoint that differs between processes. It is read as the list of their values."""

    value: Any


def share(n: int, rank: int, size: int) -> tuple[int, int]:
    """Return the begin and the end of the rows, of `n`, that process `rank` of `size` has."""
    each = -(-n // size)
    return min(each * rank, n), min(each * (rank + 1), n)


# ------------------------------------------------------------------------------------------------------------- writing


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint of which each process has its rows of the DTensors. All processes call it with one path.

    The folder gets its name when it is complete. The checkpoint of that name is kept until then.

    Raises:
        OSError: If a process could not write its part, for example because the disk is full. All processes raise it.
    """
    rank = dist.get_rank()
    part, token = gathered((unfinished(path), secrets.token_hex(8)))[0]
    try:
        _together(lambda: _begin(part, path) if rank == 0 else None, OSError)
        common, own = _divided(checkpoint)
        written = _together(lambda: _write({**own, "token": token}, part / _name(rank), path), OSError)
        about = {"format": _FORMAT, "token": token, "bytes": gathered(written), "own": [*own["own"]]}
        _together(lambda: _finish({**common, PARTS_KEY: about}, part, path) if rank == 0 else None, OSError)
    except BaseException:
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise


def _begin(part: Path, path: Path) -> None:
    with explained(path):
        shutil.rmtree(part, ignore_errors=True)  # left by a killed process with the same id
        part.mkdir(parents=True)


def _write(content: dict[str, Any], file: Path, path: Path) -> int:
    if not file.parent.is_dir():
        raise OSError(
            f"the checkpoint {path} could not be written: the folder of {file} is missing on this machine; all "
            "machines need the same file system"
        )
    with explained(path):
        write(content, file)
        return file.stat().st_size


def _finish(common: dict[str, Any], part: Path, path: Path) -> None:
    with explained(path):
        write(common, part / COMMON)
        put(part, path)


def _divided(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content that all processes have in common, and that of this process."""
    rows: dict[str, Tensor] = {}

    def take(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        assert tuple(leaf.placements) == (Shard(0),)
        rows[keystr(path)] = _unpadded(leaf.to_local())
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")

    own = {name: value.value for name, value in checkpoint.items() if isinstance(value, OfEach)}
    common = tree_map_with_path(take, {**checkpoint, **dict.fromkeys(own)})
    return common, {"rows": rows, "own": own}


def _unpadded(t: Tensor) -> Tensor:
    """Return a tensor on the CPU without FSDP2's padding in its storage, which would be saved too."""
    t = t.detach().cpu().contiguous()
    return t if t.untyped_storage().nbytes() == t.nbytes else t.clone()


def _name(rank: int) -> str:
    return f"part_{rank:05d}.pt"


def gathered(value: T) -> list[T]:
    """Return the values of all processes. All processes call it."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _together(act: Callable[[], T], kind: type[Exception]) -> T:
    """Call `act`. An error of this kind in one process is raised in all processes, so none waits for another."""
    failed, result = None, None
    try:
        result = act()
    except kind as error:
        failed = error
    messages = gathered(failed and str(failed))
    for rank, message in enumerate(messages):
        if message is not None:
            raise failed or kind(f"{message} (process {rank})")
    return result  # type: ignore[return-value]  # no error


# ------------------------------------------------------------------------------------------------------------- reading


class Parts:
    """The files of a folder. Each part is verified when it is first used; its values are read when they are used.

    Tensors that are not divided are read to `map_location`, as by `torch.load`.

    Raises:
        DamagedError: If a file is missing, cut off, changed, a link, or of another checkpoint. The message names it.
        ValueError: If the folder has a newer format.
    """

    def __init__(self, folder: Path, map_location: Any = "cpu") -> None:
        self._folder = folder
        self.common = read(_real(folder / COMMON), map_location)
        about = self.common.pop(PARTS_KEY, None)
        if isinstance(about, dict) and about.get("format", _FORMAT) != _FORMAT:
            raise ValueError(
                f"{folder} is of format {about['format']!r}: it was saved by a newer lit-effattn; update it"
            )
        try:
            self._token, self._bytes, self.own = about["token"], [int(n) for n in about["bytes"]], list(about["own"])
        except (TypeError, KeyError, ValueError):
            raise DamagedError(f"{folder / COMMON} does not list the parts of the checkpoint") from None
        for rank, size in enumerate(self._bytes):
            file = _real(folder / _name(rank))
            if file.stat().st_size != size:
                raise DamagedError(f"{file} is damaged: it has {file.stat().st_size:,} bytes, not {size:,}")
        self._read: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._bytes)

    def file(self, rank: int) -> Path:
        """Return the file of a part."""
        return self._folder / _name(rank)

    def __getitem__(self, rank: int) -> dict[str, Any]:
        if rank not in self._read:
            content = read(self.file(rank), mmap=True)
            if content.get("token") != self._token:
                raise DamagedError(f"{self.file(rank)} is of another checkpoint than {self._folder / COMMON}")
            if not all(isinstance(content.get(name), dict) for name in ("rows", "own")):
                raise DamagedError(f"{self.file(rank)} is not a part of a checkpoint")
            self._read[rank] = content
        return self._read[rank]

    def of_process(self, rank: int, name: str) -> Any:
        """Return a process's own value of a name, in memory."""
        if name not in self[rank]["own"]:
            raise DamagedError(f"{self.file(rank)} is damaged: it has no {name}")
        with _flat(self.file(rank)):
            return tree_map_only(Tensor, torch.clone, self[rank]["own"][name])

    def map(self, change: Callable[[Divided], T]) -> dict[str, Any]:
        """Return the common content, with `change(tensor)` in place of every divided tensor."""

        def leaf(path: Any, value: Any) -> Any:
            is_divided = isinstance(value, Tensor) and value.device.type == "meta"
            return change(Divided(self, keystr(path), value)) if is_divided else value

        with _flat(self._folder / COMMON):
            return dict(tree_map_with_path(leaf, self.common))


class Divided:
    """A tensor, of the shape and type of `like`, whose rows are in the parts of a checkpoint under a name.

    Raises:
        DamagedError: If it has no dimension, or there are no parts.
    """

    def __init__(self, parts: Parts, name: str, like: Tensor) -> None:
        if not like.ndim or not len(parts):
            raise DamagedError(f"{name} of the checkpoint has no rows that parts could have")
        self._parts = parts
        self._name = name
        self.shape = like.shape
        self.dtype = like.dtype

    def having(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number, begin and end of each part that has some of the rows `first` to `last` (exclusive)."""
        for rank in range(len(self._parts)):
            begin, end = share(self.shape[0], rank, len(self._parts))
            if max(begin, first) < min(end, last):
                yield rank, begin, end

    def rows(self, first: int, last: int) -> Tensor:
        """Read the rows `first` to `last` (exclusive).

        Raises:
            DamagedError: If a part lacks its rows.
        """
        pieces = [torch.empty((0, *self.shape[1:]), dtype=self.dtype)]
        for rank, begin, end in self.having(first, last):
            piece = self._parts[rank]["rows"].get(self._name)
            shape = (end - begin, *self.shape[1:])
            fits = isinstance(piece, Tensor) and tuple(piece.shape) == shape and piece.dtype == self.dtype
            if not fits or not piece.is_contiguous():  # a single number can have any shape
                raise DamagedError(f"{self._parts.file(rank)} is damaged: it lacks rows of {self._name}")
            pieces.append(piece[max(first - begin, 0) : last - begin])
        return torch.cat(pieces)  # a copy: the file may be deleted

    def whole(self) -> Tensor:
        """Read all rows."""
        return self.rows(0, self.shape[0])


def read_whole(folder: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint into the memory of one process, as if one process had saved it.

    Raises:
        DamagedError: If a file is damaged: see `Parts`.
    """
    parts = Parts(folder, map_location)
    known = isinstance(map_location, (str, torch.device))
    checkpoint = parts.map(lambda tensor: tensor.whole().to(map_location) if known else tensor.whole())
    return checkpoint | {name: [parts.of_process(rank, name) for rank in range(len(parts))] for name in parts.own}


def read_local(folder: Path) -> dict[str, Any]:
    """Read the content that this process needs. All processes call it.

    Divided tensors are `Divided`: their rows are read on request. The parts that have this process's rows are verified
    now. An `OfEach` is a list with the value of the process of this number; the other items are None.

    Raises:
        DamagedError: If a part is damaged: see `Parts`. All processes raise it.
    """
    rank, size = dist.get_rank(), dist.get_world_size()

    def act() -> dict[str, Any]:
        parts = Parts(folder)
        needed = {rank} if parts.own and len(parts) == size else set()

        def note(tensor: Divided) -> Divided:
            needed.update(number for number, _, _ in tensor.having(*share(tensor.shape[0], rank, size)))
            return tensor

        checkpoint = parts.map(note)
        for number in sorted(needed):
            parts[number]
        for name in parts.own:
            checkpoint[name] = [None] * len(parts)
            if len(parts) == size:
                checkpoint[name][rank] = parts.of_process(rank, name)
        return checkpoint

    return _together(act, DamagedError)


@contextmanager
def _flat(file: Path) -> Iterator[None]:
    """Turn a RecursionError into a DamagedError that names `file`."""
    try:
        yield
    except RecursionError as error:
        raise DamagedError(f"{file} is nested too deeply") from error


def _real(file: Path) -> Path:
    """Return `file`; raise DamagedError if it is a link or missing."""
    if file.is_symlink():
        raise DamagedError(f"{file} is a link, which leads to another file; put the file itself there")
    if not file.is_file():
        raise DamagedError(f"{file} is missing")
    return file
