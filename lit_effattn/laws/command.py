"""`lit-effattn check` and `python -m lit_effattn.laws`: the laws for a module that is given by its name."""

import argparse
import ast
import importlib
import inspect
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from lit_effattn.laws.adapter import Adapter
from lit_effattn.laws.checking import adapter_for, check
from lit_effattn.laws.registry import LAWS

D_MODEL, N_HEADS = 8, 2
"""The sizes of an attention that is given by its class."""


def main(args: list[str] | None = None, program: str = "python -m lit_effattn.laws") -> None:
    """Check the modules that `args` name. The process ends with exit code 1 if one breaks a law, 2 if one is unknown.

    Args:
        args: The arguments. Default: those of the process.
        program: The command that the help shows.
    """
    given = parser(program).parse_args(args)
    torch.set_num_threads(1)
    broken = []
    for name in given.names:
        try:
            adapter = named(name, dict(given.set), given.unit)
            report = check(
                adapter,
                laws=None if given.laws is None else map(str.strip, given.laws.split(",")),
                device=given.device,
                dtype=getattr(torch, given.dtype) if given.dtype else None,
                bitwise=given.bitwise,
            )
        except (ValueError, TypeError) as error:
            _fail(program, str(error))
        report.print()
        if not report.ok:
            broken.append(report.summary())
    if broken:
        print(*broken, sep="\n", file=sys.stderr)
        sys.exit(1)


def parser(program: str = "lit-effattn check") -> argparse.ArgumentParser:
    """Return the parser of the command."""
    made = argparse.ArgumentParser(
        program,
        description="Check the laws that a module with a state keeps: split streams, single steps, no look at the "
        "future, independent rows, padding, gradients, half precision, compilation, saving.",
        epilog=f"The laws: {', '.join(LAWS)}.",
        allow_abbrev=False,
    )
    made.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="An attention kind such as LinearAttention; a class, a function or an adapter of your own, "
        "my_module.MyAttention or my_module:MyAttention; or a recurrent module such as torch.nn.GRU.",
    )
    made.add_argument("--laws", metavar="A,B", help="Names of laws. Default: all.")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        type=_option,
        metavar="OPTION=VALUE",
        help="An option of the class, such as --set stride=4. May be given several times.",
    )
    made.add_argument("--unit", type=int, help="The chunk, window or stride: lengths around it are tested. Default: 4.")
    made.add_argument("--device", default="cpu", help="Default: cpu.")
    made.add_argument("--dtype", choices=["float64", "float32"], help="Default: the adapter's; float64 as a rule.")
    made.add_argument("--bitwise", action="store_true", help="Results must be equal to the bit.")
    return made


def named(name: str, options: Mapping[str, Any], unit: int | None = None) -> Adapter:
    """Return the adapter of a module that is given by its name.

    Args:
        name: See the help of the command.
        options: Keyword arguments of the class or function.
        unit: See `Adapter.unit`. Default: `chunk_size`, `window`, `stride` or `mem_len` of `options`, else 4.

    Raises:
        ValueError: If there is none of that name, it can't be built, or it takes no options.
    """
    adapter = _named(name, options)
    if unit is not None:
        adapter.unit = unit
    return adapter


def _named(name: str, options: Mapping[str, Any]) -> Adapter:
    kind = _imported(name)
    if isinstance(kind, Adapter | nn.Module):
        _check_no_options(name, options)
        return adapter_for(kind)
    if isinstance(kind, type) and issubclass(kind, Adapter):
        return kind(**options)
    if not callable(kind):
        raise ValueError(
            f"{name} is a {type(kind).__name__}; name a class, a function that builds a module, or an Adapter"
        )
    sizes = {parameter: options.get(parameter, size) for parameter, size in _sizes(kind).items()}
    keywords = {option: value for option, value in options.items() if option not in sizes}
    if isinstance(kind, type) and issubclass(kind, nn.RNNBase):
        keywords = {"batch_first": True, **keywords}  # as the laws call it
    build = partial(kind, *sizes.values(), **keywords)
    try:
        build()
    except Exception as error:  # the user's class may raise any exception
        raise ValueError(
            f"{name} can't be built by {_call(build)}: {type(error).__name__}: {error}; give its options by --set, or "
            "name a function without arguments that builds it"
        ) from error
    adapter = adapter_for(build)
    units = [options[key] for key in ("chunk_size", "window", "stride", "mem_len") if isinstance(options.get(key), int)]
    adapter.unit = max([2, *units] if units else [adapter.unit])
    return adapter


def _check_no_options(name: str, options: Mapping[str, Any]) -> None:
    if options:
        raise ValueError(f"{name} takes no options; leave out --set {next(iter(options))}=…")


def _imported(name: str) -> Any:
    """Import a class, a function or an object by its name.

    Raises:
        ValueError: If there is none, or its module can't be imported.
    """
    module, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not module:
        module = "lit_effattn.attention"
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)
    try:
        result = importlib.import_module(module)
        for part in attribute.split("."):
            result = getattr(result, part)
    except ModuleNotFoundError as error:
        raise ValueError(f"{name}: {error}") from error
    except AttributeError as error:
        near = get_close_matches(attribute, dir(importlib.import_module(module)), n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name}: {module} has no {attribute!r}{meant}") from error
    except Exception as error:  # the user's module may raise any exception
        raise ValueError(f"{name}: {type(error).__name__}: {error}") from error
    return result


def _sizes(kind: Any) -> dict[str, int]:
    """Return the parameters at the start that are sizes, and their arguments."""
    if isinstance(kind, type) and issubclass(kind, nn.RNNBase):
        return {"input_size": D_MODEL, "hidden_size": D_MODEL}
    taken = {}
    # Not the signature of a class, which up to Python 3.11.2 may be that of `__new__`.
    is_class = isinstance(kind, type)
    given = [*inspect.signature(kind.__init__ if is_class else kind).parameters.values()]
    for parameter in given[is_class:]:
        size = {"d_model": D_MODEL, "dim": D_MODEL, "hidden_size": D_MODEL, "embed_dim": D_MODEL, "width": D_MODEL}.get(
            parameter.name, {"n_heads": N_HEADS, "num_heads": N_HEADS, "heads": N_HEADS}.get(parameter.name)
        )
        if size is None or parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        taken[parameter.name] = size
    return taken


def _call(build: partial[Any]) -> str:
    given = [*map(repr, build.args), *(f"{key}={value!r}" for key, value in build.keywords.items())]
    return f"{getattr(build.func, '__name__', build.func)}({', '.join(given)})"


def _option(text: str) -> tuple[str, Any]:
    """Return the name and the value of `name=value`; a value that is not a literal of Python is a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not OPTION=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _fail(program: str, message: str) -> NoReturn:
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
