"""Memory of one call of a parser. jsonargparse 4.53 parses nested settings again at each level, 3ⁿ times at level n."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from jsonargparse._common import parser_context_vars

_RESULTS: ContextVar[dict[Any, Any] | None] = ContextVar("_RESULTS", default=None)
_CONTEXT = ("lenient_check", "load_value_mode", "parsing_defaults", "validating_defaults")
_VALUES = (str, int, bool, type(None))


@contextmanager
def parsed_before() -> Iterator[dict[Any, Any]]:
    """Yield the results of the outermost call that is running; they are forgotten when it ends."""
    running = _RESULTS.get()
    results: dict[Any, Any] = {} if running is None else running
    token = _RESULTS.set(results)
    try:
        yield results
    finally:
        _RESULTS.reset(token)


def context() -> tuple[Any, ...]:
    """Return what the result of a parse depends on besides the parser and its arguments.

    Settings may name files, relative to the folder of the file that names them, which is then the current folder.
    """
    variables: Any = parser_context_vars
    return Path.cwd(), *(variables[name].get() for name in _CONTEXT)


class _Same:
    """An object that equals only itself, and lives as long as the key that holds it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def frozen(value: Any) -> Any:
    """Return a key that is equal for equal settings: of containers their items, of other objects their identity."""
    kind = type(value)
    if kind in _VALUES:
        return kind, value
    if kind is float:
        return kind, value.hex()  # −0 differs from 0, and NaN equals itself
    if isinstance(value, Namespace):
        return kind, tuple((name, frozen(item)) for name, item in vars(value).items())
    if isinstance(value, Mapping):
        return kind, tuple((frozen(name), frozen(item)) for name, item in value.items())
    if kind in (list, tuple):
        return kind, tuple(frozen(item) for item in value)
    return _Same(value)


def copied(value: Any) -> Any:
    """Return settings in new containers."""
    kind = type(value)
    if isinstance(value, Namespace):
        copy = kind()
        vars(copy).update({name: copied(item) for name, item in vars(value).items()})
        return copy
    if kind is dict:
        return {name: copied(item) for name, item in value.items()}
    return kind(copied(item) for item in value) if kind in (list, tuple) else value
