"""Archives of people's and of attackers' making."""

import gzip
import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from lit_effattn.datamodules.common.archives import unpack_gzip, unpack_tar, unpack_zip


def zipped(path: Path, members: dict[str, bytes], link: str | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
        if link is not None:
            info = zipfile.ZipInfo(link)
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            file.writestr(info, "/etc/passwd")
    return path


def tarred(path: Path, members: dict[str, bytes], link: str | None = None) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link is not None:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(info)
    return path


UNPACK = pytest.mark.parametrize(("pack", "unpack"), [(zipped, unpack_zip), (tarred, unpack_tar)], ids=["zip", "tar"])


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@UNPACK
def test_the_named_files_and_nothing_else(pack, unpack, tmp_path: Path):
    """Wherever the archive says that they belong."""
    archive = pack(tmp_path / "a", {"x/y/wiki": b"1" * 3_000_000, "../../text": b"2", "/evil": b"3"}, link="link")
    unpack(archive, ["wiki", "text"], tmp_path / "there")
    assert files(tmp_path) == ["a", "there/text", "there/wiki"]
    assert (tmp_path / "there" / "wiki").read_bytes() == b"1" * 3_000_000


@UNPACK
def test_what_is_refused_leaves_nothing(pack, unpack, tmp_path: Path):
    archive, target = tmp_path / "a", tmp_path / "there"
    content = bytes(range(256)) * 500
    for members, link, words in (
        ({"wiki": b"1"}, "text", "text 0 times"),
        ({"a/wiki": b"1", "b/wiki": b"2", "text": b""}, None, "wiki 2 times"),
        ({"wiki": b"0" * 2**20, "text": b""}, None, "wiki is larger than 200,000 bytes"),
    ):
        pack(archive, members, link)
        with pytest.raises(ValueError, match=f"{archive}: the archive is damaged .*{words}"):
            unpack(archive, ["wiki", "text"], target, max_bytes=200_000)
    whole = pack(archive, {"text": b"", "wiki": content}).read_bytes()
    for broken in (b"<html>", whole[:-30], whole[: len(whole) // 2], whole[:90] + bytes(20) + whole[110:]):
        archive.write_bytes(broken)
        with pytest.raises(ValueError, match=f"{archive}: the archive is damaged"):
            unpack(archive, ["wiki"], target)
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


def test_gzip(tmp_path: Path):
    archive, target = tmp_path / "a.gz", tmp_path / "there" / "a"
    content = bytes(range(256)) * 500
    whole = gzip.compress(content)
    for broken in (b"<html>", whole[:-4], whole[:100], whole[:60] + bytes(20) + whole[80:], whole[:-8] + bytes(8)):
        archive.write_bytes(broken)
        with pytest.raises(ValueError, match=f"{archive}: the archive is damaged"):
            unpack_gzip(archive, target)
    archive.write_bytes(whole)
    with pytest.raises(ValueError, match="a is larger than 100 bytes"):
        unpack_gzip(archive, target, max_bytes=100)
    assert files(tmp_path) == ["a.gz"]
    unpack_gzip(archive, target)
    assert target.read_bytes() == content
    assert target.stat().st_mode & 0o777 == 0o644
