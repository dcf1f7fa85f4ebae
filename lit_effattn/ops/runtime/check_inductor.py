"""Whether `torch.compile` has what it needs on this machine, said before it is wanted."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch


def check_inductor(asked: str, device: torch.device) -> None:
    """Refuse to compile where inductor would fail, in the first step and in many words.

    Args:
        asked: What asked for it, as the error is to name it.
        device: What is compiled for: a CPU wants a C++ compiler, CUDA a C compiler, and both Python's headers.

    Raises:
        ValueError: One is not there.
    """
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
    """Have Triton make what its kernels are launched by: it keeps that on the disk, and so may need no compiler."""
    try:
        from triton.runtime import driver

        driver.active.get_current_device()
    except Exception as error:  # of Triton, of the compiler that it runs, of the driver
        raise ValueError(
            f"{asked} needs Triton on CUDA, and Triton a C compiler and Python's headers ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}): install them (Debian: apt-get install gcc python3-dev), or leave "
            f"{asked} out"
        ) from error
