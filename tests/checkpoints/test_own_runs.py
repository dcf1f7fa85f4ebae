"""Which configurations this account wrote."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from lit_effattn.checkpoints.own_runs import config_file, marked, own_classes, own_config

TEXT = "model:\n  class_path: collections.OrderedDict\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = tmp_path / "2026-01-01_00-00-00"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(marked(TEXT))
    return run


def config_of(run: Path) -> object:
    return own_config(run / "checkpoints" / "last.ckpt")


def test_a_run_of_this_account_can_be_moved_and_one_of_another_is_a_strangers(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert config_of(run) == {"model": {"class_path": "collections.OrderedDict"}}
    assert [kind.__name__ for kind in own_classes(run / "checkpoints" / "last.ckpt")] == ["OrderedDict"]
    moved = tmp_path / "moved" / run.name
    shutil.copytree(run, moved)
    assert config_of(moved) == config_of(run)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    assert config_of(run) is None
    assert own_classes(run / "checkpoints" / "last.ckpt") == []
    marked(TEXT)  # another key changes nothing
    assert config_of(run) is None


def test_nothing_that_a_folder_can_hold_makes_it_ones_own(run: Path, tmp_path: Path):
    written = (run / "config.yaml").read_text()
    mark, _, body = written.partition("\n")
    key = (tmp_path / "state" / "lit-effattn" / "key").read_bytes()
    for text in (
        f"{written}# more\n",
        f"{mark}\n{body.replace('OrderedDict', 'Counter')}",
        f"{mark.upper()}\n{body}",
        f"# written by this account: \n{body}",
        f"# written by this account: é\n{body}",
        body,
        f"{mark}\n\n{body}",
        "",
    ):
        (run / "config.yaml").write_text(text)
        assert config_of(run) is None, text
    (run / "lit-effattn").mkdir()
    (run / "lit-effattn" / "key").write_bytes(key)
    assert config_of(run) is None
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")
    assert config_of(run) is None


def test_the_newest_configuration_counts(run: Path):
    for n in (2, 10, 9):
        (run / f"config_resumed_{n}.yaml").write_text(marked(f"n: {n}\n"))
    assert config_file(run) == run / "config_resumed_10.yaml"
    assert config_of(run) == {"n": 10}
    (run / "config_resumed_11.yaml").write_text("n: 11\n")
    assert config_of(run) is None


def test_the_key_is_private(run: Path, tmp_path: Path):
    file = tmp_path / "state" / "lit-effattn" / "key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(file.parent.iterdir()) == [file]
    file.chmod(0o644)  # others may know it
    assert config_of(run) is None


def test_without_a_key_a_warning_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "state").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.warns(UserWarning, match="other commands will not know this run as yours: give them --config"):
        assert marked(TEXT) == TEXT
