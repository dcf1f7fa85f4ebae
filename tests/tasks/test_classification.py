import copy
import csv
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lit_effattn import LSTM, SequenceClassifier, Transformer
from lit_effattn.attention import (
    CompressiveAttention,
    InfiniteAttention,
    LinearAttention,
    LSHAttention,
    PerformerAttention,
    ShawAttention,
    SoftmaxAttention,
    SparseAttention,
    TransformerXLAttention,
)
from lit_effattn.attention.positions import GridPositions, LearnedPositions
from lit_effattn.callbacks import MemoryCarry
from lit_effattn.datamodules import LabelledBatch, pack, pad_labelled
from lit_effattn.tasks.predictions import write_items

CLASSES = ("a", "b, and c", "d")
VOCAB = 7
STACK = partial(Transformer, 8, 2, 2, init="pytorch")
BACKBONES = {
    "softmax": partial(STACK, attention=SoftmaxAttention),
    "shaw": partial(STACK, attention=partial(ShawAttention, max_distance=3), causal=False),
    "sparse": partial(STACK, attention=partial(SparseAttention, stride=3)),
    "lsh": partial(STACK, attention=partial(LSHAttention, chunk_size=4), causal=False),
    "xl": partial(STACK, attention=partial(TransformerXLAttention, mem_len=4), positions=None),
    "compressive": partial(STACK, attention=partial(CompressiveAttention, mem_len=4), positions=None),
    "infinite": partial(STACK, attention=partial(InfiniteAttention, mem_len=4, segment_len=4), positions=None),
    "linear": partial(STACK, attention=LinearAttention, causal=False),
    "causal linear": partial(STACK, attention=partial(LinearAttention, chunk_size=4)),
    "performer": partial(STACK, attention=PerformerAttention, causal=False),
    "lstm": partial(LSTM, 8, 2),
    "bilstm": partial(LSTM, 8, 2, causal=False),
}


def model(backbone: str = "linear", **options) -> SequenceClassifier:
    """Return a small model that is always the same, in float64 and without dropout."""
    torch.manual_seed(5)
    given = {"classes": CLASSES, **({} if "n_features" in options else {"vocab_size": VOCAB}), **options}
    return SequenceClassifier(BACKBONES[backbone](), **given).double().eval()


def rows(*lengths: int, n_features: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    if n_features is not None:
        return [torch.randn(n, n_features, generator=generator, dtype=torch.float64) for n in lengths]
    return [torch.randint(VOCAB, (n,), generator=generator) for n in lengths]


def by_definition(made: SequenceClassifier, row: Tensor, embedded: Tensor, pooling: str) -> np.ndarray:
    """p(c | x) of one sequence that is by itself, in NumPy after the backbone."""
    hidden = made.backbone(embedded[None])[0][0].detach().numpy()
    pooled = hidden[-1] if pooling == "last" else sum(hidden) / len(hidden)
    logits = made.output.weight.detach().numpy() @ pooled + made.output.bias.detach().numpy()
    return np.exp(logits) / np.exp(logits).sum()


# --------------------------------------------------------------------------------------------------- probabilities


@pytest.mark.parametrize(
    ("backbone", "pooling"), [*((name, "mean") for name in BACKBONES), ("softmax", "last"), ("lstm", "last")]
)
@torch.no_grad()
def test_probabilities_are_those_of_each_sequence_alone(backbone: str, pooling: str):
    """Neither padding, whatever is in it, nor the other rows of the batch change them."""
    made, lengths = model(backbone, pooling=pooling), (11, 1, 6)
    parts = rows(*lengths)
    x = torch.full((3, 13), 10**6)
    for row, part in zip(x, parts, strict=True):
        row[: len(part)] = part
    found = made(x, torch.tensor(lengths)).exp()
    expected = [by_definition(made, part, made.embedding.weight[part], pooling) for part in parts]
    np.testing.assert_allclose(found.numpy(), np.stack(expected), rtol=1e-9)
    assert found.max() - found.min() > 0.01
    np.testing.assert_allclose(made(parts[0][None])[0].exp(), expected[0], rtol=1e-9)  # without lengths


@torch.no_grad()
def test_feature_vectors_are_projected_and_their_padding_is_nothing():
    made = model(n_features=3)
    parts = rows(4, 2, n_features=3)
    x = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=torch.nan)
    found = made(x.float(), torch.tensor([4, 2])).exp()
    for p, part in zip(found, parts, strict=True):
        embedded = part.float().double() @ made.embedding.weight.T + made.embedding.bias
        np.testing.assert_allclose(p, by_definition(made, part, embedded, "mean"), rtol=1e-9)


