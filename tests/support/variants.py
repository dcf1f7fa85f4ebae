"""The variants of shipped configurations that docs/configurations.md names, with the flags that make them."""

import re
import shlex
from pathlib import Path

from tests.support.commands import REPOSITORY

_ROW = re.compile(r"^\| `(\w+)` \| `--config (\w+) (.+)` \|$", re.M)


def variants() -> dict[str, tuple[Path, list[str]]]:
    """Return the configuration and the flags of each variant."""
    page = (REPOSITORY / "docs/configurations.md").read_text(encoding="utf-8")
    return {m[1]: (REPOSITORY / "configs" / f"{m[2]}.yaml", shlex.split(m[3])) for m in _ROW.finditer(page)}
