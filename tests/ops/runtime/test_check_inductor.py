"""What torch.compile needs is missed before it is wanted."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from lit_effattn.ops.runtime.check_inductor import check_inductor

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_each_thing_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError, match=r"^Compile needs a C\+\+ compiler .* no 'no-such-compiler': install .* leave Co"
    ):
        check_inductor("Compile", CPU)
    monkeypatch.setenv("CXX", sys.executable)  # a program that is there
    with pytest.raises(ValueError, match=re.escape(f"there is no Python.h in {tmp_path}: install")):
        check_inductor("Compile", CPU)
    (tmp_path / "Python.h").touch()
    check_inductor("Compile", CPU)


def test_what_triton_lacks_is_said(monkeypatch: pytest.MonkeyPatch):
    """Its driver is made by a C compiler when it is first asked for anything."""
    triton = pytest.importorskip("triton")

    class Driver:
        missing = True

        @property
        def active(self) -> Driver:
            if self.missing:
                raise RuntimeError("Failed to find C compiler.\nPlease specify")
            return self

        def get_current_device(self) -> int:
            return 0

    driver = Driver()
    monkeypatch.setattr(triton.runtime, "driver", driver)
    with pytest.raises(
        ValueError, match=r"^Compile needs Triton on CUDA.*\(RuntimeError: Failed to find C compiler.\): ins"
    ):
        check_inductor("Compile", CUDA)
    driver.missing = False
    check_inductor("Compile", CUDA)
