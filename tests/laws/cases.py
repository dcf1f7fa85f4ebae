"""Who keeps the laws: every attention kind, with the options that matter, and what is built of them.

A new kind of attention is enrolled by a line in `ATTENTIONS`, a kind of cross-attention by one in `CROSS`, and its
definition in `definitions.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_effattn.attention import (
    Attention,
    CompressiveAttention,
    CrossAttention,
    DeltaNetAttention,
    EluFeatureMap,
    GatedDeltaNetAttention,
    GatedLinearAttention,
    HedgehogFeatureMap,
    InfiniteAttention,
    KimiDeltaAttention,
    LinearAttention,
    LinearCrossAttention,
    LSHAttention,
    Mamba2Attention,
    PerformerAttention,
    PerformerCrossAttention,
    RecurrentAttention,
    ReluFeatureMap,
    RetentionAttention,
    ShawAttention,
    SoftmaxAttention,
    SoftmaxCrossAttention,
    SparseAttention,
    TransformerXLAttention,
    WindowedLinearAttention,
)
from lit_effattn.attention.memory import MemoryAttention
from lit_effattn.attention.positions import LearnedPositions, RotaryPositions
from lit_effattn.laws import ContractAdapter
from lit_effattn.nn.encoder_decoder import EncoderDecoder
from lit_effattn.nn.look_ahead import LookAhead
from lit_effattn.nn.lstm import LSTM
from lit_effattn.nn.sliding import SlidingWindow
from lit_effattn.nn.transformer import Block, FeedForward, Transformer
from lit_effattn.sequence import SequenceModule, Source, State, map_tensors, tensors
from tests.laws import definitions

D_MODEL, N_HEADS = 8, 2
RELATIVE = (ShawAttention, MemoryAttention)
"""Attentions to relative positions."""


@dataclass(frozen=True)
class Case:
    """A module that keeps the laws.

    Attributes:
        name: What a failing test is called.
        make: Builds it from width, heads and causality.
        unit: Its chunk, window, stride or memory: the lengths at which something may go wrong are around it.
        causal: Whether it is.
        definition: The O(N²) definition that it equals, or None.
        rotary: Whether it is an attention that turns queries and keys.
        spacings: How far half precision may be off, in spacings of its numbers near 1.
    """

    name: str
    make: Callable[[int, int, bool], SequenceModule]
    unit: int
    causal: bool = True
    definition: Callable[[Any, Tensor], Tensor] | None = None
    rotary: bool = False
    spacings: float = 4

    def build(
        self, dtype: torch.dtype = torch.float64, d_model: int = D_MODEL, n_heads: int = N_HEADS
    ) -> SequenceModule:
        """Build it, always the same, in evaluation mode."""
        torch.manual_seed(1)
        module = self.make(d_model, n_heads, self.causal)
        if self.rotary:
            module.rotary = RotaryPositions(d_model // n_heads)
        return module.to(dtype).eval()

    @cached_property
    def example(self) -> SequenceModule:
        """The module to look at; nobody changes it."""
        return self.build()

    @property
    def jumps(self) -> bool:
        """Whether rounding makes single outputs jump."""
        return self.adapter().jumps

    @property
    def long(self) -> int:
        """A length of many units, and not a multiple of one."""
        return 4 * self.unit + 3

    def adapter(self) -> ContractAdapter:
        """Return how the laws call it."""
        return CaseAdapter(self)


class CaseAdapter(ContractAdapter):
    """A case as the laws call it, in the widths that they ask for."""

    def __init__(self, case: Case) -> None:
        self.case = case
        options: dict[str, Any] = {"unit": case.unit, "spacings": case.spacings}
        if not isinstance(m := subject(case.example), Attention | CrossAttention) or isinstance(m, RELATIVE):
            options |= {"longest": 1024, "steps": 40}  # they take long, and no sums run over all positions
        alone = "window=1-" in case.name or "mem_len=1-same" in case.name or isinstance(case.example, FromSource)
        super().__init__(case.build, name=case.name, remembers=not alone, **options)

    def make(self, width: int | None = None) -> SequenceModule:
        return self.case.build(d_model=width or D_MODEL)


def kind(
    cls: type[Attention],
    definition: Callable[[Any, Tensor], Tensor],
    unit: int,
    *,
    causal: Sequence[bool] = (True, False),
    rotary: bool = False,
    spacings: float = 4,
    **options: Any,
) -> list[Case]:
    """Return the cases of an attention with these options: causal or not."""
    message = [f"{name}={getattr(value, '__name__', value)}" for name, value in options.items()]
    return [
        Case(
            "-".join([cls.__name__, *message, *([] if c else ["bidirectional"]), *(["rotary"] if rotary else [])]),
            partial(cls, **options),
            unit,
            c,
            definition,
            rotary,
            spacings,
        )
        for c in causal
    ]


XL = partial(kind, TransformerXLAttention, definitions.transformer_xl)

# Rounding moves vectors to other buckets, and with each of them the border of every later chunk there: of 8,192
# outputs most see somewhat other keys, the median being off by up to 0.18 (23 spacings of bfloat16; not causal, 174 of
# float16). With one bucket nothing moves, and the usual bound holds.
HASHED = partial(kind, LSHAttention, definitions.lsh)
COMPRESSIVE = partial(kind, CompressiveAttention, definitions.compressive, causal=[True])
WINDOWED = partial(kind, WindowedLinearAttention, definitions.windowed_linear, causal=[True])
INFINITE = partial(kind, InfiniteAttention, definitions.infinite, causal=[True])


class StirredHedgehog(HedgehogFeatureMap):
    """Hedgehog's feature map with other matrices than the identity, as after training."""

    def for_heads(self, n_heads: int) -> None:
        super().for_heads(n_heads)
        for weight in self.parameters():
            weight.data += 0.3 * torch.randn_like(weight)


