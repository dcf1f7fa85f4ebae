import json
from types import SimpleNamespace

import pytest
import torch

from lit_effattn.datamodules import LabelledTexts
from tests.datamodules.hugging_face import Rows, fake_datasets, write_rows
from tests.datamodules.text.test_text_stream import save_tokenizer

SPLITS = ("train", "val", "test")
ITEMS = [("gut, gemacht", "good"), ("schlecht", "bad"), ("ümlaut", "good"), ("na ja", "so so"), ("x" * 40, "bad")]


def write(root, items=None, suffix="tsv", lines=None):
    root.mkdir(exist_ok=True)
    for split in SPLITS:
        actual = lines or [f"{text}\t{label}" for text, label in items or ITEMS]
        (root / f"{split}.{suffix}").write_text("\n".join(actual) + "\n", encoding="utf-8")
    return str(root)


def ready(stage="fit", **options):
    data = LabelledTexts(**options)
    data.prepare_data()
    data.setup(stage)
    return data


def items(loader, classes):
    """Every text and its class, in the order of the loader."""
    actual = []
    for batch in loader:
        assert batch.x.dtype == torch.uint8
        for row, n, label in zip(batch.x, batch.lengths.tolist(), batch.labels.tolist(), strict=True):
            assert not row[n:].any()
            actual.append((bytes(row[:n].tolist()).decode(), classes[label]))
    return actual


def test_lines_of_a_text_and_a_class(tmp_path):
    data = ready(root=write(tmp_path / "x"), batch_tokens=64)
    assert data.classes == ("bad", "good", "so so")
    assert (data.vocab_size, data.n_features, data.shape) == (256, None, (4096,))
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        assert sorted(items(loader, data.classes)) == sorted(ITEMS)
    (longest, *_) = data.val_dataloader()
    assert longest.lengths.max() == 40
    assert all(batch.x.numel() <= 64 for batch in data.train_dataloader())
    indices = torch.cat([batch.indices for batch in data.predict_dataloader()])
    assert [items(data.test_dataloader(), data.classes)[i] for i in indices.argsort()] == ITEMS


def test_packed_training_batches_hold_texts_of_all_lengths_end_to_end(tmp_path):
    data = ready(root=write(tmp_path / "x"), batch_tokens=64, packed=True)
    loader, actual = data.train_dataloader(), []
    for batch in loader:
        assert batch.x.shape[0] == 1
        assert batch.x.numel() <= 64
        assert batch.x.numel() == sum(len(ITEMS[i][0].encode()) for i in batch.indices)
        texts = batch.x[0].tensor_split(batch.starts[0].nonzero()[1:, 0])
        for text, label, i in zip(texts, batch.labels.tolist(), batch.indices.tolist(), strict=True):
            assert (bytes(text.tolist()).decode(), data.classes[label]) == ITEMS[i]
            actual.append(ITEMS[i])
    assert sorted(actual) == sorted(ITEMS)
    assert len(loader) == 2  # 40 + 12 + 8 and 7 + 5 bytes, or others
    assert sorted(items(data.val_dataloader(), data.classes)) == sorted(ITEMS)  # evaluation is padded


