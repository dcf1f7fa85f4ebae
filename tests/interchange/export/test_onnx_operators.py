"""With ONNX's operators for the recurrence, a file reads prompts and steps as the model does, and is small."""

import json
import re
from collections import Counter
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lit_effattn.attention import GatedDeltaNetAttention, LinearAttention, PerformerAttention
from lit_effattn.cli import main
from lit_effattn.interchange.export import export
from lit_effattn.interchange.onnx_operators import available
from lit_effattn.sequence import tensors
from tests.interchange.export.cases import build
from tests.interchange.export.test_options import OLD_RUNTIME, RECURRENT
from tests.interchange.test_export import language_model, saved
from tests.support.commands import REPOSITORY
from tests.support.rounding import rounding

onnx = pytest.importorskip("onnx")
ReferenceEvaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator
if find_spec("onnxruntime") is None or find_spec("onnxscript") is None:
    pytest.skip("needs onnxruntime and onnxscript", allow_module_level=True)
if OLD_RUNTIME:
    pytest.skip("onnxruntime 1.23 has neither the operators nor opset 27", allow_module_level=True)

ROUNDED = rounding(torch.float32, 150 * 8)  # of log-probabilities: a state sums 150 positions at most, of width 8


@pytest.mark.parametrize("kind", ["KimiDelta", pytest.param("Linear", marks=pytest.mark.exhaustive)])
def test_prompts_and_steps_are_the_model_s(kind, tmp_path):
    """A prompt, a token and another prompt, each from the state before, against one pass of the model."""
    import onnxruntime

    model, path = build(RECURRENT[kind]), tmp_path / "a.onnx"
    done = export(model, path, format="onnx", batch_size=2, check=60)
    assert done.checked == 60
    assert done.difference < ROUNDED
    assert done.prompt_seconds
    session = onnxruntime.InferenceSession(path)
    names = [i.name for i in session.get_inputs()]
    state = [t.numpy() for t in tensors(model.backbone.initial_state(2))]
    tokens = torch.randint(0, 257, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y, _ = model.backbone(model.embedding(tokens))
        expected = model.head.log_probs(y)
    start = 0
    for stop in (70, 71, 150):
        log_probs, *state = session.run(None, dict(zip(names, [tokens[:, start:stop].numpy(), *state], strict=True)))
        assert np.abs(log_probs - expected[:, stop - 1].numpy()).max() < ROUNDED
        start = stop


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RECURRENT.values())
def test_a_file_of_opset_27_is_valid_and_onnx_s_reference_computes_the_same(name, tmp_path):
    model, path = build(name), tmp_path / "a.onnx"
    export(model, path, format="onnx", check=1)
    onnx.checker.check_model(path, full_check=True)
    tokens = torch.randint(0, 257, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y, _ = model.backbone(model.embedding(tokens))
        expected = model.head.log_probs(y[:, -1])
    reference = ReferenceEvaluator(str(path))
    arrays = [t.numpy() for t in (tokens, *tensors(model.backbone.initial_state(1)))]
    log_probs, *_ = reference.run(None, dict(zip(reference.input_names, arrays, strict=True)))
    assert np.abs(log_probs - expected.numpy()).max() < ROUNDED


@pytest.mark.exhaustive
def test_a_layer_is_one_operator_and_its_convolution_another(tmp_path):
    path = tmp_path / "a.onnx"
    export(build(RECURRENT["GatedDeltaNet"]), path, format="onnx", check=1)
    model = onnx.load(path)
    counts = Counter(n.op_type for n in model.graph.node)
    assert counts["LinearAttention"] == counts["CausalConvWithState"] == 1
    assert not counts.keys() & {"Scan", "Loop", "If", "CumSum"}
    assert {o.domain: o.version for o in model.opset_import} == {"": 27}


@pytest.mark.exhaustive
def test_the_page_reads_a_prompt_in_one_call(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = language_model(LinearAttention, GatedDeltaNetAttention)
    path = saved(model, tmp_path / "best.ckpt")
    main(["export", "--ckpt_path", path])
    assert re.search(r"^32 tokens .*\nall but the last in one call, .*: \d+\.\d\d ms$", capsys.readouterr().out, re.M)
    about = json.loads(onnx.load("best.onnx").metadata_props[0].value)
    assert about["kinds"] == ["LinearAttention", "GatedDeltaNetAttention"]
    page = (REPOSITORY / "docs/export.md").read_text(encoding="utf-8")
    code = re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S)[0]
    call = re.search(r"`(log_probs, state = step\(\[.*?)` takes the place of the first loop", page)[1]
    code, n = re.subn(r"for token in .*PROMPT.*\n.*\n", f"{call}\n", code)
    assert n == 1
    exec(code.replace('"def ", 200, 0.8', '"def ", 30, 1e-5'), names := {})
    expected = model.sample(torch.tensor([[256, *b"def "]]), 30, temperature=0)[0].tolist()
    assert names["drawn"] == expected
    assert len(set(expected)) > 3


def test_models_without_these_operators_read_one_token_or_frame(tmp_path, monkeypatch):
    """No attention, a kind without an operator, and an older onnxruntime."""
    assert export(build("LSTM"), tmp_path / "a.onnx", format="onnx", check=2).prompt_seconds is None
    linear = LinearAttention(8, 2)
    assert available([linear, GatedDeltaNetAttention(8, 2)])
    assert not available([linear, PerformerAttention(8, 2)])
    monkeypatch.setattr("onnxruntime.__version__", "1.23.2")
    assert not available([linear])


@pytest.mark.exhaustive
def test_a_kind_of_one_s_own(tmp_path):
    """A kind of one's own, whose queries and values differ in width, with β up to 2."""

    class Own(GatedDeltaNetAttention):
        softness = 1.0

        def __init__(self, d_model, n_heads, causal=True):
            super().__init__(d_model, n_heads, causal, qk_dim=3, head_dim=5, beta_max=2.0)

        def gates(self, x):
            return super().gates(x)._replace(log_decay=-F.softplus(self.decay_proj(x), beta=self.softness))

    model, target = language_model(Own), tmp_path / "a.onnx"
    for softness in (1.0, 2.0):
        Own.softness = softness
        done = export(model, target, format="onnx", overwrite=True)
        assert done.prompt_seconds
        assert done.difference < ROUNDED
