import io
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_effattn import LSTM, EncoderDecoder, Transformer, sequence
from lit_effattn.attention import (
    LinearAttention,
    LinearCrossAttention,
    PerformerAttention,
    PerformerCrossAttention,
    SoftmaxAttention,
    SoftmaxCrossAttention,
)
from lit_effattn.attention.positions import LearnedPositions
from lit_effattn.nn import encoder_decoder
from tests.laws import definitions
from tests.laws.tools import assert_close, assert_same

E, H = 8, 2
CROSS = [SoftmaxCrossAttention, LinearCrossAttention, PerformerCrossAttention]


def built(encoder: sequence.SequenceModule | None = None, **options) -> EncoderDecoder:
    """Return a model whose layers read the source in different ways."""
    encoder = encoder or Transformer(6, 2, 1, attention=LinearAttention, causal=False, init="pytorch")
    attention = [PerformerAttention, LinearAttention]
    given = {"attention": attention, "cross_attention": CROSS[:2], "init": "pytorch", "d_source": 6, **options}
    return EncoderDecoder(encoder, Transformer(E, H, 2, **given)).double().eval()


def inputs(rows: int, n: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, y: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
    """Of a sum of `y` with uneven weights, with respect to `wanted` and the parameters."""
    weights = torch.arange(y.numel(), dtype=y.dtype).view(y.shape).sin()
    return torch.autograd.grad((y * weights).sum(), [*wanted, *model.parameters()])


# --------------------------------------------------------------------------------------------------- what is computed

LAYERS = {"encoder": 2, "decoder": 3}
NORMS = {
    "encoder": {"norm1": "norm_1", "norm2": "norm_2"},
    "decoder": {"norm1": "norm_1", "norm2": "norm_cross", "norm3": "norm_2"},
}


def in_our_names(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the parameters of `torch.nn.Transformer`, or their gradients."""
    ours = {}
    for side, n_layers in LAYERS.items():
        names = {f"{side}.norm": f"{side}.norm"}
        for i in range(n_layers):
            a, b = f"{side}.layers.{i}", f"{side}.blocks.{i}"
            names |= {f"{a}.linear1": f"{b}.feed_forward.up", f"{a}.linear2": f"{b}.feed_forward.down"}
            names |= {f"{a}.{theirs}": f"{b}.{ours}" for theirs, ours in NORMS[side].items()}
            kinds = {"self_attn": "attention", "multihead_attn": "cross_attention"}
            for attn, attention in list(kinds.items())[: 2 if side == "decoder" else 1]:
                names[f"{a}.{attn}.out_proj"] = f"{b}.{attention}.out_proj"
                for kind in ("weight", "bias"):
                    parts = theirs[f"{a}.{attn}.in_proj_{kind}"].chunk(3)
                    ours |= {f"{b}.{attention}.{p}_proj.{kind}": t for p, t in zip("qkv", parts, strict=True)}
        ours |= {f"{b}.{kind}": theirs[f"{a}.{kind}"] for a, b in names.items() for kind in ("weight", "bias")}
    return ours


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_equals_that_of_torch():
    """Outputs, and the gradients of all parameters and of both inputs, with padding in both."""
    for norm in ["pre", "post"]:
        theirs = nn.Transformer(E, H, *LAYERS.values(), 16, 0.0, batch_first=True, norm_first=norm == "pre").double()
        with torch.no_grad():
            for p in theirs.parameters():
                p.add_(0.2 * torch.randn_like(p))
        options = {"d_ff": 16, "positions": None, "norm": norm, "final_norm": True, "activation": "relu"}
        encoder = Transformer(E, H, LAYERS["encoder"], causal=False, **options)
        decoder = Transformer(E, H, LAYERS["decoder"], cross_attention=SoftmaxCrossAttention, **options)
        ours = EncoderDecoder(encoder, decoder).double()
        ours.load_state_dict(in_our_names(theirs.state_dict()))

        source, target = inputs(3, 7, E).requires_grad_(), inputs(3, 5, E, seed=1).requires_grad_()
        source_lengths, lengths = torch.tensor([7, 4, 1]), torch.tensor([2, 5, 3])
        padding, target_padding = ~sequence.valid_positions(source_lengths, 7), ~sequence.valid_positions(lengths, 5)
        future = torch.ones(5, 5).triu(1).bool()
        expected = theirs(
            source, target, tgt_mask=future, tgt_key_padding_mask=target_padding,
            src_key_padding_mask=padding, memory_key_padding_mask=padding,
        ).masked_fill(target_padding[..., None], 0)  # fmt: skip
        y, _ = ours(target, ours.remember(source, source_lengths), lengths)
        assert_close(y, expected)

        wanted, found = gradients(theirs, expected, source, target), gradients(ours, y, source, target)
        assert_close(found[:2], wanted[:2])
        renamed = in_our_names(by_name(theirs, wanted[2:]))
        assert_close(by_name(ours, found[2:]), renamed)


def by_name(model: nn.Module, values: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {name: value for (name, _), value in zip(model.named_parameters(), values, strict=True)}


def layer_norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], module.weight, module.bias)


def feed_forward(module: nn.Module, x: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, module.up.weight, module.up.bias)), module.down.weight, module.down.bias)


def test_the_definition():
    """Positions on both sides; an encoder that is wider and less deep than the decoder. Norms before branches."""
    for kind in CROSS:
        positions = partial(LearnedPositions, max_len=9)
        encoder = Transformer(12, 3, 1, attention=LinearAttention, causal=False, positions=positions, init="pytorch")
        options = {"attention": LinearAttention, "cross_attention": kind, "d_source": 12}
        decoder = Transformer(E, H, 2, positions=positions, init="pytorch", **options)
        model = EncoderDecoder(encoder, decoder).double()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * torch.randn_like(p))
        cross = {
            SoftmaxCrossAttention: definitions.softmax_cross,
            LinearCrossAttention: definitions.linear_cross,
            PerformerCrossAttention: definitions.performer_cross,
        }[kind]
        source, x = inputs(2, 6, 12), inputs(2, 9, E, seed=1)
        y, _ = model(x, model.remember(source))

        (block,) = encoder.blocks
        h = source + encoder.positions.table.weight[:6]
        h = h + definitions.linear(block.attention, layer_norm(block.norm_1, h))
        h = h + feed_forward(block.feed_forward, layer_norm(block.norm_2, h))
        read = layer_norm(encoder.norm, h)
        h = x + decoder.positions.table.weight
        for block in decoder.blocks:
            h = h + definitions.linear(block.attention, layer_norm(block.norm_1, h))
            h = h + cross(block.cross_attention, layer_norm(block.norm_cross, h), read)
            h = h + feed_forward(block.feed_forward, layer_norm(block.norm_2, h))
        assert_close(y, layer_norm(decoder.norm, h))


def test_any_sequence_module_encodes():
    """An LSTM, one way and both ways: padding of the source is nothing, and its parameters are trained."""
    for causal in [True, False]:
        model = built(LSTM(6, 2, d_input=3, causal=causal))
        assert model.d_source == 3
        source, x, lengths = inputs(2, 5, 3), inputs(2, 4, E), torch.tensor([5, 2])
        source[1, 2:] = torch.nan
        y, _ = model(x, model.remember(source, lengths))
        for i, n in enumerate(lengths):
            assert_close(y[i : i + 1], model(x[i : i + 1], model.remember(source[i : i + 1, :n]))[0])
        assert all((g != 0).any() for g in torch.autograd.grad(y.sin().sum(), list(model.encoder.parameters())))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_changes_no_gradient(dropout: float):
    """Nor do the masks of dropout differ, neither those of branches nor those of weights."""

    def run(gradient_checkpointing: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        options = {"dropout": dropout, "gradient_checkpointing": gradient_checkpointing}
        kinds = [partial(SoftmaxCrossAttention, dropout=dropout), LinearCrossAttention]
        model = built(Transformer(6, 2, 1, causal=False, **options), cross_attention=kinds, **options).train()
        source, x = inputs(2, 5, 6).requires_grad_(), inputs(2, 4, E).requires_grad_()
        first, state = model(x, model.remember(source, torch.tensor([5, 3])), torch.tensor([2, 4]))
        second, _ = model(x, state)
        return second, *gradients(model, torch.cat([first, second]), source, x)

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


def test_a_compiled_step_of_training_is_the_same():
    decoder = Transformer(E, H, 1, attention=LinearAttention, cross_attention=SoftmaxCrossAttention, d_source=6)
    model = EncoderDecoder(Transformer(6, 2, 1, attention=LinearAttention, causal=False), decoder).double()
    source, x = inputs(3, 5, 6).requires_grad_(), inputs(3, 4, E).requires_grad_()
    source_lengths, lengths = torch.tensor([5, 0, 2]), torch.tensor([4, 3, 0])

    def step(source: Tensor, x: Tensor, source_lengths: Tensor, lengths: Tensor) -> Tensor:
        return model(x, model.remember(source, source_lengths), lengths)[0]

    y = torch.compile(step, backend="aot_eager", fullgraph=True)(source, x, source_lengths, lengths)
    expected = step(source, x, source_lengths, lengths)
    assert_close(y, expected)
    assert_close(gradients(model, y, source, x), gradients(model, expected, source, x))


@pytest.mark.parametrize("kind", CROSS)
def test_weights_of_the_attention_to_the_source(kind: type):
    """Those of each layer, of what it was asked in the pass; with them a layer's output is computed again."""
    model = built(cross_attention=kind)
    source, x, source_lengths, lengths = inputs(2, 5, 6), inputs(2, 4, E), torch.tensor([5, 3]), torch.tensor([4, 2])
    x[1, 2:] = torch.nan
    found = model.attention_weights(source, x, source_lengths, lengths)
    assert not any(module._forward_pre_hooks for module in model.modules())
    asked, read = [], []
    for block in model.decoder.blocks:
        block.cross_attention.register_forward_hook(lambda _, given, result: asked.append((given[0], result[0])))
    model.encoder.register_forward_hook(lambda _, given, result: read.append(result[0]))
    model(x, model.remember(source, source_lengths), lengths)
    assert len(found) == len(asked) == 2
    for block, weights, (_, y) in zip(model.decoder.blocks, found, asked, strict=True):
        v = definitions.in_heads(block.cross_attention, block.cross_attention.v_proj, read[0])
        again = definitions.heads_together(block.cross_attention, weights @ v)
        assert_close(again[sequence.valid_positions(lengths, 4)], y[sequence.valid_positions(lengths, 4)])
        assert (weights[1, ..., 3:] == 0).all()


# ----------------------------------------------------------------------------------------------------------- the state


def test_a_state_survives_a_checkpoint():
    """Also one from which nothing has been read yet; the example has no source."""
    for max_len, begun in itertools.product([None, 9], [False, True]):
        model, x = built(), inputs(2, 4, E)
        state = model.remember(inputs(2, 5, 6), torch.tensor([5, 3]), max_len=max_len)
        with torch.no_grad():
            if begun:
                _, state = model(x, state)
            file = io.BytesIO()
            torch.save(sequence.pack(sequence.detach(state)), file)
            file.seek(0)
            packed = torch.load(file, weights_only=True)
            loaded = sequence.unpack(packed, like=model.initial_state(1, max_len=max_len))
            assert_same(loaded, state)
            assert_close(model(x, loaded)[0], model(x, state)[0], rtol=0, atol=0)


def test_its_state_grows_as_that_of_the_decoder():
    assert built().bounded_by is None
    assert built(attention=SoftmaxAttention).bounded_by == "window"


def test_a_new_sentence_in_a_row():
    """A row that was reset reads another source after `remember`, and the others go on."""
    model, x = built(), inputs(2, 6, E)
    first, second = inputs(2, 5, 6), inputs(2, 5, 6, seed=1)
    with torch.no_grad():
        _, state = model(x[:, :2], model.remember(first, max_len=9))
        reset = model.reset(state, torch.tensor([False, True]))
        assert reset.length.tolist() == [2, 0]
        _, fresh = model(x[:, :2], model.remember(second, max_len=9), torch.tensor([2, 0]))
        mixed = sequence.select(_joined(reset, fresh), torch.tensor([0, 3]))
        y, _ = model(x[:, 2:], mixed)
        assert_close(y[0], model(x, model.remember(first))[0][0, 2:])
        assert_close(y[1], model(x[:, 2:], model.remember(second))[0][1])


def _joined(a, b):
    """All rows of two states."""
    if isinstance(a, Tensor):
        return torch.cat([a, b])
    parts = [_joined(s, t) for s, t in zip(a, b, strict=True)]
    return type(a)(*parts) if hasattr(a, "_fields") else tuple(parts)


# --------------------------------------------------------------------------------------------------- what is refused


def test_it_does_not_run_without_a_source(monkeypatch: pytest.MonkeyPatch):
    model, x = built(), inputs(4, 3, E)
    with pytest.raises(ValueError, match=r"EncoderDecoder: state=None has no source; .* `remember`"):
        model(x)
    for max_len in (None, 9):
        with pytest.raises(ValueError, match=r"EncoderDecoder: rows \[0, 1, 2, 3\] of the state have no source"):
            model(x, model.initial_state(4, max_len=max_len))
    state = model.remember(inputs(4, 5, 6), torch.tensor([5, 0, 5, 5]))  # an empty source is a source
    expected, _ = model(x, state)
    for begun in (state, model(x, state)[1]):
        with pytest.raises(ValueError, match=r"EncoderDecoder: rows \[0, 2\] of the state have no source; `remember`"):
            model(x, model.reset(begun, torch.tensor([True, False, True, False])))
    monkeypatch.setattr(encoder_decoder, "reads_values", lambda t: False)  # as on a GPU
    y, _ = model(x, model.reset(state, torch.tensor([True, False, True, False])))
    assert y[[0, 2]].isnan().all()
    assert_close(y[[1, 3]], expected[[1, 3]])


def test_parts_that_do_not_fit_are_refused():
    encoder, decoder = Transformer(6, 2, 1, causal=False), partial(Transformer, E, H, 1)
    with pytest.raises(ValueError, match="no cross_attention"):
        EncoderDecoder(encoder, decoder())
    with pytest.raises(ValueError, match="d_source=8, but the encoder d_model=6; set d_source=6"):
        EncoderDecoder(encoder, decoder(cross_attention=LinearCrossAttention))
