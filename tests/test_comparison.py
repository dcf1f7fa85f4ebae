"""Comparisons of runs find NaN, and refuse to compare nothing."""

from pathlib import Path

import torch

from tests.faults.comparison import compare_checkpoints, compare_logs

NAN = torch.tensor([1.0, torch.nan])


def saved(path: Path, **changes) -> Path:
    content = {
        "global_step": 3,
        "state_dict": {"w": torch.ones(2)},
        "optimizer_states": [{"state": {0: torch.ones(2)}}],
    }
    torch.save(content | changes, path)
    return path


def test_checkpoints(tmp_path):
    whole = saved(tmp_path / "a")
    assert compare_checkpoints(whole, saved(tmp_path / "b")) is None
    assert "w: tensors differ" in compare_checkpoints(whole, saved(tmp_path / "b", state_dict={"w": NAN}))
    assert "only one has w" in compare_checkpoints(whole, saved(tmp_path / "b", state_dict={}))


def test_equal_checkpoints_of_runs_that_learnt_nothing(tmp_path):
    for changes, expected in (
        ({"state_dict": {"w": NAN}}, "w is not finite"),
        ({"state_dict": {}}, "has no state_dict"),
        ({"optimizer_states": []}, "has no optimizer_states"),
        ({"global_step": 0}, "has no global_step"),
    ):
        both = saved(tmp_path / "a", **changes), saved(tmp_path / "b", **changes)
        assert expected in compare_checkpoints(*both)


def test_logs():
    log = {"train/loss": {1: 2.0}}
    assert compare_logs(log, log) is None
    assert "log: train/loss of step 1" in compare_logs(log, {"train/loss": {1: float("nan")}})
    for empty in ({}, {"train/loss": {}}):
        assert compare_logs(empty, empty) == "log: the uninterrupted run has no values"
        assert "missing" in compare_logs(log, empty)
