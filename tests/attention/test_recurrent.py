"""The kinds with a recurrent state: against other libraries on the same weights, sizes, weights, and shared parts."""

import importlib
import inspect

import pytest
import torch
from torch import Tensor

from lit_effattn.attention import (
    DeltaNetAttention,
    GatedDeltaNetAttention,
    GatedLinearAttention,
    KimiDeltaAttention,
    Mamba2Attention,
    RecurrentAttention,
    RetentionAttention,
    SoftmaxAttention,
)
from lit_effattn.attention.recurrent import ShortConvolution, unit_length
from tests.laws import definitions
from tests.laws.cases import ATTENTIONS, Case
from tests.laws.tools import assert_close, assert_same, copied, each, inputs

E, H = 12, 4
HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
RECURRENT = [case for case in ATTENTIONS if isinstance(case.example, RecurrentAttention)]

# ---------------------------------------------------------------------------- against transformers, on the same weights


def layer(model: str, name: str, **sizes):
    """Make one layer of transformers with weights as after training, and its empty cache."""
    pytest.importorskip("transformers")
    try:
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        config_module = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    except ImportError:
        pytest.skip(f"this version of transformers has no {model}")
    for attribute, function in list(vars(module).items()):
        if inspect.isfunction(function):  # fla's in its place, where that is installed, needs a GPU
            setattr(module, attribute, inspect.unwrap(function))
    names = [model.replace("_", "") + config for config in ("config", "textconfig")]
    config = next(v for k, v in vars(config_module).items() if k.lower().replace("_", "") in names)(**sizes)
    torch.manual_seed(0)
    theirs = getattr(module, name)(config, layer_idx=0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return theirs, importlib.import_module("transformers").DynamicCache(config=config)


QWEN3 = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 3, "linear_value_head_dim": 5}


def gated_delta_net():
    return GatedDeltaNetAttention(E, H, qk_dim=3, head_dim=5, n_qk_heads=2, norm_eps=3e-6)  # ε D_qk


def of_qwen3(theirs, ours, q: Tensor, k: Tensor, v: Tensor) -> dict[Tensor, Tensor]:
    return {
        ours.q_proj.weight: q,
        ours.k_proj.weight: k,
        ours.v_proj.weight: v,
        ours.a_log: theirs.A_log,
        ours.dt_bias: theirs.dt_bias,
        ours.convolution.weight: kernel(theirs.conv1d),
        ours.norm.gain: theirs.norm.weight,
        ours.out_proj.weight: theirs.out_proj.weight,
    }


def qwen3_next():
    theirs, cache = layer("qwen3_next", "Qwen3NextGatedDeltaNet", hidden_size=E, **QWEN3, **HYBRID)
    ours = gated_delta_net()

    def same() -> dict[Tensor, Tensor]:
        q, k, v, z = theirs.in_proj_qkvz.weight.unflatten(0, (2, -1)).split([3, 3, 10, 10], 1)
        b, a = theirs.in_proj_ba.weight.unflatten(0, (2, -1)).split([2, 2], 1)
        return of_qwen3(theirs, ours, q, k, v) | {
            ours.gate_proj.weight: z,
            ours.beta_proj.weight: b,
            ours.decay_proj.weight: a,
        }

    return theirs, cache, ours, same


def qwen3_5():
    theirs, cache = layer("qwen3_5", "Qwen3_5GatedDeltaNet", hidden_size=E, **QWEN3, **HYBRID)
    ours = gated_delta_net()

    def same() -> dict[Tensor, Tensor]:
        return of_qwen3(theirs, ours, *theirs.in_proj_qkv.weight.split([6, 6, 20])) | {
            ours.gate_proj.weight: theirs.in_proj_z.weight,
            ours.beta_proj.weight: theirs.in_proj_b.weight,
            ours.decay_proj.weight: theirs.in_proj_a.weight,
        }

    return theirs, cache, ours, same


