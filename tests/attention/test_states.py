"""What every state keeps, whichever module made it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_effattn import sequence
from lit_effattn.attention import Attention
from lit_effattn.distributed.sequence_parallel import Parts
from tests.laws.cases import CAUSAL


def types(state: Any) -> list[torch.dtype]:
    return [t.dtype for t in sequence.tensors(state)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_state_keeps_its_types(dtype: torch.dtype):
    """Keys, values and inputs are stored in the type of the state, and sums in float32, however it goes on."""
    wrong, combined = [], 0
    for case in CAUSAL:
        module, n = case.build(torch.float32), case.long
        for max_len in (None, n + 3):
            state = module.initial_state(2, max_len=max_len, dtype=dtype)
            expected = types(state)
            assert {t for t in expected if t.is_floating_point} <= {dtype, torch.float32}
            for size in (n, 1, 2):
                x = torch.randn(2, size, module.d_input)
                with torch.no_grad(), sequence.donated():
                    _, state = module(x, sequence.map_tensors(torch.clone, state), torch.tensor([size, size // 2]))
                if types(state) != expected:
                    wrong.append((case.name, max_len, size))
        if isinstance(module, Attention) and module.takes_parts:
            before = module.initial_state(2, dtype=dtype)
            _, part = module(torch.randn(2, n, module.d_input))
            alone: Any = SimpleNamespace(rank=0, _gather_states=lambda part: [part])
            _, after = Parts.join(alone, module.combine_states, part, before)
            combined += 1
            if types(after) != types(before):
                wrong.append((case.name, "parts"))
    assert not wrong
    assert combined > 10
