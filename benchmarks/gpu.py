"""Costs of attention on a GPU: tests, kernels beside flash-linear-attention and softmax, training steps, generation.

`python -m benchmarks gpu` runs each part in a process of its own and with a limit, less than 9 minutes in all. Every
row is printed at once, as a line of JSON, so a run that is stopped keeps what it has. The table follows at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measuring import MIB, mean_of, peak_bytes, seconds_of
from lit_effattn import Transformer
from lit_effattn.generation.sampling import generate
from lit_effattn.nn.heads import CategoricalHead
from lit_effattn.ops.favor.pytorch import draw_omega, positive_favor
from lit_effattn.ops.gated_linear import fla
from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention
from lit_effattn.ops.linear.pytorch import causal_linear_attention
from lit_effattn.ops.runtime.operators import KERNELS

PARTS = {"tests": 60, "tuning": 150, "kernels": 120, "steps": 110, "generation": 90}
"""The parts and their limits in seconds."""

TESTS = ("tests/laws/test_gpu.py", "-k", "Attention and not Performer and not Compressive and not Infinite")
RECURRENCES = {
    "decay": ("head", False),
    "decay per channel": ("channel", False),
    "delta": ("none", True),
    "gated delta": ("head", True),
    "gated delta per channel": ("channel", True),
}
"""Decay, and whether there is the delta rule: Mamba-2, GLA, DeltaNet, Gated DeltaNet, KDA."""

Row = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    about = "where Triton keeps compiled kernels, and flash-linear-attention its choices; default: Triton's own folder"
    parser.add_argument("--triton_cache", type=Path, metavar="FOLDER", help=about)
    parser.add_argument("--dry_run", action="store_true", help="small sizes, on any device: does every line run?")
    parser.add_argument("--only", choices=[*PARTS, *RECURRENCES], help=argparse.SUPPRESS)  # in a part's own process


def main(args: argparse.Namespace) -> None:
    """Run the parts, or the one part of this process."""
    if args.only is not None:
        for row in _tuned(args) if args.only in RECURRENCES else ROWS[args.only](args):
            print(json.dumps(row), flush=True)
        return
    if args.triton_cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(args.triton_cache)
    rows: list[Row] = []
    output = None
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        output = (args.output / "gpu.jsonl").open("w", encoding="utf-8")
    for part in args.parts:
        for row in _of_part(part, args):
            rows.append({"part": part, **row})
            print(json.dumps(rows[-1]), flush=True)
            if output is not None:
                print(json.dumps(rows[-1]), file=output, flush=True)
    table = markdown(rows)
    print(table, flush=True)
    if args.output is not None:
        (args.output / "gpu.md").write_text(table, encoding="utf-8")
    if any("failure" in row for row in rows):
        raise SystemExit(1)


def _of_part(part: str, args: argparse.Namespace) -> Iterator[Row]:
    """Run one part in a process, or one for each recurrence at the same time, and yield its rows as they come."""
    own = [sys.executable, "-m", "benchmarks", "gpu", "--device", str(args.device), *(["--dry_run"] * args.dry_run)]
    commands = {part: [*own, "--only", part]}
    if part == "tests":
        commands = {part: [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *TESTS]}
    elif part == "tuning":
        commands = {kind: [*own, "--only", kind] for kind in RECURRENCES}
    for line in streamed(commands, PARTS[part]):
        if isinstance(line, dict):
            yield line
        elif part == "tests" and (" passed" in line or " skipped" in line):
            yield {"what": "pytest -m gpu", "result": line.strip()}
        elif line.startswith("{"):
            yield json.loads(line)


def streamed(commands: dict[str, list[str]], limit: float) -> Iterator[str | Row]:
    """Run commands at the same time, and yield their lines, and a row for each that fails or runs out of time."""
    running = {name: subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for name, words in commands.items()}
    out_of_time = []

    def stop() -> None:
        for name, process in running.items():
            if process.poll() is None:
                out_of_time.append(name)
                process.kill()

    timer = threading.Timer(limit, stop)
    timer.start()
    for name, process in running.items():
        yield from cast(Any, process.stdout)
        status = process.wait()
        if status:
            yield {"what": name, "failure": f"stopped after {limit} s" if name in out_of_time else f"status {status}"}
    timer.cancel()


def markdown(rows: list[Row]) -> str:
    """Return a table for each part."""
    lines = []
    for part in dict.fromkeys(row["part"] for row in rows):
        of_part = [{k: v for k, v in row.items() if k != "part"} for row in rows if row["part"] == part]
        columns = list(dict.fromkeys(column for row in of_part for column in row))
        lines += ["", f"## {part}", "", _line(columns), _line(["---"] * len(columns))]
        lines += [_line([_cell(row.get(column)) for column in columns]) for row in of_part]
    return "\n".join(lines[1:])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return "—" if value is None else str(value)


# -------------------------------------------------------------------------------------------------------------- kernels


def _inputs(kind: str, args: argparse.Namespace) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return q, k, v and the state, (B, H, N, D) as projections leave them, and decays and strengths."""
    b, h, n, d = (2, 2, 70, 16) if args.dry_run else (8, 8, 8192, 64)
    generator, device = torch.Generator(args.device).manual_seed(0), args.device
    q, k, v = (torch.randn(b, n, h, d, generator=generator, device=device) for _ in range(3))
    decay, delta = RECURRENCES.get(kind, ("none", False))
    options = {}
    if kind in RECURRENCES:
        k = F.normalize(k, dim=-1)
    if decay != "none":
        shape = (b, n, h) if decay == "head" else (b, n, h, d)
        options["log_decay"] = -torch.rand(shape, generator=generator, device=device).transpose(1, 2)
    if delta:
        options["beta"] = torch.rand(b, n, h, generator=generator, device=device).transpose(1, 2)
    heads = [t.to(torch.bfloat16).transpose(1, 2) for t in (q, k, v)]
    tensors = [*heads, torch.zeros(b, h, d, d, device=device)]
    return [t.requires_grad_() for t in tensors], {name: t.requires_grad_() for name, t in options.items()}


