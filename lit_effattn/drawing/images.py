"""Pictures: grids of images, labelled rows of images, recognised utterances, attention maps, and confusion matrices."""

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
"""Images with fewer pixels a side are enlarged, pixel by pixel, to at least this many."""

TICK = 0.5
"""Seconds between two ticks of a time axis."""

CELL = 20
"""Side of a square of an attention map, in pixels."""


def grid(images: Tensor, columns: int | None = None) -> Tensor:
    """Arrange (n, C, H, W) uint8 in a grid, (C, height, width), nearly square unless `columns` is given."""
    from torchvision.utils import make_grid  # slow to import, and not used by every run

    scale = max(1, math.ceil(MIN_SIDE / images.size(2)))
    images = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    return make_grid(images, nrow=columns or math.ceil(math.sqrt(len(images))), padding=4, pad_value=64)


def save_png(picture: Tensor, path: Path) -> Path:
    """Write (C, height, width) uint8 as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    to_pil(picture).save(path)
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
        sheet.paste(to_pil(strip), (margin, i * height))
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
    """Write a PNG of an utterance's filterbank, and below it the probability of each label over time.

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
        sheet.paste(to_pil(panel.expand(3, -1, -1)), (left, top))
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


def filterbank(features: Tensor, title: str, path: Path) -> Path:
    """Write a PNG of an utterance's filterbank, (T, F) with the lowest frequency first, and a title below it."""
    from PIL import Image

    across = max(1, min(4, 1600 // len(features)))
    sound = _stretched(_brightness(features).T.flip(0), max(1, 160 // features.size(1)), across)  # (F·k, T·across)
    (label,) = _labels([title])
    sheet = Image.new("RGB", (max(sound.size(1), label.width), len(sound) + label.height), (255, 255, 255))
    sheet.paste(to_pil(sound.expand(3, -1, -1)), (0, 0))
    sheet.paste(label, (0, len(sound)))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    return path


def attention_map(weights: Tensor, rows: list[str], columns: list[str], path: Path) -> Path:
    """Write a PNG of attention weights: a square for each pair, white for 0, dark blue for 1.

    Args:
        weights: (N, M), as one row and head of `attention_weights`. Those below 0 are drawn as 0, above 1 as 1.
        rows: N labels of the queries, drawn on the left. Spaces alone are drawn in quotes, line ends as escapes.
        columns: M labels of the keys, drawn above, upwards if any is wider than a square. Labels that are not ASCII
            need the font DejaVu Sans: see `recognised`.
        path: File to write.

    Raises:
        ValueError: If rows or columns and labels differ in number or are empty, or a weight is not finite.
    """
    from PIL import Image, ImageDraw

    if weights.shape != (len(rows), len(columns)) or not rows or not columns:
        raise ValueError(
            f"weights has shape {tuple(weights.shape)}, with {len(rows)} rows and {len(columns)} columns of labels; "
            "give one label for each row and column, and at least one of each"
        )
    weights = weights.detach().float().cpu()
    if not weights.isfinite().all():
        raise ValueError("weights must be finite; check the model's parameters and inputs for NaN")
    left, above = (_labels(names) for names in (rows, columns))
    if max(label.width for label in above) > CELL:
        above = [label.transpose(Image.Transpose.ROTATE_90) for label in above]
    margin, top = max(label.width for label in left) + 8, max(label.height for label in above) + 8
    sheet = Image.new("RGB", (margin + CELL * len(columns) + 8, top + CELL * len(rows) + 8), (255, 255, 255))
    squares = _stretched(weights.clamp(0, 1), CELL, CELL)[..., None]  # (N · CELL, M · CELL, 1)
    blue = torch.tensor([8.0, 48.0, 107.0])
    sheet.paste(to_pil((255 + squares * (blue - 255)).round().permute(2, 0, 1)), (margin, top))
    for i, label in enumerate(left):
        sheet.paste(label, (margin - 4 - label.width, top + CELL * i + (CELL - label.height) // 2))
    for i, label in enumerate(above):
        sheet.paste(label, (margin + CELL * i + (CELL - label.width) // 2, top - 4 - label.height))
    draw, end = ImageDraw.Draw(sheet), (margin + CELL * len(columns), top + CELL * len(rows))
    for x in range(margin, end[0] + 1, CELL):
        draw.line((x, top, x, end[1]), fill=(208, 208, 208))
    for y in range(top, end[1] + 1, CELL):
        draw.line((margin, y, end[0], y), fill=(208, 208, 208))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    return path


def confusion_matrix(counts: Tensor, names: list[str], path: Path) -> Path:
    """Write a PNG of a confusion matrix: a row for each label, a column for each class that a model chose.

    A square shows its share of the row's items, white for 0, dark blue for 1. Row labels include the number of items.

    Args:
        counts: (C, C) integers: `counts[i, j]` items of class i were classified as j.
        names: C names of the classes.
        path: File to write.
    """
    items = counts.sum(1)  # (C,)
    rows = [f"{name} ({n:,})" for name, n in zip(names, items.tolist(), strict=True)]
    return attention_map(counts / items.clamp(min=1)[:, None], rows, names, path)


def _labels(names: list[str]) -> list[Image.Image]:
    """Draw names in black on white, with the same height."""
    from PIL import Image, ImageDraw, ImageFont

    phonetic = _phonetic_font(14)
    font = phonetic or ImageFont.load_default(14)
    _, ascent, _, descent = font.getbbox("Ågjp", anchor="ls")
    images = []
    for i, name in enumerate(names):
        # Pillow's default font lacks many letters: the label's number replaces such a name.
        shown = name if phonetic is not None or name.isascii() else f"label {i}"
        if not shown.isprintable():
            shown = repr(shown)[1:-1]
        elif not shown.strip():
            shown = repr(shown)
        image = Image.new("RGB", (max(1, math.ceil(font.getlength(shown))), round(descent - ascent)), (255, 255, 255))
        ImageDraw.Draw(image).text((0, -ascent), shown, fill=(0, 0, 0), font=font, anchor="ls")
        images.append(image)
    return images


def _phonetic_font(size: int = 10) -> ImageFont.FreeTypeFont | None:
    """Return a font with the letters of the phonetic alphabet, or None."""
    from PIL import ImageFont

    matplotlib = find_spec("matplotlib")
    folder = Path(matplotlib.origin).parent / "mpl-data/fonts/ttf" if matplotlib and matplotlib.origin else Path()
    for name in ("DejaVuSans.ttf", str(folder / "DejaVuSans.ttf")):
        try:
            return ImageFont.truetype(name, size)
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


def to_pil(picture: Tensor) -> Image.Image:
    """Return (C, height, width) as an image of Pillow."""
    from PIL import Image

    return Image.fromarray(picture.to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy())
