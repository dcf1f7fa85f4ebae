"""Options that are text: their value is exactly the text on the command line or the string in a file.

jsonargparse reads every value as YAML first, where `null`, `# a title` and `x: y.wav` are not strings. It has no public
way to change that for `str | None`: `register_type` takes no union, and its own parsers parse nested classes. So
the class of its options is extended (`ActionTypeHint`), whose values for a class's option are pairs (`NestedArg`), and
the options that Lightning adds are found in the parser's list (`_actions`).
"""

from pathlib import Path
from typing import Any, get_args, get_origin

from jsonargparse import ArgumentParser
from jsonargparse._typehints import ActionTypeHint
from jsonargparse._util import NestedArg
from lightning.pytorch.cli import LightningArgumentParser

from lit_effattn.checkpoints.build import members

_TEXT = (str, Path)
_YAML = ("class_path", "init_args", "dict_kwargs")  # the first names of keys that are not an option of a class


class Text(str):
    """A string that jsonargparse does not read as YAML: it reads `str` itself alone."""

    __slots__ = ()


def is_text(hint: Any) -> bool:
    """Return whether a type takes any text: `str`, `Path`, or a union of these, None and lists of them."""
    kinds = [kind for kind in members(hint) if kind is not type(None)]
    lists = [kind for kind in kinds if get_origin(kind) is list and set(get_args(kind)) <= {*_TEXT}]
    plain = [kind for kind in kinds if kind not in lists]
    return bool(plain) and all(kind in _TEXT for kind in plain)


class _Option(ActionTypeHint):
    """An option whose value is not read as YAML if it is text, or if it is of a class's option, which reads it."""

    def _check_type(self, value: Any, append: bool = False, cfg: Any = None, mode: Any = None) -> Any:
        if isinstance(value, NestedArg):
            if type(value.val) is str and value.key.partition(".")[0] not in _YAML:
                value = NestedArg(value.key, Text(value.val))
        elif type(value) is str and is_text(self._typehint) and not self._is_list(value):
            value = Text(value)
        elif type(value) is Text and not is_text(self._typehint):
            value = str(value)  # of a class's option that takes other values
        value = super()._check_type(value, append=append, cfg=cfg, mode=mode)
        return str(value) if type(value) is Text else value

    def serialize(self, value: Any, dump_kwargs: Any = None) -> Any:
        """Return `value` for a file. jsonargparse would write a function's name as a text about it."""
        is_name = type(value) is str and str in members(self._typehint)
        return value if is_name else super().serialize(value, dump_kwargs)

    def _is_list(self, value: str) -> bool:
        """Return whether the type has lists, and the value is in brackets."""
        return value.strip().startswith("[") and any(get_origin(kind) is list for kind in members(self._typehint))


class TextParser(LightningArgumentParser):
    """A parser whose text stays text, in nested classes too: their parsers are of this class."""

    def parse_object(self, obj: Any, namespace: Any = None, **options: Any) -> Any:
        """Parse plain data.

        `namespace`, a nested class's values before, is left out where it equals `obj`: each level would parse both.
        """
        keep_texts(self)
        return super().parse_object(obj, namespace=None if obj == namespace else namespace, **options)


def keep_texts(parser: ArgumentParser) -> None:
    """Make the options of a parser take text as it is."""
    for action in parser._actions:
        if type(action) is ActionTypeHint:
            action.__class__ = _Option
