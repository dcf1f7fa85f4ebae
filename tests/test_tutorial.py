"""The tutorial notebook: its cells run in order, shortened, and what is stored is small and has no machine's paths."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lit_effattn.cli import main

NOTEBOOK = Path(__file__).parent.parent / "docs" / "tutorial.ipynb"
CELLS = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(NOTEBOOK.read_text())["cells"]]
CODE = [source for kind, source in CELLS if kind == "code"]
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


@pytest.mark.exhaustive
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


def test_it_is_small_and_was_executed():
    notebook = json.loads(NOTEBOOK.read_text())
    assert NOTEBOOK.stat().st_size < 300_000
    counts = [cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert counts == [*range(1, len(CODE) + 1)]
    outputs = json.dumps([cell.get("outputs") for cell in notebook["cells"]])
    assert '"error"' not in outputs
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work)/", outputs)
    links = re.findall(r"\]\(([^)\s#:]+)", "".join(source for kind, source in CELLS if kind == "markdown"))
    assert links
    assert all((NOTEBOOK.parent / link).is_file() for link in links)
