"""The names and sizes in states of optimisers, schedules and loops are compared with those of new ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from lit_effattn import PixelModel, Transformer
from lit_effattn.callbacks import LastCheckpoint
from lit_effattn.checkpoints.folders import Parts
from lit_effattn.checkpoints.restoring import check_counters, check_optimizer, check_schedule
from lit_effattn.settings.trainer import Trainer
from lit_effattn.tasks.schedules import WarmupCosine
from tests.support.checkpoint_parts import divide

OPTIMISERS = ("SGD", "Adam", "AdamW", "RAdam", "NAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD")


def stepped(kind: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return a new optimiser, and the state of one like it that has stepped."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4), nn.LayerNorm(4))
        made.append((model, kind(model.parameters(), **options)))
    (_, new), (model, optimizer) = made
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    return new, optimizer.state_dict()


def test_every_optimiser_goes_on():
    for name in [*OPTIMISERS, "Adafactor"]:
        new, saved = stepped(getattr(torch.optim, name), lr=0.1)
        check_optimizer(saved, new, "it", n_steps=2)
        new.load_state_dict(saved)
        new.step()


def test_other_groups_of_parameters_are_said_in_a_line():
    """Such as those of a run with the other `decay_biases_and_gains`."""
    new, saved = stepped(torch.optim.AdamW)
    (group,) = saved["param_groups"]
    for first in (1, 3):
        groups = [{**group, "params": [*range(first)]}, {**group, "params": [*range(first, 5)]}]
        with pytest.raises(ValueError, match=rf"have {first} \+ {5 - first} parameters.* 5: .*--init_weights in place"):
            check_optimizer({**saved, "param_groups": groups}, new, "it")


def test_states_may_be_divided_among_processes(tmp_path: Path):
    new, saved = stepped(torch.optim.Adam, lr=0.1)
    parts = Parts(divide({"optimizer_states": [saved]}, tmp_path / "last.ckpt", 2))
    (divided,) = parts.map(lambda tensor: tensor)["optimizer_states"]
    check_optimizer(divided, new, "it")
    divided["state"][0]["exp_avg"] = divided["state"][1]["exp_avg"]
    with pytest.raises(ValueError, match=r"it\.state\[0\]\.exp_avg is .* of shape \(5, 3\)"):
        check_optimizer(divided, new, "it")


def test_a_moment_of_another_size():
    for name in ("Adam", "Adafactor"):
        new, saved = stepped(getattr(torch.optim, name), lr=0.1)
        key = next(key for key, value in saved["state"][0].items() if value.ndim)
        saved["state"][0][key] = torch.zeros(7, 7)
        with pytest.raises(ValueError, match=rf"it\.state\[0\]\.{key} is .* for a parameter of shape \(5, 3\)"):
            check_optimizer(saved, new, "it")


@pytest.mark.parametrize("name", [*OPTIMISERS, "Adafactor"])
def test_a_state_without_entries_is_refused_after_a_step(name: str):
    options = {"momentum": 0.9} if name == "SGD" else {}
    new, saved = stepped(getattr(torch.optim, name), lr=0.1, **options)
    for state in ({}, {0: {}}):
        check_optimizer({**saved, "state": state}, new, "it", n_steps=0)
        with pytest.raises(ValueError, match=rf"it\.state is a mapping of \d, not that of {name} after 2 steps"):
            check_optimizer({**saved, "state": state}, new, "it", n_steps=2)


def test_an_optimiser_of_the_users_own_may_have_no_state():
    class Signs(torch.optim.SGD):
        pass

    new, saved = stepped(Signs, lr=0.1, momentum=0.9)
    check_optimizer({**saved, "state": {}}, new, "it", n_steps=2)


@pytest.mark.parametrize("step", [-1.0, float("nan")])
def test_an_optimisers_count_below_zero(step: float):
    new, saved = stepped(torch.optim.Adam, lr=0.1)
    saved["state"][1]["step"] = torch.tensor(step)
    with pytest.raises(ValueError, match=r"it\.state\[1\]\.step is (-1|nan), not a count"):
        check_optimizer(saved, new, "it")


def test_a_schedule_has_its_entries():
    (parameter,) = nn.Linear(1, 1, bias=False).parameters()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for schedule in (lr_scheduler.LambdaLR(optimizer, float), lr_scheduler.ReduceLROnPlateau(optimizer)):
        state = schedule.state_dict()
        check_schedule(state, schedule, "it")
        with pytest.raises(ValueError, match=r"it has no .*last_epoch, .*which a "):
            check_schedule({}, schedule, "it")
        with pytest.raises(ValueError, match=r"it\.last_epoch is -5, not a count"):
            check_schedule({**state, "last_epoch": -5}, schedule, "it")


def test_counters_are_whole_and_all_there():
    new = {"total": {"ready": 0, "is_last": False}, "loaders": [1], "state": {}}
    check_counters({"total": {"ready": 3, "is_last": True}, "state": {}}, new)
    for value, words in ((-1, "is -1"), (1.5, "is 1.5"), (None, "is None")):
        with pytest.raises(ValueError, match=rf"total\.ready {words}, not a count"):
            check_counters({"total": {"ready": value, "is_last": True}, "state": {}}, new)
    with pytest.raises(ValueError, match="total is None, not a mapping"):
        check_counters({}, new)


def resumed(folder: Path, model: dict[str, Any], make: Callable[[], dict[str, Any]]) -> None:
    """Train for two epochs of two steps, and resume for two more; `make` gives arguments of each Trainer."""
    quiet: Any = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    for epochs, path in ((2, None), (4, folder / "checkpoints" / "last.ckpt")):
        run = Trainer(default_root_dir=folder, max_epochs=epochs, accelerator="cpu", **quiet, **make())
        task = PixelModel(Transformer(8, 2, 1), (2, 2, 1), 4, **model)
        run.fit(task, DataLoader(torch.randint(4, (4, 4)), batch_size=2), ckpt_path=path)
        assert run.global_step == 2 * epochs


def test_a_run_resumes_while_its_weights_are_averaged(tmp_path: Path):
    """Lightning's callback replaces the schedule by its own, and restores that itself."""
    averaging = {"swa_lrs": 0.1, "swa_epoch_start": 1}
    resumed(
        tmp_path,
        {"lr_scheduler": WarmupCosine},
        lambda: {"callbacks": [StochasticWeightAveraging(**averaging), LastCheckpoint()]},
    )


def test_a_run_of_float16_resumes_before_its_first_step_that_is_not_skipped(tmp_path: Path):
    """The scale is too large for four steps, so the optimiser has no state yet."""

    def make() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
        return {"callbacks": [LastCheckpoint()], "plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}

    resumed(tmp_path, {}, make)
    assert not torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"]
