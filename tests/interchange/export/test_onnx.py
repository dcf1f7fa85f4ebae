"""ONNX steps of every kind compute what the model computes, for streams that are many memories long."""

import pytest

from tests.interchange.export import table
from tests.interchange.export.cases import CASES, N_TOKENS
from tests.interchange.export.exporting import exported

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

QUICK = [
    "windowed linear",
    "linear, feature_map=ReluFeatureMap(floor=0.0)",
    "performer, eps=0.01",
    "∞-former, sticky=True, n_bins=6",
    "∞-former, n_basis=0",
    "compressive",
    "sparse, pattern=fixed, summary=2",
]


@pytest.mark.parametrize("name", QUICK)
def test_a_kind_of_each_family_streams_as_the_model_does(name):
    done = exported(name, "onnx", 2, 60)
    assert done.checked == 60
    assert done.difference < 1e-5


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_every_option_streams_as_the_model_does(name):
    done = [exported(name, "onnx", batch_size) for batch_size in (1, 2)]
    assert [d.checked for d in done] == [N_TOKENS] * 2
    table.check(name, "onnx", max(d.difference for d in done))


def test_the_page_has_every_case():
    assert list(table.rows()) == list(CASES)
