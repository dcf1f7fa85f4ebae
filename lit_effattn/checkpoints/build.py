"""Building the model that a checkpoint describes, without a parser.

What a checkpoint says of its model is plain data, `{"class_path": …, "init_args": …}`, nested. `build` looks each name
up in the registry of classes, or among those that the user trusts, and calls the class with values that have the
annotated types. Nothing that is not registered or trusted is imported, and no string is read as anything but text or
the name of a class.
"""

from __future__ import annotations

import collections.abc
import datetime
import enum
import functools
import inspect
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union

import torch

from lit_effattn import registry
from lit_effattn.checkpoints.printable import cut
from lit_effattn.checkpoints.trust import NotAllowedError, Trust
from lit_effattn.hparams import parameters

_FACTORIES = (collections.abc.Callable, type)
_NOT_BUILT = (str, bytes, os.PathLike, int, float, complex, enum.Enum, datetime.timedelta, datetime.datetime)


class _MisfitError(ValueError):
    """A value does not have the annotated type."""


def build(spec: Any, base: type, where: str, allowed: Allowed, **given: Any) -> Any:
    """Return the object that a spec from a file describes.

    Args:
        spec: `{"class_path": …, "init_args": …}`, nested, of plain data; or the name of a class, without arguments.
        base: The class of the object, or a base class of it.
        where: The name of the object, for messages.
        allowed: The classes that may be named.
        given: Arguments from the user, which replace those in the spec.

    Raises:
        NotAllowedError: If a name is not allowed, or an argument does not have its annotated type.
        ValueError: If the class rejects its arguments.
    """
    try:
        return _Builder(allowed).value(spec, base, where, given)
    except RecursionError as error:
        raise NotAllowedError(f"{allowed.source}: {where} is nested too deeply") from error


def arguments_of(spec: Any, kind: type, names: collections.abc.Iterable[str], allowed: Allowed) -> dict[str, Any]:
    """Return some arguments of `kind` from its spec in a file, as values of the annotated types.

    Raises:
        NotAllowedError: If an argument does not have its annotated type.
    """
    given, known, builder = spec["init_args"], parameters(kind), _Builder(allowed)
    return {n: builder.value(given[n], known[n].annotation, f"model.{n}") for n in names if n in given and n in known}


class Allowed:
    """The classes that a file, `source` in messages, may name: the registered ones, and those that the user trusts."""

    def __init__(self, source: str, trust: Trust | None = None) -> None:
        self.source, self.trust = source, trust or Trust()

    def find(self, name: Any, where: str) -> type:
        """Return the class of a full name.

        Raises:
            NotAllowedError: If there is none.
        """
        kind: Any = (registry.entered(name) or self.trust.get(name)) if isinstance(name, str) else None
        if kind is None:
            raise NotAllowedError(f"{self.source} names {name!r} as {where}, {_remedy(name)}")
        if not inspect.isclass(kind):
            raise NotAllowedError(f"{self.source} names {name} as {where}: a checkpoint can't name functions")
        return kind


def _remedy(name: Any) -> str:
    parts = name.split(".") if isinstance(name, str) else []
    never = parts and (parts[0] in sys.stdlib_module_names or parts[0] == "jsonargparse")
    if len(parts) < 2 or never or not all(map(str.isidentifier, parts)):
        return "which no checkpoint may name; do not use this file"
    return (
        "which is not on the list of classes that a checkpoint may name. "
        f"If you know and trust it: --trust {name} (in Python: trust=({name!r},))"
    )


