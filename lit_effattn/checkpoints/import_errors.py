"""Messages for exceptions in the user's own modules, with the file and the line of the error."""

from __future__ import annotations

import site
import sysconfig
import traceback
from pathlib import Path

from lit_effattn.checkpoints.runs import short

_PACKAGE = Path(__file__).resolve().parent.parent
FOLDERS = (_PACKAGE, *((_PACKAGE / name).resolve() for name in ("callbacks", "datamodules")))
"""The folders of this distribution."""


def import_error(error: Exception) -> str:
    """Return `file, line N: message` for an exception that importing a module raised.

    The line is the last one in the traceback that belongs neither to Python, nor to an installed package, nor to this
    package.
    """
    if isinstance(error, SyntaxError):
        return f"{short(error.filename or '')}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and not is_installed(Path(frame.filename).resolve())
    ]
    message = str(error) or type(error).__name__
    if not frames:
        return message
    return f"{short(frames[-1].filename)}, line {frames[-1].lineno}: {type(error).__name__}: {message}"


def is_installed(file: Path) -> bool:
    """Return whether a file is part of Python, of an installed package or of this distribution."""
    paths = sysconfig.get_paths()
    folders = [*(paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")), *site.getsitepackages()]
    folders.append(site.getusersitepackages())
    return any(file.is_relative_to(folder) for folder in [*(Path(folder).resolve() for folder in folders), *FOLDERS])
