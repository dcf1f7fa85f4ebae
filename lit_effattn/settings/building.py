"""Building the classes that settings name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Builder:
    """Calls the classes that settings name. jsonargparse would report an error in one as a value of a wrong type.

    Args:
        call: Called with each class and its arguments.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._error: Exception | None = None

    def __call__(self, kind: type, *args: Any, **kwargs: Any) -> Any:
        """Return the object."""
        try:
            return self._call(kind, *args, **kwargs)
        except Exception as error:
            self._error = error
            raise

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise, instead of jsonargparse's error, the one of the class. A TypeError is one of its arguments."""
        try:
            yield
        except (ValueError, TypeError) as error:
            if isinstance(self._error, TypeError):
                raise ValueError(str(self._error)) from error
            raise self._error or error from error
