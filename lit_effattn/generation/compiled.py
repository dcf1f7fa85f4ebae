"""Steps that a loop repeats: in Python, and on the CPU compiled once that saves time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from lit_effattn.attention.base import Attention
from lit_effattn.generation import packages
from lit_effattn.nn.heads import Head
from lit_effattn.ops.runtime.check_inductor import check_inductor
from lit_effattn.sequence import SequenceModule, State, donated, map_tensors, tensors

WARM_UP, MEASURED = 4, 16
"""Numbers of calls before the measurement, and of its calls."""

WORTH_LOADING, WORTH_COMPILING = 15.0, 120.0
"""Seconds that the remaining steps would take, from which on a library is looked for, and compiled."""

SLOWER = {2: 2.0, MEASURED: 1.1}
"""Compiled ÷ Python's time, above which a library is left, by its number of calls: the fewer, the greater the error."""


class Steps:
    """Calls of one step, compiled on the CPU if that saves time: see `generate`.

        log_probs, state = steps(tokens, state)

    Args:
        backbone: Causal.
        embed: (B, N) tokens -> (B, N, d_input).
        head: Maps the backbone's output to a distribution.
        device: The tokens' device.
        n: Number of calls to come.
        compile: Whether the steps are compiled. None: on the CPU, if the measured steps say that it saves time.

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
        n: int,
        compile: bool | None = None,
    ) -> None:
        if compile and device.type != "cpu":
            raise ValueError(f"compile=True supports these steps on the CPU alone, not on {device}; leave it out")
        if compile:
            check_inductor("compile=True", device)
        self._backbone, self._embed, self._head = backbone, embed, head
        self._forced = bool(compile)
        self._decides = compile is None and device.type == "cpu"
        self._remaining = n
        self._python, self._compiled = _Clock(WARM_UP), _Clock(1)
        self._program: packages.Program | None = None
        self._state: State = None  # of the program
        self._tensors: list[Tensor] = []  # the state's

    def __call__(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        """Read the next position.

        Args:
            tokens: (B, 1).
            state: The state before them. It is donated.

        Returns:
            (B, L), and the next state.

        Raises:
            ValueError: If `compile` is True, and the step can't be compiled.
        """
        tokens = tokens.clone(memory_format=torch.contiguous_format)  # a program is made for certain strides
        if self._is_worthwhile() if self._program is None else state is not self._state:
            state = self._bind(tokens, state)
        begin = perf_counter()
        if self._program is None:
            with donated():
                y, state = self._backbone(self._embed(tokens), state)
                log_probs = self._head.log_probs(y[:, -1])
            self._python.add(perf_counter() - begin)
        else:
            log_probs = self._program(tokens, self._tensors)
            self._compiled.add(perf_counter() - begin)
            limit = SLOWER.get(self._compiled.calls) if self._decides else None
            if limit is not None and self._compiled.each > limit * self._python.each:
                self._program, self._decides = None, False
        self._remaining -= 1
        return log_probs, state

    def _is_worthwhile(self) -> bool:
        """Return whether to look for a library now: once, after the measured calls."""
        measured = self._decides and self._python.calls == MEASURED
        return self._forced or (measured and self._python.each * self._remaining >= WORTH_LOADING)

    def _bind(self, tokens: Tensor, state: State) -> State:
        """Return `state` in a form that the program can overwrite. Look for a program if there is none that fits."""
        self._state = apart(state)
        self._tensors = list(tensors(self._state))
        if self._program is None or not self._program.fits(self._tensors):
            self._program = self._library(tokens)
        return self._state

    def _library(self, tokens: Tensor) -> packages.Program | None:
        step = packages.Step(self._backbone, self._embed, self._head, self._state)
        may_compile = self._forced or self._python.each * self._remaining >= WORTH_COMPILING
        try:
            if may_compile and not self._forced:
                check_inductor("compile", tokens.device)
            return packages.program(step, tokens, self._tensors, may_compile=may_compile)
        except (packages.CompilationError, ValueError) as error:
            if self._forced:
                raise refusal(self._backbone, error) from error
            warnings.warn(f"Generation goes on without compiled steps, which are faster: {error}", stacklevel=3)
            return None


class _Clock:
    """The mean time of a call, without the first ones.

    Args:
        skipped: Number of the first calls.
    """

    def __init__(self, skipped: int) -> None:
        self.calls, self._seconds = -skipped, 0.0

    def add(self, seconds: float) -> None:
        """Add a call."""
        self.calls += 1
        if self.calls > 0:
            self._seconds += seconds

    @property
    def each(self) -> float:
        """Seconds."""
        return self._seconds / self.calls


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
    """Return the error of a step that can't be compiled."""
    kinds = ", ".join(sorted({type(m).__name__ for m in backbone.modules() if isinstance(m, Attention)}))
    return ValueError(
        f"compile=True: a step of {type(backbone).__name__} ({kinds}) can't be compiled; leave compile out. "
        f"{type(error).__name__}: {error}"
    )
