"""Attention, its operations, the contract and the laws need torch and numpy alone."""

import subprocess
import sys

from tests.support.commands import REPOSITORY

BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

# What torch itself imports, of packages that it requires, is loaded before the others are blocked.
import torch, numpy, torch._dynamo

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in {{"torch", "numpy", "lit_effattn", *sys.stdlib_module_names}}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Blocked())
sys.path.insert(0, {source!r})
import lit_effattn.sequence, lit_effattn.ops, lit_effattn.attention, lit_effattn.laws
"""
USE = """
y, state = lit_effattn.attention.{kind}(16, 2, True)(torch.randn(2, 40, 16))
y.sum().backward()
"""
CHECK = """
report = lit_effattn.laws.check(lambda: torch.nn.GRU(8, 8, batch_first=True), laws=["segments", "padding"])
assert report.ok and "2 laws checked" in str(report), report
"""


def test_only_torch_and_numpy_are_imported():
    kinds = ("LinearAttention", "PerformerAttention", "TransformerXLAttention", "LSHAttention", "SparseAttention")
    use = "".join(USE.format(kind=kind) for kind in kinds) + CHECK
    code = BLOCKED.format(source=str(REPOSITORY / "src")) + use
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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


def test_a_law_suite_needs_torch_and_pytest_alone(tmp_path):
    file = tmp_path / "test_suite.py"
    file.write_text(SUITE)
    blocked = BLOCKED.replace("import torch, numpy", "import torch, numpy, pytest, _pytest.assertion.rewrite")
    blocked = blocked.replace('"numpy", ', '"numpy", "pytest", "_pytest", "pygments", "test_suite", ')
    use = f"sys.exit(pytest.main(['-q', '--rootdir={tmp_path}', '-p', 'no:cacheprovider', '{file}']))"
    code = blocked.format(source=str(REPOSITORY / "src")) + use
    environment = {"PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 6 passed" in done.stdout, done.stdout
    assert "smallest case: batch 1, length 2, split 1 + 1" in done.stdout
