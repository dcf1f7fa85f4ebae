"""Measurement of time and memory: interleaved rounds, their spread, peak bytes; command-line options."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
MIB = 2**20
LEAST = 0.1
"""Seconds of calls whose mean is taken."""


@dataclass(frozen=True)
class Spread:
    """One figure, measured in each round (or for each image)."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples)

    def map(self, function: Callable[[float], float]) -> Spread:
        """Return `function` of every sample."""
        return Spread(tuple(function(x) for x in self.samples))

    def __truediv__(self, other: Spread) -> Spread:
        """Divide round by round, so that the speed of the machine in a round cancels."""
        return Spread(tuple(a / b for a, b in zip(self.samples, other.samples, strict=True)))


def now(device: torch.device) -> float:
    """Return the time in seconds, after all work of `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """Time one call."""
    start = now(device)
    function()
    return now(device) - start


def mean_of(clock: Callable[[Callable[[], Any]], float], function: Callable[[], Any]) -> float:
    """Return the mean time by `clock` of as many calls as take `LEAST`. The first call is counted only if it is long.

    The first call may pay for other functions: the C library returns memory that they freed in a later `free`.
    """
    first = clock(function)
    if first >= 10 * LEAST:
        return first
    calls = math.ceil(LEAST / first)

    def again() -> None:  # keeps no result, so each call reuses the memory of the previous one
        for _ in range(calls):
            function()

    return clock(again) / calls


def interleaved(title: str, measures: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Measure A B A B …, not A A B B, so that a machine that becomes slower does so for all."""
    results: dict[str, list[T]] = {name: [] for name in measures}
    for i in range(repeats):
        for name, measure in measures.items():
            print(f"{title}: round {i + 1} of {repeats}, {name}", file=sys.stderr, flush=True)
            results[name].append(measure())
    return results


def timed(
    title: str, calls: Mapping[str, Callable[[], Any]], args: argparse.Namespace, *, means: bool = False
) -> dict[str, Spread]:
    """Return the seconds of each call in every round, in which all take turns.

    Args:
        title: Title of the progress messages.
        calls: The functions to time. Each was called before.
        args: Options, with `device` and `repeats`.
        means: Whether a sample is the mean of several calls, by `mean_of`.
    """
    clock = partial(seconds_of, device=args.device)
    measures = {n: partial(mean_of, clock, call) if means else partial(clock, call) for n, call in calls.items()}
    return {name: Spread(tuple(s)) for name, s in interleaved(title, measures, args.repeats).items()}


def compared(name: str, seconds: Mapping[str, Spread], peaks: Mapping[str, int], first: str) -> dict[str, Any]:
    """Return time and memory of the method `name`, and their ratios to those of `first`."""
    return {
        "ms": seconds[name].map(lambda s: 1000 * s),
        f"time ÷ {first}'s": seconds[name] / seconds[first],
        "peak, MiB": peaks[name] / MIB,
        f"peak ÷ {first}'s": peaks[name] / peaks[first],
    }


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Return the peak bytes of tensors alive at once in `function`, in addition to those alive before it.

    CUDA: the allocator's, including scratch memory inside kernels. CPU: the storages of the tensors that operators
    return, until they are freed, without scratch memory inside operators.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _AliveBytes() as alive:
        function()
    return alive.peak


class _AliveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators make, including those of the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "lit_effattn" and args[0].device.type == "cpu":  # type: ignore[attr-defined]
            with self:  # an operator of this package that is written in Python: the operators inside are seen
                return func._op_dk(torch._C.DispatchKey.CPU, *args)  # type: ignore[attr-defined]
        out = func(*args, **(kwargs or {}))
        known = {_identity(t) for t in _tensors((args, kwargs))}  # a view, or an argument changed in place
        for t in _tensors(out):
            if _identity(t) not in known:
                known.add(_identity(t))
                self._follow(t.untyped_storage())
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._freed, storage.nbytes()).atexit = False

    def _freed(self, nbytes: int) -> None:
        self.alive -= nbytes


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _identity(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def reset_peak(device: torch.device) -> int | None:
    """Reset the peak and return its value; None if the system does not support it (Linux and CUDA do)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
    except OSError:
        return None
    return resident_peak(device)


def resident_peak(device: torch.device) -> int:
    """Return the peak bytes resident in this process, or allocated on the GPU, since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM:")]  # "VmHWM:    1234 kB"
    return 1024 * int(line.split()[1])


def add_options(parser: argparse.ArgumentParser, least: int = 1, **options: Any) -> None:
    """Add integer options, with several values if the default is a list.

    Args:
        parser: The parser.
        least: The smallest accepted number.
        options: The default of each option, or (default, description).
    """
    for name, given in options.items():
        default, about = given if isinstance(given, tuple) else (given, "")
        several = "+" if isinstance(default, list) else None
        about = "; ".join(filter(None, [about, "" if default is None else "default: %(default)s"]))
        parser.add_argument(f"--{name}", type=at_least(least), nargs=several, default=default, help=about)


def at_least(least: int) -> Callable[[str], int]:
    """Return a type for argparse: an integer of at least `least`."""

    def integer(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return number

    return integer
