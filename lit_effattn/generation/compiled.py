"""Steps that a loop repeats, in Python or as machine code.

    log_probs, state = steps(tokens, state)

On the CPU, `torch.export` traces a step and AOTInductor compiles it without the weights, in about 20 seconds. The
library is a file in `~/.cache/lit-effattn/steps` ($XDG_CACHE_HOME), named by a hash of the traced program: every model
with the same program uses it. After a change of the code, an option, the number of rows, PyTorch or the processor,
another one is made.
"""

from __future__ import annotations

import gc
import hashlib
import platform
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_effattn.attention.base import Attention
from lit_effattn.nn.heads import Head
from lit_effattn.ops.runtime import cpp_build
from lit_effattn.ops.runtime.check_inductor import check_inductor
from lit_effattn.ops.runtime.quiet import quiet
from lit_effattn.sequence import SequenceModule, State, donated, map_tensors, tensors

OPTIONS: dict[str, Any] = {"aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True}
"""AOTInductor's options: a library does not contain the weights."""

Run = Callable[[Tensor, list[Tensor]], Tensor]
"""`log_probs = run(tokens, the state's tensors)`, which are overwritten with those of the next state."""


class Program(NamedTuple):
    """A compiled step.

    Args:
        run: Its function.
        shapes: The shapes that each of the state's tensors may have; None: any size along a dimension.
    """

    run: Run
    shapes: Sequence[Sequence[int | None]]

    def fits(self, state: Sequence[Tensor]) -> bool:
        """Return whether the program was compiled for a state of these sizes."""
        return all(
            len(shape) == t.dim() and all(n in (None, m) for n, m in zip(shape, t.shape, strict=True))
            for shape, t in zip(self.shapes, state, strict=True)
        )


class Steps:
    """Calls of one step.

        log_probs, state = steps(tokens, state)

    Args:
        backbone: Causal.
        embed: (B, N) tokens -> (B, N, d_input).
        head: Maps the backbone's output to a distribution.
        device: The tokens' device.
        compile: Whether the steps are compiled.

    Raises:
        ValueError: If `compile` is True, and the machine does not support it.
    """

    def __init__(
        self,
        backbone: SequenceModule,
        embed: Callable[[Tensor], Tensor],
        head: Head,
        *,
        device: torch.device,
        compile: bool = False,
    ) -> None:
        if compile and device.type != "cpu":
            raise ValueError(f"compile=True supports these steps on the CPU alone, not on {device}; leave it out")
        if compile:
            check_inductor("compile=True", device)
        self._backbone, self._embed, self._head, self._compile = backbone, embed, head, compile
        self._program: Program | None = None
        self._state: State = None  # what the program overwrites
        self._tensors: list[Tensor] = []  # the state's

    def __call__(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Read the next position.

        Args:
            tokens: (B, 1).
            state: The state before them. It is donated.

        Returns:
            (B, L), and the next state.

        Raises:
            ValueError: If the step can't be compiled.
        """
        if not self._compile:
            with donated():
                y, state = self._backbone(self._embed(tokens), state)
            return self._head.log_probs(y[:, -1]), state
        tokens = tokens.clone(memory_format=torch.contiguous_format)  # a program is made for certain strides
        if self._program is None or state is not self._state:
            self._state = apart(state)
            self._tensors = list(tensors(self._state))
            if self._program is None or not self._program.fits(self._tensors):
                step = Step(self._backbone, self._embed, self._head, self._state)
                self._program = program(step, tokens, self._tensors)
        return self._program.run(tokens, self._tensors), self._state


def apart(state: State) -> State:
    """Return `state` with contiguous tensors of which no two share memory: a library takes both for granted."""
    seen: set[int] = set()

    def own(t: Tensor) -> Tensor:
        shared = t.untyped_storage().data_ptr() in seen and t.numel() > 0
        t = t.clone(memory_format=torch.contiguous_format) if shared or not t.is_contiguous() else t
        seen.add(t.untyped_storage().data_ptr())
        return t

    return map_tensors(own, state)


def refusal(backbone: SequenceModule, error: Exception) -> ValueError:
    """Return the error of a step that can't be compiled, because of `error`: one line, without its context."""
    reason = " ".join(f"{type(error).__name__}: {error}".split("\n\n")[0].split())
    kinds = ", ".join(sorted({type(m).__name__ for m in backbone.modules() if isinstance(m, Attention)}))
    return ValueError(
        f"compile=True: a step of {type(backbone).__name__} ({kinds}) can't be compiled; leave compile out. {reason}"
    )


class Step(nn.Module):
    """A step of generation, without the draw: a `Run` in Python.

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
        """See `Run`."""
        values = iter(state)
        with donated():
            y, after = self.backbone(self.embed(tokens), map_tensors(lambda _: next(values), self._state))
            log_probs = self.head.log_probs(y[:, -1])
        for old, new in zip(state, tensors(after), strict=True):
            if new is not old:
                old.copy_(new)
        return log_probs


@torch.no_grad()
def program(step: Step, tokens: Tensor, state: Sequence[Tensor]) -> Program:
    """Return the compiled form of `step`, for its present options and any values of its weights.

    The dimensions of the state that grow with the positions may have any size. The weights are read in each call, at
    their present addresses. A library that is damaged is made again.

    Args:
        step: The step.
        tokens: (B, 1).
        state: The tensors of a state of B rows.

    Raises:
        ValueError: If the step can't be traced, compiled or loaded.
    """
    few, many = (step.backbone.initial_state(1, max_len=n, device=torch.device("meta")) for n in (64, 128))
    dims = [
        {i: torch.export.Dim.AUTO for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n}
        for a, b in zip(tensors(few), tensors(many), strict=True)
    ]
    try:
        with quiet():
            exported = torch.export.export(step, (tokens, list(state)), dynamic_shapes=({}, dims), strict=False)
        path = cpp_build.private_folder("steps") / f"{_key(exported)}.pt2"
        if not cpp_build.is_intact(path):
            _compile(exported, path)
        return Program(_loaded(path, exported), _shapes(exported))
    except Exception as error:  # of any kind, from torch.export, inductor, the C++ compiler or the loader
        refused = refusal(step.backbone, error)
    finally:
        gc.collect()  # see `interchange.export`: else configurations can't name the modules' classes by short names
    raise refused


def _key(exported: torch.export.ExportedProgram) -> str:
    """Return a hash of the program (operations, shapes, types), PyTorch, the processor, the compiler and options."""
    compiler = (platform.machine(), _processor(), torch.get_num_threads(), cpp_build.compiler_version(), OPTIONS)
    lines = [repr((torch.__version__, compiler)), str(exported.graph_signature)]
    for node in exported.graph.nodes:
        value = node.meta.get("val")
        results = [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, Tensor)]
        layouts = [(t.dtype, t.shape, t.stride()) for t in results]
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {layouts}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _processor() -> str:
    """Return the processor's instructions, for all of which inductor compiles."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(exported: torch.export.ExportedProgram, path: Path) -> None:
    """Compile a program into the file `path`, which appears whole."""
    print("Compiling a step of generation, once for this architecture: about 20 s", file=sys.stderr)
    with quiet(), TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder, path.name)
        torch._inductor.aoti_compile_and_package(exported, package_path=str(part), inductor_configs={**OPTIONS})
        cpp_build.install(part, path)


def _loaded(path: Path, exported: torch.export.ExportedProgram) -> Run:
    with quiet():
        package = torch._inductor.aoti_load_package(str(path))
    # AOTInductor calls the constant lifted_tensor_0 of a traced program _tensor_constant0.
    constants = {re.sub(".*lifted_tensor_", "_tensor_constant", name): t for name, t in exported.constants.items()}
    values = {**exported.state_dict, **constants}
    names = package.get_constant_fqns()
    package.load_constants({name: values[name] for name in names}, check_full_update=True, user_managed=True)
    return lambda tokens, state: package(tokens, state)


def _shapes(exported: torch.export.ExportedProgram) -> list[list[int | None]]:
    """Return the shapes of the state's tensors, with None for any size."""
    given = set(exported.graph_signature.user_inputs)
    inputs = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder" and node.name in given]
    return [[n if isinstance(n, int) else None for n in t.shape] for t in inputs[1:]]  # after the tokens
