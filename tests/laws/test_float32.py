"""The laws in float32, which the C++ kernels compute where there is a compiler: float64 has only the plain forms."""

import typing

import pytest
import torch

from lit_effattn.attention import LinearAttention, PerformerAttention, RecurrentAttention
from lit_effattn.laws import LawSuite
from lit_effattn.laws.law import Law
from tests.laws.cases import ATTENTIONS, CASES, EACH, Case, CaseAdapter
from tests.laws.tools import assert_close, each, inputs

LEFT_OUT = {
    "packed",
    "compiled",
    "compiled-steps",
    "half-precision",
    "state-dict",
    "saved-state",
    "generation",
    "bounded",
}
"""Laws that are the same code in any type, or that float64's tests check in float32 as well."""
WITH_KERNELS = (LinearAttention, PerformerAttention, RecurrentAttention)


def in_float32(case: Case) -> CaseAdapter:
    adapter = CaseAdapter(case)
    adapter.dtype = torch.float32
    return adapter


class TestLawsInFloat32(LawSuite):
    adapters: typing.ClassVar = [in_float32(case) for case in CASES]

    @classmethod
    def marks(cls, adapter: CaseAdapter, law: Law, variant: str) -> list | None:
        """Leave out what float64 shows as well; other options, and kinds without a kernel, are exhaustive."""
        if law.name in LEFT_OUT or "initial" in variant or "max_len" in variant:
            return None
        kernel = isinstance(adapter.case.example, WITH_KERNELS)
        return [] if kernel and adapter.name in EACH else [pytest.mark.exhaustive]


@each([case for case in ATTENTIONS if not case.jumps], EACH)
def test_outputs_in_float32_are_near_those_in_float64(case: Case):
    """And gradients: of several chunks and a part, with padding."""
    results = []
    n = 5 * case.unit + 1
    for dtype in (torch.float64, torch.float32):
        module = case.build(dtype)
        x, lengths = inputs(module, 2, n).to(dtype).requires_grad_(), torch.tensor([n, n - case.unit])
        y = module(x, None, lengths)[0]
        y = y.masked_fill((torch.arange(n) >= lengths[:, None])[..., None], 0)
        parameters = [p for p in module.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(y.square().sum(), [x, *parameters], allow_unused=True)
        results.append([t.double() for t in (y, *gradients) if t is not None])
    expected, found = results
    scale = max(t.abs().max().item() for t in expected)  # of gradients that cancel, too
    assert_close(found, expected, rtol=1e-3, atol=1e-5 * scale)