class _Builder:
    """Converts plain data to values of the annotated types, and calls the classes that they name."""

    def __init__(self, allowed: Allowed) -> None:
        self.allowed = allowed

    def value(self, value: Any, annotation: Any, where: str, given: Mapping[str, Any] | None = None) -> Any:
        """Return `value` as one of the annotation's types; `given` are arguments that replace those of a spec.

        Raises:
            NotAllowedError: If it has none of these types.
        """
        if value is None:
            return None
        kinds = list(members(annotation)) or [Any]
        if isinstance(value, str):  # text, before the name of a class
            kinds.sort(key=lambda kind: kind is not str and typing.get_origin(kind) is not Literal)
        for member in kinds:
            try:
                return self._as(value, member, where, given or {})
            except (_MisfitError, OverflowError):  # an integer beyond all floats
                continue
        expected = described(annotation)
        raise NotAllowedError(f"{self.allowed.source} has {cut(value)} as {where}, which must be {expected}")

    def _as(self, value: Any, member: Any, where: str, given: Mapping[str, Any]) -> Any:
        """Return `value` as the type `member`, which is not a union."""
        origin, args = typing.get_origin(member) or member, typing.get_args(member)
        if origin is Literal:
            return _fits(value, any(value == a and type(value) is type(a) for a in args))
        if origin in _FACTORIES:
            bases = tuple(m for m in members(args[-1]) if is_built(m)) if args else ()
            kind, arguments = self._call(value, bases, where, given)
            return kind if origin is type else functools.partial(kind, **arguments)
        if not isinstance(origin, type) or origin in (Any, object, inspect.Parameter.empty):
            return _fits(value, _is_plain(value))
        if origin in (bool, str):
            return _fits(value, isinstance(value, origin))
        if origin in (int, float):
            _fits(value, isinstance(value, (int, origin)) and not isinstance(value, bool))
            return origin(value)
        if isinstance(value, str) and issubclass(origin, os.PathLike):
            return Path(value)
        if isinstance(value, str) and issubclass(origin, enum.Enum):
            return _fits(origin.__members__.get(value), value in origin.__members__)
        if isinstance(value, (list, tuple)):
            return self._sequence(value, origin, args, where)
        if isinstance(value, dict) and issubclass(origin, collections.abc.Mapping):
            _fits(value, all(isinstance(key, (str, int)) for key in value))
            item_type = args[1] if len(args) > 1 else Any
            return {key: self.value(item, item_type, f"{where}.{key}") for key, item in value.items()}
        kind, arguments = self._call(value, (origin,), where, given)
        try:
            return kind(**arguments)
        except TypeError as error:
            raise ValueError(f"{self.allowed.source}: {where} can't be built: {error}") from error

    def _sequence(self, value: Any, origin: type, args: tuple[Any, ...], where: str) -> Any:
        _fits(value, issubclass(origin, collections.abc.Iterable) and not issubclass(origin, collections.abc.Mapping))
        fixed = issubclass(origin, tuple) and args and args[-1] is not ...
        _fits(value, not fixed or len(args) == len(value))
        kinds = args if fixed else (args[0] if args else Any,) * len(value)
        items = [self.value(v, a, f"{where}[{i}]") for i, (v, a) in enumerate(zip(value, kinds, strict=True))]
        return origin(items) if issubclass(origin, (tuple, set, frozenset)) else items

    def _call(
        self, spec: Any, bases: tuple[type, ...], where: str, given: Mapping[str, Any]
    ) -> tuple[type, dict[str, Any]]:
        """Return the class that a spec or a name means, and its arguments."""
        spec = {"class_path": spec} if isinstance(spec, str) else spec
        _fits(spec, isinstance(spec, dict) and "class_path" in spec and bool(bases) and all(map(is_built, bases)))
        kind = self.allowed.find(spec["class_path"], where)
        known = parameters(kind)
        if not issubclass(kind, bases):
            expected = " or ".join(base.__name__ for base in bases)
            raise NotAllowedError(
                f"{self.allowed.source} names {spec['class_path']} as {where}, which is not derived from {expected}"
            )
        arguments, taken = dict(given), spec.get("init_args") or {}
        if not isinstance(taken, dict) or spec.keys() - {"class_path", "init_args"}:
            raise NotAllowedError(f"{self.allowed.source} describes {where} by other parts than options and values")
        for name, value in taken.items():
            if name not in known:
                raise NotAllowedError(f"{self.allowed.source} has {where}.{name}, an option that {kind.__name__} lacks")
            if name not in given:
                arguments[name] = self.value(value, known[name].annotation, f"{where}.{name}")
        return kind, arguments


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def _fits(value: Any, condition: bool) -> Any:
    """Return `value` if it has the type that is tried."""
    if not condition:
        raise _MisfitError
    return value


# -------------------------------------------------------------------------------------------------------- annotations


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


def is_built(kind: Any) -> bool:
    """Return whether the value of `kind` is a spec of a class, rather than plain data or a tensor."""
    kind = typing.get_origin(kind) or kind
    if not isinstance(kind, type) or kind in (Any, object) or getattr(kind, "_is_protocol", False):
        return False
    if issubclass(kind, (*_NOT_BUILT, torch.Tensor)):
        return False
    return kind.__module__ not in ("builtins", "collections.abc", "typing", "types")


def described(annotation: Any) -> str:
    """Return a type in words: `Literal["pre", "post"] | None` as `one of 'pre', 'post'`."""
    return " or ".join(
        f"one of {', '.join(map(repr, typing.get_args(kind)))}"
        if typing.get_origin(kind) is Literal
        else kind.__name__
        if inspect.isclass(kind) and typing.get_origin(kind) is None
        else str(kind).replace("typing.", "")
        for kind in dict.fromkeys(members(annotation))
    )
