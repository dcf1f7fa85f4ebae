"""The modules, classes and functions that the user trusts (`--trust`, `trust=`), and finding what a name means."""

import importlib
import re
import site
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from lit_effattn import EXPORTS
from lit_effattn.checkpoints.runs import short


class NotAllowedError(ValueError):
    """A checkpoint names a class or function that is not allowed there."""


def _file(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else Path(file).resolve()


class _Trusted(NamedTuple):
    name: str
    value: Any
    files: Path | None  # a module's file, or a package's folder


class Trust:
    """The modules, classes and functions that the user trusts, in addition to the registered classes.

    Args:
        names: Modules of the user's own or their names, all of whose classes and functions are trusted; full names of
            classes or functions of any module; or classes themselves. The modules are imported.

    Raises:
        ValueError: If a name does not exist or can't be imported, or is a module that is installed or part of Python.
    """

    def __init__(self, names: Sequence[str | type | ModuleType] = ()) -> None:
        if isinstance(names, str):
            raise ValueError(f"trust={names!r} is one string; give a tuple of names: trust=({names!r},)")
        names = [name.__name__ if isinstance(name, ModuleType) else name for name in names]
        self._trusted = [
            _trusted(name) if isinstance(name, str) else _Trusted(f"{name.__module__}.{name.__qualname__}", name, None)
            for name in names
        ]

    @property
    def names(self) -> list[str]:
        """The names of the trusted modules, classes and functions."""
        return [trusted.name for trusted in self._trusted]

    def get(self, name: str) -> Any | None:
        """Return the trusted class or function of a name, None if it is not trusted. Imports only trusted modules."""
        for trusted in self._trusted:
            if name == trusted.name and trusted.files is None:
                return trusted.value
            if trusted.files is not None and name.startswith(f"{trusted.name}."):
                try:
                    value = find(name)
                except ImportError:
                    return None
                return value if self.has(value) else None
        return None

    def has(self, value: Any) -> bool:
        """Return whether a class or function is trusted: by its own name, or by the file that defines it."""
        file = _file(getattr(value, "__module__", None) or "")
        return any(
            value is trusted.value
            if trusted.files is None
            else file is not None and (file == trusted.files or trusted.files in file.parents)
            for trusted in self._trusted
        )


def _trusted(name: str) -> _Trusted:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"--trust {name}: name a module, or a class or function in full, as my_module.MyAttention")
    try:
        value = find(name)
    except Exception as error:  # the user's module may raise any exception
        raise ValueError(f"--trust {name}: {import_error(error)}") from error
    if not isinstance(value, ModuleType):
        return _Trusted(name, value, None)
    file = _file(name)
    if file is None or is_installed(file):
        raise ValueError(f"--trust {name} is a module that is not your own: name the class or function in it in full")
    return _Trusted(name, value, file.parent if file.name == "__init__.py" else file)


def find(name: str) -> Any:
    """Import `name`: a module, or an attribute of a module.

    Raises:
        ImportError: If there is no such module or attribute.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # a module that `name` imports
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ModuleNotFoundError(f"there is no module {name!r}", name=name)
    owner = find(module)
    if not hasattr(owner, attribute):
        near = get_close_matches(attribute, dir(owner), n=1)
        meant = f"; did you mean {module}.{near[0]}?" if near else ""
        raise ImportError(f"{module} has no {attribute!r}{meant}", name=name)
    return getattr(owner, attribute)


def imported(name: str) -> type | None:
    """Return the class of a full name, None if there is none or its module has not been imported. Imports nothing."""
    module, _, attribute = name.rpartition(".")
    if module == "lit_effattn":  # which imports what it exports when it is first asked for
        module = EXPORTS.get(attribute, module)
    kind = vars(sys.modules[module]).get(attribute) if module in sys.modules else None
    return kind if isinstance(kind, type) else None


class _CurrentFolder:
    """The last finder of modules: it adds the current folder to the import path for a module that the user names.

    Otherwise a file of that folder would run in place of any module that a library tries to import and lacks.
    """

    words: ClassVar[set[str]] = set()
    folder: ClassVar[Path | None] = None  # the current one when the user's words were read: jsonargparse changes it

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module that no other finder has found."""
        if name not in cls.words or (folder := str(cls.folder or Path.cwd())) in sys.path:
            return None
        if (spec := PathFinder.find_spec(name, [folder])) is not None:
            sys.path.append(folder)
        return spec


def may_name_modules(text: str, *, in_file: bool = False) -> None:
    """Let the words of the user's own arguments or files name modules in the current folder: my_module.MyAttention.

    While jsonargparse reads a file, the file's folder is the current one: then `in_file` is True.
    """
    if not in_file:
        _CurrentFolder.folder = Path.cwd()
    _CurrentFolder.words.update(re.findall(r"[^\W\d]\w*", text))
    if _CurrentFolder not in sys.meta_path:
        sys.meta_path.append(_CurrentFolder)


# ----------------------------------------------------------------------------------------- errors in the user's modules

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
