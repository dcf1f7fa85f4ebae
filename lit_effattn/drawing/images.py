"""Pictures: grids of images, labelled rows of images, recognised utterances, attention maps, and confusion matrices."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL import Image

MIN_SIDE = 48  # images with fewer pixels a side are enlarged, pixel by pixel, to at least this many
CELL = 0.2  # side of a square of an attention map, in inches


def grid(images: Tensor, columns: int | None = None) -> Tensor:
    """Arrange (n, C, H, W) uint8 in a grid, (C, height, width), nearly square unless `columns` is given."""
    from torchvision.utils import make_grid  # slow to import, and not used by every run

    scale = max(1, math.ceil(MIN_SIDE / images.size(2)))
    images = images.repeat_interleave(scale, 2).repeat_interleave(scale, 3)
    return make_grid(images, nrow=columns or math.ceil(math.sqrt(len(images))), padding=4, pad_value=64)


def to_pil(picture: Tensor) -> Image.Image:
    """Return (C, height, width) as an image of Pillow."""
    from PIL import Image

    return Image.fromarray(picture.to(torch.uint8).permute(1, 2, 0).contiguous().cpu().numpy())


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
    names: Sequence[str],
    path: Path,
    *,
    factor: int = 1,
    frame_seconds: float = 0.01,
) -> Path:
    """Write a PNG of an utterance's filterbank, and below it the probability of each label over time.

    Args:
        features: (T, F), the lowest frequency first; the loudest is white.
        probabilities: (T', V), of the labels in each frame; 1 is white.
        names: V names of the labels.
        path: File to write.
        factor: Feature vectors per frame.
        frame_seconds: Seconds from one feature vector to the next.
    """
    n, end = len(names), frame_seconds * len(features)
    figure = _figure(_width(features), 2 + 0.12 * n)
    sound, labels = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, 0.12 * n))
    _draw_sound(sound, features, end)
    extent = (0, factor * frame_seconds * len(probabilities), n, 0)
    labels.imshow(_numbers(probabilities).T, cmap="gray", vmin=0, vmax=1, extent=extent, **_PIXELS)
    labels.set_yticks(np.arange(n) + 0.5, names, fontsize=6, parse_math=False)
    labels.set(xlim=(0, end), xlabel="seconds")
    return _save(figure, path)


def filterbank(features: Tensor, title: str, path: Path) -> Path:
    """Write a PNG of an utterance's filterbank, (T, F) with the lowest frequency first, and a title below it."""
    figure = _figure(_width(features), 2.2)
    axes = figure.subplots()
    _draw_sound(axes, features, len(features))
    axes.set_xticks([])
    axes.set_xlabel(title, parse_math=False, wrap=True)
    return _save(figure, path)


def attention_map(weights: Tensor, rows: Sequence[str], columns: Sequence[str], path: Path) -> Path:
    """Write a PNG of attention weights: a square for each pair, the lightest blue for 0, the darkest for 1.

    Args:
        weights: (N, M), as one row and head of `attention_weights`. Those below 0 are drawn as 0, above 1 as 1.
        rows: N labels of the queries, drawn on the left. Spaces alone are drawn in quotes, line ends as escapes.
        columns: M labels of the keys, drawn above, upwards if any is longer than two characters.
        path: File to write.

    Raises:
        ValueError: If rows or columns and labels differ in number or are empty, or a weight is not finite.
    """
    if weights.shape != (len(rows), len(columns)) or not rows or not columns:
        raise ValueError(
            f"weights has shape {tuple(weights.shape)}, with {len(rows)} rows and {len(columns)} columns of labels; "
            "give one label for each row and column, and at least one of each"
        )
    if not weights.isfinite().all():
        raise ValueError("weights must be finite; check the model's parameters and inputs for NaN")
    shown_rows, shown_columns = ([_shown(name) for name in names] for names in (rows, columns))
    figure = _figure(CELL * len(columns), CELL * len(rows), layout=None)
    axes = figure.add_axes((0, 0, 1, 1))  # the squares; the labels are outside
    axes.pcolormesh(_numbers(weights), cmap="Blues", vmin=0, vmax=1, edgecolors="0.82", linewidth=0.5)
    upwards = 90 if max(map(len, shown_columns)) > 2 else 0
    axes.set_yticks(np.arange(len(rows)) + 0.5, shown_rows, parse_math=False)
    axes.set_xticks(np.arange(len(columns)) + 0.5, shown_columns, rotation=upwards, parse_math=False)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.invert_yaxis()
    return _save(figure, path)


def confusion_matrix(counts: Tensor, names: Sequence[str], path: Path) -> Path:
    """Write a PNG of a confusion matrix: a row for each label, a column for each class that a model chose.

    A square shows its share of the row's items, light for 0, dark blue for 1. Row labels include the number of items.

    Args:
        counts: (C, C) integers: `counts[i, j]` items of class i were classified as j.
        names: C names of the classes.
        path: File to write.
    """
    items = counts.sum(1)  # (C,)
    rows = [f"{name} ({n:,})" for name, n in zip(names, items.tolist(), strict=True)]
    return attention_map(counts / items.clamp(min=1)[:, None], rows, names, path)


_PIXELS: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}


def _figure(width: float, height: float, layout: Any = "constrained") -> Figure:
    from matplotlib.figure import Figure  # slow to import

    return Figure((width, height), layout=layout)


def _width(features: Tensor) -> float:
    """Return the width of the picture of an utterance, (T, F), in inches."""
    return min(20.0, max(4.0, 0.04 * len(features)))


def _draw_sound(axes: Any, features: Tensor, end: float) -> None:
    """Draw a filterbank (T, F) from 0 to `end`, clipping the lowest and the highest hundredth."""
    values = _numbers(features).T
    low, high = np.quantile(values, (0.01, 0.99))
    axes.imshow(values, origin="lower", cmap="gray", vmin=low, vmax=high, extent=(0, end, 0, len(values)), **_PIXELS)
    axes.set_yticks([])


def _numbers(values: Tensor) -> Any:
    return values.detach().float().cpu().numpy()


def _shown(name: str) -> str:
    """Return a label with escapes for what is not printable, in quotes if it is blank."""
    return repr(name)[1:-1] if not name.isprintable() else name if name.strip() else repr(name)


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the label then has a box
        figure.savefig(path, dpi=100, bbox_inches="tight")
    return path
