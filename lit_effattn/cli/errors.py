"""Short messages for errors in a configuration.

jsonargparse reports each type of a union that did not match, level by level. `plain` reduces its report to the option,
the value and the expected type. Reports that are not recognised are returned without repetitions.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.loggers import Logger

from lit_effattn.attention import Attention, CrossAttention
from lit_effattn.attention.positions import Positions
from lit_effattn.checkpoints.import_errors import import_error
from lit_effattn.checkpoints.trust import find
from lit_effattn.hparams import parameters
from lit_effattn.nn.front_ends import FrontEnd
from lit_effattn.nn.heads import Head
from lit_effattn.sequence import SequenceModule
from lit_effattn.settings.arguments import FILES, load_yaml
from lit_effattn.settings.own_classes import subclasses
from lit_effattn.settings.resume import OF_FIT
from lit_effattn.settings.shipped import shipped
from lit_effattn.tasks import Task
from lit_effattn.tasks.ctc import Decoder

_BASES: dict[str, type] = {
    "model": Task,
    "data": pl.LightningDataModule,
    "backbone": SequenceModule,
    "encoder": SequenceModule,
    "backbone.decoder": SequenceModule,
    "attention": Attention,
    "cross_attention": CrossAttention,
    "positions": Positions,
    "head": Head,
    "embedding": torch.nn.Module,
    "front_end": FrontEnd,
    "decoder": Decoder,
    "optimizer": torch.optim.Optimizer,
    "lr_scheduler": torch.optim.lr_scheduler.LRScheduler,
    "callbacks": pl.Callback,
    "logger": Logger,
}
_GROUPS = ("data", "model", "model.optimizer", "model.backbone", "model.lr_scheduler", "model.backbone.attention")
"""Groups of options that depend on a class, the likeliest first."""
_MOST = 16  # names of classes that a message lists
_GIVEN = {"self", "params", "optimizer", "args", "kwargs"}
"""Parameters that are not options, except `optimizer` of a task."""
_BY_THE_MODEL = {"d_model", "n_heads", "causal"}
"""Parameters of an attention that the `Transformer` passes."""
_NOISE = re.compile(
    r"^\s*(-\s)?(Does not validate against|Subtypes: |Errors:|Given value|Expected a <class 'NoneType'>|$)"
)


def plain(report: str) -> str:
    """Shorten a report of jsonargparse. Any other text is returned unchanged."""
    if "required: data, model" in report:
        return (
            "fit needs a model and data: give --config with a shipped configuration, such as digits_linear, or a file "
            "of your own; or --model and --data"
        )
    if "Parser key" not in report and "Does not validate" not in report:
        return report
    option = _option(report)
    if match := re.search(r"class_path '(?:\w+\.)*(\w+)'.*\n?.*Requirement '([^']+)' not met", report):
        return f"{match[1]} needs a package that is not installed: pip install '{match[2]}'"
    if match := re.search(r"the key '.*' is there twice, .*; join them", report):
        return f"{option} can't be read: {match[0]}"
    value = _value(report)
    if match := re.search(r"Option '([^']+)' is not accepted", report):
        refusing = re.findall(rf"class_path '([^']+)':\s+Option '{re.escape(match[1])}' is", report)
        return _unknown_option(option, match[1], refusing or re.findall(r"class_path[ =]'([^']+)'", report)[-1:])
    match = re.search(r"class_path '([^']+)':\s+unrecognized arguments: --(\w+)", report)
    if match and match[2] not in _names(_find(match[1])):
        return _unknown_option(option, match[2], [match[1]])
    if match := re.search(r"Importing '([^']+)' is not allowed", report):
        return f"{option} names {match[1]}, which YAML and flags may not name"
    if match := re.search(r"Expected ('[^']+' to be a (?:function|sub)[^\n]*?)\.?(?:$|\s+Got value)", report, re.M):
        return f"{option}: expected {_readable(match[1])}"
    if failed := _failed_import(option, report):
        return failed
    match = re.search(r"Expected a dot import path string: (\S+)", report)
    if match and not re.search(r"Expected a <class '(int|float)'>", report):
        return _unreadable(option, report) or _unknown_class(option, match[1])
    if match := re.search(r"Dict must include a class_path.*?but got NestedArg\(key='([^']+)'", report):
        return _classless_option(option, match[1])
    if match := re.search(r"the following arguments are required: (.+)", report):
        return f"{option} needs {match[1]}: give --{option}.{match[1].split(', ')[0]} VALUE, or its init_args in YAML"
    expected = [_readable(e) for e in re.findall(r"^\s*(?:- )?Expected a (.+?)(?:\. Got value: .*)?$", report, re.M)]
    expected = list(dict.fromkeys(e for e in expected if not e.startswith(("NoneType", "path but", "dot import"))))
    if option and value is not None and expected:
        return f"{option}={value} is not {' or '.join(expected)}"
    match = re.search(r"^\s*(?:- )?Not a valid subclass of (\w+)$", report, re.M)
    if match and re.search(r"Given value type: <class '(int|float|bool)'>$", report, re.M):
        return f"{option}={value} is not a {match[1]}: give the name of a class, or its class_path and init_args"
    kept = [line.strip().removeprefix("- ") for line in report.splitlines() if not _NOISE.match(line)]
    return "; ".join(dict.fromkeys(kept))


def unknown(report: str, options: Iterable[str]) -> str:
    """Return the message for a flag, or a setting in YAML, that is not in `options`; other reports unchanged."""
    if match := re.match(r"(?:Group '([\w.]+)' does not accept option|Option) '([^']+)'", report):
        setting = ".".join(filter(None, match.groups()))
        meant = _meant(setting, options)
        return f"there is no setting {setting}" + (f"; did you mean {meant}?" if meant else "")
    match = re.match(r"unrecognized arguments: ([^\s=]+)", report)
    if match and not match[1].startswith("--"):
        meant = f"; did you mean --config {match[1]}?" if match[1] in shipped() else ""
        return f"{match[1]!r} is not an option: options begin with --, and a value follows its option{meant}"
    if match and match[1][2:].partition(".")[0] in OF_FIT and not {"--init_weights"} & {*options}:
        return f"there is no option {match[1]} here: it is one of fit"
    if match:
        meant = _meant(match[1][2:].rstrip("+"), options)
        return f"there is no option {match[1]}" + (f"; did you mean --{meant}?" if meant else "")
    return report


def _meant(name: str, flags: Iterable[str]) -> str:
    """Return the option that a misspelt name, or one without its group, means; empty if none is similar."""
    options = sorted(flag[2:] for flag in flags if re.fullmatch(r"--[\w.]+", flag))
    groups = dict.fromkeys(option.partition(".")[0] for option in options)
    group, dot, rest = name.partition(".")
    if dot and group in groups:
        return "".join(get_close_matches(name, options, n=1))
    close = "".join(get_close_matches(group, groups, n=1))
    if dot:
        return f"{close}.{rest}" if close else ""
    paths = _paths(options)
    return paths.get(name) or close or "".join(paths[near] for near in get_close_matches(name, paths, n=1, cutoff=0.75))


def _paths(options: Iterable[str]) -> dict[str, str]:
    """Return the path of each option by its last name; of options of one name, the likeliest path."""
    paths = {option.rpartition(".")[2]: option for option in options}
    return paths | {path.rpartition(".")[2]: path for path in reversed(option_paths())}


def option_paths() -> list[str]:
    """Return the paths of the options of classes, such as `model.backbone.d_model`, the likeliest first."""
    return list(dict.fromkeys(f"{group}.{name}" for group in _GROUPS for kind in _of(group) for name in _names(kind)))


def _of(path: str) -> list[Any]:
    """Return the classes that the option `path` may name: those of this package, or else, as for loggers, all."""
    base: Any = _base(path)
    kinds: list[Any] = _concrete(base)
    if base.__module__.startswith("lit_effattn.") or (path in _GROUPS and path != "model.optimizer"):
        kinds = [kind for kind in kinds if kind.__module__.startswith("lit_effattn.")]
    if path.endswith("backbone"):
        kinds = [kind for kind in kinds if not issubclass(kind, (Attention, CrossAttention))]
    return kinds


def _names(kind: Any) -> list[str]:
    """Return the options of a class: its parameters, without those that the program passes."""
    given = _GIVEN if issubclass(kind, torch.optim.lr_scheduler.LRScheduler) else _GIVEN - {"optimizer"}
    given = given | _BY_THE_MODEL if issubclass(kind, Attention) else given
    return [name for name in parameters(kind) if name not in given]


def _option(report: str) -> str:
    """Return the keys from the outermost to the innermost. The report repeats them for each type that was tried."""
    keys: list[str] = []
    depth = -1
    for match in re.finditer(r'^(\s*).*Parser key "([^"]+)"', report, re.M):
        if len(match[1]) > depth:
            depth = len(match[1])
            keys.append(match[2])
    return ".".join(keys)


def _value(report: str) -> str | None:
    """Return the innermost value, which the report states first."""
    match = re.search(r"(?:Got|Given) value: (.*?)(?:\. Got value: .*)?$", report, re.M)
    return match[1] if match else None


def _failed_import(option: str, report: str) -> str:
    """Return the error of a file, or of importing a class of the user's own, that `option` names; empty without one.

    Names in a checkpoint are not imported here: unlisted ones were rejected before.
    """
    match = re.search(r"Given value: (?:NestedArg\(key='([\w.]+)', val=(.*)\)|(.*))$", report, re.M)
    if match is None:
        return ""
    path = f"{option}.{match[1]}" if match[1] and not option.endswith(match[1]) else option
    text: str = match[2] or match[3] or ""
    value: Any = text
    with suppress(ValueError, SyntaxError):
        value = ast.literal_eval(text)
    with suppress(ValueError, yaml.YAMLError):
        value = load_yaml(value) if isinstance(value, str) else value
    if _base(path) and isinstance(value, str) and value.endswith(FILES):
        return f"{path}: there is no file {value}, or it holds no settings"
    for name in _class_paths(value) if _base(path) else ():
        try:
            find(name)
        except Exception as error:  # the user's module may raise any exception
            return f"{path}: {name}: {import_error(error)}"
    return ""


def _unreadable(option: str, report: str) -> str:
    """Return the error of a mapping or a list that is not YAML, or has a key twice; empty for other values."""
    match = re.search(r"Expected a dot import path string: ([{\[].*)", report)
    try:
        load_yaml(match[1] if match else "")
    except (ValueError, yaml.YAMLError) as error:
        return f"{option} can't be read: {getattr(error, 'problem', None) or error}"
    return ""


def _class_paths(value: Any) -> Iterator[str]:
    """Yield the import paths of classes in the value of an option: the value, its items, or its `class_path`."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _class_paths(item)
    elif isinstance(value, dict):
        yield from _class_paths(value.get("class_path"))


