"""Checkpoints that are folders: in place of those before, in every moment at which a process may be killed."""

import os
from pathlib import Path

import pytest

from lit_effattn.checkpoints import files as checkpoint_files
from lit_effattn.checkpoints.files import put, remove, remove_parts, unfinished
from lit_effattn.checkpoints.runs import COMMON


class KilledError(BaseException):
    """Stands for SIGKILL: nothing of the program runs after it."""


def folder(path: Path, number: int) -> Path:
    path.mkdir()
    (path / COMMON).write_text(str(number))
    (path / "part_00000.pt").write_text(str(number))
    return path


def number(path: Path) -> int | None:
    """The checkpoint that a name means, all of whose files must be there; None: there is none."""
    if not path.exists():
        return None
    if path.is_file():
        return int(path.read_text())
    assert {file.name for file in path.iterdir()} == {COMMON, "part_00000.pt"}
    return int((path / COMMON).read_text())


@pytest.mark.parametrize("name", ["last.ckpt", "best.ckpt"])
@pytest.mark.parametrize("kinds", [("folder", "folder"), ("file", "folder"), ("folder", "file")])
def test_killed_at_any_moment_the_newest_or_the_one_before_is_whole(
    name: str, kinds: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    names = [name, *(["previous.ckpt"] if name == "last.ckpt" else [])]
    for moment in range(20):
        root = tmp_path / str(moment)
        root.mkdir()

        def make(path: Path, n: int, kind: str) -> Path:
            if kind == "folder":
                return folder(path, n)
            path.write_text(str(n))
            return path

        put(make(unfinished(root / name), 1, kinds[0]), root / name)
        put(make(unfinished(root / name), 2, kinds[0]), root / name)
        left = [moment]

        def counted(real, left=left):
            def wrapped(*args, **options):
                left[0] -= 1
                if left[0] < 0:
                    raise KilledError
                return real(*args, **options)

            return wrapped

        with monkeypatch.context() as m:
            m.setattr(checkpoint_files.os, "getpid", lambda: 2**30)  # of a process that is not running
            part = make(unfinished(root / name), 3, kinds[1])
            for owner, call in ((Path, "replace"), (Path, "unlink"), (os, "link"), (os, "unlink"), (os, "rmdir")):
                m.setattr(owner, call, counted(getattr(owner, call)))
            try:
                put(part, root / name)
                done = True
            except KilledError:
                done = False
        remove_parts(root)
        result = [number(root / each) for each in names]
        assert max(n for n in result if n is not None) >= 2
        assert {path.name for path in root.iterdir()} <= set(names)
        if done:
            assert result == [3, 2][: len(names)]
            assert moment > 0
            return
    raise AssertionError("it did not end")


def test_a_name_that_an_error_left_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = folder(tmp_path / "best.ckpt", 1)
    part = folder(unfinished(path), 2)
    real = Path.replace

    def refuse(self: Path, target: Path) -> Path:
        if self == part:
            raise OSError("no")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        put(part, path)
    assert number(path) == 1


def test_what_a_killed_process_of_the_same_number_left_is_in_nobody_s_way(tmp_path: Path):
    """In a container the numbers begin anew."""
    for name in ("last.ckpt", "previous.ckpt", "best.ckpt"):
        folder(tmp_path / name, 1)
        folder(unfinished(tmp_path / name).with_suffix(".before"), 0)
    folder(unfinished(tmp_path / "previous.ckpt"), 0)
    for name in ("last.ckpt", "best.ckpt"):
        put(folder(unfinished(tmp_path / name), 2), tmp_path / name)
        assert number(tmp_path / name) == 2
    assert number(tmp_path / "previous.ckpt") == 1


def test_a_link_to_a_folder_is_removed_without_what_it_leads_to(tmp_path: Path):
    elsewhere = folder(tmp_path / "elsewhere", 1)
    link = tmp_path / "step_00000001.ckpt"
    link.symlink_to(elsewhere)
    remove(link)
    remove(tmp_path / "absent.ckpt")
    assert not link.is_symlink()
    assert number(elsewhere) == 1
