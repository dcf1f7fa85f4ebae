"""Messages for exceptions in the user's own modules, with the file and the line of the error."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from lit_effattn.checkpoints.runs import short

_PACKAGE = Path(__file__).resolve().parent.parent


def import_error(error: Exception) -> str:
    """Return `file, line N: message` for an exception that importing a module raised.

    The line is the last one in the traceback that belongs neither to Python, nor to an installed package, nor to this
    package.
    """
    if isinstance(error, SyntaxError):
        return f"{short(error.filename or '')}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    message = str(error) or type(error).__name__
    if not frames:
        return message
    return f"{short(frames[-1].filename)}, line {frames[-1].lineno}: {type(error).__name__}: {message}"


def _is_own(file: str) -> bool:
    path = Path(file).resolve()
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
    return not file.startswith("<") and not any(path.is_relative_to(folder) for folder in [_PACKAGE, *installed])
