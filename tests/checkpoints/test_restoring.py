"""States of optimisers and schedules are checked against new ones before they are loaded."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_effattn.checkpoints.folders import Parts
from lit_effattn.checkpoints.restoring import check_optimizer, check_scheduler
from lit_effattn.tasks.optimizers import MuonWithAdamW
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
        for group in saved["param_groups"]:  # an older torch's
            group.pop("foreach", None)
            if name != "Adafactor":  # the first one had it
                group.pop("maximize", None)
        check_optimizer(saved, new, "it", has_stepped=True)


def test_a_group_without_an_option_is_refused_unless_a_step_works():
    """torch adds some options that earlier versions lacked, and no others."""
    for name in [*OPTIMISERS, "Adafactor"]:
        new, saved = stepped(getattr(torch.optim, name), lr=0.1)
        refused = set()
        for option in saved["param_groups"][0].keys() - {"params"}:
            without = [{k: v for k, v in saved["param_groups"][0].items() if k != option}]
            changed = {**saved, "param_groups": without}
            loaded, _ = stepped(getattr(torch.optim, name), lr=0.1)
            loaded.load_state_dict(changed)
            for p in loaded.param_groups[0]["params"]:
                p.grad = torch.ones_like(p)
            try:
                loaded.step()
            except KeyError:
                with pytest.raises(ValueError, match=rf"it\.param_groups\[0\] has no '{option}'"):
                    check_optimizer(changed, new, "it", has_stepped=True)
                refused.add(option)
        assert refused


def test_what_is_unset_in_a_new_group_is_a_boolean_later():
    for option in ["foreach", "fused"]:
        for name in OPTIMISERS:
            new, saved = stepped(getattr(torch.optim, name), lr=0.1)
            (group,) = saved["param_groups"]
            if option not in group:
                continue
            for value in (torch.zeros(2, 3), "yes", [], 1):
                changed = {**saved, "param_groups": [{**group, option: value}]}
                with pytest.raises(ValueError, match=rf"it\.param_groups\[0\]\.{option} .*true, false or None"):
                    check_optimizer(changed, new, "it", has_stepped=True)
            for value in (True, False, None):
                changed = {**saved, "param_groups": [{**group, option: value}]}
                check_optimizer(changed, new, "it", has_stepped=True)


def test_an_optimiser_of_two_goes_on():
    """A matrix has the state of the optimiser of its group."""
    new, saved = stepped(MuonWithAdamW)
    check_optimizer(saved, new, "it", has_stepped=True)
    for number, wrong in ((0, saved["state"][2]), (2, saved["state"][0])):
        changed = {**saved, "state": {**saved["state"], number: wrong}}
        with pytest.raises(ValueError, match=rf"it\.state\[{number}\] has no (momentum_buffer|step)"):
            check_optimizer(changed, new, "it", has_stepped=True)


def test_other_groups_of_parameters_are_said_in_a_line():
    """Such as those of a run before gates had no weight decay, or with the other `decay_biases_and_gains`."""
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
    divided["state"][0]["exp_avg"] = divided["state"][2]["exp_avg"]
    with pytest.raises(ValueError, match=r"it\.state\[0\]\.exp_avg is .* of shape \(5, 3\)"):
        check_optimizer(divided, new, "it", has_stepped=True)


def test_what_a_step_needs_is_there():
    for name in [name for name in OPTIMISERS if name != "SGD"]:
        new, saved = stepped(getattr(torch.optim, name), lr=0.1)
        for key, value in saved["state"][0].items():
            for wrong in (None, "x", [], {}, torch.zeros(7, 7, 7)):
                changed = copy.deepcopy(saved)
                changed["state"][0][key] = wrong
                with pytest.raises(ValueError, match=rf"it\.state\[0\]\.{key} is"):
                    check_optimizer(changed, new, "it", has_stepped=True)
            if value.ndim == 0 and key == "step":
                changed["state"][0][key] = -1.0
                with pytest.raises(ValueError, match="not a count"):
                    check_optimizer(changed, new, "it", has_stepped=True)
        with pytest.raises(ValueError, match="though the run has made steps"):
            check_optimizer({**saved, "state": {}}, new, "it", has_stepped=True)
        check_optimizer({**saved, "state": {}}, new, "it", has_stepped=False)


def schedule() -> Any:
    return WarmupCosine(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1), total_steps=9, warmup_steps=2)


def test_a_schedule_of_fewer_options_goes_on():
    saved = schedule().state_dict()
    del saved["cosine_from_start"]
    check_scheduler(saved, schedule(), "it")


def test_a_schedule_replaces_nothing_else():
    for name in ["get_lr", "step", "optimizer", "state_dict", 7]:
        with pytest.raises(ValueError, match="which is not part of the state"):
            check_scheduler({**schedule().state_dict(), name: 5}, schedule(), "it")


def test_a_schedule_says_where_it_is():
    saved = schedule().state_dict()
    del saved["last_epoch"]
    with pytest.raises(ValueError, match="it has no 'last_epoch'"):
        check_scheduler(saved, schedule(), "it")
