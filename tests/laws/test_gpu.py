"""On a GPU every module computes what it computes on the CPU: outputs, states, gradients, steps, generated tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_effattn import sequence
from lit_effattn.generation.sampling import generate
from lit_effattn.nn.heads import CategoricalHead
from lit_effattn.sequence import SequenceModule
from tests.laws.cases import CASES, EACH, Case
from tests.laws.tools import each, inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("ignore:.*plain form, slower than its kernels"),
]


def results(case: Case, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Return on the CPU, in float64, what `case` computes on `device`: with padding, going on, and step by step."""
    module: SequenceModule = case.build(dtype).to(device)
    n, found = case.long, {}
    x = inputs(module, 2, 2 * n).to(device, dtype).requires_grad_()
    lengths = torch.tensor([n, n - 2], device=device)
    y, state = module(x[:, :n], None, lengths)
    kept = torch.arange(n, device=device) < lengths[:, None]
    outputs = [y.masked_fill(~kept[..., None], 0)]
    if case.causal:
        outputs.append(module(x[:, n:], state)[0])
    weights = torch.randn(sum(t.numel() for t in outputs), generator=torch.Generator().manual_seed(1)).to(x)
    auxiliary = sequence.losses(state)
    loss = torch.cat([t.flatten() for t in outputs]) @ weights + (0 if auxiliary is None else auxiliary.sum())
    wanted = {"input": x, **dict(module.named_parameters())}
    gradients = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True)
    found |= {f"output {i}": t for i, t in enumerate(outputs)}
    found |= {f"gradient of {name}": g for name, g in zip(wanted, gradients, strict=True) if g is not None}
    if case.causal:
        found |= {f"state {i}": t for i, t in enumerate(sequence.tensors(state)) if t.is_floating_point()}
        with torch.no_grad(), sequence.donated():
            state = module.initial_state(2, max_len=n, device=device, dtype=dtype)
            for i in range(n):
                found[f"step {i}"], state = module(x[:, i : i + 1].detach(), state)
    return {name: t.detach().double().cpu() for name, t in found.items()}


def assert_alike(case: Case, dtype: torch.dtype, rtol: float) -> None:
    """Each tensor is that of float64 on the CPU, to `rtol` of its norm."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        found, expected = results(case, dtype, "cuda"), results(case, torch.float64, "cpu")
    assert found.keys() == expected.keys()
    scale = max(float(t.norm()) for name, t in expected.items() if name.startswith("gradient"))
    far: dict[str, Any] = {}
    for name, b in expected.items():
        finite = b.isfinite()
        assert torch.equal(found[name].isfinite(), finite), name
        error = float((found[name] - b)[finite].norm())
        least = 1e-3 * scale if name.startswith("gradient") else 1e-30  # gradients that are 0 but for rounding
        if not error <= rtol * max(float(b[finite].norm()), least):
            far[name] = error
    assert not far


@each(CASES)
def test_a_gpu_computes_what_the_cpu_does(case: Case):
    """In float32 with the kernels in Triton, where there are some; tokens also by a recorded graph."""
    assert_alike(case, torch.float64, 1e-9)
    if not case.jumps:
        assert_alike(case, torch.float32, 1e-3)
    if case.causal:
        assert_same_tokens(case, compiled=False)
        if case.name in EACH:
            assert_same_tokens(case, compiled=True)


def assert_same_tokens(case: Case, *, compiled: bool) -> None:
    torch.manual_seed(2)
    backbone = case.build()
    model = nn.ModuleList([backbone, nn.Embedding(7, backbone.d_input), CategoricalHead(backbone.d_model, 7)]).double()
    with torch.no_grad():
        model[2].proj.weight.mul_(5)
    prompt = torch.randint(7, (2, 3))
    expected = generate(*model, prompt, 12, temperature=0.9)
    model.cuda()
    found = generate(*model, prompt.cuda(), 12, temperature=0.9, compile=compiled)
    assert torch.equal(found.cpu(), expected)