def test_padding_of_feature_vectors_reaches_no_gradient():
    made = model(n_features=3)
    x = torch.nn.utils.rnn.pad_sequence(rows(4, 2, n_features=3), batch_first=True, padding_value=torch.nan)
    made.objective((x, torch.tensor([1, 0]), torch.tensor([4, 2]))).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


def test_learned_positions_take_the_shape_of_the_data():
    stack = partial(Transformer, 8, 2, 1)
    grid = SequenceClassifier(stack(positions=GridPositions), CLASSES, VOCAB, shape=(2, 3, 1))
    assert grid(torch.zeros(1, 6, dtype=torch.long)).shape == (1, 3)
    learned = SequenceClassifier(stack(positions=LearnedPositions), CLASSES, VOCAB, shape=(6,))
    assert learned(torch.zeros(1, 6, dtype=torch.long)).shape == (1, 3)


def test_neighbouring_levels_may_start_alike():
    made = SequenceClassifier(LSTM(64, 1), CLASSES, 32, embedding_std=0.5, ordinal_embedding=True)
    weight = made.embedding.weight.detach()
    assert weight.square().mean().item() == pytest.approx(0.25, rel=0.1)
    alike = torch.nn.functional.cosine_similarity(weight[10:11], weight)
    assert alike[9] > alike[7] > alike[20]


# ------------------------------------------------------------------------------------------------- loss and scores


def test_loss_by_definition():
    """(1 − ε) · −ln p(label) + ε · the mean of −ln p over all classes, averaged over the rows."""
    made = model(label_smoothing=0.3)
    batch = pad_labelled(list(zip(rows(5, 3, 8), (2, 0, 2), strict=True)))
    log_p = made(batch.x, batch.lengths).detach().numpy()
    expected = [-0.7 * line[label] - 0.3 * line.mean() for line, label in zip(log_p, (2, 0, 2), strict=True)]
    loss, figures, *_ = made.objective(batch)
    assert loss.item() == pytest.approx(np.mean(expected), rel=1e-12)
    right = np.mean(log_p.argmax(1) == np.array([2, 0, 2]))
    assert figures["train/accuracy"].item() == pytest.approx(right)


def test_auxiliary_losses_of_a_kind_count():
    made, other = model("compressive"), model("compressive", auxiliary_weight=3.0)
    batch = (torch.stack(rows(20, 20)), torch.tensor([1, 0]))
    (one, figures, *_), (three, *_) = made.objective(batch), other.objective(batch)
    (name,) = (name for name in figures if name.startswith("train/auxiliary_loss/"))
    assert (three - one).item() == pytest.approx(2 * figures[name].item(), rel=1e-9)
    assert figures[name] > 0


@pytest.mark.parametrize(
    ("backbone", "pooling"), [*((name, "mean") for name in BACKBONES), ("softmax", "last"), ("lstm", "last")]
)
def test_a_packed_batch_has_the_loss_and_the_gradient_of_its_sequences_alone(backbone: str, pooling: str):
    made, parts, labels = model(backbone, pooling=pooling), rows(11, 1, 6, 9), (2, 0, 1, 2)
    parameters = list(made.parameters())
    alone = [
        made.objective((part[None], torch.tensor([label]))).loss for part, label in zip(parts, labels, strict=True)
    ]
    expected = torch.stack(alone).mean()
    gradients = torch.autograd.grad(expected, parameters, materialize_grads=True)
    batch = pack(pad_labelled(list(zip(parts, labels, strict=True))))
    assert batch.x.shape == (1, 27)
    made.check_batch(batch)
    loss = made.objective(batch).loss
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters, materialize_grads=True), gradients, rtol=1e-9, atol=1e-13
    )
    found = made.predict_step(batch._replace(labels=None))["probability"]
    torch.testing.assert_close(found, torch.stack([made(part[None]).exp().max() for part in parts]))


def test_packed_rows_may_have_padding_and_need_a_class_for_each_sequence():
    made, parts = model(n_features=3), rows(4, 2, 3, n_features=3)
    x = torch.full((2, 7, 3), torch.nan, dtype=torch.float64)
    x[0, :6], x[1, :3] = torch.cat(parts[:2]), parts[2]
    starts = torch.tensor([[1, 0, 0, 0, 1, 0, 1], [0, 0, 0, 1, 1, 0, 0]]).bool()  # those in the padding are nothing
    batch = LabelledBatch(x, torch.tensor([0, 2, 1]), torch.tensor([6, 3]), starts=starts)
    made.check_batch(batch)
    expected = torch.cat([made(part[None]) for part in parts])
    torch.testing.assert_close(made(batch.x, batch.lengths, starts), expected)
    with pytest.raises(ValueError, match=r"labels has shape \(2,\), but 3 sequences start; expected \(3,\)"):
        made.check_batch(batch._replace(labels=batch.labels[:2]))


