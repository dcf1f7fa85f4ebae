"""The adapter of flash-linear-attention, with its naive forms on the CPU, and with its kernels on a GPU."""

import warnings

import pytest
import torch

from lit_effattn.attention import KimiDeltaAttention, RetentionAttention
from lit_effattn.ops.gated_linear import fla
from lit_effattn.ops.gated_linear.pytorch import gated_linear_attention
from lit_effattn.ops.runtime.operators import KERNELS
from tests.ops.gated_linear.test_peers import by_head
from tests.ops.gated_linear.test_peers import fla as naive
from tests.support.gated_linear import RULES, assert_defined, inputs

CUDA = torch.device("cuda", 0)
each_rule = pytest.mark.parametrize(("decay", "delta"), RULES)


def naive_kernel(name: str):
    """Return the reference beside the kernel `chunk_name`, with its arguments."""

    def call(q, k, v, *, scale, initial_state, output_final_state, g=None, g_gamma=None, beta=None):
        assert (scale, output_final_state) == (1.0, True)
        options = {"initial_state": initial_state, "output_final_state": True}
        assert all(t is None or t.dtype == torch.float32 for t in (g, g_gamma, initial_state))
        if name == "simple_gla":
            g = g_gamma if g is None else g
            g = torch.zeros(()) if g is None else g
            function = naive(name).naive_recurrent_simple_gla
            return function(q, k, v, g=g.expand(q.shape[:3]), scale=1.0, **options)
        if name == "gla":
            return naive(name).naive_recurrent_gla(q * q.size(-1) ** 0.5, k, v, g, **options)
        if name == "delta_rule":
            q = q * q.size(-1) ** 0.5
            y, state = naive(name).delta_rule_recurrence(*by_head(q, k, v, beta), initial_state=initial_state)
            return y.transpose(1, 2), state
        return getattr(naive(name), f"naive_recurrent_{name}")(q, k, v, g=g, beta=beta, scale=1.0, **options)

    return call


@each_rule
def test_the_naive_forms_compute_the_definition(decay: str, delta: bool, monkeypatch: pytest.MonkeyPatch):
    """Layouts, padding, states, gradients: D_qk is not D, and N is odd."""
    monkeypatch.setattr(fla, "_kernel", naive_kernel)
    tensors, options = inputs(9, 5, 4, decay, delta, dtype=torch.float32)
    for lengths in (None, torch.tensor([9, 4])):
        assert_defined(fla.gated_linear_attention, tensors, options, lengths=lengths, magnified=4)


def test_decays_of_other_shapes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fla, "_kernel", naive_kernel)
    tensors, options = inputs(7, 3, 4, "none", True, dtype=torch.float32)
    for shape in ((1, 2, 7), (2, 2, 1), (1, 2, 1)):
        options["log_decay"] = -torch.rand(shape)
        assert_defined(fla.gated_linear_attention, tensors, options, magnified=4)


def test_fixed_decays_stay_a_number_a_head(monkeypatch: pytest.MonkeyPatch):
    given = {}

    def kernel(q, k, v, **options):
        given.update(options)
        return v, options["initial_state"]

    monkeypatch.setattr(fla, "_kernel", lambda name: kernel)
    (q, k, v, state), options = inputs(7, 3, 4, "fixed", False, dtype=torch.float32)
    fla.gated_linear_attention(q, k, v, state, **options)
    torch.testing.assert_close(given["g_gamma"], options["log_decay"])
    options["log_decay"] = torch.tensor([-torch.inf, -1.0])  # the kernels subtract sums of logarithms
    fla.gated_linear_attention(q, k, v, state, **options)
    assert given["g_gamma"].tolist() == [fla.LEAST, -1.0]


