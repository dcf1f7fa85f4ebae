"""Pronunciation of words that a lexicon lacks, by a trained sequence-to-sequence model."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch

from lit_effattn.checkpoints.runs import short
from lit_effattn.datamodules.speech.phonemes import Pronouncer
from lit_effattn.tasks.sequence_to_sequence import SequenceToSequence

_WORDS_AT_ONCE = 256


class TrainedPronouncer(Pronouncer):
    """Pronounces words by a `SequenceToSequence` model of spellings and phones, such as that of g2p_linear.yaml.

    Args:
        ckpt_path: The model's checkpoint, or `model:g2p`.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file is not a checkpoint of such a model.
    """

    def __init__(self, ckpt_path: str) -> None:
        self.ckpt_path = ckpt_path

    @cached_property
    def _model(self) -> SequenceToSequence:
        return SequenceToSequence.load_from_checkpoint(self.ckpt_path, map_location="cpu").eval()

    def pronounce(self, words: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the phones of words, without the words whose letters the model does not know.

        A word is read in lower case if the model does not know its capitals.
        """
        spelled = {word: spelling for word in words if (spelling := self._spelling(word)) is not None}
        ordered = sorted(spelled, key=len)  # similar lengths in a batch: less padding
        result = {}
        for begin in range(0, len(ordered), _WORDS_AT_ONCE):
            batch = ordered[begin : begin + _WORDS_AT_ONCE]
            tokens = [self._model.encode(spelled[word]) for word in batch]
            lengths = torch.tensor([len(t) for t in tokens])
            source = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)  # (B, S)
            for word, (text, *_) in zip(batch, self._model.texts(self._model.search(source, lengths)), strict=True):
                if phones := tuple(text.split()):
                    result[word] = phones
        return result

    def _spelling(self, word: str) -> str | None:
        """Return `word`, or it in lower case, if the model knows all letters; None if neither."""
        text = self._model.source_text
        return next((spelling for spelling in (word, word.lower()) if not text.unknown(spelling)), None)

    def __str__(self) -> str:
        return short(self.ckpt_path)
