"""The Transformer: blocks with any attention, positions, feed-forward layers and initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lit_effattn.attention.base import Attention, AttentionFactory, kinds_with
from lit_effattn.attention.cross import CrossAttention, CrossAttentionFactory, check_source
from lit_effattn.attention.positions import PositionsFactory, RotaryPositions, SinusoidalPositions
from lit_effattn.attention.softmax import SoftmaxAttention
from lit_effattn.checks import at_least, one_of, positive, probabilities
from lit_effattn.sequence import SequenceModule, State, in_parts, parts, valid_lengths, without_padding

Activation = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "swiglu"]
Initialisation = Literal["pytorch", "xavier", "normal", "gpt2", "transformer_xl"]
NormKind = Literal["layer", "rms"]


class FeedForward(nn.Module):
    """Two matrices around a non-linearity, applied to each position separately (Vaswani et al. 2017, equation 2).

        relu, gelu: W₂ f(W₁ x + b₁) + b₂;  swiglu: W₂ (silu(W_g x) ⊙ W₁ x), without biases (Shazeer 2020, equation 6)

    gelu is x Φ(x). Two approximations (Hendrycks & Gimpel 2016, section 2) are quick_gelu, x σ(1.702 x) (Child et al.
    2019, section 5.2), and gelu_tanh, ½ x (1 + tanh(√(2/π) (x + 0.044715 x³))), used by GPT-2 (Radford et al. 2019, the
    authors' code).

    Args:
        d_model: Width.
        d_ff: Width between the matrices.
        activation: f.
        dropout: Dropout between f and W₂.
    """

    def __init__(self, d_model: int, d_ff: int, activation: Activation = "gelu", dropout: float = 0.0) -> None:
        super().__init__()
        gated = activation == "swiglu"
        self.activation = activation
        self.up = nn.Linear(d_model, d_ff, bias=not gated)
        self.gate = nn.Linear(d_model, d_ff, bias=False) if gated else None
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(d_ff, d_model, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, d_model) -> (B, N, d_model)."""
        y = self._activate(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)  # (B, N, d_ff)
        return self.down(self.dropout(y))

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation == "quick_gelu":
            return F.silu(1.702 * x) / 1.702
        if self.activation == "relu":
            return F.relu(x)
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")


class DecoderBlockState(NamedTuple):
    """The state of a block with cross-attention."""

    attention: State
    """State of the self-attention. None: empty."""
    source: State
    """State of the cross-attention."""


class Block(SequenceModule):
    """Attention, optional cross-attention, and feed-forward, each with a residual and a LayerNorm.

        pre:  x ← x + f(norm(x))      post:  x ← norm(x + f(x))

    The state is that of the attention, or with cross-attention a `DecoderBlockState`.

    Args:
        attention: Mixes the sequence.
        feed_forward: Applied after the attention, to each position separately.
        norm: LayerNorm before each branch, or after each residual.
        dropout: Dropout on the output of each branch.
        cross_attention: Reads a source, after the attention. Needs a causal `attention`.
        norm_memory: See `Transformer`.
        layer_norm: Makes the normalisation from the width.

    Raises:
        ValueError: If `cross_attention` is given and `attention` is not causal, or if `attention` needs `norm_memory`.
    """

    takes_parts = True

    def __init__(
        self,
        attention: SequenceModule,
        feed_forward: nn.Module,
        norm: Literal["pre", "post"] = "pre",
        dropout: float = 0.0,
        cross_attention: CrossAttention | None = None,
        norm_memory: bool = False,
        layer_norm: Callable[[int], nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.d_input = self.d_model = attention.d_model
        self.causal = attention.causal
        self.attention = attention
        self.feed_forward = feed_forward
        self.norm = norm
        self.norm_1 = layer_norm(self.d_model)
        self.norm_2 = layer_norm(self.d_model)
        self.attention_norms = False
        """Whether the attention applies `norm_1` itself."""
        if norm == "pre" and norm_memory and isinstance(attention, Attention) and attention.remembers_inputs:
            attention.normalise_with(self.norm_1)
            self.attention_norms = True
        elif needs := attention.needs_norm if isinstance(attention, Attention) else "":
            raise ValueError(
                f"{needs} with norm={norm!r} and norm_memory={norm_memory}: it needs the layer's inputs before the "
                "LayerNorm; set norm='pre' and norm_memory=True"
            )
        self.dropout = nn.Dropout(dropout)
        self.cross_attention = cross_attention
        self.norm_cross: nn.Module | None = None
        if cross_attention is not None:
            if not self.causal:
                raise ValueError(
                    "cross_attention needs causal=True, because a source is a state, which only causal modules have"
                )
            self.norm_cross = layer_norm(self.d_model)

    @override
    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, State | None]:
        self.check(x, state, lengths)
        x = without_padding(x, lengths)  # a NaN in padding would reach the LayerNorm's gradients as 0 · NaN
        own, source = state if isinstance(state, DecoderBlockState) else (state, None)
        cross, norm_cross = self.cross_attention, self.norm_cross
        if self.norm == "pre":  # x + f(norm(x))
            y, own = self.attention(x if self.attention_norms else self.norm_1(x), own, lengths)
            x = x + self.dropout(y)
            if cross is not None and norm_cross is not None:
                y, source = cross(norm_cross(x), source, lengths)
                x = x + self.dropout(y)
            x = x + self.dropout(self.feed_forward(self.norm_2(x)))
        else:  # norm(x + f(x))
            y, own = self.attention(x, own, lengths)
            x = self.norm_1(x + self.dropout(y))
            if cross is not None and norm_cross is not None:
                y, source = cross(x, source, lengths)
                x = norm_cross(x + self.dropout(y))
            x = self.norm_2(x + self.dropout(self.feed_forward(x)))
        return without_padding(x, lengths), own if cross is None else DecoderBlockState(own, source)

    def remember(self, source: Tensor, lengths: Tensor | None = None, *, max_len: int | None = None) -> State:
        """Return the state from which the block reads `source` (B, S, d_source): see `Transformer.remember`."""
        assert self.cross_attention is not None  # see `Transformer.remember`
        empty = None
        if max_len is not None:
            empty = self.attention.initial_state(source.size(0), max_len=max_len, device=source.device)
        return DecoderBlockState(empty, self.cross_attention.remember(source, lengths))

    def empty_state(self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype) -> State:
        """Return the empty state, without a source: see `SequenceModule.initial_state`."""
        empty = self.attention.initial_state(batch_size, max_len=max_len, device=device, dtype=dtype)
        if self.cross_attention is None:
            return empty
        return DecoderBlockState(empty, self.cross_attention.initial_state(batch_size, device=device, dtype=dtype))

    def reset(self, state: State, rows: Tensor) -> State:
        """Reset the attention's state, and remove the source: see `SequenceModule.reset`."""
        if self.cross_attention is None:
            return self.attention.reset(state, rows)
        before = None if state.attention is None else self.attention.reset(state.attention, rows)
        return DecoderBlockState(before, self.cross_attention.reset(state.source, rows))

    def grow(self, state: State, max_len: int) -> State:
        """Make room in the attention's state: see `SequenceModule.grow`."""
        if self.cross_attention is None:
            return self.attention.grow(state, max_len)
        before = None if state.attention is None else self.attention.grow(state.attention, max_len)
        return state._replace(attention=before)

    @property
    @override
    def bounded_by(self) -> str | None:
        return self.attention.bounded_by


class TransformerState(NamedTuple):
    """The number of positions of each row, and the state of each layer."""

    length: Tensor  # (B,), positions seen
    layers: tuple[State, ...]


class Transformer(SequenceModule):
    """A stack of blocks around any attention (Vaswani et al. 2017, section 3.1).

    Args:
        d_model: Width E of the stack.
        n_heads: Heads of every attention.
        n_layers: Number of blocks.
        d_ff: Width inside the feed-forward. Default: 4 E, or 8/3 E for swiglu, which has three matrices.
        attention: The kind of attention, or a list of kinds that are assigned to the layers in turn.
        causal: Whether a position sees only itself and earlier positions.
        positions: The position encoding; null: none. "auto": none where the attention has relative positions
            (Transformer-XL, Compressive, ∞-former, Shaw); else rotary, or sinusoidal if a kind does not support rotary.
        position_width: None: positions are added to the input. Else this many of the `d_model` dimensions hold the
            position, which is concatenated to a narrower input (half of them in Katharopoulos et al. 2020).
        norm: LayerNorm before each branch ("pre") or after each residual ("post", as in the 2017 paper).
        final_norm: Whether there is a LayerNorm on the output. Default: with "pre" only.
        activation: Activation of the feed-forward: see `FeedForward`.
        dropout: Dropout on the input and on the output of each branch.
        init: "pytorch": the default of each module. "xavier": uniform Xavier matrices and zero biases (2017).
            "normal": N(0, 0.02²) and zero biases. "transformer_xl": "normal", and the LayerNorms' gains N(1, 0.02²), as
            in the code of Dai et al. 2019. "gpt2": "normal", with the last matrix of each branch scaled by 1/√branches,
            so that the residual's variance does not grow with depth (Child et al. 2019, section 5.2; Radford et al.
            2019). A layer has 2 branches, with cross-attention 3. `Mamba2Attention` keeps PyTorch's start.
        gradient_checkpointing: Keep only the blocks' inputs for the backward pass, and compute the rest again: less
            memory, about a third more time.
        cross_attention: The kind of cross-attention, or a list of kinds that are assigned to the layers in turn. The
            stack is then a decoder, whose blocks read a source between attention and feed-forward. See `remember`.
        d_source: Width of the source. Default: E.
        activation_dropout: Dropout inside the feed-forward, after the activation. In the code of Dai et al. 2019 and of
            Katharopoulos et al. 2020 it equals `dropout`.
        output_dropout: Dropout on the output of the stack, as in the code of Dai et al. 2019.
        norm_memory: For norm="pre" and an attention that remembers inputs (Transformer-XL, Compressive, ∞-former):
            whether it remembers the layer's inputs and normalises them in each call, as in the code of Dai et al. 2019
            (`pre_lnorm`). Else it remembers the LayerNorm's outputs, which were computed with earlier gains; the gains
            then get no gradient from a detached memory. On `stdlib_xl` (1,000 steps, two seeds) the scores differ by
            less than those of the seeds, and true takes 2.8 % more time a step.
        norm_kind: "layer": LayerNorm. "rms": RMSNorm, g ⊙ x / √(mean(x²) + ε) (Zhang & Sennrich 2019, equation 4),
            everywhere in place of LayerNorm.
        norm_eps: The normalisation's ε. Default: PyTorch's: 1e-5 for LayerNorm, the type's precision for RMSNorm.
        positions_in_layers: Whether each layer adds its own positions to its input, as in Al-Rfou et al. 2018, section
            "Positional Embeddings". Else they are added once, before the first layer. Needs `positions` that are added.
            Learned positions have a table for each layer.
        input_norm: Whether there is a normalisation on the input with its positions (Devlin et al. 2018, the authors'
            code).

    Raises:
        ValueError: If an option is unknown, out of range, or does not apply to the kinds of attention.

    Examples:
        >>> from lit_effattn.attention import LinearAttention
        >>> model = Transformer(d_model=32, n_heads=4, n_layers=2, attention=LinearAttention)
        >>> y, state = model(torch.zeros(1, 10, 32))
        >>> y, state = model(torch.zeros(1, 1, 32), state)  # the eleventh position
        >>> y.shape, state.length
        (torch.Size([1, 1, 32]), tensor([11]))
    """

    takes_parts = True

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_layers: int,
        d_ff: int | None = None,
        # The list comes first: in the other order jsonargparse saves a list as a string that can't be read again.
        attention: list[AttentionFactory] | AttentionFactory = SoftmaxAttention,
        causal: bool = True,
        positions: Literal["auto"] | PositionsFactory | None = SinusoidalPositions,
        position_width: int | None = None,
        norm: Literal["pre", "post"] = "pre",
        final_norm: bool | None = None,
        activation: Activation = "gelu",
        dropout: float = 0.0,
        init: Initialisation = "gpt2",
        gradient_checkpointing: bool = False,
        cross_attention: list[CrossAttentionFactory] | CrossAttentionFactory | None = None,
        d_source: int | None = None,
        *,
        activation_dropout: float = 0.0,
        output_dropout: float = 0.0,
        norm_memory: bool = False,
        norm_kind: NormKind = "layer",
        norm_eps: float | None = None,
        positions_in_layers: bool = False,
        input_norm: bool = False,
    ) -> None:
        super().__init__()
        one_of(("pre", "post"), norm=norm)
        one_of(Activation, activation=activation)
        one_of(Initialisation, init=init)
        one_of(NormKind, norm_kind=norm_kind)
        positive(norm_eps=norm_eps)
        at_least(1, n_layers=n_layers, d_ff=d_ff, d_source=d_source)
        probabilities(dropout=dropout, activation_dropout=activation_dropout, output_dropout=output_dropout)
        kinds = _in_turn("attention", attention, n_layers)
        cross_kinds = None if cross_attention is None else _in_turn("cross_attention", cross_attention, n_layers)
        if cross_kinds is None and d_source is not None:
            raise ValueError(f"d_source={d_source} does not apply without cross_attention; leave it out")
        if cross_kinds is not None and not causal:
            raise ValueError("cross_attention needs causal=True: a decoder must not see the tokens that it predicts")
        _check_kinds(kinds, cross_kinds or [])
        if isinstance(positions, str) and positions != "auto":
            raise ValueError(f"positions={positions!r} must be a class, 'auto' or None")
        if position_width is not None and (positions in (None, "auto") or not 0 < position_width < d_model):
            raise ValueError(
                f"position_width={position_width} with d_model={d_model} and positions={_name(positions)}: it must be "
                "between 1 and d_model − 1, and `positions` must name an encoding that is added"
            )
        self.d_model = d_model
        self.d_input = d_model - (position_width or 0)
        self.d_source = d_model if d_source is None else d_source
        self.causal = causal
        self.gradient_checkpointing = gradient_checkpointing
        layer_norm = _layer_norm(norm_kind, norm_eps)
        d_ff = d_ff or (round(8 * d_model / 3) if activation == "swiglu" else 4 * d_model)
        self.blocks: list[Block] = nn.ModuleList(  # type: ignore[assignment]
            Block(
                kinds[i % len(kinds)](d_model, n_heads, causal),
                FeedForward(d_model, d_ff, activation, activation_dropout),
                norm=norm,
                dropout=dropout,
                cross_attention=None
                if cross_kinds is None
                else cross_kinds[i % len(cross_kinds)](d_model, n_heads, self.d_source),
                norm_memory=norm_memory,
                layer_norm=layer_norm,
            )
            for i in range(n_layers)
        )
        self.input_norm = layer_norm(d_model) if input_norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.output_dropout = nn.Dropout(output_dropout)
        self.norm = layer_norm(d_model) if (norm == "pre" if final_norm is None else final_norm) else nn.Identity()
        self.positions = self._make_positions(positions, position_width)
        if positions_in_layers and (self.positions is None or position_width is not None):
            raise ValueError(
                f"positions_in_layers=True with positions={_name(positions)} and position_width={position_width}: it "
                "needs positions that are added, such as LearnedPositions, and no position_width"
            )
        later = range(1, n_layers if positions_in_layers else 1)
        self.later_positions = nn.ModuleList(self._make_positions(positions, None) for _ in later)  # type: ignore[misc]
        _initialise(self, init)
        self._share_parameters()

    @override
    def forward(
        self, x: Tensor, state: State | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, TransformerState | None]:
        outputs, after = self._run(x, state, lengths, outputs_from=len(self.blocks) - 1)
        return outputs[-1], after

    def layer_outputs(
        self, x: Tensor, state: TransformerState | None = None, lengths: Tensor | None = None
    ) -> tuple[list[Tensor], TransformerState | None]:
        """Return the output of each layer, with the final LayerNorm of the stack, and the state.

        Args:
            x: See `SequenceModule.forward`.
            state: See `SequenceModule.forward`.
            lengths: See `SequenceModule.forward`.

        Returns:
            n_layers tensors (B, N, E), of which the last is the output of `forward`, and the state after `x`.
        """
        return self._run(x, state, lengths, outputs_from=0)

    def _run(
        self, x: Tensor, state: TransformerState | None, lengths: Tensor | None, *, outputs_from: int
    ) -> tuple[list[Tensor], TransformerState | None]:
        """Return the outputs of the layers from `outputs_from` on, and the state after `x`."""
        self.check(x, state, lengths)
        start, seen = self._counts(x, state, lengths)
        position = self._position(x, start, lengths)
        x = without_padding(self._with_positions(self.positions, x, position), lengths)  # as in `Block.forward`
        x = self.dropout(self.input_norm(x))
        outputs, after = [], []
        states = [None] * len(self.blocks) if state is None else state.layers
        for i, (block, before) in enumerate(zip(self.blocks, states, strict=True)):
            if i and self.later_positions:
                x = self._with_positions(self.later_positions[i - 1], x, position)
            run: Any = block
            if self.gradient_checkpointing and torch.is_grad_enabled():
                # The backward pass calls the block again, after `in_parts`, and on a GPU in another thread.
                run = block if parts() is None else partial(_call_in_parts, parts(), block)
                run = partial(checkpoint, run, use_reentrant=False)
            x, new = run(x, before, lengths)
            after.append(new)
            if i >= outputs_from:
                outputs.append(without_padding(self.output_dropout(self.norm(x)), lengths))
        if not self.causal:
            return outputs, None
        return outputs, TransformerState(seen if state is None else state.length + seen, tuple(after))

    def _counts(
        self, x: Tensor, state: TransformerState | None, lengths: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """Return the numbers of positions before `x`, (B,) or None for 0, and of this call in all its parts, (B,)."""
        start = None if state is None else state.length
        seen = valid_lengths(lengths, x)
        if (group := parts()) is None:
            return start, seen
        earlier, seen = group.count(seen)
        return earlier if start is None else start + earlier, seen

    def _position(self, x: Tensor, start: Tensor | None, lengths: Tensor | None) -> Tensor:
        """Return the positions of `x`, (B or 1, N), after `start` (B,) earlier ones. Padding repeats the last."""
        position = torch.arange(x.size(1), device=x.device)[None]  # (1, N)
        last = None if lengths is None else lengths - 1  # (B,)
        if start is not None:
            position = position + start[:, None]  # (B, N)
            last = None if last is None else start + last
        elif last is not None:
            last = last.amax(keepdim=True)  # (1,)
        return position if last is None else position.minimum(last.clamp(min=0)[:, None])

    def _with_positions(self, positions: nn.Module | None, x: Tensor, position: Tensor) -> Tensor:
        if positions is None:
            return x
        p = positions(position).to(x.dtype)  # (B or 1, N, E or position_width)
        return x + p if self.d_input == self.d_model else torch.cat([x, p.expand(x.size(0), -1, -1)], -1)

    def remember(
        self, source: Tensor, lengths: Tensor | None = None, *, max_len: int | None = None
    ) -> TransformerState:
        """Return the state with a source, before the first position of the target.

        `reset` removes the source of rows.

        Args:
            source: (B, S, d_source), such as an encoder's output.
            lengths: (B,) integers in 0 … S, the number of valid positions of each row. None: all are valid.
            max_len: Maximum number of positions of the target: see `SequenceModule.initial_state`. None, as in
                training: the state may grow.

        Raises:
            ValueError: If the stack has no cross-attention, or an argument is invalid.
        """
        if self.blocks[0].cross_attention is None:
            raise ValueError(f"{type(self).__name__} has no cross_attention, so it can't read a source; name a kind")
        check_source(self, source, lengths)
        length = torch.zeros(source.size(0), dtype=torch.long, device=source.device)
        return TransformerState(length, tuple(b.remember(source, lengths, max_len=max_len) for b in self.blocks))

    def empty_state(
        self, batch_size: int, max_len: int | None, device: torch.device, dtype: torch.dtype
    ) -> TransformerState:
        """Return the states of all layers: see `SequenceModule.initial_state`."""
        return TransformerState(
            torch.zeros(batch_size, dtype=torch.long, device=device),
            tuple(b.initial_state(batch_size, max_len=max_len, device=device, dtype=dtype) for b in self.blocks),
        )

    def reset(self, state: TransformerState, rows: Tensor) -> TransformerState:
        """Reset the states of all layers: see `SequenceModule.reset`."""
        layers = tuple(block.reset(s, rows) for block, s in zip(self.blocks, state.layers, strict=True))
        return TransformerState(state.length.masked_fill(rows, 0), layers)

    def grow(self, state: TransformerState, max_len: int) -> TransformerState:
        """Make room in the states of all layers: see `SequenceModule.grow`."""
        return state._replace(
            layers=tuple(block.grow(s, max_len) for block, s in zip(self.blocks, state.layers, strict=True))
        )

    @property
    def bounded_by(self) -> str | None:
        """The option of the first layer whose state grows: see `SequenceModule.bounded_by`."""
        return next((block.bounded_by for block in self.blocks if block.bounded_by is not None), None)

    def _make_positions(
        self, positions: Literal["auto"] | PositionsFactory | None, width: int | None
    ) -> nn.Module | None:
        """Create the positions. Rotary positions are set on the attentions, and None is returned."""
        attentions = [block.attention for block in self.blocks]
        if positions == "auto":
            attentions = [a for a in attentions if not getattr(a, "has_positions", False)]
            positions = RotaryPositions if all(map(_takes_rotary, attentions)) else SinusoidalPositions
        if positions is None or not attentions:
            return None
        made = positions(width or self.d_model)
        if not isinstance(made, RotaryPositions):
            return made
        if width is not None:
            raise ValueError(
                f"position_width={width} does not apply to rotary positions, which concatenate nothing; leave it out"
            )
        for attention in attentions:
            if not _takes_rotary(attention):
                raise ValueError(f"{type(attention).__name__} does not take rotary positions; choose others, or 'auto'")
            attention.rotary = positions(attention.qk_dim)  # type: ignore[arg-type]
        return None

    def _share_parameters(self) -> None:
        """Share the parameters listed in `Attention.shared` among all layers."""
        first: dict[str, nn.Parameter] = {}
        for attention in (block.attention for block in self.blocks):
            for name in attention.shared if isinstance(attention, Attention) else ():
                setattr(attention, name, first.setdefault(name, getattr(attention, name)))


def _initialise(transformer: Transformer, init: Initialisation) -> None:
    if init == "pytorch":
        return
    branches = sum(2 if block.cross_attention is None else 3 for block in transformer.blocks)
    last = 1 / math.sqrt(branches) if init == "gpt2" else 1.0
    keep = [block.attention for block in transformer.blocks if getattr(block.attention, "keeps_start", False)]
    kept = {module for attention in keep for module in attention.modules()}
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and module in kept:
            if name.endswith("out_proj"):
                with torch.no_grad():
                    module.weight *= last
        elif isinstance(module, nn.Linear):
            if init == "xavier":
                nn.init.xavier_uniform_(module.weight)
            else:
                nn.init.normal_(module.weight, std=0.02 * (last if name.endswith(("out_proj", "down")) else 1))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm) and init == "transformer_xl":
            nn.init.normal_(module.weight, mean=1.0, std=0.02)


def _call_in_parts(group: Any, block: nn.Module, *args: Any) -> Any:
    with in_parts(group):
        return block(*args)


def _layer_norm(kind: NormKind, eps: float | None) -> Callable[[int], nn.Module]:
    made: type[nn.Module] = nn.RMSNorm if kind == "rms" else nn.LayerNorm
    return made if eps is None else partial(made, eps=eps)


def _check_kinds(kinds: list[Any], cross_kinds: list[Any]) -> None:
    """Raise ValueError if a cross-attention is given as `attention` or the reverse; their constructors look alike."""
    for kind in kinds:
        if _reads_source(kind):
            raise ValueError(f"attention={_name(kind)} reads a source; give it as cross_attention")
    for kind in cross_kinds:
        if _reads_source(kind) is False:
            raise ValueError(f"cross_attention={_name(kind)} can't read a source; choose {kinds_with('reads_source')}")


def _takes_rotary(attention: SequenceModule) -> bool:
    return isinstance(attention, Attention) and attention.takes_rotary


def _reads_source(kind: Any) -> bool | None:
    """Whether a kind of attention reads a source; None if its class is not known."""
    return getattr(getattr(kind, "func", kind), "reads_source", None)


def _name(kind: Any) -> str:
    kind = getattr(kind, "func", kind)
    return str(getattr(kind, "__name__", kind))


def _in_turn(name: str, kinds: Any, n_layers: int) -> list[Any]:
    """Return the kinds as a list, to be assigned to the layers in turn."""
    listed = kinds if isinstance(kinds, list) else [kinds]
    if not 0 < len(listed) <= n_layers:
        raise ValueError(
            f"{name} lists {len(listed)} kinds for n_layers={n_layers}; name between 1 and {n_layers}, which are "
            "assigned to the layers in turn"
        )
    for kind in listed:
        if isinstance(kind, nn.Module):
            given = type(kind).__name__
            raise ValueError(
                f"{name} is an object of {given}; give the class {given}, or functools.partial({given}, …) with "
                "options: every layer makes its own"
            )
        if not callable(kind):
            raise ValueError(
                f"{name}={kind!r} must be a class; import one, such as lit_effattn.attention.LinearAttention"
            )
    return listed
