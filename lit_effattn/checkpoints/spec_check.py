"""Checks of the classes and functions that a configuration names, against the annotations of their parameters.

A configuration is plain data; `{"class_path": …, "init_args": …}` in it names a class that will be called. `check`
follows the annotations of the called classes, as jsonargparse reads them, and asks a judge about each name:
`CheckpointJudge` for content of a checkpoint (before anything is imported), `UserJudge` for YAML and flags.
"""

from __future__ import annotations

import collections.abc
import datetime
import enum
import inspect
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol, Union

import torch
from jsonargparse import ArgumentParser, Namespace

from lit_effattn.checkpoints.allowlist import NotAllowedError, Trust, find, listed

_TEXT = (str, bytes, os.PathLike)
_PLAIN = (int, float, complex, enum.Enum, datetime.timedelta, datetime.datetime)

ADVICE = """LambdaCallback takes functions, which YAML and flags can't hold. Put a callback into a module of your own:
    from lightning.pytorch import Callback
    class MyCallback(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            ...
and give --trainer.callbacks+=my_module.MyCallback"""


class Place(NamedTuple):
    """The values that an annotation accepts.

    Attributes:
        classes: An object of one of these: a spec of a subclass.
        makes: A callable that returns an object of one of these: again a spec of a subclass.
        function: Any other callable, type or module: a function.
        anything: Any plain data: there is no annotation, or it is Any.
        text: A string.
        literals: These values.
        items: The annotations of a sequence's items.
        values: The annotations of a mapping's values.
    """

    classes: tuple[type, ...] = ()
    makes: tuple[type, ...] = ()
    function: bool = False
    anything: bool = False
    text: bool = False
    literals: tuple[Any, ...] = ()
    items: tuple[Any, ...] = ()
    values: tuple[Any, ...] = ()

    @classmethod
    def of(cls, *annotations: Any) -> Place:
        """Read annotations. A value needs to match only one of them."""
        fields: dict[str, Any] = {}
        for member in (m for annotation in annotations for m in members(annotation)):
            for name, value in _read(member).items():
                fields[name] = fields[name] + value if isinstance(value, tuple) and name in fields else value
        return cls(**fields)

    @property
    def named(self) -> tuple[type, ...]:
        """Base classes of the classes that may be named here."""
        return self.classes + self.makes

    @property
    def holds_names(self) -> bool:
        """Whether a string here, or in the YAML that it holds, would be read as the name of a class or function."""
        return bool(self.named) or self.function or any(Place.of(a).holds_names for a in self.items + self.values)


ANYTHING = Place(anything=True)


