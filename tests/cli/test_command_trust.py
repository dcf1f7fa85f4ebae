"""What `--trust` adds to the registered classes, and what a checkpoint gives away."""

from pathlib import Path

import pytest
import torch
import yaml

from lit_effattn.cli import main
from tests.cli.test_command import TINY
from tests.cli.test_command_text import write_texts
from tests.support.commands import fails, last
from tests.support.small_runs import SETTINGS

__all__ = ["TINY"]  # the settings in tiny.yaml


def test_whole_modules_of_others_are_not_trusted(capsys: pytest.CaptureFixture[str]):
    for name in ["torch", "lightning", "builtins", "os", "numpy", "lit_effattn", "datamodules"]:
        assert f"--trust {name} is a module that is not your own" in fails(
            capsys, "fit", "--config", "tiny.yaml", "--trust", name
        )


def test_trusting_what_is_not_there(capsys: pytest.CaptureFixture[str]):
    for name in ["nowhere", "tests.cli.Nothing", "my module", ""]:
        assert f"--trust {name}: " in fails(capsys, "fit", "--config", "tiny.yaml", "--trust", name)


# ------------------------------------------------------------------------------------------------ YAML and flags


def test_what_jsonargparse_denies_is_denied(capsys: pytest.CaptureFixture[str]):
    flag = ["--model.optimizer", "{class_path: os.system, init_args: {command: touch called}}"]
    output = fails(capsys, "fit", "--config", "tiny.yaml", *flag, code=2)
    assert "model.optimizer: os.system is not an Optimizer" in output
    assert not Path("called").exists()


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