def _readable(expected: str) -> str:
    """Return a type in words: `typing.Literal['pre', 'post']` as `one of 'pre', 'post'`, `<class 'int'>` as `int`."""
    if match := re.fullmatch(r"typing\.Literal\[(.*)\]", expected):
        return f"one of {match[1]}"
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", expected)


def _unknown_option(path: str, name: str, class_paths: list[str]) -> str:
    kinds = [kind for path_ in class_paths if (kind := _find(path_)) is not None]
    # If a class or a list of classes is accepted, the report names the base class as well.
    own: Any = next((kind for kind in kinds if kind not in _BASES.values()), kinds[-1] if kinds else None)
    if own is None:
        return f"{path}: there is no option {name!r}"
    if own in _BASES.values():  # no class was named, so only the base class is known
        return _classless_option(path, name)
    elsewhere = [option for option in option_paths() if option.endswith(f".{name}") and option != f"{path}.{name}"]
    inside = [option for option in elsewhere if option.startswith(f"{path}.")]
    instead = f"did you mean --{(inside or elsewhere)[0]}?" if elsewhere else _instead(name, _names(own))
    return f"{path}: {own.__name__} has no option {name!r}; {instead}"


def _base(path: str) -> type | None:
    """Return the base class of the classes that the option `path` may name."""
    names = path.split(".")
    return _BASES.get(".".join(names[-2:])) or _BASES.get(names[-1])


