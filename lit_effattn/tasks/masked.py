"""Masked language models: hidden tokens of a sequence, given all others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lit_effattn.checks import at_least, probabilities
from lit_effattn.datamodules.common.tokens import IGNORE, TokenBatch
from lit_effattn.datamodules.text.tokenizers import NumberTokenizer, Tokenizer
from lit_effattn.nn.evaluating import evaluating
from lit_effattn.nn.heads import CategoricalHead, HeadFactory
from lit_effattn.nn.packing import first_positions, packed
from lit_effattn.sequence import SequenceModule, State
from lit_effattn.tasks.auxiliary import mean_of_scored
from lit_effattn.tasks.base import Objective, Task, check_backbone, check_fields, check_targets, check_tokens
from lit_effattn.tasks.metrics import Accuracy, Count, Mean, Perplexity, for_stages
from lit_effattn.tasks.options import FillOptions
from lit_effattn.tasks.predictions import of_positions, write_documents
from lit_effattn.tasks.samples import check_known, write_filled

MASK = "[MASK]"
"""A hidden token in the text of `fill`."""


class MaskedLanguageModel(Task):
    """Predicts hidden tokens of a sequence from all the others (Devlin et al. 2018, section 3.1, BERT).

        loss = mean_{t ∈ M} −ln p(x_t | x̃),  P(t ∈ M) = `mask_rate`

    M is drawn for each position separately. At a position of M, x̃ has the mask token with probability `mask_share`, a
    token drawn uniformly with probability `random_share`, and else x_t itself. Only positions of M are scored.

    A batch is a `TokenBatch`. Its targets are the tokens of the documents; its inputs are not read. A document is a
    row, or several are in a row and do not see each other: `documents: apart` and `whole` of `TextStream`. The mask
    token is the vocabulary's `<start>`, which does not occur in texts.

    In training, M is drawn from torch's random state, which a resumed run continues. In evaluation it depends on `seed`
    and the position in the text of the split (`TokenBatch.offsets`; without them, on the tokens of the row and the
    position in it), and on nothing else: not on the batch size, the workers, the processes, or the length of segments.

    Args:
        backbone: Mixes the sequence, and is not causal.
        vocab_size: Number of tokens. From the command: that of the data.
        tokenizer: The tokenizer, as `Tokenizer.spec`. From the command: that of the data.
        head: Makes the distribution over the tokens. Default: CategoricalHead.
        tie: Whether head and embedding share one matrix.
        mask_rate: Probability that a position is scored.
        mask_share: Probability that a scored position shows the mask token.
        random_share: Probability that it shows a random token.
        seed: Seed of the masks of validation, test and prediction.
        embedding_std: Standard deviation of the initial embedding.
        options: Arguments of `Task`: the optimiser and its schedule, and the weight of auxiliary losses.

    Raises:
        ValueError: If the backbone is causal, or an option is out of range.
    """

    monitor = "val/perplexity"
    fixed_by_data = ("vocab_size", "tokenizer")
    numbering = ("tokenizer",)
    generation = FillOptions

    def __init__(
        self,
        backbone: SequenceModule,
        vocab_size: int,
        tokenizer: str | None = None,
        head: HeadFactory | None = None,
        tie: bool = False,
        mask_rate: float = 0.15,
        mask_share: float = 0.8,
        random_share: float = 0.1,
        seed: int = 0,
        embedding_std: float = 0.02,
        **options: Any,
    ) -> None:
        check_backbone(backbone)
        if backbone.causal:
            raise ValueError("backbone has causal=True, so it can't see what follows a mask; set causal=False")
        super().__init__(**options)
        probabilities(mask_rate=mask_rate)
        at_least(0, seed=seed, mask_share=mask_share, random_share=random_share)
        if mask_rate == 0 or mask_share + random_share > 1:
            raise ValueError(
                f"mask_rate={mask_rate}, mask_share={mask_share}, random_share={random_share}: mask_rate must be above "
                "0, and the two shares at most 1 together"
            )
        self.vocab_size, self.tokenizer = vocab_size, tokenizer
        known = NumberTokenizer(vocab_size) if tokenizer is None else Tokenizer.from_spec(tokenizer)
        self.mask, self._n_random = known.start, known.largest + 1
        self.mask_rate, self.mask_share, self.random_share, self.seed = mask_rate, mask_share, random_share, seed
        self.embedding = nn.Embedding(vocab_size, backbone.d_input)
        nn.init.normal_(self.embedding.weight, std=embedding_std)
        self.backbone = backbone
        self.head = (head or CategoricalHead)(backbone.d_model, vocab_size)
        if tie:
            self.head.tie(self.embedding)
        figures = {"loss": Mean, "perplexity": Perplexity, "accuracy": Accuracy, "tokens": Count}
        self.scores = for_stages(figures)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """Return ln p of every token at every position, (B, N, vocab_size).

        Args:
            tokens: (B, N), with the mask token (`mask`) at hidden positions.
            lengths: (B,), number of valid positions of each row; None: all are valid.
            starts: (B, N), where documents begin, if rows hold several: see `TokenBatch`.
        """
        check_tokens(tokens, self.vocab_size)
        return self.head.log_probs(self._read(tokens, lengths, starts)[0])

    def _read(self, tokens: Tensor, lengths: Tensor | None, starts: Tensor | None) -> tuple[Tensor, State]:
        x = self.embedding(tokens)  # (B, N) -> (B, N, E)
        if starts is None:
            return self.backbone(x, None, lengths)
        return packed(self.backbone, x, starts, None, lengths, keep_state=False)

    def hidden(self, batch: TokenBatch, memory: State | None = None) -> tuple[Tensor, State]:
        """Return the backbone's output (B, N, d_model) for the documents without masks, and its auxiliary losses."""
        return self._read(batch.targets.clamp(min=0), batch.lengths, batch.starts)

    def masked(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return x̃, and the targets, which are `IGNORE` where they are not scored: (B, N) each."""
        tokens = batch.targets
        if self.training:
            chosen, kind, drawn = torch.rand(3, *tokens.shape, dtype=torch.float32, device=tokens.device)
        else:
            offsets = _offsets(tokens) if batch.offsets is None else batch.offsets
            chosen, kind, drawn = (uniform(self.seed, 3 * offsets + i) for i in range(3))
        valid = tokens != IGNORE
        targets = tokens.masked_fill(~valid | (chosen >= self.mask_rate), IGNORE)
        shown = torch.where(kind < self.mask_share, self.mask, (drawn * self._n_random).long())
        shown = torch.where((targets != IGNORE) & (kind < self.mask_share + self.random_share), shown, tokens)
        return shown.masked_fill(~valid, 0), targets

    def objective(self, batch: TokenBatch, memory: State | None = None) -> Objective:
        """Return the mean over the batch's scored positions, in nats, with auxiliary losses. There is no memory."""
        tokens, targets = self.masked(batch)
        hidden, state = self._read(tokens, batch.lengths, batch.starts)
        loss, n_scored = mean_of_scored(self.head.nll(hidden, targets.clamp(min=0)), targets)
        n_sequences = None if batch.starts is None else first_positions(batch.starts, batch.lengths).sum()
        figures = {"train/loss": loss.detach()}
        return self.with_auxiliary(loss, figures, state, n_scored=n_scored, n_sequences=n_sequences)

    def _scored(self, batch: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return which positions are scored, (B, N), and of each the −ln p and whether its likeliest token is right."""
        tokens, targets = self.masked(batch)
        scored = targets != IGNORE
        hidden, targets = self._read(tokens, batch.lengths, batch.starts)[0][scored], targets[scored]
        log_probs = self.head.log_probs(hidden)  # (T, vocab_size)
        return scored, -log_probs.gather(-1, targets[:, None])[:, 0], log_probs.argmax(-1) == targets

    def score(self, stage: str, batch: TokenBatch) -> dict[str, Any]:
        """Update the loss, the perplexity and the accuracy, and in test the number of scored tokens."""
        _, nats, correct = self._scored(batch)
        metrics: dict[str, Any] = dict(self.scores[stage].items())  # type: ignore[operator]
        for name, metric in metrics.items():
            metric.update(correct if name == "accuracy" else nats)
        return metrics if stage == "test" else {name: m for name, m in metrics.items() if name != "tokens"}

    # -------------------------------------------------------------------------------------------------- predictions

    def predict_step(self, batch: TokenBatch) -> dict[str, np.ndarray]:
        """Return −ln p of each scored position, whether it is correct, and where it is: see `of_positions`."""
        self.check_batch(batch)
        scored, nats, correct = self._scored(batch)
        return of_positions(scored, batch.offsets, nats=nats, correct=correct)

    def write_predictions(self, predictions: list[Any], folder: Path) -> str:
        """Write the perplexity and the accuracy of each document: see `Task.write_predictions`."""
        figures = {"perplexity": ("nats", math.exp), "accuracy": ("correct", float)}
        return write_documents(predictions, folder / "predictions.csv", self._trainer, figures)

    # ------------------------------------------------------------------------------------------------------ filling

    write_samples = write_filled

    @torch.no_grad()
    def fill(self, text: str, n: int = 5) -> list[list[tuple[str, float]]]:
        """Return the likeliest tokens at each `[MASK]` of a text, with their probabilities, `n` for each.

        Unless the tokens are bytes or characters, the space before a `[MASK]` is a part of its token.

        Raises:
            ValueError: If the text has no `[MASK]`, or a character that the model does not know, or the model has no
                tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("the model can't read text: it was trained without a tokenizer")
        if MASK not in text:
            raise ValueError(f"--fill {text[:40]!r} has no {MASK}; write it in place of each token to predict")
        tokenizer = Tokenizer.from_spec(self.tokenizer)
        if tokenizer.unit == "token":
            text = text.replace(f" {MASK}", MASK)
        for piece in text.split(MASK):
            check_known(tokenizer, piece)
        pieces = [tokenizer.encode(piece).astype(np.int64) for piece in text.split(MASK)]
        tokens = np.concatenate([part for piece in pieces for part in ([self.mask], piece)][1:])
        with evaluating(self):
            log_probs = self(torch.from_numpy(tokens)[None].to(self.device))[0, torch.from_numpy(tokens == self.mask)]
        values, likeliest = log_probs[:, : self._n_random].exp().topk(min(n, self._n_random))
        return [
            [(tokenizer.decode([token]), p) for token, p in zip(*of_one, strict=True)]
            for of_one in zip(likeliest.tolist(), values.tolist(), strict=True)
        ]

    def check_batch(self, batch: TokenBatch) -> None:
        """Raise ValueError if a token is outside the vocabulary, or padding is scored: see `Task.check_batch`."""
        check_fields(batch, TokenBatch)
        check_targets(batch.targets, batch.lengths, self.vocab_size)


def _offsets(tokens: Tensor) -> Tensor:
    """Return numbers for the positions of tokens (B, N) that follow from the tokens of a row alone, without padding."""
    position = torch.arange(tokens.size(1), device=tokens.device)
    of_row = (tokens.masked_fill(tokens == IGNORE, -1) + 1) * (2 * position + 1)
    return position + 1_000_003 * of_row.sum(1, keepdim=True)


def uniform(seed: int, counters: Tensor) -> Tensor:
    """Return numbers in [0, 1), a pure function of a seed and of integers, on any device: SplitMix64 (Steele 2014)."""
    z = (counters + 1) * -7046029254386353131 + (seed * 0x9E6C63D0676A9A99 + 2**63) % 2**64 - 2**63
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        z = (z ^ ((z >> shift) & (2 ** (64 - shift) - 1))) * factor  # a logical shift
    z = z ^ ((z >> 31) & (2**33 - 1))
    return ((z >> 40) & (2**24 - 1)).float() / 2**24
