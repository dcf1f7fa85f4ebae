"""Messages for settings that jsonargparse rejects: an unknown name with the nearest one, or a value with its type.

jsonargparse reports every type of a union that a value does not match. `fault` therefore compares the settings one at
a time with the classes that they configure. What it does not find is reported in jsonargparse's words.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, get_args, get_origin, get_type_hints

import lightning.pytorch as pl
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch.nn import Module

from lit_effattn.attention import Attention
from lit_effattn.callbacks import LastCheckpoint
from lit_effattn.checkpoints.build import described, members
from lit_effattn.checkpoints.trust import find, import_error
from lit_effattn.cli.help import bases_of, concrete
from lit_effattn.hparams import parameters, subclasses
from lit_effattn.nn.lstm import LSTM
from lit_effattn.nn.transformer import Transformer
from lit_effattn.settings.arguments import Arguments, Settings
from lit_effattn.settings.resume import SECTIONS
from lit_effattn.settings.shipped import shipped
from lit_effattn.settings.trainer import Trainer
from lit_effattn.settings.yaml_text import FILES, load_yaml
from lit_effattn.tasks import Task
from lit_effattn.tasks.options import flags

_ROOTS: dict[str, Any] = {"model": Task, "data": pl.LightningDataModule}
_GROUPS: dict[str, type] = {"trainer": pl.Trainer, "checkpoint": LastCheckpoint}  # options whose class is not a choice
_LIKELY: dict[str, Any] = {
    **_ROOTS,
    "model.optimizer": OptimizerCallable,
    "model.backbone": Transformer | LSTM,
    "model.lr_scheduler": LRSchedulerCallable,
    "model.backbone.attention": Callable[[int, int, bool], Attention],
}
"""Options in whose classes an option without its group is looked for."""
_MOST = 16  # names of classes that a message lists


def fault(arguments: Arguments, known: Collection[str], run: Mapping[str, Any] | None = None) -> str | None:
    """Return the message for the first wrong setting, else for the first missing one; None if none is found.

    `known` are the names of the parser's options; `run` are the settings that `arguments` override.
    """
    known = {*known, "config", "print_config", "help"}
    roots = {name.partition(".")[0] for name in known}
    wrong, missing = list[str](), list[str]()
    for option in arguments.options:
        if not option.key and (name := option.args[0]) in arguments.remaining:
            meant = f"; did you mean --config {name}?" if name in shipped() else ""
            wrong.append(f"{name!r} is not an option: options begin with --, and a value follows its option{meant}")
    hints = get_type_hints(getattr(Trainer, arguments.command, object))
    if arguments.command == "generate":
        hints |= {name: option.annotation for name, option in flags().items()}
    stated = arguments.over(run or {}).options
    for name, node in stated.items():
        if name in _GROUPS and name in roots:
            _add_options(node, name, _GROUPS[name], parameters(_GROUPS[name]), wrong, missing)
        elif name in roots:
            _add(node, name, _ROOTS.get(name) or hints.get(name), wrong, missing)
        elif name in arguments.flags.options or name not in SECTIONS:  # a file serves all commands
            path = ".".join([name, *_first(arguments.flags.options.get(name, node))])
            other = None if _meant(path, known).endswith(f".{path}") else _command_with(name)
            wrong.append(
                f"there is no option --{path} here: it is one of {other}" if other else _no_option(path, known)
            )
    if arguments.command == "fit" and not {"model", "data"} <= stated.keys():
        missing.append(
            "fit needs a model and data: give --config with a shipped configuration, such as digits_linear, or a file "
            "of your own; or --model and --data"
        )
    return next(iter([*wrong, *missing]), None)


def _command_with(name: str) -> str | None:
    """Return a command that has this option or these options; None if there is none."""
    if name in {*SECTIONS, "name", "ckpt_path"}:
        return "fit"
    return "test" if name == "average" else "generate" if name in flags() else "data" if name == "output" else None


def _first(node: Settings) -> Iterator[str]:
    for name, inside in [*node.options.items()][:1]:
        yield name
        yield from _first(inside)


def _add(node: Settings, path: str, hint: Any, wrong: list[str], missing: list[str]) -> None:
    """Add the messages for an option with this type, and for the options of the classes that it names."""
    bases = bases_of(hint)
    if not bases:
        if node.value is not None and not node.options and hint is not None and not _takes(hint, node.value):
            wrong.append(f"{path}={node.value} is not {described(hint)}")
    elif node.items is not None:
        for item in node.items:
            _add(item, path, hint, wrong, missing)
    elif node.value is None:
        wrong += [_classless(path, name, bases) for name in node.options]
    elif all(bases_of(member) or not _takes(member, node.value) for member in members(hint)):
        kind = _kind(node.value, path, bases)
        if isinstance(kind, str):
            wrong.append(kind)
        else:
            accepted = [*parameters(kind).items()][_passed(hint) :]
            _add_options(node, path, kind, dict(accepted), wrong, missing)


def _add_options(
    node: Settings, path: str, kind: type, accepted: dict[str, Any], wrong: list[str], missing: list[str]
) -> None:
    """Add the messages for the options of a class, which accepts these parameters."""
    for name, inside in node.options.items():
        if name in accepted:
            _add(inside, f"{path}.{name}", accepted[name].annotation, wrong, missing)
        elif path in _GROUPS:
            wrong.append(_no_option(f"{path}.{name}", [f"{path}.{name}" for name in accepted]))
        else:
            wrong.append(_unknown_option(path, name, kind, [*accepted]))
    given = {*node.options, *getattr(kind, "fixed_by_data", ())}
    needs = [name for name, p in accepted.items() if p.default is inspect.Parameter.empty and name not in given]
    if needs:
        missing.append(f"{path} needs {', '.join(needs)}: give --{path}.{needs[0]} VALUE, or its init_args in YAML")


def _kind(name: Any, path: str, bases: list[type]) -> type | str:
    """Return the class that an option names, or the message why there is none."""
    base = f"{'an' if bases[0].__name__[0] in 'AEIOU' else 'a'} {bases[0].__name__}"
    if not isinstance(name, str):
        return f"{path}={name} is not {base}: give the name of a class, or its class_path and init_args"
    if name.endswith(FILES):
        return f"{path}: there is no file {name}, or it holds no settings"
    if name[:1] in ("{", "["):
        try:
            load_yaml(name)
        except (ValueError, yaml.YAMLError) as error:
            return f"{path} can't be read: {getattr(error, 'problem', None) or error}"
    kinds = {kind.__name__: kind for kind in concrete(bases)}
    named = {f"{kind.__module__}.{name}" for kind in concrete(bases) if kind.__name__ == name}
    if len(named) > 1:
        return f"{path}: several classes are called {name}; give one of {', '.join(sorted(named))}"
    if name in kinds:
        return kinds[name]
    everywhere = (kind for base in (*_ROOTS.values(), Module) for kind in subclasses(base))
    kind: Any = next((kind for kind in everywhere if kind.__name__ == name), None)
    if "." in name:
        try:
            kind = find(name)
        except Exception as error:  # the user's module may raise any exception
            return f"{path}: {name}: {import_error(error)}"
    if isinstance(kind, type) and issubclass(kind, tuple(bases)):
        return kind
    if kind is not None:
        return f"{path}: {name} is not {base}; {_listed(sorted(kinds))}"
    instead = _instead(name, sorted(kinds))
    # There are hundreds of modules, too many to list.
    hint = kinds and (len(kinds) < 100 or not instead.startswith("there are"))
    return f"{path}: there is no class {name!r}" + (f"; {instead}" if hint else "")


def _passed(hint: Any) -> int:
    """Return the number of arguments that the program passes to the factory in a type."""
    if get_origin(hint) is get_origin(Callable[..., Any]):
        given = get_args(hint)[0]
        return len(given) if isinstance(given, list) else 0
    return max(map(_passed, get_args(hint)), default=0)


def _takes(hint: Any, value: Any) -> bool:
    """Return whether jsonargparse accepts a value for a type."""
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
    except ValueError:  # a type that it does not check
        return True
    try:
        if isinstance(value, str):
            parser.parse_args([f"--value={value}"])
        else:
            parser.parse_object({"value": value})
    except ArgumentError:
        return False
    return True


def _no_option(name: str, known: Collection[str]) -> str:
    meant = _meant(name, known)
    return f"there is no option --{name}" + (f"; did you mean --{meant}?" if meant else "")


def _meant(name: str, known: Collection[str]) -> str:
    """Return the option that a misspelt name, or one without its group, means; empty if none is similar."""
    options = sorted(known)
    groups = dict.fromkeys(option.partition(".")[0] for option in options)
    group, dot, rest = name.partition(".")
    if dot and group in groups:
        return "".join(get_close_matches(name, options, n=1))
    close = "".join(get_close_matches(group, groups, n=1))
    if dot:
        return f"{close}.{rest}" if close else ""
    paths = {option.rpartition(".")[2]: option for option in options}
    possible = [path for path in _option_paths() if path.partition(".")[0] in groups]
    paths |= {path.rpartition(".")[2]: path for path in reversed(possible)}
    return paths.get(name) or close or "".join(paths[near] for near in get_close_matches(name, paths, n=1, cutoff=0.75))


def _option_paths() -> list[str]:
    """Return the paths of the options of classes, such as `model.backbone.d_model`, the likeliest first."""
    return [
        f"{group}.{name}"
        for group, hint in _LIKELY.items()
        for kind in concrete(bases_of(hint))
        if kind.__module__.startswith("lit_effattn.") or group in ("model.optimizer", "data")
        for name in [*parameters(kind)][_passed(hint) :]
    ]


def _unknown_option(path: str, name: str, kind: type, names: list[str]) -> str:
    elsewhere = [option for option in _option_paths() if option.endswith(f".{name}") and option != f"{path}.{name}"]
    inside = [option for option in elsewhere if option.startswith(f"{path}.")]
    instead = f"did you mean --{(inside or elsewhere)[0]}?" if elsewhere else _instead(name, names)
    return f"{path}: {kind.__name__} has no option {name!r}; {instead}"


def _classless(path: str, name: str, bases: list[type]) -> str:
    known = sorted({kind.__name__ for kind in concrete(bases)})
    named = f" (there are {', '.join(known)})" if 0 < len(known) < 10 else ""
    return f"{path}.{name}: name the class that option {name!r} belongs to first, --{path} CLASS{named}"


def _instead(name: str, known: list[str]) -> str:
    prefixed = [k for k in known if name.startswith(k) or k.startswith(name)]
    if close := max(prefixed, key=len, default="") or "".join(get_close_matches(name, known, n=1)):
        return f"did you mean {close}?"
    return _listed(known)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"there are {', '.join(names[:_MOST])}{more}"
