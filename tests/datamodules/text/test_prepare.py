"""Preparing a large text, and training from it. The oracle is the tokenizer on the documents, one after the other."""

import gzip
import hashlib
import json
import os
import signal
from itertools import pairwise

import numpy as np
import pytest

from lit_effattn.datamodules import IGNORE, TextStream
from lit_effattn.datamodules.text import prepare as module
from lit_effattn.datamodules.text.prepare import prepare
from lit_effattn.datamodules.text.token_store import FORMAT, TokenStore
from lit_effattn.datamodules.text.tokenizers import KINDS
from tests.datamodules.text.test_text_stream import n_bytes

LINES = [f"{i} birds sit on {i * i} wires,\nand {chr(0xE0 + i % 20)} sings.{'!' * (i % 7)}" for i in range(60)]


def jsonl(texts):
    return "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts)


@pytest.fixture
def source(tmp_path):
    """A folder of files of every kind; their documents in order are `LINES`, then `book`."""
    root = tmp_path / "in"
    (root / "b").mkdir(parents=True)
    (root / "a.jsonl").write_text(jsonl(LINES[:30]) + "\n" + jsonl([""]), encoding="utf-8")
    (root / "b" / "1.txt").write_text(LINES[30], encoding="utf-8")
    (root / "b" / "2.txt.gz").write_bytes(gzip.compress(LINES[31].encode()))
    (root / "b" / "empty.txt").touch()
    (root / "c.jsonl.gz").write_bytes(gzip.compress(jsonl(LINES[32:]).encode()))
    (root / "read.me").write_text("no")
    (root / ".hidden.txt").write_text("no")
    return root


