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
import platform
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from lit_effattn.generation import row_products
from lit_effattn.nn.heads import Head
from lit_effattn.ops import recurrent_step
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
        if not isinstance(error, OSError | MemoryError):  # else it may be damaged; the next call compiles again
            path.unlink(missing_ok=True)
        raise CompilationError(f"{type(error).__name__}: {error}") from error
    return made


def _loaded(path: Path, exported: torch.export.ExportedProgram) -> Program:
    with quiet():
        package = torch._inductor.aoti_load_package(str(path))
    values = {**exported.state_dict, **{_name_in_package(name): t for name, t in exported.constants.items()}}
    names = package.get_constant_fqns()
    package.load_constants({name: values[name] for name in names}, check_full_update=True, user_managed=True)
    run = package.loader.run  # a call of `package` reads the structure of its arguments again: .1 ms

    def first(tokens: Tensor, state: list[Tensor]) -> Tensor:
        return run([tokens, *state])[0]

    return Program(first, _shapes(exported)[1:])


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
    _keep_tables(exported)
    return exported


def _keep_tables(exported: torch.export.ExportedProgram) -> None:
    """Replace sines and powers that depend on no input and no weight by constants, which are loaded with the weights.

    Else each step computes them again, in each layer: two thirds of a step with Transformer-XL's positions.
    """
    graph, signature = exported.graph, exported.graph_signature
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node.name in signature.user_inputs]
    values: dict[torch.fx.Node, Tensor] = {}
    waves: dict[torch.fx.Node, Tensor] = {}  # those that a sine or a power goes into
    changed = _overwritten(graph)
    for node in graph.nodes:
        operation, before = node.target, node.all_input_nodes
        fixed = isinstance(operation, torch._ops.OpOverload) and all(n in values for n in before)
        if fixed and node not in changed and isinstance(node.meta.get("val"), Tensor) and not _is_random(operation):
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = operation(*args, **kwargs)
            if operation in _WAVES or any(n in waves for n in before):
                waves[node] = values[node]

    tables: dict[torch.fx.Node, Tensor] = {}
    for node, value in waves.items():
        if all(user in values or user.target is _ASSERTION for user in node.users):
            continue
        table = next((n for n, t in tables.items() if t.dtype == value.dtype and torch.equal(t, value)), None)
        if table is None:
            name = f"table_{len(tables)}"
            with graph.inserting_before(inputs[0]):
                table = graph.placeholder(name)
            table.meta = {**node.meta, "val": node.meta["val"].clone()}
            argument = TensorArgument(name)
            place = len(signature.input_specs) - len(inputs)
            signature.input_specs.insert(place, InputSpec(InputKind.BUFFER, argument, name, persistent=False))
            tables[table] = exported.constants[name] = value.clone()
        node.replace_all_uses_with(table)
    for node in reversed(graph.nodes):  # an assertion would keep what it asserts
        if node.target is _ASSERTION and node.all_input_nodes[0] in values:
            graph.erase_node(node)
    graph.eliminate_dead_code(lambda node: node.is_impure() or _has_branches(node))


_WAVES = {torch.ops.aten.sin.default, torch.ops.aten.cos.default, torch.ops.aten.pow.Scalar}
_ASSERTION = torch.ops.aten._assert_tensor_metadata.default


def _is_random(operation: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in operation.tags


def _may_be_view(operation: torch._ops.OpOverload) -> bool:
    return operation is torch.ops.aten.dropout.default or any(r.alias_info for r in operation._schema.returns)


def _has_branches(node: torch.fx.Node) -> bool:
    """Return whether `node` is a `torch.cond`, whose branches may overwrite its inputs."""
    return node.target is torch.ops.higher_order.cond


def _overwritten(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the nodes whose memory an operation may overwrite."""
    stack = [
        given
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        for given, argument in zip(node.args, node.target._schema.arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    stack += [given for node in graph.nodes if _has_branches(node) for given in node.all_input_nodes]
    overwritten: set[torch.fx.Node] = set()
    while stack:
        node = stack.pop()
        if isinstance(node, torch.fx.Node) and node not in overwritten:
            overwritten.add(node)
            if not isinstance(node.target, torch._ops.OpOverload) or _may_be_view(node.target):
                stack += node.all_input_nodes
    return overwritten


def _key(exported: torch.export.ExportedProgram) -> str:
    """Return a hash of the program (operations, arguments, shapes, types, layouts), PyTorch and the processor."""
    lines = [torch.__version__, _processor(), torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads())]
    lines += [str(exported.graph_signature), row_products.FUNCTION, recurrent_step.FUNCTION]
    graphs = [m.graph for m in exported.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]  # and branches
    for node in (node for graph in graphs for node in graph.nodes):
        value = node.meta.get("val")
        results = [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, Tensor)]
        layouts = [(t.dtype, t.shape, t.stride()) for t in results]
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {layouts}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@cache
def _processor() -> str:
    """Return the processor's instructions, for all of which inductor compiles."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def options() -> dict[str, Any]:
    """Return AOTInductor's options."""
    of_products = row_products.options()
    functions = {recurrent_step.OPERATOR: [recurrent_step.FUNCTION], **of_products.get(row_products.SHIMS, {})}
    return {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.precompile_headers": False,
        "always_keep_tensor_constants": True,
        **of_products,
        row_products.SHIMS: functions,
    }


def _compile(exported: torch.export.ExportedProgram, path: Path) -> None:
    try:
        # Not in inductor's folders, below /tmp at known places: another user may have made them, and inductor runs
        # what it finds there.
        with (
            quiet(),
            TemporaryDirectory(dir=path.parent) as folder,
            patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
        ):
            part = Path(folder, path.name)
            torch._inductor.aoti_compile_and_package(exported, package_path=str(part), inductor_configs=options())
            part.replace(path)
    except Exception as error:  # of any kind, from inductor or the C++ compiler
        raise CompilationError(f"{type(error).__name__}: {error}") from error
