import json
import math

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.experiments.features import KINDS, closed_form, orthogonal_bound, squared_errors

TINY = "features --length 24 --head_dim 4 --n_features 4 8 --scales 0.5 --draws 3 --kernel_draws 50 --device cpu"


def test_table(tmp_path, capsys):
    command.main([*TINY.split(), "--output", str(tmp_path)])
    text = (tmp_path / "features.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() == text.strip()
    assert (tmp_path / "features.png").stat().st_size > 0
    rows = json.loads((tmp_path / "features.json").read_text(encoding="utf-8"))["rows"]
    output = [row for row in rows if row["what"].startswith("output")]
    assert len(output) == 3 * 2 * 2
    assert len(rows) - len(output) == 3 * 3 * 2  # three angles
    for row in output:
        assert len(row["squared error"]["samples"]) == 3
        assert all(math.isfinite(x) and x > 0 for x in row["squared error"]["samples"])
        assert row["÷ iid"]["median"] == 1 or row["ω"] == "orthogonal"


def test_more_features_err_less(tmp_path):
    command.main([*TINY.split(), "--n_features", "4", "4096", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "features.json").read_text(encoding="utf-8"))["rows"]
    errors = {(r["features"], r["ω"], r["F"]): r["squared error"] for r in rows if r["what"].startswith("output")}
    for name in KINDS:
        for directions in ("orthogonal", "iid"):
            assert errors[name, directions, 4096]["median"] < errors[name, directions, 4]["median"] / 10


def pair(cosine: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([0.5, 0, 0, 0], dtype=torch.float64)
    y = 0.5 * torch.tensor([cosine, math.sqrt(1 - cosine**2), 0, 0], dtype=torch.float64)
    return x, y


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cosine", [0.7, -0.7])
def test_errors_are_those_of_the_closed_forms(name: str, cosine: float):
    x, y = pair(cosine)
    errors = squared_errors(KINDS[name], x, y, 3, 100_000, orthogonal=False)
    score = (errors.mean() - closed_form(name, x, y, 3)) / (errors.std() / math.sqrt(len(errors)))
    assert abs(score.item()) < 4


@pytest.mark.parametrize("cosine", [0.7, 0.0])
def test_orthogonal_vectors_keep_their_bound(cosine: float):
    x, y = pair(cosine)
    errors = squared_errors(KINDS["positive"], x, y, 4, 100_000, orthogonal=True)
    bound = orthogonal_bound(x, y, 4)
    assert bound < closed_form("positive", x, y, 4)
    assert errors.mean() < bound


@pytest.mark.parametrize("cosine", [0.7, 0.0])
def test_closed_form_of_positive_features_by_integration(cosine: float):
    """Of one feature: E exp(2 ωᵀz − ‖x‖² − ‖y‖²) − exp(2 x·y), over the component of ω along z."""
    x, y = pair(cosine)
    along = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    density = (-along.square() / 2).exp() / math.sqrt(2 * math.pi)
    z = (x + y).norm()
    second = torch.trapezoid(density * (2 * along * z - x.square().sum() - y.square().sum()).exp(), along)
    assert closed_form("positive", x, y, 1) == pytest.approx(float(second - (2 * x @ y).exp()), rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [("--n_features 7", "7 is odd"), ("--draws 0", "0 is less than 1"), ("--head_dim 1", "1 is")],
)
def test_what_can_not_be_measured_is_refused(flags: str, complaint: str, capsys):
    with pytest.raises(SystemExit):
        command.main(["features", *flags.split()])
    assert complaint in capsys.readouterr().err