def test_json_lines_whose_classes_may_be_numbers(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("lit_effattn.datamodules.pairs.labelled_texts.rank_zero_info", said.append)
    lines = [
        {"review": {"body": text}, "stars": stars}
        for (text, _), stars in zip(ITEMS, (5, 1, "5 ", 1.0, 10), strict=True)
    ]
    root = write(tmp_path / "x", suffix="jsonl", lines=[json.dumps(line) for line in lines])
    data = ready(root=root, text_column="review.body", label_column="stars")
    assert data.classes == ("1", "10", "5")
    assert said[0].endswith(": 5 to train on, 5 to validate; 3 classes: 1, 10, 5")
    assert sorted(items(data.val_dataloader(), data.classes)) == sorted(
        zip([text for text, _ in ITEMS], ("5", "1", "5", "1", "10"), strict=True)
    )
    with pytest.raises(
        ValueError, match=r"no text with a class for 'train'; left out: .*jsonl:1: 'label' must be a text"
    ):
        ready(root=root, text_column="review.body")


def test_rows_of_hugging_face(tmp_path, monkeypatch):
    fake_datasets(monkeypatch)
    write_rows(tmp_path / "rows", ("train",), lambda n, i: {"text": f"{n} {i}", "label": i % 2}, 60)
    data = ready(path=str(tmp_path / "rows"))
    assert data.classes == ("0", "1")
    actual = [item for split in ("train", "val", "test") for item in items(loaders(data)[split], data.classes)]
    assert sorted(actual) == sorted((f"train {i}", str(i % 2)) for i in range(60))
    monkeypatch.setattr(Rows, "features", {"label": SimpleNamespace(names=["bad", "good"])})
    write_rows(tmp_path / "test", ("test",), lambda n, i: {"text": f"{n} {i}", "label": (-1, None)[i % 2]}, 9)
    (tmp_path / "test" / "test.jsonl").rename(tmp_path / "rows" / "test.jsonl")  # whose classes are secret
    data = ready(path=str(tmp_path / "rows"))
    named = [item for split in ("train", "val", "test") for item in items(loaders(data)[split], data.classes)]
    assert sorted(named) == sorted((f"train {i}", data.classes[i % 2]) for i in range(60))
    assert data.classes == ("bad", "good")
    write_rows(tmp_path / "secret", ("train",), lambda n, i: {"text": f"{n} {i}", "label": -1}, 9)
    with pytest.raises(ValueError, match=r"no text with a class for 'train'; left out: .*'label' must be a text"):
        ready(path=str(tmp_path / "secret"))


def loaders(data):
    return {"train": data.train_dataloader(), "val": data.val_dataloader(), "test": data.test_dataloader()}


def test_several_files_of_a_split_are_refused(tmp_path):
    write(tmp_path / "x")
    (tmp_path / "x" / "train.csv").write_text("text,label\n")
    with pytest.raises(ValueError, match=r"train.csv: train.tsv is of 'train', too; remove one"):
        ready(root=str(tmp_path / "x"))


def test_a_class_is_written_in_one_way(tmp_path):
    """White space, Unicode's two forms of an umlaut and a header row are no classes; true and 1 are not both."""
    rows = [(f"text {i}", ("gro\u00df\u00e4", " gro\u00dfa\u0308 ", "klein")[i % 3]) for i in range(12)]
    for header in ("Satz\tKlasse", "text\tlabel"):
        lines = [header, *("\t".join(row) for row in rows)]
        with pytest.warns(UserWarning, match="1 header row:") as warned:
            data = ready(root=write(tmp_path / "x", lines=lines))
        assert len([w for w in warned if "header row" in str(w.message)]) == 2  # train and val
        assert data.classes == ("gro\u00df\u00e4", "klein")
        assert not any("different classes" in str(w.message) for w in warned)
        assert len(items(data.train_dataloader(), data.classes)) == 12
    rows = [("t2", "rare"), ("t7", "klein"), ("t20", "klein"), *rows]
    objects = [json.dumps({"text": text, "label": label}) for text, label in rows]
    (tmp_path / "whole.tsv").write_text("\n".join(map("\t".join, [rows[-1], *rows])))  # t2 and t20 are for test
    for root in (
        write(tmp_path / "j", suffix="jsonl", lines=objects),
        write(tmp_path / "c", suffix="csv", lines=["text,label", *map(",".join, rows)]),
        str(tmp_path / "whole.tsv"),
    ):
        assert "rare" in LabelledTexts(root).classes  # though it is of a first text alone
    root = write(tmp_path / "y", suffix="jsonl", lines=['{"text": "a", "label": true}', '{"text": "b", "label": 1}'])
    with pytest.raises(ValueError, match="'true' and '1' are both classes"):
        ready(root=root)
    with pytest.warns(UserWarning, match="'Good', 'good' are different classes"):
        ready(root=write(tmp_path / "w", lines=["c\tbad", "d\tbad", "a\tGood", "b\tgood"]))
    data = ready(root=write(tmp_path / "z", lines=["a\tx", "b\ty", "c\ty"]))  # too few to know a header
    assert data.classes == ("x", "y")


def test_a_file_with_a_byte_order_mark(tmp_path):
    root = tmp_path / "x"
    root.mkdir()
    for split in SPLITS:
        (root / f"{split}.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in ITEMS), encoding="utf-8-sig")
    data = ready(root=str(root))
    assert data.classes == ("bad", "good", "so so")
    assert sorted(items(data.train_dataloader(), data.classes)) == sorted(ITEMS)


def test_long_texts_are_cut_to_their_first_bytes(tmp_path):
    data = ready(root=write(tmp_path / "x"), max_len=6)
    assert data.shape == (6,)
    rows = [
        bytes(row[:n].tolist())
        for batch in data.val_dataloader()
        for row, n in zip(batch.x, batch.lengths, strict=True)
    ]
    assert sorted(rows) == sorted(text.encode()[:6] for text, _ in ITEMS)


def test_what_is_left_out_is_counted(tmp_path):
    root = write(tmp_path / "x")
    with (tmp_path / "x" / "train.tsv").open("a") as file:
        file.write("no class\n\tgood\n")
    with pytest.warns(UserWarning, match="train: 2 are left out") as warned:
        data = ready(root=root)
    assert "train.tsv:6: has 1 columns" in str(warned[-1].message)
    assert sorted(items(data.train_dataloader(), data.classes)) == sorted(ITEMS)


def test_texts_that_are_trained_and_scored_on_are_counted(tmp_path):
    root = write(tmp_path / "x")
    (tmp_path / "x" / "val.tsv").write_text("a\tgood\nna ja\tbad\n")
    (tmp_path / "x" / "test.tsv").write_text("b\tgood\nc\tbad\n")
    with pytest.warns(UserWarning, match="x: 1 texts of 'val' are in the training texts, too") as warned:
        ready(root=root)
    assert len(warned) == 1


def test_classes_without_training_texts_are_named(tmp_path):
    root = write(tmp_path / "y")
    (tmp_path / "y" / "val.tsv").write_text("a\tgood\nb\tnew\nc\tnew\n")
    with pytest.warns(UserWarning, match="val: 2 have a class that is not in the training data: 'new'"):
        ready(root=root)


def test_a_file_of_texts_replaces_the_corpus_in_prediction(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("kurz\nein langer Text\n")
    data = ready("predict", root="nowhere", source_file=str(path))
    (batch,) = data.predict_dataloader()
    texts = {int(i): bytes(row[:n].tolist()) for i, row, n in zip(batch.indices, batch.x, batch.lengths, strict=True)}
    assert texts == {0: b"kurz", 1: b"ein langer Text"}
    assert batch.labels is None
    with pytest.warns(match="1 of 2 texts are cut to max_len=14"):
        ready("predict", root="nowhere", source_file=str(path), max_len=14).predict_dataloader()
    with pytest.raises(ValueError, match=r"source_file=.* is for predict only"):
        ready("fit", root="nowhere", source_file=str(path))
    letters = json.dumps({"tokens": "characters", "vocabulary": " Taegiklnrtux"})
    checkpoint = save_tokenizer(tmp_path / "m.ckpt", letters)
    data = ready("predict", root="nowhere", source_file=str(path), tokenizer_of=checkpoint)
    with pytest.warns(UserWarning, match="1 of 2 lines have characters .* lacks, which it reads as <unk>: 'z'"):
        data.predict_dataloader()
    LabelledTexts("nowhere", tokenizer_of=checkpoint).load_state_dict(data.state_dict())
    save_tokenizer(tmp_path / "m.ckpt", letters.replace("ux", "xu"))
    with pytest.raises(ValueError, match=r"tokens are characters, .*tokenizer_of='.*m.ckpt' are characters, a voc"):
        LabelledTexts("nowhere", tokenizer_of=checkpoint).load_state_dict(data.state_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"root": None}, "root=None, path=None: give one of them"),
        ({"path": "owner/name"}, "root='x', path='owner/name': give one of them"),
        ({"subset": "y"}, "subset='y' is of a data set path, but root='x' was given; leave it out"),
        ({"max_len": 0}, "max_len=0 must be at least 1"),
        ({"batch_texts": 0}, "batch_texts=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        LabelledTexts(**{"root": "x", **options})


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            [f"good\ttext {i}" for i in range(9)],
            "each of the 9 training texts has a different class.*'text 0'; a line is a text, a TAB",
        ),
        ([f"text {i}\tgood" for i in range(9)], "'good' is the only class"),
        (["text\tlabel", "", "a", "b"], "no text with a class for 'train'; left out: .*train.tsv:3: has 1 columns"),
    ],
)
def test_files_that_are_not_what_they_should_be(lines, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        ready(root=write(tmp_path / "x", lines=lines))


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"root='nowhere'.*no train.tsv"):
        ready(root="nowhere")


def test_a_text_without_tokens_is_named(tmp_path):
    from tokenizers import Tokenizer, models

    letters = {letter: token for token, letter in enumerate(sorted({*"".join(text for text, _ in ITEMS)} - {"n"}))}
    model = json.loads(Tokenizer(models.BPE(letters, [])).to_str())  # without a token for others
    vocabulary = {"model": model, "n_tokens": 99, "start": 98, "end": None}
    checkpoint = save_tokenizer(tmp_path / "m.ckpt", json.dumps({"tokens": "pretrained", "vocabulary": vocabulary}))
    root = write(tmp_path / "x")
    assert ready(root=root, tokenizer_of=checkpoint).vocab_size == 99
    with (tmp_path / "x" / "val.tsv").open("a") as file:
        file.write("nnn\tgood\n")
    with pytest.raises(ValueError, match=r"m\.ckpt gives no tokens for 'nnn', one of 1 such texts; delete them"):
        ready(root=root, tokenizer_of=checkpoint)
