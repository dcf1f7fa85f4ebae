"""Bits per dimension and per byte of general compressors on the images or the text that models are tested on."""

from __future__ import annotations

import argparse
import bz2
import gzip
import io
import lzma
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from benchmarks.experiments.recl import read_documents
from benchmarks.measuring import Spread
from benchmarks.report import Report, Row
from lit_effattn.datamodules import PixelSequences

CODERS: dict[str, dict[str, Any]] = {
    "PNG": {"format": "PNG", "optimize": True},
    "WebP, lossless": {"format": "WEBP", "lossless": True, "quality": 100, "method": 6},
}
IMAGES, TEXTS = ("photos", "digits", "fashion_mnist"), ("stdlib",)


class Compressor(NamedTuple):
    """A compressor of bytes."""

    compress: Callable[[bytes], bytes]
    decompress: Callable[[bytes], bytes]


COMPRESSORS = {
    "gzip -9": Compressor(partial(gzip.compress, compresslevel=9), gzip.decompress),
    "bzip2 -9": Compressor(partial(bz2.compress, compresslevel=9), bz2.decompress),
    "xz -9": Compressor(partial(lzma.compress, preset=9), lzma.decompress),
}
NOTES = [
    "Images: the test split of `PixelSequences`. bits/dim: 8 · bytes / (H W C), or the mean of −log2 p. Per image: "
    "median (min–max) over its images.",
    "a file each: headers are included, a large share of such small images. One grid: all images side by side in one "
    "file, in shuffled order, so that a coder gains nothing from neighbours that a model does not see; the seams cost "
    "a little.",
    "Digits are coded as 8-bit grey, their 17 levels spread over 0 … 255.",
    "Text: the test split of `TextStream`, its files end to end and compressed as one. bits/byte: 8 · bytes / bytes of "
    "the text.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "default: %(default)s"
    parser.add_argument("--datasets", nargs="+", choices=IMAGES + TEXTS, default=list(IMAGES[:2]), help=about)


def run(args: argparse.Namespace) -> Report:
    rows: list[Row] = []
    for name in args.datasets:
        if name in TEXTS:
            rows += _compressors(name, _text(name))
            continue
        data = PixelSequences(name)
        data.prepare_data()
        data.setup("test")
        rows += _coders(name, data)
    columns = dict.fromkeys(column for row in rows for column in row)  # images and text share one table
    return Report("compression", [{column: row.get(column, "—") for column in columns} for row in rows], NOTES)


def encode(image: Tensor, options: dict[str, Any]) -> bytes:
    """Encode an image (C, H, W) of uint8 with Pillow.

    Raises:
        RuntimeError: If decoding gives another image.
    """
    pixels = image.permute(1, 2, 0).numpy()  # (C, H, W) -> (H, W, C)
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    file = io.BytesIO()
    picture.save(file, **options)
    if not np.array_equal(np.asarray(Image.open(file).convert(picture.mode)), np.asarray(picture)):
        raise RuntimeError(f"Pillow's {options} did not keep the image: its bytes can't be compared")
    return file.getvalue()


def grid(images: Tensor) -> Tensor:
    """Arrange images in a full grid, in shuffled order: (n, C, H, W) -> (C, rows · H, columns · W)."""
    n = len(images)
    rows = max(r for r in range(1, math.isqrt(n) + 1) if n % r == 0)
    images = images[torch.randperm(n, generator=torch.Generator().manual_seed(0))]
    # (rows, columns, C, H, W) -> (C, rows, H, columns, W)
    return images.unflatten(0, (rows, n // rows)).permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2)


def _coders(name: str, data: PixelSequences) -> list[Row]:
    levels = data.splits["test"]
    images = data.to_images(levels[list(range(len(levels)))])  # (n, C, H, W)
    sizes = {f"{coder}, a file each": [len(encode(i, options)) for i in images] for coder, options in CODERS.items()}
    sizes |= {f"{coder}, one grid": [len(encode(grid(images), options))] for coder, options in CODERS.items()}
    rows: list[Row] = []
    for coder, n_bytes in sizes.items():
        mean = 8 * sum(n_bytes) / images.numel()  # bits/dim
        each = Spread(tuple(8 * size / images[0].numel() for size in n_bytes))
        rows.append(
            {
                "data": f"{name}, {len(images)} images",
                "coder": coder,
                "bytes": sum(n_bytes),
                "bits/dim": mean,
                "per image": each if len(n_bytes) > 1 else "—",
                "÷ uniform": mean / math.log2(data.n_levels),
            }
        )
    return rows


def compressed_size(text: bytes, compressor: Compressor) -> int:
    """Return the number of bytes of `text` after compression.

    Raises:
        RuntimeError: If decompression gives another text.
    """
    file = compressor.compress(text)
    if compressor.decompress(file) != text:
        raise RuntimeError(f"{compressor.compress} did not keep the text: its bytes can't be compared")
    return len(file)


def _text(source: str) -> bytes:
    """Return the test text whose bytes a `TextStream` scores."""
    return torch.cat(read_documents({"source": source})).to(torch.uint8).numpy().tobytes()


def _compressors(name: str, text: bytes) -> list[Row]:
    sizes = {coder: compressed_size(text, compressor) for coder, compressor in COMPRESSORS.items()}
    return [
        {
            "data": f"{name}, {len(text):,} bytes",
            "coder": coder,
            "bytes": size,
            "bits/byte": 8 * size / len(text),
            "÷ uniform": size / len(text),
        }
        for coder, size in sizes.items()
    ]
