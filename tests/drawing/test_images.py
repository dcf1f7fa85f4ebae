import re
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from lit_effattn.drawing import images
from lit_effattn.drawing.images import (
    MIN_SIDE,
    attention_map,
    confusion_matrix,
    filterbank,
    grid,
    labelled_rows,
    recognised,
    save_png,
)

BORDER, GREY = 4, 64


def random_images(n: int, c: int, h: int, w: int) -> torch.Tensor:
    return torch.randint(256, (n, c, h, w), dtype=torch.uint8)


def cell(picture: torch.Tensor, row: int, column: int, h: int, w: int) -> torch.Tensor:
    """Cut the image at that place of the grid out."""
    top, left = BORDER + row * (h + BORDER), BORDER + column * (w + BORDER)
    return picture[:, top : top + h, left : left + w]


def test_images_lie_in_a_nearly_square_grid():
    for n, rows, columns in ((5, 2, 3), (9, 3, 3)):
        images = random_images(n, 3, 50, 60)
        picture = grid(images)
        assert picture.dtype == torch.uint8
        assert picture.shape == (3, BORDER + rows * (50 + BORDER), BORDER + columns * (60 + BORDER))
        for i in range(rows * columns):
            shown = cell(picture, i // columns, i % columns, 50, 60)
            assert torch.equal(shown, images[i]) if i < n else (shown == GREY).all()
        assert (picture[:, :BORDER] == GREY).all()
        assert (picture[:, :, :BORDER] == GREY).all()
    assert grid(random_images(6, 3, 48, 48), columns=6).shape == (3, 48 + 2 * BORDER, BORDER + 6 * (48 + BORDER))
    grey = random_images(2, 1, 50, 50)
    assert torch.equal(cell(grid(grey), 0, 1, 50, 50), grey[1].expand(3, -1, -1))  # three equal channels


def test_small_images_are_enlarged_pixel_by_pixel_by_whole_factors():
    images = random_images(2, 3, 8, 5)
    scale = MIN_SIDE // 8
    for i in range(2):
        shown = cell(grid(images), 0, i, 8 * scale, 5 * scale)
        assert torch.equal(shown, images[i].repeat_interleave(scale, 1).repeat_interleave(scale, 2))
    for side, shown in ((47, 94), (48, 48)):
        assert grid(random_images(2, 3, side, side)).shape[1] == shown + 2 * BORDER


def test_png_holds_the_picture(tmp_path: Path):
    picture = random_images(1, 3, 20, 30)[0]
    path = save_png(picture, tmp_path / "new" / "folder" / "picture.png")
    image = Image.open(path)
    assert image.format == "PNG"
    assert torch.equal(torch.from_numpy(np.array(image)).permute(2, 0, 1), picture)


def test_rows_have_their_names_before_them(tmp_path: Path):
    rows = {name: random_images(3, 1, 16, 16) for name in ("given", "completed", "original")}
    sheet = torch.from_numpy(np.array(Image.open(labelled_rows(rows, tmp_path / "rows.png")))).permute(2, 0, 1)
    strips = [grid(images, columns=3) for images in rows.values()]
    _, height, width = strips[0].shape
    margin = sheet.shape[2] - width
    assert sheet.shape[1] == 3 * height
    assert margin > 40
    for i, strip in enumerate(strips):
        assert torch.equal(sheet[:, i * height : (i + 1) * height, margin:], strip)
    texts = [sheet[:, i * height : (i + 1) * height, :margin] for i in range(3)]
    assert all((text > 200).any() for text in texts)
    assert not torch.equal(texts[0], texts[1])
    assert all((text[:, :, -4:] == GREY).all() for text in texts)  # no name runs into the images


def inked(path: Path) -> torch.Tensor:
    """Return the picture in grey, (height, width)."""
    return torch.from_numpy(np.array(Image.open(path).convert("L"))).float()


@pytest.mark.parametrize("frames", [101, 3000])
def test_probabilities_lie_below_the_sound_they_are_of(frames: int, tmp_path: Path):
    """A band of 40 that is loud in one quarter, and labels that are likely in one quarter each."""
    features, quarter = torch.zeros(frames, 40), frames // 4
    features[quarter : 2 * quarter, 5] += 50
    probabilities = torch.zeros(-(-frames // 2), 4)  # of 2 frames each
    for label in range(4):
        probabilities[label * quarter // 2 : (label + 1) * quarter // 2, label] = 1
    with patch.object(images, "_save", lambda figure, path: figure):
        sound, labels = recognised(features, probabilities, ["blank", "aa", "$b$", "ʒ"], tmp_path, factor=2).axes
    (spectrum,), (likely,) = sound.get_images(), labels.get_images()
    assert (spectrum.get_array() == features.T.numpy()).all()
    assert (likely.get_array() == probabilities.T.numpy()).all()
    assert spectrum.origin == "lower"  # low frequencies lie below
    assert [label.get_text() for label in labels.get_yticklabels()] == ["blank", "aa", "$b$", "ʒ"]
    left, right, bottom, top = likely.get_extent()
    assert (left, bottom, top) == (0, 4, 0)  # the first label is the uppermost
    assert right == pytest.approx(2 * 0.01 * len(probabilities))
    assert labels.get_xlim() == sound.get_xlim() == (0, pytest.approx(0.01 * frames))


def test_pictures_of_speech_are_written(tmp_path: Path):
    made = recognised(torch.randn(9, 40), torch.rand(9, 3), ["blank", "ɑ", "日"], tmp_path / "new" / "it.png")
    assert inked(made).std() > 10
    assert inked(filterbank(torch.randn(9, 40), "a $ ʒ", tmp_path / "sound.png")).std() > 10


def drawn_map(weights: torch.Tensor, rows: list[str], columns: list[str]):
    """Return the axes of a map."""
    with patch.object(images, "_save", lambda figure, path: figure):
        (axes,) = attention_map(weights, rows, columns, Path()).axes
    return axes


def test_squares_of_an_attention_map_are_as_dark_as_their_weights(tmp_path: Path):
    weights = torch.tensor([[0, 0.25, 0.5], [0.75, 1, -0.5]])
    axes = drawn_map(weights, ["a", "b"], ["x", "y", "z"])
    (mesh,) = axes.collections
    assert (mesh.get_array() == weights.numpy()).all()
    shade = torch.from_numpy(mesh.cmap(mesh.norm(mesh.get_array()))[..., :3].mean(-1))
    assert shade.flatten().argsort(descending=True, stable=True).tolist() == [0, 5, 1, 2, 3, 4]
    assert shade[0, 0] == shade[1, 2] > 0.95
    assert axes.yaxis_inverted()  # the first row is on top
    path = attention_map(torch.eye(2), ["a", "b"], ["x", "y"], tmp_path / "new" / "map.png")
    red, _, blue = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).int().unbind(-1)
    blue_ones = (blue - red > 60).nonzero().float()  # the two dark squares of the diagonal, which falls to the right
    assert torch.corrcoef(blue_ones.T)[0, 1] > 0.5


def test_labels_of_an_attention_map_are_at_their_rows_and_columns():
    """Those of the columns stand upright if all are short. Blank ones and line ends are written out."""
    for columns, rotation in ((["|", "y", "W"], 0), (["consequently", "of", "$W$"], 90)):
        axes = drawn_map(torch.zeros(4, 3), ["a label", " ", "a\nb", "ʒ"], columns)
        assert [label.get_text() for label in axes.get_yticklabels()] == ["a label", "' '", "a\\nb", "ʒ"]
        assert [label.get_text() for label in axes.get_xticklabels()] == columns
        assert {label.get_rotation() for label in axes.get_xticklabels()} == {rotation}
        assert axes.get_yticks().tolist() == [0.5, 1.5, 2.5, 3.5]
        assert axes.get_xticks().tolist() == [0.5, 1.5, 2.5]


def test_attention_maps_without_labels_or_numbers_are_refused(tmp_path: Path):
    for weights, rows, columns, words in (
        (torch.zeros(2, 3), "a", "xyz", r"\(2, 3\).*1 rows and 3 columns"),
        (torch.zeros(2, 3), "ab", "xy", r"\(2, 3\).*2 rows and 2 columns"),
        (torch.zeros(0, 3), "", "xyz", r"\(0, 3\).*0 rows"),
        (torch.full((1, 1), torch.nan), "a", "x", "must be finite"),
    ):
        with pytest.raises(ValueError, match=words):
            attention_map(weights, [*rows], [*columns], tmp_path / "map.png")


def test_a_confusion_matrix_shows_the_share_of_each_rows_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = []
    monkeypatch.setattr("lit_effattn.drawing.images.attention_map", lambda *given: drawn.append(given) or given[-1])
    counts = torch.tensor([[3, 1, 0], [0, 0, 0], [500, 500, 1000]])
    assert confusion_matrix(counts, ["a", "b", "c"], tmp_path / "it.png") == tmp_path / "it.png"
    ((shares, rows, columns, _),) = drawn
    torch.testing.assert_close(shares, torch.tensor([[0.75, 0.25, 0], [0, 0, 0], [0.25, 0.25, 0.5]]))
    assert rows == ["a (4)", "b (0)", "c (2,000)"]
    assert columns == ["a", "b", "c"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_pictures_of_images_on_the_gpu(tmp_path: Path):
    """As a model that trains there draws them."""
    images = random_images(4, 3, 8, 8)
    on_cpu, on_gpu = (save_png(grid(i), tmp_path / f"{i.device.type}.png") for i in (images, images.cuda()))
    assert on_cpu.read_bytes() == on_gpu.read_bytes()


def test_a_picture_is_copied_from_wherever_it_is(tmp_path: Path):
    """A tensor without memory on this machine stands in for one on a GPU: `save_png` asks for it to be brought here."""

    class Elsewhere(torch.Tensor):
        def numpy(self, *args, **kwargs):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

        def cpu(self, *args, **kwargs):
            return self.as_subclass(torch.Tensor)

    picture = random_images(1, 3, 4, 4)[0]
    path = save_png(picture.as_subclass(Elsewhere), tmp_path / "picture.png")
    assert re.match(rb"\x89PNG", path.read_bytes())
