import itertools
import re
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar

from lit_effattn.callbacks import ParameterSummary, ProgressBar
from tests.callbacks.tiny import Tiny, loader, trainer


@pytest.mark.parametrize(
    ("step", "options", "expected"),
    [
        (1.0, {"max_epochs": 1}, [0, 1, 2, 3, 3]),
        (0.04, {"max_epochs": 1}, [0, 3, 3]),  # the first, the last, and when the epoch has ended
        (0.0, {"max_steps": 3}, [0, 2]),
        (0.0, {"max_epochs": 2}, [0, 3, 3, 3, 3]),
    ],
)
def test_it_is_drawn_ten_times_a_second_and_at_the_end(
    step: float, options: dict[str, int], expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn = []
    monkeypatch.setattr(RichProgressBar, "on_train_batch_end", lambda *args: drawn.append(args[-1]))
    monkeypatch.setattr(time, "monotonic", (1000 + step * i for i in itertools.count()).__next__)
    trainer(tmp_path, [ProgressBar()], enable_progress_bar=True, **options).fit(Tiny(), loader(4))
    assert drawn == expected


@pytest.mark.parametrize(("options", "shown"), [({"max_epochs": 7}, "Epoch 6/6 "), ({"max_steps": 3}, "Epoch 2 ")])
def test_only_a_number_of_epochs_that_there_is_is_shown(
    options: dict[str, int], shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = {"limit_train_batches": 1, **options}
    trainer(tmp_path, [ProgressBar()], enable_progress_bar=True, **options).fit(Tiny(), loader(4))
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(("columns", "bar"), [("80", False), ("160", True)])
def test_names_of_metrics_are_whole_in_a_narrow_terminal(
    columns: str, bar: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", columns)
    metrics = {"train/bits_per_byte": torch.tensor(2.374), "val/bits_per_byte": torch.tensor(12.345)}
    monkeypatch.setattr(ProgressBar, "get_metrics", lambda *_: metrics)
    trainer(tmp_path, [ProgressBar()], enable_progress_bar=True, max_epochs=1).fit(Tiny(), loader(4))
    shown = capsys.readouterr().out
    assert "train/bits_per_byte: 2.374" in shown
    assert "val/bits_per_byte: 12.345" in shown
    assert ("━━━" in shown) == bar


def test_the_summary_counts_what_has_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = Tiny()
    model.nothing = torch.nn.ReLU()
    model.frozen = torch.nn.Linear(30, 50).requires_grad_(False)
    trainer(tmp_path, [ParameterSummary()], max_steps=1).fit(model, loader(4))
    output = capsys.readouterr().out
    count = sum(p.numel() for p in model.parameters())
    assert f"\n{count / 1000:.1f} K parameters, 1.6 K of them frozen\n" in output
    assert re.search(r"│ frozen +│ Linear +│ 1.6 K +│", output)
    assert "nothing" not in output
    assert "FLOPs" not in output
