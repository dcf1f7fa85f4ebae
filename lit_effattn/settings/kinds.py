"""The table of the attention kinds, from their signatures and docstrings. Imports PyTorch, not Lightning."""

import inspect
from collections.abc import Iterable
from inspect import Parameter
from textwrap import fill
from typing import Any, get_origin

import lit_effattn.attention
from lit_effattn.attention import Attention
from lit_effattn.checkpoints.trust import find, import_error
from lit_effattn.hparams import parameters

_SHARED = ("d_model", "n_heads", "causal")  # the arguments that a `Transformer` passes to every kind


def kinds(names: list[str]) -> str:
    """Return the output of `lit-effattn kinds`: a row for each kind, or the described options of the named kinds.

    Raises:
        ValueError: If there is no kind of a name, or several.
    """
    known = attention_kinds()
    if names:
        return "\n\n".join(_described(own_kind(name) if "." in name else _known(name, known)) for name in names)
    rows = [("kind", "direction", "state", "cross-attention")]
    rows += [(name, _direction(kind), _state(kind), _cross(name)) for name, kind in known.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for i, kind in enumerate(known.values()):
        given = ", ".join(f"{option}={_default(parameter)}" for option, parameter in options_of(kind).items())
        lines[i + 1] += "\n" + fill(given, 116, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([*lines, "", "What the options of a kind do: lit-effattn kinds SoftmaxAttention"])


def attention_kinds() -> dict[str, type[Attention]]:
    """Return the attention kinds by their names."""
    exported = {name: getattr(lit_effattn.attention, name) for name in lit_effattn.attention.__all__}
    return {name: kind for name, kind in exported.items() if _is_kind(kind)}


def own_kind(name: str) -> type[Attention]:
    """Import a kind of the user's own by its full name, such as my_module.MyAttention.

    Raises:
        ValueError: If it can't be imported, or is not an attention kind.
    """
    try:
        kind = find(name)
    except Exception as error:  # the user's module may raise any exception
        raise ValueError(f"{name}: {import_error(error)}") from error
    if not (inspect.isclass(kind) and issubclass(kind, Attention)):
        raise ValueError(f"{name} is not an attention kind: derive its class from lit_effattn.attention.Attention")
    missing = sorted(getattr(kind, "__abstractmethods__", ()))
    if kind.initial_state is Attention.initial_state and kind.empty_state is Attention.empty_state:
        missing = sorted({*missing, "empty_state"})
    if missing:
        raise ValueError(f"{name} has no method {' and no method '.join(missing)}, which each kind needs")
    return kind


def options_of(kind: type[Attention]) -> dict[str, Any]:
    """Return the options of a kind: the parameters that a `Transformer` does not pass."""
    own = {name: p for name, p in parameters(kind).items() if name not in _SHARED}
    return {name: p for name, p in own.items() if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}


def full_names(short: str, known: Iterable[str]) -> list[str]:
    """Return the names in `known` for which `short` stands: `linear` for LinearAttention, `xl` for the one with it."""
    wanted = short.lower().replace("_", "").replace("-", "")
    exact = [name for name in known if wanted in (name.lower(), name.removesuffix("Attention").lower())]
    return exact or [name for name in known if wanted and wanted in name.lower()]


def _known(name: str, known: dict[str, type[Attention]]) -> type[Attention]:
    names = full_names(name, known)
    if len(names) > 1:
        raise ValueError(f"the attention kind {name!r} is ambiguous: give one of {', '.join(names)}")
    if not names:
        raise ValueError(
            f"there is no attention kind {name!r}; there are {', '.join(known)}, and your own by their full names, "
            "such as my_module.MyAttention"
        )
    return known[names[0]]


def _is_kind(value: Any) -> bool:
    # Until Python 3.10, Callable[…] counts as a class.
    is_class = inspect.isclass(value) and get_origin(value) is None
    return is_class and issubclass(value, Attention) and not inspect.isabstract(value)


def _described(kind: type[Attention]) -> str:
    """Return the first sentence of a kind's docstring, and each option with its default and description."""
    first = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    lines = [f"{kind.__name__}: {first}"]
    lines.append(f"  direction: {_direction(kind)}; state: {_state(kind)}; cross-attention: {_cross(kind.__name__)}")
    for option, parameter in options_of(kind).items():
        text = f"{option}={_default(parameter)}  {' '.join((parameter.doc or '').split())}".rstrip()
        lines.append(fill(text, 116, initial_indent="  ", subsequent_indent="      "))
    return "\n".join(lines)


def _default(parameter: Any) -> str:
    """Return the default of a parameter as Python writes it."""
    value = parameter.default
    if value is Parameter.empty:
        return "(required)"
    return value.__name__ if inspect.isclass(value) else repr(value)


def _direction(kind: Any) -> str:
    if _layer(kind, causal=False) is not None:
        return "causal, bidirectional"
    return "depends on its options" if _layer(kind, causal=True) is None else "causal"


def _state(kind: Any) -> str:
    """Return whether the state of a causal layer has a bounded size."""
    layer = _layer(kind, causal=True)
    if layer is None:
        return "depends on its options"
    if layer.bounded_by is None:
        return "bounded"
    return f"grows, unless {layer.bounded_by} is given" if layer.bounded_by else "grows"


def _layer(kind: Any, *, causal: bool) -> Attention | None:
    """Return a small layer, or None if the kind needs other sizes, or has options without a default."""
    try:
        return kind(8, 2, causal)
    except Exception:  # the user's kind may raise any exception
        return None


def _cross(name: str) -> str:
    cross = name.removesuffix("Attention") + "CrossAttention"
    return cross if cross in lit_effattn.attention.__all__ else "none"
