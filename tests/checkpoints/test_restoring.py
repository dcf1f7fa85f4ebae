"""States of optimisers and schedules are checked against new ones before they are loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_effattn.checkpoints.folders import Parts
from lit_effattn.checkpoints.restoring import check_optimizer, check_scheduler
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
        check_optimizer(saved, new, "it", has_stepped=True)
        if saved["state"]:  # SGD has none
            with pytest.raises(ValueError, match="state is empty, though the run has made steps"):
                check_optimizer({**saved, "state": {}}, new, "it", has_stepped=True)
        check_optimizer({**saved, "state": {}}, new, "it", has_stepped=False)
        new.load_state_dict(saved)
        new.step()


def test_an_optimiser_of_the_user_may_keep_no_state():
    class SignSGD(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    new = SignSGD(nn.Linear(2, 2).parameters())
    check_optimizer(new.state_dict(), new, "it", has_stepped=True)


def test_other_groups_of_parameters_are_said_in_a_line():
    """Such as those of a run with the other `decay_biases_and_gains`."""
    new, saved = stepped(torch.optim.AdamW)
    (group,) = saved["param_groups"]
    for first in (1, 3):
        groups = [{**group, "params": [*range(first)]}, {**group, "params": [*range(first, 5)]}]
        with pytest.raises(ValueError, match=rf"have {first} \+ {5 - first} parameters.* 5: .*--init_weights in place"):
            check_optimizer({**saved, "param_groups": groups}, new, "it", has_stepped=True)


def test_states_may_be_divided_among_processes(tmp_path: Path):
    new, saved = stepped(torch.optim.Adam, lr=0.1)
    parts = Parts(divide({"optimizer_states": [saved]}, tmp_path / "last.ckpt", 2))
    (divided,) = parts.map(lambda tensor: tensor)["optimizer_states"]
    check_optimizer(divided, new, "it", has_stepped=True)
    divided["state"][0]["exp_avg"] = divided["state"][1]["exp_avg"]
    with pytest.raises(ValueError, match=r"it\.state\[0\]\.exp_avg is .* of shape \(5, 3\)"):
        check_optimizer(divided, new, "it", has_stepped=True)


def test_a_moment_of_another_size():
    for name in ("Adam", "Adafactor"):
        new, saved = stepped(getattr(torch.optim, name), lr=0.1)
        key = next(key for key, value in saved["state"][0].items() if value.ndim)
        saved["state"][0][key] = torch.zeros(7, 7)
        with pytest.raises(ValueError, match=rf"it\.state\[0\]\.{key} is .* for a parameter of shape \(5, 3\)"):
            check_optimizer(saved, new, "it", has_stepped=True)


def schedule() -> Any:
    return WarmupCosine(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1), total_steps=9, warmup_steps=2)


def test_what_no_step_could_use_is_named():
    new, saved = stepped(torch.optim.AdamW)
    (group,), states = saved["param_groups"], saved["state"]
    others = r"state\[1\] has other parts than the states of similar parameters"
    for changed, words in [
        ({"state": states | {1: states[1] | {"exp_avg": "x"}}}, others),
        ({"state": states | {1: {k: v for k, v in states[1].items() if k != "exp_avg_sq"}}}, others),
        (
            {"state": states | {2: states[2] | {"step": torch.tensor(-7.5)}}},
            r"state\[2\].step is a tensor .*, not a count",
        ),
        ({"param_groups": [group | {"lr": "x"}]}, r"param_groups\[0\].lr is the text 'x', not a number"),
        ({"param_groups": [group | {"betas": (0.9,)}]}, "betas is a list of 1, not a list of 2"),
        ({"param_groups": [group | {"betas": (0.9, "x")}]}, r"betas\[1\] is the text 'x', not a number"),
        ({"param_groups": [group | {"foreach": "x"}]}, "foreach is the text 'x', not a number or None"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_optimizer(saved | changed, new, "it", has_stepped=True)


def test_a_schedule_of_fewer_options_goes_on():
    saved = schedule().state_dict()
    del saved["cosine_from_start"]
    check_scheduler(saved, schedule(), "it")


def test_a_schedule_replaces_nothing_else():
    for name in ["get_lr", "step", "optimizer", "state_dict", 7]:
        with pytest.raises(ValueError, match="which is not part of the state"):
            check_scheduler({**schedule().state_dict(), name: 5}, schedule(), "it")


def test_a_schedules_numbers_are_numbers():
    schedule = WarmupCosine(stepped(torch.optim.SGD)[0])
    saved = schedule.state_dict() | {"total_steps": 5}
    check_scheduler(saved, schedule, "it")
    for changed, words in (
        ({"total_steps": "x"}, "total_steps is the text"),
        ({"base_lrs": ["x"]}, r"base_lrs\[0\] is"),
    ):
        with pytest.raises(ValueError, match=words):
            check_scheduler(saved | changed, schedule, "it")


def test_a_schedule_says_where_it_is():
    saved = schedule().state_dict()
    del saved["last_epoch"]
    with pytest.raises(ValueError, match="it has no 'last_epoch'"):
        check_scheduler(saved, schedule(), "it")
