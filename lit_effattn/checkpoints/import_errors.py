"""Why a module of the user's own could not be imported, with the file and the line of the error."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def import_error(error: Exception) -> str:
    """Return the message of an exception that importing a module has raised, after its file and line.

    The line is that of the user's code: the last one in the traceback that is neither part of Python, nor of an
    installed package, nor of this package.
    """
    if isinstance(error, SyntaxError):
        return f"{_short(error.filename or '')}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    message = str(error) or type(error).__name__
    if not frames:
        return message
    return f"{_short(frames[-1].filename)}, line {frames[-1].lineno}: {type(error).__name__}: {message}"


def _is_own(file: str) -> bool:
    path = Path(file).resolve()
    others = [_PACKAGE, *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))]
    return not file.startswith("<") and not any(path.is_relative_to(folder) for folder in others)


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
