"""MiniLM with random weights, in a folder as transformers and tokenizers write it."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.experiments.minilm import Batch, Encoder, first_sentence, vectors
from lit_effattn.attention import PerformerAttention, SoftmaxAttention

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TINY = "minilm --n_features 8 64 --draws 2 --sentences 3 --passages 2 --most_tokens 12 --device cpu --model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT whose attention is far from uniform."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 24}
    config = transformers.BertConfig(
        vocab_size=30, max_position_embeddings=16, initializer_range=0.5, layer_norm_eps=1e-3, **sizes
    )
    model = transformers.BertModel(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and gains, which start at 0 and 1
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    vocabulary = {"[UNK]": 0, **{letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz", 1)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def batch() -> Batch:
    lengths = torch.tensor([3, 7, 11, 16])
    return Batch(torch.randint(0, 30, (4, 16), generator=torch.Generator().manual_seed(0)), lengths)


def test_vectors_with_our_softmax_attention_are_those_of_transformers(folder: Path):
    encoder = Encoder(folder).double()
    original = vectors(encoder, batch())
    encoder.use(SoftmaxAttention)
    assert torch.allclose(vectors(encoder, batch()), original, rtol=0, atol=1e-12)
    assert (original @ original.T)[~torch.eye(4, dtype=torch.bool)].max() < 0.99  # the texts differ


def test_many_features_come_near_and_draws_differ(folder: Path):
    encoder = Encoder(folder).double()
    exact = vectors(encoder, batch())

    def cosine(n: int, seed: int) -> float:
        torch.manual_seed(seed)
        encoder.use(lambda *sizes: PerformerAttention(*sizes, n_features=n))
        return (vectors(encoder, batch()) * exact).sum(-1).mean().item()

    assert cosine(8, 0) != cosine(8, 1)
    assert cosine(8, 0) < cosine(2**14, 0)
    assert cosine(2**14, 0) > 0.99


@pytest.mark.exhaustive
def test_table_and_picture(folder: Path, tmp_path: Path):
    command.main([*TINY.split(), str(folder), "--output", str(tmp_path)])
    report = json.loads((tmp_path / "minilm.json").read_text(encoding="utf-8"))
    assert [(r["texts"], r["ω"], r["F"]) for r in report["rows"]] == [
        (texts, directions, n)
        for texts in ("sentences", "passages")
        for directions in ("orthogonal", "iid")
        for n in (8, 64)
    ]
    assert all(len(row["cosine"]["samples"]) == 2 for row in report["rows"])
    assert any(note.startswith("passages: 2 texts of 12 to 12 tokens") for note in report["notes"])
    assert (tmp_path / "minilm.png").stat().st_size > 0


def test_first_sentences():
    assert first_sentence("Return the sum of all\nthe numbers. And more.") == "Return the sum of all the numbers."
    assert first_sentence("Too short. And then a long one follows here.") is None
