import pytest
from torch import nn

from lit_effattn.nn.evaluating import evaluating


def test_modes_are_restored_even_after_an_error():
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout()), nn.Dropout().eval())
    modes = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(KeyError), evaluating(model):
        raise KeyError
    assert [module.training for module in model.modules()] == modes
