"""Tensor parallelism: processes divide the heads of attentions and the inner dimensions of feed-forward layers.

    y = Σ_p W_o[p] attend(W_q[p] x, W_k[p] x, W_v[p] x),   y = Σ_p W₂[p] f(W₁[p] x)      Shoeybi et al. 2019, section 3

p is a process, [p] its heads, or its part of the inner dimensions. Each sum is an all-reduce of (B, N, E) in the
forward pass; the backward pass has one for each projection of x. Everything else is computed in every process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lit_effattn.attention.base import MultiHead
from lit_effattn.nn.lstm import LSTM
from lit_effattn.nn.transformer import Block, FeedForward
from lit_effattn.sequence import State, map_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the heads and feed-forward layers of all blocks in `model` among processes.

    Parameters of the divided layers are then DTensors, with the values that they have in the first process. `n_heads`
    of an attention, and the heads of its state, are those of this process.

    Args:
        model: A model whose sequence modules are `Transformer`s.
        mesh: The processes, in one dimension.

    Raises:
        ValueError: If a layer does not support it, or the number of processes does not divide its heads or dimensions.
    """
    rank, size = mesh.get_local_rank(), mesh.size()
    for module in model.modules():
        if isinstance(module, LSTM):
            raise ValueError(f"tensor_parallel_size={size}: an LSTM has no heads to divide; leave it out")
        if isinstance(module, MultiHead):
            module.keep_heads(rank, size)
        if isinstance(module, FeedForward) and module.up.out_features % size:
            raise ValueError(
                f"tensor_parallel_size={size} does not divide d_ff={module.up.out_features}; change one of them"
            )
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        parallelize_module(block, mesh, _plan(block))


def _plan(block: Block) -> dict[str, ParallelStyle]:
    """Return the parallel style of each layer of a block."""
    columns = ("q_proj", "k_proj", "v_proj", "feed_forward.up", "feed_forward.gate")
    plan: dict[str, ParallelStyle] = {}
    for name, _ in block.named_modules():
        if name.endswith(columns):
            plan[name] = ColwiseParallel()
        elif name.endswith(("out_proj", "feed_forward.down")):
            plan[name] = RowwiseParallel()
        elif name.endswith(("q_norm", "k_norm")):
            # All heads share one gain. Each process normalises its heads (B, H / P, N, D); the gradients are summed.
            plan[name] = SequenceParallel(sequence_dim=1, use_local_output=True)
    return plan


def all_heads(state: State, mesh: DeviceMesh) -> State:
    """Gather the state of all heads from those of each process. All processes call it."""

    def gather(t: Tensor) -> Tensor:
        if t.dim() < 2:  # one number a row
            return t
        parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(mesh.size())]
        dist.all_gather(parts, t.contiguous(), group=mesh.get_group())
        return torch.cat(parts, 1)  # (B, H / P, …) -> (B, H, …)

    return map_tensors(gather, state)


def my_heads(state: State, mesh: DeviceMesh) -> State:
    """Return the state of this process's heads, given the state of all heads."""
    rank, size = mesh.get_local_rank(), mesh.size()
    return map_tensors(lambda t: t if t.dim() < 2 else t.chunk(size, 1)[rank].clone(), state)
