"""Layers of flash-linear-attention, by Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

CHECK = """
import functools
import triton.runtime.autotuner as autotuner

init = autotuner.Autotuner.__init__

def with_one_configuration(self, function, names, configs, *args, **options):
    init(self, function, names, configs[:1], *args, **options)

autotuner.Autotuner.__init__ = with_one_configuration  # the interpreter can't measure which one is the fastest

import fla.layers
from lit_effattn.laws import check
from lit_effattn.laws.adapters.flash_linear_attention import FlashLinearAttentionAdapter

layer = functools.partial(
    fla.layers.GatedLinearAttention, mode="fused_recurrent", hidden_size=32, num_heads=2, layer_idx=0
)
laws = ["alive", "segments", "steps", "select", "padding", "ragged"]
report = check(FlashLinearAttentionAdapter(layer, unit=2), laws=laws)
assert [r.status for r in report.results] == ["ok"] * len(laws), report

class Forgetful(FlashLinearAttentionAdapter):
    @staticmethod
    def call(module, x, state=None, lengths=None):
        return FlashLinearAttentionAdapter.call(module, x, None, lengths)

report = check(Forgetful(layer, unit=2), laws=["alone", "steps"], shrink_seconds=0)
assert [r.law for r in report.broken] == ["steps"], report
"""


@pytest.mark.skipif(find_spec("fla") is None, reason="could not import 'fla'")
def test_layers_keep_the_laws():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, check=False, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
