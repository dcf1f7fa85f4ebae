"""Files of several documents, FASTA and JSON lines, in `TextStream` and `data prepare`. The oracle is the texts."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_effattn.datamodules import TextStream
from lit_effattn.datamodules.text.prepare import prepare
from lit_effattn.datamodules.text.records import records
from lit_effattn.datamodules.text.token_store import TokenStore
from lit_effattn.datamodules.text.tokenizers import AminoAcidTokenizer, Tokenizer

TEXTS = ["".join("ACDEFGHIKLMNPQRSTVWY"[(i * j) % 20] for j in range(1 + 7 * i % 30)) for i in range(45)]
HEADERS = [f"tr|P{i:05}|NAME >of {i}" for i in range(45)]


def fasta(texts: list[str], headers: list[str], end: str = "\n", width: int = 7) -> str:
    """Records of lines of `width` residues, with an empty line after each."""
    lines = []
    for header, text in zip(headers, texts, strict=True):
        lines += [f">{header}", *(text[i : i + width] for i in range(0, len(text), width)), ""]
    return end.join([*lines, ""])


def stream(root: Path, tmp_path: Path, **options: Any) -> TextStream:
    options = {"tokens": "amino_acids", "segment_len": 16, "batch_size": 1, **options}
    data = TextStream("files", root=str(root), cache=str(tmp_path / "cache"), **options)
    data.prepare_data()
    data.setup("test")
    return data


def documents(store: TokenStore, split: str) -> list[str]:
    tokens = store.split(split)
    return [store.tokenizer.decode(tokens[a:b].tolist()) for a, b in pairwise(tokens.borders.tolist())]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["x.fasta", "x.FA", "x.fna", "x.faa.gz"])
def test_every_20th_record_of_a_fasta_file_is_for_test_with_its_header(tmp_path: Path, name: str, end: str):
    content = fasta(TEXTS, HEADERS, end).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    data = stream(tmp_path / name, tmp_path)
    remainders = {"test": [0], "val": [1], "train": range(2, 20)}
    for split, those in remainders.items():
        expected = [i for i in range(45) if i % 20 in those]
        assert documents(data._store, split) == [TEXTS[i] for i in expected]
        assert data._store.titles(split) == [HEADERS[i] for i in expected]
    borders = np.cumsum([0, len(TEXTS[0]), len(TEXTS[20])])
    index, n, titles = data.documents_at("test", np.array([0, *(borders[1:] - 1), *borders[1:]]))
    assert (index.tolist(), n, titles) == ([0, 0, 1, 1, 2], 3, [HEADERS[i] for i in (0, 20, 40)])
    assert data._store.n_tokens["test"] == sum(len(TEXTS[i]) for i in (0, 20, 40))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".fasta"])
def test_subfolders_are_the_splits_of_both(tmp_path: Path, suffix: str):
    for split, part in (("train", TEXTS[:30]), ("val", TEXTS[30:35]), ("test", TEXTS[35:])):
        (tmp_path / "in" / split).mkdir(parents=True)
        text = (
            "".join(json.dumps({"of": {"seq": t}}) + "\n" for t in part)
            if "json" in suffix
            else fasta(part, HEADERS[: len(part)])
        )
        path = tmp_path / "in" / split / f"a{suffix}"
        path.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    prepare(tmp_path / "in", tmp_path / "out", tokens="amino_acids", field="of.seq")
    column = {"column": "of.seq"} if "json" in suffix else {}
    for store in (TokenStore(tmp_path / "out"), stream(tmp_path / "in", tmp_path, **column)._store):
        assert documents(store, "train") == TEXTS[:30]
        assert documents(store, "val") == TEXTS[30:35]
        assert documents(store, "test") == TEXTS[35:]
        assert store.titles("test") == ([] if "json" in suffix else HEADERS[:10])


@pytest.mark.parametrize("shard_bytes", [50, 10**6])
def test_a_prepared_fasta_file_does_not_depend_on_its_shards(tmp_path: Path, shard_bytes: int):
    (tmp_path / "x.fasta").write_text(fasta(TEXTS, HEADERS))
    about, _ = prepare(
        tmp_path / "x.fasta", tmp_path / "out", tokens="amino_acids", held_out=5, shard_bytes=shard_bytes
    )
    assert (len(about["shards"]) > 20) == (shard_bytes == 50)
    store = TokenStore(tmp_path / "out")
    for split, those in {"test": [0], "val": [1], "train": [2, 3, 4]}.items():
        expected = [i for i in range(45) if i % 5 in those]
        assert documents(store, split) == [TEXTS[i] for i in expected]
        assert store.titles(split) == [HEADERS[i] for i in expected]


def test_texts_and_records_in_one_folder(tmp_path: Path):
    root = tmp_path / "in"
    root.mkdir()
    (root / "a.fasta").write_text(fasta(TEXTS[:20], HEADERS[:20]) + ">empty\n")
    (root / "b.txt").write_text(TEXTS[20])
    (root / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("", *TEXTS[21:])))
    store = stream(root, tmp_path)._store
    assert documents(store, "test") == TEXTS[::20]
    assert documents(store, "val") == TEXTS[1::20]
    assert store.titles("test") == [HEADERS[0], "", ""]


def test_other_letters_become_x_and_are_counted(tmp_path: Path):
    texts = ">a\n;a comment\nMkJ*lé\n>b\nUOBZX\n>c\nacdj\n"
    (tmp_path / "x.fasta").write_text(texts + "".join(f">{i}\nA\n" for i in range(20)))
    with pytest.warns(match="files: 4 letters are not of the vocabulary, and read as X"):
        data = stream(tmp_path / "x.fasta", tmp_path)
    assert documents(data._store, "test") == ["MKXXLX", "A"]
    assert documents(data._store, "val") == ["UOBZX", "A"]
    assert documents(data._store, "train")[0] == "ACDX"
    about, _ = prepare(tmp_path / "x.fasta", tmp_path / "out", tokens="amino_acids", shard_bytes=8)
    assert TokenStore(tmp_path / "out").replaced.startswith("4 letters are not")
    assert len(about["shards"]) > 2
    assert (data.vocab_size, data.unit) == (26, "token")
    tokenizer = Tokenizer.from_spec(data.tokenizer)
    assert isinstance(tokenizer, AminoAcidTokenizer)
    assert tokenizer.decode(range(26)) == "ABCDEFGHIKLMNOPQRSTUVWXYZ"
    assert tokenizer.unknown("mk*J \n") == ["*", "J"]


def test_what_is_no_fasta_file_is_named(tmp_path: Path):
    (tmp_path / "x.fasta").write_text("\nMKV\n>a\nMK\n")
    with pytest.raises(ValueError, match=r"x\.fasta: the line at byte 1 precedes the first header"):
        stream(tmp_path / "x.fasta", tmp_path)
    (tmp_path / "y.fasta").write_bytes(b">a\nMKV\n>b\rMKL\r>c\rMK\r")
    with pytest.raises(
        ValueError, match=r"y\.fasta: the header at byte 7 has a carriage return in it; end lines with LF"
    ):
        stream(tmp_path / "y.fasta", tmp_path)
    (tmp_path / "x.jsonl").write_text('{"text": "MK"}\n{"seq": "MK"}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl: the line at byte 15: its field 'text' must be a text"):
        stream(tmp_path / "x.jsonl", tmp_path)


def test_records_of_a_part_of_a_file(tmp_path: Path):
    """Each record is of the part in which its header begins, for each division in two."""
    content = fasta(TEXTS[:6], HEADERS[:6]).replace(TEXTS[2][:7], f"{TEXTS[2][:3]} {TEXTS[2][3:7]}\t")
    (tmp_path / "x.fasta").write_text(content)
    whole = list(records(tmp_path / "x.fasta", "text"))
    assert [(title, text.decode()) for _, title, text in whole] == list(zip(HEADERS, TEXTS[:6], strict=False))
    for cut in range(len(content) + 1):
        read: list[bytes] = []
        parts = [(0, cut), (cut, len(content))] if cut else [(0, len(content))]
        found = [list(records(tmp_path / "x.fasta", "text", *part, read.append)) for part in parts]
        assert [record for part in found for record in part] == whole
        assert b"".join(read) == content.encode()
