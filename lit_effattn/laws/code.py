"""Python code for the scripts that reproduce a failure without this package."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import TYPE_CHECKING

import torch
from torch import nn

from lit_effattn.laws.adapter import Adapter

if TYPE_CHECKING:
    from lit_effattn.laws.law import Failure, Trial
    from lit_effattn.laws.subject import Subject

_METHODS = ("call", "initial_state", "reset", "select", "donated", "combine", "packed", "generate", "pack", "unpack")
_SELECT = """\
def select(module, state, rows):
    return torch.utils._pytree.tree_map(lambda t: t.index_select({dim}, rows), state)"""


def script(subject: Subject, failure: Failure) -> str | None:
    """Return a script that fails as the trial does, or None if the law or the adapter has no source."""
    adapter = subject.adapter
    lines = failure.law.script(subject, failure.trial)
    if not lines:
        return None
    dtype = str(subject.dtype)
    build = adapter.source or f"...  # {adapter.name}, as it was given to check()"
    device = "" if subject.device.type == "cpu" else f"{str(subject.device)!r}, "
    after = "" if not isinstance(subject.module, nn.Module) else f".to({device}{dtype}).eval()"
    body = "\n".join(lines)
    try:
        functions = [_function(adapter, name) for name in _METHODS if re.search(rf"\b{name}\(", body)]
    except OSError:  # the adapter was typed at a prompt, or given by `python -c`
        return None
    rest = "\n".join([f"module = ({build}){after}" if after else f"module = {build}", "", *functions, "", body])
    imports = [line for line in adapter.imports if re.search(rf"\b{re.escape(line.split()[-1])}\b", rest)]
    return "\n".join(["import torch", *imports, "", "torch.manual_seed(1)", rest]) + "\n"


def _function(adapter: Adapter, name: str) -> str:
    """Return the source of a method of the adapter as a function."""
    method = inspect.getattr_static(type(adapter), name)
    if name == "select" and type(adapter).select is Adapter.select:
        return _SELECT.format(dim=adapter.batch_dim)
    function = method.__func__ if isinstance(method, staticmethod) else method
    text = textwrap.dedent(inspect.getsource(function))
    body = ast.parse(text).body[0].body  # type: ignore[attr-defined]
    if ast.get_docstring(ast.parse(text).body[0]) is not None:  # type: ignore[arg-type]
        body = body[1:]
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    given = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    statements = "\n".join(text.splitlines()[body[0].lineno - 1 : body[-1].end_lineno])
    return f"def {name}({given}):\n{statements}"


def inputs(subject: Subject, batch: int, n: int, seed: int = 0) -> str:
    """Return the code of `subject.inputs(batch, n, seed)`."""
    adapter = subject.adapter
    generator = f"generator=torch.Generator().manual_seed({seed})"
    where = "" if subject.device.type == "cpu" else f".to({str(subject.device)!r})"
    if adapter.vocabulary is not None:
        return f"torch.randint(1, {adapter.vocabulary}, ({batch}, {n}), {generator}){where}"
    narrow = "" if subject.dtype == torch.float64 else f".to({subject.dtype})"
    width = adapter.input_width(subject.module)
    return f"2 * torch.randn({batch}, {n}, {width}, {generator}, dtype=torch.float64){narrow}{where}"


def begin(variant: str, batch: int, max_len: int) -> str:
    """Return the code of the first state of a variant such as `kept-initial`."""
    start = variant.rpartition("-")[2]
    if start not in ("initial", "max_len"):
        return "None"
    return f"initial_state(module, {batch}, {max_len if start == 'max_len' else None}, x)"


def streamed(trial: Trial) -> list[str]:
    """Return the lines that feed `x` in segments, and leave the outputs in `parts` and the state in `state`."""
    return [
        f"state, parts = {begin(trial.variant, trial.batch, trial.n)}, []",
        f"with {without_gradients(trial)}:",
        f"    for part in x.split({list(trial.way)}, 1):",
        "        z, state = call(module, part, state)",
        "        parts.append(z)",
    ]


def without_gradients(trial: Trial) -> str:
    """Return the code of the contexts of a trial's calls."""
    return "torch.no_grad(), donated()" if trial.variant.startswith("donated") else "torch.no_grad()"


def close(subject: Subject, law: str, got: str, expected: str) -> str:
    """Return the line that compares two results, with the tolerance of a law."""
    rtol, atol, *_ = subject.tolerance(law)
    return f"torch.testing.assert_close({got}, {expected}, rtol={rtol:g}, atol={atol:g})"


def padded(subject: Subject, trial: Trial) -> list[str]:
    """Return the lines that put 0 into the padding of `x`."""
    n = trial.way[0]
    if subject.adapter.padding != "left":
        return [f"for i, n in enumerate({list(trial.lengths)}): x[i, n:{n}] = 0"]
    return [
        f"for i, n in enumerate({list(trial.lengths)}):",
        f"    x[i, :{n}] = torch.cat([torch.zeros_like(x[i, n:{n}]), x[i, :n]])",
    ]
