"""Files of others: only regular ones are opened, images only in known formats."""

import bz2
import gzip
import io
import os
import socket
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_effattn.analysis.records import read_run
from lit_effattn.datamodules.common.files import (
    IMAGE_FORMATS,
    open_image,
    open_utf8,
    read_text,
    regular,
    unpack_zip,
    walk,
)
from lit_effattn.datamodules.images.sources import EXTENSIONS, verify_images

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(pwned) (w) file closefile\nshowpage\n%%EOF\n"


def test_a_walk_follows_links_once_and_says_what_it_leaves_out(tmp_path: Path):
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for folder in (root / "a" / "frames.txt", root / ".ipynb_checkpoints", elsewhere / "deep"):
        folder.mkdir(parents=True)
    for name in ("a/1.TXT", "a/frames.txt/2.txt", "a/._1.txt", ".ipynb_checkpoints/3.txt", "a/4.csv", "a/README"):
        (root / name).write_text("x")
    (elsewhere / "deep" / "5.txt").write_text("x")
    (root / "linked.txt").symlink_to(root / "a" / "1.TXT")
    (root / "b").symlink_to(elsewhere)
    (root / "0").symlink_to(root / "a")  # sorts before the folder itself, which keeps its name
    (elsewhere / "deep" / "cycle").symlink_to(root)
    (root / "nothing.txt").symlink_to("none")
    (root / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    os.mkfifo(root / "fifo.txt")
    walked = walk(root, (".txt",))
    names = [path.relative_to(root).as_posix() for path in walked.files]
    assert names == ["a/1.TXT", "a/frames.txt/2.txt", "b/deep/5.txt", "linked.txt"]
    left_out = {
        reason: sorted(str(path.relative_to(root)) for path in paths) for reason, paths in walked.left_out.items()
    }
    assert left_out == {
        "hidden": [".ipynb_checkpoints", "a/._1.txt"],
        "linked to a folder that is read under another name": ["0", "b/deep/cycle"],
        "neither file nor folder": ["fifo.txt", "nothing.txt"],
        "with a name that is not UTF-8 (rename it)": [os.fsdecode(b"caf\xe9.txt")],
        "ending in .csv": ["a/4.csv"],
        "without a suffix": ["a/README"],
    }
    assert len(walked.faults) == 9
    assert "caf\\xe9.txt" in str(walked.faults)
    assert len(walk(root).files) == len(names) + 2
    assert walk(elsewhere / "deep" / "cycle", (".csv",)).files == [elsewhere / "deep" / "cycle" / "a" / "4.csv"]


def test_text_is_recognised_by_its_first_bytes(tmp_path: Path):
    text = "é\u2028a\tb\r\nc\x0cd\n"  # only \n ends a line
    for encoding in ("utf-8", "utf-8-sig"):
        for compressed in (False, True):
            data = text.encode(encoding)
            path = tmp_path / f"{encoding}{compressed}.txt"
            path.write_bytes(gzip.compress(data) if compressed else data)
            assert read_text(path) == text
            with open_utf8(path) as file:
                assert list(file) == [line.encode() + b"\n" for line in text.split("\n")[:-1]]
            with open_utf8(path) as file:
                assert b"".join(iter(lambda: file.read(3), b"")) == text.encode()
    (tmp_path / "empty.txt").touch()
    assert read_text(tmp_path / "empty.txt") == ""


def test_what_is_not_text_is_refused_with_its_name(tmp_path: Path):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped:
        zipped.writestr("a.txt", "a")
    packed = gzip.compress(os.urandom(10_000).hex().encode())
    for data, message in (
        (archive.getvalue(), "a zip archive"),
        (gzip.compress(archive.getvalue()), "a zip archive"),
        ("ab".encode("utf-16-le"), "UTF-16 without a byte-order mark"),
        (b"%PDF-1.7", "a PDF"),
        (bz2.compress(b"a text"), "a bzip2 archive"),
        (b"caf\xe9", "not utf-8.*byte 3"),
        *(("ab".encode(encoding), "UTF-16 or UTF-32") for encoding in ("utf-16", "utf-32")),
        (b"\xfe\xff\0a", "UTF-16 or UTF-32"),
        (packed[:-9], "damaged"),
        (b"\x1f\x8b\x08\x00 no gzip", "damaged"),
        (packed[:5000] + bytes(5) + packed[5005:], "damaged"),
    ):
        path = tmp_path / "x.txt"
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"x\.txt: .*{message}") as raised:
            read_text(path)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["x.png", "x.jpg"])
