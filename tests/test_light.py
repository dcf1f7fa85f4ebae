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
