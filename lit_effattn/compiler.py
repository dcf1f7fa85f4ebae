"""Whether `torch.compile` has what it needs on this machine, said before it is wanted."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path


def check_compiler(asked: str) -> None:
    """Refuse to compile for the CPU where inductor would fail, in the first step and in many words.

    Args:
        asked: What asked for it, as the error is to name it.

    Raises:
        ValueError: There is no C++ compiler, or Python's headers are not there.
    """
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
