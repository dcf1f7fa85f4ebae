import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from lit_effattn import Transformer, sequence
from lit_effattn.attention import (
    CompressiveAttention,
    InfiniteAttention,
    LinearAttention,
    LinearCrossAttention,
    Mamba2Attention,
    PerformerCrossAttention,
    ShawAttention,
    SoftmaxAttention,
    SoftmaxCrossAttention,
    TransformerXLAttention,
)
from lit_effattn.attention.positions import LearnedPositions, RotaryPositions, SinusoidalPositions
from lit_effattn.nn.transformer import Block, FeedForward
from lit_effattn.settings.kinds import attention_kinds
from tests.laws import definitions

E, H = 8, 2


def norm(layer: nn.LayerNorm, x):
    """(x − mean) / √(var + 10⁻⁵) · γ + β."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred**2).mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight + layer.bias


def affine(layer: nn.Linear, x):
    y = x @ layer.weight.T
    return y if layer.bias is None else y + layer.bias


def activated(name: str, x):
    if name == "quick_gelu":
        return x / (1 + torch.exp(-1.702 * x))
    if name == "gelu_tanh":
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return x.clamp(min=0) if name == "relu" else x * (1 + torch.erf(x / math.sqrt(2))) / 2


def uneven(model: nn.Module) -> nn.Module:
    """Give every parameter other values than ones and zeros, lest a wrong LayerNorm or bias be missed."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.mark.parametrize(
    ("placed", "final_norm", "activation"),
    [("pre", None, "relu"), ("post", None, "gelu"), ("pre", False, "gelu_tanh"), ("post", True, "quick_gelu")],
)
def test_one_layer_by_hand(placed: str, final_norm: bool | None, activation: str):
    model = Transformer(E, H, 1, norm=placed, final_norm=final_norm, activation=activation)
    model = uneven(model.double())
    (block,) = model.blocks
    x = torch.randn(2, 7, E, dtype=torch.float64)
    y, _ = model(x)

    h = x + model.positions(torch.arange(7)[None]).double()

    def feed_forward(h):
        return affine(block.feed_forward.down, activated(activation, affine(block.feed_forward.up, h)))

    if placed == "pre":
        h = h + definitions.softmax(block.attention, norm(block.norm_1, h))
        h = h + feed_forward(norm(block.norm_2, h))
    else:
        h = norm(block.norm_1, h + definitions.softmax(block.attention, h))
        h = norm(block.norm_2, h + feed_forward(h))
    has_final_norm = placed == "pre" if final_norm is None else final_norm
    torch.testing.assert_close(y, norm(model.norm, h) if has_final_norm else h)


def test_swiglu_by_hand():
    layer = FeedForward(4, 6, "swiglu").double()
    assert all(linear.bias is None for linear in (layer.up, layer.gate, layer.down))
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    gate = x @ layer.gate.weight.T
    expected = (gate / (1 + torch.exp(-gate)) * (x @ layer.up.weight.T)) @ layer.down.weight.T
    torch.testing.assert_close(layer(x), expected)


def test_rms_norm_by_hand():
    model = uneven(Transformer(E, H, 1, positions=None, norm_kind="rms", norm_eps=0.3).double())
    (block,) = model.blocks
    x = torch.randn(2, 7, E, dtype=torch.float64)

    def rms_norm(layer: nn.RMSNorm, x):
        return x / ((x**2).mean(-1, keepdim=True) + 0.3).sqrt() * layer.weight

    h = x + definitions.softmax(block.attention, rms_norm(block.norm_1, x))
    up = affine(block.feed_forward.up, rms_norm(block.norm_2, h))
    h = h + affine(block.feed_forward.down, activated("gelu", up))
    torch.testing.assert_close(model(x)[0], rms_norm(model.norm, h))
    layer_norms = Transformer(E, H, 1, norm_eps=0.3, cross_attention=SoftmaxCrossAttention)
    assert [m.eps for m in layer_norms.modules() if isinstance(m, nn.LayerNorm)] == [0.3] * 4


def test_widths_of_the_feed_forward():
    assert Transformer(E, H, 1).blocks[0].feed_forward.up.out_features == 4 * E
    assert Transformer(E, H, 1, activation="swiglu").blocks[0].feed_forward.up.out_features == round(8 / 3 * E)
    assert Transformer(E, H, 1, d_ff=5).blocks[0].feed_forward.up.out_features == 5


