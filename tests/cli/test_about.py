"""`lit-effattn --version --verbose`."""

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from lit_effattn.cli import main
from lit_effattn.ops.runtime import selection
from tests.support.commands import fails


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    selection._notice.cache_clear()  # each warning is given once
    monkeypatch.delenv(selection.KERNELS, raising=False)
    monkeypatch.delenv("CXX", raising=False)


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Run the command, and return the lines that it prints by their first words."""
    main(["--version", "--verbose"])
    printed: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        name, _, text = line.partition(" ")
        printed.setdefault(name, []).append(text.strip())
    return printed


def test_versions_devices_compiler_and_kernels_are_printed(capsys: pytest.CaptureFixture[str]):
    printed = lines(capsys)
    for name in ("lit-effattn", "torch", "lightning", "jsonargparse", "numpy"):
        assert printed[name] == [version(name)]
    assert torch.backends.cpu.get_cpu_capability() in printed["cpu"][0]
    assert printed["auto"][0].startswith("cuda" if torch.cuda.is_available() else "cpu")
    operations = ("linear attention", "Performer", "linear attention with decay or the delta rule")
    assert {f"cpu, {operation}: c++" for operation in operations} <= set(printed["kernels"])
    assert "g++" in printed["compiler"][0] or "clang" in printed["compiler"][0]


def test_why_the_plain_form_runs_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-compiler")
    selection.cpp_build.obstacle.cache_clear()
    selection.cpp_build.library.cache_clear()
    try:
        printed = lines(capsys)
    finally:
        selection.cpp_build.obstacle.cache_clear()
    assert "no C++ compiler 'no-compiler'" in printed["compiler"][0]
    assert all("plain form" in line and "'no-compiler'" in line for line in printed["kernels"])
    assert printed["environment"][0] == "CXX=no-compiler"


@pytest.mark.parametrize(("form", "shown"), [("plain", "cpu, Performer: plain"), ("fast", "is not one of plain")])
def test_a_form_that_the_environment_names_is_shown(
    form: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(selection.KERNELS, form)
    assert shown in lines(capsys)["kernels"][1]


def test_other_options_of_version_are_rejected(capsys: pytest.CaptureFixture[str]):
    assert "no other option than --verbose" in fails(capsys, "--version", "--quiet", code=2)


def test_auto_takes_the_cpu_on_a_mac_and_says_so(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert "float64" in lines(capsys)["mps"][0]
    with caplog.at_level("INFO"):
        main(["fit", "--config", "digits_linear", "--trainer.fast_dev_run", "1", "--model.backbone.n_layers", "1"])
    assert "the CPU is used, since Apple's GPUs have no float64" in caplog.text
