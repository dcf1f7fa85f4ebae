"""JSON from files, which may be anybody's."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: If it is no JSON, or nested more deeply than Python can follow.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
