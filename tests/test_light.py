"""Attention, its operations and the laws run with torch and numpy alone; `make lint` checks their imports."""

import subprocess
import sys

import pytest

from tests.support.commands import REPOSITORY

pytestmark = pytest.mark.exhaustive

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

# What torch itself imports, of packages that it requires, is loaded before the others are blocked.
import torch, numpy, torch._dynamo, pytest, _pytest.assertion.rewrite

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        allowed = {{"torch", "numpy", "lit_effattn", "pytest", "_pytest", "pygments", "test_suite"}}
        if top not in {{*allowed, *sys.stdlib_module_names}}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Blocked())
sys.path.insert(0, {source!r})
import lit_effattn.sequence, lit_effattn.ops, lit_effattn.attention, lit_effattn.laws
"""
USE = """
for kind in ("LinearAttention", "PerformerAttention", "TransformerXLAttention", "LSHAttention", "SparseAttention"):
    y, state = getattr(lit_effattn.attention, kind)(16, 2, True)(torch.randn(2, 40, 16))
    y.sum().backward()
sys.exit(pytest.main(["-q", "--rootdir={folder}", "-p", "no:cacheprovider", "{folder}/test_suite.py"]))
"""
SUITE = """
from functools import partial
import torch
from lit_effattn.laws import LawSuite

class TestGood(LawSuite):
    adapter = partial(torch.nn.GRU, 8, 8, batch_first=True)
    laws = ["steps", "padding"]

class Forgetful(torch.nn.GRU):
    def forward(self, x, state=None):
        return super().forward(x, None)

class TestBad(LawSuite):
    adapter = partial(Forgetful, 8, 8, batch_first=True)
    laws = ["steps"]
"""


def test_torch_numpy_and_pytest_suffice(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    code = BLOCKED.format(source=str(REPOSITORY / "src")) + USE.format(folder=tmp_path)
    environment = {"PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "smallest case: batch 1, length 2, split 1 + 1" in done.stdout
