"""Archives of people's and of attackers' making."""

import stat
import zipfile
from pathlib import Path

import pytest

from lit_effattn.datamodules.common.archives import unpack_zip


def zipped(path: Path, members: dict[str, bytes], link: str | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
        if link is not None:
            info = zipfile.ZipInfo(link)
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            file.writestr(info, "/etc/passwd")
    return path


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_named_files_and_nothing_else(tmp_path: Path):
    """Wherever the archive says that they belong."""
    archive = zipped(tmp_path / "a", {"x/y/wiki": b"1" * 3_000_000, "../../text": b"2", "/evil": b"3"}, link="link")
    unpack_zip(archive, ["wiki", "text"], tmp_path / "there")
    assert files(tmp_path) == ["a", "there/text", "there/wiki"]
    assert (tmp_path / "there" / "wiki").read_bytes() == b"1" * 3_000_000


def test_what_is_refused_leaves_nothing(tmp_path: Path):
    archive, target = tmp_path / "a", tmp_path / "there"
    content = bytes(range(256)) * 500
    for members, link, words in (
        ({"wiki": b"1"}, "text", "text 0 times"),
        ({"a/wiki": b"1", "b/wiki": b"2", "text": b""}, None, "wiki 2 times"),
        ({"wiki": b"0" * 2**20, "text": b""}, None, "wiki is larger than 200,000 bytes"),
    ):
        zipped(archive, members, link)
        with pytest.raises(ValueError, match=f"{archive}: the archive is damaged .*{words}"):
            unpack_zip(archive, ["wiki", "text"], target, max_bytes=200_000)
    whole = zipped(archive, {"text": b"", "wiki": content}).read_bytes()
    for broken in (b"<html>", whole[:-30], whole[: len(whole) // 2], whole[:90] + bytes(20) + whole[110:]):
        archive.write_bytes(broken)
        with pytest.raises(ValueError, match=f"{archive}: the archive is damaged"):
            unpack_zip(archive, ["wiki"], target)
    assert not (target / "wiki").exists()
    assert not [name for name in files(tmp_path) if name.endswith(".unfinished")]


def test_zip_files_that_need_another_program(tmp_path: Path):
    archive = zipped(tmp_path / "a", {"wiki": b"1"})
    whole, central = archive.read_bytes(), archive.read_bytes().index(b"PK\1\2")
    for place, value, words in ((8, 1, "password required"), (10, 97, "compression method is not supported")):
        changed = bytearray(whole)
        changed[central + place] = value  # the flags, whose first bit means a password, and the method
        archive.write_bytes(changed)
        with pytest.raises(ValueError, match=rf"{archive}: the archive can't be unpacked \(.*{words}"):
            unpack_zip(archive, ["wiki"], tmp_path)
