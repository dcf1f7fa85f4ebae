"""Reading of checkpoints that several processes have written. `test_sharding` writes them."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_effattn.checkpoints.files import DamagedError
from lit_effattn.checkpoints.folders import Divided, Parts, _write
from lit_effattn.checkpoints.io import read_checkpoint, read_outline
from tests.support.checkpoint_parts import divide

SIZES = (1, 2, 3, 5)
"""Numbers of processes, of which some have no rows."""


def checkpoint() -> dict[str, Any]:
    torch.manual_seed(0)
    weights = {"one": torch.randn(1, 3), "four": torch.randn(4).bfloat16(), "eleven": torch.randn(11, 2).double()}
    states = {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(7, 2)}}
    return {
        "state_dict": weights,
        "optimizer_states": [{"state": states, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "global_step": 3,
        "memory": None,
    }


OWN = {"memory": [None, (torch.ones(2), [3])]}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return divide(checkpoint(), tmp_path / "last.ckpt", 2, OWN)


def test_put_together_it_is_that_of_one_process(saved: Path):
    result, expected = read_checkpoint(saved), {**checkpoint(), **OWN}
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert [*result] == [*expected]
    assert result["state_dict"]["four"].dtype == torch.bfloat16


def test_any_number_of_processes_reads_its_rows(tmp_path: Path):
    for n in SIZES:
        whole = checkpoint()["state_dict"]
        parts = Parts(divide(checkpoint(), tmp_path / f"{n}.ckpt", n))
        result: dict[str, Divided] = parts.map(lambda divided: divided)["state_dict"]
        for name, t in whole.items():
            assert result[name].shape == t.shape
            for first in range(len(t) + 1):
                for last in range(first, len(t) + 1):
                    torch.testing.assert_close(result[name].rows(first, last), t[first:last], rtol=0, atol=0)


def test_the_outline_has_shapes_and_settings(saved: Path):
    result = read_outline(saved)
    assert result["global_step"] == 3
    assert {name: t.shape for name, t in result["state_dict"].items()} == {
        name: t.shape for name, t in checkpoint()["state_dict"].items()
    }


# ---------------------------------------------------------------------------------------------------------- bad folders


def flip(path: Path) -> None:
    """Change a number of a tensor."""
    content, number = path.read_bytes(), checkpoint()["state_dict"]["eleven"][-1, -1:].numpy().tobytes()
    assert content.count(number) == 1
    path.write_bytes(content.replace(number, bytes(8)))


def lead_elsewhere(path: Path) -> None:
    path.rename(path.parent.parent / "secret")
    path.symlink_to(Path("..", "secret"))


def change(path: Path, key: str, value: Any) -> None:
    """Change an entry of a part, whose length stays."""
    size = path.stat().st_size
    torch.save({**torch.load(path, weights_only=True), key: value}, path)
    common = torch.load(path.with_name("common.pt"), weights_only=True)
    common["parts"]["bytes"] = [path.stat().st_size if n == size else n for n in common["parts"]["bytes"]]
    torch.save(common, path.with_name("common.pt"))


def nested() -> list[Any]:
    tree: list[Any] = []
    for _ in range(2000):
        tree = [tree]
    return tree


def say(about: Any, deep: bool = False) -> Callable[[Path], None]:
    def changed(path: Path) -> None:
        common = torch.load(path.with_name("common.pt"), weights_only=True)
        parts = {**common["parts"], **about} if isinstance(about, dict) else about
        torch.save({**common, "parts": parts, **({"deep": nested()} if deep else {})}, path.with_name("common.pt"))

    return changed


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "part_00001.pt is missing"),
    "cut": (lambda path: os.truncate(path, 99), "part_00001.pt is damaged: it has 99 bytes, not"),
    "changed": (flip, "part_00001.pt is damaged: the checksum of .* is wrong"),
    "a link": (lead_elsewhere, "part_00001.pt is a link"),
    "of another save": (lambda p: change(p, "token", "u"), "part_00001.pt is of another checkpoint than .*common.pt"),
    "no rows": (lambda path: change(path, "rows", {}), "part_00001.pt is damaged: it lacks rows of .*four"),
    "other rows": (
        lambda path: change(path, "rows", {"['state_dict']['four']": torch.zeros(3).bfloat16()}),
        "part_00001.pt is damaged: it lacks rows of .*four",
    ),
    "other numbers": (
        lambda path: change(path, "rows", {"['state_dict']['four']": torch.zeros(2)}),
        "part_00001.pt is damaged: it lacks rows of .*four",
    ),
    "a number as rows": (
        lambda path: change(path, "rows", {"['state_dict']['four']": torch.zeros(()).bfloat16().expand(2)}),
        "part_00001.pt is damaged: it lacks rows of .*four",
    ),
    "deep": (
        lambda path: change(path, "own", {"memory": nested()}),
        "part_00001.pt can.t be read as a checkpoint: it is nested more",
    ),
    "deep in common": (say({}, deep=True), "common.pt can.t be read as a checkpoint: it is nested more"),
    "no own": (lambda path: change(path, "own", {}), "part_00001.pt is damaged: it has no memory"),
    "something else": (lambda path: change(path, "rows", 3), "part_00001.pt is not a part of a checkpoint"),
    "no parts": (say(None), "common.pt does not list the parts"),
    "names for sizes": (say({"bytes": ["../../secret"]}), "common.pt does not list the parts"),
    "no part": (say({"bytes": []}), "has no rows that parts could have"),
    "newer": (say({"format": 2}), "is of format 2: .* newer lit-effattn"),
}


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path):
    for number, (name, (spoil, message)) in enumerate(BAD.items()):
        folder = divide(checkpoint(), tmp_path / f"{number}.ckpt", 2, OWN)
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(10 * limit)  # else torch could not save what is nested
        spoil(folder / "part_00001.pt")
        sys.setrecursionlimit(limit)
        with pytest.raises(ValueError, match=message) as caught:
            read_checkpoint(folder)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, DamagedError) == (name != "newer")


def test_a_folder_without_what_is_common_is_no_checkpoint(saved: Path):
    (saved / "common.pt").unlink()
    for read in (read_checkpoint, read_outline):
        with pytest.raises(FileNotFoundError, match=re.escape(f"there is no checkpoint {saved}")):
            read(saved)


def test_a_machine_with_another_file_system_says_so(tmp_path: Path):
    with pytest.raises(OSError, match=r"last\.ckpt could not be written: .*part_00001.pt .* the same file system"):
        _write({}, tmp_path / ".last.ckpt.1.part" / "part_00001.pt", tmp_path / "last.ckpt")