@torch.no_grad()
def test_scores_are_sums_over_all_sequences_divided_once():
    """In uneven batches, and dealt to two processes, whose sums are added."""
    made = model()
    parts = list(zip(rows(*range(2, 14)), [0, 1, 2] * 4, strict=True))
    cuts = (parts[:7], parts[7:8], parts[8:])
    other = copy.deepcopy(made)
    for cut in cuts[:2]:
        made.score("test", pad_labelled(cut))
    metrics, others = made.scores["test"], other.score("test", pad_labelled(cuts[2]))
    for name, metric in metrics.items():
        assert {metric._reductions[state].__name__ for state in ("total", "count")} == {"dim_zero_sum"}
        metric.total += others[name].total
        metric.count += others[name].count
    log_p = torch.stack([made(row[None])[0] for row, _ in parts])
    labels = torch.tensor([label for _, label in parts])
    assert metrics["accuracy"].compute().item() == pytest.approx((log_p.argmax(1) == labels).sum().item() / 12)
    assert metrics["loss"].compute().item() == pytest.approx(-log_p[range(12), labels].mean().item(), rel=1e-9)
    assert metrics["sequences"].compute() == 12


def test_any_data_set_of_x_and_y_trains_a_model_that_its_checkpoint_rebuilds(tmp_path: Path):
    """Which of two tokens occurs, somewhere in a sequence of 12."""
    labels = torch.arange(128) % 2
    x = torch.randint(2, VOCAB, (128, 12))
    x[torch.arange(128), torch.randint(12, (128,))] = labels
    loader = DataLoader(TensorDataset(x, labels), batch_size=32)
    made = SequenceClassifier(
        Transformer(16, 2, 1, attention=LinearAttention, causal=False),
        ("zero", "one"),
        VOCAB,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
    )
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=25, default_root_dir=tmp_path, check_val_every_n_epoch=25, **quiet)
    trainer.fit(made, loader, loader)
    assert trainer.callback_metrics["val/accuracy"] > 0.95
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    again = SequenceClassifier.load_from_checkpoint(tmp_path / "it.ckpt").eval()
    assert again.classes == ("zero", "one")
    predictions = trainer.predict(again, DataLoader(x, batch_size=50))
    found = torch.cat([part["class"] for part in predictions])
    assert (found == labels).float().mean() > 0.95
    with torch.no_grad():
        p = made.eval().cpu()(x).exp().max(1).values
    torch.testing.assert_close(torch.cat([part["probability"] for part in predictions]), p)


# ------------------------------------------------------------------------------------------------------ predictions


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@torch.no_grad()
def test_predictions_are_written_in_the_order_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn = []
    monkeypatch.setattr(
        "lit_effattn.tasks.predictions.confusion_matrix",
        lambda counts, names, path: drawn.append((counts, names)) or path,
    )
    made, parts, labels = model(), rows(9, 4, 7, 2), [2, 0, 1, 2]
    items = list(zip(parts, labels, strict=True))
    batches = [
        pad_labelled([items[i] for i in order])._replace(indices=torch.tensor(order)) for order in ([3, 0], [2, 1])
    ]
    monkeypatch.setattr(made, "_trainer", SimpleNamespace(datamodule=SimpleNamespace(test_files=list("wxyz"))))
    write_items(made, [{"bits": torch.ones(3)}], tmp_path)
    assert table(tmp_path / "predictions.csv")[2] == {"index": "2", "bits": "1.0", "file": "y"}
    message = made.write_predictions([made.predict_step(batch) for batch in batches], tmp_path)
    p = torch.stack([made(part[None])[0].exp() for part in parts])
    for i, line in enumerate(table(tmp_path / "predictions.csv")):
        assert line["index"] == str(i)
        assert line["class"] == CLASSES[p[i].argmax()]
        assert float(line["probability"]) == pytest.approx(p[i].max().item(), abs=1e-6)
        assert line["label"] == CLASSES[labels[i]]
        assert line["file"] == "wxyz"[i]
    counts = torch.zeros(3, 3, dtype=torch.long)
    for label, found in zip(labels, p.argmax(1), strict=True):
        counts[label, found] += 1
    ((seen, names),) = drawn
    assert torch.equal(seen, counts)
    assert names == list(CLASSES)
    assert "4 sequences" in message
    assert "confusion.png" in message