ATTENTIONS = [
    *kind(SoftmaxAttention, definitions.softmax, 5),
    *kind(SoftmaxAttention, definitions.softmax, 5, window=5, causal=[True]),
    *kind(SoftmaxAttention, definitions.softmax, 3, window=1, causal=[True], bias=False),
    *kind(SoftmaxAttention, definitions.softmax, 5, n_kv_heads=1, out_bias=False, causal=[True], rotary=True),
    *kind(SoftmaxAttention, definitions.softmax, 3, window=3, n_kv_heads=1, d_qk=6, causal=[True]),
    *kind(ShawAttention, definitions.shaw, 3, max_distance=3),
    *kind(ShawAttention, definitions.shaw, 5, max_distance=3, window=5, causal=[True]),
    *kind(ShawAttention, definitions.shaw, 2, max_distance=5, window=2, causal=[True], bias=False),
    *kind(SparseAttention, definitions.sparse, 4, stride=4),
    *kind(SparseAttention, definitions.sparse, 4, stride=4, combine="heads"),
    *kind(SparseAttention, definitions.sparse, 3, stride=3, combine="local"),
    *kind(SparseAttention, definitions.sparse, 4, stride=4, combine="distant", bias=False),
    *kind(SparseAttention, definitions.sparse, 5, stride=5, pattern="fixed", summary=2),
    *kind(SparseAttention, definitions.sparse, 5, stride=5, pattern="fixed", combine="heads"),
    *kind(SparseAttention, definitions.sparse, 3, stride=3, pattern="fixed", combine="local"),
    *kind(SparseAttention, definitions.sparse, 4, stride=4, pattern="fixed", combine="distant"),
    *kind(SparseAttention, definitions.sparse, 5, stride=5, pattern="fixed", summary=2, distinct=True),
    *kind(SparseAttention, definitions.sparse, 4, stride=4, pattern="fixed", combine="distant", distinct=True),
    *HASHED(6, n_hashes=2, n_buckets=4, chunk_size=2, causal=[True], spacings=32),
    *HASHED(6, n_hashes=2, n_buckets=4, chunk_size=2, causal=[False], spacings=200),
    *HASHED(5, n_hashes=3, n_buckets=2, chunk_size=3, bias=False, causal=[True], spacings=32),
    *HASHED(4, n_hashes=1, n_buckets=2, chunk_size=4, causal=[False], spacings=200),
    *HASHED(3, n_hashes=2, n_buckets=1, chunk_size=3),
    *kind(LinearAttention, definitions.linear, 4, chunk_size=4),
    *kind(LinearAttention, definitions.linear, 3, chunk_size=3, feature_map=ReluFeatureMap, bias=False),
    *kind(LinearAttention, definitions.linear, 3, chunk_size=1, d_qk=6, causal=[True]),
    *kind(LinearAttention, definitions.linear, 4, chunk_size=4, n_kv_heads=1, out_bias=False, causal=[True]),
    *kind(LinearAttention, definitions.linear, 4, chunk_size=4, feature_map=StirredHedgehog),
    *kind(PerformerAttention, definitions.performer, 4, chunk_size=4),
    *kind(PerformerAttention, definitions.performer, 8, features="hyperbolic", n_features=6, chunk_size=8),
    *kind(PerformerAttention, definitions.performer, 4, features="relu", chunk_size=4, bias=False),
    *kind(PerformerAttention, definitions.performer, 4, eps=0.01, chunk_size=4),
    *kind(PerformerAttention, definitions.performer, 4, features="trigonometric", n_features=256, chunk_size=4),
    *kind(PerformerAttention, definitions.performer, 3, chunk_size=1, n_kv_heads=1, out_bias=False, causal=[True]),
    *WINDOWED(3, window=3, chunk_size=2, feature_map=StirredHedgehog),
    *WINDOWED(4, window=1, n_kv_heads=1, out_bias=False, feature_map=EluFeatureMap),
    *kind(DeltaNetAttention, definitions.delta_net, 4, chunk_size=4),
    *kind(
        DeltaNetAttention, definitions.delta_net, 3, beta_max=2.0, conv_size=None, gate=True, bias=True, causal=[True]
    ),
    *kind(GatedDeltaNetAttention, definitions.gated_delta_net, 4, chunk_size=4),
    *kind(GatedDeltaNetAttention, definitions.gated_delta_net, 3, n_qk_heads=1, qk_dim=3, head_dim=5, conv_size=2),
    *kind(KimiDeltaAttention, definitions.kimi_delta, 4, chunk_size=4),
    *kind(RetentionAttention, definitions.retention, 4, chunk_size=4),
    *kind(GatedLinearAttention, definitions.gated_linear, 4, chunk_size=4),
    *kind(GatedLinearAttention, definitions.gated_linear, 3, conv_size=3, tau=2.0, gate_rank=3, causal=[True]),
    *kind(Mamba2Attention, definitions.mamba2, 4, qk_dim=4, chunk_size=4),
    *kind(Mamba2Attention, definitions.mamba2, 3, qk_dim=3, n_qk_heads=2, conv_size=None, causal=[True]),
    # What a segment sees depends on the split, unless the memory holds all the past.
    *XL(4, mem_len=700, chunk_size=4),
    *XL(3, mem_len=700, clamp_len=4, bias=True, causal=[True]),
    *XL(5, mem_len=5, same_length=True, clamp_len=3, chunk_size=3, causal=[True]),
    *XL(2, mem_len=1, same_length=True, causal=[True]),
    *COMPRESSIVE(3, mem_len=3, compressed_len=2, compression_rate=2, chunk_size=8),
    *COMPRESSIVE(4, mem_len=0, compressed_len=3, compression_rate=3, chunk_size=2, bias=True),
    *COMPRESSIVE(4, mem_len=2, compressed_len=1, compression_rate=4, compression="mean", clamp_len=4),
    *COMPRESSIVE(3, mem_len=1, compressed_len=3, compression_rate=2, compression="max"),
    # A segment is longer than the memory, so that there are summaries before all slots are filled.
    *COMPRESSIVE(5, mem_len=1, compressed_len=3, compression_rate=2, segment_len=5, chunk_size=4),
    # The first is the one that is compiled.
    *INFINITE(3, mem_len=4, segment_len=3, n_basis=10, widths=(0.1,), n_samples=7, sticky=True, n_bins=6, gate=True),
    *INFINITE(4, mem_len=2, segment_len=4, n_basis=12, widths=(0.1, 0.2), n_samples=5, chunk_size=3, tau=0.7),
    *INFINITE(3, mem_len=3, segment_len=3, n_basis=8, widths=(0.2,), n_samples=4, writes="segment", bias=True),
    # As in the authors' code.
    *INFINITE(
        4,
        mem_len=0,
        segment_len=4,
        n_basis=12,
        widths=(0.1, 0.3),
        n_samples=6,
        clamp_len=2,
        ridge=1.0,
        grid="ends",
        tie_query=True,
        density_bias=False,
    ),
    *INFINITE(
        4,
        mem_len=0,
        segment_len=4,
        n_basis=8,
        widths=(0.2,),
        n_samples=9,
        sticky=True,
        n_bins=5,
        sampling="bins",
    ),
    *INFINITE(3, mem_len=3, segment_len=3, n_basis=0),
    *INFINITE(
        4,
        mem_len=2,
        segment_len=4,
        n_basis=6,
        widths=(0.2,),
        n_samples=4,
        chunk_size=3,
        bias=True,
        short_term="softmax",
    ),
]