def test_attentions_are_assigned_to_the_layers_in_turn():
    model = Transformer(E, H, 5, attention=[LinearAttention, partial(SoftmaxAttention, window=3)])
    kinds = [type(block.attention) for block in model.blocks]
    assert kinds == [LinearAttention, SoftmaxAttention, LinearAttention, SoftmaxAttention, LinearAttention]
    assert model.blocks[1].attention.window == 3
    assert model.bounded_by is None
    assert Transformer(E, H, 2, attention=[LinearAttention, SoftmaxAttention]).bounded_by == "window"


def test_causality_reaches_every_layer():
    model = Transformer(E, H, 2, attention=[LinearAttention, SoftmaxAttention], causal=False)
    assert not any(block.attention.causal or block.causal for block in model.blocks)
    y, state = model(torch.randn(1, 5, E))
    assert y.shape == (1, 5, E)
    assert state is None


def test_concatenated_positions():
    model = Transformer(E, H, 1, positions=partial(LearnedPositions, max_len=9), position_width=3)
    assert (model.d_input, model.d_model) == (5, 8)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    x = torch.randn(2, 4, 5)
    y, state = model(x)
    assert y.shape == (2, 4, 8)
    model(x, state)
    for call, first in enumerate((0, 4)):
        assert torch.equal(seen[call][..., :5], x)
        for row in range(2):
            assert torch.equal(seen[call][row, :, 5:], model.positions.table.weight[first : first + 4])


def test_padding_has_no_positions():
    """Where there are no more of them, after a state or without one."""
    model = Transformer(E, H, 1, positions=partial(LearnedPositions, max_len=5)).eval()
    x, lengths = torch.randn(2, 7, E), torch.tensor([5, 2])
    y, state = model(x, None, lengths)
    torch.testing.assert_close(y[:1, :5], model(x[:1, :5])[0])
    z, _ = model(x, state, 5 - lengths)
    torch.testing.assert_close(z[1:, :3], model(torch.cat([x[1:, :2], x[1:, :3]], 1))[0][:, 2:])
    for before in (None, state):
        with pytest.raises(ValueError, match="position 6 is beyond the last, 4"):
            model(x, before, torch.tensor([1, 7 if before is None else 5]))


def test_positions_of_every_layer_are_added_to_its_input():
    """Al-Rfou et al. 2018: a table for each layer; in rows that stand at different positions."""
    model = Transformer(E, H, 3, positions=partial(LearnedPositions, max_len=20), positions_in_layers=True)
    inputs, outputs = [], []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        block.register_forward_hook(lambda _, args, out: outputs.append(out[0]))
    tables = [model.positions.table.weight, *(p.table.weight for p in model.later_positions)]
    assert len({table.data_ptr() for table in tables}) == 3
    _, state = model(torch.zeros(2, 6, E), None, torch.tensor([6, 2]))
    model(torch.zeros(2, 3, E), state)
    for layer, table in enumerate(tables):
        before = torch.zeros(2, 3, E) if layer == 0 else outputs[3 + layer - 1]
        added = torch.stack([table[6:9], table[2:5]])
        torch.testing.assert_close(inputs[3 + layer], before + added)


def test_outputs_of_layers_are_those_of_shorter_stacks():
    for norm in ["pre", "post"]:
        model = Transformer(
            E, H, 3, norm=norm, positions=partial(LearnedPositions, max_len=9), positions_in_layers=True
        )
        x, lengths = torch.randn(2, 5, E), torch.tensor([5, 3])
        _, state = model(x, None, lengths)
        outputs, after = model.layer_outputs(x[:, :2], state)
        assert len(outputs) == 3
        assert after.length.tolist() == [7, 5]
        for n in (3, 2, 1):
            model.blocks = model.blocks[:n]
            y, _ = model(x[:, :2], state._replace(layers=state.layers[:n]))
            assert torch.equal(outputs[n - 1], y)