def _known(path: str) -> list[str]:
    """Return the names of all concrete classes that the option `path` may name."""
    base = _base(path)
    return sorted({kind.__name__ for kind in _concrete(base)}) if base else []


def _classless_option(path: str, name: str) -> str:
    known = _known(path)
    named = f" (there are {', '.join(known)})" if 0 < len(known) < 10 else ""
    return f"{path}.{name}: name the class that option {name!r} belongs to first, --{path} CLASS{named}"


def _unknown_class(path: str, name: str) -> str:
    base, known = _base(path), _known(path)
    if base and any(kind.__name__ == name for other in _BASES.values() for kind in _concrete(other)):
        return f"{path}: {name} is not a {base.__name__}; {_listed(known)}"
    instead = _instead(name, known)
    # There are hundreds of modules, too many to list.
    hint = known and (len(known) < 100 or not instead.startswith("there are"))
    return f"{path}: there is no class {name!r}" + (f"; {instead}" if hint else "")


def _instead(name: str, known: list[str]) -> str:
    prefixed = [k for k in known if name.startswith(k) or k.startswith(name)]
    if close := max(prefixed, key=len, default="") or "".join(get_close_matches(name, known, n=1)):
        return f"did you mean {close}?"
    return _listed(known)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"there are {', '.join(names[:_MOST])}{more}"


def _concrete(base: type) -> list[type]:
    kinds = (kind for kind in subclasses(base) if kind is not base)
    return [kind for kind in kinds if not inspect.isabstract(kind) and not kind.__name__.startswith("_")]


def _find(class_path: str) -> Any:
    with suppress(ImportError, ValueError):
        return find(class_path)
    return None
