"""What a `LookAhead` computes is tested in tests/laws and tests/tasks/test_speech.py."""

import pytest

from lit_effattn import LSTM
from lit_effattn.nn.look_ahead import LookAhead


def test_errors():
    with pytest.raises(ValueError, match="LSTM has causal=False; LookAhead needs a causal module"):
        LookAhead(LSTM(4, 1, causal=False), 2)
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        LookAhead(LSTM(4, 1), 0)
