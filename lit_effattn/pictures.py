"""Pictures of images: grids, and rows with a name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

MIN_SIDE = 48
"""Smaller images are enlarged, pixel by pixel, to at least this many pixels."""


def grid(images: Tensor, columns: int | None = None) -> Tensor:
    """Lay (n, C, H, W) uint8 out in a grid, (C, height, width), nearly square unless `columns` says otherwise."""
    from torchvision.utils import make_grid  # slow to import, and not every run draws

    scale = max(1, math.ceil(MIN_SIDE / images.size(2)))
    images = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    return make_grid(images, nrow=columns or math.ceil(math.sqrt(len(images))), padding=4, pad_value=64)


def save_png(picture: Tensor, path: Path) -> Path:
    """Write (C, height, width) uint8 as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _to_pil(picture).save(path)
    return path


def labelled_rows(rows: dict[str, Tensor], path: Path) -> Path:
    """Write rows of (n, C, H, W) uint8 images as PNG, each with its name before it."""
    from PIL import Image, ImageDraw

    strips = [grid(images, columns=len(images)) for images in rows.values()]
    margin = 80
    height, width = strips[0].shape[1:]
    sheet = Image.new("RGB", (margin + width, height * len(strips)), (64, 64, 64))
    draw = ImageDraw.Draw(sheet)
    for i, (name, strip) in enumerate(zip(rows, strips, strict=True)):
        sheet.paste(_to_pil(strip), (margin, i * height))
        draw.text((8, i * height + height // 2 - 6), name, fill=(255, 255, 255))
    sheet.save(path)
    return path


def _to_pil(picture: Tensor) -> Image.Image:
    from PIL import Image

    return Image.fromarray(picture.to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy())
