"""What limits 8, 64 and 256 GPUs: memory, messages and time of a step, from sizes that are counted here."""

from __future__ import annotations

import argparse
import inspect
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.models import KINDS, at_least
from benchmarks.report import Report, Row
from lit_effattn import LanguageModel, Transformer
from lit_effattn.attention import LinearAttention
from lit_effattn.datamodules import TokenBatch
from lit_effattn.sequence import nbytes
from lit_effattn.sequence_parallel import sequence_parallel

GB = 1e9
NOTES = [
    "Counted: parameters, bytes kept for the backward pass (`saved_tensors_hooks`, each storage once, parameters left "
    "out), bytes of the state and of sequence parallelism's messages, of models with 1 and 2 layers and two lengths "
    "under bfloat16 autocast on the CPU. All are linear in the layers and in the positions, and are extrapolated.",
    "Parameters in float32 with AdamW. DDP: 20 bytes a parameter in each process (parameter, gradient, two moments, "
    "DDP's copy of the gradient), and 8 (P − 1)/P bytes a parameter sent (a ring's all-reduce of float32 gradients). "
    "FSDP: 16/P bytes a parameter, and two blocks and the embedding gathered in bfloat16; 8 (P − 1)/P bytes a "
    "parameter sent (two all-gathers in bfloat16, a reduce-scatter in float32). Memory includes what one row keeps.",
    "Operations of a step: 6 for each parameter and token; and for each layer and token 6 N E of softmax attention, "
    "6 E (C + 2 D) of linear attention with chunks of C and heads of D. Seconds are bytes ÷ links and operations ÷ "
    "flops. Nothing was timed, and nothing was run on these GPUs. Messages can hide behind computing.",
]


class Model(NamedTuple):
    """A language model with rotary positions, and one matrix for embedding and head."""

    name: str
    d_model: int
    n_heads: int
    n_layers: int
    length: int
    vocab_size: int = 50257

    def build(self, kind: str, n_layers: int) -> LanguageModel:
        """Make the model with another number of layers."""
        backbone = Transformer(self.d_model, self.n_heads, n_layers, attention=KINDS[kind], positions="auto")
        return LanguageModel(backbone, self.vocab_size, tie=True)


MODELS = (Model("124 M", 768, 12, 12, 1024), Model("1.3 B", 2048, 16, 24, 2048))
TINY = (Model("tiny", 16, 2, 3, 512, 32),)