@torch.no_grad()
def test_predictions_without_labels_are_written_without_them(tmp_path: Path):
    made = model()
    made.write_predictions(
        [made.predict_step(rows(5, 5)[0][None]), made.predict_step([rows(4)[0][None], None])], tmp_path
    )
    lines = table(tmp_path / "predictions.csv")
    assert [line["index"] for line in lines] == ["0", "1"]
    assert lines[0].keys() == {"index", "class", "probability"}
    assert not (tmp_path / "confusion.png").exists()


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("backbone", "options", "words"),
    [
        ("bilstm", {"pooling": "last"}, "pooling='last' needs a causal backbone"),
        ("linear", {"pooling": "max"}, "pooling='max' is not one of mean, last"),
        ("linear", {"classes": ("a",)}, "fewer than two classes"),
        ("linear", {"classes": ("a", "b", "a")}, "classes names 'a' twice"),
        ("linear", {"vocab_size": None}, "vocab_size=None and n_features=None"),
        ("linear", {"n_features": 3, "vocab_size": 2}, "vocab_size=2 and n_features=3"),
        ("linear", {"n_features": 0}, "n_features=0 must be at least 1"),
        ("linear", {"label_smoothing": 1.0}, "label_smoothing=1.0"),
    ],
)
def test_bad_options_are_refused(backbone: str, options: dict, words: str):
    with pytest.raises(ValueError, match=words):
        model(backbone, **options)


X, Y = torch.zeros(2, 5, dtype=torch.long), torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((X.float(), Y), r"x is torch.float32 of shape \(2, 5\).* reads integers of shape \(batch, length\)"),
        ((X[..., None], Y), r"shape \(2, 5, 1\)"),
        ((X + VOCAB, Y), "token 7, but the model has vocab_size=7"),
        ((X - 1, Y), "token -1"),
        ((X, Y + 1), r"label 3, but the model has 3 classes: 0 … 2"),
        ((X, Y - 1), "label -1"),
        ((X, Y.float()), r"labels is torch.float32 of shape \(2,\); expected integers of shape \(2,\)"),
        ((X, Y[:1]), r"labels is torch.int64 of shape \(1,\)"),
        ((X, None), "no labels; without labels, only predict"),
        ((X, Y, torch.tensor([5, 0])), r"lengths is \[5, 0\]"),
        ((X, Y, torch.tensor([5])), r"lengths is torch.int64 of shape \(1,\); expected integers of shape \(2,\)"),
        ((X, Y, Y, Y, Y), "a batch is tuple of 5"),
        ({"x": X}, "a batch is dict of 1"),
    ],
)
def test_bad_batches_are_refused(batch, words: str):
    made = model()
    for step in (made.training_step, made.validation_step):
        with pytest.raises(ValueError, match=words):
            step(batch)


def test_bad_feature_vectors_are_refused():
    with pytest.raises(ValueError, match=r"n_features=3 reads shape \(batch, length, 3\)"):
        model(n_features=3).check_batch((torch.zeros(2, 5, 4), Y))


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        (("a", "d", "b, and c"), "classes differ: 3: 'b, and c', 'd', and 3: 'd',"),
        (("a", "b"), "classes differ: 3: 'b, and c'"),
    ],
)
def test_a_checkpoint_of_other_classes_is_refused(classes: tuple[str, ...], words: str):
    made = model()
    checkpoint = {"hyper_parameters": dict(made.hparams), "state_dict": made.state_dict()}
    model().on_load_checkpoint(checkpoint)
    with pytest.raises(ValueError, match=words):
        model(classes=classes).on_load_checkpoint(checkpoint)


def test_a_carried_memory_is_refused():
    """Each sequence has a class of its own."""
    with pytest.raises(ValueError, match="SequenceClassifier carries no memory between batches; leave it out"):
        MemoryCarry().setup(pl.Trainer(logger=False, accelerator="cpu"), model("lstm"), "fit")


def test_a_batch_is_padded_on_the_right():
    batch = pad_labelled([(np.array([3, 4, 5]), 1), ([6], np.int64(0))])
    assert isinstance(batch, LabelledBatch)
    assert batch.x.tolist() == [[3, 4, 5], [6, 0, 0]]
    assert batch.lengths.tolist() == [3, 1]
    assert batch.labels.tolist() == [1, 0]


def test_objective_is_one_graph():
    made = model()
    batch = pad_labelled(list(zip(rows(5, 3), (2, 0), strict=True)))
    compiled = torch.compile(type(made).objective, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(made, batch).loss, made.objective(batch).loss)
