"""The configuration of a run of one's own, `--config` files and flags, parsed in this order; each file is read once."""

import shutil
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_effattn.checkpoints import files, io
from lit_effattn.cli import main
from lit_effattn.datamodules import PixelSequences
from tests.support.commands import fails, spec
from tests.support.small_runs import SETTINGS, checkpoint

PERFORMER = "lit_effattn.attention.PerformerAttention"


def settings(capsys: pytest.CaptureFixture[str], *args: str, command: str = "fit") -> dict[str, Any]:
    """Return the settings that a command would use, from the last checkpoint of the run of pixels."""
    path = str(checkpoint("pixels"))
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^0$"):
        main([command, "--ckpt_path", path, *args, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def attention(config: dict[str, Any]) -> Any:
    return config["model"]["init_args"]["backbone"]["init_args"]["attention"]


def test_the_run_comes_first_then_files_then_flags(capsys: pytest.CaptureFixture[str]):
    backbone = spec("Transformer", **{"attention": [{"class_path": "LinearAttention"}, spec("LSHAttention")]})
    Path("list.yaml").write_text(yaml.safe_dump({"model": spec("PixelModel", backbone=backbone)}))
    before = settings(capsys)
    assert attention(before)["class_path"] == PERFORMER
    assert attention(before)["init_args"]["n_features"] == 8
    assert before["seed_everything"] == SETTINGS["pixels"]["seed_everything"]
    several = settings(capsys, "--config", "list.yaml")
    assert [a["class_path"].rpartition(".")[2] for a in attention(several)] == ["LinearAttention", "LSHAttention"]
    assert several["model"]["init_args"]["backbone"]["init_args"]["d_model"] == 16
    flag = ["--model.backbone.attention", "SoftmaxAttention", "--model.backbone.attention.window", "3"]
    (one,) = attention(settings(capsys, "--config", "list.yaml", *flag))  # for all layers
    assert one["init_args"]["window"] == 3
    assert "n_features" not in one["init_args"]  # an option of the run's class


def test_an_optimiser_of_the_run_keeps_its_other_options(capsys: pytest.CaptureFixture[str]):
    after = settings(capsys, "--model.optimizer.lr", "0.5")["model"]["init_args"]["optimizer"]
    assert after["class_path"].endswith("RAdam")
    assert after["init_args"]["lr"] == 0.5
    sgd = settings(capsys, "--model.optimizer", "torch.optim.SGD", "--model.optimizer.lr", "0.5")
    assert "betas" not in sgd["model"]["init_args"]["optimizer"]["init_args"]


def test_each_command_takes_its_part(capsys: pytest.CaptureFixture[str]):
    fit, test = settings(capsys), settings(capsys, command="test")
    assert fit["trainer"]["max_epochs"] == 1
    assert fit["trainer"]["callbacks"][0]["class_path"].endswith("FeatureRedraw")
    assert fit["init_weights"] is None
    assert test["trainer"]["max_epochs"] is None
    assert test["trainer"]["callbacks"] is None
    assert test["trainer"]["logger"] is False
    assert test["data"] == fit["data"]
    assert "checkpoint" not in test
    assert "image_shape" not in fit["model"]["init_args"]  # the data fix it


def counted(function: Any, calls: list[str]) -> Any:
    """Return the function, which notes its calls."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return call


def test_generate_reads_the_file_once(monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    for module, name in ((torch, "load"), (files, "damage")):
        monkeypatch.setattr(module, name, counted(getattr(module, name), read))
    run = checkpoint("pixels").parents[1]
    path = f"{shutil.copytree(run, Path('runs', run.name))}/checkpoints/last.ckpt"  # beside which `fit` saves others
    for command in (["generate", "--n", "1"], ["test"], ["fit", "--trainer.max_epochs", "2"], ["export"]):
        read.clear()
        more = ["--output", "x.pt2", "--format", "safetensors"] if command[0] == "export" else []
        main([command[0], "--ckpt_path", path, *command[1:], *more])
        assert sorted(read) == ["damage", "load"], command
    assert io.read_checkpoint(path)["global_step"] > 0


def test_data_from_which_settings_follow_are_built_once(monkeypatch: pytest.MonkeyPatch):
    built: list[str] = []
    monkeypatch.setattr(PixelSequences, "__init__", counted(PixelSequences.__init__, built))
    Path("pixels.yaml").write_text(yaml.safe_dump(SETTINGS["pixels"]))
    sparse = ["--model.backbone.attention", "SparseAttention", "--trainer.fast_dev_run", "1"]
    main(["fit", "--config", "pixels.yaml", *sparse, "--trainer.callbacks", "null"])
    assert built == ["__init__"]


def test_settings_that_resuming_would_ignore_are_refused(capsys: pytest.CaptureFixture[str]):
    args = ["fit", "--ckpt_path", str(checkpoint("pixels")), "--trainer.max_epochs", "2"]
    assert "--model.optimizer.lr is 0.5 here and 0.001 in the checkpoint" in fails(
        capsys, *args, "--model.optimizer.lr", "0.5"
    )