def _both_ways(function: Callable[..., Tensor], tensors: list[Tensor], options: dict[str, Tensor]) -> None:
    y = function(*tensors, **options)
    torch.autograd.grad(y, [*tensors, *options.values()], y.detach(), allow_unused=True)


def _tuned(args: argparse.Namespace) -> Iterator[Row]:
    """Call flash-linear-attention's kernels once, which chooses their settings."""
    start = time.monotonic()
    reason = fla._obstacle(args.device, torch.bfloat16, 64, RECURRENCES[args.only][0] != "none")
    if reason is None:
        _both_ways(lambda *t, **o: fla.gated_linear_attention(*t, **o)[0], *_inputs(args.only, args))
        torch.cuda.synchronize(args.device)
    yield {"what": args.only, "seconds": time.monotonic() - start, "not measured": reason}


def _forms(kind: str, args: argparse.Namespace) -> dict[str, Callable[..., Tensor]]:
    """Return the forms of one function, (q, k, v, state) -> output."""
    if kind in RECURRENCES:
        forms = {"own form": _forced("triton", gated_linear_attention)}
        if fla._obstacle(args.device, torch.bfloat16, 64, RECURRENCES[kind][0] != "none") is None:
            forms["flash-linear-attention"] = lambda *t, **o: fla.gated_linear_attention(*t, **o)[0]
        return forms
    if kind == "performer":
        omega = draw_omega(8, 16 if args.dry_run else 267, 16 if args.dry_run else 64).float().to(args.device)
        return {"own form": partial(_performer, omega[: 2 if args.dry_run else 8])}
    if kind == "softmax":
        return {"scaled_dot_product_attention": _softmax}
    forms = {"own form": _linear}
    if fla._obstacle(args.device, torch.bfloat16, 64, False) is None:
        forms["flash-linear-attention"] = _linear_by_fla
    return forms


