"""Help: the options that `COMMAND --help` shows, their order, and the options of one class."""

import inspect
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, get_args, get_origin, get_type_hints

import lightning.pytorch as pl
from jsonargparse import ArgumentParser
from torch import Tensor

from lit_effattn.hparams import subclasses
from lit_effattn.settings.arguments import Arguments
from lit_effattn.tasks import Task

_TITLES = {
    "help": "options",
    "model": "model (the options of a class: --model.help PixelModel, --model.backbone.help Transformer)",
    "data": "data (the options of a class: --data.help PixelSequences)",
    "checkpoint": "checkpoints",
    "ckpt_path": "a checkpoint to start from",
    "output": "where the result is written",
    "trainer": "Lightning's trainer",
}
"""Titles of the groups of options, by the first name in a group, in the order of the help."""
_CLASSES_OF = ("lit_effattn", "lightning", "torch")
_HIDDEN = ("trainer", "linked")
_MORE = "Lightning's trainer has more options, such as --trainer.max_epochs: lit-effattn {} --help all"


def arranged(text: str, command: str, *, all_options: bool) -> str:
    """Return the help of a command with its groups of options in the order of `_TITLES`.

    Without `all_options`, those of Lightning's trainer are not shown. argparse formats `text` as usage, description and
    groups, with blank lines between.
    """
    usage, about, *groups = re.split(r"\n\n(?=\S)", text.rstrip())
    by_root = {_root(group): group for group in groups}
    order = [root for root in _TITLES if root in by_root] + [root for root in by_root if root not in _TITLES]
    shown = [root for root in order if all_options or root not in _HIDDEN]
    for root in _TITLES.keys() & by_root.keys():
        by_root[root] = re.sub(r"\A.*", f"{_TITLES[root]}:", by_root[root])
    more = [] if all_options else [_MORE.format(command)]
    return "\n\n".join([usage, about, *(by_root[root] for root in shown), *more]) + "\n"


def _root(group: str) -> str:
    """Return the first name of the options in a group."""
    option = re.search(r"^  (?:-\w[^-]*)?--(\w+)", group, re.MULTILINE)
    return option[1] if option else "linked"


def class_help(arguments: Arguments, new_parser: Callable[[], ArgumentParser]) -> bool:
    """Print the help for a class of the model or the data if flags ask for it; return whether they do.

    The help does not depend on other flags: `--model.backbone.help Transformer` needs no `--config`. Without a class,
    the classes are listed.

    Raises:
        ValueError: If there is no class of that name.
    """
    asked = [option for option in arguments.options if re.fullmatch(r"(model|data)[\w.]*\.help", option.key)]
    if not asked:
        return False
    path = asked[-1].key.removesuffix(".help").replace("init_args.", "")
    expected = _declared(path)
    kinds = concrete(bases_of(expected))
    known = sorted({kind.__name__ for kind in kinds if _is_ours(kind)})
    if not known:
        return False
    name = asked[-1].text
    if not name:
        print(f"--{path} is one of {', '.join(known)}.\nThe options of one: --{path}.help {known[0]}")
        return True
    if "." not in name and name not in {kind.__name__ for kind in kinds}:
        close = get_close_matches(name, known, n=1)
        remedy = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        raise ValueError(f"--{path}.help: there is no class {name!r}; {remedy}")
    # The help of a factory leaves out the arguments that its caller gives, such as the attention's width.
    parser = new_parser()
    parser.add_argument(f"--{path}", type=_factory(expected) or expected)
    parser.parse_args([f"--{path}.help", name])  # prints it and exits
    return True


def _declared(path: str) -> Any:
    """Return the type that is declared for an option such as `model.backbone.attention`; None without one."""
    first, *names = path.split(".")
    expected: Any = {"model": Task, "data": pl.LightningDataModule}.get(first)
    for name in names:
        kinds = [kind for kind in concrete(bases_of(expected)) if _is_ours(kind)]
        declared = (get_type_hints(kind.__init__).get(name) for kind in kinds)  # type: ignore[misc]
        hints = [hint for hint in declared if bases_of(hint)]
        # The attention of a Transformer is a factory; that of its Block, which no option names, is a module.
        expected = max(hints, key=lambda hint: _factory(hint) is not None, default=None)
    return expected


def _factory(hint: Any) -> Any:
    """Return the type of a factory in a union; None without one."""
    return next((part for part in get_args(hint) if get_origin(part) is Callable), None)


def bases_of(hint: Any) -> list[type]:
    """Return the classes in a type whose subclasses an option may name: of a union, of a list, or made by a factory."""
    if inspect.isclass(hint) and get_origin(hint) is None:
        return [hint] if hint.__module__.partition(".")[0] in _CLASSES_OF and hint is not Tensor else []
    return [kind for part in get_args(hint) for kind in bases_of(part)]


def concrete(kinds: Iterable[type]) -> list[type]:
    """Return the subclasses of some classes, and these, that an option may name."""
    every = (kind for base in kinds for kind in subclasses(base))
    return [kind for kind in every if not inspect.isabstract(kind) and not kind.__name__.startswith("_")]


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(("lit_effattn.", "torch."))
