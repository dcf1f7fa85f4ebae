import pytest
import torch


@pytest.fixture(autouse=True)
def _repeatable():
    """One thread (the tests run side by side, and small tensors gain nothing from more) and one seed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
