"""Bounds on the size of a model that a file describes, checked before memory or time is spent."""

import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_AT_ONCE = 2**30  # bytes
_IN_ALL = 2**32  # bytes
_CALLS = 10_000
_TOO_LARGE = re.compile(r"Overflow when unpacking long|can't allocate memory|Storage size calculation overflowed")


@contextmanager
def model_of(source: str | Path, n_bytes: int, n_tensors: int) -> Iterator[None]:
    """Bound the model that is built in this context by the size of `source`, the checkpoint that describes it.

    A tensor may have 4 times the bytes of the file, or 1 GiB if that is more; all tensors together 32 times and 4 GiB;
    and there may be 100 operations for each tensor of the file and 10,000 more. Real models are far below.

    Raises:
        ValueError: If the model is larger.
    """
    try:
        with _Limit(source, n_bytes, n_tensors):
            yield
    except Exception as error:
        match = _TOO_LARGE.search(str(error))
        if match is None and not isinstance(error, MemoryError):
            raise
        reason = "it is out of memory" if match is None else match[0]
        raise ValueError(f"{source} describes a larger model than any machine has: {reason}") from error


def size_of(checkpoint: Path) -> tuple[int, int]:
    """Return the number of bytes and of tensors in a checkpoint, a file or a folder, without reading them."""
    files = [path for path in checkpoint.iterdir() if path.is_file()] if checkpoint.is_dir() else [checkpoint]
    return sum(path.stat().st_size for path in files), sum(map(_n_tensors, files))


def _n_tensors(file: Path) -> int:
    if not zipfile.is_zipfile(file):
        return file.stat().st_size // 1024  # an older torch's format
    with zipfile.ZipFile(file) as opened:
        return len(opened.infolist())


class _Limit(TorchDispatchMode):
    def __init__(self, source: str | Path, n_bytes: int, n_tensors: int) -> None:
        super().__init__()
        self._source = source
        self._has = f"it has {n_bytes:,} bytes in {n_tensors:,} tensors"
        self._at_once = max(4 * n_bytes, _AT_ONCE)
        self._in_all = 32 * n_bytes + _IN_ALL
        self._calls = 100 * n_tensors + _CALLS
        self._bytes = self._called = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the size of a new tensor before the operation makes it; count the operation."""
        kwargs = kwargs or {}
        self._called += 1
        if self._called > self._calls:
            raise self._error(f"building it takes more than {self._calls:,} operations")
        shape = _shape(func, args, kwargs)
        if shape is not None:
            size = math.prod(shape) * (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
            self._bytes += size
            if size > self._at_once or self._bytes > self._in_all:
                shown = "×".join(f"{n:,}" for n in shape)
                raise self._error(f"with a tensor of {shown} it takes {self._bytes:,} bytes")
        return func(*args, **kwargs)

    def _error(self, excess: str) -> ValueError:
        return ValueError(f"{self._source} describes a larger model than it holds: {excess}, but {self._has}")


def _shape(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[int] | None:
    """Return the shape of the tensor that an operation creates; None if it creates none, or one from other tensors."""
    if func.is_view or any(isinstance(value, Tensor) for value in args[1:]):
        return None
    given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    if "size" in given:
        return list(given["size"])
    if "end" in given and "self" not in given:
        steps = given.get("steps") or (given["end"] - given.get("start", 0)) / given.get("step", 1)
        return [max(math.ceil(steps), 0)]
    if func.overloadpacket is torch.ops.aten.eye:
        return [given["n"], given.get("m", given["n"])]
    return None
