"""The folder of a run is named after its configuration, what flags swapped in it, or `--name`."""

import errno
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_effattn.checkpoints.slurm import record_job
from lit_effattn.settings.arguments import Arguments, File
from lit_effattn.settings.run_folder import Configuration, root_of, stated_root

FILE = yaml.safe_load("""
model:
  class_path: LanguageModel
  init_args:
    backbone:
      class_path: Transformer
      init_args:
        attention: [{class_path: lit_effattn.attention.LinearAttention, init_args: {chunk_size: 9}}, SoftmaxAttention]
        positions: auto
""")


def arguments(root: str, files: dict[str, Any], *flags: str) -> Arguments:
    """Flags and files, the last of which names the folder of the runs."""
    of_root = File("root.yaml", {"trainer": {"default_root_dir": root}})
    return Arguments(["fit", *flags], [*(File(f"{name}.yaml", content) for name, content in files.items()), of_root])


def test_the_folder_of_all_runs_is_the_default():
    assert stated_root(Arguments(["fit", "--name", "a"])) == Path("runs")
    assert stated_root(arguments("007", {}, "--trainer", "{default_root_dir: mine}")) == Path("mine")


def test_what_flags_swap_is_in_the_name():
    for flags, name in (
        ("", "a"),
        ("--model.backbone.attention ShawAttention", "a+ShawAttention"),
        ("--model.backbone.attention=my_module.MyAttention", "a+MyAttention"),
        ("--model.init_args.backbone.init_args.attention ShawAttention", "a+ShawAttention"),
        ("--model.backbone.attention.class_path ShawAttention", "a+ShawAttention"),
        ("--model.backbone.attention [LSHAttention,SoftmaxAttention]", "a+LSHAttention+SoftmaxAttention"),
        ("--model.backbone.attention ShawAttention --model.backbone.attention LSHAttention", "a+LSHAttention"),
        ("--model.backbone.attention [LinearAttention,SoftmaxAttention]", "a"),  # as in the file
        ("--model.backbone LSTM", "a+LSTM"),
        ("--model.backbone.cross_attention LinearCrossAttention", "a+LinearCrossAttention"),  # not in the file
        ("--model.backbone.attention ShawAttention --model.backbone.attention.window 9", "a+ShawAttention"),
        ("--model.backbone.d_model 64 --model.backbone.positions RotaryPositions", "a"),
        ("--model.backbone.attention [", "a"),  # jsonargparse reports it
    ):
        assert root_of(arguments("runs/a", {"a": FILE}, *flags.split())) == Path("runs", name)
        assert root_of(arguments("runs/a", {}, *flags.split())) == Path("runs/a")
        by_flag = ["--trainer.default_root_dir", "mine/a"]
        assert root_of(arguments("runs/a", {"a": FILE}, *flags.split(), *by_flag)) == Path("mine/a")


@pytest.mark.parametrize(
    ("root", "files", "folder"),
    [("runs/a", {"a": FILE}, "runs/mine"), ("runs/a", {}, "runs/a/mine"), ("runs", {"a": {}}, "runs/mine")],
)
def test_a_given_name_takes_the_place_of_the_configurations(root: str, files: dict[str, Any], folder: str):
    assert root_of(arguments(root, files, "--model.backbone", "LSTM", "--name", "mine")) == Path(folder)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "a b", "/a", ".hidden"])
def test_a_name_that_is_none_of_a_folder_is_refused(name: str):
    with pytest.raises(ValueError, match=r"--name .*: use letters"):
        root_of(arguments("runs", {}, f"--name={name}"))


def test_a_file_of_the_run_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def cut(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text[:3].encode())
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "write_text", cut)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    for write in (lambda: Configuration._write(tmp_path / "config.yaml", {}), lambda: record_job(tmp_path, ["fit"])):
        with pytest.raises(OSError, match="full"):
            write()
    assert [*tmp_path.iterdir()] == []
