"""Building of C++ kernels for the CPU: compiled once, on the machine that runs them, and cached.

Compilation needs g++ 12 or clang++ 14 or newer, with OpenMP (Apple's clang has none: brew install gcc). The environment
variable CXX selects another compiler. Compilation takes about two seconds. The libraries are cached in
`~/.cache/lit-effattn/kernels` ($XDG_CACHE_HOME), keyed by source, compiler and vector options.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_OPS = Path(__file__).parent.parent
_OPTIONS = ("-std=gnu++17", "-O3", "-fopenmp", "-fPIC", "-shared")
_VECTORS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprfchw"),
    "AVX2": ("-mavx2", "-mfma", "-mprfchw"),
}


PATIENCE = 60.0
"""Seconds after which a compiler that has not returned is stopped. A kernel takes about two."""

_hung: dict[str, str] = {}  # an error message for each compiler that did not return; it is not run again


class CompilerError(Exception):
    """The compiler is missing or fails. The message says which, and the remedy."""


@cache
def library(name: str) -> ctypes.CDLL:
    """Compile the kernels of operation `name` if necessary, and load them.

    Raises:
        CompilerError: If the compiler is missing or fails.
    """
    return ctypes.CDLL(str(build(name, _VECTORS.get(torch.backends.cpu.get_cpu_capability(), ()))))


@cache
def obstacle(name: str) -> str | None:
    """Return why `library` can't be built, or None if it can."""
    try:
        library(name)
    except (CompilerError, OSError) as error:
        return str(error)
    return None


def build(name: str, vectors: Sequence[str] = ()) -> Path:
    """Compile `name`/kernels.cpp if necessary, and return the path of the library.

    Args:
        name: Name of the operation, a folder of `lit_effattn/ops`.
        vectors: Compiler options for the processor's vector instructions.

    Raises:
        CompilerError: If the compiler is missing or fails.
    """
    compiler = _compiler()
    options = (*_OPTIONS, *vectors)
    sources = [_OPS / "runtime" / "gemm_tiles.hpp", _OPS / name / "kernels.cpp"]
    known = "\0".join(
        [*compiler, _version(compiler), *options, *(path.read_text(encoding="utf-8") for path in sources)]
    )
    file = private_folder("kernels") / f"{name}-{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
    if not is_intact(file):
        # Compiled to a temporary file: other processes may compile or load it at the same time.
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            part = Path(folder, file.name)
            _run([*compiler, *options, str(sources[-1]), "-o", str(part)])
            install(part, file)
    return file


def is_intact(library: Path) -> bool:
    """Return whether a compiled library is as `install` wrote it. Loading a truncated one would kill the process."""
    try:
        return _digest_file(library).read_text(encoding="ascii") == _digest(library)
    except (OSError, UnicodeDecodeError):
        return False


def install(part: Path, library: Path) -> None:
    """Rename the complete file `part` to `library`, with its checksum in a file beside it, and flush both."""
    digest = part.with_name(f"{part.name}.digest")
    digest.write_text(_digest(part), encoding="ascii")
    for path in (part, digest):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    part.replace(library)
    digest.replace(_digest_file(library))


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def compiler_version() -> str | None:
    """Return what the C++ compiler prints for `--version`, or None without a compiler.

    Raises:
        CompilerError: If the compiler fails.
    """
    try:
        compiler = _compiler()
    except CompilerError:
        return None
    return _version(compiler)


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
def private_folder(name: str) -> Path:
    """Return the cache folder `name`, which no other user can write to or replace, or else a temporary folder."""
    try:
        # The parent is `datamodules.cache.default_cache()`. Whoever can write to it can replace the folder.
        parent = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit-effattn"
        for path in (parent.parent, parent, parent / name):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = (parent / name).resolve()  # without links, which another user could change
        for path in (parent.resolve(), folder):
            if not _is_private(path):
                raise PermissionError(f"{path} belongs to another user or can be written by others (chmod go-w {path})")
        for path in folder.parents:
            if not _keeps_names(path):
                raise PermissionError(f"others can write to {path} and replace {folder} (chmod go-w {path})")
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, RuntimeError) as error:  # no home, another owner, disk full
        private = tempfile.TemporaryDirectory(prefix="lit-effattn-", ignore_cleanup_errors=True)
        _temporary.append(private)
        warnings.warn(f"Compiled {name} are kept in {private.name}, for this process only: {error}", stacklevel=2)
        return Path(private.name)


_temporary: list[tempfile.TemporaryDirectory[str]] = []  # deleted when the process ends


def _is_private(folder: Path) -> bool:
    """Return whether only this user can write to `folder`, whose libraries are executed."""
    about = folder.stat()
    return not hasattr(os, "getuid") or (about.st_uid == os.getuid() and not about.st_mode & 0o022)


def _keeps_names(folder: Path) -> bool:
    """Return whether only this user and root can rename what this user has in `folder`."""
    about = folder.stat()
    if not hasattr(os, "getuid"):
        return True
    owners = (0, os.getuid(), Path("/").stat().st_uid)  # in a user namespace the machine's root has another number
    return about.st_uid in owners and (not about.st_mode & 0o022 or bool(about.st_mode & stat.S_ISVTX))


def _stop(process: subprocess.Popen[str]) -> None:
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _version(compiler: list[str]) -> str:
    return _run([*compiler, "--version"])


def _run(command: list[str]) -> str:
    if hung := _hung.get(command[0]):
        raise CompilerError(hung)
    # A session of its own: the compiler's children are stopped with it.
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                output, errors = process.communicate(timeout=PATIENCE)
            except BaseException as error:
                _stop(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                _hung[command[0]] = (
                    f"the C++ compiler {command[0]} did not return within {PATIENCE:g} s and was stopped; name another "
                    "in the environment variable CXX"
                )
                raise CompilerError(_hung[command[0]]) from error
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, output, errors)
        return output
    except OSError as error:
        raise CompilerError(f"the C++ compiler can't be run: {error}") from error
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines() or [""]
        raise CompilerError(f"the C++ compiler {shlex.join(command[:1])} fails: {lines[0].strip()}") from error
