import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import __main__ as command


@pytest.fixture
def ran(monkeypatch):
    """What is started, instead of it: each with its limit; those in `ends` end otherwise than well."""
    ran = SimpleNamespace(runs=[], ends={})

    def run(words, timeout):
        assert words[:3] == [sys.executable, "-m", "benchmarks"]
        ran.runs.append((words[3:], timeout))
        end = ran.ends.get(words[3], 0)
        if isinstance(end, Exception):
            raise end
        return SimpleNamespace(returncode=end)

    monkeypatch.setattr(command.subprocess, "run", run)
    return ran


@pytest.fixture
def with_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_no_name_runs_the_short_version(ran, capsys):
    command.main(["--output", "folder"])
    assert [words[0] for words, _ in ran.runs] == [words.split()[0] for words in command.SHORT]
    assert all(words[-2:] == ["--output", "folder"] and limit is None for words, limit in ran.runs)
    output = capsys.readouterr().err
    assert output.index("To run:") < output.index("python -m benchmarks steps")


def test_gpu_runs_all_that_it_is_for_within_9_minutes(ran, with_a_gpu):
    command.main(["gpu", "--device", "cuda:1"])
    assert [words for words, _ in ran.runs] == [[*shlex.split(words), "--device", "cuda:1"] for words in command.GPU]
    assert sum(limit for _, limit in ran.runs) < 9 * 60
    assert {words[0] for words, _ in ran.runs} == {"kernels", "layers", "generation", "steps", "scaling"}


def test_one_that_fails_does_not_lose_the_others(ran, with_a_gpu, capsys):
    ran.ends = {"scaling": 1, "layers": subprocess.TimeoutExpired("layers", 40)}
    with pytest.raises(SystemExit) as end:
        command.main(["gpu"])
    assert end.value.code == 1
    assert len(ran.runs) == len(command.GPU)
    output = capsys.readouterr().err.splitlines()
    assert output[-3] == f"2 of {len(command.GPU)} failed:"
    assert output[-2].endswith("--limit 1: exit status 1")
    assert output[-1].endswith("stopped after 90 s")


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


def test_missing_matplotlib_is_said_before_anything_runs(ran, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "_run", ran.runs.append)
    for words in (["scaling"], []):
        with pytest.raises(SystemExit):
            command.main([*words, "--output", str(tmp_path)])
        assert "pip install 'lit-effattn[bench]'" in capsys.readouterr().err
    assert ran.runs == []
