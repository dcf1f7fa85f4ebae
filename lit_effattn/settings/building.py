"""Building the classes that settings name, and the data module of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser

from lit_effattn.settings.texts import keep_texts


class Builder:
    """Calls the classes that settings name. jsonargparse would report an error in one as a value of a wrong type.

    Args:
        call: Called with each class and its arguments. Default: the class itself is.
    """

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call or (lambda kind, *args, **kwargs: kind(*args, **kwargs))
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


def direct(value: Any) -> Any:
    """Return `value` with factories that call their class itself: jsonargparse's hold the parser and the command."""
    if type(value) is dict:
        return {key: direct(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(direct(item) for item in value)
    if type(value) is partial and value.func.__module__.startswith("jsonargparse."):
        _, kind, *args = value.args  # after the instantiator
        return partial(kind, *direct(args), **direct(value.keywords))
    return value


def build_data(spec: Any) -> pl.LightningDataModule:
    """Return the data module of a spec, `{"class_path": …, "init_args": …}`, or of a parsed one.

    Raises:
        ValueError: If an option is invalid.
    """
    parser = LightningArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.LightningDataModule, "data", required=True)
    keep_texts(parser)
    builder = Builder()
    parser.add_instantiator(builder, object)
    with builder.errors():
        data: pl.LightningDataModule = parser.instantiate_classes(parser.parse_object({"data": spec})).data
    return data