def test_what_is_gated_is_known_before_kernels_are_chosen(monkeypatch: pytest.MonkeyPatch):
    """Those that get a decay per position are refused with some versions of Triton."""
    said, given = [], []
    monkeypatch.setattr(fla, "use", lambda *a, gated: said.append(gated) or True)
    monkeypatch.setattr(
        fla, "_kernel", lambda name: lambda q, k, v, *, initial_state, **o: given.append("g" in o) or (v, initial_state)
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    lengths = torch.tensor([7, 2])
    for rule in RULES:
        tensors, options = inputs(7, 3, 4, *rule, dtype=torch.float32)
        for padding in (None, lengths):
            gated_linear_attention(*tensors, **options, lengths=padding)
    assert said == given
    for padding, gated in ((None, False), (lengths, True)):
        RetentionAttention(8, 2)(torch.randn(2, 7, 8), None, padding)
        assert [*said[-2:], given[-1]] == [gated] * 3


def test_its_kernels_in_the_interpreter(in_triton, monkeypatch: pytest.MonkeyPatch):
    """The step-by-step kernel of the delta rule; the others need a driver, or overflow in the interpreter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel = pytest.importorskip("fla.ops.delta_rule").fused_recurrent_delta_rule
    monkeypatch.setattr(fla, "_kernel", lambda name: kernel)
    (q, k, v, state), options = inputs(9, 16, 8, "none", True, dtype=torch.float32)
    lengths = torch.tensor([9, 4])
    found = fla.gated_linear_attention(q, k, v, state, **options, lengths=lengths)
    expected = gated_linear_attention(q, k, v, state, **options, lengths=lengths)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0][0], expected[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[0][1, :, :4], expected[0][1, :, :4], rtol=1e-5, atol=1e-5)


def test_it_is_chosen_where_it_can_be_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fla, "find_spec", lambda name: object() if name == "fla" else None)
    monkeypatch.setattr(fla, "_obstacle_of_triton", lambda device: "its Triton is wrong")
    monkeypatch.delenv(KERNELS, raising=False)
    fla._say_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fla.use(CUDA, torch.bfloat16, 64, gated=False)
        assert not fla.use(CUDA, torch.float32, 64, gated=False)
        assert not fla.use(torch.device("cpu"), torch.bfloat16, 64, gated=False)
    with pytest.warns(UserWarning, match=r"own form.*its Triton is wrong"):
        assert not fla.use(CUDA, torch.float16, 64, gated=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert not fla.use(CUDA, torch.float16, 64, gated=True)
    with pytest.warns(UserWarning, match="heads of width 257 are wider than 256"):
        assert not fla.use(CUDA, torch.bfloat16, 257, gated=False)
    monkeypatch.setattr(fla, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match=r"not installed: pip install 'lit-effattn\[gpu\]'"):
        assert not fla.use(CUDA, torch.bfloat16, 64, gated=False)
    monkeypatch.setenv(KERNELS, "triton")
    assert not fla.use(CUDA, torch.bfloat16, 64, gated=False)
    monkeypatch.setenv(KERNELS, "fla")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tensors, options = inputs(3, 3, 4, "none", True, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"LIT_EFFATTN_KERNELS=fla, but .* the tensors are on cpu"):
        gated_linear_attention(*tensors, **options)


@pytest.mark.parametrize(
    ("capability", "triton", "wrong"),
    [(9, "3.6.0", True), (9, "3.7.1", False), (9, "3.3.1", False), (8, "3.6.0", False)],
)
def test_a_triton_that_is_wrong_on_hopper_is_named(capability, triton, wrong, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("triton.__version__", triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(fla, "find_spec", lambda name: object())  # tilelang replaces some of these kernels alone
    obstacle = fla._obstacle_of_triton.__wrapped__(CUDA)
    assert (obstacle is not None) == wrong
    assert not wrong or triton in obstacle


def test_a_kind_hands_it_heads_of_the_autocast_type(monkeypatch: pytest.MonkeyPatch):
    """Sums, decays and the norm stay in float32."""
    monkeypatch.setattr(fla, "use", lambda device, dtype, width, gated: dtype == torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    types = []
    monkeypatch.setattr(
        fla, "_kernel", lambda name: lambda q, *a, **o: types.append(q.dtype) or naive_kernel(name)(q, *a, **o)
    )
    attention, x = KimiDeltaAttention(16, 2), torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = attention(x)
        monkeypatch.undo()
        expected, _ = attention(x)
    assert types == [torch.bfloat16]
    assert state.s.dtype == torch.float32
    assert y.dtype == expected.dtype
    assert (y - expected).norm() < 0.05 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_its_kernels_compute_the_definition_on_a_gpu():
    """In bfloat16, whose products round to 2⁻⁹, with states, padding and gradients, over several chunks."""
    for decay, delta in RULES:
        tensors, options = inputs(150, 64, 64, decay, delta, dtype=torch.float32, strongest=0.2)
        lengths = torch.tensor([150, 70], device=CUDA)
        if fla._obstacle(CUDA, torch.bfloat16, 64, fla.is_gated(*options.values(), lengths)) is not None:
            continue
        to = {True: torch.bfloat16, False: torch.float32}
        tensors = [t.to(CUDA, to[i < 3]) for i, t in enumerate(tensors)]
        options = {name: t if t is None else t.to(CUDA) for name, t in options.items()}
        assert_defined(fla.gated_linear_attention, tensors, options, lengths=lengths, rtol=0.02)