def test_no_program_is_started_for_an_image(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail(f"started {args}"))
    path = tmp_path / name
    path.write_bytes(EPS)
    with pytest.raises(ValueError, match="none of the formats BMP, GIF, JPEG"):
        verify_images([path], 3)
    with pytest.raises(OSError, match="none of the formats"), open_image(path):
        pass


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_every_extension_has_a_decoder(extension: str, tmp_path: Path):
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    Image.fromarray(pixels).save(tmp_path / f"x{extension}")
    with open_image(tmp_path / f"x{extension}") as image:
        assert image.format in IMAGE_FORMATS
        assert image.size == (2, 2)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    os.mkfifo("fifo")
    Path("folder").mkdir()
    Path("link").symlink_to("fifo")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("socket")
        for name, kind in (
            ("fifo", "a FIFO"),
            ("link", "a FIFO"),
            ("folder", "a folder"),
            ("socket", "a socket"),
            ("/dev/zero", "a device"),
        ):
            with pytest.raises(ValueError, match=f"this is {kind}, not a file"):
                regular(Path(name))
    with pytest.raises(FileNotFoundError, match="no such file"):
        regular(Path("none"))
    Path("a.txt").touch()
    assert regular(Path("a.txt")) == Path("a.txt")
    Path("fifo").rename("x.png")
    with pytest.raises(ValueError, match="a FIFO"):
        verify_images([Path("x.png")], 3)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_log_that_is_a_fifo(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("model: x")
    (tmp_path / "csv" / "version_0").mkdir(parents=True)
    os.mkfifo(tmp_path / "csv" / "version_0" / "metrics.csv")
    with pytest.raises(ValueError, match=r"metrics\.csv is not a file"):
        read_run(tmp_path)


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_named_files_and_nothing_else(tmp_path: Path):
    """Wherever the archive says that they belong."""
    archive = zipped(tmp_path / "a", {"x/y/wiki": b"1" * 3_000_000, "../../text": b"2", "/evil": b"3"})
    unpack_zip(archive, ["wiki", "text"], tmp_path / "there")
    assert files(tmp_path) == ["a", "there/text", "there/wiki"]
    assert (tmp_path / "there" / "wiki").read_bytes() == b"1" * 3_000_000


def test_what_is_refused_leaves_nothing(tmp_path: Path):
    archive, target = tmp_path / "a", tmp_path / "there"
    content = bytes(range(256)) * 500
    for members, words in (
        ({"wiki": b"1"}, "it lacks text"),
        ({"wiki": b"0" * 2**20, "text": b""}, "wiki is larger than 200,000 bytes"),
    ):
        zipped(archive, members)
        with pytest.raises(ValueError, match=f"{archive}: can't be unpacked .*{words}"):
            unpack_zip(archive, ["wiki", "text"], target, max_bytes=200_000)
    whole = zipped(archive, {"text": b"", "wiki": content}).read_bytes()
    for broken in (b"<html>", whole[:-30], whole[: len(whole) // 2], whole[:90] + bytes(20) + whole[110:]):
        archive.write_bytes(broken)
        with pytest.raises(ValueError, match=f"{archive}: can't be unpacked"):
            unpack_zip(archive, ["wiki"], target)
    assert files(tmp_path) == ["a"]


def test_a_name_that_an_archive_has_twice_is_refused(tmp_path: Path):
    archive = zipped(tmp_path / "a", {"old/wiki": b"1", "new/wiki": b"2", "text": b"3"})
    with pytest.raises(ValueError, match=rf"{archive}: can't be unpacked \(it has 2 files of the name wiki\)"):
        unpack_zip(archive, ["text", "wiki"], tmp_path / "there")
    unpack_zip(archive, ["text"], tmp_path / "there")
    assert files(tmp_path) == ["a", "there/text"]


def test_zip_files_that_need_another_program(tmp_path: Path):
    archive = zipped(tmp_path / "a", {"wiki": b"1"})
    whole, central = archive.read_bytes(), archive.read_bytes().index(b"PK\1\2")
    for place, value, words in ((8, 1, "password required"), (10, 97, "compression method is not supported")):
        changed = bytearray(whole)
        changed[central + place] = value  # the flags, whose first bit means a password, and the method
        archive.write_bytes(changed)
        with pytest.raises(ValueError, match=rf"{archive}: can't be unpacked \(.*{words}"):
            unpack_zip(archive, ["wiki"], tmp_path)
