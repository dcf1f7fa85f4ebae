"""Kernels for the CPU, in C++: compiled where they run, once, by the machine's own compiler, and kept.

They need g++ 12 or clang++ 14, or a newer one, with OpenMP (Apple's has none: brew install gcc); the environment
variable CXX names another than is found. That takes about two seconds; they are found again in `~/.cache/lit_effattn`
($XDG_CACHE_HOME) by their source, compiler and vectors.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_OPS = Path(__file__).parent.parent
_OPTIONS = ("-std=gnu++17", "-O3", "-fopenmp", "-fPIC", "-shared")
_VECTORS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprfchw"),
    "AVX2": ("-mavx2", "-mfma", "-mprfchw"),
}


class CompilerError(Exception):
    """The compiler is missing, or refuses; the text says which, and what to do."""


class Heads(ctypes.Structure):
    """(B, H, N, D) in float32, numbers next to one another; as `Heads` in gemm_tiles.hpp."""

    _fields_ = (
        ("p", ctypes.c_void_p),
        ("b", ctypes.c_int64),
        ("h", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("width", ctypes.c_int64),
    )

    @classmethod
    def of(cls, t: Tensor) -> Heads:
        """Describe `t`, which has to outlive what is made of it."""
        return cls(t.data_ptr(), *t.stride()[:3], t.size(3))


def heads(t: Tensor) -> Tensor:
    """Return `t` in float32, its last dimension's numbers next to one another."""
    t = t.float()
    return t if t.stride(-1) == 1 or t.size(-1) <= 1 else t.contiguous()


def copied(t: Tensor) -> Tensor:
    """Copy `t` in float32, for a kernel to write to."""
    return t.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def address(t: Tensor | None) -> int | None:
    """Return where `t`'s numbers lie, for a kernel; None is null."""
    return None if t is None else t.data_ptr()


@cache
def library(name: str) -> ctypes.CDLL:
    """Compile the kernels of operation `name`, unless that was done before, and load them.

    Raises:
        CompilerError: says why it can't be had.
    """
    return ctypes.CDLL(str(build(name, _VECTORS.get(torch.backends.cpu.get_cpu_capability(), ()))))


@cache
def obstacle(name: str) -> str | None:
    """Say why `library` can't be had, None if it can."""
    try:
        library(name)
    except (CompilerError, OSError) as error:
        return str(error)
    return None


def build(name: str, vectors: Sequence[str] = ()) -> Path:
    """Compile `name`/kernels.cpp, unless that was done before, and return where the library lies.

    Args:
        name: The operation's, a folder of `lit_effattn/ops`.
        vectors: The compiler's options for what vectors the processor has.

    Raises:
        CompilerError: The compiler is missing, or refuses.
    """
    compiler = _compiler()
    options = (*_OPTIONS, *vectors)
    sources = [_OPS / "runtime" / "gemm_tiles.hpp", _OPS / name / "kernels.cpp"]
    known = "\0".join([*compiler, _version(compiler), *options, *(path.read_text() for path in sources)])
    file = f"{name}-{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
    folder = _folder()
    if not (folder / file).exists():
        # Under a name of its own first: others may be compiling it, or loading it, at the same time.
        handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            _run([*compiler, *options, str(sources[-1]), "-o", temporary])
            Path(temporary).replace(folder / file)
        finally:
            Path(temporary).unlink(missing_ok=True)
    return folder / file


def _compiler() -> list[str]:
    named = os.environ.get("CXX")
    for command in [named] if named else ["clang++", "g++"] if sys.platform == "darwin" else ["g++", "clang++"]:
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    raise CompilerError(
        f"there is no C++ compiler {named!r}, which the environment variable CXX names"
        if named
        else "there is no C++ compiler: install g++ or clang++ (Debian: apt-get install g++), or name one in the "
        "environment variable CXX"
    )


@cache
def _folder() -> Path:
    """Return a folder to keep libraries in, which nobody else can write to.

    Where there is none, one that lasts as long as the machine runs.
    """
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_effattn"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            if _is_private(folder):
                return folder
        reason = f"{folder} belongs to another user or can be written by others (chmod go-w {folder})"
    except (OSError, RuntimeError) as error:  # no home, not ours, full
        reason = str(error)
    private = Path(tempfile.mkdtemp(prefix="lit_effattn-"))
    warnings.warn(f"Compiled kernels are kept in {private}, for this process alone: {reason}", stacklevel=2)
    return private


def _is_private(folder: Path) -> bool:
    """Whether only this user can put a library into `folder`, which would be run."""
    about = folder.stat()
    return not hasattr(os, "getuid") or (about.st_uid == os.getuid() and not about.st_mode & 0o022)


def _version(compiler: list[str]) -> str:
    return _run([*compiler, "--version"])


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except OSError as error:
        raise CompilerError(f"the C++ compiler can't be run: {error}") from error
    except subprocess.CalledProcessError as error:
        said = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines() or [""]
        raise CompilerError(f"the C++ compiler {shlex.join(command[:1])} fails: {said[0].strip()}") from error
