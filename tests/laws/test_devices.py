"""The laws on a GPU that is not there: tensors without numbers, which know their shapes and that they are on CUDA.

An operator that is given tensors of two devices is refused, and so is a look at a number, for which a GPU's user waits.
What was computed is nothing that can be compared; that backward passes follow the forward ones, autograd sees to.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_effattn import sequence
from lit_effattn.attention.positions import GridPositions
from lit_effattn.generation.sampling import _advance, _Model
from lit_effattn.nn.adaptive import AdaptiveHead
from lit_effattn.nn.heads import CategoricalHead, MixtureOfLogisticsHead
from lit_effattn.ops import continuous
from lit_effattn.ops.runtime.operators import KERNELS
from lit_effattn.sequence import SequenceModule
from tests.laws.cases import CASES, EACH, LINEAR, SHARING, Case, stack
from tests.laws.tools import each

# cuDNN's recurrence asks the driver.
HERE = [case for case in CASES if not case.name.startswith("LSTM") and "bias=" not in case.name]


class Stays(TorchDispatchMode):
    """Refuses what brings tensors from one device to another; numbers may come from the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(tree) if isinstance(t, Tensor)] for tree in ((args, kwargs), out))
        moved = any(t.is_cuda for t in given) and not all(t.is_cuda for t in made)
        assert not moved, f"{func} of {given} made {made}"
        assert all(t.is_cuda for t in (*given, *made) if t.dim()), f"{func} of {given} made {made}"
        return out


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    monkeypatch.setenv(KERNELS, "plain")
    yield FakeTensorMode(allow_non_fake_inputs=True)
    for kept in (continuous.basis_of, continuous.fit_matrices):
        kept.cache_clear()  # lest others get what has no numbers


def moved(case: Case, gpu: FakeTensorMode) -> SequenceModule:
    module = case.build(torch.float32)
    with gpu:
        module.to("cuda")
    assert {t.device.type for t in (*module.parameters(), *module.buffers())} == {"cuda"}
    return module


@each(HERE, {*EACH} - SHARING)
def test_a_module_stays_on_its_device_and_waits_for_nothing(case: Case, gpu: FakeTensorMode):
    module = moved(case, gpu)
    _trains(case, module.train(), gpu)
    if case.causal:
        _generates(case, module.eval(), gpu)


def _trains(case: Case, module: SequenceModule, gpu: FakeTensorMode) -> None:
    with gpu, Stays():
        x = torch.zeros(2, case.unit + 2, module.d_input, device="cuda")
        y, state = module(x, None, None if case.causal else torch.ones(2, dtype=torch.long, device="cuda"))
        sequence.losses(state)
        assert all(t.is_cuda for t in (y, *sequence.tensors(state)))


def _generates(case: Case, module: SequenceModule, gpu: FakeTensorMode) -> None:
    """A state that grows may wait, as `SparseAttention` says; not one made with `max_len`."""
    with gpu, Stays(), torch.no_grad(), sequence.donated():
        x = torch.zeros(2, case.unit + 1, module.d_input, device="cuda")
        rows = torch.ones(2, dtype=torch.long, device="cuda")
        _, state = module(x, module.initial_state(2, max_len=case.unit + 2), rows)
        y, state = module(x[:, :1], sequence.select(module.reset(state, rows > 0), rows))
        assert all(t.is_cuda for t in (y, *sequence.tensors(state)))


@pytest.mark.parametrize(
    "head",
    [CategoricalHead, MixtureOfLogisticsHead, partial(AdaptiveHead, cutoffs=[2, 5], div_value=2)],
    ids=["categorical", "logistics", "adaptive"],
)
def test_a_generated_token_stays_on_its_device_and_waits_for_nothing(head: Any, gpu: FakeTensorMode):
    """So it can be recorded as a graph."""
    make = stack(LINEAR, positions=partial(GridPositions, shape=(2, 3, 1)))
    parts = nn.ModuleList([make(8, 2, True), nn.Embedding(9, 8), head(8, 9)])
    with gpu:
        parts.to("cuda")
    backbone, embedding, made = parts
    with gpu, Stays(), torch.no_grad():
        tokens = torch.zeros(2, 1, dtype=torch.long, device="cuda")
        uniform = torch.zeros(2, dtype=torch.float64, device="cuda")
        model = _Model(backbone, embedding, made, 0.5, 3, 0.9)
        _advance(model, tokens, uniform, backbone.initial_state(2, max_len=6))
