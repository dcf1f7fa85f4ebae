from pathlib import Path

import pytest

from lit_effattn.datamodules.common.faults import Fault
from lit_effattn.datamodules.common.records import read_records


def texts(path: Path, content: str, columns: tuple[str, str] = ("text", "label")) -> list:
    path.write_text(content, encoding="utf-8")
    records = read_records(path, columns)
    items = [record if isinstance(record, Fault) else record.texts(columns) for record in records]
    return [item.reason if isinstance(item, Fault) else item for item in items]


def test_a_csv_has_quotes_and_lines_within_them(tmp_path: Path):
    content = 'id,label,text\n1,good,"a, ""b""\nc"\n2,,d\n\n3,bad\n4,bad,e\n'
    expected = ["header row", ['a, "b"\nc', "good"], "empty", "empty", "not 3 columns", ["e", "bad"]]
    assert texts(tmp_path / "x.csv", content) == expected
    assert texts(tmp_path / "y.csv", "a,good\nb,bad\n") == [["a", "good"], ["b", "bad"]]
    after_blanks = 'text, label\n"a, b", "good"\nc, "bad"\n" c","bad"\n'
    expected = ["header row", "quoted after a blank", "quoted after a blank", [" c", "bad"]]
    assert texts(tmp_path / "y.csv", after_blanks) == expected
    for damaged in ('text,label\n"a,good\nb,bad\n', 'text,label\n"a"b,good\n'):
        with pytest.raises(ValueError, match=r"z\.csv:\d: is not CSV .*correct it"):
            texts(tmp_path / "z.csv", damaged)
    with pytest.raises(ValueError, match=r"z\.csv:1: names the column 'label' twice; rename"):
        texts(tmp_path / "z.csv", "text,label,label\na,good,bad\n")
    assert texts(tmp_path / "z.csv", "text,label,id,id\na,good,1,2\n") == ["header row", ["a", "good"]]


def test_a_first_row_names_columns_in_any_order(tmp_path: Path):
    assert texts(tmp_path / "x.tsv", "label\ttext\ngood\ta\n") == ["header row", ["a", "good"]]
    assert texts(tmp_path / "x.tsv", "source\ttarget\na\tgood\n") == ["header row", ["a", "good"]]
    assert texts(tmp_path / "x.tsv", "Label\tText\ngood\ta\n") == ["header row", ["a", "good"]]
    for suffix, cell_end in (("tsv", "\t"), ("csv", ",")):
        rows = f"\nlabel{cell_end}text\n\ngood{cell_end}a\nlabel{cell_end}text\n"
        assert texts(tmp_path / f"x.{suffix}", rows) == [
            "empty",
            "header row",
            "empty",
            ["a", "good"],
            ["text", "label"],
        ]
    for header in ("category,text", "Sentiment,Review", "tgt,src"):
        with pytest.raises(ValueError, match=rf"x\.csv:1: the columns are {header}, not text,label; give the options"):
            texts(tmp_path / "x.csv", f"{header}\ngood,a\n")
    assert texts(tmp_path / "x.txt", "a\tgood\n") == [["a", "good"]]
    assert texts(tmp_path / "x.jsonl", '{"label": "good", "text": "a"}\n\n[]\n') == [
        *(["a", "good"], "empty", "without two texts")
    ]