# Queries and keys are turned in `Attention.forward`, for all kinds alike, and `Transformer-rotary-post` keeps every law
# with it. Only the laws about positions are tested here, for what that stack does not show.
ROTARY = [
    # Queries and keys are one tensor, which is turned once.
    *HASHED(6, n_hashes=2, n_buckets=4, chunk_size=2, causal=[True], rotary=True),
    # Not causal, and its features depend on the positions themselves, not just on their differences.
    *kind(LinearAttention, definitions.linear, 4, chunk_size=4, causal=[False], rotary=True),
    # Its state counts positions for the rotation alone, and it resets the count in its own `reset`.
    *kind(PerformerAttention, definitions.performer, 4, chunk_size=4, causal=[True], rotary=True),
]


# ------------------------------------------------------------------------------------------------- what reads a source

SLOTS, VALID = 7, 5  # positions of the source, and those that are not padding
D_SOURCE = 6


class FromSource(SequenceModule):
    """A module that reads a source, and the source, so that the laws of a module without one apply.

    The source is the same in all rows. It is a parameter, so that its gradients are compared too. What `None` stands
    for, and what `reset` restores, is the state with the source.
    """

    def __init__(self, reader: CrossAttention | Transformer | EncoderDecoder) -> None:
        super().__init__()
        self.reader = reader
        self.d_input, self.d_model, self.causal = reader.d_input, reader.d_model, reader.causal
        self.source = nn.Parameter(2 * torch.randn(SLOTS, reader.d_source))

    def remember(self, rows: int, **options: int) -> State:
        """Read the source in every row."""
        lengths = torch.full((rows,), VALID, device=self.source.device)
        return self.reader.remember(self.source.expand(rows, -1, -1), lengths, **options)

    def empty_state(self, batch_size, max_len, device, dtype) -> State:
        """With `max_len` what `remember` makes with it; else the reader's own empty state, and the source in it."""
        if max_len is not None and not isinstance(self.reader, CrossAttention):
            return self.remember(batch_size, max_len=max_len)
        empty = self.reader.initial_state(batch_size, max_len=max_len, device=device, dtype=dtype)
        return _with_sources(empty, self.remember(batch_size))

    def forward(self, x, state=None, lengths=None):
        return self.reader(x, self.remember(len(x)) if state is None else state, lengths)

    def reset(self, state: State, rows: Tensor) -> State:
        return _with_sources(self.reader.reset(state, rows), self.remember(len(rows)), rows)

    def grow(self, state: State, max_len: int) -> State:
        return self.reader.grow(state, max_len)

    @property
    def bounded_by(self) -> str | None:
        return self.reader.bounded_by


