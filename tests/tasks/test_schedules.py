import math
from io import BytesIO

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from lit_effattn.tasks.schedules import InverseSquareRoot, WarmupCosine, WarmupStableDecay


def optimiser(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates or (1.0,)])


def rates(schedule: LambdaLR, n: int) -> list[float]:
    """Return the rate that each of `n` steps is taken with."""
    taken = []
    for _ in range(n):
        taken.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return taken


def test_warmup_and_decay_by_hand():
    """A quarter, half, three quarters, the peak; then half a cosine: 1, (1 + √½) / 2, ½, (1 − √½) / 2, 0."""
    taken = rates(WarmupCosine(optimiser(0.8), total_steps=8, warmup_steps=4), 11)
    half = math.sqrt(0.5)
    fall = [1, (1 + half) / 2, 0.5, (1 - half) / 2, 0, 0, 0]
    assert taken == pytest.approx([0.2, 0.4, 0.6, 0.8, *[0.8 * f for f in fall]], abs=1e-12)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("warmup_steps", [0, 1, 4])
def test_the_schedule_of_transformer_xls_code(warmup_steps: int):
    """The rate is set after each update: to a share of the peak, or to the cosine of all the steps taken."""
    theirs = optimiser(0.8)
    cosine = CosineAnnealingLR(theirs, T_max=12)
    expected = []
    for steps_taken in range(1, 13):
        expected.append(theirs.param_groups[0]["lr"])
        theirs.step()
        if steps_taken < warmup_steps:
            theirs.param_groups[0]["lr"] = 0.8 * steps_taken / warmup_steps
        else:
            cosine.step(steps_taken)
    schedule = WarmupCosine(optimiser(0.8), 12, warmup_steps, cosine_from_start=True)
    assert rates(schedule, 12) == pytest.approx(expected, abs=1e-12)
    assert expected[0] == 0.8
    if not warmup_steps:
        assert rates(WarmupCosine(optimiser(0.8), 12), 12) == pytest.approx(expected, abs=1e-12)


def test_it_ends_at_a_fraction_of_the_peak():
    taken = rates(WarmupCosine(optimiser(2.0), total_steps=5, warmup_steps=1, final=0.1), 9)
    assert taken[0] == taken[1] == 2.0
    assert taken[3] == pytest.approx(2 * (0.1 + 0.9 / 2))
    assert taken[5:] == pytest.approx([0.2] * 4)


def test_every_group_keeps_its_own_peak():
    schedule = WarmupCosine(optimiser(1.0, 10.0), total_steps=4, warmup_steps=2)
    assert schedule.get_last_lr() == pytest.approx([0.5, 5.0])


def test_a_fraction_of_the_steps_of_the_run():
    """The warm-up is half of 8 steps; a given `total_steps` stays."""
    schedule = WarmupCosine(optimiser(0.8), warmup_steps=0.5)
    schedule.set_total_steps(8)
    expected = rates(WarmupCosine(optimiser(0.8), total_steps=8, warmup_steps=4), 11)
    assert schedule.get_last_lr() == [expected[0]]
    assert rates(schedule, 11) == expected
    with pytest.raises(ValueError, match="total_steps=None"):
        rates(WarmupCosine(optimiser()), 1)
    given = WarmupCosine(optimiser(), total_steps=2)
    given.set_total_steps(8)
    assert given.total_steps == 2


@pytest.mark.parametrize(
    ("warmup_steps", "run_steps", "words"), [(0, math.inf, "no limit in steps.*max_steps"), (9, 8, "9 must be below")]
)
def test_runs_without_a_limit_or_below_the_warmup_are_rejected(warmup_steps: int, run_steps: float, words: str):
    with pytest.raises(ValueError, match=words):
        WarmupCosine(optimiser(), warmup_steps=warmup_steps).set_total_steps(run_steps)


@pytest.mark.parametrize(
    ("decay", "fall"),
    [("linear", [1, 0.75, 0.5, 0.25]), ("sqrt", [1, 1 - math.sqrt(0.25), 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)])],
)
def test_warmup_plateau_and_decay_by_hand(decay: str, fall: list[float]):
    schedule = WarmupStableDecay(optimiser(0.8), total_steps=9, warmup_steps=2, decay_steps=4, decay=decay)
    assert rates(schedule, 11) == pytest.approx([0.8 * f for f in [0.5, 1, 1, 1, 1, *fall, 0, 0]], abs=1e-12)
    schedule = WarmupStableDecay(optimiser(0.8), 9, 2, 4, final=0.5, decay=decay)
    assert rates(schedule, 11) == pytest.approx(
        [0.8 * f for f in [0.5, 1, 1, 1, 1, *[0.5 + f / 2 for f in fall], 0.5, 0.5]]
    )


