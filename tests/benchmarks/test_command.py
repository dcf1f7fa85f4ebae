import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as command


@pytest.fixture
def ran(monkeypatch):
    """What is started, instead of it; those in `ends` end otherwise than well."""
    ran = SimpleNamespace(runs=[], ends={})

    def run(words):
        assert words[:3] == [sys.executable, "-m", "benchmarks"]
        ran.runs.append(words[3:])
        return SimpleNamespace(returncode=ran.ends.get(words[3], 0))

    monkeypatch.setattr(command.subprocess, "run", run)
    return ran


def test_no_name_runs_the_short_version(ran, capsys):
    command.main(["--output", "folder"])
    assert [words[0] for words in ran.runs] == [words.split()[0] for words in command.SHORT]
    assert all(words[-2:] == ["--output", "folder"] for words in ran.runs)
    output = capsys.readouterr().err
    assert output.index("To run:") < output.index("python -m benchmarks steps")


def test_one_that_fails_does_not_lose_the_others(ran, capsys):
    ran.ends = {"scaling": 1}
    with pytest.raises(SystemExit) as end:
        command.main(["--repeats", "2"])
    assert end.value.code == 1
    assert len(ran.runs) == len(command.SHORT)
    output = capsys.readouterr().err.splitlines()
    assert output[-2] == f"1 of {len(command.SHORT)} failed:"
    assert output[-1].endswith("--repeats 2: exit status 1")


def test_what_is_invalid_is_refused_before_the_first_run(ran, monkeypatch, capsys):
    monkeypatch.setattr(command, "SHORT", ("steps --small", "kernels --no_such_option"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, complaint in ((), "--no_such_option"), (["gpu"], "gpu needs a CUDA device, not cpu"):
        with pytest.raises(SystemExit):
            command.main(list(words))
        assert complaint in capsys.readouterr().err
    assert ran.runs == []


def test_what_can_not_be_measured_is_refused(capsys):
    for words, complaint in {
        "steps --device cuda:99": "cuda:99 does not exist",
        "steps --device gpu": "gpu is not a device",
        "steps --lengths 2": "2 is less than 3",
        "kernels --repeats many": "invalid integer value: 'many'",
    }.items():
        with pytest.raises(SystemExit):
            command.main(words.split())
        assert complaint in capsys.readouterr().err