def _with_sources(state: State, other: State, rows: Tensor | None = None) -> State:
    """Return `state` with the sources of `other` where `rows` is True; None: everywhere."""
    if isinstance(state, Source):
        return other if rows is None else chosen(rows, other, state)
    if not isinstance(state, tuple) or other is None:
        return state
    parts = [_with_sources(a, b, rows) for a, b in zip(state, other, strict=True)]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def chosen(rows: Tensor, state: State, other: State) -> State:
    """Return the rows of `state` where `rows` (B,) is True, and those of `other` elsewhere."""
    rest = tensors(other)
    return map_tensors(lambda t: torch.where(rows.view(-1, *[1] * (t.dim() - 1)), t, next(rest)), state)


def subject(module: SequenceModule) -> SequenceModule:
    """Return the module that the laws are about."""
    return module.reader if isinstance(module, FromSource) else module


def cross(
    cls: type[CrossAttention], definition: Callable[[Any, Tensor, Tensor], Tensor], d_source: int, **options: Any
) -> Case:
    """Return the case of a cross-attention with these options."""

    def make(d_model: int, n_heads: int, causal: bool) -> SequenceModule:
        return FromSource(cls(d_model, n_heads, d_source, **options))

    def by_definition(module: Any, x: Tensor) -> Tensor:
        return definition(module.reader, x, module.source[:VALID].expand(len(x), -1, -1))

    message = [f"{name}={getattr(value, '__name__', value)}" for name, value in options.items()]
    return Case("-".join([cls.__name__, *message]), make, 3, definition=by_definition)


