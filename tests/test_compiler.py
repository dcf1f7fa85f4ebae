"""What torch.compile needs on a CPU is missed before it is wanted."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

import pytest

from lit_effattn.compiler import check_compiler


def test_each_thing_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError, match=r"^Compile needs a C\+\+ compiler .* no 'no-such-compiler': install .* leave Co"
    ):
        check_compiler("Compile")
    monkeypatch.setenv("CXX", sys.executable)  # a program that is there
    with pytest.raises(ValueError, match=re.escape(f"there is no Python.h in {tmp_path}: install")):
        check_compiler("Compile")
    (tmp_path / "Python.h").touch()
    check_compiler("Compile")
