"""Mistakes in Python get a sentence that names what was given and the remedy."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lit_effattn import EncoderDecoder, LanguageModel, PixelModel, SpeechRecognizer, Transformer
from lit_effattn.attention import LinearAttention, LinearCrossAttention
from lit_effattn.datamodules import IGNORE, PairBatch, PixelSequences, TokenBatch
from lit_effattn.tasks import MaskedLanguageModel, SequenceToSequence

IDS = torch.arange(6).view(2, 3)
LENGTHS = torch.tensor([3, 2])
PADDED = torch.where(torch.arange(3) < LENGTHS[:, None], IDS, IGNORE)


def pixels() -> PixelModel:
    return PixelModel(Transformer(8, 2, 1), (2, 3, 1), 4)


def sequence_to_sequence() -> Any:
    backbone = EncoderDecoder(
        Transformer(8, 2, 1, causal=False), Transformer(8, 2, 1, cross_attention=LinearCrossAttention)
    )
    return SequenceToSequence(backbone, 6, 6)


def pairs(targets: torch.Tensor) -> Any:
    return sequence_to_sequence()(PairBatch(IDS, LENGTHS, IDS, targets, LENGTHS, [], []))


def masked(targets: torch.Tensor) -> Any:
    model = MaskedLanguageModel(Transformer(8, 2, 1, causal=False), 6)
    return model.training_step(TokenBatch(IDS, targets, LENGTHS))


def language(targets: torch.Tensor) -> Any:
    return LanguageModel(Transformer(8, 2, 1), 6)(TokenBatch(IDS, targets, LENGTHS))


@pytest.mark.parametrize("read", [language, masked, pairs])
def test_targets_beyond_the_vocabulary_and_scored_padding(read: Callable[[torch.Tensor], Any]):
    read(PADDED)
    with pytest.raises(
        ValueError, match="scores a target beyond its `lengths`; set the targets of the padding to -100"
    ):
        read(IDS)
    for value in (-1, 6):
        with pytest.raises(
            ValueError, match=rf"the data hold target {value}, but the model has (target_)?vocab_size=6"
        ):
            read(PADDED.masked_fill(PADDED == 1, value))


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (
            lambda: pixels()(torch.rand(2, 6)),
            r"dtype torch\.float32, not integer levels 0 … 3.*\(x \* 3\)\.round\(\)\.long\(\)",
        ),
        (lambda: pixels().sample(given=torch.rand(2, 3)), r"dtype torch\.float32"),
        (lambda: pixels()([IDS, IDS]), "batch is a list, not a tensor of levels.*without classes"),
        (lambda: PixelModel(Transformer, (2, 3, 1)), r"backbone is the class Transformer.*Transformer\(128, 4, 2\)"),
        (lambda: LanguageModel(IDS, 10), r"backbone is a Tensor, not a module"),
        (lambda: SpeechRecognizer(IDS, 40, ["a"]), r"backbone is a Tensor, not a module"),
        (
            lambda: LanguageModel(Transformer(8, 2, 1), 10)(IDS),
            "a Tensor, not a TokenBatch with the fields inputs, targets, lengths,",
        ),
        (
            lambda: LanguageModel(Transformer(8, 2, 1), 10).training_step(SimpleNamespace(inputs=IDS, targets=IDS)),
            "a SimpleNamespace, not a TokenBatch",
        ),
        (lambda: sequence_to_sequence().training_step([IDS, IDS]), "a list, not a PairBatch with the fields source,"),
        (lambda: Transformer(8, 2, 1, attention="LinearAttention"), "attention='LinearAttention' must be a class"),
        (
            lambda: Transformer(8, 2, 1, attention=[LinearAttention(8, 2, True)]),
            r"object of LinearAttention;.*partial\(LinearA",
        ),
        (
            lambda: PixelSequences(TensorDataset(IDS, IDS)),
            "dataset must be a name, but is a TensorDataset.*loader of your own",
        ),
        (lambda: PixelSequences([IDS]), "dataset must be a name, but is a list"),
    ],
)
def test_wrong_objects(mistake: Callable[[], Any], words: str):
    with pytest.raises(ValueError, match=words):
        mistake()