CROSS = [
    cross(SoftmaxCrossAttention, definitions.softmax_cross, D_SOURCE),
    cross(LinearCrossAttention, definitions.linear_cross, D_SOURCE, feature_map=ReluFeatureMap, bias=False),
    cross(LinearCrossAttention, definitions.linear_cross, D_SOURCE, feature_map=StirredHedgehog),
    cross(PerformerCrossAttention, definitions.performer_cross, D_SOURCE),
    cross(PerformerCrossAttention, definitions.performer_cross, D_SOURCE, features="relu", bias=False),
    cross(PerformerCrossAttention, definitions.performer_cross, D_SOURCE, eps=0.01),
]


def decoder(d_model: int, n_heads: int, causal: bool) -> SequenceModule:
    """Make a decoder whose layers differ in both attentions, and whose states grow."""
    kinds = [SoftmaxCrossAttention, PerformerCrossAttention]
    options = {"positions": RotaryPositions, "norm": "post", "cross_attention": kinds, "d_source": D_SOURCE}
    return FromSource(stack([SOFTMAX, LINEAR], **options)(d_model, n_heads, causal))


def encoder_decoder(d_model: int, n_heads: int, causal: bool) -> SequenceModule:
    """Make an encoder, bidirectional and of another width, and a decoder, with efficient attention alone."""
    encoder = Transformer(6, 2, 1, attention=LINEAR, causal=False, init="pytorch")
    made = Transformer(
        d_model, n_heads, 1, attention=LINEAR, cross_attention=LinearCrossAttention, d_source=6, init="pytorch"
    )
    return FromSource(EncoderDecoder(encoder, made))


# --------------------------------------------------------------------------------------------------------- and the rest


def stack(attention: Any, n_layers: int = 2, **options: Any) -> Callable[[int, int, bool], SequenceModule]:
    """Return what makes a Transformer."""

    def make(d_model: int, n_heads: int, causal: bool) -> SequenceModule:
        options.setdefault("init", "pytorch")  # with that of GPT-2 so small a model hardly attends
        return Transformer(d_model, n_heads, n_layers, attention=attention, causal=causal, **options)

    return make


def block(d_model: int, n_heads: int, causal: bool) -> SequenceModule:
    """Make a block, alone."""
    return Block(LinearAttention(d_model, n_heads, causal, chunk_size=4), FeedForward(d_model, 16), norm="post")


