"""Programs of `torch.export` of every kind compute what the model computes, for streams that are many memories long."""

import pytest

from tests.interchange.export import table
from tests.interchange.export.cases import CASES, N_TOKENS
from tests.interchange.export.exporting import exported


def test_a_kind_streams_as_the_model_does():
    """Other kinds: tests/interchange/test_export.py."""
    done = exported("windowed linear", "torch", 2, 60)
    assert done.checked == 60
    assert done.difference < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_every_option_streams_as_the_model_does(name):
    done = [exported(name, "torch", batch_size) for batch_size in (1, 2)]
    assert [d.checked for d in done] == [N_TOKENS] * 2
    table.check(name, "torch", max(d.difference for d in done))
