import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lit_effattn.drawing.images import (
    CELL,
    MIN_SIDE,
    attention_map,
    confusion_matrix,
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


@pytest.mark.parametrize("frames", [101, 3000])
def test_probabilities_lie_below_the_sound_they_are_of(frames: int, tmp_path: Path):
    """A band of 40 that is loud in one quarter, and labels that are likely in one quarter each."""
    features, quarter = torch.randn(frames, 40), frames // 4
    features[quarter : 2 * quarter, 5] += 50
    probabilities = torch.zeros(-(-frames // 2), 5)  # of 2 frames each
    for label in range(4):
        probabilities[label * quarter // 2 : (label + 1) * quarter // 2, label] = 1
    path = recognised(features, probabilities, ["blank", "aa", "b", "tS", "@"], tmp_path / "it.png", factor=2)
    sheet = torch.from_numpy(np.array(Image.open(path))).float().mean(-1)  # (height, width)
    across = 4 if frames < 400 else 1
    assert sheet.size(1) < 600 + 1.01 * across * frames
    left, sound, labels = 56, 4, 4 + 160 + 20
    middles = [left + round((i + 0.5) * across * quarter) for i in range(4)]
    loud = sheet[sound + (39 - 5) * 4 + 2]  # low frequencies lie below
    assert [loud[x].item() > 250 for x in middles] == [False, True, False, False]
    for label in range(5):
        shown = sheet[labels + 12 * label + 6]
        assert [shown[x].item() for x in middles] == [255 * (i == label) for i in range(4)]
        assert (sheet[labels + 12 * label : labels + 12 * (label + 1), :left] > 200).any()  # its name
    assert (sheet[sound + 160 : labels] > 200).any()  # the axis


def test_names_of_the_phonetic_alphabet_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By their letters where there is a font for them, else by numbers: boxes would all look alike."""

    def drawn(names: list[str]) -> torch.Tensor:
        path = recognised(torch.randn(9, 40), torch.zeros(9, 3), names, tmp_path / "it.png")
        return torch.from_numpy(np.array(Image.open(path)))[4 + 160 + 20 :, :56]

    for _ in range(2):
        names = drawn(["blank", "ɑ", "ʒ"]).split(12)
        assert all((name > 200).any() for name in names[:3])
        assert not torch.equal(names[1], names[2])
        monkeypatch.setattr("lit_effattn.drawing.images._phonetic_font", lambda: None)


def drawn_map(weights: torch.Tensor, rows: list[str], columns: list[str], tmp_path: Path):
    """Return the labels on the left, those above, and the squares, (N, M, CELL, CELL) each with its colours."""
    path = attention_map(weights, rows, columns, tmp_path / "new" / "map.png")
    sheet = torch.from_numpy(np.array(Image.open(path))).float()
    n, m = weights.shape
    top, left = sheet.size(0) - 8 - n * CELL, sheet.size(1) - 8 - m * CELL
    squares = sheet[top:-8, left:-8].unflatten(0, (n, CELL)).unflatten(2, (m, CELL)).transpose(1, 2)
    return sheet[top:-8, :left].mean(-1).split(CELL), sheet[:top, left:-8].mean(-1).split(CELL, 1), squares


def test_squares_of_an_attention_map_are_as_dark_as_their_weights(tmp_path: Path):
    weights = torch.tensor([[0, 0.25, 0.5], [0.75, 1, -0.5]])
    _, _, squares = drawn_map(weights, ["a", "b"], ["x", "y", "z"], tmp_path)
    inside = squares[:, :, 2:-2, 2:-2]
    assert (inside == inside[:, :, :1, :1]).all()
    shade = inside[:, :, 0, 0].mean(-1)  # (N, M)
    assert shade[0, 0] == shade[1, 2] == 255
    darkest = 255 - shade[1, 1]
    assert darkest > 150
    torch.testing.assert_close((255 - shade) / darkest, weights.clamp(min=0), rtol=0, atol=0.01)


@pytest.mark.parametrize("columns", [["|", "y", "W"], ["consequently", "of", "W"]])
def test_labels_of_an_attention_map_stand_at_their_rows_and_columns(columns: list[str], tmp_path: Path):
    """Those of the columns stand upright if they all fit, else all lie on their side."""
    rows = ["a rather long label", "W"]
    left, above, _ = drawn_map(torch.zeros(2, 3), rows, columns, tmp_path)
    assert left[0].size(1) > 100
    assert all((label < 128).any() and (label[:, 0] > 200).all() for label in left)  # none is cut off
    assert ((left[0] < 128).sum() > 5 * (left[1] < 128).sum()).all()
    assert all((label < 128).any() and (label[0] > 200).all() for label in above)
    if columns[0] == "|":
        assert above[0].size(0) < 2 * CELL
        assert (above[0] < 128).any(1).sum() > (above[0] < 128).any(0).sum()
    else:
        ink = [(label < 128).sum().item() for label in above]
        assert ink[0] > 3 * ink[2]
        assert above[0].size(0) > 60
        assert (above[0] < 128).any(1).sum() > 50  # pixels along the word: it goes up


@pytest.mark.parametrize("font", [True, False])
def test_labels_that_have_no_ink_are_written_out(font: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if not font:
        monkeypatch.setattr("lit_effattn.drawing.images._phonetic_font", lambda size: None)
    names = [" ", "\n", "", "a", "a\nb", "ʒ", "ɑ"]
    left, above, _ = drawn_map(torch.eye(7), names, ["x"] * 7, tmp_path)
    assert all((label < 128).any() for label in left)
    assert len({label.numpy().tobytes() for label in left}) == 7
    assert len({label[:, 1:].numpy().tobytes() for label in above}) == 1


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
