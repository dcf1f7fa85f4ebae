import argparse

import pytest
import torch

from benchmarks import kept
from benchmarks.models import Size
from lit_effattn import LSTM, Transformer
from lit_effattn.attention import LinearAttention, SoftmaxAttention
from lit_effattn.sequence import nbytes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch):
    kinds = {
        "linear": lambda: Transformer(8, 2, 1, attention=LinearAttention),
        "softmax": lambda: Transformer(8, 2, 1, attention=SoftmaxAttention),
        "LSTM": lambda: LSTM(8, 1),
    }
    monkeypatch.setattr(kept, "KINDS", kinds)
    monkeypatch.setattr(kept, "SMALL", Size(1, 2, 8))
    monkeypatch.setattr(kept, "DRAWN", 3)


@pytest.mark.parametrize("kind", ["linear", "softmax", "LSTM"])
def test_a_kept_state_goes_on(kind: str):
    """Its last token is not read yet, so the state is that of the others."""
    made, tokens = kept.model(kind, CPU), torch.randint(kept.N_TOKENS, (1, 9))
    state = kept.state_after(made, tokens)
    expected = made.sample(tokens, 4)
    assert torch.equal(made.sample(tokens[:, :0], 4, kept=state, seed=0), expected)


def test_states_and_files_are_counted():
    pytest.importorskip("transformers")
    report = kept.states(argparse.Namespace(states=[4, 8], repeats=1, device=CPU))
    rows = {(row["model"], row["positions"]): row for row in report.rows}
    assert len(rows) == len(report.rows) == 8
    of_softmax = [rows["softmax", n]["state, bytes"] for n in (4, 8)]
    assert of_softmax[1] - of_softmax[0] == 4 * 2 * 8 * 4  # positions, keys and values, E, bytes
    assert [rows[kept.GPT2, n]["state, bytes"] for n in (4, 8)] == [4 * 2 * 8 * 4, 8 * 2 * 8 * 4]
    linear = kept.state_after(kept.model("linear", CPU), torch.zeros(1, 5, dtype=torch.long))
    assert rows["linear", 4]["state, bytes"] == rows["linear", 8]["state, bytes"] == nbytes(linear.state)
    for row in report.rows:
        assert (row["save, ms"] is None) == (row["model"] == kept.GPT2)
        assert row["file, bytes"] is None or row["file, bytes"] > row["state, bytes"]


def test_prompts_are_a_row_for_each_method():
    report = kept.prompts(argparse.Namespace(prompts=3, prefix=4, repeats=1, device=CPU))
    assert [row["method"] for row in report.rows[:3]] == [
        "one after another",
        "batch, no prefix cache",
        "batch, prefix cache",
    ]
    assert {row["model"] for row in report.rows} == {"linear", "softmax", "LSTM"}
    assert all(row["tokens/s"].median > 0 for row in report.rows)


def test_forks_keep_what_they_say():
    report = kept.forks(argparse.Namespace(forks=120, device=CPU))
    assert [row["forks"] for row in report.rows] == ["120 in memory", "120 in files"] * 2
    for row in report.rows:
        assert row["growth"] == row["after"] - row["resident before, bytes"]
        assert row["resident before, bytes"] > 2**24
