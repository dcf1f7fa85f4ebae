"""Files of others: only regular ones are opened, images only in known formats."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_effattn.analysis.records import read_run
from lit_effattn.datamodules.common.files import IMAGE_FORMATS, open_image, regular
from lit_effattn.datamodules.images.sources import EXTENSIONS, verify_images

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(pwned) (w) file closefile\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("name", ["x.png", "x.jpg"])
def test_no_program_is_started_for_an_image(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("subprocess.Popen", lambda *args, **kwargs: pytest.fail(f"started {args}"))
    path = tmp_path / name
    path.write_bytes(EPS)
    with pytest.raises(ValueError, match="none of the formats BMP, GIF, JPEG"):
        verify_images([path])
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
        verify_images([Path("x.png")])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
def test_a_log_that_is_a_fifo(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("model: x")
    (tmp_path / "csv" / "version_0").mkdir(parents=True)
    os.mkfifo(tmp_path / "csv" / "version_0" / "metrics.csv")
    with pytest.raises(ValueError, match="a FIFO"):
        read_run(tmp_path)
