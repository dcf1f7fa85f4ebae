"""Keeping checkpoints, and testing, predicting and generating with their mean."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lit_effattn import PixelModel
from lit_effattn.cli import main
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.resume import CHECKPOINT, resolve
from tests.support.commands import fails, same, spec

TINY = {
    "seed_everything": 3,
    "model": spec(
        "PixelModel",
        backbone=spec("Transformer", d_model=8, n_heads=2, n_layers=1, attention="PerformerAttention"),
        optimizer=spec("torch.optim.SGD", lr=0.5),
    ),
    "data": spec("PixelSequences", dataset="digits", batch_size=128),
    "checkpoint": {"keep": 3, "keep_every_n_train_steps": 2},
    "trainer": {
        "max_epochs": 2,
        "limit_train_batches": 4,
        "limit_test_batches": 1,
        "limit_predict_batches": 1,
        "enable_progress_bar": False,
        "logger": False,
        "callbacks": [spec("FeatureRedraw", every_n_steps=3)],
    },
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for 8 steps, of which 4, 6 and 8 are kept; return the folder that has `runs`."""
    root = tmp_path_factory.mktemp("average")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
        main(["fit", "--config", "tiny.yaml"])
    return root


@pytest.fixture(autouse=True)
def _in_its_folder(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained)


@pytest.fixture
def folder(trained: Path) -> Path:
    (path,) = trained.glob("runs/*/checkpoints")
    return path


def mean(folder: Path, *steps: int) -> str:
    """Write the mean of checkpoints, by hand; return the file's path."""
    contents = [torch.load(folder / f"step_{step:08d}.ckpt", weights_only=True) for step in steps]
    weights = contents[-1]["state_dict"]
    drawn = {name for name in weights if name.endswith(("omega", "draws"))}
    assert len(drawn) == 2
    for name in weights.keys() - drawn:
        total = sum(content["state_dict"][name].double() for content in contents)
        weights[name] = (total / len(contents)).float()
    torch.save(contents[-1], folder / "mean.ckpt")
    return str(folder / "mean.ckpt")


def bits(capsys: pytest.CaptureFixture[str], *args: str, command: str = "test") -> str:
    capsys.readouterr()
    main([command, *args])
    return re.search(r"(?:test|val) bits/dim: (\S+)", capsys.readouterr().out)[1]


def test_the_checkpoints_are_kept(folder: Path):
    names = ["step_00000004.ckpt", "step_00000006.ckpt", "step_00000008.ckpt"]
    assert [path.name for path in sorted(folder.glob("step*"))] == names
    contents = [torch.load(folder / name, weights_only=True) for name in names]
    assert [content["global_step"] for content in contents] == [4, 6, 8]
    draws = [content["state_dict"]["backbone.blocks.0.attention.draws"].item() for content in contents]
    assert draws[0] < draws[-1]  # the features of the first are not those of the last


@pytest.mark.parametrize(
    ("name", "n", "steps"),
    [
        ("last", 3, (4, 6, 8)),
        # test_a_second_process_averages_the_same has the same mean without a command
        pytest.param("step_00000006.ckpt", 2, (4, 6), marks=pytest.mark.exhaustive),
    ],
)
def test_testing_with_the_mean(
    name: str,
    n: int,
    steps: tuple[int, ...],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    figure = bits(capsys, "--ckpt_path", name if name == "last" else str(folder / name), "--average", str(n))
    before = ", averaged with " + ", ".join(f"step_{step:08d}.ckpt" for step in steps[:-1])
    assert any(output.endswith(f"step_{steps[-1]:08d}.ckpt{before}") for output in caplog.messages)
    assert figure == bits(capsys, "--ckpt_path", mean(folder, *steps))
    assert figure != bits(capsys, "--ckpt_path", str(folder / f"step_{steps[-1]:08d}.ckpt"))


def test_the_other_commands_use_the_mean_too(folder: Path, capsys: pytest.CaptureFixture[str]):
    """The mean scores otherwise than the last checkpoint, see above."""
    expected = mean(folder, 4, 6, 8)
    Path("average.yaml").write_text("average: 3\n")
    scores, drawn = [], []
    for args in (["last", "--config", "average.yaml"], [expected]):
        before = {path.name for path in Path("runs").rglob("predictions.csv")}
        validated = bits(capsys, "--ckpt_path", *args, command="validate")
        main(["predict", "--ckpt_path", *args])
        newest = max(Path("runs").rglob("predictions.csv"), key=lambda path: path.stat().st_mtime_ns)
        assert newest not in before
        scores.append((validated, newest.read_text()))
        main(["generate", "--n", "3", "--output", f"drawn_{len(drawn)}", "--ckpt_path", *args])
        drawn.append(np.load(f"drawn_{len(drawn)}/samples.npy"))
    assert scores[0] == scores[1]
    assert np.array_equal(drawn[0], drawn[1])


def test_in_python(folder: Path):
    copy = shutil.copy(folder / "step_00000004.ckpt", folder / "copy.ckpt")  # its features are not those of the last
    model = PixelModel.load_from_checkpoint(copy, average=3)
    expected = torch.load(mean(folder, 4, 6, 8), weights_only=True)["state_dict"]
    result = model.state_dict()
    assert same(result, expected)
    with pytest.raises(ValueError, match="average=4: there are 3 kept"):
        PixelModel.load_from_checkpoint(folder / "last.ckpt", average=4)


def test_a_resumed_run_goes_on_keeping(trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    main(["fit", "--config", str(trained / "tiny.yaml"), "--trainer.max_epochs", "1"])
    main(["fit", "--ckpt_path", "last", "--trainer.max_epochs", "2"])
    (folder,) = Path("runs").glob("*/checkpoints")
    (whole,) = trained.glob("runs/*/checkpoints")
    for name in ("step_00000004.ckpt", "step_00000006.ckpt", "step_00000008.ckpt"):
        a, b = (torch.load(path / name, weights_only=True)["state_dict"] for path in (folder, whole))
        assert same(a, b)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["test", "--average", "4"], 1, "average=4: there are 3 kept checkpoints in runs/"),
        (["test", "--average", "0"], 1, "average=0 is not positive"),
        (["generate", "--average", "-2"], 1, "average=-2 is not positive"),
        (["predict", "--average", "all"], 1, "--average all must be a number of checkpoints"),
        (["fit", "--average", "3"], 2, "average"),
        (["fit", "--config", "tiny.yaml", "--checkpoint.keep", "-1"], 1, "keep=-1 must be at least 0"),
    ],
)
def test_what_has_no_mean_is_refused(args: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]):
    assert words in fails(capsys, *args, "--ckpt_path", "last", code=code)


def test_a_damaged_one_is_named(folder: Path, capsys: pytest.CaptureFixture[str]):
    path = folder / "step_00000006.ckpt"
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:5000])
        assert "step_00000006.ckpt is damaged: it is cut off or changed: its 5,000 bytes" in fails(
            capsys, "test", "--ckpt_path", "last", "--average", "2"
        )
    finally:
        path.write_bytes(whole)


def test_a_second_process_averages_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """DDP starts it with the checkpoint that the first has found, though a newer one may be kept since."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(CHECKPOINT, str(folder / "step_00000006.ckpt"))
    averaged = resolve(Arguments(["test", "--ckpt_path", "last", "--average", "2"])).averaged
    assert [path.name for path in averaged] == ["step_00000004.ckpt", "step_00000006.ckpt"]
