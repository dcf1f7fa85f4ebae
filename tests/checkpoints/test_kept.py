"""Checkpoints and configurations that earlier versions wrote, one run a task: this version scores and resumes them.

`python -m tests.checkpoints.test_kept NAME` adds a run, made by this version, to `kept.zip`. What is there stays.
"""

import argparse
import json
import re
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.commands import ends, last
from tests.support.small_runs import SETTINGS, write_data

KEPT = Path(__file__).with_name("kept.zip")
"""For each name TASK or TASK_VERSION: last.ckpt, config.yaml, and the numbers that `numbers` returned when written."""


def task_of(name: str) -> str:
    return name.partition("_")[0]


def numbers(name: str) -> dict[str, float]:
    """Score `last.ckpt` in the current folder, and train for another epoch.

    Returns:
        The metrics of the test, and the sums of the magnitudes of all weights and optimiser states after the training.
    """
    write_data(task_of(name))
    given = ["--config", "config.yaml", "--trainer.default_root_dir", "runs", "--ckpt_path", "last.ckpt"]
    output = ends("test", *given)
    result = {metric: float(value) for metric, value in re.findall(r"^test (.+): ([-\d.]+)", output, re.M)}
    ends("fit", *given, "--trainer.max_epochs", "2")
    end = last("runs")
    content = torch.load(end, weights_only=True)
    moments = [t for state in content["optimizer_states"][0]["state"].values() for t in state.values()]
    result["weights"] = float(sum(t.double().abs().sum() for t in content["state_dict"].values()))
    result["moments"] = float(sum(t.double().abs().sum() for t in moments))
    return result


def unpack(name: str) -> dict[str, float]:
    """Write the files of a kept run into the current folder; return its numbers."""
    with zipfile.ZipFile(KEPT) as kept:
        for file in ("last.ckpt", "config.yaml"):
            Path(file).write_bytes(kept.read(f"{name}/{file}"))
        result: dict[str, float] = json.loads(kept.read(f"{name}/numbers.json"))
    return result


def names() -> list[str]:
    with zipfile.ZipFile(KEPT) as kept:
        return sorted({entry.partition("/")[0] for entry in kept.namelist()})


@pytest.mark.parametrize("name", names())
def test_a_kept_run_has_the_same_scores_and_goes_on_to_the_same_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    expected = unpack(name)
    assert numbers(name) == pytest.approx(expected, rel=1e-4, abs=2e-4)


def test_each_task_has_a_kept_run():
    assert {task_of(name) for name in names()} == SETTINGS.keys()


def _add(name: str) -> None:
    """Add a run of this version."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_data(task_of(name))
        Path("it.yaml").write_text(re.sub("d_model: .*", "d_model: 4", yaml.safe_dump(SETTINGS[task_of(name)])))
        ends("fit", "--config", "it.yaml")
        made = last("runs")
        files = {"last.ckpt": made.read_bytes(), "config.yaml": (made.parents[1] / "config.yaml").read_bytes()}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for file, content in files.items():
            Path(file).write_bytes(content)
        files["numbers.json"] = json.dumps(numbers(name), indent=1).encode()
    with zipfile.ZipFile(KEPT, "a", zipfile.ZIP_DEFLATED) as kept:
        if name in {entry.partition("/")[0] for entry in kept.namelist()}:
            raise SystemExit(f"{name} is there, and stays as it was written")
        for file, content in files.items():
            kept.writestr(f"{name}/{file}", content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help="TASK or TASK_VERSION")
    for given in parser.parse_args().names:
        _add(given)
