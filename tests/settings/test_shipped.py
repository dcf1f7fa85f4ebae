"""The shipped configurations."""

from pathlib import Path
from typing import Any

import pytest

from lit_effattn.cli.command import CLI
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.shipped import find_config, shipped


def parsed(monkeypatch: pytest.MonkeyPatch, *args: str) -> dict[str, Any]:
    monkeypatch.setattr(CLI, "instantiate_classes", lambda self: None)
    monkeypatch.setattr(CLI, "_run_subcommand", lambda *_: None)
    return CLI(Arguments(["fit", *args])).config.as_dict()["fit"]


def test_a_file_of_the_users_own_comes_before_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("configs/digits_linear.yaml") == str(shipped()["digits_linear"])  # from any folder
    Path("digits_linear.yaml").touch()
    assert find_config("digits_linear") == "digits_linear.yaml"


# Those of other data sets take a step, or are built, in tests/cli.
PARSED = ("cmudog_infinite", "retrieval_linear")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in PARSED else pytest.mark.exhaustive) for n in shipped()]
)
def test_every_configuration_is_parsed(name: str, monkeypatch: pytest.MonkeyPatch):
    assert parsed(monkeypatch, "--config", name)["model"]["class_path"]