class Sizes(NamedTuple):
    """What is counted of a model, as numbers that are linear in the layers; bytes but for the first."""

    parameters: float
    fixed: float
    """Kept for the backward pass, whatever the length: copies of parameters in lower precision."""
    activations: float
    """Kept for the backward pass, for each token."""
    state: float
    """Of a row after the model's length."""
    messages: float
    """That a process gives to each other one in a forward pass of sequence parallelism; 0: its share of `state`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--table", choices=["sizes", "steps"], default="steps", help="default: %(default)s")
    parser.add_argument("--gpus", type=at_least(1), nargs="+", default=[8, 64, 256], help="default: %(default)s")
    parser.add_argument(
        "--tokens", type=at_least(1), default=2**19, help="of a step, of all GPUs; default: %(default)s"
    )
    parser.add_argument("--flops", type=float, default=4e14, help="of a GPU, a second; default: %(default)s")
    parser.add_argument("--memory", type=float, default=8e10, help="bytes of a GPU; default: %(default)s")
    parser.add_argument("--machine", type=at_least(1), default=8, help="GPUs of a machine; default: %(default)s")
    parser.add_argument("--within", type=float, default=3e11, help="bytes/s of a GPU within it; default: %(default)s")
    parser.add_argument("--between", type=float, default=5e10, help="and between machines; default: %(default)s")


def run(args: argparse.Namespace) -> Report:
    counted = [(model, kind, sizes(model, kind)) for model in (TINY if args.small else MODELS) for kind in KINDS]
    if args.table == "sizes":
        return Report("arithmetic", [_sizes_row(*each) for each in counted], NOTES[:1])
    return Report("arithmetic", [_step_row(*each, gpus, args) for each in counted for gpus in args.gpus], NOTES)


def sizes(model: Model, kind: str) -> Sizes:
    """Count what models with 1 and 2 layers have at two lengths, and extrapolate to the layers of `model`."""
    one, two = (_counted(model, kind, n_layers) for n_layers in (1, 2))
    return Sizes(*(a + (model.n_layers - 1) * (b - a) for a, b in zip(one, two, strict=True)))


def _counted(model: Model, kind: str, n_layers: int) -> Sizes:
    torch.manual_seed(0)
    built = model.build(kind, n_layers)
    short, long = 256, 512  # whole chunks
    (kept, state), (kept_long, state_long) = (_of_a_step(built, length) for length in (short, long))
    rate = (kept_long - kept) / (long - short)
    growth = (state_long - state) / (long - short)
    return Sizes(
        sum(p.numel() for p in built.parameters()),
        kept - rate * short,
        rate,
        state + growth * (model.length - short),
        _messages(built) if kind == "linear" else 0,
    )


def _of_a_step(model: LanguageModel, length: int) -> tuple[int, int]:
    """Return the bytes that are kept for the backward pass of one row, and those of the state after it."""
    tokens = torch.zeros(1, length, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        with kept_for_backward(model) as storages:
            loss = model.objective(TokenBatch(tokens, tokens)).loss
        assert loss.requires_grad
        with torch.no_grad():
            _, state = model.backbone(torch.zeros(1, length, model.backbone.d_input))
    return sum(storages.values()), nbytes(state)


@contextmanager
def kept_for_backward(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Yield the bytes of each storage that autograd keeps, without those of parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}
    alive: list[Tensor] = []  # else the address of a freed storage would be another's

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append(t.detach())
            found[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found


def _messages(model: LanguageModel) -> int:
    with one_process(), sequence_parallel() as parts, torch.no_grad():
        model.backbone(torch.zeros(1, 8, model.backbone.d_input))
    return parts.n_bytes


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _sizes_row(model: Model, kind: str, found: Sizes) -> Row:
    return {
        "model": model.name,
        "attention": kind,
        "parameters, M": found.parameters / 1e6,
        "kept a token, kB": found.activations / 1e3,
        "kept a row, GB": found.activations * model.length / GB,
        "copies in bfloat16, GB": found.fixed / GB,
        "state of a row, MB": found.state / 1e6,
        "sequence parallel: sent a row, MB": found.messages / 1e6 or "state ÷ P",
    }


def _step_row(model: Model, kind: str, found: Sizes, gpus: int, args: argparse.Namespace) -> Row:
    tokens = args.tokens / gpus
    computing = operations(model, kind, found.parameters) * tokens / args.flops
    sent = 8 * (gpus - 1) / gpus * found.parameters
    sending = sent / (args.within if gpus <= args.machine else args.between)
    kept = found.activations * model.length  # of one row: further rows of a step can be accumulated
    gathered = 2 * (2 * (found.parameters - model.vocab_size * model.d_model) / model.n_layers)
    gathered += 2 * model.vocab_size * model.d_model
    ddp = 20 * found.parameters + found.fixed + kept
    return {
        "model": model.name,
        "attention": kind,
        "GPUs": gpus,
        "tokens a GPU": int(tokens),
        "memory, DDP, GB": ddp / GB,
        "memory, FSDP, GB": (16 * found.parameters / gpus + gathered + kept) / GB,
        "sent a GPU, GB": sent / GB,
        "computing, ms": 1e3 * computing,
        "sending, ms": 1e3 * sending,
        "limits first": limit(tokens / model.length, ddp / args.memory, sending / computing),
    }


def operations(model: Model, kind: str, parameters: float) -> float:
    """Return the floating-point operations of a token's forward and backward pass."""
    chunk = inspect.signature(LinearAttention).parameters["chunk_size"].default
    each = model.length if kind == "softmax" else chunk + 2 * model.d_model / model.n_heads
    return 6 * parameters + 6 * model.n_layers * model.d_model * each


def limit(rows: float, memory: float, messages: float) -> str:
    """Say what limits first: rows for a GPU, its memory's share that DDP needs, or seconds of messages ÷ computing."""
    if rows < 1:
        return "fewer rows than GPUs"
    if memory > 1:
        return "memory"
    return "messages" if messages > 1 else "computing"