def _forced(form: str, function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    def forced(*tensors: Tensor, **options: Tensor) -> Tensor:
        with mock.patch.dict(os.environ, {KERNELS: form if tensors[0].is_cuda else ""}):
            return function(*tensors, **options)[0]

    return forced


def _linear(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    return causal_linear_attention(q, k, v, state, state[..., 0].detach(), elu=True)[0]


def _linear_by_fla(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    """Its sum without a denominator, of features that PyTorch computes."""
    return cast(Tensor, fla.gated_linear_attention(F.elu(q) + 1, F.elu(k) + 1, v, state)[0])


def _performer(omega: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    s = v.new_zeros(len(v), *omega.shape[:2], v.size(3), dtype=torch.float32)
    sums = (s, s[..., 0].clone(), torch.full_like(s[..., 0], -torch.inf))
    return positive_favor(q, k, v, omega, *sums, scale=1.0)[0]


def _softmax(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _kernels(args: argparse.Namespace) -> Iterator[Row]:
    clock, softmax = partial(seconds_of, device=args.device), None
    for kind in ("softmax", "linear", "performer", *RECURRENCES):
        tensors, options = _inputs(kind, args)
        for form, function in _forms(kind, args).items():
            forward = partial(function, *(t.detach() for t in tensors), **{x: t.detach() for x, t in options.items()})
            both = partial(_both_ways, function, tensors, options)
            both()
            ms = [1e3 * mean_of(clock, call) for call in (forward, both)]
            softmax = ms[1] if softmax is None else softmax
            peak = peak_bytes(both, args.device) / MIB
            yield {
                **{"what": kind, "form": form, "forward, ms": ms[0], "forward + backward, ms": ms[1]},
                **{"peak, MiB": peak, "softmax's time ÷ this": softmax / ms[1]},
            }


# ---------------------------------------------------------------------------------------------------------------- steps


class Model(nn.Module):
    """A language model of 256 tokens; `forward` returns the loss of (B, N + 1) tokens, and the state.

    Args:
        backbone: A causal `Transformer`.
    """

    def __init__(self, backbone: Transformer) -> None:
        super().__init__()
        self.backbone = backbone
        self.embedding = nn.Embedding(256, backbone.d_input)
        self.head = CategoricalHead(backbone.d_model, 256)

    def forward(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Compute the mean cross-entropy, and the state after the tokens."""
        y, state = self.backbone(self.embedding(tokens[:, :-1]), state)
        return F.cross_entropy(self.head.proj(y).flatten(0, 1).float(), tokens[:, 1:].flatten()), state


STEPS: dict[str, tuple[Any, ...]] = {
    "Transformer-XL, enwik8 (Dai et al. 2019)": ("TransformerXLAttention", {"mem_len": 512}, 512, 8, 12, 512, 22),
    "linear, CIFAR-10 (Katharopoulos et al. 2020)": ("LinearAttention", {}, 256, 8, 16, 3072, 16),
    "Performer, ImageNet64 (Choromanski et al. 2020)": ("PerformerAttention", {}, 512, 8, 6, 12288, 2),
    "Gated DeltaNet, 1,024 wide (Yang et al. 2024)": ("GatedDeltaNetAttention", {}, 1024, 8, 12, 2048, 8),
}
"""Kind, its options, width, heads, layers, positions, rows."""


def _build(kind: str, options: dict[str, Any], width: int, heads: int, layers: int, args: argparse.Namespace) -> Model:
    import lit_effattn.attention as attentions

    if args.dry_run:
        width, heads, layers = 16, 2, 1
    torch.manual_seed(0)
    attention = partial(getattr(attentions, kind), **options)
    return Model(Transformer(width, heads, layers, attention=attention, positions="auto")).to(args.device)


def _steps(args: argparse.Namespace) -> Iterator[Row]:
    limit = _flops_of_a_product(args)
    yield {"what": "matrix product of bfloat16, the limit", "TFLOP/s": limit / 1e12}
    for name, (kind, options, width, heads, layers, n, rows) in STEPS.items():
        n, rows = (16, 2) if args.dry_run else (n, rows)
        tokens = torch.randint(256, (rows, n + 1), device=args.device)
        for dtype, compiled in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            model = _build(kind, options, width, heads, layers, args)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=args.device.type == "cuda")
            called = torch.compile(model, backend="eager" if args.dry_run else "inductor") if compiled else model
            state = model.backbone.initial_state(rows, device=args.device)

            def step(
                model: Any = called,
                optimizer: Any = optimizer,
                state: Any = state,
                tokens: Any = tokens,
                d: Any = dtype,
            ) -> None:
                with torch.autocast(args.device.type, torch.bfloat16, enabled=d == torch.bfloat16):
                    loss, _ = model(tokens, state)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            start = time.monotonic()
            try:
                for _ in range(2):
                    step()
            except Exception as error:  # of the compiler
                failure = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else repr(error)
                yield {"what": name, "type": str(dtype), "compiled": compiled, "failure": failure}
                continue
            first = time.monotonic() - start
            seconds = mean_of(partial(seconds_of, device=args.device), step)
            # Products of weights alone, 6 N a token (Kaplan et al. 2020): a lower bound of what a step computes.
            flops = 6 * sum(p.numel() for p in model.backbone.parameters()) * rows * n
            yield {
                **{
                    "what": name,
                    "type": str(dtype),
                    "compiled": compiled,
                    "first two steps, s": first,
                    "ms/step": 1e3 * seconds,
                },
                **{"tokens/s": rows * n / seconds, "peak, MiB": peak_bytes(step, args.device) / MIB},
                "share of the limit": flops / seconds / limit,
            }


def _flops_of_a_product(args: argparse.Namespace) -> float:
    size = 64 if args.dry_run else 8192
    a, b = (torch.randn(size, size, device=args.device, dtype=torch.bfloat16) for _ in range(2))
    a @ b
    return 2 * size**3 / mean_of(partial(seconds_of, device=args.device), partial(torch.matmul, a, b))


# ----------------------------------------------------------------------------------------------------------- generation


def _generation(args: argparse.Namespace) -> Iterator[Row]:
    n_tokens = 4 if args.dry_run else 64
    for kind in ("LinearAttention", "GatedDeltaNetAttention", "SoftmaxAttention"):
        model = _build(kind, {}, 512, 8, 12, args).eval()
        modules = model.backbone, model.embedding, model.head
        for rows in (1, 256):
            prompt = torch.zeros(2 if args.dry_run else rows, 1, dtype=torch.long, device=args.device)
            for graph in (False, True):

                def draw(modules: Any = modules, prompt: Tensor = prompt, graph: bool = graph) -> None:
                    generate(*modules, prompt, n_tokens, compile=graph and not args.dry_run)

                start = time.monotonic()
                draw()
                first = time.monotonic() - start
                seconds = seconds_of(draw, args.device)
                yield {
                    **{"what": kind, "rows": rows, "graph": graph, "first call, s": first},
                    **{"ms/token": 1e3 * seconds / n_tokens, "tokens/s": len(prompt) * n_tokens / seconds},
                }


ROWS = {"kernels": _kernels, "steps": _steps, "generation": _generation}
