"""Shipped configurations, and those that a sibling with a flag has replaced."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_effattn.cli.command import CLI
from lit_effattn.settings.arguments import Arguments
from lit_effattn.settings.run_names import root_of
from lit_effattn.settings.shipped import REMOVED, find_config, shipped
from tests.support.commands import fails

ATTENTIONS: dict[str, Any] = {
    "copy_lsh1": ("LSHAttention", {"n_hashes": 1, "n_buckets": 4, "chunk_size": 16}),
    "copy_performer": ("PerformerAttention", {}),
    "copy_softmax": ("SoftmaxAttention", {}),
    "copy_sparse": ("SparseAttention", {"pattern": "strided", "stride": 8}),
    "digits_lsh": ("LSHAttention", {"n_hashes": 2, "n_buckets": 4, "chunk_size": 8}),
    "digits_shaw": ("ShawAttention", {}),
    "digits_sparse": ("SparseAttention", {"pattern": "strided", "stride": 8}),
    "espeak_lsh": ("LSHAttention", {"n_hashes": 2, "n_buckets": 8, "chunk_size": 32}),
    "espeak_softmax": ("SoftmaxAttention", {}),
    "fashion_softmax": ("SoftmaxAttention", {}),
    "librispeech_softmax": ("SoftmaxAttention", {}),
    "mnist_softmax": ("SoftmaxAttention", {}),
    "timit_softmax": ("SoftmaxAttention", {}),
    "wsj_lsh": ("LSHAttention", {"n_hashes": 4, "n_buckets": 32, "chunk_size": 32}),
    "wsj_softmax": ("SoftmaxAttention", {}),
}
"""The attention of each removed configuration, as its file had it; the rest of the file was the sibling's."""

SHORT = ("copy_lsh1", "digits_sparse")


def compared(monkeypatch: pytest.MonkeyPatch, *args: str) -> dict[str, Any]:
    """Return the settings of `fit` with these arguments, without the folder of runs; nothing is built."""
    settings = parsed(monkeypatch, *args)
    backbone = settings["model"]["init_args"]["backbone"]["init_args"]
    if isinstance(backbone["attention"], list):  # a list of one is that one in every layer
        (backbone["attention"],) = backbone["attention"]
    del settings["trainer"]["default_root_dir"]
    return {key: value for key, value in settings.items() if key != "config"}


def parsed(monkeypatch: pytest.MonkeyPatch, *args: str) -> dict[str, Any]:
    monkeypatch.setattr(CLI, "instantiate_classes", lambda self: None)
    monkeypatch.setattr(CLI, "_run_subcommand", lambda *_: None)
    return CLI(Arguments(["fit", *args])).config.as_dict()["fit"]


@pytest.mark.filterwarnings("ignore:LightningCLI's args")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else pytest.mark.exhaustive) for n in REMOVED])
def test_the_flags_give_the_settings_of_the_removed_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sibling, *flags = shlex.split(REMOVED[name])
    content = yaml.safe_load(shipped()[sibling].read_text(encoding="utf-8"))
    kind, options = ATTENTIONS[name]
    content["model"]["init_args"]["backbone"]["init_args"]["attention"] = {"class_path": kind, "init_args": options}
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    assert compared(monkeypatch, "--config", sibling, *flags) == compared(
        monkeypatch, "--config", str(tmp_path / f"{name}.yaml")
    )


def test_a_removed_configuration_names_its_replacement(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert ATTENTIONS.keys() == REMOVED.keys()
    assert not REMOVED.keys() & shipped().keys()
    for name in ("digits_shaw", "configs/digits_shaw.yaml"):
        line = fails(capsys, "fit", "--config", name)
        assert f"--config {name} is not shipped any more: use --config {REMOVED['digits_shaw']}; for its older" in line
        assert "runs, add --name digits_shaw\n" in line
    assert find_config("configs/digits_linear.yaml") == str(shipped()["digits_linear"])  # from any folder
    Path("digits_shaw.yaml").touch()  # a file of the user's own comes first
    assert find_config("digits_shaw") == "digits_shaw.yaml"


@pytest.mark.parametrize("name", REMOVED)
def test_the_older_runs_are_found_by_name_alone(name: str):
    arguments = ["fit", "--config", *shlex.split(REMOVED[name])]
    assert root_of(Arguments([*arguments, "--name", name])) == Path("runs", name)
    assert root_of(Arguments(arguments)) != Path("runs", name)


# Those of other data sets take a step, or are built, in tests/cli.
PARSED = ("cmudog_infinite", "retrieval_linear")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in PARSED else pytest.mark.exhaustive) for n in shipped()]
)
def test_every_configuration_is_parsed(name: str, monkeypatch: pytest.MonkeyPatch):
    assert parsed(monkeypatch, "--config", name)["model"]["class_path"]
