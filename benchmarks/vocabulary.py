"""Time and memory of the loss of a large vocabulary: all logits at once, or in chunks of positions."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.measuring import add_options, compared, peak_bytes, timed
from benchmarks.report import Report, Row
from lit_effattn.ops.cross_entropy import CHUNK, linear_cross_entropy

NOTES = [
    "The mean cross-entropy of softmax(W h + b) and its gradients of h, W and b, in float32, random h and targets.",
    f"chunked: `CategoricalHead` with `chunked=true`, {CHUNK:,} logits at once. checkpointed: chunks of this size by "
    "`torch.utils.checkpoint`.",
    "Peak memory: tensors alive at once in forward and backward, gradients included. On CUDA the allocator's; on a CPU "
    "the storages that operators return, without scratch memory inside operators.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, 2, vocabularies=([50257], "tokens of a vocabulary; default: GPT-2's"))
    add_options(parser, positions=(4096, "of a batch"), d_model=(512, "width of h"), repeats=(3, "rounds"))


def run(args: argparse.Namespace) -> Report:
    return Report("vocabulary", [row for size in sorted(args.vocabularies) for row in _rows(size, args)], NOTES)


def _rows(size: int, args: argparse.Namespace) -> list[Row]:
    torch.manual_seed(0)
    h = torch.randn(args.positions, args.d_model, device=args.device, requires_grad=True)
    weight = (0.02 * torch.randn(size, args.d_model, device=args.device)).requires_grad_()
    bias = torch.zeros(size, device=args.device, requires_grad=True)
    target = torch.randint(size, (args.positions,), device=args.device)
    forms = {"whole": _whole, "chunked": linear_cross_entropy, "checkpointed": _checkpointed}
    calls = {name: partial(_step, form, h, weight, bias, target) for name, form in forms.items()}
    peaks = {name: peak_bytes(call, h.device) for name, call in calls.items()}
    seconds = timed(f"vocabulary {size}", calls, args)
    about: Row = {"vocabulary": size, "positions": args.positions, "width": args.d_model}
    return [{**about, "logits": name, **compared(name, seconds, peaks, "whole")} for name in forms]


def _step(form: Callable[..., Tensor], h: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> None:
    torch.autograd.grad(form(h, weight, bias, target).mean(), (h, weight, bias))


def _whole(h: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, weight, bias), target, reduction="none")


def _checkpointed(h: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    rows = max(1, CHUNK // len(weight))
    chunks = zip(h.split(rows), target.split(rows), strict=True)
    return torch.cat([checkpoint(_whole, x, weight, bias, y, use_reentrant=False) for x, y in chunks])
