"""Attention transfer: each layer's attention is trained to give the outputs of another model's attention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_effattn.attention.base import MultiHead
from lit_effattn.hparams import spec
from lit_effattn.nn.transformer import Block, Transformer
from lit_effattn.sequence import SequenceModule, State, accumulator


class TransferState(NamedTuple):
    """The states of both attentions, and the error of this call."""

    old: State
    new: State
    loss: Tensor  # (B,)


class Transfer(SequenceModule):
    """Trains an attention to give the output of another one (Zhang et al. 2024, LoLCATs, section 3.2).

        loss = Σ_i ‖new(x)_i − old(x)_i‖² / Σ_i ‖old(x)_i‖²,  per row

    The division makes all layers count alike: 0 is a perfect copy, 1 an output of zeros. In training mode the output is
    that of `old`, and the error is an auxiliary loss in the state. In evaluation mode only `new` is used. The state
    dict is that of `new`.

    Args:
        new: The attention to train, causal.
        old: The attention to imitate, causal. It is frozen.

    Raises:
        ValueError: If one of the two is not causal.
    """

    def __init__(self, new: SequenceModule, old: SequenceModule) -> None:
        super().__init__()
        if not (new.causal and old.causal):
            raise ValueError("attention transfer needs causal attention: the error of a layer travels in its state")
        self.d_input, self.d_model, self.causal = new.d_input, new.d_model, True
        self.new = new
        self.old = old.requires_grad_(False).eval()
        self.register_state_dict_post_hook(_drop_old)
        self.register_load_state_dict_pre_hook(_restore_old)

    @override
    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        if not self.training:
            return self.new(x, state, lengths)
        before, own = (None, None) if state is None else (state.old, state.new)
        with torch.no_grad():
            target, after = self.old(x, before, lengths)
        y, own = self.new(x, own, lengths)
        full = accumulator(y.dtype)
        error, size = (t.to(full).square().sum((1, 2)) for t in (y - target, target))  # (B, N, E) -> (B,)
        return target, TransferState(after, own, error / size.clamp(min=torch.finfo(full).tiny))

    def empty_state(self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype) -> State:
        """Return the empty state of both attentions, in evaluation that of `new` alone."""
        new = self.new.initial_state(batch_size, max_len=max_len, device=device, dtype=dtype)
        if not self.training:
            return new
        old = self.old.initial_state(batch_size, max_len=max_len, device=device, dtype=dtype)
        return TransferState(old, new, torch.zeros(batch_size, device=device, dtype=accumulator(dtype)))

    def reset(self, state: State, rows: Tensor) -> State:
        """Reset both states: see `SequenceModule.reset`."""
        if not isinstance(state, TransferState):
            return self.new.reset(state, rows)
        old, new = self.old.reset(state.old, rows), self.new.reset(state.new, rows)
        return TransferState(old, new, state.loss.masked_fill(rows, 0))

    def grow(self, state: State, max_len: int) -> State:
        """Make room in the state: see `SequenceModule.grow`."""
        if not isinstance(state, TransferState):
            return self.new.grow(state, max_len)
        return state._replace(old=self.old.grow(state.old, max_len), new=self.new.grow(state.new, max_len))

    @property
    @override
    def bounded_by(self) -> str | None:
        old = self.old.bounded_by if self.training else None
        return self.new.bounded_by if old is None else old


def begin_transfer(model: nn.Module, teacher: nn.Module) -> int:
    """Train `model` to imitate the attention of `teacher`, in each block whose attentions differ in kind or options.

    All other parameters of `model` are frozen, and dropout is disabled. The attentions of `teacher` are moved to
    `model`.

    Args:
        model: A model in training mode with the weights of `teacher`, wherever it has them.
        teacher: A model with the same number of blocks.

    Returns:
        The number of blocks whose attention is trained.

    Raises:
        ValueError: If the numbers of blocks differ, no attention differs, one that differs is not causal, or the models
            give their attentions different inputs.
    """
    blocks, of_teacher = ([m for m in module.modules() if isinstance(m, Block)] for module in (model, teacher))
    if len(blocks) != len(of_teacher):
        raise ValueError(f"the model has {len(blocks)} blocks, but the teacher {len(of_teacher)}; use the same number")
    pairs = [(b, o) for b, o in zip(blocks, of_teacher, strict=True) if spec(b.attention) != spec(o.attention)]
    if not pairs:
        raise ValueError(
            "the model has the same attention as the teacher: name another with --model.backbone.attention"
        )
    if any(block.attention_norms != other.attention_norms for block, other in pairs):
        raise ValueError(
            "norm_memory=True applies to the attention of one of the models alone, so their attentions get different "
            "inputs; set --model.backbone.norm_memory false"
        )
    added, of_other = (_added_positions(m) for m in (model, teacher))
    if added != of_other:
        raise ValueError(
            f"the model adds {added} to its inputs, the teacher {of_other}; set --model.backbone.positions to the "
            "teacher's, null if it adds none"
        )
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Dropout | MultiHead):  # an attention drops weights itself
            module.eval()
    for block, other in pairs:
        block.attention = Transfer(block.attention.requires_grad_(True), other.attention)
    return len(pairs)


def _added_positions(model: nn.Module) -> str:
    stacks = [m for m in model.modules() if isinstance(m, Transformer)]
    return ", ".join("no positions" if m.positions is None else type(m.positions).__name__ for m in stacks)


def _drop_old(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Remove the prefix `new.` from names, and the parameters of `old`."""
    for name in [name for name in state_dict if name.startswith((f"{prefix}new.", f"{prefix}old."))]:
        value = state_dict.pop(name)
        if name.startswith(f"{prefix}new."):
            state_dict[prefix + name.removeprefix(f"{prefix}new.")] = value


def _restore_old(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Undo `_drop_old`; `old` keeps its parameters."""
    for name in module.new.state_dict():
        if prefix + name in state_dict:
            state_dict[f"{prefix}new.{name}"] = state_dict.pop(prefix + name)
    state_dict.update({f"{prefix}old.{name}": value for name, value in module.old.state_dict().items()})
