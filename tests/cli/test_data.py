"""`lit-effattn data`."""

import inspect
import re
import shlex
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from lit_effattn.cli import main
from lit_effattn.cli.data import describe
from lit_effattn.cli.prepare import _parser
from lit_effattn.datamodules import SpeechBatch
from lit_effattn.datamodules.text.prepare import prepare as make
from tests.support.commands import fails


def test_images_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A folder in place of a configuration's data: where, how much, and a grid of the images."""
    Path("mine").mkdir()
    for i in range(20):
        Image.fromarray(np.full((4, 4, 3), 10 * i, np.uint8)).save(f"mine/{i}.png")
    size = sum(path.stat().st_size for path in Path("mine").iterdir())
    flags = ["--data.dataset", "folder", "--data.root", "mine", "--data.image_size", "4", "--data.batch_size", "3"]
    Path("mine/labels.csv").write_text("")
    Path("mine/.hidden").write_text("not counted")
    with pytest.warns(match="mine: 2 left out"):
        main(["data", "--config", "digits_linear", *flags, "--output", "there"])
    output = capsys.readouterr()
    assert f"{tmp_path / 'mine'}: 21 files, {size / 1e6:.1f} MB" in output.out
    assert "the first training batch: Tensor (3, 48) uint8" in output.out
    assert "3 images: there/images.png" in output.out
    assert len(np.unique(np.asarray(Image.open("there/images.png")))) == 4  # three images and the frame
    assert not Path("runs").exists()
    assert warnings.formatwarning("mine: 1 left out", UserWarning, "pixels.py", 1) == "warning: mine: 1 left out\n"


def test_text_and_pairs(capsys: pytest.CaptureFixture[str]):
    Path("text").write_text("a \x1b[31m b" * 40)
    main(["data", "--data", "TextStream", "--data.source", "files", "--data.root", "text", "--data.batch_size", "2"])
    output = capsys.readouterr().out
    assert '"a \\u001b[31m ba' in output
    assert "\x1b" not in output
    Path("pairs.tsv").write_text("".join(f"good {i}\tgut {i}\n" for i in range(60)))
    main(["data", "--data", "SequencePairs", "--data.corpus", "files", "--data.root", "pairs.tsv"])
    (first, *further) = [line for line in capsys.readouterr().out.splitlines() if " -> " in line]
    assert len(further) == 2
    number = first.split('"')[1].removeprefix("good ")
    assert first == f'"good {number}" -> "gut {number}"'
    main(["data", "--data", "AssociativeRecall", "--data.length", "32", "--data.n_pairs", "2"])
    assert len(re.findall(r"^\d+( \d+){31} -> \d+ \d+$", capsys.readouterr().out, re.MULTILINE)) == 3


def test_classes(capsys: pytest.CaptureFixture[str]):
    """Of images and texts; a row of packed texts holds several."""
    main(["data", "--data", "LabelledImages", "--data.batch_size", "2", "--output", "there"])
    assert re.search(r"2 images of \d, \d: there/images\.png", capsys.readouterr().out)
    texts = {f"{word} {i}": f"of {word}" for i in range(30) for word in ("naïve", "good")}
    Path("texts.tsv").write_text("".join(f"{text}\t{name}\n" for text, name in texts.items()))
    for packed in ("true", "false"):
        main(["data", "--data", "LabelledTexts", "--data.root", "texts.tsv", "--data.packed", packed])
        output = capsys.readouterr().out
        assert output.startswith(str(Path("texts.tsv").resolve()) + ": 1 file, 0.0 MB")
        shown = re.findall('"(.*)" -> "(.*)"', output)
        assert len(shown) == 3
        assert all(texts[text] == name for text, name in shown)


def test_preparing_a_large_text(capsys: pytest.CaptureFixture[str]):
    """The folder is made, and is shown as data; each option of the function is one of the command, with its default."""
    Path("text").mkdir()
    Path("text/a.jsonl").write_text("".join(f'{{"body": "line {i}"}}\n' for i in range(100)))
    Path("text/notes.md").write_text("left out")
    main(["data", "prepare", "text", "y z", "--field", "body", "--held_out", "10", "--shard_bytes", "500"])
    output = capsys.readouterr()
    assert "y z: 690 tokens (bytes, a vocabulary of 257, uint8) of 100 documents, 690 bytes, in 4 shards" in output.out
    assert "text: 1 left out" in output.err
    flags = shlex.split(output.out.split("train from it: ")[1])
    main(["data", *flags, "--data.batch_size", "4", "--data.segment_len", "8"])
    assert '"line ' in capsys.readouterr().out
    options = {name: option.default for name, option in inspect.signature(make).parameters.items() if name != "source"}
    given = vars(_parser().parse_args(["in", "out"]))
    assert given == options | {"input": "in", "folder": "out"}


def test_speech(tmp_path: Path):
    """The filterbank of each utterance without its padding, and its phones."""
    batch = SpeechBatch(
        torch.rand(2, 300, 8),
        torch.tensor([300, 120]),
        torch.tensor([[2, 1], [1, 0]]),
        torch.tensor([2, 1]),
        ["x", "y"],
    )
    nothing = SimpleNamespace(places=[tmp_path / "corpus"], prepare_data=lambda: None, setup=lambda stage: None)
    data = SimpleNamespace(**vars(nothing), phones=["AA", "B"], frame_seconds=0.01, train_dataloader=lambda: [batch])
    lines = list(describe(data, tmp_path / "there"))
    assert lines[0] == f"{tmp_path / 'corpus'}: missing"
    assert [line.rpartition(": ")[0] for line in lines[2:]] == ["x: 3.00 s: B AA", "y: 1.20 s: AA"]
    wide, narrow = (Image.open(tmp_path / "there" / f"utterance_{i}.png") for i in (1, 2))
    assert wide.width > 2 * narrow.width


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]):
    assert "give --config NAME_OR_FILE" in fails(capsys, "data")
    assert "did you mean digits_linear" in fails(capsys, "data", "--config", "digits_liner")
    message = fails(capsys, "data", "--config", "enwik8_xl")
    assert "get http://mattmahoney.net/dc/enwik8.zip" in message
