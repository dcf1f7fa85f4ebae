"""Sequences that processes share: bytes of the messages, peak memory and time, by length and number of processes."""

from __future__ import annotations

import argparse
import datetime
import resource
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.measuring import MIB, _fresh, reset_peak, resident_peak, seconds_of
from benchmarks.models import Size, at_least
from benchmarks.report import Report, Row
from lit_effattn import Transformer
from lit_effattn.attention import LinearAttention, PerformerAttention, SoftmaxAttention, WindowedLinearAttention
from lit_effattn.sequence_parallel import sequence_parallel

SIZE = Size(2, 4, 64)
WINDOW = 64
KINDS: dict[str, Callable[..., Any]] = {
    "linear": LinearAttention,
    "Performer": PerformerAttention,
    "softmax": SoftmaxAttention,
    f"softmax, window {WINDOW}": partial(SoftmaxAttention, window=WINDOW),
    f"windowed linear, {WINDOW}": partial(WindowedLinearAttention, window=WINDOW),
}

NOTES = [
    f"{SIZE}, rotary positions, one sequence of N positions in float32: forward and backward pass and the sum of the "
    "gradients over the P processes, each with one thread.",
    "sent: bytes that a process gives to each of the others in the forward pass, by layer, counted, not computed by "
    "formula; the layer's counts of positions are included. The backward pass sends as many again.",
    "peak: of resident memory, libraries included, of the process with the most. seconds: the second of two steps, of "
    "the slowest process; where P exceeds the machine's cores, processes take turns on them.",
    "limit: RLIMIT_DATA of every process. Those with one have a single step. "
    "“out of memory”: an allocation of a process failed.",
]


class Step(NamedTuple):
    """What a step took in one process; None where it failed for memory."""

    sent: int | None
    peak: int | None
    seconds: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    many = {"type": at_least(1), "nargs": "+"}
    parser.add_argument("--lengths", **many, default=[4096, 16384], help="N; default: %(default)s")
    parser.add_argument("--processes", **many, default=[1, 2, 4], help="P; default: %(default)s")
    parser.add_argument("--long", type=at_least(1), default=2**19, help="N under the limit; default: %(default)s")
    parser.add_argument("--limit", type=at_least(1), default=4, help="GiB a process; default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    if args.device.type != "cpu":
        raise ValueError(f"device={args.device}: processes with a memory limit are measured on the CPU; give cpu")
    cases = [(kind, n) for n in sorted(args.lengths) for kind in KINDS]
    found = {p: _in_processes(p, cases, None) for p in args.processes}
    fewest, most = min(args.processes), max(args.processes)
    rows = [
        _row(*case, p, None, found[p][i], _slowest(found[fewest][i]), fewest)
        for i, case in enumerate(cases)
        for p in args.processes
    ]
    for p in (fewest, most):
        (steps,) = _in_processes(p, [("linear", args.long)], args.limit)
        rows.append(_row("linear", args.long, p, args.limit, steps, None, fewest))
    return Report("sequence_parallel", rows, NOTES)


def _in_processes(p: int, cases: Sequence[tuple[str, int]], limit: int | None) -> list[list[Step]]:
    """Return the steps of all processes, for each case."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(p, mp_context=_fresh(__name__)) as pool:
        of_processes = pool.map(partial(_work, p=p, cases=cases, limit=limit, store=f"file://{folder}/store"), range(p))
        return [list(steps) for steps in zip(*of_processes, strict=True)]


def _work(rank: int, p: int, cases: Sequence[tuple[str, int]], limit: int | None, store: str) -> list[Step]:
    torch.set_num_threads(1)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit * 2**30,) * 2)
    wait = datetime.timedelta(minutes=3)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=p, timeout=wait)
    steps = [_step(*case, rank, p, n_steps=2 if limit is None else 1) for case in cases]
    dist.destroy_process_group()
    return steps


def _step(kind: str, n: int, rank: int, p: int, *, n_steps: int) -> Step:
    torch.manual_seed(0)
    model = Transformer(SIZE.d_model, SIZE.n_heads, SIZE.n_layers, attention=KINDS[kind], positions="auto")
    cpu = torch.device("cpu")
    sent, seconds = 0, 0.0
    reset_peak(cpu)
    x = torch.randn(1, (rank + 1) * n // p - rank * n // p, SIZE.d_model)

    def train() -> int:
        with sequence_parallel() as parts:
            y, _ = model(x)
            (y.square().sum() / n).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return parts.n_bytes

    def count() -> None:
        nonlocal sent
        sent = train()

    try:
        for _ in range(n_steps):
            dist.barrier()
            seconds = seconds_of(count, cpu)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        return Step(None, None, None)
    return Step(sent // SIZE.n_layers, resident_peak(cpu), seconds)


def _slowest(steps: Sequence[Step]) -> float | None:
    """Return the seconds of the slowest process; None if one failed."""
    seconds = [step.seconds for step in steps if step.seconds is not None]
    return max(seconds) if len(seconds) == len(steps) else None


def _row(kind: str, n: int, p: int, limit: int | None, steps: Sequence[Step], base: float | None, fewest: int) -> Row:
    seconds = _slowest(steps)
    peaks = [step.peak for step in steps if step.peak is not None]
    return {
        "attention": kind,
        "N": n,
        "P": p,
        "limit": "none" if limit is None else f"{limit} GiB",
        "sent, bytes a layer": steps[0].sent if p > 1 else 0,
        "peak, MiB a process": max(peaks) / MIB if len(peaks) == p else None,
        "seconds": "out of memory" if seconds is None else seconds,
        f"÷ P = {fewest}": seconds / base if seconds and base else None,
    }
