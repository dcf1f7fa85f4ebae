"""Tests of the checks of a release, and of the long description."""

import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from scripts import release_check
from tests.support.commands import REPOSITORY

HOOK = spec_from_file_location("hatch_build", REPOSITORY / "hatch_build.py")
assert HOOK is not None
assert HOOK.loader is not None
hatch_build = module_from_spec(HOOK)
HOOK.loader.exec_module(hatch_build)

TEXT = "[a](docs/a.md#b), ![c](d.png), [![e](f.png)](https://g), [![h](i.png)](j), [k](#l)"
ABSOLUTE = (
    "[a](R/blob/v1/docs/a.md#b), ![c](R/raw/v1/d.png), [![e](R/raw/v1/f.png)](https://g), "
    "[![h](R/raw/v1/i.png)](R/blob/v1/j), [k](#l)"
)


def test_relative_links_become_absolute_or_text():
    assert hatch_build.absolute_links(TEXT, "R", "v1") == ABSOLUTE
    assert hatch_build.absolute_links(TEXT, None, "v1") == "a, , [](https://g), , [k](#l)"
    assert release_check.relative_links("[a](b.md), [c](https://d), [e](#f), ![g](h.png)") == ["b.md", "h.png"]


def test_the_process_environment_has_no_paths_of_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert "PYTHONPATH" not in release_check.clean(tmp_path)


def test_a_release_has_its_tag_and_its_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(release_check, "run", lambda command: "")
    wheel = tmp_path / "lit_effattn-0.0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("lit_effattn-0.0.1.dist-info/METADATA", "[a](https://b)")
    for tag, message in (("v9.9", "tag v0.0.1"), (None, "no section '## 0.0.1'")):
        with pytest.raises(SystemExit, match=message):
            release_check.check_files(wheel, wheel, tag)
