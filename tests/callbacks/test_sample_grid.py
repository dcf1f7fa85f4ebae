from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image

from lit_effattn import Transformer
from lit_effattn.callbacks import SampleGrid
from lit_effattn.tasks import PixelModel
from tests.callbacks.tiny import Images, Tiny, loader, trainer


def test_pictures_of_the_epochs_asked_for(tmp_path: Path):
    model = Images()
    callback = SampleGrid(every_n_epochs=2, n_samples=5, temperature=0.5, seed=3)
    trainer(tmp_path, [callback], max_epochs=5).fit(model, loader())
    assert sorted(p.name for p in (tmp_path / "samples").iterdir()) == ["epoch_0002.png", "epoch_0004.png"]
    assert model.asked == [{"n": 5, "temperature": 0.5, "seed": 3}] * 2
    picture = np.array(Image.open(tmp_path / "samples" / "epoch_0002.png"))
    assert picture.shape == (2 * 52 + 4, 3 * 52 + 4, 3)  # 2 rows and 3 columns of 6×6 pixels, each enlarged to 8×8
    for i in range(5):
        top, left = 4 + 52 * (i // 3), 4 + 52 * (i % 3)
        assert (picture[top : top + 48, left : left + 48] == 10 * i).all()


def test_a_pixel_model_is_drawn_and_trains_on(tmp_path: Path):
    torch.manual_seed(1)
    model = PixelModel(Transformer(8, 2, 1, dropout=0.1), (4, 4, 3), 4)
    run = trainer(tmp_path, [SampleGrid(n_samples=4)], max_epochs=1)
    run.fit(model, torch.utils.data.DataLoader(torch.randint(4, (4, 48)), batch_size=4))
    picture = np.array(Image.open(tmp_path / "samples" / "epoch_0001.png"))
    assert picture.shape == (2 * 52 + 4, 2 * 52 + 4, 3)
    expected = model.to_images(model.sample(4, seed=0))
    assert picture[4:52, 4:52][::12, ::12].tolist() == expected[0].permute(1, 2, 0).tolist()
    assert model.training


def test_it_goes_to_tensorboard_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shown = []
    logger = TensorBoardLogger(tmp_path, name="tensorboard", version="")
    monkeypatch.setattr(logger.experiment, "add_image", lambda *a, **k: shown.append((a[0], a[1].shape, k)))
    run = trainer(tmp_path, [SampleGrid(n_samples=4)], max_epochs=2, logger=[CSVLogger(tmp_path), logger])
    run.fit(Images((50, 50, 3)), loader(3))
    size = torch.Size([3, 2 * 54 + 4, 2 * 54 + 4])
    assert shown == [("samples", size, {"global_step": 3}), ("samples", size, {"global_step": 6})]


def test_nothing_is_drawn_in_a_trial(tmp_path: Path):
    model = Images()
    trainer(tmp_path, [SampleGrid()], fast_dev_run=True).fit(model, loader())
    assert model.asked == []
    assert not (tmp_path / "samples").exists()


def test_a_model_that_draws_no_images_is_refused_before_training(tmp_path: Path):
    model = Tiny()
    with pytest.raises(ValueError, match="SampleGrid: Tiny has no `sample`"):
        trainer(tmp_path, [SampleGrid()], max_epochs=1).fit(model, loader())
    assert model.drawn == []


def test_wrong_options_are_named():
    for name in ("every_n_epochs", "n_samples"):
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            SampleGrid(**{name: 0})
