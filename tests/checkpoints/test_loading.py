import math
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader

from lit_effattn import PixelModel, Transformer
from lit_effattn.callbacks import LastCheckpoint
from lit_effattn.checkpoints.loading import OtherModelError, check_finite, check_same_model, load_model
from lit_effattn.tasks import LanguageModel
from tests.callbacks.tiny import trainer
from tests.support.commands import same


def net(*widths: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(1, width, bias=False) for width in widths])


def test_the_same_names_and_shapes_are_the_same_model():
    check_same_model(net(2, 3), {"state_dict": net(2, 3).state_dict()})


def test_the_first_differences_are_named():
    for saved, words in [
        (net(2, 4), "this Sequential: 1.weight is 4×1 in the checkpoint, 3×1 here. A run brings"),
        (net(2), "this Sequential: 1.weight is absent in the checkpoint, 3×1 here. A"),
        (net(2, 3, 1), "2.weight is 1×1 in the checkpoint, absent here"),
        (net(5, 5, 5, 5, 5), "2.weight is 5×1 in the checkpoint, absent here (and 2 more)"),
    ]:
        with pytest.raises(OtherModelError, match=re.escape(words)):
            check_same_model(net(2, 3), {"state_dict": saved.state_dict()})


def test_a_model_is_built_as_the_file_says_with_its_weights(tmp_path: Path):
    model = LanguageModel(Transformer(8, 2, 1), 5, label_smoothing=0.25)
    path = tmp_path / "x.ckpt"
    saving = trainer(tmp_path, [])
    saving.strategy.connect(model)
    saving.save_checkpoint(path)
    result = load_model(LanguageModel, path)
    assert result.label_smoothing == 0.25
    assert same(model.state_dict(), result.state_dict())
    assert load_model(LanguageModel, path, arguments={"label_smoothing": 0.5}).label_smoothing == 0.5
    with pytest.raises(OtherModelError, match=r"embedding\.weight is 5×8 in the checkpoint, 5×16 here"):
        load_model(LanguageModel, path, arguments={"backbone": Transformer(16, 2, 1)})


def test_weights_that_are_not_finite_are_refused(tmp_path: Path):
    """By every command: `test` would score 100 % errors. Buffers may be infinite."""
    model = PixelModel(Transformer(8, 2, 1), (2, 2, 1), 4)
    checkpoint = {"state_dict": {name: t.clone() for name, t in model.state_dict().items()}}
    model.on_load_checkpoint(checkpoint)
    weights = dict(model.named_parameters())
    first, second = list(weights)[:2]
    for name in (first, second):
        checkpoint["state_dict"][name].view(-1)[-1] = math.nan
    with pytest.raises(ValueError, match=rf"the checkpoint's {first} and 1 more parameters are infinite or NaN"):
        model.on_load_checkpoint(checkpoint)
    model.register_buffer("maximum", torch.tensor(-math.inf))
    check_finite(model, {"state_dict": model.state_dict()})


def test_training_does_not_go_on_from_averaged_weights(tmp_path: Path):
    def fit(epochs: int, *callbacks: pl.Callback, path: Path | None = None) -> pl.Trainer:
        run = trainer(tmp_path, [*callbacks, LastCheckpoint()], max_epochs=epochs)
        model = PixelModel(Transformer(8, 2, 1), (2, 2, 1), 4)
        run.fit(model, DataLoader(torch.randint(4, (4, 4)), batch_size=2), ckpt_path=path)
        return run

    fit(1, EMAWeightAveraging())
    last = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match=r"the average of EMAWeightAveraging.*resume with that callback"):
        fit(2, path=last)
    assert fit(2, EMAWeightAveraging(), path=last).global_step == 4
    assert isinstance(PixelModel.load_from_checkpoint(last), PixelModel)
