"""Progress bars: on stderr, and only on a terminal."""

import sys

import pytest

from lit_effattn.datamodules.common.bars import progress_bar


def test_without_a_terminal_nothing_is_printed(capsys: pytest.CaptureFixture[str]):
    with progress_bar() as bar:
        assert list(bar.track(range(3), description="Counting")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_has_a_bar_on_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar() as bar:
        assert list(bar.track(range(3), description="Counting")) == [0, 1, 2]
    out, err = capsys.readouterr()
    assert "Counting" in err
    assert out == ""
