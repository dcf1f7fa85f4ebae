"""The constructor arguments of an object as plain data, from which a checkpoint builds it again."""

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np

from lit_effattn import registry

T = TypeVar("T", bound="HasInitArgs")
_CLASS = re.compile(r"(\w+\.){2,}([A-Z]\w*)")


class HasInitArgs:
    """Stores the arguments that its class was called with.

    `spec(object)` returns them as nested `{"class_path": …, "init_args": …}`, the form that YAML configurations have
    and that jsonargparse instantiates. Checkpoints contain it, so `load_from_checkpoint` builds the same model from it
    under `weights_only=True`, whether the model came from YAML or from Python.
    """

    _call: tuple[tuple[Any, ...], dict[str, Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Enter the registry, if the class is of this package."""
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("lit_effattn."):
            registry.enter(cls)

    def __new__(cls: type[T], *args: Any, **kwargs: Any) -> T:
        """Store the arguments, before any `__init__` runs."""
        self = super().__new__(cls)
        object.__setattr__(self, "_call", (args, kwargs))  # not nn.Module's, which needs its __init__ first
        return self


@cache
def parameters(kind: type) -> dict[str, Any]:
    """Return the parameters of a class's constructor by their names, each with its default, annotation and text.

    Options that a constructor passes on with `**options` are those of the base class's constructor, without the ones
    that it sets itself, as on the command line: jsonargparse has no public function for it.
    """
    from jsonargparse._parameter_resolvers import get_signature_parameters  # not needed without the command

    return {parameter.name: parameter for parameter in get_signature_parameters(kind, "__init__")}


def subclasses(base: type) -> Iterator[type]:
    """Yield a class and all classes that are derived from it."""
    yield base
    kinds: list[type] = base.__subclasses__()
    for kind in kinds:
        yield from subclasses(kind)


def defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of a class's optional parameters by their names."""
    result = {name: parameter.default for name, parameter in parameters(kind).items()}
    return {name: default for name, default in result.items() if default is not inspect.Parameter.empty}


def init_args(module: HasInitArgs) -> dict[str, Any]:
    """Return the arguments that `module` was built with, as plain data, without those left at their defaults.

    Raises:
        TypeError: If an argument can't be expressed as plain data (a lambda, a module that is not `HasInitArgs`).
    """
    args, kwargs = module._call
    bound = inspect.signature(type(module).__init__).bind(module, *args, **kwargs)
    given = dict([*bound.arguments.items()][1:])  # without self
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    owner = type(module).__name__
    return {name: _plain(value, f"{owner}({name}=…)") for name, value in given.items()}


def spec(module: HasInitArgs) -> dict[str, Any]:
    """Return `{"class_path": …, "init_args": …}`, from which jsonargparse builds an equal (untrained) `module`."""
    return {"class_path": _path(type(module)), "init_args": init_args(module)}


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v, where) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v, where) for k, v in value.items()}
    if isinstance(value, HasInitArgs):
        return spec(value)
    if isinstance(value, type):
        return {"class_path": _path(value)}
    if isinstance(value, partial) and (kind := _kind_of(value)) is not None:
        options = {"init_args": _plain(value.keywords, where)} if value.keywords else {}  # else as the class alone
        return {"class_path": _path(kind), **options}
    raise TypeError(
        f"{where} is {value!r}, which a checkpoint can't hold as plain data: "
        "give a class, functools.partial(Class, option=…), or an object of a class derived from lit_effattn's"
    )


def _kind_of(factory: partial[Any]) -> type | None:
    """Return the class of `partial(Kind, …)`, or of jsonargparse's `partial(its own functions, Kind, …)`."""
    given = [factory.func, *factory.args]
    kinds = [part for part in given if isinstance(part, type)]
    wrappers = [part for part in given if not isinstance(part, type)]
    plain = all(getattr(part, "__module__", "").startswith("jsonargparse.") for part in wrappers)
    return kinds[0] if len(kinds) == 1 and plain else None


def flat(settings: Any, name: str = "") -> dict[str, Any]:
    """Return nested settings by their full names, without `init_args` and `class_path`, and with bare class names.

    Examples:
        >>> flat({"model": {"class_path": "a.B", "init_args": {"c": [1, {"class_path": "d.E"}]}}})
        {'model': 'B', 'model.c.0': 1, 'model.c.1': 'E'}
        >>> flat({"data": {"root": "old.TXT"}, "model": {"attention": "lit_effattn.attention.LinearAttention"}})
        {'data.root': 'old.TXT', 'model.attention': 'LinearAttention'}
    """
    parts: Iterator[tuple[str, Any]]
    if isinstance(settings, Mapping) and settings:
        parts = ((str(key), value) for key, value in settings.items())
    elif isinstance(settings, list) and settings:
        parts = ((str(i), value) for i, value in enumerate(settings))
    else:
        bare = isinstance(settings, str) and _CLASS.fullmatch(settings)
        return {name: bare[2] if bare else settings}
    result: dict[str, Any] = {}
    for key, value in parts:
        inside = name if key in ("init_args", "class_path") else f"{name}.{key}".removeprefix(".")
        value = value.rpartition(".")[2] if key == "class_path" and isinstance(value, str) else value
        if key != "init_args" or value:  # empty: nothing was set
            result.update(flat(value, inside))
    return result
