"""ONNX steps of every kind compute what the model computes, for streams that are many memories long."""

from importlib.metadata import version

import pytest

from tests.interchange.export import table
from tests.interchange.export.cases import CASES, N_TOKENS
from tests.interchange.export.exporting import exported

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

OLD_RUNTIME = version("onnxruntime").startswith("1.23.")  # the last for Python 3.10
WRONG = "onnxruntime 1.23 computes this step wrongly, by 1.4 in the log-probabilities; `export` then writes no file"


def cases(names):
    wrong = pytest.mark.skipif(OLD_RUNTIME, reason=WRONG)
    return [pytest.param(name, marks=wrong if name.startswith("windowed linear") else ()) for name in names]


def test_a_kind_that_searches_streams_as_the_model_does():
    """Other kinds: test_export.py and test_onnx_operators.py."""
    done = exported("∞-former, sticky=True, n_bins=6", "onnx", 2, 60)
    assert done.checked == 60
    assert done.difference < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", cases(CASES))
def test_every_option_streams_as_the_model_does(name):
    done = [exported(name, "onnx", batch_size) for batch_size in (1, 2)]
    assert [d.checked for d in done] == [N_TOKENS] * 2
    table.check(name, "onnx", max(d.difference for d in done))


def test_the_page_has_every_case():
    assert list(table.rows()) == list(CASES)
