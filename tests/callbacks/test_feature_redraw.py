from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_effattn import Transformer
from lit_effattn.attention import LinearAttention, PerformerAttention
from lit_effattn.callbacks import FeatureRedraw
from tests.callbacks.tiny import Tiny, loader, trainer


class Estimator(Tiny):
    """A stack with random features in two of its three layers; notes what was drawn at which step, and when."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds = [PerformerAttention, LinearAttention]
        self.stack = Transformer(8, 2, 3, attention=kinds)
        self.shared = self.stack.blocks[0]  # a second way to the same module
        self.seen: list[tuple[int, str, int, float]] = []

    def performers(self) -> list[PerformerAttention]:
        return [block.attention for block in self.stack.blocks if isinstance(block.attention, PerformerAttention)]

    def _see(self, stage: str) -> None:
        step = self.trainer.global_step if stage == "train" else -1
        for layer in self.performers():
            self.seen.append((step, stage, int(layer.feature_map.draws), layer.feature_map.omega.sum().item()))

    def training_step(self, batch: Tensor) -> Tensor:
        self._see("train")
        return self.stack(batch[:, None, None].expand(1, 3, 8))[0].square().mean() + super().training_step(batch)

    def validation_step(self, batch: Tensor) -> None:
        self._see("val")

    def test_step(self, batch: Tensor) -> None:
        self._see("test")

    def draws_in(self, stage: str) -> list[int]:
        return [draws for _, s, draws, _ in self.seen[::2] if s == stage]  # of the first layer


def fit(folder: Path, callback: FeatureRedraw, n: int, **options) -> Estimator:
    model = Estimator()
    trainer(folder, [callback], max_epochs=1, **options).fit(model, loader(n), loader(1))
    return model


def test_redraws_every_so_many_steps(tmp_path: Path):
    callback = FeatureRedraw(3)
    assert fit(tmp_path, callback, n=4).draws_in("train") == [0, 0, 0, 1]
    model = fit(tmp_path, callback, n=7)  # it begins anew
    assert model.draws_in("train") == [0, 0, 0, 1, 1, 1, 2]
    sums = {value for *_, value in model.seen}
    assert len(sums) == 6  # two layers, three draws, all different


def test_not_in_evaluation(tmp_path: Path):
    """A validation at a step that is due, and a test."""
    model = Estimator()
    run = trainer(tmp_path, [FeatureRedraw(2)], max_epochs=2)
    run.fit(model, loader(2), loader(1))
    run.validate(model, loader(3), verbose=False)
    run.test(model, loader(3), verbose=False)
    assert model.draws_in("train") == [0, 0, 1, 1]
    assert model.draws_in("val") == [0, 1, 1, 1, 1]  # twice in training, thrice alone
    assert model.draws_in("test") == [1, 1, 1]


class SaveAlways(pl.Callback):
    """Saves after every batch, within an optimiser step too."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Estimator, outputs, batch, batch_idx: int) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / f"{batch_idx + 1}.ckpt")


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_resumed_anywhere_has_the_same_features(accumulate: int, tmp_path: Path):
    def run(callbacks: list[pl.Callback], seed: int, ckpt_path: Path | None = None) -> Estimator:
        model = Estimator()
        torch.manual_seed(seed)
        data = DataLoader(torch.ones(7), batch_size=1)
        trainer(tmp_path, callbacks, max_epochs=1, accumulate_grad_batches=accumulate).fit(
            model, data, loader(1), ckpt_path=ckpt_path
        )
        return model

    whole = run([FeatureRedraw(2, seed=5), SaveAlways()], 0)
    train = [seen for seen in whole.seen if seen[1] == "train"]
    assert {draws for _, _, draws, _ in train} == set(range({1: 4, 2: 2}[accumulate]))
    for batches in range(1, 7):
        resumed = run([FeatureRedraw(2, seed=5)], 1, tmp_path / f"{batches}.ckpt")
        assert [seen for seen in resumed.seen if seen[1] == "train"] == train[2 * batches :]
        for name, t in whole.state_dict().items():
            # Within a step, Lightning's checkpoint lacks the gradients that were gathered so far, so weights differ.
            if batches % accumulate == 0 or name.endswith(("omega", "draws")):
                assert torch.equal(resumed.state_dict()[name], t), name


def test_what_is_drawn_follows_from_seed_step_and_place_alone(tmp_path: Path):
    def final(seed: int, noise: int) -> list[Tensor]:
        model = Estimator()
        torch.manual_seed(noise)  # another process draws other dropout
        trainer(tmp_path, [FeatureRedraw(2, seed)], max_epochs=1).fit(model, loader(3), loader(1))
        return [layer.feature_map.omega for layer in model.performers()]

    first, again, other = final(0, 1), final(0, 2), final(1, 1)
    assert first
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


class Drawn(nn.Module):
    """Some other module with random features."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def redraw(self, generator: torch.Generator) -> None:
        self.drawn.append(torch.rand((), generator=generator).item())


def test_modules_are_found_by_what_they_can_do(tmp_path: Path):
    model = Tiny()
    model.features = nn.ModuleList([Drawn(), torch.compile(Drawn()), nn.Linear(1, 1)])
    trainer(tmp_path, [FeatureRedraw(1)], max_epochs=1).fit(model, loader(3), loader(1))
    first, second = model.features[0].drawn, model.features[1]._orig_mod.drawn
    assert len({*first, *second}) == 4  # twice each, though the second is wrapped


def test_a_model_without_features_is_a_warning_and_bad_options_are_refused(tmp_path: Path):
    with pytest.warns(UserWarning, match=r"FeatureRedraw has no effect: no module of this Tiny"):
        trainer(tmp_path, [FeatureRedraw()], max_epochs=1).fit(Tiny(), loader(1), loader(1))
    with pytest.raises(ValueError, match=r"EMAWeightAveraging would average the random features.*use_buffers=False"):
        trainer(tmp_path, [FeatureRedraw(), EMAWeightAveraging()], max_epochs=1).fit(Tiny(), loader(1), loader(1))
    for options, words in (({"every_n_steps": 0}, "every_n_steps=0"), ({"seed": -1}, "seed=-1")):
        with pytest.raises(ValueError, match=words):
            FeatureRedraw(**options)
