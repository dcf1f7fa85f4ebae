"""How time and memory are measured: interleaved rounds, their spread, bytes alive in a computation; options for it."""

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
"""Seconds of calls of which a mean is taken."""


@dataclass(frozen=True)
class Spread:
    """One figure, measured once a round (or once an image)."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.samples)

    def map(self, function: Callable[[float], float]) -> Spread:
        """Return `function` of every sample."""
        return Spread(tuple(function(x) for x in self.samples))

    def __truediv__(self, other: Spread) -> Spread:
        """Divide round by round: what slowed a whole round down cancels."""
        return Spread(tuple(a / b for a, b in zip(self.samples, other.samples, strict=True)))


def now(device: torch.device) -> float:
    """Return the time in seconds, after all that `device` was given to do is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """Time one call."""
    start = now(device)
    function()
    return now(device) - start


def mean_of(clock: Callable[[Callable[[], Any]], float], function: Callable[[], Any]) -> float:
    """Time calls by `clock`, as many as take `LEAST`, after one that is not counted unless it is long.

    The first call may pay for other functions: the C library returns what they freed in the middle of a later `free`.
    """
    first = clock(function)
    if first >= 10 * LEAST:
        return first
    calls = math.ceil(LEAST / first)

    def again() -> None:  # keeps no result: each call finds the memory that the one before has freed
        for _ in range(calls):
            function()

    return clock(again) / calls


def interleaved(title: str, measures: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Measure A B A B …, not A A B B: a machine that becomes slower does so for all."""
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
        title: Of the progress.
        calls: What is timed. Each was called before.
        args: With `device` and `repeats`.
        means: Whether a sample is the mean of several calls: `mean_of`.
    """
    clock = partial(seconds_of, device=args.device)
    measures = {n: partial(mean_of, clock, call) if means else partial(clock, call) for n, call in calls.items()}
    return {name: Spread(tuple(s)) for name, s in interleaved(title, measures, args.repeats).items()}


def compared(name: str, seconds: Mapping[str, Spread], peaks: Mapping[str, int], first: str) -> dict[str, Any]:
    """Return the figures of one of several ways, time and memory, and their ratios to those of `first`."""
    return {
        "ms": seconds[name].map(lambda s: 1000 * s),
        f"time ÷ {first}'s": seconds[name] / seconds[first],
        "peak, MiB": peaks[name] / MIB,
        f"peak ÷ {first}'s": peaks[name] / peaks[first],
    }


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Return the most bytes of tensors alive at once in `function`, above those alive before it.

    CUDA: by the allocator, so that scratch memory inside kernels counts too. Elsewhere: of the tensors that operators
    return, each storage once, until it is freed; scratch memory inside an operator is not seen.
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


def look_inside(mode: TorchDispatchMode, func: Any, args: tuple[Any, ...]) -> Any:
    """Call an operator of our own that is written in Python, so that `mode` sees what it calls."""
    with mode:
        return func._op_dk(torch._C.DispatchKey.CPU, *args)


def is_written_in_python(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether `func` is an operator of our own, called on the CPU."""
    return func.namespace == "lit_effattn" and args[0].device.type == "cpu"


class _AliveBytes(TorchDispatchMode):
    """Follows the storages that operators make inside, the backward pass's included."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if is_written_in_python(func, args):
            return look_inside(self, func, args)
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
    """Reset the peak, and return where it starts; None where the system can't (Linux and CUDA can)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
    except OSError:
        return None
    return resident_peak(device)


def resident_peak(device: torch.device) -> int:
    """Return the most bytes that were resident in this process, or allocated on the GPU, since `reset_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM:")]  # "VmHWM:    1234 kB"
    return 1024 * int(line.split()[1])


def add_options(parser: argparse.ArgumentParser, least: int = 1, **options: Any) -> None:
    """Add options of integers, several where the default is a list.

    Args:
        parser: What gets them.
        least: The smallest number that is accepted.
        options: The default of each, or (default, description).
    """
    for name, given in options.items():
        default, about = given if isinstance(given, tuple) else (given, "")
        several = "+" if isinstance(default, list) else None
        about = "; ".join(filter(None, [about, "" if default is None else "default: %(default)s"]))
        parser.add_argument(f"--{name}", type=at_least(least), nargs=several, default=default, help=about)


def at_least(least: int) -> Callable[[str], int]:
    """Return a type for argparse that reads an integer and refuses a smaller one."""

    def integer(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return number

    return integer
