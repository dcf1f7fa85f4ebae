"""The sizes in states of optimisers are compared with those of new ones before they are loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_effattn.checkpoints.folders import Parts
from lit_effattn.checkpoints.restoring import check_optimizer
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
        check_optimizer(saved, new, "it")
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
