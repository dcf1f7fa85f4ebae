import pytest

from lit_effattn.datamodules import SequencePairs
from scripts.libreoffice_pairs import main, split_of

PAGE = """<!DOCTYPE html><html><head><title>no text</title></head><body><header><p>no id</p></header>
<h1 id="hd_1"><a name="x"></a>{0} of the
  page</h1>
<p id="par_1">Press <span class="switch"><span hidden="true" id="MAC_1"><span>Cmd</span></span><span hidden="true"
id="default_1"><span class="key">{1}</span></span></span>+F2 &amp; wait<br>a moment.</p>
<div><p id="par_2">The same text in both languages</p></div>
<p id="par_3">{2} the first of two</p><p id="par_3">{2} the second of two</p>
<p id="par_4">short {0}</p>
<p id="{3}">without a counterpart in the other</p>
<p id="par_5"></p>
<p id="par_6">once in English, twice in {4}</p>{5}
</body></html>"""


@pytest.fixture
def pages(tmp_path):
    """120 pages with the same paragraphs, apart from their titles."""
    twice = '<p id="par_6">again</p>'
    languages = {
        "en-US": ("Title", "Ctrl", "This is", "par_9", "German", ""),
        "de": ("Titel", "Strg", "Das ist", "par_8", "Deutsch", twice),
    }
    for language, words in languages.items():
        folder = tmp_path / language / "usr/share/libreoffice/help" / language / "text"
        for i in range(120):
            path = folder / f"{i % 3}" / f"{i}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            title, *others = words
            path.write_text(PAGE.format(f"{title} {i}", *others), encoding="utf-8")
    return tmp_path


def test_pages_become_pairs_in_splits(pages, capsys):
    out = pages / "out"
    main([str(pages / "en-US"), str(pages / "de"), str(out)])
    output = capsys.readouterr().out
    common = {
        "Press Ctrl+F2 & wait a moment.\tPress Strg+F2 & wait a moment.",
        "This is the first of two\tDas ist the first of two",
        "This is the second of two\tDas ist the second of two",
    }
    names = [f"{i % 3}/{i}.html" for i in range(120)]
    for split in ("train", "val", "test"):
        lines = (out / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
        numbers = [name.split("/")[1].split(".")[0] for name in names if split_of(name) == split]
        assert numbers
        expected = {f"Title {i} of the page\tTitel {i} of the page" for i in numbers}
        assert set(lines) == expected | (common if split == "train" else set())
        assert len(lines) == len(set(lines))
        assert f"{split}: {len(lines)} pairs" in output
    data = SequencePairs("files", root=str(out), cache=str(pages / "cache"))
    data.prepare_data()
    data.setup("fit")
    assert not len(data.left_out["train"]) + len(data.left_out["val"])


def test_lengths_are_counted_in_words(pages):
    main([str(pages / "en-US"), str(pages / "de"), str(pages / "out"), "--min_words", "6", "--max_words", "6"])
    lines = [line for split in ("train", "val", "test") for line in (pages / "out" / f"{split}.tsv").open()]
    assert {line.split()[0] for line in lines} == {"Press", "This"}


def test_a_folder_without_pages_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has 0 folders usr/share/libreoffice/help/\*/text"):
        main([str(tmp_path), str(tmp_path), str(tmp_path / "out")])
