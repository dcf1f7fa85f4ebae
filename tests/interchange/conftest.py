import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """After each export garbage is collected: it need not look through all that was there before."""
    gc.freeze()
