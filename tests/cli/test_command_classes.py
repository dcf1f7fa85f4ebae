"""The command with classes of sequences: training, resuming, scores, predictions, and what is refused."""

import csv
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_effattn.cli import main
from tests.support.commands import assert_same_end, fails, last, spec

TINY: dict[str, Any] = {
    "seed_everything": 3,
    "model": spec(
        "SequenceClassifier",
        backbone=spec(
            "Transformer",
            d_model=16,
            n_heads=2,
            n_layers=1,
            attention="LinearAttention",
            causal=False,
            positions="LearnedPositions",
            dropout=0.2,
        ),
        label_smoothing=0.1,
        optimizer=spec("torch.optim.RAdam", lr=0.003),
    ),
    "data": spec("LabelledTexts", root="texts", batch_tokens=60, max_len=30),
    "trainer": {"max_epochs": 2, "enable_progress_bar": False, "logger": False},
}


@pytest.fixture(autouse=True)
def _in_a_folder_with_texts(empty_folder: None) -> None:
    Path("texts").mkdir()
    for split, n in (("train", 40), ("val", 9), ("test", 11)):
        Path("texts", f"{split}.tsv").write_text(
            "".join(f"{'ab'[i % 2] * (1 + i % 7)} {i}\t{'AB'[i % 2]}\n" for i in range(n))
        )


def fit(*args: str) -> Path:
    main(["fit", "--config", "tiny.yaml", *args])
    return last("runs").parent.parent


def predicted(run: Path) -> list[dict[str, str]]:
    (path,) = run.rglob("predictions/predictions.csv")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_predictions_agree_with_the_test(capsys: pytest.CaptureFixture[str]):
    """Of images, by a recurrent network."""
    Path("images.yaml").write_text(
        yaml.safe_dump(
            {
                **TINY,
                "model": spec("SequenceClassifier", backbone=spec("LSTM", d_model=16, n_layers=1)),
                "data": spec("LabelledImages", dataset="digits", batch_size=128),
            }
        )
    )
    main(["fit", "--config", "images.yaml", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "3"])
    capsys.readouterr()
    main(["test", "--ckpt_path", "best"])
    out = capsys.readouterr().out
    assert re.search(r"^test sequences: 180$", out, re.M)
    accuracy = float(re.search(r"^test accuracy: ([\d.]+)$", out, re.M)[1])
    main(["predict", "--ckpt_path", "best"])
    run = last("runs").parent.parent
    rows = predicted(run)
    assert [row["index"] for row in rows] == [str(i) for i in range(180)]
    assert sum(row["class"] == row["label"] for row in rows) / 180 == pytest.approx(accuracy, abs=1e-4)
    assert list(run.rglob("confusion.png"))


def test_a_resumed_run_equals_an_uninterrupted_one():
    whole = fit()
    assert torch.load(last("runs"), weights_only=True)["global_step"] > 8
    main(["fit", "--config", "tiny.yaml", "--trainer.default_root_dir", "part", "--trainer.max_steps", "7"])
    main(["fit", "--ckpt_path", str(last("part")), "--trainer.max_steps", "-1"])
    assert_same_end(whole / "checkpoints" / "last.ckpt", last("part"))


def test_texts_without_classes_need_no_corpus():
    run = fit("--trainer.max_epochs", "1")
    shutil.rmtree("texts")
    Path("new.txt").write_text("aaa 1\nbbbbb 2\nab\n")
    main(["predict", "--ckpt_path", "last", "--data.source_file", "new.txt"])
    rows = predicted(run)
    assert [row["index"] for row in rows] == ["0", "1", "2"]
    assert rows
    assert all(row["class"] in ("A", "B") and 0.5 <= float(row["probability"]) <= 1 for row in rows)
    assert "label" not in rows[0]


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]):
    fit("--trainer.max_epochs", "1")
    shutil.rmtree("runs")
    for args, words in (
        (["--trainer.callbacks+=MemoryCarry"], "SequenceClassifier carries no memory between batches; leave it out"),
        (["--model.pooling", "last"], "pooling='last' needs a causal backbone"),
        (["--data.root", "nowhere"], "root='nowhere': there is no such file"),
        (
            ["--model.backbone.positions", "GridPositions"],
            "GridPositions: shape=(30,) is not (height, width, channels)",
        ),
    ):
        assert words in fails(capsys, "fit", "--config", "tiny.yaml", *args)