def files(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def texts(folder, split):
    store = TokenStore(folder)
    tokens = store.split(split)
    return [store.tokenizer.decode(tokens[a:b].tolist()) for a, b in pairwise(tokens.borders.tolist())]


@pytest.mark.parametrize("shard_bytes", [40, 10**6])
def test_the_tokens_of_all_documents_in_order(source, tmp_path, shard_bytes):
    """For any division into shards, also where a line is longer than a shard's part."""
    about, left_out = prepare(source, tmp_path / "out", held_out=7, shard_bytes=shard_bytes)
    assert texts(tmp_path / "out", "test") == LINES[::7]
    assert texts(tmp_path / "out", "val") == LINES[1::7]
    assert texts(tmp_path / "out", "train") == [line for i, line in enumerate(LINES) if i % 7 > 1]
    store = TokenStore(tmp_path / "out")
    assert n_bytes(store, "test") == store.n_tokens["test"] == sum(len(line.encode()) for line in LINES[::7])
    assert about["n_documents"] == 60
    assert "1 ending in .me:" in str(left_out)
    assert left_out.counts == "; left out: 1 ending in .me, 1 hidden, 1 empty"
    assert (len(about["shards"]) == 1) == (shard_bytes == 10**6)
    written = b"".join(content for name, content in files(tmp_path / "out").items() if name.endswith(".bin"))
    assert written == "".join(LINES).encode()
    if shard_bytes == 10**6:
        (shard,) = about["shards"]
        inputs = [(source / "a.jsonl").read_bytes(), *(line.encode() for line in LINES[30:32])]
        assert shard["sha256"] == hashlib.sha256(written).hexdigest()
        assert shard["input_sha256"] == hashlib.sha256(b"".join(inputs) + jsonl(LINES[32:]).encode()).hexdigest()


def test_numbers_below_1_are_refused(source, tmp_path):
    for name in ("shard_bytes", "learn_bytes", "workers"):
        with pytest.raises(ValueError, match=f"{name}=0"):
            prepare(source, tmp_path / "out", **{name: 0})


def test_a_part_that_begins_with_a_line_has_it(tmp_path):
    """Each line, of as many bytes, is a shard of its own."""
    lines = [f"{i:02}" for i in range(12)]
    (tmp_path / "x.jsonl").write_text(jsonl(lines))
    size = len(jsonl(["00"]))
    about, _ = prepare(tmp_path / "x.jsonl", tmp_path / "out", held_out=3, shard_bytes=size)
    assert [shard["n_items"] for shard in about["shards"]] == [1] * 12
    assert texts(tmp_path / "out", "train") == lines[2::3]


def test_small_files_share_a_shard_as_long_as_they_fit():
    shards = module._shards({"a": 4, "b": 4, "c": 9, "d": 11, "e": 1, "f": 30}, {"d"}, 10)
    names = [[(part.name, part.start, part.stop) for part in shard] for shard in shards]
    assert names == [
        [("a", 0, 4), ("b", 0, 4)],
        [("c", 0, 9)],
        [("d", 0, 10)],
        [("d", 10, 11), ("e", 0, 1)],
        [("f", 0, 30)],
    ]


def test_a_vocabulary_is_learnt_from_all_shards(tmp_path, monkeypatch):
    lines = [f"{i:02}" for i in range(12)]
    (tmp_path / "x.jsonl").write_text(jsonl(lines))
    size = len(jsonl(["00"]))
    work = [
        module._Work(tmp_path, tmp_path, "text", number, parts)
        for number, parts in enumerate(module._shards({"x.jsonl": 12 * size}, {"x.jsonl"}, 4 * size))
    ]
    assert list(module._sample(work, KINDS["characters"], 6)) == ["00", "04", "08"]
    assert list(module._sample(work, KINDS["characters"], 12)) == [lines[i] for i in (0, 1, 4, 5, 8, 9)]
    (tmp_path / "y.txt").write_text("one document")
    monkeypatch.setattr(module, "_BLOCK", 4)
    work = [module._Work(tmp_path, tmp_path, "text", 0, [module.Part("y.txt", 0, 12)])]
    assert list(module._sample(work, KINDS["characters"], 6)) == ["one ", "docu"]


def test_a_learnt_vocabulary(source, tmp_path):
    """Bytes of text are counted, not tokens."""
    about, _ = prepare(source, tmp_path / "out", tokens="bpe", vocab_size=300, held_out=7, shard_bytes=500)
    store = TokenStore(tmp_path / "out")
    assert (about["dtype"], store.tokenizer.n_tokens) == ("uint16", 300)
    tokens = store.split("val")
    ids = np.concatenate([store.tokenizer.encode(line) for line in LINES[1::7]])
    assert tokens[0 : len(tokens)].tolist() == ids.tolist()
    assert n_bytes(store, "val") == sum(len(line.encode()) for line in LINES[1::7])
    data = TextStream("prepared", root=str(tmp_path / "out"), segment_len=5, batch_size=2)
    assert (data.tokens, data.unit, data.vocab_size) == ("bpe", "token", 300)
    assert data._store.n_tokens["val"] == len(ids) < n_bytes(store, "val")


def killed_after(shards, *args, **options):
    """Prepare in a process that SIGKILL ends while it writes the next shard."""
    if (child := os.fork()) == 0:
        make, encoded, made = module._make, module.encoded, []

        def counted(work):
            made.append(work)
            return make(work)

        def deadly(document, tokenizer):
            yield from encoded(document, tokenizer)
            if len(made) > shards:
                os.kill(os.getpid(), signal.SIGKILL)

        module._make, module.encoded = counted, deadly
        prepare(*args, **options)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_the_same_call_goes_on_after_a_kill(source, tmp_path, monkeypatch):
    """To the same files, and no shard is made twice."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    about, _ = prepare(source, whole, shard_bytes=300)
    killed_after(2, source, folder, shard_bytes=300)
    assert (folder / "shard-00002.unfinished").is_file()
    with pytest.raises(ValueError, match=r"killed' is not finished; run its .* again"):
        TextStream("prepared", root=str(folder)).prepare_data()
    made, make = [], module._make
    monkeypatch.setattr(module, "_make", lambda work: (made.append(work.number), make(work))[1])
    prepare(source, folder, shard_bytes=300)
    assert made == list(range(2, len(about["shards"])))
    assert files(folder) == files(whole)
    prepare(source, folder, shard_bytes=300)
    assert len(made) == len(about["shards"]) - 2


@pytest.mark.exhaustive
def test_workers_make_the_same_files(source, tmp_path):
    prepare(source, tmp_path / "one", shard_bytes=300)
    prepare(source, tmp_path / "two", shard_bytes=300, workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_other_settings_or_input_are_refused(source, tmp_path):
    folder = tmp_path / "out"
    prepare(source, folder)
    with pytest.raises(ValueError, match=r"out was made with tokens='bytes', not 'bpe'; use that value"):
        prepare(source, folder, tokens="bpe", vocab_size=300)
    with pytest.raises(ValueError, match=r"out was made with held_out=200, not 100"):
        prepare(source, folder, held_out=100)
    with pytest.raises(ValueError, match="tokenizer_of='model:stdlib' brings its vocabulary; leave out tokens='words'"):
        prepare(source, folder, tokens="words", tokenizer_of="model:stdlib")
    (source / "b" / "1.txt").write_text("changed")
    with pytest.raises(ValueError, match=r"out was made with other input: b/1.txt was added, removed or changed"):
        prepare(source, folder)
    with pytest.raises(ValueError, match=r"in has other files in it; use a new folder"):
        prepare(source, source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"text": "a"}\nno\n', r"x.jsonl: the line at byte 14: Expecting value.*correct it"),
        ("x.jsonl", b'{"body": "a"}\n', r"the line at byte 0: its field 'text' must be a text"),
        ("x.jsonl", b'{"text": "\\ud800"}\n', r"the line at byte 0: .*surrogates"),
        (
            "x.txt.gz",
            gzip.compress(b"abc" * 999, mtime=0)[:-9],
            r"x.txt.gz: its compression is damaged \(Compressed file ended",
        ),
        ("x.md", b"a", r"no file with text in it that ends in .txt"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare(tmp_path / name, tmp_path / "out")


def test_subfolders_are_the_splits_and_files_are_decoded(tmp_path):
    """Shards of several files a split; the vocabulary is that of train."""
    for split, lines in (("train", LINES[:9]), ("val", LINES[9:12]), ("test", LINES[12:20])):
        folder = tmp_path / "in" / split
        folder.mkdir(parents=True)
        (folder / "1.jsonl").write_text(jsonl([*lines[:-3], ""]), encoding="utf-8-sig")
        (folder / "2.jsonl").write_text(jsonl(lines[-3:-2]), encoding="utf-8-sig")
        (folder / "3.txt").write_text(lines[-2], encoding="utf-8-sig")
        (folder / "4.jsonl.gz").write_bytes(gzip.compress(jsonl(lines[-1:]).encode("utf-8-sig")))
    (tmp_path / "in" / "more").mkdir()
    (tmp_path / "in" / "more" / "a.txt").write_text("beside")
    about, left_out = prepare(tmp_path / "in", tmp_path / "out", tokens="characters", shard_bytes=100)
    assert len(about["shards"]) > 9
    assert left_out.counts == "; left out: 1 beside the folders train, val and test"
    assert texts(tmp_path / "out", "train") == LINES[:9]
    known = {*"".join(LINES[:9])}
    for split, lines in (("val", LINES[9:12]), ("test", LINES[12:20])):
        expected = ["".join(c if c in known else "\ufffd" for c in line) for line in lines]
        assert texts(tmp_path / "out", split) == expected
    prepare(tmp_path / "in", tmp_path / "out", tokens="characters", shard_bytes=100)  # finished: as it is
    with pytest.raises(ValueError, match=r"held_out=9: .*in has a subfolder for each split; leave it out"):
        prepare(tmp_path / "in", tmp_path / "again", held_out=9)
    (tmp_path / "in" / "test").rename(tmp_path / "in" / "other")
    with pytest.raises(ValueError, match="has subfolders train, val or test, but not test"):
        prepare(tmp_path / "in", tmp_path / "again")


def test_damaged_and_missing_folders(source, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere' has no manifest.json; make it with: lit-effattn data"):
        TextStream("prepared", root="nowhere").prepare_data()
    with pytest.raises(FileNotFoundError, match=r"nowhere: there is no such folder"):
        prepare(tmp_path / "nowhere", tmp_path / "out")
    prepare(source, tmp_path / "out")
    with pytest.raises(ValueError, match="leave out tokens='bytes'"):
        TextStream("prepared", root=str(tmp_path / "out"), tokens="bytes")
    os.truncate(tmp_path / "out" / "shard-00000.bin", 9)
    with pytest.raises(ValueError, match=r"shard-00000.bin is missing or damaged"):
        TextStream("prepared", root=str(tmp_path / "out")).prepare_data()


GOOD = {"format": FORMAT, "dtype": "uint8", "settings": {"held_out": 20}, "shards": []}


@pytest.mark.parametrize(
    "manifest",
    [
        "{",
        "[]",
        "{}",
        *(json.dumps({**GOOD, **bad}) for bad in ({"settings": {}}, {"settings": {"held_out": 0}}, {"shards": [{}]})),
        *(json.dumps({**GOOD, "shards": bad}) for bad in (3, [{"n_rows": "9"}])),
        *(json.dumps({**GOOD, "settings": {"splits": bad}}) for bad in (["train"], ["train", "val", "test"], 3)),
    ],
)
def test_a_damaged_manifest(manifest, tmp_path):
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(ValueError, match=r"manifest.json is missing or damaged; delete .* and prepare the data again"):
        TokenStore(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: good.astype(float),
        lambda good: good[..., None],
        lambda good: good[:1],
        lambda good: good + np.eye(2, good.shape[1], 1, dtype=int) * 10**9,
        lambda good: good * (np.arange(good.shape[1]) != 4),
        lambda good: good[:, :-1],
        None,
    ],
)
def test_a_damaged_index(source, tmp_path, damage):
    prepare(source, tmp_path / "out")
    path = tmp_path / "out" / "shard-00000.npy"
    if damage is None:
        os.truncate(path, 9)
    else:
        np.save(path, damage(np.load(path)))
    with pytest.raises(ValueError, match=r"shard-00000.npy is missing or damaged"):
        TokenStore(tmp_path / "out").n_tokens["train"]


# Training


def loader(folder, seed=3, num_workers=0, documents="apart"):
    options = {"segment_len": 8, "batch_size": 4, "shuffle_seed": seed, "num_workers": num_workers}
    return TextStream("prepared", root=str(folder), documents=documents, **options).train_dataloader()


def epoch_of(made, epoch):
    made.sampler.set_epoch(epoch)
    return [[x.tolist() for x in (batch.inputs, batch.targets, batch.fresh)] for batch in made]


def read(batches, rows=4):
    """The documents as they are read: begun by `fresh` or by <start>, from the first stream to the last."""
    actual = []
    for row in range(rows):
        for inputs, targets, is_fresh in batches:
            if is_fresh[row] and inputs[row][0] == 256:
                actual.append([])
            elif is_fresh[row]:
                actual.append([None])  # the rest of a document that the stream before has begun
            actual[-1] += [token for token in targets[row] if token != IGNORE]
    return actual


def test_an_epoch_of_whole_documents_has_each_once_and_resumes(source, tmp_path):
    prepare(source, tmp_path / "out")
    n_tokens = TokenStore(tmp_path / "out").n_tokens["train"]
    made = loader(tmp_path / "out", documents="whole", num_workers=1)
    epochs = []
    for epoch in range(2):
        made.sampler.set_epoch(epoch)
        epochs.append([(b.inputs.tolist(), b.targets.tolist(), b.starts.tolist()) for b in made])
        assert len(epochs[-1]) == len(made)
        scored = sum(token != IGNORE for _, targets, _ in epochs[-1] for row in targets for token in row)
        assert n_tokens - 4 * 8 < scored <= n_tokens  # less than a batch is dropped
    assert epochs[0] != epochs[1]
    second = loader(tmp_path / "out", documents="whole")
    second.load_state_dict(made.state_dict() | {"epoch": 1, "batches": 2})
    second.sampler.set_epoch(1)
    assert [(b.inputs.tolist(), b.targets.tolist(), b.starts.tolist()) for b in second] == epochs[1][2:]


def test_an_epoch_has_every_document_once_in_an_order_of_its_own(source, tmp_path):
    prepare(source, tmp_path / "out", shard_bytes=300)
    expected = sorted(line for i, line in enumerate(LINES) if i > 1)
    orders = []
    for epoch in range(2):
        texts = []
        for document in read(epoch_of(loader(tmp_path / "out"), epoch)):
            if document[0] is None:
                texts[-1] += bytes(document[1:])
            else:
                texts.append(bytes(document))
        # What does not fill a segment of every stream is dropped from the end.
        assert len(texts) >= len(expected) - 1
        assert {text.decode() for text in texts[:-1]} <= {*expected}
        assert len({*texts}) == len(texts)
        orders.append(texts)
    assert orders[0][:5] != orders[1][:5]
    assert orders[0] != [line.encode() for line in LINES[2:]][: len(orders[0])]


def test_another_order_is_refused(source, tmp_path):
    prepare(source, tmp_path / "out")
    first = loader(tmp_path / "out")
    next(iter(first))
    with pytest.raises(ValueError, match="shuffle_seed=4, but the interrupted run had 3"):
        loader(tmp_path / "out", seed=4).load_state_dict(first.state_dict())
    before = first.state_dict()
    del before["shuffle_seed"]  # as of before there were orders
    with pytest.raises(ValueError, match="shuffle_seed=3, but the interrupted run had None"):
        loader(tmp_path / "out").load_state_dict(before)


def test_any_source_may_be_shuffled(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "in").mkdir()
    for i, line in enumerate(LINES):
        (tmp_path / "in" / f"{i}.txt").write_text(line)
    options = {"root": str(tmp_path / "in"), "segment_len": 8, "batch_size": 1}
    data, shuffled = (TextStream("files", **options, shuffle_seed=seed) for seed in (None, 0))
    documents = [
        read([[x.tolist() for x in b[:2]] + [b.fresh.tolist()] for b in d.train_dataloader()], 1)
        for d in (data, shuffled)
    ]
    assert documents[0] != documents[1]
    assert sorted(documents[0]) == sorted(documents[1])