def lstm(d_model: int, n_heads: int, causal: bool) -> SequenceModule:
    """Make an LSTM of two layers, whose first has another width."""
    return LSTM(d_model, 2, d_input=d_model + 3, causal=causal)


def sliding(d_model: int, n_heads: int, causal: bool) -> SequenceModule:
    """Make a window that slides over a Transformer."""
    return SlidingWindow(stack(SoftmaxAttention)(d_model, n_heads, causal), 5, windows_at_once=20)


def look_ahead(d_model: int, n_heads: int, causal: bool) -> SequenceModule:
    """Make a stack whose outputs depend on three later positions, by weights as after training."""
    module = LookAhead(stack(XL_WINDOW, positions="auto", norm="post")(d_model, n_heads, causal), 3)
    nn.init.normal_(module.convolution.weight)
    return module


LINEAR, SOFTMAX, WINDOW = partial(LinearAttention, chunk_size=4), SoftmaxAttention, partial(SoftmaxAttention, window=5)
XL_WINDOW = partial(TransformerXLAttention, mem_len=3, same_length=True, chunk_size=2)
XL_SHARING = partial(XL_WINDOW, share_uv=True)
REMEMBER_INPUTS = [
    XL_WINDOW,
    partial(CompressiveAttention, mem_len=1, compressed_len=2, compression_rate=2, segment_len=4, chunk_size=4),
    partial(InfiniteAttention, mem_len=2, segment_len=3, n_basis=6, widths=(0.2,), n_samples=4, norm_signal=False),
]

STACKS = [
    Case("Transformer-dealt", stack([SOFTMAX, LINEAR]), 4),
    Case("Transformer-dealt-bidirectional", stack([SOFTMAX, LINEAR], input_norm=True), 4, causal=False),
    Case("Transformer-rotary-post", stack([LINEAR, WINDOW], positions=RotaryPositions, norm="post"), 5),
    Case(
        "Transformer-concatenated",
        stack(LINEAR, positions=partial(LearnedPositions, max_len=8192), position_width=3),
        4,
    ),
    Case("Transformer-checkpointed", stack([WINDOW], gradient_checkpointing=True, positions=None), 5),
    Case("Transformer-XL-tied", stack([XL_SHARING], positions="auto", norm="post"), 3),
    Case("Transformer-raw-memories", stack(REMEMBER_INPUTS, 3, positions="auto", norm_memory=True), 3),
    Case("Block", block, 4),
    Case("SlidingWindow", sliding, 5),
    Case("LookAhead", look_ahead, 3),
    Case("Decoder", decoder, 4),
    Case("EncoderDecoder", encoder_decoder, 4),
    Case("LSTM", lstm, 3),
    Case("LSTM-bidirectional", lstm, 3, causal=False),
]

CASES = [*ATTENTIONS, *CROSS, *STACKS]
CAUSAL = [case for case in CASES if case.causal]
EACH = {(type(subject(m := c.example)), m.causal, m.bounded_by): c.name for c in reversed(CASES)}.values()
"""The names of one case of each kind: causal or not, with a state that grows or not."""

SHARING = {
    c.name
    for c in ATTENTIONS
    if isinstance(m := c.example, RecurrentAttention) and not isinstance(m, GatedDeltaNetAttention | KimiDeltaAttention)
}
"""The kinds with a recurrent state that share all but their gates with one that decays each head, or each channel."""

# Sizes are symbols where a state grows, and the ∞-former's tables are made in its first call. That no step looks at a
# number is tested for every kind in test_devices.py.
TRACED = {
    "SoftmaxAttention",
    "SparseAttention-stride=4",
    "LSHAttention-n_hashes=2-n_buckets=4-chunk_size=2",
    "InfiniteAttention-mem_len=4-segment_len=3-n_basis=10-widths=(0.1,)-n_samples=7-sticky=True-n_bins=6-gate=True",
    "Decoder",
}
"""The names of the cases of which tests/generation/test_compiled.py traces a step."""
