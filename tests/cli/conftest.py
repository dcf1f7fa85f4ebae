import shutil
from pathlib import Path

import pytest


@pytest.fixture
def run(trained: Path) -> Path:
    """Copy the run that a module's fixture `trained` made into this folder, and return it."""
    copy = Path("runs", trained.name)
    shutil.copytree(trained, copy)
    return copy
