"""`hidden(batch, memory)` of every task is a function: it returns the state, and only the steps set `memory`."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_effattn import EncoderDecoder, Transformer, sequence
from lit_effattn.attention import LinearAttention, LinearCrossAttention
from lit_effattn.datamodules import IGNORE, LabelledBatch, PairBatch, SpeechBatch, TokenBatch
from lit_effattn.tasks import LanguageModel, PixelModel, SequenceClassifier, SequenceToSequence, SpeechRecognizer
from lit_effattn.tasks.base import Task

N = 8
BORDERS = [(0, 3), (3, 4), (4, 8)]
LABELS = torch.tensor([1, 0])


def backbone() -> Transformer:
    return Transformer(8, 2, 2, attention=LinearAttention, positions=None)


def tokens(n: int) -> Tensor:
    return torch.randint(5, (2, n))


def language() -> tuple[Task, Callable[[int, int], Any]]:
    x, y = tokens(N), tokens(N)
    return LanguageModel(backbone(), 5).double(), lambda a, b: TokenBatch(x[:, a:b], y[:, a:b])


def classes() -> tuple[Task, Callable[[int, int], Any]]:
    x = tokens(N)
    model = SequenceClassifier(backbone(), ("a", "b"), vocab_size=5).double()
    return model, lambda a, b: LabelledBatch(x[:, a:b], LABELS)


def speech() -> tuple[Task, Callable[[int, int], Any]]:
    x, one = torch.randn(2, N, 3).double(), torch.ones(2, dtype=torch.long)
    return SpeechRecognizer(backbone(), 3, ("p",)).double(), lambda a, b: SpeechBatch(
        x[:, a:b], one * (b - a), one[:, None], one, ("i", "j")
    )


TASKS = [language, classes, speech]


def equal(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(sequence.tensors(a), sequence.tensors(b), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("made", TASKS)
def test_segments_with_the_state_handed_on_give_what_the_whole_gives(made: Callable):
    model, cut = made()
    whole, last = model.eval().hidden(cut(0, N))
    state, found = None, []
    for a, b in BORDERS:
        y, state = model.hidden(cut(a, b), state)
        found.append(y)
    torch.testing.assert_close(torch.cat(found, 1), whole)
    torch.testing.assert_close(list(sequence.tensors(state)), list(sequence.tensors(last)))
    assert model.memory is None


@torch.no_grad()
def test_pixels_begin_with_a_start_token_after_the_memory():
    model = PixelModel(backbone(), (2, 2, 1), 5).eval()
    images = tokens(4)
    _, memory = model.backbone(torch.randn(2, 3, 8))
    prompt = torch.cat([torch.full((2, 1), 5), images[:, :-1]], 1)
    expected, after = model.backbone(model.embedding(prompt), memory)
    y, state = model.hidden(images, memory)
    assert torch.equal(y, expected)
    assert equal(state, after)


@torch.no_grad()
def test_targets_go_on_from_the_memory_of_a_decoder():
    x, one = tokens(N), torch.ones(2, dtype=torch.long)
    decoder = Transformer(8, 2, 2, attention=LinearAttention, cross_attention=LinearCrossAttention)
    model = SequenceToSequence(EncoderDecoder(Transformer(8, 2, 1, causal=False), decoder), 5, 5).double().eval()
    source = tokens(4)

    def cut(a: int, b: int) -> PairBatch:
        return PairBatch(source, 4 * one, x[:, a:b], x[:, a:b], one * (b - a), ["", ""], [[], []])

    whole, _ = model.hidden(cut(0, N))
    first, state = model.hidden(cut(0, 3))
    rest, _ = model.hidden(cut(3, N), state)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole)


@torch.no_grad()
@pytest.mark.parametrize("step", ["validation_step", "test_step", "predict_step", "training_step"])
def test_only_a_step_sets_the_memory(step: str, monkeypatch: pytest.MonkeyPatch):
    model, cut = language()
    monkeypatch.setattr(model, "log", lambda *_, **__: None)
    batch = cut(0, N)
    first = model.eval().backbone(torch.randn(2, 3, 8).double())[1]
    kept = sequence.map_tensors(torch.clone, first)
    model.memory, model.carries = first, True
    model(batch, first), model.hidden(batch, first), model.objective(batch, first), model.evaluate("val", batch, first)
    assert model.memory is first
    assert equal(first, kept)
    _, after = model.hidden(batch, first)
    with torch.enable_grad():
        getattr(model, step)(batch)
    assert equal(model.memory, after)
    assert not any(t.requires_grad for t in sequence.tensors(model.memory))
    model.carries = False
    getattr(model, step)(batch)
    assert model.memory is None


@torch.no_grad()
def test_the_memory_changes_what_is_predicted_and_scored(monkeypatch: pytest.MonkeyPatch):
    model, cut = language()
    monkeypatch.setattr(model, "log", lambda *_, **__: None)
    batch = cut(0, N)._replace(targets=cut(0, N).targets.index_fill(1, torch.tensor([0]), IGNORE))
    memory = model.eval().backbone(torch.randn(2, 3, 8).double())[1]
    expected = model(batch, memory).sum(1) / (N - 1) / math.log(2)
    assert not torch.allclose(model(batch), model(batch, memory))
    model.memory = memory
    torch.testing.assert_close(model.predict_step(batch)["bits_per_target"], expected)
    metrics, _ = model.evaluate("val", batch, memory)
    expected = (model(batch, memory).sum() / (2 * (N - 1))).exp()
    torch.testing.assert_close(metrics["perplexity"].compute(), expected)
