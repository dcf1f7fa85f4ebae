"""Shipped configurations: finding and parsing them."""

import os
from pathlib import Path

import pytest

from lit_effattn.cli.command import CLI
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.shipped import find_config, shipped


def test_a_file_of_the_users_own_comes_first_and_a_pipe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("digits_linear", "configs/digits_linear.yaml"):
        assert find_config(name) == str(shipped()["digits_linear"])
    Path("digits_linear.yaml").touch()
    assert find_config("digits_linear") == "digits_linear.yaml"
    with pytest.raises(ValueError, match=r"--config digits: there is no such file.*did you mean digits_"):
        find_config("digits")
    os.mkfifo("pipe.yaml")
    with pytest.raises(ValueError, match=r"--config pipe.yaml is a pipe, which can be read only once; write its"):
        find_config("pipe.yaml")


# Those of other data sets take a step, or are built, in tests/cli.
PARSED = ("cmudog_infinite", "retrieval_linear")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in PARSED else pytest.mark.exhaustive) for n in shipped()]
)
def test_every_configuration_is_parsed(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CLI, "instantiate_classes", lambda self: None)
    monkeypatch.setattr(CLI, "_run_subcommand", lambda *_: None)
    assert CLI(Arguments(["fit", "--config", name])).config.as_dict()["fit"]["model"]["class_path"]