def olmo_hybrid():
    sizes = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "num_attention_heads": 4}
    sizes |= {"linear_key_head_dim": 3, "linear_value_head_dim": 6}
    theirs, cache = layer("olmo_hybrid", "OlmoHybridGatedDeltaNet", hidden_size=E, **sizes, **HYBRID)
    ours = GatedDeltaNetAttention(E, H, qk_dim=3, head_dim=6, beta_max=2.0, norm_eps=3e-5)

    def same() -> dict[Tensor, Tensor]:
        return separate(theirs, ours) | {
            ours.decay_proj.weight: theirs.a_proj.weight,
            ours.gate_proj.weight: theirs.g_proj.weight,
            ours.a_log: theirs.A_log,
            ours.dt_bias: theirs.dt_bias,
        }

    return theirs, cache, ours, same


def kimi_linear():
    sizes = {"linear_num_heads": 4, "linear_head_dim": 3, "num_attention_heads": 4}
    theirs, cache = layer("kimi_linear", "KimiLinearDeltaAttention", hidden_size=E, **sizes, **HYBRID)
    ours = KimiDeltaAttention(E, H, norm_eps=3 * theirs.o_norm.variance_epsilon)

    def same() -> dict[Tensor, Tensor]:
        return separate(theirs, ours) | {
            ours.decay_proj[0].weight: theirs.forget_gate.f_a_proj.weight,
            ours.decay_proj[1].weight: theirs.forget_gate.f_b_proj.weight,
            ours.gate_proj[0].weight: theirs.g_a_proj.weight,
            ours.gate_proj[1].weight: theirs.g_b_proj.weight,
            ours.a_log: theirs.forget_gate.A_log,
            ours.dt_bias: theirs.forget_gate.dt_bias,
        }

    return theirs, cache, ours, same


def mamba2():
    sizes = {"num_heads": 4, "head_dim": 6, "state_size": 5, "n_groups": 2, "num_hidden_layers": 1, "chunk_size": 4}
    theirs, cache = layer("mamba2", "Mamba2Mixer", hidden_size=E, expand=2, **sizes)
    ours = Mamba2Attention(E, H, qk_dim=5, n_qk_heads=2, norm_eps=theirs.layer_norm_epsilon)

    def reordered(t: Tensor) -> Tensor:
        """(X, B, C) -> (C, B, X)."""
        return torch.cat(t.split([24, 10, 10], -1)[::-1], -1)

    def same() -> dict[Tensor, Tensor]:
        z, v, k, q, step = theirs.in_proj.weight.split([24, 24, 10, 10, 4])
        return {
            ours.q_proj.weight: q,
            ours.k_proj.weight: k,
            ours.v_proj.weight: v,
            ours.gate_proj.weight: z,
            ours.decay_proj.weight: step,
            ours.a_log: theirs.A_log,
            ours.dt_bias: theirs.dt_bias,
            ours.skip: theirs.D,
            ours.convolution.weight: reordered(kernel(theirs.conv1d)),
            ours.convolution.bias: reordered(theirs.conv1d.bias),
            ours.norm.gain: theirs.norm.weight,
            ours.out_proj.weight: theirs.out_proj.weight,
        }

    return theirs, cache, ours, same


def kernel(conv1d: torch.nn.Conv1d) -> Tensor:
    """(C, 1, K), the newest input last -> (K, C), the newest first."""
    return conv1d.weight[:, 0].T.flip(0)


def separate(theirs, ours) -> dict[Tensor, Tensor]:
    names = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "beta_proj": "b_proj", "out_proj": "o_proj"}
    same = {getattr(ours, name).weight: getattr(theirs, other).weight for name, other in names.items()}
    return same | {ours.convolution.weight: kernel(theirs.conv1d), ours.norm.gain: theirs.o_norm.weight}


def differences(peer, dtype: torch.dtype) -> dict[str, float]:
    """Compare outputs of two segments, the state after them, and the gradients, each to its largest value."""
    theirs, cache, ours, same = peer()
    with torch.no_grad():
        for parameter, other in same().items():
            parameter.copy_(other.reshape(parameter.shape))
    assert set(same()) == set(ours.parameters())
    ours = ours.to(dtype)
    x = torch.randn(2, 11, E, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for part in (x[:, :2], x[:, 2:7], x[:, 7:8], x[:, 8:]):
            theirs(part, cache, None)
        s = cache.layers[0].recurrent_states
        s = (s[0] if isinstance(s, (list, tuple, dict)) else s).to(dtype)
    _, state = ours(x.to(dtype))
    z, mine = x.clone().requires_grad_(), x.to(dtype).requires_grad_()
    expected, (y, _) = theirs(z), ours(mine)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    (expected * weights).sum().backward()
    (y * weights.to(dtype)).sum().backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)  # `same` then says which gradients are the same
    pairs = [(mine.grad, z.grad), *((parameter.grad, other) for parameter, other in same().items())]
    worst = max(relative(a, b.reshape(a.shape)) for a, b in pairs)
    s = s.mT if s.shape != state.s.shape else s
    return {"outputs": relative(y, expected), "state": relative(state.s, s), "gradients": worst}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max() / b.abs().max())


