from typing import Any

import pytest

from lit_effattn.cli.tables import Spread, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(None, ""), (True, "True"), ("1e5", "1e5"), (12345, "12,345"), (2**60, "1,152,921,504,606,846,976")],
        *[(0.000123456, "0.0001235"), (9999.4, "9999"), (415756.0, "415,756"), (-20000.6, "-20,001"), (1e20, "1e+20")],
        *[(float("nan"), "nan"), (float("inf"), "inf"), (Spread(1.23456, 0.0123), "1.235 ± 0.012")],
        (Spread(70000.0, None), "70,000"),
    ],
)
def test_numbers_for_readers(value: Any, text: str):
    assert shown(value) == text
