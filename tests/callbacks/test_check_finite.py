import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from lit_effattn.callbacks import BestCheckpoint, CheckFinite, LastCheckpoint, NotFiniteError
from lit_effattn.checkpoints.io import read_checkpoint
from tests.callbacks.tiny import Tiny, loader, trainer


class Adam(Tiny):
    """Tiny, with an optimiser that has a state, and a hook that spoils some steps."""

    def __init__(self, spoil: dict[int, float] | None = None, where: str = "loss") -> None:
        super().__init__()
        self.spoil, self.where = spoil or {}, where
        self.memory: Any = None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.memory = "of this batch"
        loss = super().training_step(batch)
        factor = self.spoil.get(batch_idx, 1.0)
        if self.where == "gradient" and factor != 1:
            self.weight.register_hook(
                lambda g: g * factor if self.trainer.fit_loop.epoch_loop.batch_idx == batch_idx else g
            )
            return loss
        return loss + factor if self.where == "loss alone" and factor != 1 else loss * factor

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(folder: Path, model: pl.LightningModule, *callbacks: pl.Callback, n: int = 10, **options: Any) -> pl.Trainer:
    run = trainer(folder, callbacks, **{"max_epochs": 1, "log_every_n_steps": 4, **options})
    run.fit(model, loader(n))
    return run


def test_it_stops_within_the_logging_interval_and_says_which_step(tmp_path: Path):
    for where, value in (("loss", math.nan), ("gradient", math.inf), ("loss alone", math.inf)):
        model = Adam({5: value}, where)
        with pytest.raises(NotFiniteError, match=r"at step 6 \(epoch 0, batch 5, lr 0\.1\)"):
            fit(tmp_path, model, CheckFinite())
        assert len(model.drawn) == 8


def test_the_optimiser_step_is_named_and_the_end_of_an_epoch_is_checked(tmp_path: Path):
    model = Adam({4: math.nan})
    with pytest.raises(NotFiniteError, match=r"at step 2 \(epoch 0, batch 5, lr 0\.1\)"):
        fit(tmp_path, model, CheckFinite(), accumulate_grad_batches=3)
    with pytest.raises(NotFiniteError, match="at step 10"):
        fit(tmp_path, Adam({9: math.nan}), CheckFinite())


def test_large_values_are_finite(tmp_path: Path):
    """Though their squares overflow."""
    fit(tmp_path, Adam(dict.fromkeys(range(10), 1e30)), CheckFinite())


@pytest.mark.parametrize("spoil", [{5: math.nan}, {5: math.nan, 6: 1.0}])
def test_the_checkpoint_before_stays(tmp_path: Path, spoil: dict[int, float]):
    with pytest.raises(NotFiniteError, match="step 6"):
        fit(tmp_path, Adam(spoil), CheckFinite(), LastCheckpoint(1), log_every_n_steps=50)
    last = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert last["global_step"] == 5
    assert torch.isfinite(last["state_dict"]["weight"]).all()


@pytest.mark.parametrize("first", [0, 1])
def test_a_state_that_finite_gradients_made_infinite_is_not_saved(tmp_path: Path, first: int):
    """The square of 1e23. The message says whether there is an earlier checkpoint."""
    saved = "last.ckpt is of an earlier step" if first else "nothing was saved"
    with pytest.raises(NotFiniteError, match=rf"optimiser's state is infinite.* at step {first + 1} .*; {saved}"):
        fit(tmp_path, Adam({first: 1e23}), CheckFinite(), LastCheckpoint(1))
    assert [read_checkpoint(path)["global_step"] for path in tmp_path.rglob("last.ckpt")] == [1] * first


def test_weights_that_a_finite_gradient_made_infinite_are_not_saved(tmp_path: Path):
    class Far(Adam):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=3e38)

    model = Far()
    with torch.no_grad():
        model.weight.fill_(-3e3)
    with pytest.raises(NotFiniteError, match="at step 1 "):
        fit(tmp_path, model, CheckFinite(), LastCheckpoint(1))
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_skipped_step_changes_nothing(tmp_path: Path, accumulate: int):
    """The run equals one in which these batches are not there."""

    class Without(Adam):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            return None if batch_idx // accumulate in (1, 3) else super().training_step(batch, batch_idx)

    class Memories(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            assert (pl_module.memory is None) == (batch_idx in (2 * accumulate - 1, 4 * accumulate - 1))

    guard, model, other = (
        CheckFinite(skip=1),
        Adam({2 * accumulate - 1: math.nan, 4 * accumulate - 1: math.inf}),
        Without(),
    )
    with pytest.warns(UserWarning, match=r"step 2 \(epoch 0, batch \d, lr 0.1\) is skipped"):
        fit(tmp_path, model, guard, Memories(), n=12, accumulate_grad_batches=accumulate)
    assert guard.skipped == 2
    fit(tmp_path, other, n=12, accumulate_grad_batches=accumulate)
    assert torch.equal(model.weight, other.weight)
    moments = [list(m.optimizers().state.values()) for m in (model, other)]
    assert moments[0]
    assert all(torch.equal(a[k], b[k]) for a, b in zip(*moments, strict=True) for k in ("exp_avg", "exp_avg_sq"))


def test_too_many_in_a_row_stop_the_run(tmp_path: Path):
    model = Adam({2: math.nan, 4: math.nan, 5: math.nan, 6: math.nan})
    guard = CheckFinite(skip=2)
    with pytest.warns(UserWarning, match="is skipped"), pytest.raises(NotFiniteError, match="at step 7 "):
        fit(tmp_path, model, guard)
    with pytest.warns(UserWarning, match="is skipped"):
        fit(tmp_path, Adam({0: math.nan, 1: math.nan}), guard)  # another run
    assert guard.skipped == 2


@pytest.mark.parametrize("n_bad", [20, 21])
def test_float16_s_scaler_skips_by_itself_up_to_a_limit(tmp_path: Path, n_bad: int):
    check = CheckFinite(skip=2)
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    model = Adam(dict.fromkeys(range(1, n_bad + 1), math.inf))
    run = trainer(tmp_path, [check], plugins=[precision], max_epochs=1)
    if n_bad > 20:
        with pytest.raises(NotFiniteError, match="at step 22 "):
            run.fit(model, loader(30))
    else:
        run.fit(model, loader(30))
        assert torch.isfinite(model.weight).all()
    assert check.skipped == 0


def test_the_count_of_skipped_steps_is_in_the_checkpoint():
    check, other = CheckFinite(skip=2), CheckFinite(skip=2)
    check.skipped = 3
    other.load_state_dict(check.state_dict())
    assert other.skipped == 3
    with pytest.raises(ValueError, match="skip=-1 must be at least 0"):
        CheckFinite(skip=-1)


@pytest.mark.parametrize(("values", "best"), [([math.inf, 2.0, 3.0], 2.0), ([math.nan, math.inf], None)])
def test_a_metric_that_is_not_finite_is_never_the_best(tmp_path: Path, values: list[float], best: float | None):
    class Scored(Tiny):
        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("val/loss", values[self.current_epoch])

    checkpoint = BestCheckpoint(tmp_path, filename="best", monitor="val/loss")
    run = trainer(tmp_path, [checkpoint], max_epochs=len(values))
    with pytest.warns(UserWarning, match="val/loss is (inf|nan): this checkpoint is not among the best"):
        run.fit(Scored(), loader(2), DataLoader(torch.ones(1)))
    assert (checkpoint.best_model_score is None) if best is None else checkpoint.best_model_score == best
    assert (tmp_path / "best.ckpt").exists() == (best is not None)
    assert checkpoint.state_key.startswith("ModelCheckpoint{")