@pytest.mark.parametrize("peer", [qwen3_next, qwen3_5, olmo_hybrid, kimi_linear, mamba2])
@pytest.mark.filterwarnings("ignore")
def test_layers_of_transformers(peer):
    """Theirs compute in float32. In float32 ours has rounding errors too: each has 1e-5 in the gradient of q_proj."""
    for dtype, most in ((torch.float32, 5e-5), (torch.float64, 2e-5)):
        found = differences(peer, dtype)
        print(f"| {peer.__name__} | {dtype} | " + " | ".join(f"{x:.1e}" for x in found.values()) + " |")
        assert max(found.values()) < most


# ------------------------------------------------------------------------------------------------------------- weights


def convolved_values(module: RecurrentAttention, x: Tensor) -> Tensor:
    """(B, N, E) -> (B, H, N, D)."""
    v = definitions.convolved(module, x)[2]
    if not module.causal:
        v = v.clone()
        v[:, 1::2] = definitions.convolved(module, x.flip(1))[2].flip(2)[:, 1::2]
    return v


@each(RECURRENT)
def test_weighted_values_are_the_output_before_norm_and_gate(case: Case):
    module, n = case.build(), case.long
    x, lengths = inputs(module, 3, n), torch.tensor([n, n // 2, 0])
    weights = module.attention_weights(x, None, lengths)
    assert weights.shape == (3, 2, n, n)
    assert not weights.requires_grad
    expected = module(x, None, lengths)[0]
    for row, length in enumerate(lengths.tolist()):
        assert (weights[row, :, length:] == 0).all()
        assert (weights[row, :, :, length:] == 0).all()
        of_row, w = x[row : row + 1, :length], weights[row : row + 1, :, :length, :length]
        if length:
            y = definitions.finished(module, of_row, w @ convolved_values(module, of_row))
            assert_close(y[0], expected[row, :length])
            assert_close(module.attention_weights(of_row), w)


@each([case for case in RECURRENT if case.causal])
def test_a_state_changes_no_weight(case: Case):
    """It has no column, and is not changed."""
    module = case.build()
    x, before = inputs(module, 2, case.long), torch.tensor([case.long - 5, 2])
    whole = module.attention_weights(x)
    _, state = module(x, None, before)
    saved = copied(state)
    later = torch.stack([row[start : start + 5] for row, start in zip(x, before.tolist(), strict=True)])
    weights = module.attention_weights(later, state)
    assert_same(state, saved)
    for row, start in enumerate(before.tolist()):
        assert_close(weights[row], whole[row, :, start : start + 5, start : start + 5])
    half = case.build(torch.bfloat16)
    assert half.attention_weights(x.bfloat16(), half(x.bfloat16())[1]).dtype == torch.float32


def test_a_key_reads_its_newest_value_alone():
    """With β = 1 and keys of unit length, but for the 10⁻⁶ in their length: Schlag et al. 2021, section 4.2."""
    module = DeltaNetAttention(E, H, conv_size=None, beta_max=2.0).double()
    torch.nn.init.zeros_(module.beta_proj.weight)  # β = 2 σ(0)
    torch.nn.init.normal_(module.k_proj.weight)
    module.q_proj.weight = module.k_proj.weight
    weights = module.attention_weights(torch.randn(1, 9, E, dtype=torch.float64))
    assert_close(weights, torch.eye(9, dtype=torch.float64).expand_as(weights), rtol=0, atol=1e-3)


# --------------------------------------------------------------------------------------------------- sizes, other parts


@pytest.mark.parametrize(
    ("make", "count"),
    [
        # q, k, v, out; convolution; β; norm
        (DeltaNetAttention, 4 * E * E + 4 * 3 * E + E * H + E // H),
        (lambda *given: DeltaNetAttention(*given, gate=True, conv_size=None), 5 * E * E + E * H + E // H),
        # and decay, a, b, gate
        (GatedDeltaNetAttention, 5 * E * E + 4 * 3 * E + 2 * E * H + 2 * H + E // H),
        (
            lambda *given: GatedDeltaNetAttention(*given, n_qk_heads=2, qk_dim=5, head_dim=7),
            2 * E * 10 + 3 * E * 28 + 4 * (2 * 10 + 28) + 2 * E * H + 2 * H + 7,
        ),
        # decay and gate of rank E / H
        (KimiDeltaAttention, 4 * E * E + 4 * 3 * E + E * H + 4 * E * E // H + H + E + E // H),
        # q, k; v, gate, out of twice the width
        (RetentionAttention, 2 * E * E + 3 * E * 2 * E),
        # q, k of half the width; v, gate with a bias, out; decay of rank 16 with a bias
        (GatedLinearAttention, E * H * 2 * 2 + 3 * E * E + E + 16 * (E + 2 * H) + 2 * H),
        # q, k of 128; v, gate, out of twice the width; Δ; convolution with a bias; a, b, d; norm
        (Mamba2Attention, 2 * 128 * E + 3 * E * 2 * E + E * H + 5 * (256 + 2 * E) + 3 * H + 2 * E),
    ],
)
def test_parameter_counts(make, count: int):
    for causal in (True, False):
        assert sum(p.numel() for p in make(E, H, causal).parameters()) == count


def test_the_state_of_a_stream_shorter_than_the_kernel():
    convolution = ShortConvolution(3, 4).double()
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    empty = torch.zeros(2, 3, 3, dtype=torch.float64)
    expected, after = convolution(x, empty)
    assert_close(after, x[:, 4:])
    y, recent = convolution(x[:, :2], empty)
    assert (recent[:, 0] == 0).all()
    assert_close(recent[:, 1:], x[:, :2])
    assert_close(torch.cat([y, convolution(x[:, 2:], recent)[0]], 1), expected)
    recent = convolution(x, empty, torch.tensor([1, 0]))[1]
    assert_close(recent[0], torch.cat([empty[0, :2], x[0, :1]]))
    assert (recent[1] == 0).all()


@pytest.mark.parametrize("size", [1, 3])
def test_heads_are_computed_in_float32_under_autocast(size: int, monkeypatch: pytest.MonkeyPatch):
    """Projections of small integers are exact in bfloat16: the heads are equal to the bit unless they are rounded."""
    monkeypatch.setenv("LIT_EFFATTN_KERNELS", "plain")
    for kind in {type(case.example) for case in RECURRENT}:
        module, heads = kind(8, 2).eval(), []
        for linear in filter(lambda part: isinstance(part, torch.nn.Linear), module.modules()):
            for parameter in linear.parameters():
                parameter.data = torch.randint(-1, 2, parameter.shape).float()
        module.out_proj.register_forward_pre_hook(lambda _, given, heads=heads: heads.append(given[0]))
        x = torch.randint(-2, 3, (2, 6, 8)).float()
        for enabled in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                state = None
                for part in x.split(size, 1):
                    _, state = module(part, state)
        half = len(heads) // 2
        assert all(map(torch.equal, heads[:half], heads[half:])), kind


def test_the_gradient_of_unit_length_is_finite_at_zero():
    x = torch.zeros(1, 3, requires_grad=True)
    unit_length(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_decays_begin_finite_and_above_zero():
    """A_log is the logarithm of a uniform number; log 0 would be −∞."""
    for make in (GatedDeltaNetAttention, KimiDeltaAttention, Mamba2Attention):
        log_decay = make(256, 128).gates(torch.zeros(1, 1, 256)).log_decay
        assert log_decay.isfinite().all()
        assert (log_decay < 0).all()
        assert (log_decay >= -1.7).all()  # 16 · 0.1


def test_other_weights_become_those_of_a_delta_rule():
    """`--init_weights` from softmax attention: the projections fit, the other parameters stay as they are."""
    softmax, delta = SoftmaxAttention(E, H, bias=False), GatedDeltaNetAttention(E, H)
    missing, unexpected = delta.load_state_dict(softmax.state_dict(), strict=False)
    assert not unexpected
    assert {name.partition(".")[0] for name in missing} <= set(delta.extra_parameters)
