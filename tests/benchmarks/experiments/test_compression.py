import gzip
import lzma
import math

import pytest
import torch
from PIL import Image

from benchmarks.experiments import compression
from benchmarks.experiments.compression import (
    Compressor,
    _coders,
    _text,
    compressed_size,
    encode,
    grid,
)
from lit_effattn.datamodules import PixelSequences, TextStream
from lit_effattn.datamodules.images.pixels import ImageArray

SAVED = {
    "PNG": (".png", {"optimize": True}),
    "WebP, lossless": (".webp", {"lossless": True, "quality": 100, "method": 6}),
}


@pytest.fixture
def six_images():
    """Six grey images of 8×8 at 17 levels, in place of the digits."""
    data = PixelSequences("digits")
    images = torch.randint(0, 17, (6, 8, 8, 1), dtype=torch.uint8)
    images[0] = 3
    data.splits = {"test": ImageArray(images, 17, 17)}
    return data, images


@pytest.mark.parametrize("coder", SAVED)
def test_bytes_are_those_of_files(coder, six_images, tmp_path):
    data, images = six_images
    suffix, options = SAVED[coder]
    row = {row["coder"]: row for row in _coders("digits", data)}[f"{coder}, a file each"]

    sizes = []
    for i, image in enumerate(images[..., 0]):
        grey = Image.new("L", (8, 8))
        grey.putdata([int(255 * int(level) / 16 + 0.5) for level in image.flatten()])
        path = tmp_path / f"{i}{suffix}"
        grey.save(path, **options)
        sizes.append(path.stat().st_size)

    assert row["bytes"] == sum(sizes)
    assert row["bits/dim"] == pytest.approx(8 * sum(sizes) / (6 * 64))
    assert row["per image"].samples == pytest.approx([8 * size / 64 for size in sizes])
    assert row["÷ uniform"] == pytest.approx(row["bits/dim"] / math.log2(17))


@pytest.mark.parametrize("coder", SAVED)
def test_grid_is_counted_once(coder, six_images):
    data, _ = six_images
    rows = {row["coder"]: row for row in _coders("digits", data)}
    row = rows[f"{coder}, one grid"]
    assert row["bytes"] < rows[f"{coder}, a file each"]["bytes"]
    assert row["bits/dim"] == pytest.approx(8 * row["bytes"] / (6 * 64))


def test_grid_holds_every_image_once():
    images = torch.randint(0, 256, (6, 3, 4, 5), dtype=torch.uint8)
    laid = grid(images)
    assert laid.shape == (3, 2 * 4, 3 * 5)
    tiles = [laid[:, r : r + 4, c : c + 5] for r in (0, 4) for c in (0, 5, 10)]
    assert sorted(t.flatten().tolist() for t in tiles) == sorted(i.flatten().tolist() for i in images)


def test_coder_that_loses_something_is_refused():
    with pytest.raises(RuntimeError, match="did not keep the image"):
        encode(torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8), {"format": "JPEG"})


# Text

FILES = {"gzip -9": gzip.GzipFile, "xz -9": lzma.LZMAFile}


@pytest.mark.parametrize("coder", ["gzip -9", "xz -9"])
def test_text_is_what_is_scored_and_bytes_are_those_of_a_file(coder, tmp_path):
    (row,) = [row for row in compression._compressors("stdlib", _text("stdlib")) if row["coder"] == coder]
    data = TextStream()
    data.prepare_data()
    text = bytes(data._store.shard("test").tokens)
    options = {"preset": 9} if coder == "xz -9" else {"compresslevel": 9}
    path = tmp_path / "file"
    with FILES[coder](path, "w", **options) as file:
        file.write(text)
    named = len("file") + 1 if coder == "gzip -9" else 0  # gzip's files hold their name
    assert row["bytes"] == path.stat().st_size - named
    assert row["bits/byte"] == pytest.approx(8 * row["bytes"] / data.n_scored["test"])


def test_compressor_that_loses_something_is_refused():
    with pytest.raises(RuntimeError, match="did not keep the text"):
        compressed_size(b"text", Compressor(bytes.upper, bytes))
