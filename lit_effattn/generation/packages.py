"""Compiled steps of generation on the CPU: a library of machine code for each architecture, kept between runs.

    log_probs = step(tokens, state's tensors), which are overwritten with those of the next state

`torch.export` traces a step, and AOTInductor compiles it without the weights. A library is a file in
`~/.cache/lit-effattn/steps` ($XDG_CACHE_HOME), named by a hash of the traced program: every model with the same program
uses it, and after a change of the code, of an option or of PyTorch another one is made.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lit_effattn.nn.heads import Head
from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.quiet import quiet
from lit_effattn.sequence import SequenceModule, State, donated, map_tensors, tensors


class CompilationError(Exception):
    """A step can't be compiled. The message says why."""


class Step(nn.Module):
    """A step of generation, without the draw: a `Program` in Python.

    Args:
        backbone: Causal.
        embed: (B, 1) tokens -> (B, 1, d_input).
        head: Maps the backbone's output to a distribution.
        state: A state, for its structure.
    """

    def __init__(self, backbone: SequenceModule, embed: Callable[[Tensor], Tensor], head: Head, state: State) -> None:
        super().__init__()
        self.backbone, self.embed, self.head, self._state = backbone, embed, head, state
        self.owner = getattr(embed, "__self__", None)  # the module of which `embed` is a method

    def forward(self, tokens: Tensor, state: list[Tensor]) -> Tensor:
        """See the class."""
        values = iter(state)
        with donated():
            y, after = self.backbone(self.embed(tokens), map_tensors(lambda _: next(values), self._state))
            log_probs = self.head.log_probs(y[:, -1])
        for old, new in zip(state, tensors(after), strict=True):
            if new is not old:
                old.copy_(new)
        return log_probs


class Program:
    """A compiled step: `log_probs = program(tokens, state)`, as `Step`.

    Args:
        run: The library's function.
        shapes: The shapes that each of the state's tensors may have; None: any size along a dimension.
    """

    def __init__(self, run: Callable[[Tensor, list[Tensor]], Tensor], shapes: Sequence[Sequence[int | None]]) -> None:
        self._run, self._shapes = run, shapes

    def __call__(self, tokens: Tensor, state: list[Tensor]) -> Tensor:
        """(B, 1) -> (B, L). `state` fits (see `fits`), is contiguous, and no two of its tensors share memory."""
        return self._run(tokens, state)

    def fits(self, state: Sequence[Tensor]) -> bool:
        """Return whether the program was compiled for a state of these sizes."""
        return all(
            len(shape) == t.dim() and all(n in (None, m) for n, m in zip(shape, t.shape, strict=True))
            for shape, t in zip(self._shapes, state, strict=True)
        )


@torch.no_grad()
def program(step: Step, tokens: Tensor, state: Sequence[Tensor], *, may_compile: bool = True) -> Program | None:
    """Return the compiled form of `step`, for its present options and for any values of its weights.

    The weights are read in each call, at their present addresses. A state that holds all positions may have room for
    any number of them. The program is compared with `step` once.

    Args:
        step: The step.
        tokens: (B, 1).
        state: The tensors of a state of B rows.
        may_compile: Whether to compile, which takes about 20 s, if there is no library yet.

    Returns:
        The program. None: there is no library, and `may_compile` is False.

    Raises:
        CompilationError: If the step can't be traced or compiled, or the program gives other numbers.
    """
    state = list(state)
    exported = _traced(step, tokens, state)
    path = cpp_build.private_folder("steps") / f"{_key(exported)}.pt2"
    if not path.exists():
        if not may_compile:
            return None
        _compile(exported, path)
    try:
        made = _loaded(path, exported)
        _check(made, step, tokens, state)
    except Exception as error:
        path.unlink(missing_ok=True)  # it may be damaged; the next call compiles again
        raise CompilationError(f"{type(error).__name__}: {error}") from error
    return made


def _loaded(path: Path, exported: torch.export.ExportedProgram) -> Program:
    with quiet():
        package = torch._inductor.aoti_load_package(str(path))
    values = {**exported.state_dict, **{_name_in_package(name): t for name, t in exported.constants.items()}}
    names = package.get_constant_fqns()
    package.load_constants({name: values[name] for name in names}, check_full_update=True, user_managed=True)
    return Program(package, _shapes(exported)[1:])


def _name_in_package(name: str) -> str:
    """Return what AOTInductor calls a constant of a traced program."""
    _, lifted, number = name.rpartition("lifted_tensor_")
    return f"_tensor_constant{number}" if lifted else name


def _shapes(exported: torch.export.ExportedProgram) -> list[list[int | None]]:
    """Return the shapes of a program's inputs, with None for any size."""
    given = set(exported.graph_signature.user_inputs)
    inputs = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder" and node.name in given]
    return [[n if isinstance(n, int) else None for n in t.shape] for t in inputs]


def _check(program: Program, step: Step, tokens: Tensor, state: list[Tensor]) -> None:
    compiled, expected = ([t.clone() for t in state] for _ in range(2))
    compiled = [program(tokens, compiled), *compiled]
    expected = [step(tokens, expected), *expected]
    for a, b in zip(compiled, expected, strict=True):
        if not torch.allclose(a.double(), b.double(), rtol=1e-2, atol=1e-3, equal_nan=True):
            raise ValueError(f"it differs from Python's step by {(a.double() - b.double()).abs().max():.1e}")


def _traced(step: Step, tokens: Tensor, state: list[Tensor]) -> torch.export.ExportedProgram:
    """Trace `step`; the dimensions of `state` that grow with the positions may have any size."""
    few, many = (step.backbone.initial_state(1, max_len=n, device=torch.device("meta")) for n in (64, 128))
    dims = [
        {i: torch.export.Dim.AUTO for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n}
        for a, b in zip(tensors(few), tensors(many), strict=True)
    ]
    exported, reason = None, ""
    try:
        with quiet():
            exported = torch.export.export(step, (tokens, state), dynamic_shapes=({}, dims), strict=False)
    except Exception as error:  # of any kind, from torch.export
        reason = f"{type(error).__name__}: {error}"
    gc.collect()  # see `interchange.export`: else configurations can't name the modules' classes by their short names
    if exported is None:
        raise CompilationError(reason)
    return exported


def _key(exported: torch.export.ExportedProgram) -> str:
    """Return a hash of the program: operations, their arguments, shapes, types and layouts, and what compiles it."""
    lines = [torch.__version__, torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
    lines.append(str(exported.graph_signature))
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        results = [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, Tensor)]
        layouts = [(t.dtype, t.shape, t.stride()) for t in results]
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {layouts}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _compile(exported: torch.export.ExportedProgram, path: Path) -> None:
    part = path.with_suffix(f".{os.getpid()}.pt2")
    options = {"aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True}
    try:
        with quiet():
            torch._inductor.aoti_compile_and_package(exported, package_path=str(part), inductor_configs=options)
        part.replace(path)
    except Exception as error:  # of any kind, from inductor or the C++ compiler
        raise CompilationError(f"{type(error).__name__}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
