"""Checks that `torch.compile` can run on this machine, and gives it a cache folder of this user's own."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from lit_effattn.ops.runtime import cpp_build


def check_inductor(asked: str, device: torch.device) -> None:
    """Raise a short error at once where inductor would fail in the first step.

    Args:
        asked: Name of the caller, for the error message.
        device: Target device. The CPU needs a C++ compiler, CUDA a C compiler, and both need Python's headers.

    Raises:
        ValueError: If a requirement is missing.
    """
    # Inductor's own folder, /tmp/torchinductor_USER, may be another user's, and inductor runs the libraries in it.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cpp_build.private_folder("inductor")))
    if device.type == "cpu":
        _check_for_cpu(asked)
    elif device.type == "cuda":
        _check_for_cuda(asked)


def _check_for_cpu(asked: str) -> None:
    command = os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++"))
    if shutil.which(command) is None:
        raise ValueError(
            f"{asked} needs a C++ compiler on the CPU, and there is no {command!r}: install one (Debian: apt-get "
            f"install g++), name another in the environment variable CXX, or leave {asked} out"
        )
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        raise ValueError(
            f"{asked} needs Python's headers on the CPU, and there is no Python.h in {headers}: install them (Debian: "
            f"apt-get install python3-dev), or leave {asked} out"
        )


def _check_for_cuda(asked: str) -> None:
    """Let Triton build its kernel launcher. Triton caches it on disk, so it may need no compiler."""
    try:
        from triton.runtime import driver

        driver.active.get_current_device()
    except Exception as error:  # from Triton, its compiler or the driver
        raise ValueError(
            f"{asked} needs Triton on CUDA, and Triton a C compiler and Python's headers ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}): install them (Debian: apt-get install gcc python3-dev), or leave "
            f"{asked} out"
        ) from error
