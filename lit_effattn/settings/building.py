"""Building the objects that settings name, and the data module of a run."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lit_effattn.checkpoints.build import Allowed, arguments_of
from lit_effattn.settings.texts import TextParser
from lit_effattn.tasks import Task


class Builder:
    """Calls the classes that settings name. jsonargparse would report an error in one as a value of a wrong type.

    Args:
        spec: The model in a checkpoint, from which a task gets the arguments in `Task.fixed_by_data`. None: they come
            from the data.
        allowed: The classes that `spec` may name.
    """

    def __init__(self, spec: dict[str, Any] | None = None, allowed: Allowed | None = None) -> None:
        self._spec, self._allowed = spec, allowed or Allowed("the checkpoint")
        self._error: Exception | None = None

    def __call__(self, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """Return `kind(*args, **kwargs)`.

        Raises:
            ValueError: If the data lack a required argument of a task. The message names it.
        """
        try:
            if isinstance(kind, type) and issubclass(kind, Task):
                if self._spec is not None:
                    kwargs |= arguments_of(self._spec, kind, kind.fixed_by_data, self._allowed)
                _check_from_data(kind, kwargs)
            return kind(*direct(args), **direct(kwargs))
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


def _check_from_data(task: type[Task], arguments: Mapping[str, Any]) -> None:
    required = inspect.signature(task.__init__).parameters
    for name in task.fixed_by_data:
        if name in arguments and arguments[name] is None and required[name].default is inspect.Parameter.empty:
            raise ValueError(f"{task.__name__} takes {name} from the data, which have none; use data for this task")


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
    parser = TextParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.LightningDataModule, "data", required=True)
    builder = Builder()
    parser.add_instantiator(builder, object)
    with builder.errors():
        data: pl.LightningDataModule = parser.instantiate_classes(parser.parse_object({"data": spec})).data
    return data
