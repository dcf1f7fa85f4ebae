import shutil
from pathlib import Path

import pytest
import yaml


@pytest.fixture(autouse=True)
def empty_folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder of the test's own, with a cache of its own; the settings `TINY` of a module are in tiny.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if hasattr(request.module, "TINY"):
        Path("tiny.yaml").write_text(yaml.safe_dump(request.module.TINY))


@pytest.fixture
def run(trained: Path) -> Path:
    """Copy the run that a module's fixture `trained` made into this folder, and return it."""
    copy = Path("runs", trained.name)
    shutil.copytree(trained, copy)
    return copy