def test_rotary_positions_go_to_every_attention():
    model = Transformer(E, H, 2, positions=partial(RotaryPositions, base=50.0))
    assert model.positions is None
    for block in model.blocks:
        assert (block.attention.rotary.width, block.attention.rotary.base) == (E // H, 50.0)


def test_automatic_positions_are_those_that_the_attention_lacks():
    """Relative ones of its own, else rotary ones, else sinusoids."""

    class Plain(SoftmaxAttention):
        takes_rotary = False

    def placed(*kinds) -> tuple[object, list[bool]]:
        model = Transformer(E, H, len(kinds), attention=list(kinds), positions="auto")
        return model.positions, [block.attention.rotary is not None for block in model.blocks]

    assert placed(TransformerXLAttention, ShawAttention) == (None, [False, False])
    assert placed(SoftmaxAttention, TransformerXLAttention) == (None, [True, False])
    positions, turned = placed(Plain, SoftmaxAttention)
    assert isinstance(positions, SinusoidalPositions)
    assert turned == [False, False]
    with pytest.raises(ValueError, match=r"position_width=4 .*positions=auto"):
        Transformer(E, H, 1, positions="auto", position_width=4)
    with pytest.raises(ValueError, match="positions='rotary'"):
        Transformer(E, H, 1, positions="rotary")


def test_without_positions_the_last_output_is_a_function_of_a_set():
    model = Transformer(E, H, 1, positions=None).double()
    x = torch.randn(1, 6, E, dtype=torch.float64)
    shuffled = x[:, [3, 1, 0, 4, 2, 5]]
    torch.testing.assert_close(model(shuffled)[0][:, -1], model(x)[0][:, -1])
    placed = Transformer(E, H, 1, positions=SinusoidalPositions, init="pytorch").double()
    assert not torch.allclose(placed(shuffled)[0][:, -1], placed(x)[0][:, -1])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_changes_no_gradient(dropout: float):
    """Neither with dropout, whose masks the second forward pass must repeat, nor with a state."""
    x = torch.randn(2, 7, E)

    def run(gradient_checkpointing: bool):
        torch.manual_seed(3)
        kinds = [partial(LinearAttention, chunk_size=4), partial(SoftmaxAttention, dropout=dropout)]
        model = Transformer(
            E, H, 2, attention=kinds, dropout=dropout, gradient_checkpointing=gradient_checkpointing, init="pytorch"
        )
        first, state = model(x, None, torch.tensor([7, 4]))
        second, _ = model(x, state)
        (first.sin() + second.cos()).sum().backward()
        return second, {name: p.grad for name, p in model.named_parameters()}

    plain, checkpointed = run(False), run(True)
    torch.testing.assert_close(checkpointed, plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", attention_kinds())
def test_checkpointing_changes_no_gradient_of_any_kind(name: str):
    x, found = torch.randn(2, 7, E), []
    for gradient_checkpointing in (False, True):
        torch.manual_seed(3)
        model = Transformer(
            E, H, 1, attention=attention_kinds()[name], positions=None, gradient_checkpointing=gradient_checkpointing
        )
        y, state = model(x, None, torch.tensor([7, 4]))
        y, _ = model(x, state)
        y.sin().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_checkpointing_keeps_less():
    def kept(gradient_checkpointing: bool) -> int:
        model = Transformer(E, H, 4, gradient_checkpointing=gradient_checkpointing)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            model(torch.randn(2, 50, E))
        return sum(sizes)

    assert kept(True) < kept(False) / 4


def test_dropout_on_input_and_branches():
    x = torch.randn(2, 30, E)
    model = Transformer(E, H, 1, dropout=0.5, positions=None)
    entered = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    assert not torch.equal(model(x)[0], model(x)[0])
    assert 0.4 < (entered[0] == 0).float().mean() < 0.6
    model.eval()
    assert torch.equal(model(x)[0], model(x)[0])
    assert torch.equal(entered[2], x)


def dropped(t) -> float:
    return (t == 0).float().mean().item()


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_dropout_inside_the_feed_forward_and_on_the_output(activation: str):
    """It drops what it is named after, scales the rest, and nothing in evaluation."""
    x = torch.randn(2, 30, E)
    options = {"positions": None, "activation": activation}
    model = Transformer(E, H, 1, **options, activation_dropout=0.75, output_dropout=0.5)
    entered, left = [], []
    model.blocks[0].feed_forward.down.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    model.norm.register_forward_hook(lambda module, args, y: left.append(y))
    outputs = [model(x)[0], model.eval()(x)[0]]
    assert dropped(entered[0]) == pytest.approx(0.75, abs=0.05)
    kept = entered[0] != 0
    torch.testing.assert_close(entered[0][kept], 4 * entered[1][kept])
    assert dropped(outputs[0]) == pytest.approx(0.5, abs=0.1)
    kept = outputs[0] != 0
    torch.testing.assert_close(outputs[0][kept], 2 * left[0][kept])
    torch.testing.assert_close(outputs[1], left[1])
    assert dropped(outputs[1]) == 0
    model = Transformer(E, H, 1, **options)
    assert torch.equal(model(x)[0], model(x)[0])


# ----------------------------------------------------------------------------------------------------- initial values


def matrices(model: Transformer):
    return {n: m for n, m in model.blocks.named_modules() if isinstance(m, nn.Linear)}


def test_initial_values_of_normal_gpt2_and_transformer_xl():
    for init, last, gains in [
        ("gpt2", 0.02 / math.sqrt(2 * 8), 0),
        ("normal", 0.02, 0),
        ("transformer_xl", 0.02, 0.02),
    ]:
        model = Transformer(128, 4, 8, init=init)
        norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
        weights = torch.cat([norm.weight for norm in norms])
        assert len(norms) == 17
        assert weights.mean().item() == pytest.approx(1, abs=0.002)
        assert weights.std().item() == pytest.approx(gains, rel=0.1)
        assert not any(norm.bias.any() for norm in norms)
        for name, linear in matrices(model).items():
            expected = last if name.endswith((".out_proj", ".down")) else 0.02
            assert linear.weight.std().item() == pytest.approx(expected, rel=0.05), name
            assert (linear.bias == 0).all(), name


def test_initial_values_of_a_decoder():
    """It has three branches in each layer."""
    model = Transformer(128, 4, 8, init="gpt2", cross_attention=LinearCrossAttention)
    for name, linear in matrices(model).items():
        expected = 0.02 / math.sqrt(3 * 8) if name.endswith((".out_proj", ".down")) else 0.02
        assert linear.weight.std().item() == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize(("init", "last"), [("gpt2", 1 / math.sqrt(2 * 3)), ("normal", 1.0)])
def test_mamba2_keeps_the_start_of_its_projections(init: str, last: float):
    """Its gated norm then hardly sees ε, 10⁻⁵, at small widths too."""
    torch.manual_seed(5)
    expected = Mamba2Attention(64, 4, qk_dim=16)
    torch.manual_seed(5)
    block = (model := Transformer(64, 4, 3, attention=partial(Mamba2Attention, qk_dim=16), init=init)).blocks[0]
    for name, p in expected.named_parameters():
        factor = last if name == "out_proj.weight" else 1.0
        assert torch.equal(block.attention.get_parameter(name), factor * p), name
    assert block.feed_forward.up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    normed: list[torch.Tensor] = []
    for b in model.blocks:
        b.attention.norm.register_forward_pre_hook(
            lambda norm, args: normed.append(args[0].flatten(2) * norm.activation(args[1]))
        )
    model(torch.randn(2, 50, 64))
    assert all(y.square().mean() > 100 * 1e-5 for y in normed)


def test_initial_values_of_xavier():
    for name, linear in matrices(Transformer(64, 4, 2, init="xavier")).items():
        bound = math.sqrt(6 / (linear.in_features + linear.out_features))
        assert bound * 0.98 < linear.weight.abs().max().item() <= bound, name
        assert linear.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
        assert (linear.bias == 0).all(), name


def test_initial_values_of_pytorch():
    torch.manual_seed(5)
    model = Transformer(16, 2, 1, init="pytorch")
    torch.manual_seed(5)
    attention, feed_forward = SoftmaxAttention(16, 2), FeedForward(16, 64)
    assert torch.equal(model.blocks[0].attention.v_proj.weight, attention.v_proj.weight)
    assert torch.equal(model.blocks[0].feed_forward.down.bias, feed_forward.down.bias)


# --------------------------------------------------------------------------------------------------- what is refused


def test_bad_options_are_named():
    for options, words in [
        *[({name: "none"}, f"{name}='none' is not one of") for name in ("norm", "activation", "init", "norm_kind")],
        *[({name: 0}, f"{name}=0 must be at least 1") for name in ("n_layers", "d_ff", "d_source")],
        ({"attention": []}, "lists 0 kinds for n_layers=2"),
        ({"attention": [LinearAttention] * 3}, "lists 3 kinds for n_layers=2"),
        ({"position_width": 8}, "position_width=8 with d_model=8"),
        ({"position_width": 0}, "position_width=0"),
        ({"position_width": 4, "positions": None}, "position_width=4.*positions=None"),
        ({"position_width": 4, "positions": RotaryPositions}, "position_width=4.*rotary"),
        ({"n_heads": 3}, "n_heads=3.*d_model=8"),
        ({"cross_attention": []}, "cross_attention lists 0 kinds for n_layers=2"),
        ({"cross_attention": LinearCrossAttention, "causal": False}, "cross_attention needs causal=True"),
        ({"d_source": 6}, "d_source=6 does not apply without cross_attention"),
        ({"n_heads": 8, "positions": RotaryPositions}, "width=1 must be at least 2"),
        ({"attention": partial(SoftmaxAttention, n_kv_heads=3)}, "n_kv_heads=3 does not divide n_heads=2"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 must be above 0"),
        ({"positions_in_layers": True, "positions": None}, "positions_in_layers=True with positions=None"),
        ({"positions_in_layers": True, "positions": RotaryPositions}, "positions_in_layers=True .*RotaryPositions"),
        ({"positions_in_layers": True, "position_width": 4}, "positions_in_layers=True .*position_width=4"),
    ]:
        with pytest.raises(ValueError, match=words):
            Transformer(**{"d_model": 8, "n_heads": 2, "n_layers": 2, **options})


def test_bad_arguments_are_named():
    model = Transformer(8, 2, 1, position_width=2)
    with pytest.raises(ValueError, match=r"Transformer: x has shape \(1, 3, 8\).*6"):
        model(torch.zeros(1, 3, 8))
    with pytest.raises(ValueError, match="causal=False"):
        Transformer(8, 2, 1, causal=False)(torch.zeros(1, 3, 8), model.initial_state(1))


# ------------------------------------------------------------------------------------------------------------- states


def test_the_state_is_one_a_layer():
    model = Transformer(E, H, 2, attention=[LinearAttention, SoftmaxAttention])
    state = model.initial_state(3, max_len=7)
    assert state.length.tolist() == [0, 0, 0]
    assert [type(layer).__name__ for layer in state.layers] == ["LinearState", "FixedCache"]
    assert state.layers[1].keys.shape == (3, H, 7, E // H)
    _, after = model(torch.zeros(3, 2, E), state, torch.tensor([2, 0, 1]))
    assert after.length.tolist() == [2, 0, 1]
    assert all(layer.length.tolist() == [2, 0, 1] for layer in after.layers)
    reset = model.reset(after, torch.tensor([True, False, False]))
    assert reset.length.tolist() == [0, 0, 1]
    assert all(layer.length.tolist() == [0, 0, 1] for layer in reset.layers)
    assert sequence.nbytes(state) == sequence.nbytes(after)


COMPRESSIVE = {"mem_len": 2, "compressed_len": 2, "compression_rate": 2}
REMEMBER_INPUTS = {
    "xl": (partial(TransformerXLAttention, mem_len=9), definitions.transformer_xl),
    "compressive": (partial(CompressiveAttention, **COMPRESSIVE), definitions.compressive),
    "mean": (partial(CompressiveAttention, **COMPRESSIVE, compression="mean"), definitions.compressive),
    "infinite": (partial(InfiniteAttention, mem_len=2, segment_len=3, n_basis=0), definitions.infinite),
}


@pytest.mark.parametrize("name", REMEMBER_INPUTS)
def test_a_memory_of_inputs_is_normalised_with_todays_gains(name: str, monkeypatch: pytest.MonkeyPatch):
    """`pre_lnorm` in the code of Dai et al. 2019: the heads are of norm([memory; x]), and the memory is detached."""
    kind, definition = REMEMBER_INPUTS[name]
    options = {"attention": kind, "positions": None, "init": "pytorch", "final_norm": False}
    model = uneven(Transformer(E, H, 1, **options, norm_memory=True).double())
    (block,) = model.blocks
    first, second = torch.randn(2, 2, 5, E, dtype=torch.float64)
    _, state = model(first)
    with torch.no_grad():
        block.norm_1.weight.mul_(torch.linspace(-1, 2, E))
    y, after = model(second, sequence.detach(state))

    def of_normalised(module: nn.Module, x: torch.Tensor, projected=definitions.queries_keys_values):
        return projected(module, norm(block.norm_1, x))

    monkeypatch.setattr(definitions, "queries_keys_values", of_normalised)
    h = second + definition(block.attention, torch.cat([first, second], 1))[:, 5:]
    expected = h + block.feed_forward(norm(block.norm_2, h))
    torch.testing.assert_close(y, expected)
    assert torch.equal(after.layers[0].inputs[:, -2:], second[:, -2:])
    # A new summary's gradient goes through the inputs of this call alone: what the call before made is detached.
    wanted = [p for name, p in model.named_parameters() if "compressor" not in name]
    found = torch.autograd.grad(y.sin().sum(), wanted)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sin().sum(), wanted))


def test_a_memory_of_normalised_inputs_keeps_the_gains_of_its_time():
    """The default: not that of Dai et al. 2019's code, and its gains do not learn from the memory."""
    options = {"attention": partial(TransformerXLAttention, mem_len=9), "positions": None, "init": "pytorch"}
    models = [uneven(Transformer(E, H, 1, **options, norm_memory=raw).double()) for raw in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    first, second = torch.randn(2, 2, 5, E, dtype=torch.float64)
    states = [model(first)[1] for model in models]
    (block,) = models[0].blocks
    torch.testing.assert_close(states[0].layers[0].inputs[:, -5:], block.norm_1(first))
    torch.testing.assert_close(models[0](second, states[0])[0], models[1](second, states[1])[0])
    gains = [
        torch.autograd.grad(model(second, sequence.detach(state))[0].sin().sum(), model.blocks[0].norm_1.weight)[0]
        for model, state in zip(models, states, strict=True)
    ]
    assert (gains[0] - gains[1]).abs().max() > 0.01
    # A copy's attention has the copy's norm.
    copied = copy.deepcopy(models[1])
    with torch.no_grad():
        copied.blocks[0].norm_1.weight.zero_()
        copied.blocks[0].norm_1.bias.zero_()
    assert not torch.equal(copied(first)[0], models[1](first)[0])


def test_no_other_memory_is_normalised():
    """With post-norm there is no LayerNorm before the attention, and a memory of keys is never normalised."""
    for options in [{"attention": TransformerXLAttention, "norm": "post"}, {}]:
        models = [uneven(Transformer(E, H, 1, positions=None, **options, norm_memory=raw)) for raw in (False, True)]
        models[1].load_state_dict(models[0].state_dict())
        x = torch.randn(2, 5, E)
        assert torch.equal(models[0](x)[0], models[1](x)[0])


# --------------------------------------------------------------------------------------------------------- a decoder


def test_cross_attentions_are_assigned_to_the_layers_in_turn():
    kinds = [LinearCrossAttention, partial(PerformerCrossAttention, n_features=16)]
    model = Transformer(E, H, 3, cross_attention=kinds, d_source=6)
    crosses = [block.cross_attention for block in model.blocks]
    assert [type(c) for c in crosses] == [LinearCrossAttention, PerformerCrossAttention, LinearCrossAttention]
    assert [c.d_source for c in crosses] == [6, 6, 6]
    assert crosses[1].feature_map.n_features == 16
    assert Transformer(E, H, 1, cross_attention=LinearCrossAttention).blocks[0].cross_attention.d_source == E


def test_all_layers_read_the_source():
    model = uneven(Transformer(E, H, 2, cross_attention=SoftmaxCrossAttention)).double()
    source = torch.randn(1, 4, E, dtype=torch.float64)
    state = model.remember(source)
    layers = [block.cross_attention.remember(source) for block in model.blocks]
    for made, expected in zip(state.layers, layers, strict=True):
        assert torch.equal(made.source.kept.keys, expected.kept.keys)
        assert torch.equal(made.source.kept.values, expected.kept.values)


def test_dropout_on_the_branch_that_reads():
    """Without the others, a dropped output leaves the residual as it was."""
    model = Transformer(E, H, 1, dropout=0.5, positions=None, cross_attention=SoftmaxCrossAttention, final_norm=False)
    (block,) = model.blocks
    for layer in (block.attention.out_proj, block.feed_forward.down):
        nn.init.zeros_(layer.weight)
    x, state = torch.ones(1, 500, E), model.remember(torch.randn(1, 4, E))
    y, _ = block(x, state.layers[0])
    assert 0.45 < (y == x).float().mean() < 0.55
    y, _ = block.eval()(x, state.layers[0])
    assert (y != x).all()


def test_sources_need_cross_attention():
    model = Transformer(E, H, 1)
    with pytest.raises(ValueError, match="Transformer has no cross_attention"):
        model.remember(torch.zeros(1, 2, E))
    with pytest.raises(ValueError, match="cross_attention needs causal=True"):
        Block(SoftmaxAttention(E, H, False), FeedForward(E, 16), cross_attention=SoftmaxCrossAttention(E, H))
