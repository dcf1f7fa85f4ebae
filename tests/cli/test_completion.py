"""`lit-effattn completion`: bash completes with the script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_effattn.cli import main
from tests.support.commands import fails


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "script"
    with path.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        main(["completion", "bash"])
    return path


def test_bash_completes_commands_options_classes_and_names(script: Path, tmp_path: Path):
    """Each line is what is typed, and a word that must, or with `-` must not, be among what bash offers."""
    cases = {
        "lit-effattn fi": "fit",
        "lit-effattn fit --config digits_l": "digits_linear",
        "lit-effattn fit --model.backbone.attention Lin": "LinearAttention",
        "lit-effattn fit --config x --model.backbone.attention.n_h": "--model.backbone.attention.n_hashes",
        "lit-effattn fit --model.backbone.attention.d": "- --model.backbone.attention.d_model",
        "lit-effattn fit --model.optimizer Ad": "AdamW",
        "lit-effattn fit --trainer.max_s": "--trainer.max_steps",
        "lit-effattn fit --init": "--init_weights",
        "lit-effattn test --init": "- --init_weights",
        "lit-effattn test --ckpt_path b": "best",
        "lit-effattn data --data Spe": "SpeechData",
        "lit-effattn data --trainer": "- --trainer.max_steps",
        "lit-effattn data pre": "prepare",
        "lit-effattn data prepare in out --shard": "--shard_bytes",
        "lit-effattn data prepare in out --tokens b": "bpe",
        "lit-effattn generate --promp": "--prompt_file",
        "lit-effattn predict --data.audio my_": "my_recordings",
        "lit-effattn configs stdlib_x": "stdlib_xl",
        "lit-effattn kinds Linear": "LinearAttention",
        "lit-effattn exp": "export",
        "lit-effattn conv": "convert",
        "lit-effattn export --format on": "onnx",
        "lit-effattn export --trainer": "- --trainer.max_steps",
        "lit-effattn report --samp": "--samples",
        "lit-effattn sweep --config digits_l": "digits_linear",
        "lit-effattn sweep --trainer.max_s": "--trainer.max_steps",
        "lit-effattn sweep --see": "--seeds",
    }
    (tmp_path / "my_recordings").mkdir()
    asked = "\n".join(f"offer {typed}" for typed in cases)
    bash = f"""
        source {script}
        offer() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_lit_effattn; echo " ${{COMPREPLY[*]}} "; }}
        {asked}
        complete -p lit-effattn
    """
    done = subprocess.run(
        ["bash", "-c", bash], capture_output=True, text=True, check=True, cwd=tmp_path, env=os.environ
    )
    *offers, registered = done.stdout.splitlines()
    assert registered == "complete -o default -F _shtab_lit_effattn lit-effattn"  # and files, where nothing fits
    for (typed, word), offered in zip(cases.items(), offers, strict=True):
        assert (f" {word.removeprefix('- ')} " in offered) != word.startswith("- "), (typed, offered)


def test_what_it_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    main(["completion"])
    assert "usage: lit-effattn completion bash|zsh" in capsys.readouterr().out
    assert "no completion for 'cmd'; there is for bash and zsh" in fails(capsys, "completion", "cmd", code=2)
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install 'lit-effattn[completion]'" in fails(capsys, "completion", "bash", code=2)
