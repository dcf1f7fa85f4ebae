"""Pictures: grids of images, labelled rows of images, and recognised utterances."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image, ImageFont

MIN_SIDE = 48
"""Smaller images are enlarged, pixel by pixel, to at least this many pixels."""

TICK = 0.5
"""Seconds between two ticks of a time axis."""


def grid(images: Tensor, columns: int | None = None) -> Tensor:
    """Arrange (n, C, H, W) uint8 in a grid, (C, height, width), nearly square unless `columns` is given."""
    from torchvision.utils import make_grid  # slow to import, and not used by every run

    scale = max(1, math.ceil(MIN_SIDE / images.size(2)))
    images = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    return make_grid(images, nrow=columns or math.ceil(math.sqrt(len(images))), padding=4, pad_value=64)


def save_png(picture: Tensor, path: Path) -> Path:
    """Write (C, height, width) uint8 as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _to_pil(picture).save(path)
    return path


def labelled_rows(rows: dict[str, Tensor], path: Path) -> Path:
    """Write rows of (n, C, H, W) uint8 images as PNG, each with its name on the left."""
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


def recognised(
    features: Tensor,
    probabilities: Tensor,
    names: list[str],
    path: Path,
    *,
    factor: int = 1,
    frame_seconds: float = 0.01,
) -> Path:
    """Write a PNG of an utterance's filterbank and, below it on the same time axis, each label's probability.

    Args:
        features: (T, F), the lowest frequency first; the loudest is white.
        probabilities: (T', V), of the labels in each frame; 1 is white.
        names: V names of the labels. Letters of the phonetic alphabet need the font DejaVu Sans, which many systems and
            matplotlib (the extra `bench`) have.
        path: File to write.
        factor: Feature vectors per frame.
        frame_seconds: Seconds from one feature vector to the next.
    """
    from PIL import Image, ImageDraw

    row, left, below, above = 12, 56, 20, 4  # pixels
    across = max(1, min(4, 1600 // len(features)))
    sound = _stretched(_brightness(features).T.flip(0), max(1, 160 // features.size(1)), across)  # (F·k, T·across)
    labels = _stretched(255 * probabilities.T, row, across * factor)[:, : sound.size(1)]
    height, width = len(sound), sound.size(1)
    sheet = Image.new("RGB", (left + width + row, above + height + below + len(labels)), (64, 64, 64))
    draw = ImageDraw.Draw(sheet)
    font = _phonetic_font()
    for top, panel in ((above, sound), (above + height + below, labels)):
        sheet.paste(_to_pil(panel.expand(3, -1, -1)), (left, top))
    for i, name in enumerate(names):
        # Pillow's default font has no letters of the phonetic alphabet: the label's number replaces such a name.
        shown = name if font is not None or name.isascii() else f"label {i}"
        draw.text((4, above + height + below + row * i), shown, fill=(255, 255, 255), font=font)
    pixels_per_tick = across * TICK / frame_seconds
    for i in range(int(width / pixels_per_tick) + 1):
        x = left + round(i * pixels_per_tick)
        draw.line((x, above + height, x, above + height + 4), fill=(255, 255, 255))
        draw.text((x + 3, above + height + 3), f"{i * TICK:g} s", fill=(255, 255, 255))
    sheet.save(path)
    return path


def _phonetic_font() -> ImageFont.FreeTypeFont | None:
    """Return a font that has the letters of the phonetic alphabet, or None if none is found."""
    from PIL import ImageFont

    matplotlib = find_spec("matplotlib")
    folder = Path(matplotlib.origin).parent / "mpl-data/fonts/ttf" if matplotlib and matplotlib.origin else Path()
    for name in ("DejaVuSans.ttf", str(folder / "DejaVuSans.ttf")):
        try:
            return ImageFont.truetype(name, 10)
        except OSError:
            continue
    return None


def _brightness(features: Tensor) -> Tensor:
    """Scale to 0 … 255, clipping the lowest and the highest hundredth."""
    features = features.float()
    low, high = (features.flatten().kthvalue(max(1, round(q * features.numel()))).values for q in (0.01, 0.99))
    return ((features - low) / (high - low).clamp(min=1e-6)).clamp(0, 1) * 255


def _stretched(picture: Tensor, down: int, across: int) -> Tensor:
    """(height, width) -> (height · down, width · across)."""
    return picture.repeat_interleave(down, 0).repeat_interleave(across, 1)


def _to_pil(picture: Tensor) -> Image.Image:
    from PIL import Image

    return Image.fromarray(picture.to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy())
