from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lit_effattn.callbacks import ClipEachParameter
from tests.callbacks.tiny import Tiny, loader, trainer


class Two(Tiny):
    """Two parameters whose gradients are given, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, 2))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.small @ torch.tensor([0.3, 0.4]) + (self.large * torch.tensor([[6.0, 0.0], [0.0, 8.0]])).sum()


def test_each_norm_is_limited_by_itself(tmp_path: Path):
    """One norm for both would shrink the small one, too; a limit of elements would turn the large one."""
    model = Two()
    trainer(tmp_path, [ClipEachParameter(1.0)], max_steps=1).fit(model, loader())
    torch.testing.assert_close(model.small, torch.tensor([-0.03, -0.04]))  # SGD with 0.1
    torch.testing.assert_close(model.large, torch.tensor([[-0.06, 0.0], [0.0, -0.08]]), atol=1e-6, rtol=1e-6)
    assert model.weight.item() == 0


def test_a_limit_must_be_positive():
    with pytest.raises(ValueError, match=r"max_norm=0\.0 must be above 0"):
        ClipEachParameter(0.0)
