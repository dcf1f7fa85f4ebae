import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as benchmarks_command
from benchmarks import reproduce
from tests.support.commands import REPOSITORY


class Machine:
    """Runs nothing: a training writes checkpoints into its folder, and a test says a score."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[tuple[str, ...]] = []
        self.dies = ""  # as soon as a command has a word with this, once it has written its checkpoints
        monkeypatch.setattr(reproduce, "command", self)
        monkeypatch.setattr(reproduce, "read_checkpoint", lambda path: torch.load(path, weights_only=True))

    def __call__(self, *words: str) -> str:
        self.ran.append(words)
        if words[0] == "fit" and "--ckpt_path" not in words:
            folder = Path(words[words.index("--trainer.default_root_dir") + 1], "2026-11-23_00-00-00", "checkpoints")
            folder.mkdir(parents=True)
            for name in ("last", "best"):
                torch.save({"global_step": 7}, folder / f"{name}.ckpt")
        if self.dies in words:
            raise KeyboardInterrupt
        if words[1:3] == ("--config", "sorting_small_infinite"):
            sys.exit("it fails")
        return "test accuracy: 0.5000\ntest perplexity: 2.0000\n"

    def trained(self) -> list[str]:
        """Return configuration and flags of each training, without those of every run."""
        return [" ".join((words[2], *words[7:])) for words in self.ran if words[0] == "fit"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    monkeypatch.chdir(tmp_path)
    Path("page.md").write_text(f"before\n{reproduce.BEGIN}\nold\n{reproduce.END}\nafter\n")
    return Machine(monkeypatch)


def run(*more: str) -> list[dict]:
    names = ["--only", "copy-softmax", "sorting-infinite", "copy-lsh-4"]
    words = ["reproduce", *names, "--root", "runs", "--log", "log.jsonl", "--page", "page.md", *more]
    return reproduce.run(benchmarks_command._parse(words)).rows


def test_what_is_done_is_not_run_again_and_a_failure_loses_the_others_nothing(machine: Machine):
    assert [row["state"] for row in run()] == ["done", "done", "started"]  # in the order of RUNS
    assert machine.trained() == [
        "copy_linear --model.backbone.attention SoftmaxAttention",
        reproduce._COPY_LSH,
        "sorting_small_infinite",
    ]
    page = Path("page.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page
    assert f"| `fit --config {reproduce._COPY_LSH}` | 4.5 | 0.5000 accuracy | 7 | 0 |" in page
    machine.ran.clear()
    run()
    assert all(word != "SoftmaxAttention" for words in machine.ran for word in words)
    assert [words[:2] for words in machine.ran if words[0] == "fit"] == [("fit", "--ckpt_path")]
    assert len(Path("log.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("when", ["LSHAttention", "test"])
def test_a_killed_run_goes_on_from_its_last_checkpoint(when: str, machine: Machine):
    machine.dies = when
    with pytest.raises(KeyboardInterrupt):
        run()
    machine.dies = ""
    (last,) = (
        Path("runs").rglob("last.ckpt") if when == "test" else sorted(Path("runs").rglob("last.ckpt"), key=_age)[1:]
    )
    machine.ran.clear()
    run()
    assert machine.ran[0] == ("fit", "--ckpt_path", str(last.resolve()))
    entries = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    resumed = "copy-softmax" if when == "test" else "copy-lsh-4"
    assert {entry["run"]: entry["minutes"] is None for entry in entries}[resumed]


def _age(path: Path) -> int:
    return path.stat().st_mtime_ns


def test_a_plan_runs_nothing_and_the_page_must_have_a_place_for_the_table(machine: Machine, capsys):
    assert {row["state"] for row in run("--plan")} == {"to run"}
    assert "To run: 3 of 3, about 9 minutes on 2 cores" in capsys.readouterr().err
    Path("page.md").write_text("nothing")
    with pytest.raises(SystemExit, match=r"--page page.md: it must have the lines <!--"):
        run()
    assert machine.ran == []
    printed = "test bits/dim: 1.8022\ntest PER: 9.38 %\ntest utterances: 133\nval PER: 1.00 %\n"
    assert reproduce.scores(printed) == {"bits/dim": "1.8022", "PER": "9.38 %"}


def test_all_take_two_hours_at_most_and_the_page_has_their_table():
    assert sum(small.minutes for small in reproduce.RUNS) <= 120
    assert len({small.name for small in reproduce.RUNS}) == len(reproduce.RUNS)
    page = (REPOSITORY / "docs/reproduce.md").read_text(encoding="utf-8")
    tables, _, _ = page.partition(reproduce.BEGIN)
    assert all(re.search(rf"[|,] {re.escape(small.name)}[ ,]", tables) for small in reproduce.RUNS)
    table = reproduce.table(reproduce.read(REPOSITORY / "docs/reproduce-small.jsonl"))
    assert f"{reproduce.BEGIN}\n\n{table}\n\n{reproduce.END}" in page


def test_commands_of_the_pages_are_understood():
    commands = [
        shlex.split(words, comments=True)
        for path in sorted((REPOSITORY / "docs").rglob("*.md"))
        if path.parent.name != "raw"
        for words in re.findall(r"python -m benchmarks ([^`\n]+)", path.read_text(encoding="utf-8"))
        if "--help" not in words
    ]
    assert len(commands) > 15
    for words in commands:
        benchmarks_command._parse(words)
