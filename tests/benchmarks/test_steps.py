import copy
import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.steps import WARM, Bare, Clock, fit

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
    """The same model, batches, optimiser, clipping, memory and precision: only what is around them differs."""
    config, given = tmp_path / "bf16.yaml", (CONFIGS / "stdlib_xl.yaml").read_text(encoding="utf-8")
    config.write_text(given.replace("\ntrainer:\n", "\ntrainer:\n  precision: bf16-mixed\n"), encoding="utf-8")
    run = partial(fit, str(config), TEXT.split(), 2, CPU, str(tmp_path / "runs"))
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


@pytest.mark.exhaustive
def test_table_of_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    configs = [str(CONFIGS / f"digits_{kind}.yaml") for kind in ("linear", "classes_linear")]
    words = ["--only", "saving", "--steps", "1", "--repeats", "2", "--device", "cpu"]
    command.main(["steps", *configs, "--flags", DIGITS, *words, "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "steps.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["configuration"], row["what"]) for row in rows] == [
        (config, what) for config in configs for what in ("bare loop", "fit", "saving")
    ]
    steps = [row["ms/step"]["samples"] for row in rows]
    for row, own, bare in zip(rows, steps, [steps[0]] * 3 + [steps[3]] * 3, strict=True):
        ratios = row["tokens/s ÷ bare loop's"]["samples"]
        assert ratios == pytest.approx([a / b for a, b in zip(bare, own, strict=True)])
        of_first = row["ms/step ÷ fit's of the first"]["samples"]
        assert of_first == pytest.approx([a / b for a, b in zip(own, steps[1], strict=True)])
        mean, error = row["the mean ± its standard error"].split(" ± ")
        assert float(mean) == pytest.approx(sum(ratios) / 2, abs=1e-3)
        assert float(error) == pytest.approx(abs(ratios[0] - ratios[1]) / 2, abs=1e-3)
        assert row["tokens/s"]["samples"] == pytest.approx([2 * 64 * 1000 / ms for ms in own])
    assert "Epoch" not in capsys.readouterr().out  # the progress bar's


def test_an_epoch_that_is_too_short_is_refused():
    words = ["--flags", f"{TINY} --data.batch_size 700", "--steps", "1", "--device", "cpu"]
    with pytest.raises(ValueError, match=r"an epoch has 2 batches, but a round needs 4 \+ 1 \+ 1"):
        command.main(["steps", str(CONFIGS / "digits_linear.yaml"), *words])
