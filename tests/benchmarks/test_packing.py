import argparse
import ast
import textwrap
from importlib.util import find_spec
from itertools import islice

import pytest
import torch

from benchmarks import packing
from benchmarks.packing import (
    CUTS,
    KINDS,
    PACKED,
    difference,
    every_kind,
    functions,
    losses,
    methods,
    packed_rows,
    whole_functions,
)
from lit_effattn import Transformer

CPU = torch.device("cpu")


def texts(rows):
    return [bytes(document.tolist()) for document in rows.documents]


def test_documents_are_functions():
    some = list(islice(functions(200), 100))
    assert max(map(len, some)) == 200
    for text in some:
        assert text.startswith((b"def ", b"async def "))
        if len(text) < 200:
            (node,) = ast.parse(textwrap.dedent(text.decode())).body
            assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def test_rows_are_filled_by_first_fit_and_no_document_is_divided():
    documents = [bytes([i]) * n for i, n in enumerate([6, 5, 3, 4, 1, 7, 2, 9])]
    first, second = packed_rows(iter(documents), 2, 10, 2)
    assert texts(first) == [documents[i] for i in (0, 2, 4, 1, 3)]
    assert first.lengths.tolist() == [10, 9]
    assert texts(second) == [documents[i] for i in (5, 6, 7)]
    assert len(packed_rows(iter(documents), 2, 10, 1)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_the_same_in_all_methods_but_joined(kind):
    torch.manual_seed(0)
    model = Transformer(8, 2, 1, attention=KINDS[kind], init="pytorch").double()
    documents = [bytes(range(i, i + n)) for i, n in enumerate([6, 5, 3, 4, 1, 7, 2, 9])]
    readers = methods(model, packed_rows(iter(documents), 2, 10, 2), CPU)
    gradients = {}
    for name, reader in readers.items():
        model.zero_grad()
        for x, starts, lengths in reader.inputs:
            assert lengths.max() <= x.size(1)
            assert x[..., 0].numel() <= 2 * 10
            reader.call(model, x.double(), starts, lengths)[..., 0].sum().backward()
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        reader.inputs = [(x.double(), *rest) for x, *rest in reader.inputs]
        assert reader.positions() >= sum(map(len, documents))
    joined = gradients.pop("joined")
    for gradient in gradients.values():
        torch.testing.assert_close(gradient, gradients[PACKED])
    assert not torch.allclose(joined, gradients[PACKED])
    assert readers["padded"].positions() > readers[packing.SORTED].positions()
    assert readers["joined"].positions() == 2 * (10 + 9)


QUICK = {("LinearAttention", "63, 1, 64, 65, 319"), ("LSTM", "1 × 32, 480")}
EVERY = [
    pytest.param(kind, cut, marks=() if (kind, cut) in QUICK else pytest.mark.exhaustive)
    for kind in every_kind()
    for cut in CUTS
]


def test_every_kind_can_be_built():
    assert {type(build()).__name__ for build in every_kind().values()} == {*every_kind()}


@pytest.mark.parametrize(("kind", "cut"), EVERY)
def test_a_packed_row_differs_by_rounding_alone(kind, cut):
    assert difference(every_kind()[kind], CUTS[cut], torch.float64) <= 1e-12


def test_a_row_without_borders_differs(monkeypatch):
    monkeypatch.setattr(packing.sequence, "packed", lambda module, x, starts: module(x))
    assert difference(every_kind()["LinearAttention"], [3, 2], torch.float64) > 0.01


@pytest.mark.parametrize("steps", [20, pytest.param(500, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["linear", "Transformer-XL"])
def test_training_on_packed_rows_has_the_losses_of_padded_ones(kind, steps):
    documents = whole_functions(160, 4 * steps)
    assert len({len(text) for text in documents[:4]}) > 1
    padded, packed = (losses(kind, documents, way) for way in (False, True))
    assert len(packed) == steps
    torch.testing.assert_close(packed, padded, rtol=1e-10, atol=0)
    assert padded[-5:].mean() < 0.95 * padded[0]


def test_a_converted_model_has_the_loss_of_separate_documents_in_transformers(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    args = argparse.Namespace(differences=False, training=None, transformers=True)
    monkeypatch.setattr(packing, "PEERS", {"llama": packing.PEERS["llama"]})
    values = {(row["model"], row["computed by"]): row["difference"] for row in packing.run(args).rows}
    assert values["llama", "lit-effattn, packed"] < 1e-6
    assert values["llama", "lit-effattn, padded"] < 1e-6
    assert values["mamba2", "transformers, flattened"] > 1e-4  # the state crosses the borders
    assert values["mamba2", "transformers, lit-effattn's `sequence.packed`"] < 1e-6
    if find_spec("tree_recurrence"):
        assert values["mamba2", "transformers, flattened, tree-recurrence"] < 1e-6


def test_dialogues_are_those_of_the_package(tmp_path, monkeypatch):
    with monkeypatch.context() as absent:
        absent.setattr(packing, "find_spec", lambda _: None)
        with pytest.raises(ModuleNotFoundError, match="pip install chatterbot-corpus"):
            list(packing.dialogues(9))
    english = tmp_path / "chatterbot_corpus" / "data" / "english"
    english.mkdir(parents=True)
    (tmp_path / "chatterbot_corpus" / "__init__.py").touch()
    (english / "a.yml").write_text("categories:\n- a\nconversations:\n- - Hi\n  - 'Yes'\n- - How?\n  - 12\n")
    (english.parent / "b.yml").write_text("conversations:\n- - no\n  - no\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert sorted(packing.dialogues(6)) == [b"Hi\nYes", b"How?\n1"]
