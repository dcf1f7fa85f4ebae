from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lit_effattn.checkpoints.averaging import average_parameters
from lit_effattn.checkpoints.io import read_checkpoint


class Model(nn.Module):
    """Parameters of several types, two of them one; buffers that count and that are drawn."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, dtype=torch.float64)
        self.second = nn.Linear(width, width, bias=False, dtype=torch.float64)
        self.second.weight = self.first.weight
        self.large = nn.Parameter(torch.zeros(2))
        self.coarse = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("features", torch.zeros(2))
        self.register_buffer("steps", torch.tensor(0))


def saved(path: Path, seed: int, **values: Tensor) -> dict[str, Tensor]:
    """Write a checkpoint of random numbers; return its state."""
    torch.manual_seed(seed)
    model = Model()
    for name, tensor in model.state_dict().items():
        tensor.copy_(values[name] if name in values else 100 * torch.rand(tensor.shape))
    torch.save({"state_dict": model.state_dict(), "global_step": seed}, path)
    return model.state_dict()


def averaged(paths: list[Path]) -> dict[str, Tensor]:
    checkpoint = read_checkpoint(paths[-1])
    average_parameters(checkpoint, paths, Model())
    assert checkpoint["global_step"] == len(paths) - 1
    return checkpoint["state_dict"]


def test_parameters_are_averaged_and_buffers_are_the_newest(tmp_path: Path):
    """By rational numbers, rounded once."""
    large = [2.0**24, 1.0, 1.0]  # in float32 their sum is 2²⁴
    paths = [tmp_path / f"{i}.ckpt" for i in range(3)]
    states = [saved(path, i, large=torch.full((2,), large[i])) for i, path in enumerate(paths)]
    result = averaged(paths)
    assert result.keys() == states[0].keys()
    for name, newest in states[-1].items():
        assert result[name].dtype == newest.dtype
        if name in ("features", "steps"):
            assert torch.equal(result[name], newest)
            continue
        for i, value in enumerate(result[name].flatten().tolist()):
            exact = sum(Fraction(state[name].flatten()[i].item()) for state in states) / 3
            spacing = torch.finfo(newest.dtype).eps
            assert value == pytest.approx(float(exact), rel=spacing)
    assert torch.equal(result["large"], torch.full((2,), (2**24 + 2) / 3))
    assert torch.equal(result["first.weight"], result["second.weight"])


def test_equal_checkpoints_have_their_own_mean(tmp_path: Path):
    for n in [1, 3, 5]:
        paths = [tmp_path / f"{i}.ckpt" for i in range(n)]
        for i, path in enumerate(paths):
            state = saved(path, 7, features=torch.zeros(2))
            torch.save({"state_dict": state, "global_step": i}, path)
        result = averaged(paths)
        assert torch.equal(result["large"], state["large"])
        assert torch.equal(result["coarse"], state["coarse"])


def another_shape(state: dict[str, Tensor]) -> None:
    state["large"] = torch.zeros(1)  # which could be added


def another_parameter(state: dict[str, Tensor]) -> None:
    state["more"] = state.pop("coarse")


def another_buffer(state: dict[str, Tensor]) -> None:
    state["features"] = torch.zeros(4)


def test_checkpoints_of_different_models_are_named(tmp_path: Path):
    for change, words in [
        (another_shape, "large is 1 in the first and 2 in the second"),
        (another_parameter, "more is 2 in the first and absent in the second"),
        (another_buffer, "features is 4 in the first and 2 in the second"),
    ]:
        paths = [tmp_path / f"{i}.ckpt" for i in range(3)]
        for i, path in enumerate(paths):
            saved(path, i)
        checkpoint = read_checkpoint(paths[1])
        change(checkpoint["state_dict"])
        torch.save(checkpoint, paths[1])
        with pytest.raises(ValueError, match=rf"1\.ckpt and .*2\.ckpt hold different models, .*: {words}"):
            averaged(paths)


def test_no_checkpoint_is_unpickled(tmp_path: Path):
    paths = [tmp_path / f"{i}.ckpt" for i in range(2)]
    saved(paths[1], 1)
    torch.save({"state_dict": {"first.weight": Path("an object")}}, paths[0])
    with pytest.raises(ValueError, match=r"0\.ckpt is damaged: it names 'pathlib PosixPath'"):
        averaged(paths)
