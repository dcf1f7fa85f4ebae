"""Build the objects that a checkpoint describes, without a parser: listed classes, called with checked values."""

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
    """A value is not of the annotated type."""


def build(spec: Any, base: type, where: str, judge: CheckpointJudge, **given: Any) -> Any:
    """Return the object that a spec from a file describes.

    This is the only function that makes objects of what a file says. The command, whose flags may change what the
    checkpoint says, lets jsonargparse build instead: see `cli.sealed`.

    Args:
        spec: `{"class_path": …, "init_args": …}`, nested, of plain data. A class stands for itself without arguments.
        base: The class that the object is to be of.
        where: What it is, for messages.
        judge: Says which classes may be named.
        given: Arguments of the user's own, which replace those in the spec.

    Raises:
        NotAllowedError: it names what it may not, or an argument is not of its annotated type.
        ValueError: the class refuses its arguments.
    """
    return _Builder(judge).of_class(check(spec, Place(classes=(base,)), where, judge), base, where, given)


def check_value(value: Any, annotation: Any, where: str, judge: CheckpointJudge) -> None:
    """Check that plain data from a file are of the annotated type, and the arguments in them. Nothing is built.

    Raises:
        NotAllowedError: they are not.
    """
    _Builder(judge, builds=False).value(value, annotation, where)


class _Builder:
    """Makes values of the annotated types of plain data, which `check` has accepted.

    Args:
        judge: Says which class a name means.
        builds: Whether classes are called. Else None stands for their objects.
    """

    def __init__(self, judge: CheckpointJudge, *, builds: bool = True) -> None:
        self.judge, self.builds = judge, builds

    def value(self, value: Any, annotation: Any, where: str) -> Any:
        """Return `value` as one of the annotation's types.

        Raises:
            NotAllowedError: it is of none.
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
        """Return `value` as the type `member`, which is no union."""
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
            of = args[1] if len(args) > 1 else Any
            return {key: self.value(item, of, f"{where}.{key}") for key, item in value.items()}
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
        of = args if fixed else (args[0] if args else Any,) * len(value)
        items = [self.value(v, a, f"{where}[{i}]") for i, (v, a) in enumerate(zip(value, of, strict=True))]
        return origin(items) if issubclass(origin, (tuple, set, frozenset)) else items

    def _factory(self, value: Any, origin: Any, args: tuple[Any, ...], where: str) -> Any:
        """Return a class, or a callable that makes objects of a class and has some of its arguments."""
        made = tuple(m for m in members(args[-1]) if is_built(m)) if args else ()
        kind, arguments = self._call(value, made, where, {})
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
        for part in ("init_args", "dict_kwargs"):
            for name, value in (spec.get(part) or {}).items():
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
    """Return `value` if it is of the type that is tried."""
    if not condition:
        raise _MisfitError
    return value
