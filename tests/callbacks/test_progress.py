import itertools
import re
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar

from lit_effattn.callbacks import ParameterSummary, ProgressBar
from tests.callbacks.tiny import Tiny, loader, trainer


def test_it_is_drawn_ten_times_a_second_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[int] = []
    for step, options, expected in (
        (1.0, {"max_epochs": 1}, [0, 1, 2, 3, 3]),
        (0.04, {"max_epochs": 1}, [0, 3, 3]),  # the first, the last, and when the epoch has ended
        (0.0, {"max_steps": 3}, [0, 2]),
        (0.0, {"max_epochs": 2}, [0, 3, 3, 3, 3]),
    ):
        drawn.clear()
        with monkeypatch.context() as patch:
            patch.setattr(RichProgressBar, "on_train_batch_end", lambda *args: drawn.append(args[-1]))
            patch.setattr(time, "monotonic", (1000 + step * i for i in itertools.count()).__next__)
            trainer(tmp_path, [ProgressBar()], enable_progress_bar=True, **options).fit(Tiny(), loader(4))
        assert drawn == expected


def test_names_of_metrics_are_whole_and_only_a_known_number_of_epochs_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    metrics = {"train/bits_per_byte": torch.tensor(2.374), "val/bits_per_byte": torch.tensor(12.345)}
    monkeypatch.setattr(ProgressBar, "get_metrics", lambda *_: metrics)
    for columns, bar, options, epoch in (
        ("80", False, {"max_epochs": 7}, "Epoch 6/6 "),
        ("160", True, {"max_steps": 3}, "Epoch 2 "),
    ):
        monkeypatch.setenv("COLUMNS", columns)
        options = {"limit_train_batches": 1, **options}
        trainer(tmp_path, [ProgressBar()], enable_progress_bar=True, **options).fit(Tiny(), loader(4))
        shown = capsys.readouterr().out
        for text in ("train/bits_per_byte: 2.374", "val/bits_per_byte: 12.345", epoch):
            assert text in shown
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


@pytest.mark.parametrize(
    ("options", "steps", "expected"), [({}, 5, [5]), ({"accumulate_grad_batches": 3}, 8, [8, 8, 6])]
)
def test_the_number_of_batches_is_that_of_the_epoch(
    options: dict[str, int], steps: int, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also of a run that resumes in mid-epoch, and with accumulated batches."""
    totals: list[int] = []
    saving = ModelCheckpoint(tmp_path, "a", every_n_train_steps=2)
    trainer(tmp_path, [saving], max_steps=2, **options).fit(Tiny(), loader(8))
    draw = ProgressBar._add_task, RichProgressBar.on_train_epoch_start
    monkeypatch.setattr(ProgressBar, "_add_task", lambda bar, n, *args: (totals.append(n), draw[0](bar, n, *args))[1])

    def start(bar: ProgressBar, *args: object) -> None:
        if bar.train_progress_bar_id is not None:
            totals.append(bar.total_train_batches)
        draw[1](bar, *args)

    monkeypatch.setattr(RichProgressBar, "on_train_epoch_start", start)
    resumed = trainer(tmp_path, [ProgressBar()], enable_progress_bar=True, max_steps=steps, **options)
    resumed.fit(Tiny(), loader(8), ckpt_path=tmp_path / "a.ckpt")
    assert totals == expected
