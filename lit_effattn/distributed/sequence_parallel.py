"""Sequence parallelism: each process computes a part of every sequence, and one message a layer joins the parts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lit_effattn.attention.base import kinds_with
from lit_effattn.sequence import SequenceModule, State, in_parts, map_tensors, tensors


class Parts:
    """The processes that share sequences, in the order of the parts.

    Args:
        group: The processes. None: all.

    Attributes:
        rank: Index of this process's part.
        size: Number of parts.
        n_messages: Number of gathers so far.
        n_bytes: Number of bytes that this process sent to each other process in them. The backward pass sends as many.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.n_messages = 0
        self.n_bytes = 0

    @staticmethod
    def unsupported(module: SequenceModule) -> str:
        """Return the message for a user who calls a module without `takes_parts` inside `sequence_parallel`."""
        return (
            f"{type(module).__name__} does not support sequence_parallel, in which a process has a part of each "
            f"sequence; causal {kinds_with('takes_parts')}, and {kinds_with('split_option')}, support it"
        )

    def count(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of positions of the earlier parts and of all parts, (B,) each, given this part's (B,)."""
        counts = self._gather(seen)  # (P, B)
        return counts[: self.rank].sum(0), counts.sum(0)

    def longest(self, seen: Tensor) -> int:
        """Return the number of positions of the longest row of any part, given this part's (B,)."""
        return int(self._gather(seen.max()[None]).max())

    def mean(self, figure: Tensor) -> Tensor:
        """Return the mean over the processes of a number without a gradient."""
        return self._gather(figure.detach().reshape(1)).mean()

    def join(self, combine: Callable[[State, State], State], part: State, before: State) -> tuple[State, State]:
        """Return the state before this process's part, and the state after all parts.

            S_p = before ⊕ part_1 ⊕ … ⊕ part_{p−1}

        All processes get one message of the size of a state. Gradients flow to the parts of other processes, so all
        processes have to call `backward`, on an output of the module.

        Args:
            combine: ⊕, associative: see `Attention.combine_states`.
            part: The state after this process's part, made from an empty state.
            before: The state before the first part, the same in all processes. The state after all parts has its types.
        """
        earlier = after = before
        for rank, other in enumerate(self._gather_states(part)):
            after = combine(after, other)
            # A part that is not earlier is multiplied by 0, not left out: the backward pass of the message is a
            # collective call, which every process has to reach.
            earlier = after if rank < self.rank else _with_graph_of(earlier, other)
        types = (t.dtype for t in tensors(before))
        return earlier, map_tensors(lambda t: t.to(next(types)), after)

    def _gather_states(self, part: State) -> list[State]:
        """Gather the tensors of a state in one message."""
        flat = list(tensors(part))
        numbers = reduce(torch.promote_types, (t.dtype for t in flat if t.is_floating_point()))
        message = torch.cat([_as_numbers(t, numbers) for t in flat])
        return [_unflattened(part, gathered) for gathered in self._gather(message)]

    def _gather(self, t: Tensor) -> Tensor:
        """(M,) -> (P, M)."""
        self.n_messages += 1
        self.n_bytes += t.numel() * t.element_size()
        gathered: Tensor = _Gather.apply(t, self.group)
        return gathered


class _Gather(torch.autograd.Function):
    """An all-gather. The gradient of a part is the sum of all processes' gradients for it, a reduce-scatter.

    It is an all-to-all and a sum, which gloo supports.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = t.new_empty(dist.get_world_size(group), *t.shape)  # (P, M)
        dist.all_gather(list(gathered), t.contiguous(), group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(g)  # (P, M), each process's gradient of this part
        dist.all_to_all_single(received, g.contiguous(), group=ctx.group)
        return received.sum(0), None


def _as_numbers(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Flatten `t` and convert it to the floating-point type `dtype`; integers keep their bits."""
    return t.flatten().to(dtype) if t.is_floating_point() else t.flatten().view(dtype)


def _unflattened(like: State, message: Tensor) -> State:
    """Undo the flattening of a state with the shapes of `like`."""
    start = 0

    def take(t: Tensor) -> Tensor:
        nonlocal start
        n = t.numel() if t.is_floating_point() else t.numel() * t.element_size() // message.element_size()
        cut, start = message[start : start + n], start + n
        # A copy is aligned for integers, which are wider than the message's numbers.
        return (cut.to(t.dtype) if t.is_floating_point() else cut.detach().clone().view(t.dtype)).view(t.shape)

    return map_tensors(take, like)


def _with_graph_of(state: State, other: State) -> State:
    """Return `state`, with a gradient of 0 to `other` in its graph."""
    of_other = tensors(other)

    def join(t: Tensor) -> Tensor:
        u = next(of_other)
        return torch.where(torch.ones_like(t, dtype=torch.bool), t, u.sum()) if u.requires_grad else t

    return map_tensors(join, state)


@contextmanager
def sequence_parallel(group: dist.ProcessGroup | None = None) -> Iterator[Parts]:
    """Let every process of `group` compute a part of each sequence.

        with sequence_parallel():
            y, state = model(x[:, a:b], state)            # a:b, this process's part

    `y` equals the output of one process at the positions a:b, and `state` is the state after the last part, the same in
    all processes. So a memory is carried from segment to segment as usual. Parts may have different lengths, and
    padding is on the right of each part (`lengths`); the valid positions of the parts follow one another. Each layer's
    message is one state, whatever the length: O(H F D) for linear attention and Performer (LASP-2; Sun et al. 2025,
    section 3).

    A loss is a sum over the parts, divided once by the whole sequence's count, and a parameter's gradient is the sum of
    the gradients of all processes (`all_reduce`). Call `backward` in all processes.

    `SequenceModule.takes_parts` is True for modules that support this.

    Args:
        group: The processes, in the order of the parts. Default: all.

    Yields:
        The parts, which count messages.

    Raises:
        RuntimeError: If torch.distributed is not initialised.
        NotImplementedError: In a call, if the module does not support parts.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("sequence_parallel needs torch.distributed: call torch.distributed.init_process_group first")
    parts = Parts(group)
    with in_parts(parts):
        yield parts
