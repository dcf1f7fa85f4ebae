"""Help: of a command, and of one class without a configuration."""

import re
import shlex
from contextlib import suppress

import pytest

from lit_effattn.cli import main
from tests.support.commands import fails


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    with suppress(SystemExit):
        main(list(args))
    return capsys.readouterr().out


def test_no_arguments_name_three_commands_that_exist(capsys: pytest.CaptureFixture[str]):
    """A script whose arguments are empty has not succeeded, so the exit code is that of invalid arguments."""
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) < 10
    shown_commands = [shlex.split(line, comments=True) for line in re.findall(r"^  (.+)$", output.err, re.MULTILINE)]
    assert len(shown_commands) == 3
    for program, command, *flags in shown_commands:
        assert program == "lit-effattn"
        help_text = shown(capsys, command, "--help", "all", "--config", "digits_linear")
        assert all(flag in help_text for flag in flags if flag.startswith("--"))


def test_help_begins_with_ours_and_all_of_it_has_the_trainer(capsys: pytest.CaptureFixture[str]):
    short, whole = shown(capsys, "fit", "--help"), shown(capsys, "fit", "-h", "all")
    for text in (short, whole):
        places = [
            text.index(f"\n  --{option}") for option in ("init_weights", "model", "data", "checkpoint", "ckpt_path")
        ]
        assert places == sorted(places)
    assert "--help all" in short
    assert "--trainer." not in short.replace("such as --trainer.max_epochs", "")
    assert whole.index("\n  --trainer.max_epochs ") > whole.index("\n  --ckpt_path ")


@pytest.mark.parametrize(
    ("args", "option"),
    [
        (["fit", "--model.help", "PixelModel"], "--model.score_first"),
        (["fit", "--data.help=PixelSequences"], "--data.dataset"),
        (["fit", "--model.backbone.help", "Transformer"], "--model.backbone.n_layers"),
        (["fit", "--model.backbone.help", "Transformer", "--config", "digits_linear"], "--model.backbone.n_layers"),
        (["test", "--model.backbone.attention.help", "LSHAttention"], "--model.backbone.attention.n_hashes"),
        (["fit", "--model.optimizer.help", "AdamW"], "--model.optimizer.weight_decay"),
        (["fit", "--model.init_args.lr_scheduler.help", "WarmupCosine"], "--model.lr_scheduler.warmup_steps"),
    ],
)
def test_a_classs_options_are_shown_in_every_place(args: list[str], option: str, capsys: pytest.CaptureFixture[str]):
    text = shown(capsys, *args)
    assert f"\n  {option} " in text
    assert text.count(option) == 1  # no usage line
    assert "attention.d_model" not in text  # the Transformer gives it
    assert "--trainer" not in text


def test_help_without_a_class_lists_them(capsys: pytest.CaptureFixture[str]):
    text = shown(capsys, "fit", "--model.backbone.help")
    assert text.startswith("--model.backbone is one of ")
    assert {"LSTM", "Transformer"} <= set(text.splitlines()[0].rstrip(".").replace("of ", ", ").split(", "))
    assert "did you mean Transformer?" in fails(capsys, "fit", "--model.backbone.help", "Transfromer")


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict", "generate"])
def test_the_checkpoint_of_a_command_is_ours(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    output = " ".join(capsys.readouterr().out.split())
    checkpoint = "The checkpoint: its path, or `last` or `best` of the newest run"
    assert f"--ckpt_path CKPT_PATH {checkpoint}" in output
    assert ("Training resumes from it" in output) == (command == "fit")
    assert ("Or `model:NAME`" in output) == (command != "fit")
    assert "hpc" not in output
