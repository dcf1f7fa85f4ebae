"""Building the objects that a checkpoint describes, without a parser: listed classes called with checked values."""

from __future__ import annotations

import collections.abc
import enum
import functools
import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lit_effattn.checkpoints.allowlist import NotAllowedError
from lit_effattn.checkpoints.spec_check import CheckpointJudge, Place, check, is_built, members, parameters

_FACTORIES = (collections.abc.Callable, type)


class _MisfitError(ValueError):
    """A value does not have the annotated type."""


def build(spec: Any, base: type, where: str, judge: CheckpointJudge, **given: Any) -> Any:
    """Return the object that a spec from a file describes.

    This is the only function that builds objects from a file. The command, whose flags may change what the checkpoint
    says, lets jsonargparse build them: see `settings.sealed`.

    Args:
        spec: `{"class_path": …, "init_args": …}`, nested, of plain data; or the name of a class, without arguments.
        base: The class of the object, or a base class of it.
        where: The name of the object, for messages.
        judge: Decides which classes may be named.
        given: Arguments from the user, which replace those in the spec.

    Raises:
        NotAllowedError: If a name is not allowed, or an argument does not have its annotated type.
        ValueError: If the class rejects its arguments.
    """
    return _Builder(judge).of_class(check(spec, Place(classes=(base,)), where, judge), base, where, given)


def check_value(value: Any, annotation: Any, where: str, judge: CheckpointJudge) -> None:
    """Check the types of plain data from a file, with the arguments of all specs in them. Nothing is built.

    Args:
        value: The data.
        annotation: The type that they must have.
        where: Their name, for messages.
        judge: Decides which classes may be named.

    Raises:
        NotAllowedError: If a value does not have its annotated type.
    """
    _Builder(judge, builds=False).value(value, annotation, where)


class _Builder:
    """Converts plain data, which `check` has accepted, to values of the annotated types.

    Args:
        judge: Finds the class of a name.
        builds: Whether classes are called. If not, their objects are None.
    """

    def __init__(self, judge: CheckpointJudge, *, builds: bool = True) -> None:
        self.judge, self.builds = judge, builds

    def value(self, value: Any, annotation: Any, where: str) -> Any:
        """Return `value` as one of the annotation's types.

        Raises:
            NotAllowedError: If it has none of these types.
        """
        if value is None or annotation is None:
            return value
        for member in members(annotation):
            try:
                return self._as(value, member, where)
            except _MisfitError:
                continue
        shown = repr(value)
        shown = shown if len(shown) < 80 else f"{shown[:77]}…"
        raise NotAllowedError(f"{self.judge.source} has {shown} as {where}, which must be {_described(annotation)}")

    def _as(self, value: Any, member: Any, where: str) -> Any:
        """Return `value` as the type `member`, which is not a union."""
        origin, args = typing.get_origin(member) or member, typing.get_args(member)
        if origin is Literal:
            return _fits(value, any(value == a and type(value) is type(a) for a in args))
        if origin in _FACTORIES:
            return self._factory(value, origin, args, where)
        if not isinstance(origin, type) or origin in (Any, object):
            return value
        if origin in (bool, str):
            return _fits(value, isinstance(value, origin))
        if origin in (int, float):
            _fits(value, isinstance(value, (int, origin)) and not isinstance(value, bool))
            return origin(value)
        if isinstance(value, str):
            return self._of_text(value, origin, where)
        if isinstance(value, (list, tuple)):
            return self._sequence(value, origin, args, where)
        if isinstance(value, dict) and issubclass(origin, collections.abc.Mapping):
            item_type = args[1] if len(args) > 1 else Any
            return {key: self.value(item, item_type, f"{where}.{key}") for key, item in value.items()}
        return self.of_class(value, origin, where)

    def _of_text(self, text: str, origin: type, where: str) -> Any:
        if issubclass(origin, os.PathLike):
            return Path(text)
        if issubclass(origin, enum.Enum):
            return _fits(origin.__members__.get(text), text in origin.__members__)
        return self.of_class(text, origin, where)

    def _sequence(self, value: Any, origin: type, args: tuple[Any, ...], where: str) -> Any:
        """Return a list, tuple or set."""
        _fits(value, issubclass(origin, collections.abc.Iterable) and not issubclass(origin, collections.abc.Mapping))
        fixed = issubclass(origin, tuple) and args and args[-1] is not ...
        _fits(value, not fixed or len(args) == len(value))
        types = args if fixed else (args[0] if args else Any,) * len(value)
        items = [self.value(v, a, f"{where}[{i}]") for i, (v, a) in enumerate(zip(value, types, strict=True))]
        return origin(items) if issubclass(origin, (tuple, set, frozenset)) else items

    def _factory(self, value: Any, origin: Any, args: tuple[Any, ...], where: str) -> Any:
        """Return a class, or a partial call of a class."""
        bases = tuple(m for m in members(args[-1]) if is_built(m)) if args else ()
        kind, arguments = self._call(value, bases, where, {})
        return kind if origin is type else functools.partial(kind, **arguments)

    def of_class(self, spec: Any, base: type, where: str, given: Mapping[str, Any] | None = None) -> Any:
        """Return the object of a spec."""
        kind, arguments = self._call(spec, (base,), where, given or {})
        try:
            return kind(**arguments) if self.builds else None
        except TypeError as error:
            raise ValueError(f"{self.judge.source}: {where} can't be built: {error}") from error

    def _call(
        self, spec: Any, bases: tuple[type, ...], where: str, given: Mapping[str, Any]
    ) -> tuple[type, dict[str, Any]]:
        """Return the class that a spec or a name means, and its arguments."""
        if isinstance(spec, str):
            spec = {"class_path": spec}
        _fits(spec, isinstance(spec, dict) and "class_path" in spec and all(map(is_built, bases)))
        kind = self.judge.find(spec["class_path"], where)
        _fits(kind, issubclass(kind, bases))
        known, arguments = parameters(kind), dict(given)
        for key in ("init_args", "dict_kwargs"):
            for name, value in (spec.get(key) or {}).items():
                if name not in given:
                    annotation, _ = known.get(name, (None, None))
                    arguments[name] = self.value(value, annotation, f"{where}.{name}")
        return kind, arguments


def _described(annotation: Any) -> str:
    """Return an annotation in words, such as `int, list[int] or 'auto'`."""
    names = [
        name
        for member in members(annotation)
        for name in (
            map(repr, typing.get_args(member))
            if typing.get_origin(member) is Literal
            else [member.__name__ if isinstance(member, type) and not typing.get_args(member) else str(member)]
        )
    ]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _fits(value: Any, condition: bool) -> Any:
    """Return `value` if it has the type that is tried."""
    if not condition:
        raise _MisfitError
    return value
