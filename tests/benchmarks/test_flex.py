import argparse
import json
import os

import pytest
import torch
import torch.nn.functional as F

from benchmarks import __main__ as command
from benchmarks import flex
from benchmarks.measuring import Spread
from lit_effattn.ops import sparse
from lit_effattn.ops.flex import FLEX
from lit_effattn.ops.relative import relative_attention

SIZES = ["--lengths", "8", "16", "--sparse_lengths", "20", "--strides", "4", "--summary", "2"]
SPARSE = ["strided, stride 4", "fixed, stride 4"]


def test_without_a_gpu_nothing_is_measured_and_the_table_says_so(tmp_path, capsys):
    command.main(["flex", *SIZES, "--device", "cpu", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "flex.json").read_text(encoding="utf-8"))["rows"]
    cases = [(8, "transformer_xl"), (16, "transformer_xl"), *((20, name) for name in SPARSE)]
    expected = [(*case, form) for case in cases for form in ("flex", "plain", "dense")]
    assert [(row["N"], row["attention"], row["form"]) for row in rows] == expected
    assert all(figure is None for row in rows for figure in list(row.values())[3:])
    said = capsys.readouterr().out
    assert said.count("| not measured | not measured | not measured | not measured | not measured |") == len(rows)
    assert "Not measured: the device is cpu" in said


def test_more_columns_than_a_stride_has_are_refused():
    with pytest.raises(SystemExit, match="--summary 5 columns of --strides 4"):
        command.main(["flex", "--device", "cpu", "--strides", "4", "9", "--summary", "5"])


def test_dense_is_the_same_attention_without_positions():
    q, k, v = (torch.randn(2, 3, n, 4) for n in (5, 10, 10))
    r, u = torch.zeros(3, 10, 4), torch.zeros(3, 4)
    torch.testing.assert_close(flex.dense(q, k, v, r, u, u), relative_attention(q, k, v, r, u, u))


def test_the_forms_of_sparse_attention(monkeypatch):
    """Flex where it is asked for, plain where not, whatever the environment says; to few keys, a stride holds all."""
    parser = argparse.ArgumentParser()
    flex.add_arguments(parser)
    args = parser.parse_args([*SIZES, "--strides", "32", "--n_heads", "2", "--dtype", "float32"])
    args.device = torch.device("cpu")
    taken = []
    monkeypatch.setenv(FLEX, "1")
    monkeypatch.setattr(sparse, "use_flex", lambda t, dropout, *, batch: os.environ[FLEX] == "1")
    monkeypatch.setattr(sparse, "_summed_by_flex", lambda part: taken.append(part) or sparse._summed(part, 0.0))
    for case in flex._cases(args)[2:]:
        inputs = flex._inputs(case, args)
        for name, sets in (("dense", 0), ("plain", 0), ("flex", 2)):
            taken.clear()
            y = case.forms[name](*inputs)
            torch.testing.assert_close(y, F.scaled_dot_product_attention(*inputs, is_causal=True))
            assert len(taken) == sets


@pytest.mark.parametrize("before", [None, "1", "0"])
def test_the_environment_is_left_as_it_was(before, monkeypatch):
    monkeypatch.delenv(FLEX, raising=False) if before is None else monkeypatch.setenv(FLEX, before)
    with flex.asked(True):
        assert os.environ[FLEX] == "1"
        with flex.asked(False):
            assert os.environ[FLEX] == "0"
        assert os.environ[FLEX] == "1"
    assert os.environ.get(FLEX) == before


def test_ratios_are_of_the_same_case():
    case = flex.Case("strided, stride 4", 20, dict.fromkeys(("flex", "plain", "dense")))
    seconds = {"flex": Spread((1.0, 2.0)), "plain": Spread((4.0, 4.0)), "dense": Spread((2.0, 8.0))}
    row = flex._rows(case, seconds, {"flex": 2**20, "plain": 2**22, "dense": 2**20})[0]
    assert row["time ÷ plain's"].samples == (0.25, 0.5)
    assert row["time ÷ dense's"].samples == (0.5, 0.25)
    assert (row["ms"].samples, row["peak, MiB"], row["peak ÷ plain's"]) == ((1000, 2000), 1, 0.25)
