"""Tokens in place of the strings of a checkpoint, which the parser would read as YAML, JSON and file names.

Flags may change any option of a checkpoint, so one parser reads both. But a string that the parser reads can become a
number, a list, or a class to import. Therefore the parser gets a token in place of each string. The string is restored
when constructors are called and settings are written.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import PurePath
from typing import Any, Literal, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings
from jsonargparse._common import parsing_settings  # lists of names can be extended in public, but not taken back

from lit_effattn.checkpoints.allowlist import Trust, is_listed, listed, listed_names
from lit_effattn.checkpoints.spec_check import CheckpointJudge, Judge, Place, check, members, parameters
from lit_effattn.settings.trainer import Trainer

_VERDICTS = "import_path_verdicts"


class Sealed:
    """Tokens in place of strings.

    Names of listed or trusted classes, and the words of the literal annotations of their options, are not replaced.

    Args:
        trust: The classes that the user trusts.
    """

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._prefix = f"text{secrets.token_hex(8)}x"  # which no file can predict
        self._token = re.compile(f"{self._prefix}([0-9]+)y")
        self._texts: list[str] = []
        self._words = frozenset[str]()

    def seal(self, saved: dict[str, Any]) -> Any:
        """Return the settings of a checkpoint with tokens in place of strings: see `close`."""
        self._words = _words({Trainer, *_classes(saved)})
        return self.close(saved)

    def close(self, value: Any) -> Any:
        """Return plain data with tokens in place of strings, in keys too."""
        if isinstance(value, str):
            return value if self._is_word(value) else self._seal(value)
        if isinstance(value, Mapping):
            return {self._key(key): self.close(item) for key, item in value.items()}
        return [self.close(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _is_word(self, text: str) -> bool:
        return text in self._words or listed(text) is not None or self._trust.get(text) is not None

    def _key(self, key: Any) -> Any:
        return self._seal(key) if isinstance(key, str) and not key.isidentifier() else key

    def _seal(self, text: str) -> str:
        self._texts.append(text)
        return f"{self._prefix}{len(self._texts) - 1}y"

    def open(self, value: Any) -> Any:
        """Return `value` with the strings in place of the tokens, at any depth of plain data, settings and partials."""
        if not self._texts:
            return value
        if isinstance(value, str):
            return self._token.sub(lambda match: self._texts[int(match[1])], value)
        if isinstance(value, PurePath):
            return type(value)(self.open(str(value)))
        if isinstance(value, Namespace):
            for key, item in vars(value).items():
                setattr(value, key, self.open(item))
            return value
        if type(value) is dict:
            return {self.open(key): self.open(item) for key, item in value.items()}
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self.open(item) for item in value)
        if type(value) is partial:
            return partial(value.func, *self.open(value.args), **self.open(value.keywords))
        return value

    def open_yaml(self, text: str) -> str:
        """Return YAML with the strings in place of the tokens, quoted."""
        return self._token.sub(lambda match: _quoted(self._texts[int(match[1])]), text)

    def call(self, kind: type, *args: Any, **kwargs: Any) -> Any:
        """Return `kind(*args, **kwargs)` with the strings in place of the tokens."""
        return kind(*self.open(args), **self.open(kwargs))


def _quoted(text: str) -> str:
    """Return a string as YAML that is read as this string."""
    return yaml.safe_dump(text, default_style='"', width=math.inf).rstrip("\n")


def _classes(value: Any) -> Iterator[type]:
    """Yield the listed classes that the strings in plain data name."""
    if isinstance(value, str):
        if (kind := listed(value)) is not None:
            yield kind
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _classes(item)


def _words(kinds: set[type]) -> frozenset[str]:
    """Return the strings in the literal annotations of the options of classes.

    An option may also be given as the options of the class in its annotation, whose strings count, too.
    """
    words: set[str] = set()
    left, seen = [*kinds], set(kinds)
    while left:
        annotations = [annotation for annotation, _ in parameters(left.pop()).values()]
        words.update(word for annotation in annotations for word in _literals(annotation))
        inner = {kind for kind in Place.of(*annotations).classes if is_listed(kind)} - seen
        left.extend(inner)
        seen |= inner
    return frozenset(words)


def _literals(annotation: Any) -> Iterator[str]:
    for member in members(annotation):
        if get_origin(member) is Literal:
            yield from (word for word in get_args(member) if isinstance(word, str))
        else:
            yield from (word for inner in get_args(member) for word in _literals(inner))


def parse_saved(parser: ArgumentParser, saved: dict[str, Any], sealed: Sealed, judge: CheckpointJudge) -> Namespace:
    """Return the settings of a checkpoint, which `check` has accepted, as the parser represents them.

    Raises:
        NotAllowedError: If a name in the result is not allowed.
    """
    with only_listed(judge.trust.names):
        settings = parser.parse_object(sealed.seal(saved), defaults=False, _skip_required=True)
    check_settings(settings, parser, judge)
    return settings


def check_settings(settings: Namespace, parser: ArgumentParser, judge: Judge) -> None:
    """Check all names in parsed settings.

    Raises:
        NotAllowedError: If the judge rejects a name.
    """
    for action in parser._actions:
        if action.dest in settings and hasattr(action, "_typehint"):
            value = settings[action.dest]
            if value is not None and value is not action.default:
                check(value, Place.of(action._typehint), action.dest, judge)


@contextmanager
def only_listed(names: Sequence[str]) -> Iterator[None]:
    """Let jsonargparse import only the listed classes and those of `names`."""
    before = parsing_settings[_VERDICTS]
    parsing_settings[_VERDICTS] = {}
    try:
        set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=[*names])
        # `set_parsing_settings` formats a log message for each name.
        parsing_settings[_VERDICTS].update(dict.fromkeys(listed_names(), True))
        yield
    finally:
        parsing_settings[_VERDICTS] = before
