"""The command on checkpoints that several processes have written."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml

from lit_effattn.analysis.records import read_run
from lit_effattn.checkpoints.io import read_checkpoint
from lit_effattn.cli import main
from tests.cli.test_command_average import TINY
from tests.support.checkpoint_parts import divide
from tests.support.commands import assert_same_end, fails, same, weights


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A run for 4 steps, of which 2 and 4 are kept, and the same with divided checkpoints."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    main(["fit", "--config", "tiny.yaml", "--name", "whole", "--trainer.max_epochs", "1"])
    shutil.copytree("runs/whole", "runs/parts")
    whole, parts = (next(Path("runs", name).iterdir()).resolve() / "checkpoints" for name in ("whole", "parts"))
    for path in list(parts.iterdir()):
        content = torch.load(path, weights_only=True)
        path.unlink()
        divide(content, path, 2)
    return [whole, parts]


def test_the_commands_take_a_folder_for_a_file(runs: list[Path], capsys: pytest.CaptureFixture[str]):
    whole, parts = runs
    for args in (["--ckpt_path", "best"], ["--ckpt_path", "last", "--average", "2"]):
        output = []
        for name in ("whole", "parts"):
            main(["test", *args, "--trainer.default_root_dir", f"runs/{name}", "--trainer.logger", "false"])
            output.append(capsys.readouterr().out)
        assert output[0] == output[1] != ""
    main(["export", "--ckpt_path", str(parts / "last.ckpt"), "--format", "safetensors", "--output", "one.safetensors"])
    assert same(read_checkpoint(Path("one.safetensors"))["state_dict"], weights(whole / "last.ckpt"))
    output = [fails(capsys, "convert", str(path / "last.ckpt"), "converted") for path in (whole, parts)]
    shown = [str(path.relative_to(Path.cwd())) for path in (whole, parts)]
    assert output[0].replace(shown[0], "") == output[1].replace(shown[1], "")
    assert not read_run(parts.parent).remark
    more = ["--trainer.max_epochs", "2"]
    for name, path in zip(("whole", "parts"), runs, strict=True):
        main(["fit", "--ckpt_path", "last", "--trainer.default_root_dir", f"runs/{name}", *more])
        assert (path / "last.ckpt").is_file()
        assert sorted(p.name for p in path.iterdir()) == sorted(p.name for p in whole.iterdir())
    assert_same_end(*(path / "last.ckpt" for path in runs))


def test_a_damaged_folder_is_named_and_the_one_before_is_resumed(runs: list[Path], capsys: pytest.CaptureFixture[str]):
    _, parts = runs
    (parts / "last.ckpt" / "part_00001.pt").unlink()
    root = ["--trainer.default_root_dir", "runs/parts"]
    assert "last.ckpt/part_00001.pt is missing" in fails(capsys, "test", "--ckpt_path", "last", *root)
    with pytest.warns(UserWarning, match=r"part_00001.pt is missing. Training goes on from .*previous.ckpt"):
        main(["fit", "--ckpt_path", "last", "--trainer.max_epochs", "1", *root])
    assert (parts / "last.ckpt").is_file()
    assert (parts / "set_aside.ckpt").is_dir()
    assert (parts / "previous.ckpt").is_dir()
    (parts / "last.ckpt").write_bytes(b"cut off")
    with pytest.warns(UserWarning, match=r"Training goes on from .*previous.ckpt"):
        main(["fit", "--ckpt_path", "last", "--trainer.max_epochs", "1", *root])
    assert (parts / "set_aside.ckpt").is_file()
