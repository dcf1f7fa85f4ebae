"""Text of files reaches the terminal without characters that it obeys."""

import logging
import unicodedata
from pathlib import Path

import pytest
import yaml

from lit_effattn.analysis import page
from lit_effattn.analysis.tables import Table, markdown, shown
from lit_effattn.checkpoints.printable import PrintableRecords, printable
from lit_effattn.cli import fail, main

HOSTILE = "a\x1b[2J\x9b31m\u202eb\x07\r\x00\u2066\u2028\x7f"
SAFE = r"a\x1b[2J\x9b31m\u202eb\x07\r\x00\u2066\u2028\x7f"


def test_controls_and_orders_of_writing_are_escaped():
    assert printable(HOSTILE) == SAFE
    for number in (*range(0x20), *range(0x7F, 0xA0)):
        assert printable(chr(number)) == chr(number) or number not in (9, 10)
        assert printable(chr(number), one_line=True).isprintable()
    bidirectional = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    for number in range(0x110000):
        if unicodedata.bidirectional(chr(number)) in bidirectional or 0xD800 <= number < 0xE000:
            assert printable(chr(number)).isascii()


def test_other_text_stays():
    for text in ["two\nlines\tand a tab", "naïve café", "می‌خواهم", "👩‍👩‍👧", "שלום", "日本語"]:
        assert printable(text) == text


def test_what_is_printed(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        fail(HOSTILE)
    assert f"error: {SAFE}\n" in capsys.readouterr().err
    assert shown(f"{HOSTILE}\n") == f"{SAFE}\\n"
    assert SAFE in markdown(Table("t", ["x"], [[HOSTILE]]))
    assert SAFE in page.note(HOSTILE)
    assert SAFE in page.table(Table("t", ["x"], [[f"{HOSTILE} "]]))


def test_log_records():
    record = logging.LogRecord("x", logging.INFO, "x", 1, "%s", (HOSTILE,), None)
    assert PrintableRecords().filter(record)
    assert record.getMessage() == SAFE


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Settings of a run that are shown, and remarks and warnings while it does."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("one", HOSTILE), ("two", "x")):
        Path(name).mkdir()
        Path(name, "config.yaml").write_text(yaml.safe_dump({"model": value}))
    main(["compare", "one", "two", "--format", "markdown"])
    output = capsys.readouterr().out
    assert SAFE.split("\\r")[0] in output
    assert not set(output) & {"\x1b", "\x9b", "\u202e", "\x07"}
    with pytest.raises(SystemExit):
        main(["compare", f"{HOSTILE}.run".replace("\x00", "")])
    assert "\x1b" not in capsys.readouterr().err


def test_the_command_changes_what_lightning_logs(monkeypatch: pytest.MonkeyPatch):
    from lit_effattn.cli.output import quieten

    monkeypatch.setattr("warnings.formatwarning", None)
    quieten()
    handlers = [handler for name in ("lightning.pytorch", "lightning") for handler in logging.getLogger(name).handlers]
    assert handlers
    assert all(any(isinstance(f, PrintableRecords) for f in handler.filters) for handler in handlers)
