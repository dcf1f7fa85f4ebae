import copy
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.fit import WARM, Bare, Clock, fit
from lit_effattn.tasks import PixelModel

TINY = "--model.backbone.d_model 8 --model.backbone.n_heads 2 --model.backbone.n_layers 1 --data.batch_size 2"
DIGITS = f"{TINY} --model.lr_scheduler null"
TEXT = f"{DIGITS} --data.segment_len 8 --data.max_bytes 200000"
CONFIGS = Path(__file__).parents[2] / "configs"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command adds to the path, and texts are cached."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FORCE_COLOR", "0")


def test_the_bare_loop_learns_what_fit_learns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The same model, batches, optimiser, clipping and memory: only what is around them differs."""
    run = partial(fit, str(CONFIGS / "stdlib_xl.yaml"), TEXT.split(), 2, CPU, str(tmp_path / "runs"))
    bare = Bare(run())
    start, began = bare.start, {}
    monkeypatch.setattr(bare, "start", lambda model: (began.update(copy.deepcopy(model.state_dict())), start(model)))
    clock = run(beside=bare)
    learned = clock.model.state_dict()
    assert clock.model is not bare.model
    assert not torch.equal(learned["embedding.weight"], began["embedding.weight"])
    torch.testing.assert_close(dict(bare.model.state_dict()), dict(learned))
    mine, other = bare.probe(), clock.probe()
    assert mine.tokens == other.tokens == 2 * 8
    assert len(bare.seconds) == len(clock.seconds) == WARM + 2 + 1
    assert min(mine.first, mine.step, other.first, other.step) > 0
    assert os.environ["FORCE_COLOR"] == "0"
    assert Clock.beside is None


@pytest.fixture
def pause(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let the seconds that are measured go by at once."""
    passed, real = [], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + sum(passed))
    return passed.append


def test_neither_pays_for_the_other(pause: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Pauses are lower bounds, and long ones far above what the other takes without them."""
    run = partial(fit, str(CONFIGS / "digits_linear.yaml"), DIGITS.split(), 2, CPU, str(tmp_path))
    bare = Bare(run())
    objective = bare.model.objective
    with monkeypatch.context() as patch:
        patch.setattr(bare.model, "objective", lambda *args: (pause(200), objective(*args))[1], raising=False)
        clock = run(beside=bare)
    assert bare.probe().step >= 200
    assert clock.probe().step < 100
    bare = Bare(clock)
    monkeypatch.setattr(PixelModel, "log", lambda *args, **options: pause(200))
    clock = run(beside=bare)
    assert bare.probe().step < 100
    assert clock.probe().step >= 200


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = str(CONFIGS / "digits_linear.yaml")
    words = ["--only", "checkpointing", "--steps", "1", "--repeats", "2", "--device", "cpu"]
    command.main(["fit", config, "--flags", DIGITS, *words, "--output", str(tmp_path)])
    rows = {row["what"]: row for row in json.loads((tmp_path / "fit.json").read_text(encoding="utf-8"))["rows"]}
    assert [*rows] == ["bare loop", "fit", "checkpointing"]
    steps = {name: row["ms/step"]["samples"] for name, row in rows.items()}
    for name, row in rows.items():
        assert row["tokens/s ÷ bare loop's"]["samples"] == pytest.approx(
            [bare / mine for bare, mine in zip(steps["bare loop"], steps[name], strict=True)]
        )
        first, second = row["tokens/s ÷ bare loop's"]["samples"]
        mean, error = row["the mean ± its standard error"].split(" ± ")
        assert float(mean) == pytest.approx((first + second) / 2, abs=1e-3)
        assert float(error) == pytest.approx(abs(first - second) / 2, abs=1e-3)
        assert row["ms/step − bare loop's"]["samples"] == pytest.approx(
            [mine - bare for bare, mine in zip(steps["bare loop"], steps[name], strict=True)]
        )
        assert row["tokens/s"]["samples"] == pytest.approx([2 * 64 * 1000 / ms for ms in steps[name]])
    assert "Epoch" not in capsys.readouterr().out  # the progress bar's


def test_around_is_what_a_bare_loop_does_not_do(
    pause: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Pauses are lower bounds: no machine is too slow, or too busy, for this."""

    def slower(owner: object, name: str, seconds: float) -> None:
        was = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **options: (pause(seconds), was(*args, **options))[1])

    slower(PixelModel, "objective", 40)
    slower(torch.Tensor, "backward", 20)
    slower(torch.nn.utils, "clip_grad_norm_", 10)
    slower(PixelModel, "log", 30)  # around the model
    clock = fit(str(CONFIGS / "digits_linear.yaml"), DIGITS.split(), 2, CPU, str(tmp_path))
    probe = clock.probe()
    assert probe.around is not None
    assert probe.around >= 30
    assert probe.step - probe.around >= 40 + 20 + 10
    assert clock.model._objective is PixelModel.objective
    before = [*clock.inside]
    bare = Bare(clock)
    bare.start(clock.model)
    bare.step(torch.zeros(2, 64, dtype=torch.long), watched=False)
    assert clock.inside == before


def test_an_epoch_that_is_too_short_is_refused():
    words = ["--flags", f"{TINY} --data.batch_size 700", "--steps", "1", "--device", "cpu"]
    with pytest.raises(ValueError, match=r"an epoch has 2 batches, and a round takes 4 \+ 1 \+ 1"):
        command.main(["fit", str(CONFIGS / "digits_linear.yaml"), *words])
