"""The cells of the tutorial run in order, shortened."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lit_effattn.cli import main

pytestmark = pytest.mark.exhaustive

NOTEBOOK = Path(__file__).parent.parent / "docs" / "tutorial.ipynb"
CODE = ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
SHORT = {"EPOCHS = 6": "EPOCHS = 1", "STEPS = 200": "STEPS = 2", "max_bytes=500_000": "max_bytes=60_000"}
SHORT |= {
    "--trainer.max_epochs 2": "--trainer.max_steps 2 --trainer.val_check_interval 1",
    "--samples 8": "--samples 1",
}


def run(cell: str, names: dict) -> None:
    r"""Run a cell as Jupyter does: lines after `!` are commands, `%pip` is pip, `\` at a line's end continues them.

    The package is installed, so pip finds it without an index.
    """
    for part in re.split(r"^([!%].*)$", cell.replace("\\\n", " "), flags=re.M):
        if part.startswith("%pip "):
            subprocess.run([sys.executable, "-m", *shlex.split(part[1:]), "--no-index"], check=True)
        elif part.startswith("!"):
            program, *words = shlex.split(part[1:])
            assert program == "lit-effattn"
            main(words)
        else:
            exec(part, names)


def test_the_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    whole = "\0".join(CODE)
    for long, short in SHORT.items():
        assert long in whole
        whole = whole.replace(long, short)
    names: dict = {"__name__": "tutorial"}
    for cell in whole.split("\0"):
        run(cell, names)
    output = capsys.readouterr().out
    assert float(re.search(r"largest difference: (\S+)", output)[1]) < 1e-6
    carried = [float(found) for found in re.findall(r"memory carried: +(\S+)", output)]
    assert carried[0] == pytest.approx(carried[1], rel=1e-5)
    assert len([*tmp_path.glob("runs/*/*/report.html")]) == 1
    assert (tmp_path / "runs/model_digits/generated/samples/completed.png").is_file()
    assert {"completed.png", "attention.png"} < {path.name for path in tmp_path.iterdir()}
