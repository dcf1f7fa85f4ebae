"""What the user's own YAML and flags may name, what `--trust` adds, and what a checkpoint gives away."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_effattn import PixelModel
from lit_effattn.cli import main
from tests.cli.test_command import TINY
from tests.cli.test_command_text import write_texts
from tests.support.commands import fails, last, spec
from tests.support.small_runs import SETTINGS, checkpoint

MINE = '''
from pathlib import Path
import torch
from lightning.pytorch import Callback
from lit_effattn.attention import LinearAttention

class MyAttention(LinearAttention):
    """One of the user's own."""

def make_optimizer(params) -> torch.optim.Optimizer:
    Path("called").touch()
    return torch.optim.SGD(params, lr=0.1)

class Calls(Callback):
    def __init__(self, function: "Callable"):
        function()
'''.replace('"Callable"', "__import__('typing').Callable")


@pytest.fixture(autouse=True)
def _beside_my_module(empty_folder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("my_module.py").write_text(MINE)
    monkeypatch.delitem(sys.modules, "my_module", raising=False)


# ------------------------------------------------------------------------------------------------ a class of one's own


def test_an_attention_of_ones_own_is_a_flag_and_is_trusted_by_name_from_its_checkpoint(
    capsys: pytest.CaptureFixture[str],
):
    main(["fit", "--config", "tiny.yaml", "--model.backbone.attention", "my_module.MyAttention"])
    del sys.modules["my_module"]
    assert "--trust my_module.MyAttention" in fails(capsys, "test", "--ckpt_path", "best")
    assert "my_module" not in sys.modules
    for name in ("my_module.MyAttention", "my_module"):
        main(["test", "--ckpt_path", "best", "--trust", name])
        assert "test bits/dim: " in capsys.readouterr().out
    main(["fit", "--ckpt_path", "last", "--trainer.max_epochs", "2", "--trust", "my_module"])
    (checkpoint,) = Path("runs").rglob("best.ckpt")
    for trust in ("my_module.MyAttention", sys.modules["my_module"].MyAttention):
        model = PixelModel.load_from_checkpoint(checkpoint, trust=(trust,))
        assert type(model.backbone.blocks[0].attention).__name__ == "MyAttention"


def test_trust_is_no_part_of_a_checkpoint():
    main(["fit", "--config", "tiny.yaml", "--trust", "my_module"])
    (checkpoint,) = Path("runs").rglob("last.ckpt")
    assert "trust" not in repr(torch.load(checkpoint, weights_only=True)["lit_effattn"])


def test_whole_modules_of_others_are_not_trusted(capsys: pytest.CaptureFixture[str]):
    for name in ["torch", "lightning", "builtins", "os", "numpy", "lit_effattn", "datamodules"]:
        assert f"--trust {name} is a module that is not your own" in fails(
            capsys, "fit", "--config", "tiny.yaml", "--trust", name
        )


def test_trusting_what_is_not_there(capsys: pytest.CaptureFixture[str]):
    for name in ["nowhere", "my_module.Nothing", "my module", ""]:
        assert f"--trust {name}: " in fails(capsys, "fit", "--config", "tiny.yaml", "--trust", name)


# ------------------------------------------------------------------------------------------------ YAML and flags


def test_a_function_is_called_only_if_it_is_trusted(capsys: pytest.CaptureFixture[str]):
    for flags, function in [
        (["--model.optimizer", "my_module.make_optimizer"], "my_module.make_optimizer"),
        (["--model.optimizer", "{class_path: my_module.make_optimizer}"], "my_module.make_optimizer"),
        (
            ["--trainer.strategy", "{class_path: DDPStrategy, init_args: {ddp_comm_hook: torch.hub.load}}"],
            "torch.hub.load",
        ),
        (
            ["--trainer.callbacks+={class_path: my_module.Calls, init_args: {function: torch.hub.help}}"],
            "torch.hub.help",
        ),
        # A class where a function is expected is called like one.
        (
            ["--trainer.callbacks+={class_path: my_module.Calls, init_args: {function: {class_path: torch.nn.ReLU}}}"],
            "torch.nn.modules.activation.ReLU",
        ),
    ]:
        bare = spec("PixelModel", backbone=TINY["model"]["init_args"]["backbone"])
        Path("bare.yaml").write_text(yaml.safe_dump({**TINY, "model": bare}))
        output = fails(capsys, "fit", "--config", "bare.yaml", *flags)
        assert f"names the function {function}" in output
        assert f"--trust {function}" in output
        assert not Path("called").exists()


@pytest.mark.parametrize("name", ["my_module", "my_module.make_optimizer"])
def test_a_trusted_function_is_called(name: str):
    main(
        [
            "fit",
            "--config",
            "tiny.yaml",
            "--model.optimizer",
            "my_module.make_optimizer",
            "--model.lr_scheduler",
            "null",
            "--trust",
            name,
        ]
    )
    assert Path("called").exists()


def test_a_file_may_say_what_it_trusts():
    config = {**TINY, "trust": ["my_module.make_optimizer"]}
    config["model"] = {**TINY["model"], "init_args": {**TINY["model"]["init_args"]}}
    config["model"]["init_args"].update(optimizer="my_module.make_optimizer", lr_scheduler=None)
    Path("trusting.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", "trusting.yaml"])
    assert Path("called").exists()


def test_what_jsonargparse_denies_is_denied(capsys: pytest.CaptureFixture[str]):
    flag = ["--model.optimizer", "{class_path: os.system, init_args: {command: touch called}}"]
    output = fails(capsys, "fit", "--config", "tiny.yaml", *flag, code=2)
    assert "model.optimizer names os.system, which YAML and flags may not name" in output
    assert not Path("called").exists()


def test_a_callback_of_functions_is_answered_with_one_that_can_be_named(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["fit", "--config", "tiny.yaml", "--trainer.callbacks+=LambdaCallback"])
    output = capsys.readouterr().err
    assert "class MyCallback(Callback):" in output
    assert "--trainer.callbacks+=my_module.MyCallback" in output


# ------------------------------------------------------------------------------------------------ what is given away


def test_a_checkpoint_has_no_path_of_the_current_folder(tmp_path: Path):
    here = str(tmp_path)
    main(["fit", "--config", "tiny.yaml", "--trainer.default_root_dir", f"{here}/runs", "--trainer.logger", "true"])
    (last,), (best,) = (list(Path("runs").rglob(f"{name}.ckpt")) for name in ("last", "best"))
    assert last.is_file()
    assert here.encode() not in last.read_bytes()
    assert here.encode() not in best.read_bytes()
    # What the callback remembers is right again when the run goes on, wherever it lies by then.
    Path("moved").mkdir()
    run = last.parent.parent.rename(Path("moved") / last.parent.parent.name)
    before = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]
    main(["fit", "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), "--trainer.max_epochs", "1"])
    (state,) = (state for key, state in before.items() if key.startswith("ModelCheckpoint"))
    assert state["dirpath"] == "checkpoints"
    assert state["best_model_path"] == state["kth_best_model_path"] == "best.ckpt"
    assert list(state["best_k_models"]) == ["best.ckpt"]
    assert list(Path("moved").rglob("*.ckpt")) == list(run.rglob("*.ckpt"))


def test_data_that_are_named_in_full_are_saved_as_seen_from_here(tmp_path: Path):
    write_texts()
    Path("text.yaml").write_text(yaml.safe_dump(SETTINGS["language"]))
    here = ["--data.root", str(tmp_path / "texts"), "--data.cache", str(tmp_path / "cache")]
    main(["fit", "--config", "text.yaml", *here])
    saved = last("runs")
    assert str(tmp_path).encode() not in saved.read_bytes()
    main(["test", "--ckpt_path", str(saved)])


@pytest.mark.filterwarnings("error:The dirpath has changed")
def test_a_better_checkpoint_replaces_the_best_after_resuming():
    main(["fit", "--config", "tiny.yaml"])
    main(["fit", "--ckpt_path", "last", "--trainer.max_epochs", "3"])
    (run,) = Path("runs").iterdir()
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt", "previous.ckpt"]
    content = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    (state,) = (state for key, state in content["callbacks"].items() if key.startswith("ModelCheckpoint"))
    assert list(state["best_k_models"]) == ["best.ckpt"]


def test_what_a_home_gives_away_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("work").mkdir()
    monkeypatch.chdir("work")
    main(["fit", "--config", "../tiny.yaml", "--trainer.default_root_dir", str(tmp_path / "runs")])
    assert f"contain paths of your home folder: {tmp_path / 'runs'}" in caplog.text


# ------------------------------------------------------------------------------------------------ paths and downloads


def test_folders_that_a_checkpoint_names_are_said_before_they_are_used(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    content = torch.load(checkpoint("speech"), weights_only=True)
    decoder = spec("lit_effattn.tasks.ctc.BeamDecoder", lm="nowhere/lm.arpa")
    content["hyper_parameters"].update(decoder=decoder)
    torch.save(content, "it.ckpt")
    fails(capsys, "test", "--ckpt_path", "it.ckpt")
    assert "model.decoder.lm 'nowhere/lm.arpa'" in caplog.text
    assert "phones" not in caplog.text
    assert "texts" in fails(capsys, "test", "--ckpt_path", str(checkpoint("language")))
    assert "The checkpoint names data.cache 'cache', data.root 'texts'" in caplog.text


def test_a_data_set_of_a_hub_is_read_from_its_cache_alone(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    asked = []
    monkeypatch.setattr(
        "lit_effattn.datamodules.text.sources.huggingface",
        lambda *args: asked.append((args[0], os.environ.get("HF_HUB_OFFLINE"))) or 1 / 0,
    )
    content = torch.load(checkpoint("language"), weights_only=True)
    of_hub = {"source": "huggingface", "path": "some/stories", "column": "text", "root": None}
    content["lit_effattn"]["config"]["data"]["init_args"].update(of_hub)
    torch.save(content, "it.ckpt")
    for flags in ([], ["--data.path", "some/stories"]):
        with pytest.raises(ZeroDivisionError):
            main(["test", "--ckpt_path", "it.ckpt", *flags])
    assert set(asked) == {("some/stories", "1"), ("some/stories", None)}
    assert "data.path 'some/stories'" in caplog.text
    assert "to allow a download, give --data.path" in caplog.text
    assert "HF_HUB_OFFLINE" not in os.environ