def members(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation is a union of, without None's."""
    origin = typing.get_origin(annotation)
    if origin is Union or origin is types.UnionType:
        for member in typing.get_args(annotation):
            yield from members(member)
    elif origin is typing.Annotated:
        yield from members(typing.get_args(annotation)[0])
    elif hasattr(annotation, "__supertype__"):  # NewType
        yield from members(annotation.__supertype__)
    elif hasattr(annotation, "__value__"):  # type X = …
        yield from members(annotation.__value__)
    elif annotation is not type(None):
        yield annotation


def _read(member: Any) -> dict[str, Any]:
    origin, args = typing.get_origin(member) or member, typing.get_args(member)
    if origin is Literal:
        return {"literals": args}
    if origin is collections.abc.Callable or origin is typing.Callable:
        kinds = tuple(kind for m in members(args[1]) if is_built(kind := typing.get_origin(m) or m)) if args else ()
        return {"makes": kinds} if kinds else {"function": True}
    if origin is type:
        kinds = tuple(arg for arg in args if is_built(arg))
        return {"makes": kinds} if kinds else {"function": True}
    if not isinstance(origin, type) or origin in (Any, object):  # Any is a class since Python 3.11
        return {"anything": True}
    if issubclass(origin, _TEXT):
        return {"text": True}
    if issubclass(origin, _PLAIN):
        return {}
    if issubclass(origin, collections.abc.Mapping):
        return {"values": args[1:] or (Any,)}
    if issubclass(origin, collections.abc.Iterable) and origin.__module__ in ("builtins", "collections.abc"):
        return {"items": tuple(arg for arg in args if arg is not ...) or (Any,)}
    if origin is types.ModuleType or getattr(origin, "_is_protocol", False):
        return {"function": True}
    return {"classes": (origin,)}


def is_built(kind: Any) -> bool:
    """Return whether the value of `kind` is a spec of a class, rather than plain data or a tensor."""
    if (
        not isinstance(kind, type)
        or kind in (Any, object)
        or issubclass(kind, (*_TEXT, *_PLAIN, torch.Tensor, type(None)))
    ):
        return False
    return kind.__module__ not in ("builtins", "collections.abc", "typing", "types")


class Judge(Protocol):
    """Decides about names. Each method returns the accepted value, or raises `NotAllowedError`."""

    def named(self, name: str, place: Place, where: str) -> tuple[str, Any]:
        """Return the name of a `class_path` and its class or function; None in its place if it is not called."""

    def key(self, key: Any, where: str) -> Any:
        """Return the accepted name of an option or key of a mapping."""

    def unknown(self, name: str, called: Callable[..., Any], where: str) -> None:
        """Decide about an option that a class does not have."""

    def text(self, text: str, place: Place, where: str) -> Any:
        """Return the accepted value for a string."""

    def object(self, value: Any, place: Place, where: str) -> Any:
        """Return the accepted value for an object that is not plain data."""


def check(value: Any, place: Place, where: str, judge: Judge) -> Any:
    """Return `value` after the judge has accepted all names in it.

    Args:
        value: Plain data with specs of classes.
        place: The values that are accepted.
        where: The name of the value, for messages.
        judge: Decides about the names.

    Raises:
        NotAllowedError: If the judge rejects a name, or `value` is nested too deeply to be read.
    """
    try:
        return _check(value, place, where, judge)
    except RecursionError as error:
        raise NotAllowedError(f"{where} is nested too deeply") from error


def _check(value: Any, place: Place, where: str, judge: Judge) -> Any:
    if value is None or isinstance(value, (bool, int, float, datetime.timedelta, os.PathLike)):
        return value
    if isinstance(value, str):
        return judge.text(value, place, where)
    if isinstance(value, (list, tuple, set)):
        item_place = _inside(place, place.items)
        return [_check(item, item_place, f"{where}[{i}]", judge) for i, item in enumerate(value)]
    if isinstance(value, (Mapping, Namespace)):
        content = vars(value) if isinstance(value, Namespace) else dict(value)
        if "class_path" in content:
            return _check_spec(content, place, where, judge)
        if place.values or place.anything or not place.classes:
            item_place = _inside(place, place.values)
            return {judge.key(k, where): _check(item, item_place, f"{where}.{k}", judge) for k, item in content.items()}
        return _check_arguments(content, place.classes[0], where, judge)  # as jsonargparse: of the annotated class
    return judge.object(value, place, where)


def _inside(place: Place, annotations: tuple[Any, ...]) -> Place:
    """Return the place of the items of a list or mapping. Names in it are judged as at the place itself."""
    if not annotations:
        return place if place.holds_names else ANYTHING
    inside = Place.of(*annotations)
    return inside._replace(
        classes=inside.classes + place.classes,
        makes=inside.makes + place.makes,
        function=inside.function or place.function,
    )


def _check_spec(content: dict[str, Any], place: Place, where: str, judge: Judge) -> dict[str, Any]:
    name, called = judge.named(content["class_path"], place, where)
    if called is None:
        return content
    checked: dict[str, Any] = {"class_path": name}
    for key in sorted(content.keys() & {"init_args", "dict_kwargs"}, reverse=True):
        arguments = content[key]
        arguments = vars(arguments) if isinstance(arguments, Namespace) else arguments
        if arguments is not None:
            if not isinstance(arguments, Mapping):
                raise NotAllowedError(f"{where}.{key} is {arguments!r}, not options and their values")
            checked[key] = _check_arguments(arguments, called, where, judge)
    return checked


def _check_arguments(
    arguments: Mapping[str, Any], called: Callable[..., Any], where: str, judge: Judge
) -> dict[str, Any]:
    """Check the arguments of a call of `called`."""
    known = parameters(called)
    checked = {}
    for name, value in arguments.items():
        annotation, default = known.get(judge.key(name, where), (Any, None))
        if known and name not in known:
            judge.unknown(name, called, where)
        path = f"{where}.{name}" if where else str(name)
        is_default = _is_default(value, default)
        checked[name] = value if is_default else _check(value, Place.of(annotation), path, judge)
    return checked


def _is_default(value: Any, default: Any) -> bool:
    """Return whether `value` is the default in the code. jsonargparse represents a default function by its path."""
    if isinstance(value, str) or default is None:
        return False
    if isinstance(default, str):
        return callable(value) and "." in default and find(default) is value
    return bool(value is default or value == default)


@cache
def parameters(called: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the annotation and the default of each parameter of `called`, as jsonargparse reads them.

    It follows ``**kwargs`` into base classes and calls. If the signature can't be read, the result is empty, and the
    arguments are then checked as plain data.
    """
    parser = ArgumentParser(exit_on_error=False)
    try:
        add = parser.add_class_arguments if inspect.isclass(called) else parser.add_function_arguments
        add(called, fail_untyped=False)
    except Exception:  # the signature of a class of another package may raise any exception
        return {}
    return {a.dest: (getattr(a, "_typehint", a.type), a.default) for a in parser._actions}


class CheckpointJudge:
    """Allows the listed and the trusted classes where one of their base classes is expected.

    Args:
        source: The file, for messages.
        trust: What the user trusts.
    """

    def __init__(self, source: str, trust: Trust) -> None:
        self.source, self.trust = source, trust
        self.texts: dict[str, str] = {}
        """Strings that may have any value, by their places: folders, files, names of data sets."""

    def find(self, name: Any, where: str) -> type:
        """Return the listed or trusted class of this name.

        Raises:
            NotAllowedError: If there is none.
        """
        kind: Any = None
        if isinstance(name, str):
            kind = listed(name) or self.trust.get(name)
        if kind is None:
            raise NotAllowedError(f"{self.source} names {name!r} as {where}, {self._remedy(name)}")
        if not inspect.isclass(kind):
            raise NotAllowedError(f"{self.source} names {name} as {where}: a checkpoint can't name functions")
        return kind

    def named(self, name: Any, place: Place, where: str) -> tuple[str, Any]:
        """Return the name and the class, if the class is listed or trusted and the place accepts it."""
        kind = self.find(name, where)
        if not place.named:
            raise NotAllowedError(f"{self.source} names {name} as {where}, where a checkpoint can't name a class")
        if not issubclass(kind, place.named):
            expected = " or ".join(base.__name__ for base in place.named)
            raise NotAllowedError(f"{self.source} names {name} as {where}, which is not derived from {expected}")
        return (name if "." in name else f"{kind.__module__}.{kind.__qualname__}"), kind

    def key(self, key: Any, where: str) -> Any:
        """Return the key, unless a parser would expand it: `a.class_path` is a class path inside `a`."""
        if type(key) is int or (isinstance(key, str) and "." not in key and key.isprintable()):
            return key
        raise NotAllowedError(f"{self.source} has the key {key!r} in {where}: keys are words and numbers without dots")

    def unknown(self, name: str, called: Callable[..., Any], where: str) -> None:
        """Reject the option."""
        kind = getattr(called, "__name__", str(called))
        raise NotAllowedError(f"{self.source} has {where}.{name}, an option that {kind} does not have")

    @staticmethod
    def _remedy(name: Any) -> str:
        parts = name.split(".") if isinstance(name, str) else []
        never = parts and (parts[0] in sys.stdlib_module_names or parts[0] == "jsonargparse")
        if len(parts) < 2 or never or not all(map(str.isidentifier, parts)):
            return "which no checkpoint may name; do not use this file"
        return (
            "which is not on the list of classes that a checkpoint may name. "
            f"If you know and trust it: --trust {name} (in Python: trust=({name!r},))"
        )

    def text(self, text: str, place: Place, where: str) -> Any:
        """Return the string, unless it would be read as the name of a class or function."""
        if text in place.literals:
            return text
        if place.holds_names and not (place.text and re.fullmatch(r"[\w -]*", text) and listed(text) is None):
            return self.named(text, place, where)[0]
        if "class_path" in text and not place.text:
            raise NotAllowedError(f"{self.source} names a class in the string {text!r} as {where}")
        if place.text:
            self.texts[where] = text
        return text

    def object(self, value: Any, place: Place, where: str) -> Any:
        """Reject the object: a checkpoint's configuration is plain data."""
        raise NotAllowedError(f"{self.source} has a {type(value).__name__} as {where}, where plain data is expected")


class UserJudge:
    """Allows classes of the expected type from any module; functions only if they are trusted.

    Args:
        trust: What the user trusts.
    """

    def __init__(self, trust: Trust) -> None:
        self.trust = trust

    def named(self, name: str, place: Place, where: str) -> tuple[str, Any]:
        """Return the name and the class or function that jsonargparse has imported."""
        if not (place.named or place.function) or "." not in name:
            return name, None  # plain data to jsonargparse, or a name that it has rejected
        called = find(name)
        if called.__module__.startswith("lightning.") and called.__name__ == "LambdaCallback":
            raise NotAllowedError(ADVICE)
        if not (inspect.isclass(called) and place.named and issubclass(called, place.named)):
            self.object(called, place, where)
        return name, called

    def key(self, key: Any, where: str) -> Any:
        """Return the key."""
        return key

    def unknown(self, name: str, called: Callable[..., Any], where: str) -> None:
        """Accept the option: jsonargparse has rejected unknown ones."""

    def text(self, text: str, place: Place, where: str) -> Any:
        """Return the text."""
        return text

    def object(self, value: Any, place: Place, where: str) -> Any:
        """Return an object, or a function if the user trusts it."""
        if inspect.isclass(value):
            is_function = not (place.named and issubclass(value, place.named))
        else:
            is_function = callable(value) and not isinstance(value, place.classes)
        if is_function and not self.trust.has(value):
            name = f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
            raise NotAllowedError(f"{where} names the function {name}: to allow it to be called, give --trust {name}")
        return value