def test_without_a_warmup_or_a_decay_the_rate_is_constant():
    assert rates(WarmupStableDecay(optimiser(), 5, decay_steps=0), 5) == [1.0] * 5


def test_the_plateau_does_not_depend_on_the_length_of_the_run():
    """Fractions are of the run's steps."""
    short, long = (WarmupStableDecay(optimiser(), warmup_steps=2, decay_steps=0.25) for _ in range(2))
    short.set_total_steps(8)
    long.set_total_steps(16)
    assert rates(short, 6) == rates(long, 6) == [0.5, 1, 1, 1, 1, 1]
    assert rates(short, 2) == pytest.approx([1, 1 - math.sqrt(0.5)])
    assert rates(long, 6) == [1] * 6


def test_a_run_shorter_than_warmup_and_decay_is_rejected():
    with pytest.raises(ValueError, match=r"warmup_steps=3 and decay_steps=0\.6 are 6 steps, more than the 5"):
        WarmupStableDecay(optimiser(), 5, 3, decay_steps=0.6)
    with pytest.raises(ValueError, match=r"decay_steps=5.*total_steps=5"):
        WarmupStableDecay(optimiser(), 5, decay_steps=5)
    schedule = WarmupStableDecay(optimiser(), warmup_steps=4, decay_steps=4)
    with pytest.raises(ValueError, match="are 8 steps, more than the 7"):
        schedule.set_total_steps(7)
    with pytest.raises(ValueError, match="decay='cosine' is not one of linear, sqrt"):
        WarmupStableDecay(optimiser(), 5, decay="cosine")


@pytest.mark.parametrize(("d_model", "warmup"), [(64, 10), (128, 1)])
def test_the_rate_of_the_2017_paper(d_model: int, warmup: int):
    """Equation 3: d_model^−½ · min(step^−½, step · warmup^−1.5), whose peak is (d_model · warmup)^−½."""
    n = 3 * warmup + 5
    taken = rates(InverseSquareRoot(optimiser((d_model * warmup) ** -0.5), warmup), n)
    expected = [d_model**-0.5 * min(step**-0.5, step * warmup**-1.5) for step in range(1, n + 1)]
    assert taken == pytest.approx(expected, rel=1e-12)
    assert max(taken) == taken[warmup - 1]


SCHEDULES = {
    "cosine": lambda: WarmupCosine(optimiser(0.3), 8, 3, final=0.2),
    "stable": lambda: WarmupStableDecay(optimiser(0.3), 8, 1, 4),
    "inverse square root": lambda: InverseSquareRoot(optimiser(0.3), 3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_saved_schedule_continues(name: str):
    """Through a file of plain data."""
    whole = rates(SCHEDULES[name](), 10)
    first = SCHEDULES[name]()
    rates(first, 3)
    file = BytesIO()
    torch.save((first.state_dict(), first.optimizer.state_dict()), file)
    file.seek(0)
    schedule_state, optimiser_state = torch.load(file, weights_only=True)
    second = SCHEDULES[name]()
    second.load_state_dict(schedule_state)
    second.optimizer.load_state_dict(optimiser_state)
    assert rates(second, 7) == pytest.approx(whole[3:], abs=1e-15)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"total_steps": 5, "warmup_steps": 5}, "warmup_steps=5.*total_steps=5"),
        ({"total_steps": 5, "warmup_steps": -1}, "warmup_steps=-1"),
        ({"total_steps": 0}, "total_steps=0"),
        ({"warmup_steps": 1.0}, r"warmup_steps=1\.0 must be a fraction"),
        ({"total_steps": 5, "final": 1.1}, r"final=1\.1"),
        ({"total_steps": 5, "final": -0.1}, r"final=-0\.1"),
    ],
)
def test_bad_options_are_named(options: dict, words: str):
    with pytest.raises(ValueError, match=words):
        WarmupCosine(optimiser(), **options)
    with pytest.raises(ValueError, match="warmup_steps=0"):
        InverseSquareRoot(optimiser(), warmup_steps=0)
