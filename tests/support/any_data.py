"""Synthetic batches for any task, in the place of its data."""

from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lit_effattn.datamodules import IGNORE, PairBatch, SpeechBatch, TokenBatch
from lit_effattn.datamodules.common.labelled import LabelledBatch

N, VOCABULARY = 24, 300_000

Batch = Literal[
    "PixelModel", "LanguageModel", "MaskedLanguageModel", "SpeechRecognizer", "SequenceToSequence", "SequenceClassifier"
]


class AnyData(pl.LightningDataModule):
    """Two rows of random numbers. What data determine of a model is set, whatever the task.

    Args:
        batch: The task that the batches are for.
        colours: Channels of the images.
        side: Their rows and columns; 2 rows and 4 columns by default.
        vocab_size: Number of tokens; larger than that of any data by default.
        segment_len: As in `TextStream`; the batches are shorter.
    """

    n_levels, unit, tokenizer = 256, "token", None
    n_mels, phones, folded, frame_seconds = 40, ["a", "b"], ["a", "b"], 0.01
    source_tokenizer = target_tokenizer = None
    classes, n_features = ["a", "b"], None

    def __init__(
        self,
        batch: Batch,
        colours: int = 1,
        side: int | None = None,
        vocab_size: int = VOCABULARY,
        segment_len: int | None = None,
    ) -> None:
        super().__init__()
        self.batch = batch
        self.segment_len = segment_len
        self.image_shape = self.shape = (side or 2, side or 4, colours)
        self.vocab_size = self.source_vocab_size = self.target_vocab_size = vocab_size

    def train_dataloader(self) -> Any:
        with torch.random.fork_rng():  # jsonargparse prints data, and so calls this, before it makes the model
            return DataLoader([self._made()], batch_size=None)

    val_dataloader = train_dataloader

    def _made(self) -> Any:
        torch.manual_seed(0)
        lengths = torch.tensor([N, N - 3])
        if self.batch == "PixelModel":
            return torch.randint(self.n_levels, (2, torch.Size(self.image_shape).numel()))
        if self.batch == "SpeechRecognizer":
            features = torch.randn(2, 4 * N, self.n_mels)
            return SpeechBatch(features, 4 * lengths, torch.tensor([[1, 2], [2, 0]]), torch.tensor([2, 1]), ["x", "y"])
        if self.batch == "SequenceClassifier":
            return LabelledBatch(torch.randint(256, (2, torch.Size(self.shape).numel())), torch.tensor([0, 1]))
        x, y = (torch.randint(min(256, self.vocab_size), (2, N)) for _ in range(2))
        if self.batch in ("LanguageModel", "MaskedLanguageModel"):
            return TokenBatch(x, y, fresh=torch.tensor([True, True]))
        targets = y.masked_fill(torch.arange(N) >= lengths[:, None], IGNORE)
        return PairBatch(x, lengths, y, targets, lengths, ["x", "y"], [["x"], ["y"]])
